//! Who is calling.

use axum::extract::FromRequestParts;
use http::header::AUTHORIZATION;
use http::request::Parts;
use http::{HeaderMap, HeaderName, StatusCode};
use sandglass_store::Identity;
use sandglass_types::TeamId;

use crate::audit::Who;
use crate::error::ApiError;
use crate::router::ApiState;

/// Carries the secret of a key.
pub(crate) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Longest secret that is looked at, in bytes; ours have 44.
const MAX_SECRET_LEN: usize = 128;

/// The team whose valid key came with the request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller(pub(crate) TeamId);

/// The secret of a request: `X-API-Key`, or a bearer token that is an API key.
fn secret(headers: &HeaderMap) -> Result<&str, ApiError> {
    let refused = || ApiError::unauthenticated("invalid API key");
    let mut keys = headers.get_all(API_KEY).iter();
    let secret = match (keys.next(), keys.next()) {
        (Some(key), None) => key.to_str().map_err(|_| refused())?,
        (Some(_), Some(_)) => return Err(refused()),
        (None, _) => {
            let token = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
            let (scheme, token) = token.and_then(|value| value.split_once(' ')).unwrap_or(("", ""));
            if !scheme.eq_ignore_ascii_case("bearer") {
                return Err(ApiError::unauthenticated("missing API key: send it in the X-API-Key header"));
            }
            token
        }
    };
    if secret.starts_with("e2b_") && secret.len() <= MAX_SECRET_LEN { Ok(secret) } else { Err(refused()) }
}

impl FromRequestParts<ApiState> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &ApiState) -> Result<Self, ApiError> {
        Ok(Self(identify(parts, state).await?.team))
    }
}

/// The key of an operator, of this team, came with the request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operator(pub(crate) TeamId);

impl FromRequestParts<ApiState> for Operator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &ApiState) -> Result<Self, ApiError> {
        let identity = identify(parts, state).await?;
        if identity.operator {
            return Ok(Self(identity.team));
        }
        Err(ApiError::forbidden(
            "this is for operators: make a key for one with `sandglass key create --operator`",
        ))
    }
}

/// Whom a valid key that came with the request acts for, and as what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Holder(pub(crate) Identity);

impl FromRequestParts<ApiState> for Holder {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &ApiState) -> Result<Self, ApiError> {
        identify(parts, state).await.map(Self)
    }
}

/// The same team, and the secret of the key itself, for who is told what they sent.
pub(crate) struct Presented {
    pub(crate) team: TeamId,
    pub(crate) secret: String,
}

impl FromRequestParts<ApiState> for Presented {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &ApiState) -> Result<Self, ApiError> {
        let team = identify(parts, state).await?.team;
        Ok(Self { team, secret: secret(&parts.headers)?.to_owned() })
    }
}

/// Refuses a request that says that it is about another team than that of its key. Whether that one is there is not told.
///
/// # Errors
/// 404.
pub(crate) fn own_team(team: TeamId, named: &str) -> Result<(), ApiError> {
    if named.parse() == Ok(team) {
        return Ok(());
    }
    Err(ApiError::new(StatusCode::NOT_FOUND, "the key of this request is of no such team"))
}

/// Whom the key of a request acts for.
pub(crate) async fn identify(parts: &Parts, state: &ApiState) -> Result<Identity, ApiError> {
    let identity = state.backend.authenticate(secret(&parts.headers)?).await?;
    tracing::Span::current().record("team", tracing::field::display(identity.team));
    if let Some(Who(who)) = parts.extensions.get() {
        // A request that is asked twice who it is from says the same.
        let _known = who.set(identity);
    }
    Ok(identity)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(headers: &[(&'static str, &'static str)]) -> Option<String> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        secret(&map).ok().map(str::to_owned)
    }

    #[test]
    fn where_the_key_may_be() {
        assert_eq!(read(&[("x-api-key", "e2b_a")]).as_deref(), Some("e2b_a"));
        assert_eq!(read(&[("authorization", "Bearer e2b_a")]).as_deref(), Some("e2b_a"));
        assert_eq!(read(&[("authorization", "bearer e2b_a")]).as_deref(), Some("e2b_a"));
        let both = [("x-api-key", "e2b_a"), ("authorization", "Bearer e2b_b")];
        assert_eq!(read(&both).as_deref(), Some("e2b_a"));
    }

    #[test]
    fn what_is_no_key() {
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[("x-api-key", "")]), None);
        assert_eq!(read(&[("x-api-key", "sk_e2b_a")]), None);
        assert_eq!(read(&[("x-api-key", "e2b_a"), ("x-api-key", "e2b_b")]), None);
        assert_eq!(read(&[("authorization", "Basic e2b_a")]), None);
        assert_eq!(read(&[("authorization", "e2b_a")]), None);
    }
}
