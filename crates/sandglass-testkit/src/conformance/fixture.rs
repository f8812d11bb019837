//! One data folder and its engine.

use std::path::{Path, PathBuf};

use sandglass_engine::engine::{Engine, EngineError, Exit, Presence, SandboxSpec};
use sandglass_types::{Digest, InstanceId, Limits, SandboxId};

use super::agent::PATIENCE;
use super::{LineAgent, Subject};

/// A subject at work in a folder of its own.
pub struct Fixture<'a> {
    pub(super) subject: &'a dyn Subject,
    dir: tempfile::TempDir,
    instance: InstanceId,
    rootfs: Digest,
    /// Absent only between the end of a host and the start of the next.
    engine: Option<Box<dyn Engine>>,
}

impl<'a> Fixture<'a> {
    /// A new instance.
    ///
    /// # Panics
    /// The subject can't be opened.
    #[must_use]
    pub fn new(subject: &'a dyn Subject) -> Self {
        let dir = tempfile::Builder::new().prefix("sandglass-test-").tempdir().unwrap();
        let rootfs = subject.prepare(dir.path());
        let mut fixture = Self { subject, dir, instance: InstanceId::random(), rootfs, engine: None };
        fixture.reopen();
        fixture
    }

    /// What a restarted host does.
    pub fn reopen(&mut self) {
        self.engine = None;
        self.engine = Some(self.subject.open(self.path(), &self.instance));
    }

    /// The engine.
    ///
    /// # Panics
    /// Never: it is open whenever the fixture can be borrowed.
    #[must_use]
    pub fn engine(&self) -> &dyn Engine {
        self.engine.as_deref().unwrap()
    }

    /// The folder that the subject was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Whose sandboxes these are.
    #[must_use]
    pub fn instance(&self) -> &InstanceId {
        &self.instance
    }

    pub(super) fn sandbox_dir(&self, id: &SandboxId) -> PathBuf {
        self.path().join("data/sandboxes").join(id.as_str())
    }

    pub(super) fn spec(&self) -> SandboxSpec {
        spec(self.rootfs, limits(1, 256, 64, 100))
    }

    pub(super) fn create(&self) -> SandboxSpec {
        let spec = self.spec();
        self.engine().create(&spec).unwrap();
        spec
    }

    pub(super) fn run(&self) -> (SandboxSpec, LineAgent) {
        self.run_with(self.spec().limits)
    }

    pub(super) fn run_with(&self, limits: Limits) -> (SandboxSpec, LineAgent) {
        let spec = spec(self.rootfs, limits);
        self.engine().create(&spec).unwrap();
        self.engine().start(&spec.id).unwrap();
        let agent = self.attach(&spec.id);
        (spec, agent)
    }

    /// A sandbox in this state.
    pub(super) fn brought_to(&self, presence: Presence) -> SandboxSpec {
        let spec = self.create();
        if presence != Presence::Created {
            self.engine().start(&spec.id).unwrap();
        }
        match presence {
            Presence::Created | Presence::Running => {}
            Presence::Paused => self.engine().pause(&spec.id).unwrap(),
            Presence::Remains => {
                self.attach(&spec.id).send("exit 7");
                assert_eq!(self.wait(&spec.id), Exit::Ended);
            }
        }
        assert_eq!(self.presence(&spec.id), Some(presence));
        spec
    }

    pub(super) fn attach(&self, id: &SandboxId) -> LineAgent {
        LineAgent::new(self.engine().attach(id).unwrap())
    }

    pub(super) fn presence(&self, id: &SandboxId) -> Option<Presence> {
        let all = self.engine().list().unwrap();
        all.into_iter().find(|(found, _)| found == id).map(|(_, presence)| presence)
    }

    /// Waits for the end of a sandbox, but not for ever.
    pub(super) fn wait(&self, id: &SandboxId) -> Exit {
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // Nobody listens any more if it took too long.
                let _late = sender.send(self.engine().wait(id));
            });
            receiver.recv_timeout(PATIENCE).unwrap_or_else(|_| {
                // Which also ends the thread that waits.
                self.engine().destroy(id).unwrap();
                panic!("the sandbox did not end");
            })
        })
        .unwrap()
    }

    /// All that the machine or a folder still holds of the instance.
    #[must_use]
    pub fn leftovers(&self) -> Vec<String> {
        let mut found = self.subject.leftovers(self.path(), &self.instance);
        for (pid, text) in self.processes() {
            found.push(format!("process {pid}: {text}"));
        }
        for entry in std::fs::read_dir(self.path().join("data/sandboxes")).unwrap() {
            found.push(format!("file {}", entry.unwrap().path().display()));
        }
        found
    }

    /// Processes that name the instance or its folder in their command line or environment.
    pub(super) fn processes(&self) -> Vec<(i32, String)> {
        let names = [self.instance.as_str(), self.path().to_str().unwrap()];
        let all = sandglass_linux::process::table().unwrap().into_iter();
        all.filter_map(|entry| {
            let pid = entry.identity.pid;
            let command = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let environment = sandglass_linux::process::environment(pid).unwrap().unwrap_or_default();
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            let environment = String::from_utf8_lossy(&environment);
            names
                .iter()
                .any(|name| command.contains(name) || environment.contains(name))
                .then_some((pid, command))
        })
        .collect()
    }

    /// # Panics
    /// Something is left.
    pub fn assert_nothing_left(&self) {
        assert_eq!(self.leftovers(), Vec::<String>::new());
        assert_eq!(self.engine().list().unwrap(), Vec::new());
    }

    pub(super) fn destroy(&self, id: &SandboxId) {
        self.engine().destroy(id).unwrap();
        assert_eq!(self.presence(id), None);
        assert!(matches!(self.engine().stats(id), Err(EngineError::NotFound(_))));
    }
}

impl Drop for Fixture<'_> {
    fn drop(&mut self) {
        for (id, _) in self.engine().list().unwrap_or_default() {
            if let Err(error) = self.engine().destroy(&id) {
                eprintln!("{id} is left: {}", sandglass_types::error::Chain(&error));
            }
        }
        self.engine = None;
        if !std::thread::panicking() {
            assert_eq!(self.leftovers(), Vec::<String>::new(), "the engine left something");
        }
    }
}

/// Limits of one sandbox.
///
/// # Panics
/// One is out of its range.
#[must_use]
pub fn limits(cpus: u32, memory_mib: u32, disk_mib: u32, processes: u32) -> Limits {
    sandglass_types::limits::Unchecked { cpus, memory_mib, disk_mib, processes }.try_into().unwrap()
}

/// A new sandbox.
#[must_use]
pub fn spec(rootfs: Digest, limits: Limits) -> SandboxSpec {
    SandboxSpec {
        id: SandboxId::random(),
        rootfs,
        limits,
        deadline: None,
        unused: false,
        volumes: Vec::new(),
    }
}
