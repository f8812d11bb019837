//! Calls of the guest API. Each has a connection of its own, and every byte of the answer is the guest's.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use data_encoding::BASE64;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::request::Builder;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use sandglass_store::SandboxRow;
use sandglass_types::{Error, ErrorKind};
use serde_json::json;
use tokio::time::timeout;

use super::stream::{self, Ended, Reader, Told};
use crate::live::Live;

/// How much longer than a command may take its answer may.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// How long a call may take that has nothing to wait for.
const CALL_PATIENCE: Duration = Duration::from_secs(60);

/// Longest answer of such a call that is read, in bytes.
const MAX_ANSWER: usize = 64 << 10;

/// A program that is to be run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Program<'a> {
    /// Who runs it; an empty name is whom the template says.
    pub(crate) user: &'a str,
    /// The program and its arguments.
    pub(crate) words: &'a [&'a str],
    /// Its environment, over that of the sandbox.
    pub(crate) env: BTreeMap<String, String>,
    /// Where it is run, if not where the template says.
    pub(crate) folder: Option<&'a str>,
    /// It is ended when it takes longer.
    pub(crate) limit: Duration,
}

fn failed(error: &dyn std::error::Error) -> Error {
    Error::new(ErrorKind::Internal, format!("a command could not be run in the sandbox: {error}"))
}

type Connection = Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>;

/// Sends one request. The connection must go on for the body of the answer to come.
async fn ask(live: &Live, request: Request<Full<Bytes>>) -> Result<(Response<Incoming>, Connection), Error> {
    let stream = live.guest_api().await.map_err(|error| failed(&error))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(&error))?;
    let mut connection: Connection = Box::pin(connection);
    tokio::select! {
        answer = sender.send_request(request) => Ok((answer.map_err(|error| failed(&error))?, connection)),
        Err(error) = &mut connection => Err(failed(&error)),
    }
}

fn post(path: &str, row: &SandboxRow, user: &str) -> Builder {
    let mut request = Request::post(path).header(HOST, "guest");
    if !user.is_empty() {
        let basic = BASE64.encode(format!("{user}:").as_bytes());
        request = request.header(AUTHORIZATION, format!("Basic {basic}"));
    }
    if let Some(token) = &row.access_token {
        request = request.header("x-access-token", token);
    }
    request
}

fn body(request: Builder, body: Vec<u8>) -> Result<Request<Full<Bytes>>, Error> {
    request.body(Full::from(body)).map_err(|error| Error::internal("the sandbox could not be asked", error))
}

/// A program that runs, or has run. Nobody ends it by dropping this.
pub(crate) struct Running {
    answer: Incoming,
    /// `None` once it has ended.
    connection: Option<Connection>,
    reader: Reader,
}

impl Running {
    /// Starts a program.
    ///
    /// # Errors
    /// It could not be asked for.
    pub(crate) async fn start(live: &Live, row: &SandboxRow, program: &Program<'_>) -> Result<Self, Error> {
        let mut process = json!({
            "cmd": program.words.first(), "args": program.words.get(1..), "envs": program.env,
        });
        if let Some(folder) = program.folder {
            process["cwd"] = folder.into();
        }
        let message = json!({ "process": process, "stdin": false }).to_string();
        let request = post("/process.Process/Start", row, program.user)
            .header(CONTENT_TYPE, "application/connect+json")
            .header("connect-protocol-version", "1")
            .header("connect-timeout-ms", program.limit.as_millis().to_string());
        let asked = ask(live, body(request, stream::message(message.as_bytes()))?);
        let (answer, connection) =
            timeout(CALL_PATIENCE, asked).await.map_err(|elapsed| failed(&elapsed))??;
        Ok(Self { answer: answer.into_body(), connection: Some(connection), reader: Reader::default() })
    }

    /// What it tells next; `None` once it has ended. Nothing is lost when this is dropped.
    ///
    /// # Errors
    /// The stream failed, or is none of a command.
    pub(crate) async fn next(&mut self) -> Result<Option<Told>, Error> {
        loop {
            if let Some(told) = self.reader.next() {
                return Ok(Some(told));
            }
            let Some(frame) = self.frame().await else { return Ok(None) };
            if let Some(bytes) = frame?.data_ref() {
                self.reader.read(bytes).map_err(|error| failed(&error))?;
            }
        }
    }

    async fn frame(&mut self) -> Option<Result<hyper::body::Frame<Bytes>, Error>> {
        poll_fn(|context| {
            if let Some(connection) = &mut self.connection
                && let Poll::Ready(ended) = connection.as_mut().poll(context)
            {
                self.connection = None;
                if let Err(error) = ended {
                    return Poll::Ready(Some(Err(failed(&error))));
                }
            }
            let frame = hyper::body::Body::poll_frame(Pin::new(&mut self.answer), context);
            frame.map_err(|error| failed(&error))
        })
        .await
    }

    /// How it ended, once [`Self::next`] has nothing more.
    ///
    /// # Errors
    /// It did not.
    pub(crate) fn finish(self) -> Result<Ended, Error> {
        self.reader.finish().map_err(|error| failed(&error))
    }
}

/// Runs a program to its end.
///
/// # Errors
/// It could not be run, or its end is not known.
pub(crate) async fn run(live: &Live, row: &SandboxRow, program: &Program<'_>) -> Result<Ended, Error> {
    let ended = async {
        let mut running = Running::start(live, row, program).await?;
        while running.next().await?.is_some() {}
        running.finish()
    };
    timeout(program.limit + ANSWER_PATIENCE, ended).await.map_err(|elapsed| failed(&elapsed))?
}

/// Sends a request whose answer says no more than whether it was done.
async fn done(live: &Live, request: Request<Full<Bytes>>) -> Result<(), Error> {
    let asked = async {
        let (answer, mut connection) = ask(live, request).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect();
        let body = tokio::select! {
            body = body => body.map(http_body_util::Collected::to_bytes).unwrap_or_default(),
            Err(error) = &mut connection => return Err(failed(&error)),
        };
        if status.is_success() {
            return Ok(());
        }
        let said = stream::shown(&body);
        let message =
            format!("the sandbox answered with {status}: {}", said.chars().take(300).collect::<String>());
        Err(Error::new(ErrorKind::Conflict, message))
    };
    timeout(CALL_PATIENCE, asked).await.map_err(|elapsed| failed(&elapsed))?
}

/// Writes a file, and the folders that it needs, as this user.
///
/// # Errors
/// It could not be written.
pub(crate) async fn put_file(
    live: &Live,
    row: &SandboxRow,
    user: &str,
    path: &str,
    content: Vec<u8>,
) -> Result<(), Error> {
    let encoded = |text| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let target = format!("/files?path={}&username={}", encoded(path), encoded(user));
    let request = post(&target, row, "").header(CONTENT_TYPE, "application/octet-stream");
    done(live, body(request, content)?).await
}

/// Asks a program to end: sends it SIGTERM.
///
/// # Errors
/// It is gone, or can't be asked.
pub(crate) async fn signal(live: &Live, row: &SandboxRow, pid: u32) -> Result<(), Error> {
    let message = json!({ "process": { "pid": pid }, "signal": "SIGNAL_SIGTERM" }).to_string();
    let request = post("/process.Process/SendSignal", row, "root")
        .header(CONTENT_TYPE, "application/json")
        .header("connect-protocol-version", "1");
    done(live, body(request, message.into_bytes())?).await
}
