//! Whether a request may go out through a connection.

use http::{HeaderMap, HeaderName, header};
use sandglass_types::net::{AmbiguousPath, Method, RequestPath};

use crate::Connection;

/// What a sandbox asks for.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// The method.
    pub method: &'a Method,
    /// The path, in its one spelling.
    pub path: &'a Result<RequestPath, AmbiguousPath>,
    /// Its headers.
    pub headers: &'a HeaderMap,
}

/// Why a request does not go out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The method is not one of the connection's.
    #[error("the connection does not allow the method {0}")]
    Method(Method),
    /// The path is not below one of the connection's.
    #[error("the connection does not allow this path")]
    Path,
    /// The path could be read as another one.
    #[error("the path can't be judged: {0}")]
    Ambiguous(#[from] AmbiguousPath),
    /// A header would have another method or path read than those that were judged.
    #[error("the header {0} would change what is asked for, after it was judged")]
    Override(HeaderName),
    /// The request names a second resource, which the connection's paths say nothing of.
    #[error("the request names a second resource by {0}, and the connection does not allow that")]
    Second(&'static str),
    /// What follows would not be requests any more.
    #[error("a connection carries requests, and nothing that they are upgraded to")]
    Upgrade,
}

/// Methods that name a second resource in a header (WebDAV, RFC 4918, RFC 5842; RFC 2068 for links).
const PAIRS: [&str; 7] = ["COPY", "MOVE", "BIND", "REBIND", "LINK", "UNLINK", "MKREDIRECTREF"];

/// Decides whether `asked` may go out. What may is sent as it was judged: to the connection's target, with this method, and with
/// this path in its one spelling.
///
/// # Errors
/// [`Refusal`].
pub fn decide(connection: &Connection, asked: &Asked<'_>) -> Result<(), Refusal> {
    let &Asked { method, path, headers } = asked;
    if !connection.methods.contains(method) {
        return Err(Refusal::Method(method.clone()));
    }
    let path = path.as_ref().map_err(|ambiguous| *ambiguous)?;
    if !connection.paths.iter().any(|prefix| prefix.covers(path)) {
        return Err(Refusal::Path);
    }
    if headers.contains_key(header::UPGRADE) {
        return Err(Refusal::Upgrade);
    }
    if let Some(name) = headers.keys().find(|name| overrides(name.as_str())) {
        return Err(Refusal::Override(name.clone()));
    }
    if connection.second_resource {
        return Ok(());
    }
    second(method, path, headers).map_or(Ok(()), |by| Err(Refusal::Second(by)))
}

/// Headers that frameworks and proxies take for the method, path or host of a request.
fn overrides(name: &str) -> bool {
    let name = name.replace('_', "-");
    name.contains("method-override")
        || matches!(
            name.as_str(),
            "x-http-method"
                | "x-method"
                | "x-original-url"
                | "x-rewrite-url"
                | "x-original-uri"
                | "x-host"
                | "x-original-host"
        )
}

/// By what a request names a second resource, or has several requests in one.
fn second(method: &Method, path: &RequestPath, headers: &HeaderMap) -> Option<&'static str> {
    if PAIRS.contains(&method.as_str()) {
        return Some("its method");
    }
    let names = |name: &HeaderName| {
        let name = name.as_str().replace('_', "-");
        name.contains("copy-source") || name.contains("rename-source") || name == "destination"
    };
    if headers.keys().any(names) {
        return Some("a header");
    }
    let content = headers.get_all(header::CONTENT_TYPE).iter();
    let contains = |value: &http::HeaderValue| {
        let value = value.as_bytes().to_ascii_lowercase();
        let begins = |kind: &str| value.trim_ascii_start().starts_with(kind.as_bytes());
        begins("multipart/mixed") || begins("application/http") || begins("application/graphql")
    };
    if content.into_iter().any(contains) {
        return Some("its content type");
    }
    let path = path.to_string().to_ascii_lowercase();
    let mut segments = path.split('/');
    let holds = |segment: &str| {
        let plain = segment.trim_start_matches("%24").trim_start_matches('$');
        let word = plain.split([':', '.']).next().unwrap_or_default();
        word.ends_with("graphql") || matches!(word, "gql" | "batch")
    };
    segments.any(holds).then_some("its path")
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use serde_json::json;

    use super::*;
    use crate::connection::tests::connection;

    fn asked(
        connection: &Connection,
        method: &str,
        path: &str,
        header: Option<(&str, &str)>,
    ) -> Result<(), Refusal> {
        let mut headers = HeaderMap::new();
        if let Some((name, value)) = header {
            headers.insert(HeaderName::try_from(name).unwrap(), HeaderValue::try_from(value).unwrap());
        }
        let (method, path) = (method.parse().unwrap(), path.parse());
        decide(connection, &Asked { method: &method, path: &path, headers: &headers })
    }

    #[test]
    fn only_what_the_connection_says_goes_out() {
        let github = connection(&json!({})).unwrap();
        for (method, path) in [
            ("GET", "/user"),
            ("POST", "/repos/a/issues?x=../y"),
            ("GET", "/repos/%61"),
            ("GET", "/repos/a/"),
        ] {
            assert_eq!(asked(&github, method, path, None), Ok(()), "{method} {path}");
        }
        for (method, path) in [
            ("DELETE", "/user"),
            ("HEAD", "/user"),
            ("GET", "/repos/b"),
            ("GET", "/repos/ab"),
            ("GET", "/"),
            ("GET", "/repos"),
            ("GET", "/repos/a/../b"),
            ("GET", "/repos/a/%2e%2e/b"),
            ("GET", "/repos/a/..;/b"),
            ("GET", "/repos/a%2f..%2fb"),
            ("GET", "//repos/a"),
            ("GET", "/repos/a//b"),
            ("GET", "/Repos/a"),
            ("GET", "/repos/a\\..\\b"),
        ] {
            assert!(asked(&github, method, path, None).is_err(), "{method} {path}");
        }
    }

    #[test]
    fn nothing_changes_what_was_judged() {
        let github = connection(&json!({"second_resource": true})).unwrap();
        for header in [
            "x-http-method-override",
            "X-HTTP-Method",
            "x_method_override",
            "x-original-url",
            "x-rewrite-url",
            "x-original-host",
            "upgrade",
        ] {
            let refused = asked(&github, "GET", "/user", Some((header, "DELETE")));
            assert!(matches!(refused, Err(Refusal::Override(_) | Refusal::Upgrade)), "{header}: {refused:?}");
        }
        assert_eq!(asked(&github, "GET", "/user", Some(("x-github-api-version", "1"))), Ok(()));
    }

    #[test]
    fn a_second_resource_is_named_only_where_that_is_allowed() {
        let all = |second: bool| {
            let methods = ["GET", "POST", "PUT", "COPY", "MOVE"];
            connection(&json!({"paths": ["/"], "methods": methods, "second_resource": second})).unwrap()
        };
        let (strict, lax) = (all(false), all(true));
        for (method, path, header) in [
            ("PUT", "/b/o", Some(("x-amz-copy-source", "/other/o"))),
            ("PUT", "/b/o", Some(("x-amz-copy-source-range", "0-1"))),
            ("PUT", "/b/o", Some(("x-goog-copy-source", "/other/o"))),
            ("PUT", "/b/o", Some(("x-ms-copy-source", "https://a.test"))),
            ("PUT", "/b/o", Some(("x-ms-rename-source", "/a"))),
            ("PUT", "/b/o", Some(("destination", "/a"))),
            ("COPY", "/b/o", None),
            ("MOVE", "/b/o", None),
            ("POST", "/graphql", None),
            ("POST", "/api/GraphQL", None),
            ("POST", "/v2/graphql.json", None),
            ("POST", "/gql", None),
            ("POST", "/v1/$batch", None),
            ("POST", "/v1/%24batch", None),
            ("POST", "/batch/v1", None),
            ("POST", "/v1", Some(("content-type", "multipart/mixed; boundary=a"))),
            ("POST", "/v1", Some(("content-type", "application/graphql"))),
        ] {
            let refused = asked(&strict, method, path, header);
            assert!(matches!(refused, Err(Refusal::Second(_))), "{method} {path} {header:?}: {refused:?}");
            assert_eq!(asked(&lax, method, path, header), Ok(()), "{method} {path} {header:?}");
        }
        assert_eq!(asked(&strict, "PUT", "/b/o", Some(("content-type", "multipart/form-data"))), Ok(()));
        assert_eq!(asked(&strict, "GET", "/batches/1", None), Ok(()));
    }
}
