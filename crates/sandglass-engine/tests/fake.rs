//! What is special about the engine that isolates nothing.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;

use sandglass_engine::engine::{Engine, EngineError, Exit, Presence, SandboxSpec, SessionEnds};
use sandglass_engine::fake::{FakeConfig, FakeEngine};
use sandglass_types::{Digest, InstanceId, Limits, SandboxId};

const AGENT: &str = "while read -r line; do eval \"$line\"; done";

fn open(data: &Path, instance: &InstanceId) -> FakeEngine {
    let config = FakeConfig {
        data: data.to_owned(),
        instance: instance.clone(),
        agent: "/bin/sh".into(),
        agent_args: vec!["-c".into(), AGENT.into(), "agent".into()],
    };
    FakeEngine::open(config).unwrap()
}

fn spec() -> SandboxSpec {
    SandboxSpec { id: SandboxId::random(), rootfs: Digest::from_bytes([0; 32]), limits: Limits::default() }
}

struct Agent {
    input: File,
    output: BufReader<File>,
}

impl Agent {
    fn of(engine: &FakeEngine, id: &SandboxId) -> Self {
        let SessionEnds { to_agent, from_agent } = engine.attach(id).unwrap();
        let blocking = |fd: OwnedFd| {
            rustix::io::ioctl_fionbio(&fd, false).unwrap();
            File::from(fd)
        };
        Self { input: blocking(to_agent), output: BufReader::new(blocking(from_agent)) }
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        answer.trim_end().to_owned()
    }
}

#[test]
fn a_sandbox_lives_in_its_folder_survives_its_host_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let instance = InstanceId::random();
    let engine = open(dir.path(), &instance);
    let spec = spec();
    let id = &spec.id;
    engine.create(&spec).unwrap();
    assert!(matches!(engine.create(&spec), Err(EngineError::Exists(_))));
    assert_eq!(engine.list().unwrap(), [(id.clone(), Presence::Created)]);
    engine.start(id).unwrap();
    let home = dir.path().join("sandboxes").join(id.as_str()).join("home");
    let home = home.to_str().unwrap();
    let mut agent = Agent::of(&engine, id);
    assert_eq!(agent.ask("x=kept; echo $1 $HOME $(pwd)"), format!("{home} {home} {home}"));
    assert_eq!(agent.ask("echo $SANDGLASS_SANDBOX"), format!("{instance}/{id}"));
    // Another session, another host.
    drop((agent, engine));
    let engine = open(dir.path(), &instance);
    assert_eq!(engine.list().unwrap(), [(id.clone(), Presence::Running)]);
    let mut agent = Agent::of(&engine, id);
    assert_eq!(agent.ask("echo $x"), "kept");
    engine.pause(id).unwrap();
    assert_eq!(engine.list().unwrap(), [(id.clone(), Presence::Paused)]);
    engine.resume(id).unwrap();
    // Without the marker, in a session of its own, its parent gone, and deaf: still found.
    assert_eq!(agent.ask("(setsid env -i sh -c 'trap \"\" TERM; sleep 1000' & echo started)"), "started");
    assert!(engine.stats(id).unwrap().processes >= 2);
    engine.destroy(id).unwrap();
    engine.destroy(id).unwrap();
    assert_eq!(engine.list().unwrap(), []);
    assert!(matches!(engine.start(id), Err(EngineError::NotFound(_))));
    assert_eq!(std::fs::read_dir(dir.path().join("sandboxes")).unwrap().count(), 0);
}

#[test]
fn the_end_of_the_agent_ends_what_it_left() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path(), &InstanceId::random());
    let spec = spec();
    engine.create(&spec).unwrap();
    engine.start(&spec.id).unwrap();
    let mut agent = Agent::of(&engine, &spec.id);
    let pid: i32 = agent.ask("(setsid sleep 1000 & echo $!)").parse().unwrap();
    writeln!(agent.input, "exit").unwrap();
    assert_eq!(engine.wait(&spec.id).unwrap(), Exit::Ended);
    assert_eq!(engine.list().unwrap(), [(spec.id.clone(), Presence::Remains)]);
    let left = sandglass_linux::process::table().unwrap();
    assert!(!left.iter().any(|entry| entry.identity.pid == pid && entry.resident_bytes > 0));
    engine.destroy(&spec.id).unwrap();
}

#[test]
fn processes_are_found_when_their_folder_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let engine = open(dir.path(), &InstanceId::random());
    let spec = spec();
    engine.create(&spec).unwrap();
    engine.start(&spec.id).unwrap();
    std::fs::remove_dir_all(dir.path().join("sandboxes").join(spec.id.as_str())).unwrap();
    assert_eq!(engine.list().unwrap(), [(spec.id.clone(), Presence::Remains)]);
    assert!(matches!(engine.create(&spec), Err(EngineError::Exists(_))));
    // Another instance neither sees nor ends it.
    let other = tempfile::tempdir().unwrap();
    let other = open(other.path(), &InstanceId::random());
    assert_eq!(other.list().unwrap(), []);
    other.destroy(&spec.id).unwrap();
    assert_eq!(engine.list().unwrap().len(), 1);
    engine.destroy(&spec.id).unwrap();
    assert_eq!(engine.list().unwrap(), []);
}
