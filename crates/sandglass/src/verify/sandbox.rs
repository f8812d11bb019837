//! A sandbox to attack from, over the ordinary API.

use std::time::Duration;

use anyhow::{Context as _, bail};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Collected, Full, Limited};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::secrets::holds;
use super::server::Endpoint;
use crate::cli;
use crate::client::exec::{Command, Happening, follow};
use crate::client::{Api, Reach};

/// How much of an attack's output is kept of each stream, in bytes. The rest is read and dropped.
const KEPT: usize = 4 << 20;

/// How long an attack may take, unless it says otherwise. Most are over in milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long a sandbox lives if nobody ends it, in seconds.
pub(super) const LIFETIME: u64 = 600;

/// `root:`, as basic authentication has it.
const ROOT: &str = "Basic cm9vdDo=";

/// A sandbox.
#[derive(Debug)]
pub(super) struct Sandbox {
    pub(super) endpoint: Endpoint,
    pub(super) reach: Reach,
    /// The guest's binary, as it is found inside.
    pub(super) guest: String,
}

/// What a command left.
#[derive(Debug, Default)]
pub(super) struct Said {
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
    /// Its exit code; `None` if it ended otherwise.
    pub(super) code: Option<i32>,
}

impl Said {
    /// Whether it told a secret.
    pub(super) fn tells(&self, secret: &str) -> bool {
        holds(&self.stdout, secret) || holds(&self.stderr, secret)
    }

    /// Its last complaint, for a person. It may be a lie.
    pub(super) fn words(&self) -> String {
        let text = String::from_utf8_lossy(&self.stderr);
        let line = text.trim_end().rsplit('\n').next().unwrap_or_default();
        let line: String = line.chars().filter(|c| !c.is_control()).take(160).collect();
        if line.is_empty() { "it met no error".to_owned() } else { line }
    }

    fn hear(&mut self, happening: Happening) {
        let keep = |kept: &mut Vec<u8>, bytes: &[u8]| {
            let room = KEPT.saturating_sub(kept.len()).min(bytes.len());
            kept.extend_from_slice(&bytes[..room]);
        };
        match happening {
            Happening::Started(_) => {}
            Happening::Stdout(bytes) => keep(&mut self.stdout, &bytes),
            Happening::Stderr(bytes) => keep(&mut self.stderr, &bytes),
            Happening::Ended(end) => self.code = end.exited.then_some(end.exit_code),
        }
    }
}

impl Endpoint {
    /// The REST face.
    pub(super) fn api(&self) -> anyhow::Result<Api> {
        Api::new(&cli::Remote::at(self.url.clone(), self.key.clone()))
    }
}

