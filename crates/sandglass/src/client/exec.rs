//! Running one command in a sandbox, through its guest API.

use anyhow::Context as _;
use connectrpc::client::{CallOptions, ClientConfig};
use data_encoding::BASE64;
use sandglass_proto::services::process::__buffa::oneof::process_event::Event;
use sandglass_proto::services::process::__buffa::oneof::process_event::data_event::Output;
use sandglass_proto::services::process::process_event::EndEvent;
use sandglass_proto::services::process::{ProcessClient, ProcessConfig, StartRequest};
use serde_json::{Value, json};

use super::rest::{Api, Reach};

/// The port that stands for the guest API.
pub(super) const GUEST_API_PORT: &str = "49983";

/// The command to run.
pub(crate) struct Command {
    /// The program and its arguments, as given.
    pub(crate) words: Vec<String>,
    /// Who runs it, if not the template's user.
    pub(crate) user: Option<String>,
    /// Where, if not in the template's folder.
    pub(crate) cwd: Option<String>,
}

/// How it ended.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    end: EndEvent,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Outcome {
    /// What this process exits with: the command's code, or 128 and the signal that ended it, as shells have it.
    pub(crate) fn code(&self) -> u8 {
        let signal = match self.end.status.as_str() {
            _ if self.end.exited => return u8::try_from(self.end.exit_code & 0xff).unwrap_or(u8::MAX),
            "signal: hangup" => 1,
            "signal: interrupt" => 2,
            "signal: quit" => 3,
            "signal: aborted" => 6,
            "signal: segmentation fault" => 11,
            "signal: broken pipe" => 13,
            "signal: terminated" => 15,
            _ => 9,
        };
        128 + signal
    }

    /// What a person should know beyond the output.
    pub(crate) fn error(&self) -> Option<&str> {
        if self.end.exited { None } else { Some(&self.end.status) }
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "exit_code": self.end.exit_code,
            "exited": self.end.exited,
            "status": self.end.status,
            "stdout": String::from_utf8_lossy(&self.stdout),
            "stderr": String::from_utf8_lossy(&self.stderr),
        })
    }
}

/// What a command does.
pub(crate) enum Happening {
    /// It runs, as the process of this number inside.
    Started(u32),
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    Ended(EndEvent),
}

/// Runs it to its end. With `collect` its output is kept for the outcome, else it is passed on as it comes.
pub(crate) async fn run(
    api: &Api,
    sandbox: &Reach,
    command: Command,
    collect: bool,
) -> anyhow::Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut ended = false;
    let look = |happening| {
        match happening {
            Happening::Started(_) => {}
            Happening::Stdout(bytes) if collect => outcome.stdout.extend(bytes),
            Happening::Stderr(bytes) if collect => outcome.stderr.extend(bytes),
            Happening::Stdout(bytes) => pass_on(std::io::stdout(), &bytes)?,
            Happening::Stderr(bytes) => pass_on(std::io::stderr(), &bytes)?,
            Happening::Ended(end) => {
                outcome.end = end;
                ended = true;
            }
        }
        Ok(())
    };
    follow(api, sandbox, command, look).await?;
    if ended { Ok(outcome) } else { Err(anyhow::anyhow!("the sandbox ended before its command did")) }
}

/// Runs it to its end, and passes its output on to standard error: what this program says itself is on the other.
pub(crate) async fn run_loud(api: &Api, sandbox: &Reach, command: Command) -> anyhow::Result<Outcome> {
    let mut ended = None;
    let look = |happening| {
        match happening {
            Happening::Started(_) => {}
            Happening::Stdout(bytes) | Happening::Stderr(bytes) => pass_on(std::io::stderr(), &bytes)?,
            Happening::Ended(end) => ended = Some(Outcome { end, ..Outcome::default() }),
        }
        Ok(())
    };
    follow(api, sandbox, command, look).await?;
    ended.context("the sandbox ended before its command did")
}

/// Starts it, and calls `look` for all that happens, until the stream ends or `look` fails.
pub(crate) async fn follow(
    api: &Api,
    sandbox: &Reach,
    command: Command,
    mut look: impl FnMut(Happening) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let base = api.base().parse().context("the server's address is no URL")?;
    let client = ProcessClient::new(api.connect(), ClientConfig::new(base).json());
    let mut words = command.words.into_iter();
    let process = ProcessConfig {
        cmd: words.next().unwrap_or_default(),
        args: words.collect(),
        cwd: command.cwd,
        ..ProcessConfig::default()
    };
    let request = StartRequest { process: process.into(), stdin: Some(false), ..StartRequest::default() };
    let mut options = CallOptions::default()
        .with_header("e2b-sandbox-id", &sandbox.id)
        .with_header("e2b-sandbox-port", GUEST_API_PORT);
    if let Some(token) = &sandbox.token {
        options = options.with_header("x-access-token", token);
    }
    if let Some(user) = &command.user {
        let basic = BASE64.encode(format!("{user}:").as_bytes());
        options = options.with_header("authorization", format!("Basic {basic}"));
    }
    let refused = |error: connectrpc::ConnectError| {
        anyhow::anyhow!("{}", error.message.unwrap_or_else(|| format!("{:?}", error.code)))
    };
    let mut stream = client.start_with_options(request, options).await.map_err(refused)?;
    while let Some(message) = stream.message().await.map_err(refused)? {
        let message = message.to_owned_message();
        match message.event.into_option().and_then(|event| event.event) {
            Some(Event::Start(start)) => look(Happening::Started(start.pid))?,
            Some(Event::Data(data)) => match data.output {
                Some(Output::Stdout(bytes) | Output::Pty(bytes)) => look(Happening::Stdout(bytes))?,
                Some(Output::Stderr(bytes)) => look(Happening::Stderr(bytes))?,
                None => {}
            },
            Some(Event::End(end)) => look(Happening::Ended(*end))?,
            _ => {}
        }
    }
    Ok(())
}

fn pass_on(mut to: impl std::io::Write, bytes: &[u8]) -> anyhow::Result<()> {
    to.write_all(bytes).and_then(|()| to.flush()).context("nothing reads the output")
}
