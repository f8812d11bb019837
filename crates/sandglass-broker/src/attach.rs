//! How a credential is shown to a service: what a sandbox sent in its place is taken out first, in whatever spelling.

use data_encoding::BASE64;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

use crate::Secret;

/// What stands for itself in a query (RFC 3986, 2.3).
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// How a credential is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attach {
    /// `Authorization: Bearer …`.
    Bearer,
    /// `Authorization: Basic …`, for this user.
    Basic {
        /// The user's name, without a colon.
        user: String,
    },
    /// A header of this name.
    Header {
        /// The header, which carries nothing else of a request.
        name: HeaderName,
        /// What stands before the credential.
        prefix: String,
    },
    /// A parameter of the query of this name.
    Query {
        /// The parameter, as it reads when it is decoded.
        name: String,
    },
}

/// A query in which a parameter of the sandbox's can't be told from the credential's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the query has a part that servers read in more than one way")]
pub struct AmbiguousQuery;

/// Headers that carry the request itself, or that the way to the service writes.
const CARRIES: [HeaderName; 9] = [
    header::HOST,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::CONNECTION,
    header::UPGRADE,
    header::TE,
    header::TRAILER,
    header::EXPECT,
    header::ACCEPT_ENCODING,
];

/// Headers by which a sandbox would show who it is itself, or pretend that somebody else asks: none of them goes on.
const SPEAKS: [HeaderName; 10] = [
    header::AUTHORIZATION,
    header::PROXY_AUTHORIZATION,
    header::PROXY_AUTHENTICATE,
    header::COOKIE,
    header::FORWARDED,
    header::VIA,
    HeaderName::from_static("x-real-ip"),
    // A piece of an answer, or one in another charset, could have a credential cut or spelled in a way in which it is not looked for.
    header::RANGE,
    header::IF_RANGE,
    header::ACCEPT_CHARSET,
];

/// Whether a header is no place for a credential.
pub(crate) fn carries_the_request(name: &HeaderName) -> bool {
    CARRIES.contains(name)
        || name == HeaderName::from_static("keep-alive")
        || name.as_str().starts_with("proxy-")
}

/// Some servers hand headers to programs with `_` for `-`, and the one then stands for the other.
fn same_header(one: &str, other: &str) -> bool {
    let plain = |name: &str| name.replace('_', "-").to_ascii_lowercase();
    plain(one) == plain(other)
}

