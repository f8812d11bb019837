//! Clients of the guest API.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use connectrpc::ConnectError;
use connectrpc::client::{CallOptions, ClientConfig, HttpClient};
use sandglass_proto::services::process::process_event::data_event::Output;
use sandglass_proto::services::process::process_event::{EndEvent, Event};
use sandglass_proto::services::process::process_selector::Selector;
use sandglass_proto::services::process::{
    ConnectRequest, ProcessClient, ProcessConfig, ProcessEvent, ProcessSelector, SendSignalRequest, Signal,
    StartRequest,
};

/// Longest wait for anything: only reached when something is wrong.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Looks again until `look` finds something.
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// An answer over plain HTTP.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Reply {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

/// One request on a connection of its own.
pub(crate) fn http(api: SocketAddr, method: &str, target: &str, headers: &str, body: &[u8]) -> Reply {
    let mut stream = TcpStream::connect(api).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!(
        "{method} {target} HTTP/1.1\r\nHost: guest\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A refusal may come, and the connection end, before all was sent.
    let _ = stream.write_all(body);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n").expect("an HTTP head");
    let head = String::from_utf8(answer[..end].to_vec()).unwrap().to_ascii_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut body = answer[end + 4..].to_vec();
    if head.contains("transfer-encoding: chunked") {
        body = unchunk(&body);
    }
    Reply { status, head, body }
}

fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|window| window == b"\r\n") {
        let len = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        body.extend_from_slice(&bytes[end + 2..end + 2 + len]);
        bytes = &bytes[(end + 2 + len + 2).min(bytes.len())..];
    }
    body
}

/// A client of the process service.
pub(crate) fn client(api: SocketAddr) -> ProcessClient<HttpClient> {
    let uri = format!("http://{api}").parse().unwrap();
    ProcessClient::new(HttpClient::plaintext(), ClientConfig::new(uri).json())
}

/// What a process said and how it ended.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) pid: u32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) end: Option<EndEvent>,
}

impl Outcome {
    pub(crate) fn add(&mut self, event: ProcessEvent) {
        match event.event {
            Some(Event::Start(start)) => self.pid = start.pid,
            Some(Event::Data(data)) => match data.output {
                Some(Output::Stdout(bytes) | Output::Pty(bytes)) => {
                    self.stdout.push_str(&String::from_utf8_lossy(&bytes));
                }
                Some(Output::Stderr(bytes)) => self.stderr.push_str(&String::from_utf8_lossy(&bytes)),
                None => {}
            },
            Some(Event::End(end)) => self.end = Some(*end),
            Some(Event::Keepalive(_)) | None => {}
        }
    }

    pub(crate) fn code(&self) -> i32 {
        self.end.as_ref().unwrap_or_else(|| panic!("it has not ended: {self:?}")).exit_code
    }
}

/// A request to run a line of bash.
pub(crate) fn bash(line: &str) -> StartRequest {
    StartRequest {
        process: ProcessConfig {
            cmd: "/bin/bash".into(),
            args: vec!["-c".into(), line.into()],
            ..Default::default()
        }
        .into(),
        ..Default::default()
    }
}

/// `Authorization` for a user.
pub(crate) fn user_header(user: &str) -> (&'static str, String) {
    use base64::Engine as _;
    ("authorization", format!("Basic {}", base64::prelude::BASE64_STANDARD.encode(format!("{user}:"))))
}

/// Runs a line to its end, with further headers.
pub(crate) async fn run_with(
    api: SocketAddr,
    request: StartRequest,
    headers: &[(&'static str, String)],
) -> Result<Outcome, ConnectError> {
    let mut options = CallOptions::default();
    for (name, value) in headers {
        options = options.with_header(*name, value.as_str());
    }
    let client = client(api);
    let run = async {
        let mut stream = client.start_with_options(request, options).await?;
        let mut outcome = Outcome::default();
        while let Some(message) = stream.message().await? {
            outcome.add(message.to_owned_message().event.into_option().unwrap_or_default());
        }
        match stream.error() {
            Some(error) => Err(error.clone()),
            None => Ok(outcome),
        }
    };
    tokio::time::timeout(PATIENCE, run).await.expect("a command hangs")
}

/// Runs a line to its end as the default user.
pub(crate) async fn run(api: SocketAddr, line: &str) -> Outcome {
    run_with(api, bash(line), &[]).await.unwrap()
}

pub(crate) fn by_pid(pid: u32) -> ProcessSelector {
    ProcessSelector { selector: Some(Selector::Pid(pid)), ..Default::default() }
}

/// Starts a line and returns its process id; nobody is attached any more.
pub(crate) async fn start_detached(api: SocketAddr, line: &str) -> u32 {
    let mut stream = client(api).start(bash(line)).await.unwrap();
    let mut outcome = Outcome::default();
    outcome.add(stream.message().await.unwrap().unwrap().to_owned_message().event.into_option().unwrap());
    outcome.pid
}

/// Starts a line, reads its output up to a text, and goes away.
pub(crate) async fn start_until(api: SocketAddr, line: &str, text: &str) -> u32 {
    let mut stream = client(api).start(bash(line)).await.unwrap();
    let mut outcome = Outcome::default();
    while !outcome.stdout.contains(text) {
        let message = tokio::time::timeout(PATIENCE, stream.message()).await.unwrap().unwrap().unwrap();
        outcome.add(message.to_owned_message().event.into_option().unwrap());
    }
    outcome.pid
}

/// Attaches and reads to the end.
pub(crate) async fn connect(api: SocketAddr, pid: u32) -> Result<Outcome, ConnectError> {
    let request = ConnectRequest { process: by_pid(pid).into(), ..Default::default() };
    let client = client(api);
    let read = async {
        let mut stream = client.connect(request).await?;
        let mut outcome = Outcome::default();
        while let Some(message) = stream.message().await? {
            outcome.add(message.to_owned_message().event.into_option().unwrap_or_default());
        }
        match stream.error() {
            Some(error) => Err(error.clone()),
            None => Ok(outcome),
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("a stream hangs")
}

/// Sends a signal.
pub(crate) async fn signal(api: SocketAddr, pid: u32, signal: Signal) -> Result<(), ConnectError> {
    let request =
        SendSignalRequest { process: by_pid(pid).into(), signal: signal.into(), ..Default::default() };
    client(api).send_signal(request).await.map(|_| ())
}
