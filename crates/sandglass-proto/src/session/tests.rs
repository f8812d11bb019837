//! Both ends together.

mod flows;
mod hostile;
mod pipes;

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

use super::*;
use crate::control::{Configure, FromAgent, MAX_CONTROL_LEN, ToAgent};

/// How long anything may take before a test fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(30);

async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("takes too long")
}

fn hello() -> FromAgent {
    FromAgent::Hello { revision: 1, agent_version: "test".into(), generation: 0 }
}

fn port(number: u16) -> Target {
    Target::Tcp(Loopback::v4(number.try_into().unwrap()))
}

/// A server and an agent over in-memory streams, and the tasks that drive them.
async fn pair() -> (Session, AgentSession, JoinSet<Closed>) {
    let (server_end, agent_end) = tokio::io::duplex(64 * 1024);
    let (reader, writer) = tokio::io::split(server_end);
    let (session, driver) = Session::connect(reader, writer, Epoch::from_random(7));
    let (agent, link) = AgentSession::new();
    let (reader, writer) = tokio::io::split(agent_end);
    let mut tasks = JoinSet::new();
    tasks.spawn(driver);
    tasks.spawn(link.run(reader, writer));
    assert_eq!(soon(agent.next_event()).await, Ok(AgentEvent::Attached));
    (session, agent, tasks)
}

/// Opens a flow and accepts it at the other end.
async fn open(session: &Session, agent: &AgentSession) -> (Flow, Flow) {
    let accept = async { agent.accept().await.unwrap().accept() };
    let (near, far) = soon(async { tokio::join!(session.open(Target::GuestApi), accept) }).await;
    (near.unwrap(), far)
}

/// Sends everything back until the peer ends the flow, for all flows to come.
async fn echo(agent: AgentSession) {
    let mut flows = JoinSet::new();
    while let Ok(incoming) = agent.accept().await {
        let flow = incoming.accept();
        flows.spawn(async move {
            let (mut reader, mut writer) = tokio::io::split(flow);
            tokio::io::copy(&mut reader, &mut writer).await?;
            writer.shutdown().await
        });
    }
}

/// Sends `length` bytes through an [`echo`] while reading them back.
async fn echo_once(session: &Session, seed: u8, length: usize) {
    let (mut reader, mut writer) = tokio::io::split(session.open(Target::GuestApi).await.unwrap());
    let sent: Vec<u8> =
        (0..length).map(|at| seed.wrapping_add(at.to_le_bytes()[0] ^ at.to_le_bytes()[1])).collect();
    let mut received = Vec::new();
    let write = async {
        writer.write_all(&sent).await.unwrap();
        writer.shutdown().await.unwrap();
    };
    let (read, ()) = tokio::join!(reader.read_to_end(&mut received), write);
    read.unwrap();
    assert!(received == sent, "bytes differ");
}