impl Attach {
    /// Takes out of a request all that could pass for a credential, and puts the credential in. Returns the query to send.
    ///
    /// # Errors
    /// The credential is a parameter, and the query can't be read in one way.
    pub fn apply(
        &self,
        secret: &Secret,
        headers: &mut HeaderMap,
        query: Option<&str>,
    ) -> Result<Option<String>, AmbiguousQuery> {
        let own = match self {
            Self::Bearer | Self::Basic { .. } => Some(header::AUTHORIZATION),
            Self::Header { name, .. } => Some(name.clone()),
            Self::Query { .. } => None,
        };
        strip(headers, own.as_ref());
        let value = match self {
            Self::Bearer => Some(format!("Bearer {}", secret.expose())),
            Self::Basic { user } => {
                Some(format!("Basic {}", BASE64.encode(format!("{user}:{}", secret.expose()).as_bytes())))
            }
            Self::Header { prefix, .. } => Some(format!("{prefix}{}", secret.expose())),
            Self::Query { .. } => None,
        };
        // All of it is printable ASCII, so it is a value.
        if let (Some(name), Some(value)) = (own, value)
            && let Ok(mut value) = HeaderValue::try_from(value)
        {
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        match self {
            Self::Query { name } => with_parameter(query, name, secret).map(Some),
            _ => Ok(query.map(str::to_owned)),
        }
    }
}

/// Takes out what could pass for a credential, and `own` in every spelling.
fn strip(headers: &mut HeaderMap, own: Option<&HeaderName>) {
    let doomed: Vec<HeaderName> = headers
        .keys()
        .filter(|name| {
            let name = name.as_str();
            SPEAKS.iter().chain(own).any(|speaks| same_header(name, speaks.as_str()))
                || name.replace('_', "-").starts_with("x-forwarded")
        })
        .cloned()
        .collect();
    for name in doomed {
        headers.remove(name);
    }
}

fn with_parameter(query: Option<&str>, name: &str, secret: &Secret) -> Result<String, AmbiguousQuery> {
    let mut kept = Vec::new();
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        // Some servers part parameters here as well.
        if pair.contains(';') {
            return Err(AmbiguousQuery);
        }
        let written = pair.split('=').next().unwrap_or_default().replace('+', " ");
        let decoded = percent_decode_str(&written).decode_utf8().map_err(|_| AmbiguousQuery)?;
        if decoded.contains(['%', '\0']) {
            return Err(AmbiguousQuery);
        }
        // Frameworks read "key[]" and "key[0]" as "key", and cut blanks at the ends.
        let plain = decoded.split('[').next().unwrap_or_default().trim();
        if !plain.eq_ignore_ascii_case(name) {
            kept.push(pair.to_owned());
        }
    }
    let encode = |text: &str| utf8_percent_encode(text, RESERVED).to_string();
    kept.push(format!("{}={}", encode(name), encode(secret.expose())));
    Ok(kept.join("&"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret() -> Secret {
        "the+real=one&only".parse().unwrap()
    }

    fn hostile() -> HeaderMap {
        let mut headers = HeaderMap::new();
        for name in [
            "authorization",
            "Authorization",
            "proxy-authorization",
            "cookie",
            "x-api-key",
            "X_Api_Key",
            "x_api-key",
            "forwarded",
            "x-forwarded-for",
            "x_forwarded_host",
            "via",
            "range",
            "if-range",
            "accept-charset",
            "x-real-ip",
        ] {
            headers
                .append(HeaderName::try_from(name).unwrap(), HeaderValue::from_static("the sandbox's own"));
        }
        headers.insert("accept", HeaderValue::from_static("text/plain"));
        headers
    }

    #[test]
    fn what_a_sandbox_sent_in_its_place_is_taken_out_in_every_spelling() {
        let key = Attach::Header { name: HeaderName::from_static("x-api-key"), prefix: "key ".into() };
        for (attach, name, value) in [
            (Attach::Bearer, "authorization", "Bearer the+real=one&only"),
            (Attach::Basic { user: "me".into() }, "authorization", "Basic bWU6dGhlK3JlYWw9b25lJm9ubHk="),
            (key, "x-api-key", "key the+real=one&only"),
        ] {
            let mut headers = hostile();
            assert_eq!(attach.apply(&secret(), &mut headers, Some("a=b")).unwrap().unwrap(), "a=b");
            let set: Vec<_> = headers.get_all(name).iter().collect();
            assert_eq!(set, [value], "{attach:?}");
            assert!(headers.contains_key("accept"), "the control");
            assert!(headers[name].is_sensitive());
            headers.remove(name);
            headers.remove("x-api-key");
            headers.remove("x_api_key");
            headers.remove("x_api-key");
            assert_eq!(headers.len(), 1, "{headers:?}");
        }
    }

    #[test]
    fn a_parameter_is_the_only_one_of_its_name() {
        let attach = Attach::Query { name: "api_key".into() };
        let applied = |query: Option<&str>| {
            let mut headers = hostile();
            let query = attach.apply(&secret(), &mut headers, query);
            assert!(!headers.contains_key("authorization"));
            query.map(Option::unwrap)
        };
        let ours = "api_key=the%2Breal%3Done%26only";
        assert_eq!(applied(None).unwrap(), ours);
        assert_eq!(applied(Some("a=1&b&c=%20")).unwrap(), format!("a=1&b&c=%20&{ours}"));
        for own in [
            "api_key=x",
            "API_KEY=x",
            "api%5Fkey=x",
            "api_key",
            "api_key[]=x",
            "api_key%5B0%5D=x",
            "+api_key=x",
        ] {
            assert_eq!(applied(Some(&format!("a=1&{own}"))).unwrap(), format!("a=1&{ours}"), "{own}");
        }
        for unclear in ["a=1;api_key=x", "api%255Fkey=x", "api_key%00=x", "%ff=x"] {
            assert_eq!(applied(Some(unclear)), Err(AmbiguousQuery), "{unclear}");
        }
    }
}
