//! A small root file system, an agent that is a shell, and a look at what the kernel still holds.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandglass_engine::engine::{Engine, Exit, Presence, SandboxSpec, SessionEnds};
use sandglass_engine::gvisor::{Airlocks, Driver, GvisorConfig, GvisorEngine, HostPaths};
use sandglass_engine::network::Assignments;
use sandglass_linux::cgroup::{self, Cgroups};
use sandglass_linux::{loopdev, mount};
use sandglass_types::{Digest, InstanceId, Limits, SandboxId};

/// An agent that does what it is told, one line at a time.
const AGENT: &str = "#!/bin/busybox sh\nwhile read -r line; do eval \"$line\"; done\n";

const ROOTFS: Digest = Digest::from_bytes([0x5a; 32]);

/// Most that one answer may take on a busy machine.
const ANSWER: Duration = Duration::from_secs(60);

/// Runs a test both over the control socket and by the command line of `runsc`.
pub(crate) fn by_both(test: impl Fn(Driver)) {
    for driver in [Driver::Fastest, Driver::CommandLine] {
        eprintln!("driver: {driver:?}");
        test(driver);
    }
}

/// One data folder and its engine.
pub(crate) struct Fixture {
    dir: tempfile::TempDir,
    instance: InstanceId,
    network: bool,
    driver: Driver,
    engine: Option<GvisorEngine>,
}

impl Fixture {
    /// Without a network, which most tests do not need.
    pub(crate) fn new() -> Self {
        Self::with(false, Driver::Fastest)
    }

    pub(crate) fn with_network() -> Self {
        Self::with(true, Driver::Fastest)
    }

    /// The way of driving `runsc` matters to the test.
    pub(crate) fn driven(network: bool, driver: Driver) -> Self {
        Self::with(network, driver)
    }

