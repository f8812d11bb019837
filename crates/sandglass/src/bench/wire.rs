//! The requests of the Python SDK (`e2b` 2.63.0), byte for byte but for what names the client: as captured between the
//! SDK and a server. Control plane and guest API share one address here, so the SDK sends all of a sandbox's requests
//! over one kept-alive connection; a new one for each new process.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use anyhow::{Context as _, bail};
use data_encoding::BASE64;
use http::request::Builder;
use http::{Method, Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::client::Reach;

/// The largest answer or message that is read, in bytes.
const MAX_ANSWER: usize = 1 << 20;

/// The port that stands for the guest API.
const GUEST_API_PORT: &str = "49983";

/// How long a sandbox lives if the bench dies, in seconds.
pub(super) const SANDBOX_TIMEOUT: u64 = 600;

/// One connection to a server.
pub(crate) struct Connection {
    sender: SendRequest<BoxBody<Bytes, Infallible>>,
    host: String,
    /// What moves the bytes; it ends with the connection.
    _driver: JoinSet<()>,
}

impl Connection {
    /// Connects to `http://HOST:PORT`.
    pub(crate) async fn open(base: &str) -> anyhow::Result<Self> {
        let host = base.strip_prefix("http://").context("only http:// servers can be reached")?;
        let stream =
            TcpStream::connect(host).await.with_context(|| format!("no server answers at {base}"))?;
        // As the SDK's client does.
        stream.set_nodelay(true)?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(async move {
            // How it ended is seen by the request.
            let _ = connection.await;
        });
        Ok(Self { sender, host: host.to_owned(), _driver: driver })
    }

    /// `Sandbox.create()`.
    pub(crate) async fn create(&mut self, key: &str) -> anyhow::Result<Reach> {
        self.create_of(key, "base").await
    }

    /// The same from another template, or a snapshot.
    pub(crate) async fn create_of(&mut self, key: &str, template: &str) -> anyhow::Result<Reach> {
        let body = json!({"templateID": template, "timeout": SANDBOX_TIMEOUT, "metadata": {}, "envVars": {}});
        Reach::read(&self.post(key, "/v2/sandboxes", &body).await?, false)
    }

    /// The start of `Sandbox.connect()`: resumes it if it is paused.
    pub(crate) async fn connect(&mut self, key: &str, id: &str) -> anyhow::Result<Reach> {
        let path = format!("/sandboxes/{id}/connect");
        Reach::read(&self.post(key, &path, &json!({"timeout": SANDBOX_TIMEOUT})).await?, false)
    }

    /// One copy of a running sandbox.
    pub(crate) async fn fork(&mut self, key: &str, id: &str) -> anyhow::Result<Reach> {
        let path = format!("/sandboxes/{id}/fork");
        let answer = self.post(key, &path, &json!({"count": 1, "timeout": SANDBOX_TIMEOUT})).await?;
        Reach::read(answer.get(0).and_then(|copy| copy.get("sandbox")).context("nothing was copied")?, false)
    }

    /// What a path answers that is a text.
    pub(crate) async fn text(&mut self, key: &str, path: &str) -> anyhow::Result<String> {
        let request =
            self.request(Method::GET, path).header("x-api-key", key).body(Full::default().boxed())?;
        let answer = collect(self.sender.send_request(request).await?).await?;
        Ok(String::from_utf8(answer.to_vec())?)
    }

    async fn post(&mut self, key: &str, path: &str, body: &Value) -> anyhow::Result<Value> {
        let request = self
            .request(Method::POST, path)
            .header("accept-encoding", "gzip, deflate")
            .header("x-api-key", key)
            .header("content-type", "application/json")
            .body(Full::from(body.to_string()).boxed())?;
        let answer = collect(self.sender.send_request(request).await?).await?;
        Ok(serde_json::from_slice(&answer)?)
    }

    /// The start of `commands.run()`: the stream of what the process does.
    pub(crate) async fn start(
        &mut self,
        sandbox: &Reach,
        cmd: &str,
        args: &[&str],
    ) -> anyhow::Result<Events> {
        let message = json!({"process": {"cmd": cmd, "args": args}, "stdin": false});
        self.stream(sandbox, "/process.Process/Start", &message).await
    }

    /// What a method of the guest API tells as it happens.
    pub(crate) async fn stream(
        &mut self,
        sandbox: &Reach,
        method: &str,
        message: &Value,
    ) -> anyhow::Result<Events> {
        let message = message.to_string();
        let mut envelope = vec![0];
        envelope.extend(u32::try_from(message.len())?.to_be_bytes());
        envelope.extend(message.as_bytes());
        let request = self
            .guest(Method::POST, method, sandbox)
            .header("keepalive-ping-interval", "50")
            .header("connect-protocol-version", "1")
            .header("connect-accept-encoding", "identity")
            .header("connect-content-encoding", "identity")
            .header("content-type", "application/connect+json")
            .header("connect-timeout-ms", "60000")
            .header("accept-encoding", "zstd,gzip,br")
            .header("transfer-encoding", "chunked")
            .body(Full::from(envelope).boxed())?;
        let response = self.sender.send_request(request).await?;
        if !response.status().is_success() {
            bail!("{}", refusal(response).await);
        }
        Ok(Events { body: response.into_body(), buffer: Vec::new() })
    }

    /// `pty.send_stdin()`.
    pub(crate) async fn type_in(&mut self, sandbox: &Reach, pid: u32, keys: &[u8]) -> anyhow::Result<()> {
        let body = json!({"process": {"pid": pid}, "input": {"pty": BASE64.encode(keys)}}).to_string();
        let request = self
            .guest(Method::POST, "/process.Process/SendInput", sandbox)
            .header("connect-protocol-version", "1")
            .header("content-type", "application/json")
            .body(Full::from(body).boxed())?;
        collect(self.sender.send_request(request).await?).await.map(drop)
    }

    /// `/bin/bash -l -c COMMAND`, as every command of the SDKs is.
    pub(crate) async fn shell(&mut self, sandbox: &Reach, command: &str) -> anyhow::Result<Events> {
        self.start(sandbox, "/bin/bash", &["-l", "-c", command]).await
    }

    /// Writes a file of `total` bytes, each piece of it `chunk`.
    pub(crate) async fn upload(
        &mut self,
        sandbox: &Reach,
        path: &str,
        chunk: &Bytes,
        total: u64,
    ) -> anyhow::Result<()> {
        let body = Repeated { chunk: chunk.clone(), left: total };
        let request = self
            .guest(Method::POST, &format!("/files?path={path}"), sandbox)
            .header("content-type", "application/octet-stream")
            .body(body.boxed())?;
        collect(self.sender.send_request(request).await?).await.map(drop)
    }

    /// Reads a file, and answers how long it is.
    pub(crate) async fn download(&mut self, sandbox: &Reach, path: &str) -> anyhow::Result<u64> {
        let request =
            self.guest(Method::GET, &format!("/files?path={path}"), sandbox).body(Full::default().boxed())?;
        let response = self.sender.send_request(request).await?;
        if !response.status().is_success() {
            bail!("{}", refusal(response).await);
        }
        let mut body = response.into_body();
        let mut total = 0;
        while let Some(frame) = body.frame().await {
            if let Some(data) = frame?.data_ref() {
                total += data.len() as u64;
            }
        }
        Ok(total)
    }

    fn request(&self, method: Method, path: &str) -> Builder {
        Request::builder().method(method).uri(path).header("host", &self.host).header("accept", "*/*")
    }

    fn guest(&self, method: Method, path: &str, sandbox: &Reach) -> Builder {
        let request = self
            .request(method, path)
            .header("e2b-sandbox-id", &sandbox.id)
            .header("e2b-sandbox-port", GUEST_API_PORT);
        match &sandbox.token {
            Some(token) => request.header("x-access-token", token),
            None => request,
        }
    }
}

/// The whole answer, if it is no refusal.
async fn collect(response: Response<Incoming>) -> anyhow::Result<Bytes> {
    if !response.status().is_success() {
        bail!("{}", refusal(response).await);
    }
    let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
    Ok(body.map_err(|error| anyhow::anyhow!("the answer could not be read: {error}"))?.to_bytes())
}

async fn refusal(response: Response<Incoming>) -> String {
    let status = response.status();
    match Limited::new(response.into_body(), MAX_ANSWER).collect().await {
        Ok(body) => format!("the server answered {status}: {}", String::from_utf8_lossy(&body.to_bytes())),
        Err(_) => format!("the server answered {status}"),
    }
}

/// What a process did, or became of a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// It runs, as the process of this number.
    Started(u32),
    /// It wrote to standard output, or to its terminal.
    Output(Vec<u8>),
    /// A file of this name is another now.
    Changed(String),
    /// It ended, with this code.
    End(i64),
    /// Anything else: it wrote to standard error.
    Other,
}

