//! The agent on its development listener.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Pid, Signal};

use crate::api::eventually;

/// A running agent with a control group of its own, both of which end with this.
pub(crate) struct Native {
    child: Child,
    groups: PathBuf,
    pub(crate) api: SocketAddr,
}

/// A new group that nothing limits, in whatever hierarchy this machine has.
fn make_group() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("sandglass-guest-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let hierarchies =
        ["/sys/fs/cgroup/pids", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
    let mut error = None;
    for hierarchy in hierarchies.iter().map(Path::new).filter(|path| path.join("cgroup.procs").exists()) {
        let path = hierarchy.join(&name);
        match std::fs::create_dir(&path) {
            Ok(()) => return path,
            Err(refused) => error = Some(refused),
        }
    }
    panic!("these tests need root and control groups: {error:?}")
}

impl Native {
    /// Starts one whose default user is root.
    pub(crate) fn start(options: &[&str]) -> Self {
        let groups = make_group();
        let mut child = Command::new(env!("CARGO_BIN_EXE_sandglass-guest"))
            .args(["serve", "--listen", "127.0.0.1:0", "--user", "root", "--groups"])
            .arg(&groups)
            .args(options)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let api = line.trim().rsplit(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{line:?}"));
        Self { child, groups, api }
    }

    /// The agent's resident memory in KiB.
    pub(crate) fn rss_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    }
}

fn processes(group: &Path) -> Vec<Pid> {
    let text = std::fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).filter_map(Pid::from_raw).collect()
}

impl Drop for Native {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        eventually("the agent's groups are removed", || {
            for entry in std::fs::read_dir(&self.groups).into_iter().flatten().flatten() {
                if entry.path().is_dir() {
                    for pid in processes(&entry.path()) {
                        let _ = rustix::process::kill_process(pid, Signal::KILL);
                    }
                    let _ = std::fs::remove_dir(entry.path());
                }
            }
            std::fs::remove_dir(&self.groups).ok()
        });
    }
}
