//! Who may call, and as whom.

use std::sync::Arc;

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_STANDARD_NO_PAD};
use connectrpc::ConnectError;
use http::{HeaderMap, StatusCode, header};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use super::reply::error;
use crate::agent::Agent;
use crate::settings::Settings;
use crate::users::User;

/// The header that carries the access token.
const ACCESS_TOKEN: &str = "x-access-token";

/// What E2B's daemon answers without a valid token; clients' tests compare it.
const UNAUTHORIZED: &str =
    "unauthorized access, please provide a valid access token or method signing if supported";

/// Upper bound for a user name, in bytes.
const MAX_USER_NAME: usize = 256;

fn given_token(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get(ACCESS_TOKEN).map(header::HeaderValue::as_bytes)
}

/// Lets a request through if it carries the access token, or none is wanted.
pub(crate) async fn require_token(request: Request, next: Next) -> Response {
    let allowed = request
        .extensions()
        .get::<Arc<Settings>>()
        .is_some_and(|settings| settings.allows(given_token(request.headers())));
    if allowed { next.run(request).await } else { error(StatusCode::UNAUTHORIZED, UNAUTHORIZED) }
}

/// The user name of basic authentication; its password means nothing.
///
/// # Errors
/// The header is not of that kind.
fn basic_user(headers: &HeaderMap) -> Result<Option<String>, ()> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let text = value.to_str().map_err(|_| ())?;
    let (scheme, encoded) = text.split_once(' ').ok_or(())?;
    if !scheme.eq_ignore_ascii_case("basic") {
        // Some other credential, which was meant for a proxy on the way.
        return Ok(None);
    }
    let decoded = BASE64_STANDARD.decode(encoded.trim()).map_err(|_| ())?;
    let decoded = String::from_utf8(decoded).map_err(|_| ())?;
    let name = decoded.split_once(':').map_or(decoded.as_str(), |(name, _password)| name);
    Ok(Some(name.to_owned()).filter(|name| !name.is_empty()))
}

/// A user of the sandbox by name.
///
/// # Errors
/// What E2B's daemon says of an unknown one.
pub(crate) fn look_up(agent: &Agent, name: &str) -> Result<User, String> {
    let unknown = || {
        let name: String = name.chars().take(MAX_USER_NAME).collect();
        format!("invalid username: '{name}'")
    };
    if name.len() > MAX_USER_NAME {
        return Err(unknown());
    }
    if let Some(user) = &agent.sole_user {
        return Ok(user.clone());
    }
    agent.users().ok().and_then(|users| users.by_name(name)).ok_or_else(unknown)
}

/// The user that a call acts as, if it names one or there is a default.
///
/// # Errors
/// `unauthenticated`.
pub(crate) fn rpc_user(agent: &Agent, request: &Request) -> Result<Option<User>, ConnectError> {
    let refuse = |message: String| ConnectError::unauthenticated(message);
    let named = basic_user(request.headers()).map_err(|()| refuse("invalid basic authentication".into()))?;
    let settings = request.extensions().get::<Arc<Settings>>();
    let default = || settings.and_then(|settings| settings.default_user()).map(Into::into);
    match named.or_else(default) {
        None => Ok(None),
        Some(name) => look_up(agent, &name).map(Some).map_err(refuse),
    }
}

/// The signed part of a file's address, in E2B's form.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Signed<'a> {
    /// As given in the query; empty if absent.
    pub path: &'a str,
    /// `read` or `write`.
    pub operation: &'a str,
    /// As given in the query; empty if absent.
    pub user: &'a str,
    /// The signature, if there is one.
    pub signature: Option<&'a str>,
    /// When it expires, in seconds since the Unix epoch.
    pub expiration: Option<i64>,
}

fn sign(signed: &Signed<'_>, token: &str) -> String {
    let mut text = format!("{}:{}:{}:{token}", signed.path, signed.operation, signed.user);
    if let Some(expiration) = signed.expiration {
        text.push(':');
        text.push_str(&expiration.to_string());
    }
    format!("v1_{}", BASE64_STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes())))
}

/// Whether a request for a file is allowed, by token or by signature. `now` is in seconds since the Unix epoch.
///
/// # Errors
/// The words of E2B's daemon, for a 401.
pub(crate) fn check_file_access(
    settings: &Settings,
    headers: &HeaderMap,
    signed: &Signed<'_>,
    now: i64,
) -> Result<(), &'static str> {
    let Some(token) = settings.token() else { return Ok(()) };
    if let Some(given) = given_token(headers) {
        return if settings.allows(Some(given)) { Ok(()) } else { Err(UNAUTHORIZED) };
    }
    let signature = signed.signature.ok_or("missing signature query parameter")?;
    let matches: bool = sign(signed, token).as_bytes().ct_eq(signature.as_bytes()).into();
    if !matches {
        return Err("invalid signature");
    }
    if signed.expiration.is_some_and(|expiration| expiration < now) {
        return Err("signature is already expired");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::configure;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::HeaderName::from_static(name), value.parse().unwrap())])
    }

    #[test]
    fn the_user_comes_from_basic_authentication() {
        let basic = |text: &str| basic_user(&headers("authorization", text));
        assert_eq!(basic("Basic dXNlcjo="), Ok(Some("user".into())));
        assert_eq!(basic("basic cm9vdDpwYXNz"), Ok(Some("root".into())));
        assert_eq!(basic("Basic Og=="), Ok(None));
        assert_eq!(basic("Bearer x"), Ok(None));
        assert_eq!(basic("Basic !"), Err(()));
        assert_eq!(basic("Basic"), Err(()));
        assert_eq!(basic_user(&HeaderMap::new()), Ok(None));
    }

    #[test]
    fn files_open_by_token_or_signature() {
        let settings = Settings::new(configure(Some("secret")));
        let check =
            |headers: &HeaderMap, signed: &Signed<'_>| check_file_access(&settings, headers, signed, 1000);
        let mut signed =
            Signed { path: "a b", operation: "read", user: "", signature: None, expiration: Some(2000) };
        assert_eq!(check(&headers("x-access-token", "secret"), &signed), Ok(()));
        assert_eq!(check(&headers("x-access-token", "wrong"), &signed), Err(UNAUTHORIZED));
        assert_eq!(check(&HeaderMap::new(), &signed), Err("missing signature query parameter"));
        // Computed with the client's own code: sha256("a b:read::secret:2000").
        let signature = sign(&signed, "secret");
        signed.signature = Some(&signature);
        assert_eq!(check(&HeaderMap::new(), &signed), Ok(()));
        let write = Signed { operation: "write", ..signed };
        assert_eq!(check(&HeaderMap::new(), &write), Err("invalid signature"));
        let late = Signed { expiration: Some(999), ..signed };
        assert_eq!(check(&HeaderMap::new(), &late), Err("invalid signature"), "the expiration is signed too");
        let expired = sign(&Signed { expiration: Some(999), ..signed }, "secret");
        let late = Signed { expiration: Some(999), signature: Some(&expired), ..signed };
        assert_eq!(check(&HeaderMap::new(), &late), Err("signature is already expired"));
    }

    #[test]
    fn without_a_token_everything_is_open() {
        let settings = Settings::new(configure(None));
        let signed = Signed { path: "", operation: "read", user: "", signature: None, expiration: None };
        assert_eq!(check_file_access(&settings, &headers("x-access-token", "x"), &signed, 0), Ok(()));
    }
}
