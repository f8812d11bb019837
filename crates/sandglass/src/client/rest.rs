//! The REST face, as much of it as the command line needs.

use std::error::Error as StdError;
use std::net::IpAddr;

use anyhow::{Context as _, bail};
use connectrpc::client::{ClientBody, ServiceTransport};
use http::{Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

use super::transport::{Connector, connector};
use super::trust;
use crate::cli::Remote;

/// The largest answer that is read, in bytes: a page of sandboxes with all their labels.
const MAX_ANSWER: usize = 16 * 1024 * 1024;

/// A server, and who asks.
pub(crate) struct Api {
    connector: Connector,
    http: Client<Connector, Full<Bytes>>,
    base: String,
    key: String,
}

/// What is needed to reach a sandbox's guest API.
#[derive(Debug, Clone)]
pub(crate) struct Reach {
    pub(crate) id: String,
    pub(crate) token: Option<String>,
    /// Whether the server says that nothing isolates it.
    pub(crate) unsealed: bool,
}

/// What a server answered.
struct Answer {
    /// The next page's token, if there is one.
    next: Option<String>,
    /// Whether the server says that nothing isolates its sandboxes.
    unsealed: bool,
    body: Value,
}

impl Api {
    pub(crate) fn new(remote: &Remote) -> anyhow::Result<Self> {
        let base = base(remote.url.as_deref(), remote.domain.as_deref());
        let uri: Uri = base.parse().context("the server's address is no URL")?;
        let tls = match uri.scheme_str() {
            Some("https") => {
                let system = std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty());
                Some(trust::config(remote.ca.as_deref(), system.map(Into::into))?)
            }
            Some("http") => None,
            _ => bail!("{base}: the server's address begins with https:// or http://"),
        };
        let key = remote.api_key.clone().context(
            "no API key: set E2B_API_KEY to the one that the server printed at its first start, or make another with \
             `sandglass key create`",
        )?;
        let connector = connector(tls)?;
        if uri.scheme_str() == Some("http") && !is_here(uri.host().unwrap_or_default()) {
            eprintln!(
                "sandglass: warning: what is sent to {base} can be read on the way, the key included: use https://"
            );
        }
        let http = Client::builder(TokioExecutor::new()).build(connector.clone());
        Ok(Self { connector, http, base, key })
    }

    /// The way to the guest APIs of the server's sandboxes.
    pub(crate) fn connect(&self) -> ServiceTransport<Client<Connector, ClientBody>> {
        ServiceTransport::new(Client::builder(TokioExecutor::new()).build(self.connector.clone()))
    }

    /// The address of the server.
    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    pub(crate) async fn create(&self, template: &str, timeout: u64) -> anyhow::Result<Reach> {
        self.create_as(&json!({ "templateID": template, "timeout": timeout })).await
    }

    /// Makes a sandbox as `body` says.
    pub(crate) async fn create_as(&self, body: &Value) -> anyhow::Result<Reach> {
        let answer = self.call(Method::POST, "/v2/sandboxes", Some(body)).await?;
        Reach::read(&answer.body, answer.unsealed)
    }

    /// How to reach a sandbox that runs.
    pub(crate) async fn reach(&self, id: &str) -> anyhow::Result<Reach> {
        let answer = self.call(Method::GET, &format!("/sandboxes/{id}"), None).await?;
        if answer.body["state"] == "paused" {
            bail!("the sandbox is paused; let it run with `sandglass sandbox resume {id}`");
        }
        Reach::read(&answer.body, answer.unsealed)
    }

    /// Pauses a sandbox, with its memory or with its files alone.
    pub(crate) async fn pause(&self, id: &str, memory: bool) -> anyhow::Result<()> {
        let body = json!({ "memory": memory });
        self.call(Method::POST, &format!("/sandboxes/{id}/pause"), Some(&body)).await.map(|_| ())
    }

    /// Lets a paused sandbox run again, with its memory if that was kept, or without.
    pub(crate) async fn resume(&self, id: &str, timeout: u64, memory: bool) -> anyhow::Result<()> {
        let body = json!({ "timeout": timeout, "memory": memory });
        self.call(Method::POST, &format!("/sandboxes/{id}/resume"), Some(&body)).await.map(|_| ())
    }

    pub(crate) async fn info(&self, id: &str) -> anyhow::Result<Value> {
        Ok(self.call(Method::GET, &format!("/v1/sandboxes/{id}"), None).await?.body)
    }

    /// Whether a sandbox may connect to `target`, a host with or without a port.
    pub(crate) async fn explain(&self, id: &str, target: &str) -> anyhow::Result<Value> {
        let (host, port) = split(target);
        let port = port.map(|port| format!("&port={port}")).unwrap_or_default();
        let path = format!("/v1/sandboxes/{id}/egress/explain?host={}{port}", escaped(host));
        Ok(self.call(Method::GET, &path, None).await?.body)
    }

    /// The last receipts of a sandbox, oldest first.
    pub(crate) async fn receipts(&self, id: &str, limit: u16) -> anyhow::Result<Vec<Value>> {
        let path = format!("/v1/sandboxes/{id}/egress?limit={limit}");
        match self.call(Method::GET, &path, None).await?.body {
            Value::Array(receipts) => Ok(receipts),
            _ => bail!("the server's answer is no list"),
        }
    }

    /// Puts another policy in force, as E2B's `network` says it.
    pub(crate) async fn set_network(&self, id: &str, network: &Value) -> anyhow::Result<()> {
        self.call(Method::PUT, &format!("/sandboxes/{id}/network"), Some(network)).await.map(|_| ())
    }

    pub(crate) async fn kill(&self, id: &str) -> anyhow::Result<()> {
        self.call(Method::DELETE, &format!("/sandboxes/{id}"), None).await.map(|_| ())
    }

    /// Writes a sandbox to a snapshot.
    pub(crate) async fn snapshot(&self, id: &str, name: Option<&str>) -> anyhow::Result<Value> {
        let body = name.map_or_else(|| json!({}), |name| json!({ "name": name }));
        Ok(self.call(Method::POST, &format!("/sandboxes/{id}/snapshots"), Some(&body)).await?.body)
    }

    /// Copies a sandbox. Each copy has an answer of its own.
    pub(crate) async fn fork(&self, id: &str, count: u16, timeout: u64) -> anyhow::Result<Vec<Value>> {
        let body = json!({ "count": count, "timeout": timeout });
        match self.call(Method::POST, &format!("/sandboxes/{id}/fork"), Some(&body)).await?.body {
            Value::Array(made) => Ok(made),
            _ => bail!("the server's answer is no list"),
        }
    }

    pub(crate) async fn snapshots(&self) -> anyhow::Result<Vec<Value>> {
        self.pages("/v1/snapshots", "").await
    }

    /// A snapshot, by its id or name.
    pub(crate) async fn show_snapshot(&self, snapshot: &str) -> anyhow::Result<Value> {
        Ok(self.call(Method::GET, &format!("/v1/snapshots/{}", escaped(snapshot)), None).await?.body)
    }

    /// Deletes a snapshot, by its id or name.
    pub(crate) async fn delete_snapshot(&self, snapshot: &str) -> anyhow::Result<()> {
        self.call(Method::DELETE, &format!("/templates/{}", escaped(snapshot)), None).await.map(|_| ())
    }

    /// All connections that sandboxes of the team may be granted.
    pub(crate) async fn connections(&self) -> anyhow::Result<Vec<Value>> {
        match self.call(Method::GET, "/v1/connections", None).await?.body {
            Value::Array(connections) => Ok(connections),
            _ => bail!("the server's answer is no list"),
        }
    }

    /// Makes or changes a connection.
    pub(crate) async fn put_connection(&self, name: &str, body: &Value) -> anyhow::Result<Value> {
        Ok(self.call(Method::PUT, &format!("/v1/connections/{}", escaped(name)), Some(body)).await?.body)
    }

    /// Deletes a connection.
    pub(crate) async fn delete_connection(&self, name: &str) -> anyhow::Result<()> {
        self.call(Method::DELETE, &format!("/v1/connections/{}", escaped(name)), None).await.map(|_| ())
    }

    /// Creates a volume.
    pub(crate) async fn create_volume(&self, name: &str, size: Option<u32>) -> anyhow::Result<Value> {
        let body = json!({ "name": name, "sizeMB": size });
        Ok(self.call(Method::POST, "/volumes", Some(&body)).await?.body)
    }

    pub(crate) async fn volumes(&self) -> anyhow::Result<Vec<Value>> {
        match self.call(Method::GET, "/volumes", None).await?.body {
            Value::Array(volumes) => Ok(volumes),
            _ => bail!("the server's answer is no list"),
        }
    }

    /// Deletes a volume, by its id.
    pub(crate) async fn delete_volume(&self, id: &str) -> anyhow::Result<()> {
        self.call(Method::DELETE, &format!("/volumes/{}", escaped(id)), None).await.map(|_| ())
    }

    /// Makes the sandbox in which a template is built.
    pub(crate) async fn begin_template(&self, definition: &Value) -> anyhow::Result<Reach> {
        let answer = self.call(Method::POST, "/v1/templates/builds", Some(definition)).await?;
        Reach::read(&answer.body, answer.unsealed)
    }

    /// Makes the template of the sandbox in which it was set up.
    pub(crate) async fn finish_template(&self, sandbox: &Reach, definition: &Value) -> anyhow::Result<Value> {
        let body = json!({ "sandbox": sandbox.id, "template": definition });
        Ok(self.call(Method::POST, "/v1/templates", Some(&body)).await?.body)
    }

    pub(crate) async fn templates(&self) -> anyhow::Result<Value> {
        Ok(self.call(Method::GET, "/v1/templates", None).await?.body)
    }

    pub(crate) async fn template(&self, name: &str) -> anyhow::Result<Value> {
        Ok(self.call(Method::GET, &format!("/v1/templates/{}", escaped(name)), None).await?.body)
    }

    pub(crate) async fn delete_template(&self, name: &str) -> anyhow::Result<()> {
        self.call(Method::DELETE, &format!("/v1/templates/{}", escaped(name)), None).await.map(|_| ())
    }

    /// Writes a file in a sandbox, as root.
    pub(crate) async fn upload(&self, sandbox: &Reach, path: &str, content: Vec<u8>) -> anyhow::Result<()> {
        let mut request = Request::post(format!("{}/files?path={}&username=root", self.base, escaped(path)))
            .header("e2b-sandbox-id", &sandbox.id)
            .header("e2b-sandbox-port", super::exec::GUEST_API_PORT)
            .header("content-type", "application/octet-stream");
        if let Some(token) = &sandbox.token {
            request = request.header("x-access-token", token);
        }
        self.send(request.body(Full::from(content)).context("the request is malformed")?).await.map(|_| ())
    }

    /// All sandboxes that match a query: nothing, or what begins with `&`.
    pub(crate) async fn list(&self, query: &str) -> anyhow::Result<Vec<Value>> {
        self.pages("/v2/sandboxes", query).await
    }

    /// All pages of a list.
    async fn pages(&self, path: &str, query: &str) -> anyhow::Result<Vec<Value>> {
        let mut all = Vec::new();
        let mut next = Some(String::new());
        while let Some(token) = next {
            let cursor = if token.is_empty() { token } else { format!("&nextToken={token}") };
            let answer = self.call(Method::GET, &format!("{path}?limit=100{query}{cursor}"), None).await?;
            let Value::Array(page) = answer.body else { bail!("the server's answer is no list") };
            all.extend(page);
            next = answer.next;
        }
        Ok(all)
    }

    async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<Answer> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header("x-api-key", &self.key)
            .header("content-type", "application/json")
            .body(Full::from(body))
            .context("the request is malformed: is the id right?")?;
        self.send(request).await
    }

    /// Why there is no answer, and what to do.
    fn unreached(&self, error: hyper_util::client::legacy::Error) -> anyhow::Error {
        let what = match tls_failure(&error) {
            Some(failure) => format!("{} can't be trusted: {failure}: {}", self.base, tls_remedy(failure)),
            None => format!("no server answers at {}; start one with `sandglass serve`", self.base),
        };
        anyhow::Error::new(error).context(what)
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> anyhow::Result<Answer> {
        let response = self.http.request(request).await.map_err(|error| self.unreached(error))?;
        let status = response.status();
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        let next = header("x-next-token").filter(|token| !token.is_empty()).map(str::to_owned);
        let unsealed = header("sandglass-isolation") == Some("none");
        let bytes = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        let bytes =
            bytes.map_err(|error| anyhow::anyhow!("the answer could not be read: {error}"))?.to_bytes();
        let body = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes)? };
        if !status.is_success() {
            bail!("{}", refusal(status, &body));
        }
        Ok(Answer { next, unsealed, body })
    }
}