impl Sandbox {
    /// Makes one; `more` is put over the request's usual fields.
    pub(super) async fn create(endpoint: &Endpoint, guest: &str, more: &Value) -> anyhow::Result<Self> {
        let mut body = json!({"templateID": "base", "timeout": LIFETIME});
        if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
            body.extend(more.clone());
        }
        let reach = endpoint.api()?.create_as(&body).await.context("no sandbox was made")?;
        Ok(Self { endpoint: endpoint.clone(), reach, guest: guest.to_owned() })
    }

    /// Makes one whose guest API wants no token, as the first version of the API does.
    pub(super) async fn create_open(endpoint: &Endpoint, guest: &str) -> anyhow::Result<Self> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}/sandboxes", endpoint.url))
            .header("x-api-key", &endpoint.key)
            .header("content-type", "application/json")
            .body(Full::from(json!({"templateID": "base", "timeout": LIFETIME}).to_string()))?;
        let (status, body) = send(request).await?;
        if !status.is_success() {
            bail!("no sandbox was made: the answer was {status}");
        }
        let reach = Reach::read(&serde_json::from_slice(&body)?, false)?;
        Ok(Self { endpoint: endpoint.clone(), reach, guest: guest.to_owned() })
    }

    pub(super) fn id(&self) -> &str {
        &self.reach.id
    }

    /// Ends it.
    pub(super) async fn kill(&self) -> anyhow::Result<()> {
        self.endpoint.api()?.kill(self.id()).await
    }

    /// Runs a command as root.
    pub(super) async fn run(&self, words: &[&str]) -> anyhow::Result<Said> {
        self.run_as(words, "root", PATIENCE).await
    }

    /// Runs a command as root in a folder.
    pub(super) async fn run_in(&self, words: &[&str], folder: &str) -> anyhow::Result<Said> {
        self.carry_out(Command { cwd: Some(folder.to_owned()), ..command(words, "root") }, PATIENCE).await
    }

    /// Runs a command.
    pub(super) async fn run_as(
        &self,
        words: &[&str],
        user: &str,
        patience: Duration,
    ) -> anyhow::Result<Said> {
        self.carry_out(command(words, user), patience).await
    }

    async fn carry_out(&self, command: Command, patience: Duration) -> anyhow::Result<Said> {
        let mut said = Said::default();
        let api = self.endpoint.api()?;
        let followed = follow(&api, &self.reach, command, |happening| {
            said.hear(happening);
            Ok(())
        });
        timeout(patience, followed)
            .await
            .with_context(|| format!("it did not end within {} s", patience.as_secs()))??;
        Ok(said)
    }

    /// Asks for a file, and answers the status and the beginning of the body.
    pub(super) async fn download(&self, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let path: String = path.bytes().map(|byte| format!("%{byte:02x}")).collect();
        self.ask(Method::GET, &format!("/files?username=root&path={path}"), Bytes::new()).await
    }

    /// Writes a file, and answers the status and what else was said.
    pub(super) async fn upload(&self, path: &str, content: Bytes) -> anyhow::Result<(StatusCode, Bytes)> {
        let path: String = path.bytes().map(|byte| format!("%{byte:02x}")).collect();
        self.ask(Method::POST, &format!("/files?username=root&path={path}"), content).await
    }

    /// Calls a method of the guest API that answers once.
    pub(super) async fn call(&self, method: &str, request: &Value) -> anyhow::Result<(StatusCode, Bytes)> {
        let uri = format!("{}/{method}", self.endpoint.url);
        let asking = self
            .request(Method::POST, &uri)
            .header("content-type", "application/json")
            .header("authorization", ROOT)
            .header("connect-protocol-version", "1");
        send(asking.body(Full::from(request.to_string()))?).await
    }

    /// The same sandbox, with another token or none.
    pub(super) fn with_token(&self, token: Option<String>) -> Self {
        let mut reach = self.reach.clone();
        reach.token = token;
        Self { endpoint: self.endpoint.clone(), reach, guest: self.guest.clone() }
    }

    fn request(&self, method: Method, uri: &str) -> http::request::Builder {
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header("e2b-sandbox-id", self.id())
            .header("e2b-sandbox-port", "49983");
        match &self.reach.token {
            Some(token) => request.header("x-access-token", token),
            None => request,
        }
    }

    /// Asks the guest API.
    pub(super) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let request = self.request(method, &format!("{}{path}", self.endpoint.url));
        let request = request.header("content-type", "application/octet-stream");
        send(request.body(Full::from(body))?).await
    }

    /// Carries out an attack as root.
    pub(super) async fn probe(&self, name: &str, args: &[&str]) -> anyhow::Result<Said> {
        self.probe_as(name, args, "root").await
    }

    /// Carries out an attack.
    pub(super) async fn probe_as(&self, name: &str, args: &[&str], user: &str) -> anyhow::Result<Said> {
        let words = [&[self.guest.as_str(), "probe", name], args].concat();
        self.run_as(&words, user, PATIENCE).await
    }

    /// Starts an attack as root that holds on to what it got, and waits until it says that it did, or gave up.
    pub(super) async fn hold(&self, name: &str, args: &[&str]) -> anyhow::Result<Holding> {
        self.hold_as(name, args, "root").await
    }

    /// The same, as a user.
    pub(super) async fn hold_as(&self, name: &str, args: &[&str], user: &str) -> anyhow::Result<Holding> {
        let words = [&[self.guest.as_str(), "probe", name], args].concat();
        let (api, command) = (self.endpoint.api()?, command(&words, user));
        let reach = self.reach.clone();
        let (ready, wait) = oneshot::channel();
        let mut ready = Some(ready);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let (mut said, mut pid) = (Said::default(), None);
            let followed = follow(&api, &reach, command, |happening| {
                if let Happening::Started(number) = happening {
                    pid = Some(number);
                } else {
                    said.hear(happening);
                }
                if holds(&said.stdout, "ready")
                    && let Some(ready) = ready.take()
                {
                    let _gone = ready.send(pid);
                }
                Ok(())
            })
            .await;
            followed.map(|()| said)
        });
        let pid = timeout(PATIENCE, wait).await.context("it neither began nor ended")?.unwrap_or(None);
        Ok(Holding { task, pid })
    }
}

/// An attack that goes on.
#[derive(Debug)]
pub(super) struct Holding {
    task: JoinSet<anyhow::Result<Said>>,
    /// Its process inside; `None` if it gave up.
    pid: Option<u32>,
}

impl Holding {
    /// Ends it. What it said is the answer.
    pub(super) async fn end(mut self, sandbox: &Sandbox) -> anyhow::Result<Said> {
        if let Some(pid) = self.pid {
            sandbox.run(&["kill", "-KILL", &pid.to_string()]).await?;
        }
        match timeout(PATIENCE, self.task.join_next()).await {
            Ok(Some(said)) => said?,
            Ok(None) | Err(_) => bail!("it can't be ended"),
        }
    }
}

/// Sends a request over a connection of its own. The answer's body is cut off where it gets long.
pub(super) async fn send(request: Request<Full<Bytes>>) -> anyhow::Result<(StatusCode, Bytes)> {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let asked = async {
        let response = client.request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), KEPT).collect().await;
        anyhow::Ok((status, body.map(Collected::to_bytes).unwrap_or_default()))
    };
    timeout(PATIENCE, asked).await.context("no answer came")?
}

fn command(words: &[&str], user: &str) -> Command {
    Command {
        words: words.iter().map(|word| (*word).to_owned()).collect(),
        user: Some(user.to_owned()),
        cwd: None,
    }
}
