//! Commands that the server itself runs in a sandbox, over the guest API and with no more rights than any client: what a
//! template starts, and how it says that it is ready.

mod stream;

use std::pin::pin;
use std::time::Duration;

use data_encoding::BASE64;
use http::Request;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use sandglass_store::{SandboxRow, Started};
use sandglass_types::{Error, ErrorKind};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use self::stream::{Ended, Reader};
use crate::live::Live;

/// How much longer than a command may take its answer may.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// How long a command may take that has nothing to wait for. A busy machine is slow.
const SHORT: Duration = Duration::from_secs(60);

/// The wait between two questions whether it is ready.
const READY_PAUSE: Duration = Duration::from_millis(100);

/// Where the output of what a template starts goes.
const START_LOG: &str = "/var/log/template-start.log";

/// The file that is there until what was started need not be watched any more.
const WATCHED: &str = "/run/template-start";

/// Makes the log, which belongs to whoever the program runs as, and the file. What its base started has the log open already, so
/// it is not replaced.
const PREPARE: &str = r#"{ [ -e "$2" ] || install -m 600 /dev/null "$2"; } && chown "$1" "$2" && install -m 444 /dev/null "$3""#;

/// Starts what runs on, in a session of its own, and watches it. It ends with the code of a program that ends and fails, and
/// well otherwise: when the program has ended well, as one does that leaves others behind, or need not be watched any more.
const START: &str = r#"
setsid /bin/bash -l -c "$1" >>"$2" 2>&1 </dev/null &
sleep 0.3
while kill -0 $! 2>/dev/null; do
    [ -e "$3" ] || exit 0
    sleep 0.05
done
wait $! && exit 0
code=$?
tail -n 20 "$2"
exit $code
"#;

/// Starts what a template starts, and waits until it is ready.
///
/// # Errors
/// [`ErrorKind::Conflict`] with the last lines of what failed: of the command that says that it is ready, or of what was
/// started, if that has failed by then.
pub(crate) async fn begin(live: &Live, row: &SandboxRow, what: &Started) -> Result<(), Error> {
    let inside = Inside { live, row };
    let patience = Duration::from_secs(what.ready_timeout.into());
    let ready = async || match &what.ready {
        Some(ready) => inside.wait_until_ready(ready, patience).await,
        None => Ok(()),
    };
    let Some(start) = &what.start else { return ready().await };
    // The agent knows who is meant by nobody.
    let who = inside.run("", &["/usr/bin/id", "-un"], SHORT).await?.expect("say who runs commands")?;
    let prepare = ["/bin/sh", "-c", PREPARE, "sh", who.trim(), START_LOG, WATCHED];
    inside.run("root", &prepare, SHORT).await?.expect("make the log of its start command")?;
    let watched = async {
        let words = ["/bin/sh", "-c", START, "sh", start, START_LOG, WATCHED];
        inside.run("", &words, patience + 2 * SHORT).await?.expect("run its start command").map(drop)
    };
    let until_ready = async {
        ready().await?;
        let done = inside.run("root", &["/bin/rm", "-f", WATCHED], SHORT).await?;
        done.expect("say that it is ready").map(drop)
    };
    let (mut watched, mut until_ready) = (pin!(watched), pin!(until_ready));
    tokio::select! {
        ended = &mut watched => {
            ended?;
            until_ready.await
        }
        ready = &mut until_ready => {
            ready?;
            watched.await
        }
    }
}

/// Runs two login shells, so that what the first ones of a sandbox must read and make is there already.
///
/// # Errors
/// As [`begin`].
pub(crate) async fn warm_up(live: &Live, row: &SandboxRow) -> Result<(), Error> {
    for _ in 0..2 {
        let shell = Inside { live, row }.run("", &["/bin/bash", "-l", "-c", "true"], SHORT).await?;
        shell.expect("run a login shell")?;
    }
    Ok(())
}

/// A sandbox in which commands are run.
struct Inside<'a> {
    live: &'a Live,
    row: &'a SandboxRow,
}

impl Ended {
    /// Its output, if it ended well.
    fn expect(self, what: &str) -> Result<String, Error> {
        if self.code == Some(0) {
            return Ok(self.tail);
        }
        let message =
            format!("the sandbox could not {what}: {}; its last lines:\n{}", self.status, self.tail);
        Err(Error::new(ErrorKind::Conflict, message))
    }
}

impl Inside<'_> {
    async fn wait_until_ready(&self, ready: &str, patience: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let asked = self.run("", &["/bin/bash", "-l", "-c", ready], left.max(READY_PAUSE)).await?;
            if asked.code == Some(0) {
                return Ok(());
            }
            if Instant::now() + READY_PAUSE >= deadline {
                let log = self.run("root", &["/usr/bin/tail", "-n", "20", START_LOG], SHORT).await?;
                let message = format!(
                    "its ready command did not end with 0 within {} s: {}; its last lines:\n{}\nand those of what was \
                     started:\n{}",
                    patience.as_secs(),
                    asked.status,
                    asked.tail,
                    log.tail
                );
                return Err(Error::new(ErrorKind::Conflict, message));
            }
            sleep(READY_PAUSE).await;
        }
    }

    /// Runs a program to its end; it is ended when it takes longer than that. Without a user it is run as the template says.
    async fn run(&self, user: &str, words: &[&str], limit: Duration) -> Result<Ended, Error> {
        let failed = |error: &dyn std::error::Error| {
            Error::new(ErrorKind::Internal, format!("a command of the template could not be run: {error}"))
        };
        let answered = async {
            let stream = self.live.guest_api().await.map_err(|error| failed(&error))?;
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| failed(&e))?;
            let asked = async {
                let answer = sender.send_request(self.request(user, words, limit)?).await;
                let mut answer = answer.map_err(|error| failed(&error))?.into_body();
                let mut reader = Reader::default();
                while let Some(frame) = answer.frame().await {
                    let frame = frame.map_err(|error| failed(&error))?;
                    if let Some(bytes) = frame.data_ref() {
                        reader.read(bytes).map_err(|error| failed(&error))?;
                    }
                }
                reader.finish().map_err(|error| failed(&error))
            };
            tokio::select! {
                ended = asked => ended,
                Err(error) = connection => Err(failed(&error)),
            }
        };
        match timeout(limit + ANSWER_PATIENCE, answered).await {
            Ok(ended) => ended,
            Err(elapsed) => Err(failed(&elapsed)),
        }
    }

    fn request(&self, user: &str, words: &[&str], limit: Duration) -> Result<Request<Full<Bytes>>, Error> {
        let process = json!({ "cmd": words.first(), "args": words.get(1..) });
        let body = stream::message(json!({ "process": process, "stdin": false }).to_string().as_bytes());
        let mut request = Request::post("/process.Process/Start")
            .header(HOST, "guest")
            .header(CONTENT_TYPE, "application/connect+json")
            .header("connect-protocol-version", "1")
            .header("connect-timeout-ms", limit.as_millis().to_string());
        if !user.is_empty() {
            let basic = BASE64.encode(format!("{user}:").as_bytes());
            request = request.header(AUTHORIZATION, format!("Basic {basic}"));
        }
        if let Some(token) = &self.row.access_token {
            request = request.header("x-access-token", token);
        }
        let malformed = |error| Error::internal("a command of the template could not be asked for", error);
        request.body(Full::from(body)).map_err(malformed)
    }
}
