//! What a server without privilege hears of its certificate.

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use sandglass_api::Certificate;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::time::timeout;

use super::keeper::Task;
use super::{parse, unusable};
use crate::startup::StartupError;

/// How long the first certificate may take. An authority on the internet looks at the domain's zone before it gives one.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

/// One line of what a keeper says, in JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Said {
    /// A certificate with those between it and what clients trust, and its key, each in PEM.
    Certificate { chain: String, key: String },
    /// There is none, and this is why.
    Failed(String),
}

/// What a server shows.
#[derive(Debug)]
pub(crate) enum Shown {
    /// One of its own authority's, and the file that clients have to trust.
    Own(Certificate, PathBuf),
    /// One that changes while it runs.
    Kept(Feed),
}

impl Shown {
    /// What clients have to trust, if it is the server's own authority.
    pub(crate) fn bundle(&self) -> Option<PathBuf> {
        match self {
            Self::Own(_, bundle) => Some(bundle.clone()),
            Self::Kept(_) => None,
        }
    }
}

/// The line of a keeper.
#[derive(Debug)]
pub(crate) struct Feed {
    domain: String,
    keeper: Child,
    line: OwnedFd,
}

impl Feed {
    /// Starts a keeper. It ends when nobody listens to it any more.
    pub(super) fn start(task: &Task) -> anyhow::Result<Self> {
        let mut keeper = Command::new("/proc/self/exe")
            .arg("keep-certificate")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("the process that keeps the certificate can't be started")?;
        let stdin = keeper.stdin.take().context("it has no standard input")?;
        serde_json::to_writer(stdin, task)?;
        let line = keeper.stdout.take().context("it has no standard output")?.into();
        Ok(Self { domain: task.domain.clone(), keeper, line })
    }
}

/// What a server shows from now on: the first certificate, and each that follows. What is returned beside it takes them in, and
/// ends when no more can come.
///
/// # Errors
/// There is none that can be used.
pub(crate) async fn follow(
    shown: Shown,
) -> Result<(watch::Receiver<Certificate>, Option<impl Future<Output = ()> + Send + 'static>), StartupError> {
    let feed = match shown {
        Shown::Own(certificate, _) => return Ok((watch::channel(certificate).1, None)),
        Shown::Kept(feed) => feed,
    };
    let mut heard = Heard::open(feed).map_err(|error| unusable(&error))?;
    let ended = || Err(anyhow::anyhow!("the process that keeps it has ended"));
    let first = match timeout(PATIENCE, heard.line()).await {
        Ok(first) => first.unwrap_or_else(ended).map_err(|error| unusable(&error))?,
        Err(elapsed) => {
            return Err(unusable(&anyhow::Error::new(elapsed).context("there is no certificate yet")));
        }
    };
    let (sender, receiver) = watch::channel(first);
    let following = async move {
        while let Some(said) = heard.line().await {
            match said {
                Ok(certificate) => {
                    tracing::info!(expires = %certificate.expires(), "there is a new certificate");
                    sender.send_replace(certificate);
                }
                Err(error) => tracing::error!("a new certificate can't be used: {error:#}"),
            }
        }
        tracing::error!(
            "the process that keeps the certificate has ended, so it stays as it is until this server is started again"
        );
        let _reaped = tokio::task::spawn_blocking(move || heard.keeper.wait()).await;
    };
    Ok((receiver, Some(following)))
}

/// What a keeper says, line by line.
struct Heard {
    domain: String,
    keeper: Child,
    lines: Lines<BufReader<pipe::Receiver>>,
}

impl Heard {
    fn open(feed: Feed) -> anyhow::Result<Self> {
        let pipe = pipe::Receiver::from_owned_fd(feed.line)?;
        Ok(Self { domain: feed.domain, keeper: feed.keeper, lines: BufReader::new(pipe).lines() })
    }

    /// What it says next; `None` once it has ended.
    async fn line(&mut self) -> Option<anyhow::Result<Certificate>> {
        let line = self.lines.next_line().await.ok()??;
        Some(self.parse(&line))
    }

    fn parse(&self, line: &str) -> anyhow::Result<Certificate> {
        match serde_json::from_str(line)? {
            Said::Failed(why) => bail!("{why}"),
            Said::Certificate { chain, key } => parse(chain.as_bytes(), key.as_bytes(), &self.domain),
        }
    }
}
