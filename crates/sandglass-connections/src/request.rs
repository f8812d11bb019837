//! What goes on of a request: what was judged, and nothing else.

use http::header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use sandglass_broker::attach::AmbiguousQuery;
use sandglass_broker::decide::{Asked, Refusal, decide};
use sandglass_broker::{Connection, ConnectionName, Secret};
use sandglass_egress::policy::Service;
use sandglass_types::net::{InvalidMethod, Method};

/// Headers about a connection between two, of which there is another one behind this.
pub(crate) const HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    TRANSFER_ENCODING,
    header::EXPECT,
    HeaderName::from_static("http2-settings"),
];

/// Why a request does not go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Not {
    /// It does not say for which connection it is.
    #[error("the header Host must be NAME.broker.internal, where NAME is that of a connection")]
    Host,
    /// Its method is none.
    #[error(transparent)]
    Method(#[from] InvalidMethod),
    /// The connection does not allow it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// What it asks for can't be told from what would be added.
    #[error(transparent)]
    Query(#[from] AmbiguousQuery),
    /// It could not be sent.
    #[error("the request can't be sent as it is")]
    Unsendable,
}

/// The connection that a request is for, by the one name that it shows.
pub(crate) fn meant(parts: &Parts) -> Result<ConnectionName, Not> {
    let mut hosts = parts.headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err(Not::Host) };
    let host = host.to_str().map_err(|_| Not::Host)?.to_ascii_lowercase();
    if parts.uri.authority().is_some_and(|other| !other.as_str().eq_ignore_ascii_case(&host)) {
        return Err(Not::Host);
    }
    let name = host.strip_suffix(":80").unwrap_or(&host);
    let name = name.strip_suffix('.').unwrap_or(name);
    let name = name.strip_suffix(Service::Connections.name()).and_then(|name| name.strip_suffix('.'));
    name.and_then(|name| name.parse().ok()).ok_or(Not::Host)
}

/// Judges a request, and makes of it what is sent: to the connection's target, with its credential, and without whatever could pass for
/// another one.
pub(crate) fn prepared(connection: &Connection, credential: &Secret, parts: &Parts) -> Result<Parts, Not> {
    let mut headers = without_hop(&parts.headers);
    let method: Method = parts.method.as_str().parse()?;
    let path = parts.uri.path().parse();
    // Of the whole, so that what asks for something else by a header that is left out is refused as well.
    decide(connection, &Asked { method: &method, path: &path, headers: &parts.headers })?;
    let path = path.map_err(Refusal::from)?;
    for name in [HOST, CONTENT_LENGTH] {
        headers.remove(name);
    }
    let query = connection.attach.apply(credential, &mut headers, parts.uri.query())?;
    let target = &connection.target;
    let usual = if target.tls { 443 } else { 80 };
    let host = match target.port.get() {
        port if port == usual => target.host.to_string(),
        port => format!("{}:{port}", target.host),
    };
    let host = HeaderValue::try_from(host).map_err(|_| Not::Unsendable)?;
    headers.insert(HOST, host);
    // What is packed can't be searched for the credential.
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    let asked = match query {
        Some(query) => format!("{path}?{query}"),
        None => path.to_string(),
    };
    let uri: Uri = asked.parse().map_err(|_| Not::Unsendable)?;
    let (mut sent, ()) = http::Request::new(()).into_parts();
    (sent.method, sent.uri, sent.headers) = (parts.method.clone(), uri, headers);
    Ok(sent)
}

/// The headers that are not about the connection alone, as it says itself and as it is by definition (RFC 9110, 7.6.1).
pub(crate) fn without_hop(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    let named = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    for name in named.flat_map(|value| value.split(',')) {
        if let Ok(name) = HeaderName::try_from(name.trim()) {
            kept.remove(name);
        }
    }
    for name in HOP {
        kept.remove(name);
    }
    kept
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;

    pub(crate) fn connection(change: &serde_json::Value) -> Connection {
        let mut written = json!({
            "name": "github", "target": "https://api.test", "methods": ["GET", "POST"], "paths": ["/repos/a"],
            "credential": "bearer",
        });
        for (key, value) in change.as_object().unwrap() {
            written[key] = value.clone();
        }
        let written: sandglass_broker::connection::Written = serde_json::from_value(written).unwrap();
        written.try_into().unwrap()
    }

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = http::Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn the_host_names_one_connection() {
        let named = |headers: &[(&str, &str)]| meant(&parts("/", headers)).map(|name| name.to_string());
        for host in ["github.broker.internal", "GitHub.Broker.Internal:80", "github.broker.internal."] {
            assert_eq!(named(&[("host", host)]).unwrap(), "github", "{host}");
        }
        for host in
            ["broker.internal", ".broker.internal", "a.b.broker.internal", "github", "x.models.internal", ""]
        {
            assert_eq!(named(&[("host", host)]), Err(Not::Host), "{host}");
        }
        let host = "github.broker.internal";
        assert_eq!(named(&[]), Err(Not::Host));
        assert_eq!(named(&[("host", host), ("host", host)]), Err(Not::Host));
        let absolute = |uri: &str| meant(&parts(uri, &[("host", host)])).is_ok();
        assert!(absolute("http://github.broker.internal/"));
        assert!(!absolute("http://gitlab.broker.internal/"));
    }

    #[test]
    fn what_goes_on_is_what_was_judged() {
        let (github, credential) = (connection(&json!({})), "the real one".parse().unwrap());
        let sent = prepared(
            &github,
            &credential,
            &parts(
                "/repos/%61/issues?a=b",
                &[
                    ("host", "github.broker.internal"),
                    ("authorization", "Bearer mine"),
                    ("connection", "close, X-Drop"),
                    ("x-drop", "1"),
                    ("te", "trailers"),
                    ("content-length", "3"),
                    ("accept-encoding", "gzip"),
                    ("accept", "text/plain"),
                    ("cookie", "a=b"),
                ],
            ),
        )
        .unwrap();
        assert_eq!(sent.uri, "/repos/a/issues?a=b");
        let mut headers: Vec<_> =
            sent.headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        headers.sort();
        assert_eq!(
            headers,
            [
                "accept-encoding: identity",
                "accept: text/plain",
                "authorization: Bearer the real one",
                "host: api.test"
            ]
        );
        for (uri, headers) in [
            ("/repos/b", &[][..]),
            ("/repos/a/../b", &[]),
            ("/repos/a", &[("x-http-method-override", "DELETE")]),
            // A header that does not go on is judged as well.
            ("/repos/a", &[("connection", "upgrade"), ("upgrade", "h2c")]),
        ] {
            assert!(
                matches!(prepared(&github, &credential, &parts(uri, headers)), Err(Not::Refused(_))),
                "{uri}"
            );
        }
    }

    #[test]
    fn a_port_of_its_own_is_in_the_host() {
        let other =
            connection(&json!({"target": "http://localhost:8080", "credential": {"query": {"name": "key"}}}));
        let sent =
            prepared(&other, &"the real one".parse().unwrap(), &parts("/repos/a?key=mine&b=1", &[])).unwrap();
        assert_eq!(sent.headers["host"], "localhost:8080");
        assert_eq!(sent.uri, "/repos/a?b=1&key=the%20real%20one");
        assert_eq!(
            prepared(&other, &"the real one".parse().unwrap(), &parts("/repos/a?b;key=1", &[])).unwrap_err(),
            Not::Query(AmbiguousQuery)
        );
    }
}
