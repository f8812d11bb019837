//! A server of the bench's own: this very program on a folder of its own, and the proof that nothing of it is left.

use std::io::BufReader;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fs_err as fs;
use rustix::process::{Pid, Signal, kill_process};
use sandglass_engine::gvisor::{HostPaths, cache};
use sandglass_engine::network::DEFAULT_SIZE;
use sandglass_linux::namespace::Netns;
use serde_json::Value;
use tokio::sync::oneshot;

use crate::cli;
use crate::client::Api;
use crate::data_dir::DataDir;

/// Not below `/tmp`, which may be memory; sandboxes have their disks here.
pub(super) const PARENT: &str = "/var/tmp";

/// The first start on a machine prepares the template.
const START: Duration = Duration::from_secs(900);

/// An orderly stop takes a moment.
const STOP: Duration = Duration::from_secs(30);

/// How long what is being removed may still be there, in seconds.
const LEDGER: u32 = 30;

/// Between two looks at something that is about to change.
const INTERVAL: Duration = Duration::from_millis(20);

/// How many lines of the log are shown when something failed.
const LOG_LINES: usize = 20;

/// How much the machine can take is for the bench to find out.
const UNBOUNDED: &str = "
[quota]
sandboxes = 1000000
cpus = 1000000
memory_mib = 1000000000
[host]
memory_mib = 1000000000
cpu_overcommit = 1000000
disk_mib = 1000000000
loop_devices = 1000000
";

/// Where a server is reached.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    pub(crate) url: String,
    pub(crate) key: String,
}

impl Endpoint {
    /// The REST face.
    pub(crate) fn api(&self) -> anyhow::Result<Api> {
        Api::new(&cli::Remote::at(self.url.clone(), self.key.clone()))
    }
}

/// The server, from its start on. [`Server::stop`] must be called.
pub(crate) struct Server {
    program: PathBuf,
    folder: PathBuf,
    cache: PathBuf,
    child: Child,
    announced: Option<oneshot::Receiver<Endpoint>>,
    endpoint: Option<Endpoint>,
}

impl Server {
    /// Starts it, in a folder of its own in `parent`, with these settings beside those that `common` means.
    pub(crate) fn spawn(
        common: &cli::bench::Common,
        parent: &Path,
        mut settings: toml::Table,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("this program can't find itself")?;
        let folder = tempfile::Builder::new().prefix("sandglass-bench-").tempdir_in(parent)?.keep();
        let config = folder.join("config.toml");
        settings.extend(toml::from_str::<toml::Table>(UNBOUNDED)?);
        if let Some(path) = &common.runsc {
            settings.insert("runsc".into(), toml::Value::try_from(path)?);
        }
        fs::write(&config, toml::to_string(&settings)?)?;
        let mut child = Command::new(&program)
            .args(["serve", "--listen", "127.0.0.1:0", "--config"])
            .arg(&config)
            .arg("--data-dir")
            .arg(folder.join("data"))
            .arg("--cache-dir")
            .arg(&common.cache_dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(folder.join("server.log"))?.into_file())
            // A Ctrl-C at the terminal is for the bench: it still needs the server, to end its sandboxes.
            .process_group(0)
            .spawn()
            .context("the server could not be started")?;
        let output = child.stdout.take().context("the server has no output")?;
        let (announce, announced) = oneshot::channel();
        std::thread::spawn(move || read_settings(BufReader::new(output), announce));
        Ok(Self {
            program,
            folder,
            cache: common.cache_dir.clone(),
            child,
            announced: Some(announced),
            endpoint: None,
        })
    }

    /// Waits until it answers.
    pub(crate) async fn ready(&mut self) -> anyhow::Result<Endpoint> {
        let announced = self.announced.take().context("the server was waited for already")?;
        let endpoint = match tokio::time::timeout(START, announced).await {
            Ok(Ok(endpoint)) => endpoint,
            Ok(Err(_)) => bail!("the server did not start; the end of its log:\n{}", self.log_tail()),
            Err(_) => bail!("the server did not start within {} s", START.as_secs()),
        };
        self.endpoint = Some(endpoint.clone());
        Ok(endpoint)
    }

    /// The process of the half without privilege.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// This very program.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// The folder that templates are in.
    pub(crate) fn cache(&self) -> &Path {
        &self.cache
    }

    /// A folder that is looked at by the ledger, too, and removed in the end.
    pub(crate) fn reference(&self) -> PathBuf {
        self.folder.join("reference")
    }

    /// The id that all of its kernel objects carry.
    pub(crate) fn instance(&self) -> anyhow::Result<sandglass_types::InstanceId> {
        Ok(DataDir::open(&self.data())?.instance().clone())
    }

    /// The airlock of a running sandbox, by the name of its network that the host half keeps.
    pub(crate) fn airlock(&self, id: &str) -> anyhow::Result<Netns> {
        let host = self.data().join("host");
        let slot = fs::read_to_string(host.join("slots").join(id))?;
        Ok(Netns::open(&host.join("ns").join(format!("{}-air", slot.trim_end())))?)
    }

