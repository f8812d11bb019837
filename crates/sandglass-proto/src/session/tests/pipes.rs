//! The agent with its threads, over real pipes that outlive the servers.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

use rustix::pipe::pipe;
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::task::JoinHandle as Task;

use super::*;
use crate::session::frame::{Frame, Kind};

struct Machine {
    agent: AgentSession,
    to_agent: OwnedFd,
    from_agent: OwnedFd,
    threads: [JoinHandle<()>; 2],
}

impl Machine {
    fn start() -> Self {
        let (input, to_agent) = pipe().unwrap();
        let (from_agent, output) = pipe().unwrap();
        let (agent, threads) = AgentSession::start(File::from(input), File::from(output)).unwrap();
        Self { agent, to_agent, from_agent, threads }
    }

    fn writer(&self) -> Sender {
        Sender::from_owned_fd(self.to_agent.try_clone().unwrap()).unwrap()
    }

    fn reader(&self) -> Receiver {
        Receiver::from_owned_fd(self.from_agent.try_clone().unwrap()).unwrap()
    }

    async fn attach(&self, epoch: u64) -> (Session, Task<Closed>) {
        let (session, driver) = Session::connect(self.reader(), self.writer(), Epoch::from_random(epoch));
        #[allow(clippy::disallowed_methods)] // the caller owns and awaits it
        let driver = tokio::spawn(driver);
        assert_eq!(soon(self.agent.next_event()).await, Ok(AgentEvent::Attached));
        self.agent.send_control(&hello()).await.unwrap();
        assert_eq!(soon(session.recv_control()).await, Ok(hello()));
        (session, driver)
    }

    /// The threads end once the pipes do.
    fn stop(self) {
        let Self { agent, to_agent, from_agent, threads } = self;
        drop((to_agent, from_agent));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        drop(agent);
    }
}

