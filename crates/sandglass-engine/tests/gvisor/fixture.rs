//! A small root file system, an agent that is a shell, and a look at what the kernel still holds.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sandglass_egress::policy::Openings;
use sandglass_engine::engine::{Engine, Exit, Presence, SandboxSpec};
use sandglass_engine::gvisor::{Airlocks, Driver, GvisorConfig, GvisorEngine, HostPaths};
use sandglass_engine::network::{Assignments, DEFAULT_SIZE, Filter};
use sandglass_linux::cgroup::{self, Cgroups};
use sandglass_linux::{loopdev, mount};
use sandglass_testkit::conformance::{self, LINE_AGENT, LineAgent, Subject, limits};
use sandglass_types::{Digest, InstanceId, Limits, SandboxId};

pub(crate) const ROOTFS: Digest = Digest::from_bytes([0x5a; 32]);

/// Most that one answer may take on a busy machine.
const ANSWER: Duration = Duration::from_secs(60);

/// Runs a test both over the control socket and by the command line of `runsc`.
pub(crate) fn by_both(test: impl Fn(Driver)) {
    for driver in [Driver::Fastest, Driver::CommandLine] {
        eprintln!("driver: {driver:?}");
        test(driver);
    }
}

/// The engine as the conformance suite sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gvisor {
    /// Whether it makes networks.
    pub(crate) network: bool,
    pub(crate) driver: Driver,
}

impl Subject for Gvisor {
    fn prepare(&self, dir: &Path) -> Digest {
        let rootfs = self.template(dir);
        for folder in ["bin", "etc", "proc", "sys", "dev", "tmp", "run"] {
            std::fs::create_dir_all(rootfs.join(folder)).unwrap();
        }
        std::fs::copy("/usr/bin/busybox", rootfs.join("bin/busybox")).expect("busybox-static is installed");
        std::os::unix::fs::symlink("busybox", rootfs.join("bin/sh")).unwrap();
        std::fs::write(rootfs.join("etc/template"), "of the template\n").unwrap();
        let guest = dir.join("agent");
        std::fs::write(&guest, format!("#!/bin/busybox sh\n{LINE_AGENT}\n")).unwrap();
        std::fs::set_permissions(&guest, std::fs::Permissions::from_mode(0o755)).unwrap();
        ROOTFS
    }

    fn open(&self, dir: &Path, instance: &InstanceId) -> Box<dyn Engine> {
        Box::new(open(dir, instance, *self))
    }

    fn template(&self, dir: &Path) -> PathBuf {
        dir.join("cache/rootfs").join(ROOTFS.to_string())
    }

    fn leftovers(&self, dir: &Path, instance: &InstanceId) -> Vec<String> {
        leftovers(dir, instance)
    }
}