/// The address of the server that is meant.
fn base(url: Option<&str>, domain: Option<&str>) -> String {
    let said = |text: Option<&str>| text.filter(|text| !text.is_empty()).map(str::to_owned);
    let address = said(url).or_else(|| said(domain).map(|domain| format!("https://api.{domain}")));
    address.as_deref().unwrap_or("http://127.0.0.1:3000").trim_end_matches('/').to_owned()
}

/// Whether what is sent to this host of a URL stays on this machine.
fn is_here(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']);
    host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// What was wrong with TLS, if that is the cause of an error.
fn tls_failure<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a rustls::Error> {
    // An error of input has what is inside it as its cause, but not itself.
    let inside = |mut error: &'a (dyn StdError + 'static)| {
        while let Some(inner) = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
            error = inner;
        }
        error.downcast_ref()
    };
    std::iter::successors(Some(error), |error| (**error).source()).find_map(inside)
}

/// What to do about it.
fn tls_remedy(error: &rustls::Error) -> &'static str {
    use rustls::{CertificateError as Certificate, Error};
    match error {
        Error::InvalidCertificate(
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. },
        ) => "name the server as its certificate does",
        Error::InvalidCertificate(Certificate::Expired | Certificate::ExpiredContext { .. }) => {
            "have the server's certificate renewed, or this machine's clock set"
        }
        Error::InvalidCertificate(_) => {
            "name the authority that it is from with --ca FILE or SANDGLASS_CA; of one that the server made itself \
             that is tls/DOMAIN/ca.pem in its data folder"
        }
        _ => "is it http:// there?",
    }
}

