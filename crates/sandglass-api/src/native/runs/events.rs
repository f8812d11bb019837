//! What happens to a run, as it happens.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse as _, Response};
use futures_util::stream;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderName};
use sandglass_store::RunEventRow;
use sandglass_types::{Error, RunId, TeamId};
use serde::Serialize;
use utoipa::ToSchema;

use super::OfRun;
use super::wire::RunEventView;
use crate::auth::Presented;
use crate::backend::Backend;
use crate::error::{ApiError, ErrorBody};
use crate::query::Query;
use crate::router::ApiState;

/// Where a client says which event it had last.
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// How long a stream says nothing at most.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// The longest that a client may wait for an event, in seconds.
const MAX_WAIT: i64 = 60;

/// Events of a run.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct EventsView {
    events: Vec<RunEventView>,
    /// Whether nothing follows.
    over: bool,
}

#[utoipa::path(get, path = "/v1/runs/{id}/events", tag = "native", params(("id" = String, Path),
    ("after" = Option<u64>, Query, description = "those with higher numbers than this; all if absent"),
    ("wait" = Option<u32>, Query, description = "for how many seconds to wait for one if there is none yet: 0 (default) to 60"),
    ("Last-Event-ID" = Option<u64>, Header, description = "the same as `after`, which is less")), responses(
    (status = 200, description = "At most 1000 of them, oldest first. With `Accept: text/event-stream`, a stream of all of them as \
     they happen, which ends after the last", body = EventsView),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
pub(super) async fn run_events(
    State(state): State<ApiState>,
    who: Presented,
    OfRun(id): OfRun,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let after = query.number("after", "the number of an event")?.unwrap_or(0);
    let wait = query.number("wait", "0 to 60")?.unwrap_or(0);
    if wait > MAX_WAIT {
        return Err(ApiError::invalid("wait must be 0 to 60"));
    }
    let last = headers.get(LAST_EVENT_ID).and_then(|value| value.to_str().ok()?.parse::<i64>().ok());
    let after = u64::try_from(after.max(last.unwrap_or(0))).unwrap_or(0);
    let accepts = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or("");
    if !accepts.contains("text/event-stream") {
        let wait = Duration::from_secs(u64::try_from(wait).unwrap_or(0));
        let (rows, over) = state.backend.run_events(who.team, &id, after, wait).await?;
        let events = rows.into_iter().map(|row| RunEventView::new(&id, row)).collect();
        return Ok(axum::Json(EventsView { events, over }).into_response());
    }
    // Before the stream begins, so that it is refused in words.
    state.backend.run_events(who.team, &id, after, Duration::ZERO).await?;
    let following = Following { backend: Arc::clone(&state.backend), who, id, after, over: false };
    let body = Body::from_stream(stream::try_unfold(following, |mut following| async move {
        if following.over {
            return Ok::<_, Error>(None);
        }
        let text = following.next().await?;
        Ok(Some((text, following)))
    }));
    Ok(([(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")], body).into_response())
}

/// A stream of events.
struct Following {
    backend: Arc<dyn Backend>,
    who: Presented,
    id: RunId,
    /// The last one that was told.
    after: u64,
    over: bool,
}

impl Following {
    /// The next text of the stream: some events, or a sign of life.
    async fn next(&mut self) -> Result<String, Error> {
        // A key that was ended since hears no more.
        let team: TeamId = self.backend.authenticate(&self.who.secret).await?.team;
        let (rows, over) = self.backend.run_events(team, &self.id, self.after, HEARTBEAT).await?;
        self.over = over;
        let mut text = String::new();
        for row in rows {
            self.after = row.seq;
            text += &told(&self.id, row);
        }
        if text.is_empty() {
            text.push_str(": nothing new\n\n");
        }
        Ok(text)
    }
}

/// An event as a stream has it.
fn told(id: &RunId, row: RunEventRow) -> String {
    let view = RunEventView::new(id, row);
    // One line: text in JSON has none of its own.
    let data = serde_json::to_string(&view).unwrap_or_default();
    format!("id: {}\ndata: {data}\n\n", view.seq)
}
