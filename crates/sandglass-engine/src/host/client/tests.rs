//! Both ends of the line, with an engine that keeps a list instead of sandboxes.

use std::collections::BTreeSet;
use std::sync::Condvar;

use tokio::task::JoinSet;

use super::super::server;
use super::*;
use crate::collect::Tree;
use crate::engine::{Engine, EngineError, Feature, Isolation, Keep};
use crate::footprint::Footprint;

/// Knows which sandboxes there are, and nothing else.
#[derive(Debug, Default)]
struct ListEngine {
    ids: Mutex<BTreeSet<SandboxId>>,
    gone: Condvar,
}

impl ListEngine {
    fn require(&self, id: &SandboxId) -> Result<(), EngineError> {
        let known = self.ids.lock().unwrap().contains(id);
        if known { Ok(()) } else { Err(EngineError::NotFound(id.clone())) }
    }
}

impl Engine for ListEngine {
    fn info(&self) -> EngineInfo {
        EngineInfo {
            name: "list".into(),
            version: "0".into(),
            agent: None,
            isolation: Isolation::None,
            refuses: BTreeSet::from([Feature::Checkpoint]),
        }
    }

    fn create(&self, spec: &SandboxSpec) -> Result<(), EngineError> {
        let new = self.ids.lock().unwrap().insert(spec.id.clone());
        if new { Ok(()) } else { Err(EngineError::Exists(spec.id.clone())) }
    }

    fn start(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.require(id)
    }

    fn pause(&self, _: &SandboxId) -> Result<(), EngineError> {
        Err(EngineError::Unsupported { engine: "list", verb: "pause" })
    }

    fn resume(&self, _: &SandboxId) -> Result<(), EngineError> {
        panic!("a verb that panics")
    }

    fn checkpoint(&self, id: &SandboxId, _: &SandboxId, _: Keep) -> Result<(), EngineError> {
        self.require(id)
    }

    fn flush_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        self.require(image)
    }

    fn compress_image(&self, image: &SandboxId) -> Result<Compression, EngineError> {
        self.require(image).map(|()| Compression::NotWorth)
    }

    fn expand_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        self.require(image)
    }

    fn restore(&self, spec: &SandboxSpec, _: &SandboxId) -> Result<(), EngineError> {
        self.create(spec)
    }

    fn prepare_restore(&self, spec: &SandboxSpec, _: &SandboxId) -> Result<(), EngineError> {
        self.create(spec)
    }

    fn keep_disk(&self, id: &SandboxId, _: &SandboxId) -> Result<(), EngineError> {
        self.require(id)
    }

    fn create_volume(&self, _: &VolumeId, _: u32) -> Result<(), EngineError> {
        Ok(())
    }

    fn remove_volume(&self, _: &VolumeId) -> Result<(), EngineError> {
        Err(EngineError::Unsupported { engine: "list", verb: "remove a volume" })
    }

    fn open_volume(&self, _: &VolumeId) -> Result<OwnedFd, EngineError> {
        Err(EngineError::Unsupported { engine: "list", verb: "work on a volume" })
    }

    fn collect(&self, _: &SandboxId, _: Tree) -> Result<OwnedFd, EngineError> {
        Err(EngineError::Unsupported { engine: "list", verb: "read files" })
    }

    fn volumes(&self) -> Result<Vec<VolumeId>, EngineError> {
        Ok(vec!["volume7890123456789x".parse().unwrap()])
    }

    fn boot(&self, spec: &SandboxSpec, _: &SandboxId) -> Result<(), EngineError> {
        self.create(spec)
    }

    fn images(&self) -> Result<Vec<SandboxId>, EngineError> {
        Ok(Vec::new())
    }

    fn footprints(&self, ids: &[SandboxId]) -> Result<Footprints, EngineError> {
        let one = Footprint { bytes: u64::MAX, unique_bytes: u64::MAX, exact: false, compressed: false };
        let together = u64::try_from(ids.len()).unwrap();
        Ok(Footprints { each: ids.iter().map(|id| (id.clone(), one)).collect(), together })
    }

    fn remove_image(&self, _: &SandboxId) -> Result<(), EngineError> {
        Ok(())
    }

    fn set_deadline(&self, id: &SandboxId, _: Option<Deadline>) -> Result<(), EngineError> {
        self.require(id)
    }

    fn destroy(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.ids.lock().unwrap().remove(id);
        self.gone.notify_all();
        Ok(())
    }

    fn stats(&self, id: &SandboxId) -> Result<Stats, EngineError> {
        self.require(id)?;
        Ok(Stats { processes: 3, ..Stats::default() })
    }

    fn list(&self) -> Result<Vec<(SandboxId, Presence)>, EngineError> {
        Ok(self.ids.lock().unwrap().iter().map(|id| (id.clone(), Presence::Running)).collect())
    }

    fn attach(&self, id: &SandboxId) -> Result<SessionEnds, EngineError> {
        self.require(id)?;
        let (to_agent, from_agent) = fdpass::pair().unwrap();
        Ok(SessionEnds { to_agent, from_agent })
    }

    fn hand_out(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<SessionEnds, EngineError> {
        self.set_deadline(id, deadline)?;
        self.attach(id)
    }

    fn airlock_sockets(
        &self,
        id: &SandboxId,
        sockets: &[AirlockSocket],
    ) -> Result<Vec<OwnedFd>, EngineError> {
        self.require(id)?;
        Ok(sockets.iter().map(|_| fdpass::pair().unwrap().0).collect())
    }

    fn wait(&self, id: &SandboxId) -> Result<Exit, EngineError> {
        let mut ids = self.ids.lock().unwrap();
        while ids.contains(id) {
            ids = self.gone.wait(ids).unwrap();
        }
        Ok(Exit::Ended)
    }
}