/// The stream of a process, read as it comes.
pub(crate) struct Events {
    body: Incoming,
    buffer: Vec<u8>,
}

impl Events {
    /// The next event; `None` at the end of the stream.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<Event>> {
        loop {
            if let Some((flags, message)) = take_message(&mut self.buffer)? {
                return parse(flags, &message);
            }
            let Some(frame) = self.body.frame().await else {
                bail!("the stream ended in the middle");
            };
            if let Some(data) = frame?.data_ref() {
                self.buffer.extend_from_slice(data);
            }
        }
    }

    /// The first bytes of standard output.
    pub(crate) async fn first_stdout(&mut self) -> anyhow::Result<Vec<u8>> {
        loop {
            match self.next().await? {
                Some(Event::Output(bytes)) => return Ok(bytes),
                Some(Event::End(_)) | None => bail!("the command ended without output"),
                Some(_) => {}
            }
        }
    }

    /// Waits for the end event, collecting the output. A code other than 0 is an error.
    pub(crate) async fn end(&mut self) -> anyhow::Result<Vec<u8>> {
        let mut stdout = Vec::new();
        loop {
            match self.next().await? {
                Some(Event::Output(bytes)) if stdout.len() < MAX_ANSWER => stdout.extend(bytes),
                Some(Event::Output(_)) => bail!("the command writes too much"),
                Some(Event::End(0)) => return Ok(stdout),
                Some(Event::End(code)) => bail!("the command ended with {code}"),
                Some(_) => {}
                None => bail!("the stream ended before the command did"),
            }
        }
    }

    /// Reads what follows the end event, so that the connection can be used again.
    pub(crate) async fn drain(mut self) -> anyhow::Result<()> {
        while self.next().await?.is_some() {}
        while let Some(frame) = self.body.frame().await {
            frame?;
        }
        Ok(())
    }
}

