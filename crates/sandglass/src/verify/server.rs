//! A server in the stage: this very program, as anybody starts it.

use std::io::{BufRead as _, BufReader};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fs_err as fs;
use sandglass_linux::process::{Child, Launch, spawn};
use sandglass_types::InstanceId;
use tokio::sync::oneshot;

use crate::cli::Engine;

/// The template is prepared already.
const START: Duration = Duration::from_secs(60);

/// An orderly stop takes a moment.
const STOP: Duration = Duration::from_secs(30);

/// Where a server is reached, and as whom.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    pub(super) url: String,
    pub(super) key: String,
}

/// How to start one.
#[derive(Debug)]
pub(super) struct Setup {
    /// Its folder, of which `data` is the server's own.
    pub(super) folder: PathBuf,
    pub(super) cache: PathBuf,
    pub(super) engine: Engine,
    /// What its configuration says.
    pub(super) config: String,
    /// Variables that it has in its environment, besides `PATH`.
    pub(super) env: Vec<(&'static str, String)>,
}

/// One that runs.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) child: Child,
    pub(super) endpoint: Endpoint,
}

/// Makes the data folder of an instance, before its server does: so it is known outside of the stage what the server may
/// leave.
pub(super) fn name(folder: &Path, instance: &InstanceId, engine: Engine) -> anyhow::Result<()> {
    let data = folder.join("data");
    fs::create_dir_all(&data)?;
    let second = if engine == Engine::Fake { "fake\n" } else { "" };
    fs::write(data.join("instance"), format!("{instance}\n{second}"))?;
    Ok(())
}

impl Setup {
    pub(super) fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn log(&self) -> PathBuf {
        self.folder.join("server.log")
    }

    /// Starts it, and waits until it answers. `key` is one that it gave before.
    pub(super) async fn start(&self, listen: &str, key: Option<&str>) -> anyhow::Result<Server> {
        let program = std::env::current_exe().context("this program can't find itself")?;
        let config = self.folder.join("config.toml");
        fs::write(&config, &self.config)?;
        let (output, stdout) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let log = fs::OpenOptions::new().create(true).append(true).open(self.log())?;
        let mut launch = Launch::new(&program)?
            .args(["serve", "--listen", listen])?
            .arg("--config")?
            .arg(&config)?
            .arg("--data-dir")?
            .arg(self.data())?
            .arg("--cache-dir")?
            .arg(&self.cache)?
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")?;
        launch = match self.engine {
            Engine::Gvisor => launch.args(["--engine", "gvisor"])?,
            Engine::Fake => launch.args(["--engine", "fake", "--unsafe-no-isolation"])?,
        };
        for (name, value) in &self.env {
            launch = launch.env(name, value)?;
        }
        let child = spawn(&launch.stdout(&stdout)?.stderr(log.file())?)?;
        drop(stdout);
        let (announce, announced) = oneshot::channel();
        let key = key.map(str::to_owned);
        std::thread::spawn(move || read_settings(output, key, announce));
        match tokio::time::timeout(START, announced).await {
            Ok(Ok(endpoint)) => Ok(Server { child, endpoint }),
            _ => bail!("a server of the stage did not start; the end of its log:\n{}", self.log_tail()),
        }
    }

    pub(super) fn log_tail(&self) -> String {
        const LINES: usize = 20;
        let text = fs::read(self.log()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}

impl Server {
    /// Kills it as the kernel would when memory is short, and waits for its end.
    pub(super) fn kill(&self) -> anyhow::Result<()> {
        self.child.pidfd().kill()?;
        match self.child.wait(Some(Instant::now() + STOP))? {
            Some(_) => Ok(()),
            None => bail!("a server that was killed does not end"),
        }
    }
}

/// Reads what the server prints for a shell, and then whatever else it prints, so that it never blocks.
fn read_settings(output: OwnedFd, key: Option<String>, announce: oneshot::Sender<Endpoint>) {
    let mut announce = Some(announce);
    let (mut url, mut key) = (None, key);
    for line in BufReader::new(std::fs::File::from(output)).lines().map_while(Result::ok) {
        match line.strip_prefix("export ").and_then(|line| line.split_once('=')) {
            Some(("E2B_API_URL", value)) => url = Some(value.to_owned()),
            Some(("E2B_API_KEY", value)) => key = Some(value.to_owned()),
            _ => {}
        }
        if let (Some(url), Some(key)) = (&url, &key)
            && let Some(announce) = announce.take()
        {
            let _gone = announce.send(Endpoint { url: url.clone(), key: key.clone() });
        }
    }
}
