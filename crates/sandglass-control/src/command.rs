//! Commands that the server itself runs in a sandbox, over the guest API and with no more rights than any client: what a
//! template starts, and how it says that it is ready; what a run does.

mod call;
mod stream;

use std::pin::pin;
use std::time::Duration;

use sandglass_store::{SandboxRow, Started};
use sandglass_types::{Error, ErrorKind};
use tokio::time::{Instant, sleep};

pub(crate) use self::call::{Program, Running, put_file, run, signal};
pub(crate) use self::stream::{Ended, Told, shown};
use crate::live::Live;

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
        let program = Program { user, words, limit, ..Program::default() };
        call::run(self.live, self.row, &program).await
    }
}