/// Takes one enveloped message of the Connect protocol: flags, length, content.
fn take_message(buffer: &mut Vec<u8>) -> anyhow::Result<Option<(u8, Vec<u8>)>> {
    let Some((&[flags, a, b, c, d], rest)) = buffer.split_first_chunk() else { return Ok(None) };
    let len = usize::try_from(u32::from_be_bytes([a, b, c, d]))?;
    if len > MAX_ANSWER {
        bail!("the server sends a message of {len} bytes");
    }
    let Some(message) = rest.get(..len).map(<[u8]>::to_vec) else { return Ok(None) };
    buffer.drain(..5 + len);
    Ok(Some((flags, message)))
}

fn parse(flags: u8, message: &[u8]) -> anyhow::Result<Option<Event>> {
    /// The last message: an error, or nothing.
    const END_OF_STREAM: u8 = 2;
    let message: Value = serde_json::from_slice(message).context("a message is no JSON")?;
    if flags & END_OF_STREAM != 0 {
        return match message.get("error") {
            None => Ok(None),
            Some(error) => bail!("the stream ended with an error: {error}"),
        };
    }
    if let Some(name) = message["filesystem"]["name"].as_str() {
        return Ok(Some(Event::Changed(name.to_owned())));
    }
    let event = &message["event"];
    if let Some(text) = event["data"]["stdout"].as_str().or_else(|| event["data"]["pty"].as_str()) {
        return Ok(Some(Event::Output(BASE64.decode(text.as_bytes())?)));
    }
    if let Some(pid) = event["start"]["pid"].as_u64() {
        return Ok(Some(Event::Started(u32::try_from(pid)?)));
    }
    Ok(Some(match event.get("end") {
        // A code of 0 is left out.
        Some(end) if end["exited"] == true => Event::End(end["exitCode"].as_i64().unwrap_or(0)),
        Some(end) => bail!("the command was ended: {}", end["status"]),
        None => Event::Other,
    }))
}

