//! What a person at a terminal waits for: the echo of a key, word of a changed file, and many streams at one time.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use hyper::body::Bytes;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::millis;
use super::report::{Bound, Report};
use super::server::Endpoint;
use super::wire::{Connection, Event, Events};
use crate::cli;
use crate::client::Reach;

/// Most that the echo of a key and word of a file may take, in milliseconds.
const MAX_ECHO: f64 = 5.0;
const MAX_EVENT: f64 = 20.0;

/// Streams at one time.
const STREAMS: u32 = 100;

/// How long each of them is open at least: longer than it takes to open all.
const WHILE_OPEN: Duration = Duration::from_secs(15);

/// Any of it is there by then, or never comes.
const PATIENCE: Duration = Duration::from_secs(30);

const FOLDER: &str = "/home/user/watched";

pub(crate) async fn run(
    endpoint: &Endpoint,
    samples: &cli::bench::Samples,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut connection = Connection::open(&endpoint.url).await?;
    let sandbox = connection.create(&endpoint.key).await?;
    let mut terminal = Terminal::open(endpoint, &sandbox).await?;
    let mut watch = Watch::open(endpoint, &sandbox).await?;
    let (mut echoes, mut events, mut uploads) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..samples.warmup + samples.n {
        let echo = report.keep(bounded(terminal.key(&mut connection)).await.context("a key"));
        let event =
            report.keep(bounded(watch.change(&mut connection, round)).await.context("a changed file"));
        if round >= samples.warmup {
            echoes.extend(echo);
            let (event, upload) = event.unzip();
            events.extend(event);
            uploads.extend(upload);
        }
    }
    let streams = report.keep(streams(endpoint, &sandbox).await);
    endpoint.api()?.kill(&sandbox.id).await?;
    let echo = report.series("from a key to its echo", "ms", echoes);
    let event = report.series("from the begin of an upload to word of it", "ms", events);
    report.series("reference: the upload itself", "ms", uploads);
    report.target("echo of a key, p50", Bound::AtMost, MAX_ECHO, "ms", echo.map(|echo| echo.p50));
    report.target("word of a file, p50", Bound::AtMost, MAX_EVENT, "ms", event.map(|event| event.p50));
    report.target("streams at one time", Bound::AtLeast, f64::from(STREAMS), "", streams.map(f64::from));
    Ok(())
}

async fn bounded<T>(what: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    timeout(PATIENCE, what).await.context("it never came")?
}

/// An interactive shell.
struct Terminal<'a> {
    events: Events,
    /// What they come over.
    _connection: Connection,
    sandbox: &'a Reach,
    pid: u32,
}

impl<'a> Terminal<'a> {
    async fn open(endpoint: &Endpoint, sandbox: &'a Reach) -> anyhow::Result<Self> {
        let message = json!({
            "process": {"cmd": "/bin/bash", "args": ["-i", "-l"], "envs": {"TERM": "xterm-256color"}},
            "pty": {"size": {"cols": 80, "rows": 24}},
        });
        let mut connection = Connection::open(&endpoint.url).await?;
        let mut events = connection.stream(sandbox, "/process.Process/Start", &message).await?;
        let pid = match events.next().await? {
            Some(Event::Started(pid)) => pid,
            other => bail!("the shell did not start: {other:?}"),
        };
        let mut opened = Self { events, _connection: connection, sandbox, pid };
        bounded(opened.until(b"$ ")).await.context("the shell has no prompt")?;
        Ok(opened)
    }

    /// Types a letter and takes it back. Answers how long it took to be seen.
    async fn key(&mut self, connection: &mut Connection) -> anyhow::Result<f64> {
        let began = Instant::now();
        connection.type_in(self.sandbox, self.pid, b"q").await?;
        self.until(b"q").await?;
        let took = millis(began.elapsed());
        connection.type_in(self.sandbox, self.pid, b"\x7f").await?;
        // The letter is rubbed out to the end of the line.
        self.until(b"\x1b[K").await?;
        Ok(took)
    }

    /// Reads until this was written.
    async fn until(&mut self, mark: &[u8]) -> anyhow::Result<()> {
        let mut seen = Vec::new();
        while !seen.windows(mark.len()).any(|window| window == mark) {
            match self.events.next().await? {
                Some(Event::Output(bytes)) => seen.extend(bytes),
                Some(Event::End(_)) | None => bail!("the shell ended"),
                Some(_) => {}
            }
        }
        Ok(())
    }
}

/// A folder that is watched.
struct Watch<'a> {
    events: Events,
    /// What they come over.
    _connection: Connection,
    sandbox: &'a Reach,
}

impl<'a> Watch<'a> {
    async fn open(endpoint: &Endpoint, sandbox: &'a Reach) -> anyhow::Result<Self> {
        let mut connection = Connection::open(&endpoint.url).await?;
        let mut made = connection.start(sandbox, "/bin/mkdir", &[FOLDER]).await?;
        made.end().await?;
        made.drain().await?;
        let message = json!({"path": FOLDER});
        let mut events = connection.stream(sandbox, "/filesystem.Filesystem/WatchDir", &message).await?;
        // It watches from then on.
        events.next().await?.context("the watch ended")?;
        Ok(Self { events, _connection: connection, sandbox })
    }

    /// Makes a file. Answers how long it took until that was told, and until it was made.
    async fn change(&mut self, connection: &mut Connection, round: u32) -> anyhow::Result<(f64, f64)> {
        let name = format!("file-{round}");
        let (path, content) = (format!("{FOLDER}/{name}"), Bytes::from_static(b"x"));
        let began = Instant::now();
        let told = async {
            while let Some(event) = self.events.next().await? {
                if event == Event::Changed(name.clone()) {
                    return anyhow::Ok(millis(began.elapsed()));
                }
            }
            bail!("the watch ended")
        };
        let made = async {
            connection.upload(self.sandbox, &path, &content, 1).await?;
            anyhow::Ok(millis(began.elapsed()))
        };
        tokio::try_join!(told, made)
    }
}

/// How many of so many streams, all open at one time, carry what their program writes, also when all of them are.
async fn streams(endpoint: &Endpoint, sandbox: &Reach) -> anyhow::Result<u32> {
    let command = format!("echo on; sleep {}; echo off", WHILE_OPEN.as_secs());
    let began = Instant::now();
    let mut open = Vec::new();
    for _ in 0..STREAMS {
        let mut connection = Connection::open(&endpoint.url).await?;
        let mut events = connection.start(sandbox, "/bin/sh", &["-c", &command]).await?;
        bounded(events.first_stdout()).await?;
        open.push((connection, events));
    }
    if began.elapsed() > WHILE_OPEN {
        bail!("the first of {STREAMS} streams ended before the last was open");
    }
    let mut ends = JoinSet::new();
    for (connection, mut events) in open {
        ends.spawn(async move {
            let output = bounded(events.end()).await;
            drop(connection);
            output.is_ok_and(|output| output == b"off\n")
        });
    }
    let mut whole = 0;
    while let Some(ended) = ends.join_next().await {
        whole += u32::from(ended?);
    }
    Ok(whole)
}