    /// Waits until nothing is left of a sandbox that was killed: the answer to the client comes before.
    pub(crate) async fn settle(&self, id: &str) -> anyhow::Result<()> {
        let id = id.parse().context("the server's answer names no sandbox")?;
        let paths = self.host_paths();
        let deadline = Instant::now() + STOP;
        // It is removed last.
        while paths.sandbox(&id).dir().exists() {
            if Instant::now() > deadline {
                bail!("sandbox {id} is still there after {} s", STOP.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    /// Waits until it has made in advance the networks of the next sandboxes, so that this is not done at the cost of
    /// what is measured next.
    pub(crate) async fn rest(&self) -> anyhow::Result<()> {
        let pins = self.data().join("host/ns");
        let deadline = Instant::now() + STOP;
        // Each has a namespace for the guest and one that ends its packets.
        while fs::read_dir(&pins)?.count() < 2 * DEFAULT_SIZE {
            if Instant::now() > deadline {
                bail!("the server has no networks ready after {} s", STOP.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    /// What the ledger says of it now, after a wait for what is being removed. It is an error if that is not clean.
    pub(crate) fn ledger(&self) -> anyhow::Result<Value> {
        self.ledger_of(&self.data())
    }

    fn ledger_of(&self, folder: &Path) -> anyhow::Result<Value> {
        let output = Command::new(&self.program)
            .arg("ledger")
            .arg("--data-dir")
            .arg(folder)
            .args(["--json", "--wait", &LEDGER.to_string()])
            .stdin(Stdio::null())
            .output()?;
        if !output.status.success() {
            let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            bail!("the ledger of {} is not clean: {}", folder.display(), said.concat().trim_end());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Ends all sandboxes and the server, and removes the folder if the ledger shows that nothing is left. What the
    /// ledger said is the answer.
    pub(crate) async fn stop(mut self) -> anyhow::Result<Value> {
        let emptied = self.empty().await;
        let stopped = self.terminate();
        let ledger = emptied.and(stopped).and_then(|()| {
            if self.reference().exists() {
                self.ledger_of(&self.reference())?;
            }
            self.ledger()
        });
        match ledger {
            Ok(ledger) => {
                for data in [self.data(), self.reference()] {
                    if data.exists() {
                        cache::forget(&self.cache, DataDir::open(&data)?.instance())?;
                    }
                }
                fs::remove_dir_all(&self.folder)?;
                Ok(ledger)
            }
            // There may be mounts in it.
            Err(error) => {
                Err(error.context(format!("what the bench left is kept in {}", self.folder.display())))
            }
        }
    }

    /// Ends what a client of this server could have made, also what was only asked for when the bench was interrupted.
    async fn empty(&self) -> anyhow::Result<()> {
        let Some(endpoint) = &self.endpoint else { return Ok(()) };
        let api = endpoint.api()?;
        let deadline = Instant::now() + STOP;
        loop {
            for sandbox in api.list("").await.context("the sandboxes could not be listed")? {
                let id = sandbox["sandboxID"].as_str().context("a sandbox has no id")?;
                // It may have ended by itself, meanwhile.
                let killed = api.kill(id).await;
                self.settle(id).await.or(killed)?;
            }
            match self.ledger()?["sandboxes"].as_u64() {
                Some(0) => return Ok(()),
                left if Instant::now() > deadline => bail!("{left:?} sandboxes are left"),
                _ => tokio::time::sleep(INTERVAL).await,
            }
        }
    }

    fn terminate(&mut self) -> anyhow::Result<()> {
        if self.child.try_wait()?.is_none() {
            kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        }
        let deadline = Instant::now() + STOP;
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => {
                    bail!("the server ended with {status}; the end of its log:\n{}", self.log_tail())
                }
                None if Instant::now() > deadline => {
                    self.child.kill()?;
                    self.child.wait()?;
                    bail!("the server did not stop within {} s", STOP.as_secs());
                }
                None => std::thread::sleep(INTERVAL),
            }
        }
    }

    /// Where its privileged half keeps things.
    pub(crate) fn host_paths(&self) -> HostPaths {
        HostPaths { data: self.data().join("host"), cache: self.cache.clone() }
    }

    fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn log_tail(&self) -> String {
        let text = fs::read(self.folder.join("server.log")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }
}

/// Reads what the server prints for a shell, and then whatever else it prints, so that it never blocks.
fn read_settings(output: impl std::io::BufRead, announce: oneshot::Sender<Endpoint>) {
    let mut announce = Some(announce);
    let (mut url, mut key) = (None, None);
    for line in output.lines().map_while(Result::ok) {
        match line.strip_prefix("export ").and_then(|line| line.split_once('=')) {
            Some(("E2B_API_URL", value)) => url = Some(value.to_owned()),
            Some(("E2B_API_KEY", value)) => key = Some(value.to_owned()),
            _ => {}
        }
        if let (Some(url), Some(key)) = (&url, &key)
            && let Some(announce) = announce.take()
        {
            let _ = announce.send(Endpoint { url: url.clone(), key: key.clone() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_are_those_that_a_shell_would_take() {
        let (announce, mut announced) = oneshot::channel();
        let printed = "export E2B_API_KEY=e2b_00\nexport E2B_API_URL=http://127.0.0.1:7\n# more\n";
        read_settings(printed.as_bytes(), announce);
        let endpoint = announced.try_recv().unwrap();
        assert_eq!((endpoint.url.as_str(), endpoint.key.as_str()), ("http://127.0.0.1:7", "e2b_00"));
        let (announce, mut announced) = oneshot::channel();
        read_settings("export E2B_API_KEY=e2b_00\n".as_bytes(), announce);
        announced.try_recv().unwrap_err();
    }
}