fn start() -> (OwnedFd, std::thread::JoinHandle<std::io::Result<()>>) {
    let (serve, host) = fdpass::pair().unwrap();
    (
        serve,
        std::thread::spawn(move || {
            let engine: Arc<dyn Engine> = Arc::new(ListEngine::default());
            server::run(host, &engine)
        }),
    )
}

fn spec(id: &SandboxId) -> SandboxSpec {
    let rootfs = sandglass_types::Digest::from_bytes([7; 32]);
    SandboxSpec {
        id: id.clone(),
        rootfs,
        limits: sandglass_types::Limits::default(),
        deadline: None,
        unused: false,
        volumes: Vec::new(),
    }
}

/// A host with a [`ListEngine`], and the task that reads its answers.
struct Running {
    host: Host,
    reading: JoinSet<()>,
    server: std::thread::JoinHandle<std::io::Result<()>>,
}

impl Running {
    fn start() -> Self {
        let (line, server) = start();
        let (host, answers) = Host::connect(line).unwrap();
        let mut reading = JoinSet::new();
        reading.spawn(answers);
        Self { host, reading, server }
    }

    async fn stop(mut self) {
        drop(self.host);
        self.reading.shutdown().await;
        self.server.join().unwrap().unwrap();
    }
}

#[tokio::test]
async fn every_verb_reaches_the_engine_and_its_answer_comes_back() {
    let running = Running::start();
    let host = &running.host;
    let id = SandboxId::random();
    assert_eq!(host.describe().await.unwrap().name, "list");
    host.create(spec(&id)).await.unwrap();
    assert_eq!(host.list().await.unwrap(), [(id.clone(), Presence::Running)]);
    host.start(&id).await.unwrap();
    assert_eq!(host.stats(&id).await.unwrap().processes, 3);
    for ends in [host.attach(&id).await.unwrap(), host.hand_out(&id, None).await.unwrap()] {
        fdpass::send(&ends.to_agent, b"hello", &[]).unwrap();
        assert_eq!(fdpass::recv(&ends.from_agent).unwrap().unwrap().message, b"hello");
    }
    host.airlock_sockets(&id, [AirlockSocket::DnsUdp; fdpass::MAX_FDS]).await.unwrap();
    // More than any one packet can tell of.
    let many: Vec<_> = std::iter::repeat_with(SandboxId::random).take(2 * MAX_MEASURED + 1).collect();
    let measured = host.footprints(&many).await.unwrap();
    assert_eq!((measured.each.len(), measured.together), (many.len(), 2 * MAX_MEASURED as u64 + 1));
    // The answer to the wait comes after the one to the destroy that was asked later.
    let (exit, destroyed) = tokio::join!(host.wait(&id), host.destroy(&id));
    assert_eq!(exit.unwrap(), Exit::Ended);
    destroyed.unwrap();
    running.stop().await;
}

