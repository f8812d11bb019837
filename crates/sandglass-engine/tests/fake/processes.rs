//! How the processes of a sandbox are started, found, and told from all others.

use std::time::{Duration, Instant};

use sandglass_engine::engine::{Engine, EngineError, Presence};
use sandglass_engine::fake::{FakeEngine, MARKER};
use sandglass_linux::process::{is_stopped, table};
use sandglass_testkit::conformance::{Fixture, LineAgent, limits, spec};
use sandglass_types::{Digest, SandboxId};

use crate::subjects::{Real, config};

fn start(fixture: &Fixture<'_>) -> (SandboxId, LineAgent) {
    let spec = spec(Digest::from_bytes([0; 32]), limits(1, 128, 64, 16));
    fixture.engine().create(&spec).unwrap();
    fixture.engine().start(&spec.id).unwrap();
    let agent = LineAgent::new(fixture.engine().attach(&spec.id).unwrap());
    (spec.id, agent)
}

#[test]
fn an_agent_is_told_its_folder_and_gets_nothing_else_of_its_host() {
    let fixture = Fixture::new(&Real);
    let (id, mut agent) = start(&fixture);
    let home = fixture.path().join("data/sandboxes").join(id.as_str()).join("home");
    let home = home.to_str().unwrap();
    assert_eq!(agent.sh("echo $1 $HOME $(pwd)"), format!("{home} {home} {home}\n<0>"));
    let instance = fixture.instance();
    let environment = agent.sh("busybox env | busybox grep -vE '^(PWD|OLDPWD|_|SHLVL)=' | busybox sort");
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    assert_eq!(environment, format!("HOME={home}\nPATH={path}\n{MARKER}={instance}/{id}\n<0>"));
    // Not by a pipe: while the shell makes one, it has it open itself.
    assert_eq!(agent.sh("busybox ls /proc/$$/fd > fds; busybox grep -cE '^[0-2]$' fds"), "3\n<0>");
}

#[test]
fn a_pause_stops_every_process_and_a_resume_lets_every_one_run_on() {
    let fixture = Fixture::new(&Real);
    let (id, mut agent) = start(&fixture);
    // Starters of short-lived processes, which a single look would miss; each counts.
    agent.sh("for n in 1 2 3; do (i=0; while :; do busybox true; i=$((i+1)); echo $i > n$n; done) & done");
    let home = fixture.path().join("data/sandboxes").join(id.as_str()).join("home");
    let counters =
        || [1, 2, 3].map(|n| std::fs::read_to_string(home.join(format!("n{n}"))).unwrap_or_default());
    let ours = || -> Vec<i32> {
        let all = table().unwrap().into_iter().map(|entry| entry.identity.pid);
        let marker = format!("{MARKER}={}/{id}", fixture.instance()).into_bytes();
        let marked = |pid: &i32| {
            let environment = sandglass_linux::process::environment(*pid).unwrap().unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == marker)
        };
        all.filter(marked).collect()
    };
    for _ in 0..3 {
        fixture.engine().pause(&id).unwrap();
        let found = ours();
        assert!(found.len() >= 4, "{found:?}");
        assert!(found.iter().all(|pid| is_stopped(*pid).unwrap()), "{found:?}");
        let at = counters();
        assert_eq!(ours(), found);
        assert_eq!(counters(), at);
        fixture.engine().resume(&id).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while counters().iter().zip(&at).any(|(now, then)| now == then || now.is_empty()) {
            assert!(Instant::now() < deadline, "not all go on: {at:?} {:?}", counters());
            std::thread::yield_now();
        }
    }
    fixture.engine().destroy(&id).unwrap();
    fixture.assert_nothing_left();
}

#[test]
fn a_pause_that_was_broken_off_is_made_whole_by_a_resume() {
    let mut fixture = Fixture::new(&Real);
    let (id, mut agent) = start(&fixture);
    let said = agent.sh("busybox sleep 1000 & echo $! $$");
    let pids: Vec<i32> = said.split_whitespace().take(2).map(|pid| pid.parse().unwrap()).collect();
    fixture.engine().pause(&id).unwrap();
    // As if the host had died when it had stopped only the agent.
    let signal = |pid: i32| {
        let fd = sandglass_linux::process::PidFd::open(pid).unwrap().unwrap();
        fd.signal(rustix::process::Signal::CONT).unwrap();
    };
    signal(pids[0]);
    fixture.reopen();
    assert_eq!(presence(&fixture, &id), Some(Presence::Paused));
    fixture.engine().resume(&id).unwrap();
    assert_eq!(agent.sh("echo on"), "on\n<0>");
    // As if it had died when it had let even the agent run on.
    fixture.engine().pause(&id).unwrap();
    signal(pids[1]);
    assert_eq!(presence(&fixture, &id), Some(Presence::Running));
    fixture.engine().pause(&id).unwrap();
    fixture.engine().resume(&id).unwrap();
    assert_eq!(agent.sh("echo on"), "on\n<0>");
}

#[test]
fn an_agent_that_ends_at_once_or_is_no_program_harms_nobody() {
    let fixture = Fixture::new(&Real);
    for (program, args) in [("/bin/true", vec![]), ("/no/such/program", vec![])] {
        let mut other = config(fixture.path(), fixture.instance());
        (other.agent, other.agent_args) = (program.into(), args);
        let engine = FakeEngine::open(other).unwrap();
        let spec = spec(Digest::from_bytes([0; 32]), limits(1, 128, 64, 16));
        engine.create(&spec).unwrap();
        match engine.start(&spec.id) {
            Ok(()) => drop(engine.wait(&spec.id).unwrap()),
            Err(EngineError::Step { step, .. }) => assert_eq!(step, "start the agent"),
            Err(error) => panic!("{error}"),
        }
        engine.destroy(&spec.id).unwrap();
    }
    fixture.assert_nothing_left();
}

#[test]
fn a_record_with_another_process_s_pid_harms_nobody_here_either() {
    let mut fixture = Fixture::new(&Real);
    let (id, _agent) = start(&fixture);
    let path = fixture.path().join("data/sandboxes").join(id.as_str()).join("state.json");
    let mut record: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    // This very test, with a start time that is not its own: as after a reuse of the pid.
    record["agent"]["pid"] = std::process::id().into();
    std::fs::write(&path, record.to_string()).unwrap();
    fixture.reopen();
    assert_eq!(presence(&fixture, &id), Some(Presence::Remains));
    fixture.engine().destroy(&id).unwrap();
    fixture.assert_nothing_left();
}

fn presence(fixture: &Fixture<'_>, id: &SandboxId) -> Option<Presence> {
    let all = fixture.engine().list().unwrap();
    all.into_iter().find(|(found, _)| found == id).map(|(_, presence)| presence)
}