/// A text as a part of a URL.
fn escaped(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02x}")).collect()
}

/// Host and port of `HOST[:PORT]`; an address of IPv6 is in brackets if a port follows.
fn split(target: &str) -> (&str, Option<u16>) {
    let bracketed = |text: &str| text.starts_with('[') && text.ends_with(']');
    let parts = target.rsplit_once(':').filter(|(host, _)| !host.contains(':') || bracketed(host));
    let (host, port) = match parts.map(|(host, port)| (host, port.parse())) {
        Some((host, Ok(port))) => (host, Some(port)),
        _ => (target, None),
    };
    (if bracketed(host) { &host[1..host.len() - 1] } else { host }, port)
}

fn refusal(status: StatusCode, answer: &Value) -> String {
    answer["message"].as_str().map_or_else(|| format!("the server answered {status}"), str::to_owned)
}

impl Reach {
    /// From the answer to a create or connect of a server that says, or does not say, that it is `unsealed`.
    pub(crate) fn read(answer: &Value, unsealed: bool) -> anyhow::Result<Self> {
        let id = answer["sandboxID"].as_str().context("the server's answer names no sandbox")?;
        let token = answer["envdAccessToken"].as_str().map(str::to_owned);
        Ok(Self { id: id.to_owned(), token, unsealed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_server_is() {
        for (url, domain, expected) in [
            (None, None, "http://127.0.0.1:3000"),
            (Some("https://a.test:8443/"), Some("b.test"), "https://a.test:8443"),
            (None, Some("b.test:3000"), "https://api.b.test:3000"),
            (Some(""), Some(""), "http://127.0.0.1:3000"),
        ] {
            assert_eq!(base(url, domain), expected);
        }
    }

    #[test]
    fn what_stays_on_this_machine() {
        for here in ["localhost", "127.0.0.1", "127.9.9.9", "[::1]"] {
            assert!(is_here(here), "{here}");
        }
        for away in ["10.0.0.1", "192.0.2.1", "[2001:db8::1]", "localhost.test", "0.0.0.0", ""] {
            assert!(!is_here(away), "{away}");
        }
    }

    #[test]
    fn a_failure_of_tls_is_found_wherever_it_is() {
        let unknown = || rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let io = std::io::Error::new(std::io::ErrorKind::InvalidData, unknown());
        assert_eq!(tls_failure(&io), Some(&unknown()));
        let io = std::io::Error::other(io);
        assert_eq!(tls_failure(&io), Some(&unknown()));
        let deep = anyhow::Error::new(io).context("outside");
        assert_eq!(tls_failure(deep.as_ref()), Some(&unknown()));
        assert!(tls_remedy(&unknown()).contains("--ca"));
        assert_eq!(tls_failure(&std::io::Error::other("no TLS")), None);
    }

    #[test]
    fn targets() {
        for (target, expected) in [
            ("example.com", ("example.com", None)),
            ("example.com:80", ("example.com", Some(80))),
            ("192.0.2.1:8080", ("192.0.2.1", Some(8080))),
            ("2001:db8::1", ("2001:db8::1", None)),
            ("[2001:db8::1]", ("2001:db8::1", None)),
            ("[2001:db8::1]:443", ("2001:db8::1", Some(443))),
            // For the server to refuse.
            ("example.com:http", ("example.com:http", None)),
        ] {
            assert_eq!(split(target), expected, "{target}");
        }
    }
}