/// One data folder and its engine.
pub(crate) struct Fixture {
    dir: tempfile::TempDir,
    instance: InstanceId,
    subject: Gvisor,
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
        let subject = Gvisor { network, driver };
        subject.prepare(dir.path());
        let mut fixture = Self { dir, instance: InstanceId::random(), subject, engine: None };
        fixture.reopen();
        fixture
    }

    /// Another instance that shares the cache folder of this one.
    pub(crate) fn beside(&self) -> Self {
        let dir = tempfile::Builder::new().prefix("sandglass-test-").tempdir().unwrap();
        std::os::unix::fs::symlink(self.cache(), dir.path().join("cache")).unwrap();
        std::fs::copy(self.path().join("agent"), dir.path().join("agent")).unwrap();
        let mut fixture = Self { dir, instance: InstanceId::random(), subject: self.subject, engine: None };
        fixture.reopen();
        fixture
    }

    /// Sandboxes made after the next start have another agent, which does the same.
    pub(crate) fn change_agent(&self) {
        let path = self.path().join("agent");
        let mut text = std::fs::read_to_string(&path).unwrap();
        text.push_str("# another one\n");
        std::fs::write(path, text).unwrap();
    }

    pub(crate) fn cache(&self) -> PathBuf {
        std::fs::canonicalize(self.path().join("cache")).unwrap()
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
        self.subject.driver = driver;
        self.reopen();
    }

    /// What a restarted host does.
    pub(crate) fn reopen(&mut self) {
        self.engine = None;
        self.engine = Some(open(self.path(), &self.instance, self.subject));
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
        cgroups(&self.instance)
    }

    pub(crate) fn create(&self) -> SandboxSpec {
        let spec = spec(limits(1, 256, 128, 100));
        self.engine().create(&spec).unwrap();
        spec
    }

    pub(crate) fn run(&self) -> (SandboxSpec, LineAgent) {
        let spec = self.create();
        self.engine().start(&spec.id).unwrap();
        let agent = self.attach(&spec.id);
        (spec, agent)
    }

    pub(crate) fn attach(&self, id: &SandboxId) -> LineAgent {
        LineAgent::new(self.engine().attach(id).unwrap())
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

    pub(crate) fn leftovers(&self) -> Vec<String> {
        leftovers(self.path(), &self.instance)
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

/// All of an instance that the kernel or a folder still holds.
fn leftovers(dir: &Path, instance: &InstanceId) -> Vec<String> {
    let mut found = Vec::new();
    found.extend(cgroups(instance).children().unwrap().into_iter().map(|name| format!("cgroup {name}")));
    for (index, path) in loopdev::attached().unwrap() {
        if path.starts_with(dir) {
            found.push(format!("loop{index} {}", path.display()));
        }
    }
    for entry in std::fs::read_dir("/proc").unwrap() {
        let Ok(pid) = entry.unwrap().file_name().to_string_lossy().parse::<i32>() else { continue };
        for entry in mount::table(Some(pid)).unwrap_or_default() {
            let inside =
                entry.target.starts_with(dir) && entry.fstype != "nsfs" && !entry.target.ends_with("data/ns");
            if inside || Path::new(&entry.source).starts_with(dir) {
                found.push(format!("mount of {pid} at {}", entry.target.display()));
            }
        }
        let cmdline = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&cmdline).contains(&*dir.to_string_lossy()) {
            found.push(format!("process {pid}"));
        }
    }
    for folder in ["data/sandboxes", "data/runsc", "data/slots"] {
        let Ok(entries) = std::fs::read_dir(dir.join(folder)) else { continue };
        for entry in entries {
            found.push(format!("file {}", entry.unwrap().path().display()));
        }
    }
    found
}

fn cgroups(instance: &InstanceId) -> Cgroups {
    Cgroups::detect(Path::new(cgroup::ROOT), instance.as_str()).unwrap()
}

/// Opens the engine of a fixture's folder.
pub(crate) fn open(dir: &Path, instance: &InstanceId, subject: Gvisor) -> GvisorEngine {
    let data = dir.join("data");
    let filter = || Filter::new(&Openings::default());
    let airlocks =
        || Arc::new(Assignments::open(&data, instance, filter(), DEFAULT_SIZE).unwrap()) as Arc<dyn Airlocks>;
    let config = GvisorConfig {
        paths: HostPaths { data: data.clone(), cache: dir.join("cache") },
        instance: instance.clone(),
        runsc: "/usr/bin/runsc".into(),
        guest: dir.join("agent"),
        guest_args: Vec::new(),
        airlocks: subject.network.then(airlocks),
        driver: subject.driver,
        keep_unneeded: Duration::ZERO,
        worker_program: program(),
    };
    GvisorEngine::open(config).unwrap()
}

/// The program that hosts start as themselves, from the same build as this test.
fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("sandglass");
    assert!(program.exists(), "{} is missing: build the workspace first", program.display());
    program
}

pub(crate) fn spec(limits: Limits) -> SandboxSpec {
    conformance::spec(ROOTFS, limits)
}
