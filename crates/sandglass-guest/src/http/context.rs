//! What the layers around a request found out about it, for its handler.

use std::sync::Arc;
use std::time::Duration;

use connectrpc::{ConnectError, RequestContext};

use crate::process::Origin;
use crate::settings::Settings;
use crate::users::User;

/// How often an idle stream says that it lives, unless the client asks otherwise.
const KEEPALIVE: Duration = Duration::from_secs(90);

/// The time limit of a process that is about to start: the deadline that the request came with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StartLimit(pub Duration);

/// Where the request came from; nobody's session unless the connection says otherwise.
pub(crate) fn origin(ctx: &RequestContext) -> Origin {
    ctx.extensions().get::<Origin>().copied().unwrap_or(Origin::Local)
}

/// Whom the request acts as.
///
/// # Errors
/// `unauthenticated` if it names nobody and there is no default.
pub(crate) fn user(ctx: &RequestContext) -> Result<User, ConnectError> {
    ctx.extensions().get::<User>().cloned().ok_or_else(|| ConnectError::unauthenticated("no user specified"))
}

/// The settings that were in force when it came.
///
/// # Errors
/// `unavailable` if there are none, which the layers around do not let through.
pub(crate) fn settings(ctx: &RequestContext) -> Result<Arc<Settings>, ConnectError> {
    ctx.extensions()
        .get::<Arc<Settings>>()
        .cloned()
        .ok_or_else(|| ConnectError::unavailable("not configured"))
}

/// How often an idle stream shall say that it lives, from the client's header in whole seconds.
pub(crate) fn keepalive(ctx: &RequestContext) -> Duration {
    let header = ctx.header("keepalive-ping-interval").and_then(|value| value.to_str().ok());
    let seconds =
        header.and_then(|text| text.parse::<u64>().ok()).filter(|seconds| (1..=3600).contains(seconds));
    seconds.map_or(KEEPALIVE, Duration::from_secs)
}