/// A payload that is one forged frame after the other, of every kind.
fn forged(epochs: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &epoch in epochs.iter().cycle() {
        for kind in 1..=10 {
            let epoch = Epoch::from_random(epoch);
            Frame { epoch, kind, flags: 0, flow: 1, payload: br#"{"type":"thawed"}"# }.encode(&mut bytes);
        }
        if bytes.len() > 60_000 {
            break;
        }
    }
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_flows_echo_through_pipes() {
    let machine = Machine::start();
    let (session, driver) = machine.attach(1).await;
    let mut tasks = JoinSet::new();
    tasks.spawn(echo(machine.agent.clone()));
    let mut clients = JoinSet::new();
    for seed in 0..50 {
        let session = session.clone();
        clients.spawn(async move { echo_once(&session, seed, 1_000_000 + usize::from(seed)).await });
    }
    while let Some(client) = soon(clients.join_next()).await {
        client.unwrap();
    }
    assert_eq!(session.stats(), Stats { frames: session.stats().frames, ..Stats::default() });
    drop(session);
    assert_eq!(soon(driver).await.unwrap(), Closed::Local);
    machine.stop();
    soon(tasks.join_next()).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_agent_left_in_mid_frame_never_sees_what_a_client_wrote() {
    let machine = Machine::start();
    let evil = forged(&[1, 2, 666]);
    // A server that dies after writing some bytes of a frame full of frames, at several places.
    for (round, cut) in (0..).zip([0, 1, 17, 31, 32, 33, 40, 64, 1_000, 30_000, evil.len() + 31]) {
        let (session, mut link) = Session::new(Epoch::from_random(1));
        let mut pipe = File::from(machine.to_agent.try_clone().unwrap());
        let mut nonblocking = machine.writer();
        link.outbound.next().await.unwrap().write_to_async(std::pin::pin!(&mut nonblocking)).await.unwrap();
        assert_eq!(soon(machine.agent.next_event()).await, Ok(AgentEvent::Attached), "{round}");
        let opening = session.open(Target::GuestApi);
        let mut opening = std::pin::pin!(opening);
        assert!(tokio::time::timeout(Duration::ZERO, &mut opening).await.is_err());
        link.outbound.try_next().unwrap().write_to(&mut pipe).unwrap();
        let mut flow = soon(machine.agent.accept()).await.unwrap().accept();
        let mut bytes = Vec::new();
        let epoch = Epoch::from_random(1);
        Frame { epoch, kind: Kind::Data as u8, flags: 0, flow: 1, payload: &evil }.encode(&mut bytes);
        soon(nonblocking.write_all(&bytes[..cut])).await.unwrap();
        let before = machine.agent.stats();
        // The next server attaches; the flow of the one before is gone, and nothing of it got through.
        let (session, driver) = machine.attach(2).await;
        assert_eq!(soon(flow.read_u8()).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        assert_eq!(flow.write(b"x").await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        let after = machine.agent.stats();
        assert_eq!(after.frames - before.frames, 1, "only the true ATTACH counts after cut {cut}");
        // The new session works although ids are used again.
        let (mut near, mut far) = open(&session, &machine.agent).await;
        drop(flow);
        near.write_all(b"fine").await.unwrap();
        let mut word = [0; 4];
        soon(far.read_exact(&mut word)).await.unwrap();
        assert_eq!(&word, b"fine");
        session.close();
        assert_eq!(soon(driver).await.unwrap(), Closed::Local);
    }
    machine.stop();
}

#[tokio::test]
async fn a_server_that_joins_in_mid_frame_ignores_what_a_guest_wrote() {
    let machine = Machine::start();
    let (session, driver) = machine.attach(1).await;
    let (near, mut far) = open(&session, &machine.agent).await;
    // A frame full of forged frames arrives while nobody reads, and the next server gets its second part.
    session.close();
    assert_eq!(soon(driver).await.unwrap(), Closed::Local);
    drop(near);
    let evil = forged(&[1, 3, 666]);
    soon(far.write_all(&evil)).await.unwrap();
    let mut skipped = [0; 10_000];
    soon(machine.reader().read_exact(&mut skipped)).await.unwrap();

    let (session, driver) = machine.attach(2).await;
    assert!(session.stats().noise.skipped_bytes > 0);
    assert_eq!(session.stats().frames, 1, "HELLO came first");
    assert_eq!(soon(far.write(b"x")).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    let (mut near, mut far) = open(&session, &machine.agent).await;
    far.write_all(&evil).await.unwrap();
    let mut received = vec![0; evil.len()];
    soon(near.read_exact(&mut received)).await.unwrap();
    assert_eq!(received, evil);
    session.close();
    assert_eq!(soon(driver).await.unwrap(), Closed::Local);
    machine.stop();
}

#[tokio::test]
async fn data_lost_by_an_attachment_does_not_look_like_an_orderly_end() {
    let machine = Machine::start();
    let (first, first_driver) = machine.attach(1).await;
    let (mut near, mut far) = open(&first, &machine.agent).await;
    near.write_all(b"all of a file").await.unwrap();
    near.shutdown().await.unwrap();
    soon(first.ping()).await.unwrap();
    first.close();
    assert_eq!(soon(first_driver).await.unwrap(), Closed::Local);
    let (second, driver) = machine.attach(2).await;
    let mut bytes = Vec::new();
    let error = soon(far.read_to_end(&mut bytes)).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    second.close();
    assert_eq!(soon(driver).await.unwrap(), Closed::Local);
    machine.stop();
}

#[tokio::test]
async fn an_answer_to_a_server_that_is_gone_is_not_sent_to_the_next() {
    let machine = Machine::start();
    let (first, first_driver) = machine.attach(1).await;
    first.close();
    assert_eq!(soon(first_driver).await.unwrap(), Closed::Local);
    let (second, driver) = Session::connect(machine.reader(), machine.writer(), Epoch::from_random(2));
    let mut tasks = JoinSet::new();
    tasks.spawn(driver);
    let refused = soon(async {
        loop {
            match machine.agent.send_control(&FromAgent::Frozen).await {
                Ok(()) => tokio::task::yield_now().await,
                Err(error) => break error,
            }
        }
    });
    assert!(matches!(refused.await, SendError::Detached));
    assert_eq!(soon(machine.agent.next_event()).await, Ok(AgentEvent::Attached));
    machine.agent.send_control(&hello()).await.unwrap();
    assert_eq!(soon(second.recv_control()).await, Ok(hello()));
    drop(second);
    soon(tasks.join_next()).await.unwrap().unwrap();
    machine.stop();
}

#[tokio::test]
async fn nothing_but_control_messages_passes_a_freeze() {
    let machine = Machine::start();
    let (session, driver) = machine.attach(1).await;
    let (mut near, mut far) = open(&session, &machine.agent).await;

    soon(session.hold()).await.unwrap();
    session.send_control(&ToAgent::Freeze).await.unwrap();
    assert_eq!(soon(machine.agent.next_event()).await, Ok(AgentEvent::Control(ToAgent::Freeze)));
    soon(machine.agent.hold()).await.unwrap();
    machine.agent.send_control(&FromAgent::Frozen).await.unwrap();
    assert_eq!(soon(session.recv_control()).await, Ok(FromAgent::Frozen));

    // Both sides go on writing, and nothing arrives.
    let (server_frames, agent_frames) = (session.stats().frames, machine.agent.stats().frames);
    near.write_all(b"to the agent").await.unwrap();
    far.write_all(b"to the server").await.unwrap();
    assert!(open_nothing(&session).await);
    soon(session.flush()).await.unwrap();
    soon(machine.agent.flush()).await.unwrap();
    for end in [&machine.to_agent, &machine.from_agent] {
        assert_eq!(rustix::io::ioctl_fionread(end).unwrap(), 0, "the stream is empty");
    }
    assert_eq!((session.stats().frames, machine.agent.stats().frames), (server_frames, agent_frames));

    session.send_control(&ToAgent::Thaw).await.unwrap();
    assert_eq!(soon(machine.agent.next_event()).await, Ok(AgentEvent::Control(ToAgent::Thaw)));
    machine.agent.release();
    machine.agent.send_control(&FromAgent::Thawed).await.unwrap();
    assert_eq!(soon(session.recv_control()).await, Ok(FromAgent::Thawed));
    session.release();
    let mut words = [0; 13];
    soon(near.read_exact(&mut words)).await.unwrap();
    assert_eq!(&words, b"to the server");
    soon(far.read_exact(&mut words[..12])).await.unwrap();
    assert_eq!(&words[..12], b"to the agent");
    session.close();
    assert_eq!(soon(driver).await.unwrap(), Closed::Local);
    machine.stop();
}

/// An opening that cannot succeed, given up.
async fn open_nothing(session: &Session) -> bool {
    tokio::time::timeout(Duration::from_millis(1), session.open(Target::GuestApi)).await.is_err()
}

#[tokio::test]
async fn a_new_server_ends_a_freeze() {
    let machine = Machine::start();
    let (session, driver) = machine.attach(1).await;
    soon(machine.agent.hold()).await.unwrap();
    session.close();
    assert_eq!(soon(driver).await.unwrap(), Closed::Local);
    let (session, driver) = machine.attach(2).await;
    let (near, far) = open(&session, &machine.agent).await;
    soon(session.ping()).await.unwrap();
    drop((near, far));
    session.close();
    assert_eq!(soon(driver).await.unwrap(), Closed::Local);
    machine.stop();
}