    fn with(network: bool, driver: Driver) -> Self {
        let dir = tempfile::Builder::new().prefix("sandglass-test-").tempdir().unwrap();
        let rootfs = dir.path().join("cache/rootfs").join(ROOTFS.to_string());
        for folder in ["bin", "etc", "proc", "sys", "dev", "tmp", "run"] {
            std::fs::create_dir_all(rootfs.join(folder)).unwrap();
        }
        std::fs::copy("/usr/bin/busybox", rootfs.join("bin/busybox")).expect("busybox-static is installed");
        std::os::unix::fs::symlink("busybox", rootfs.join("bin/sh")).unwrap();
        std::fs::write(rootfs.join("etc/template"), "of the template\n").unwrap();
        let guest = dir.path().join("agent");
        std::fs::write(&guest, AGENT).unwrap();
        std::fs::set_permissions(&guest, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut fixture = Self { dir, instance: InstanceId::random(), network, driver, engine: None };
        fixture.reopen();
        fixture
    }

    /// Ends the engine and leaves all else, for another process to go on with.
    pub(crate) fn close(&mut self) {
        self.engine = None;
    }

    pub(crate) const fn instance(&self) -> &InstanceId {
        &self.instance
    }

    /// From now on, and for sandboxes made from now on.
    pub(crate) fn drive(&mut self, driver: Driver) {
        self.driver = driver;
        self.reopen();
    }

    /// What a restarted host does.
    pub(crate) fn reopen(&mut self) {
        self.engine = None;
        self.engine = Some(open(self.path(), &self.instance, self.network, self.driver));
    }

    pub(crate) fn engine(&self) -> &GvisorEngine {
        self.engine.as_ref().unwrap()
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn sandbox_dir(&self, id: &SandboxId) -> PathBuf {
        self.path().join("data/sandboxes").join(id.as_str())
    }

    pub(crate) fn cgroups(&self) -> Cgroups {
        Cgroups::detect(Path::new(cgroup::ROOT), self.instance.as_str()).unwrap()
    }

    pub(crate) fn create(&self) -> SandboxSpec {
        let spec = spec(limits(1, 256, 128, 100));
        self.engine().create(&spec).unwrap();
        spec
    }

    pub(crate) fn run(&self) -> (SandboxSpec, Agent) {
        let spec = self.create();
        self.engine().start(&spec.id).unwrap();
        let agent = self.attach(&spec.id);
        (spec, agent)
    }

    pub(crate) fn attach(&self, id: &SandboxId) -> Agent {
        Agent { ends: self.engine().attach(id).unwrap(), unread: Vec::new() }
    }

    pub(crate) fn presence(&self, id: &SandboxId) -> Option<Presence> {
        let all = self.engine().list().unwrap();
        all.into_iter().find(|(found, _)| found == id).map(|(_, presence)| presence)
    }

    /// Waits for the end of a sandbox, but not for ever.
    pub(crate) fn wait(&self, id: &SandboxId) -> Exit {
        std::thread::scope(|scope| {
            let (sender, receiver) = std::sync::mpsc::channel();
            scope.spawn(move || sender.send(self.engine().wait(id)));
            receiver.recv_timeout(ANSWER).unwrap_or_else(|_| {
                // Which also ends the thread that waits.
                self.engine().destroy(id).unwrap();
                panic!("the sandbox did not end");
            })
        })
        .unwrap()
    }

    /// Everything of one sandbox, or of all, that the kernel or a folder still holds.
    pub(crate) fn leftovers(&self) -> Vec<String> {
        let mut found = Vec::new();
        found.extend(self.cgroups().children().unwrap().into_iter().map(|name| format!("cgroup {name}")));
        for (index, path) in loopdev::attached().unwrap() {
            if path.starts_with(self.path()) {
                found.push(format!("loop{index} {}", path.display()));
            }
        }
        for entry in std::fs::read_dir("/proc").unwrap() {
            let Ok(pid) = entry.unwrap().file_name().to_string_lossy().parse::<i32>() else { continue };
            for entry in mount::table(Some(pid)).unwrap_or_default() {
                let inside = entry.target.starts_with(self.path())
                    && entry.fstype != "nsfs"
                    && !entry.target.ends_with("data/ns");
                if inside || Path::new(&entry.source).starts_with(self.path()) {
                    found.push(format!("mount of {pid} at {}", entry.target.display()));
                }
            }
            let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&cmdline).contains(&*self.path().to_string_lossy()) {
                found.push(format!("process {pid}"));
            }
        }
        for folder in ["data/sandboxes", "data/runsc", "data/slots"] {
            let Ok(entries) = std::fs::read_dir(self.path().join(folder)) else { continue };
            for entry in entries {
                found.push(format!("file {}", entry.unwrap().path().display()));
            }
        }
        found
    }

    pub(crate) fn assert_nothing_left(&self) {
        assert_eq!(self.leftovers(), Vec::<String>::new());
        assert_eq!(self.engine().list().unwrap(), Vec::new());
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if let Some(engine) = &self.engine {
            for (id, _) in engine.list().unwrap_or_default() {
                if let Err(error) = engine.destroy(&id) {
                    eprintln!("{id} is left: {}", sandglass_types::error::Chain(&error));
                }
            }
        }
        self.engine = None;
        let pins = mount::below(self.path()).unwrap_or_default();
        let groups: Vec<_> = self.cgroups().parent_folders().filter(|folder| folder.exists()).collect();
        if !std::thread::panicking() {
            assert_eq!((pins, groups), (Vec::new(), Vec::new()), "the engine left something");
        }
    }
}

/// Opens the engine of a fixture's folder.
pub(crate) fn open(dir: &Path, instance: &InstanceId, network: bool, driver: Driver) -> GvisorEngine {
    let data = dir.join("data");
    let airlocks = || Arc::new(Assignments::open(&data, instance).unwrap()) as Arc<dyn Airlocks>;
    let config = GvisorConfig {
        paths: HostPaths { data: data.clone(), cache: dir.join("cache") },
        instance: instance.clone(),
        runsc: "/usr/bin/runsc".into(),
        guest: dir.join("agent"),
        guest_args: Vec::new(),
        airlocks: network.then(airlocks),
        driver,
    };
    GvisorEngine::open(config).unwrap()
}

pub(crate) fn limits(cpus: u32, memory_mib: u32, disk_mib: u32, processes: u32) -> Limits {
    sandglass_types::limits::Unchecked { cpus, memory_mib, disk_mib, processes }.try_into().unwrap()
}

pub(crate) fn spec(limits: Limits) -> SandboxSpec {
    SandboxSpec { id: SandboxId::random(), rootfs: ROOTFS, limits }
}

/// The agent's session.
pub(crate) struct Agent {
    ends: SessionEnds,
    unread: Vec<u8>,
}

impl Agent {
    pub(crate) fn send(&self, line: &str) {
        let mut bytes = format!("{line}\n").into_bytes();
        while !bytes.is_empty() {
            match rustix::io::write(&self.ends.to_agent, &bytes) {
                Ok(n) => drop(bytes.drain(..n)),
                Err(rustix::io::Errno::AGAIN) => {
                    assert!(ready(&self.ends.to_agent, PollFlags::OUT, ANSWER), "nobody reads");
                }
                Err(errno) => panic!("{errno}"),
            }
        }
    }

    /// Has a command line run and returns all that it printed, its exit code last.
    pub(crate) fn sh(&mut self, command: &str) -> String {
        self.send(&format!("{{ {command} ; }} 2>&1; echo \"<$?>\""));
        let deadline = Instant::now() + ANSWER;
        loop {
            if let Some(end) = self.unread.windows(2).position(|two| two == b">\n") {
                let answer: Vec<u8> = self.unread.drain(..end + 2).collect();
                return String::from_utf8(answer).unwrap().trim_end().to_owned();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let so_far = String::from_utf8_lossy(&self.unread).into_owned();
            assert!(ready(&self.ends.from_agent, PollFlags::IN, left), "no answer to {command}: {so_far}");
            let mut buffer = [0; 65536];
            match rustix::io::read(&self.ends.from_agent, &mut buffer) {
                Ok(0) => panic!("the agent is gone; {command} printed {so_far}"),
                Ok(n) => self.unread.extend_from_slice(&buffer[..n]),
                Err(rustix::io::Errno::AGAIN) => {}
                Err(errno) => panic!("{errno}"),
            }
        }
    }
}

fn ready(fd: &OwnedFd, flags: PollFlags, patience: Duration) -> bool {
    let timeout =
        Timespec { tv_sec: patience.as_secs().try_into().unwrap(), tv_nsec: patience.subsec_nanos().into() };
    poll(&mut [PollFd::from_borrowed_fd(fd.as_fd(), flags)], Some(&timeout)).unwrap() > 0
}