#[tokio::test]
async fn refusals_keep_their_kind() {
    let running = Running::start();
    let host = &running.host;
    let id = SandboxId::random();
    let kind = |error: HostError| error.refusal().unwrap();
    assert_eq!(kind(host.start(&id).await.unwrap_err()), RefusalKind::NotFound);
    assert_eq!(kind(host.pause(&id).await.unwrap_err()), RefusalKind::Unsupported);
    host.create(spec(&id)).await.unwrap();
    assert_eq!(kind(host.create(spec(&id)).await.unwrap_err()), RefusalKind::Exists);
    assert_eq!(kind(host.resume(&id).await.unwrap_err()), RefusalKind::Failed);
    running.stop().await;
}

#[tokio::test]
async fn questions_fail_once_the_host_is_gone() {
    let (line, host_end) = fdpass::pair().unwrap();
    let (host, answers) = Host::connect(line).unwrap();
    drop(host_end);
    answers.await;
    assert!(matches!(host.list().await, Err(HostError::Gone)));
}

#[test]
fn what_is_not_a_verb_is_refused_and_changes_nothing() {
    let (line, server) = start();
    let ask = |packet: &[u8], fds: &[std::os::fd::BorrowedFd<'_>]| -> Reply {
        fdpass::send(&line, packet, fds).unwrap();
        serde_json::from_slice(&fdpass::recv(&line).unwrap().unwrap().message).unwrap()
    };
    for packet in [
        &b"\xff\xfe"[..],
        b"{}",
        br#"{"seq":4,"verb":{"exec":["/bin/sh"]}}"#,
        br#"{"seq":4,"verb":{"destroy":"../../../../etc/pass"}}"#,
        br#"{"seq":4,"verb":{"attach":"/proc/1/root"}}"#,
    ] {
        let reply = ask(packet, &[]);
        let refused = matches!(reply.answer, Answer::Refused { kind: RefusalKind::NotAVerb, .. });
        assert!(refused && reply.seq == 0, "{reply:?}");
    }
    // As many sockets as go into one answer.
    let sockets = |count: usize| {
        let sockets = vec![AirlockSocket::DnsUdp; count];
        let call = Call { seq: 5, verb: Verb::AirlockSockets { id: SandboxId::random(), sockets } };
        ask(&serde_json::to_vec(&call).unwrap(), &[]).answer
    };
    let refused = |answer, wanted| matches!(answer, Answer::Refused { kind, .. } if kind == wanted);
    assert!(refused(sockets(fdpass::MAX_FDS), RefusalKind::NotFound));
    assert!(refused(sockets(fdpass::MAX_FDS + 1), RefusalKind::NotAVerb));
    // Descriptors that no verb wants are closed, and the verb is done.
    let (smuggled, other_end) = std::io::pipe().map(|(read, write)| (write, read)).unwrap();
    let reply = ask(br#"{"seq":9,"verb":"list"}"#, &[std::os::fd::AsFd::as_fd(&smuggled)]);
    assert_eq!(reply, Reply { seq: 9, answer: Answer::List(Vec::new()) });
    drop(smuggled);
    assert_eq!(std::io::Read::read(&mut { other_end }, &mut [0]).unwrap(), 0);
    drop(line);
    server.join().unwrap().unwrap();
}