/// A body of a known length that repeats one piece.
struct Repeated {
    chunk: Bytes,
    left: u64,
}

impl Body for Repeated {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let chunk = match usize::try_from(self.left) {
            Ok(0) => return Poll::Ready(None),
            Ok(left) if left < self.chunk.len() => self.chunk.slice(..left),
            _ => self.chunk.clone(),
        };
        self.left -= chunk.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope(flags: u8, message: &str) -> Vec<u8> {
        let mut bytes = vec![flags];
        bytes.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
        bytes.extend(message.as_bytes());
        bytes
    }

    #[test]
    fn messages_are_taken_whole_and_in_order() {
        let (first, second) = (envelope(0, "{\"a\":1}"), envelope(2, "{}"));
        let mut buffer = Vec::new();
        for byte in &first[..first.len() - 1] {
            buffer.push(*byte);
            assert!(take_message(&mut buffer).unwrap().is_none());
        }
        buffer.push(first[first.len() - 1]);
        buffer.extend(&second);
        assert_eq!(take_message(&mut buffer).unwrap().unwrap(), (0, b"{\"a\":1}".to_vec()));
        assert_eq!(take_message(&mut buffer).unwrap().unwrap(), (2, b"{}".to_vec()));
        assert!(buffer.is_empty());
        assert!(take_message(&mut vec![0, 255, 255, 255, 255]).is_err());
    }

    #[test]
    fn events_are_what_a_server_was_seen_to_send() {
        let event = |text: &str| parse(0, text.as_bytes()).unwrap().unwrap();
        assert_eq!(event(r#"{"event":{"start":{"pid":7}}}"#), Event::Started(7));
        assert_eq!(event(r#"{"event":{"data":{"stdout":"aGkK"}}}"#), Event::Output(b"hi\n".to_vec()));
        assert_eq!(event(r#"{"event":{"data":{"pty":"cQ=="}}}"#), Event::Output(b"q".to_vec()));
        let changed = r#"{"filesystem":{"name":"a/b","type":"EVENT_TYPE_CREATE"}}"#;
        assert_eq!(event(changed), Event::Changed("a/b".into()));
        assert_eq!(event(r#"{"start":{}}"#), Event::Other);
        assert_eq!(event(r#"{"event":{"data":{"stderr":"aGkK"}}}"#), Event::Other);
        assert_eq!(event(r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#), Event::End(0));
        assert_eq!(event(r#"{"event":{"end":{"exited":true,"exitCode":3}}}"#), Event::End(3));
        assert!(parse(0, br#"{"event":{"end":{"status":"signal: killed"}}}"#).is_err());
        assert_eq!(parse(2, b"{}").unwrap(), None);
        let error = parse(2, br#"{"error":{"code":"not_found"}}"#).unwrap_err().to_string();
        assert!(error.contains("not_found"), "{error}");
        assert!(parse(0, b"x").is_err());
    }
}
