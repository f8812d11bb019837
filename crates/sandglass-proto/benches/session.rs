//! How fast a session is over two pipes: the server's end on a tokio runtime, the agent's on two threads.
//!
//! `cargo bench -p sandglass-proto --bench session`

use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

use rustix::pipe::{fcntl_setpipe_size, pipe};
use sandglass_proto::session::{AgentSession, Epoch, Flow, Session, Target};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::task::JoinSet;

const TOTAL: usize = 2 << 30;

#[tokio::main]
async fn main() -> io::Result<()> {
    for capacity in [64 * 1024, 1024 * 1024] {
        println!("pipes of {} KiB", capacity / 1024);
        measure(capacity).await?;
    }
    Ok(())
}

async fn measure(capacity: usize) -> io::Result<()> {
    let (input, to_agent) = pipe()?;
    let (from_agent, output) = pipe()?;
    fcntl_setpipe_size(&to_agent, capacity)?;
    fcntl_setpipe_size(&from_agent, capacity)?;
    let (agent, _threads) = AgentSession::start(File::from(input), File::from(output))?;
    let (session, driver) = Session::connect(
        Receiver::from_owned_fd(from_agent)?,
        Sender::from_owned_fd(to_agent)?,
        Epoch::from_random(1),
    );
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        driver.await;
    });
    for flows in [1, 8] {
        let (near, far) = open(&session, &agent, flows).await;
        report("to the agent", flows, transfer(near, far, TOTAL / flows).await?);
        let (near, far) = open(&session, &agent, flows).await;
        report("from the agent", flows, transfer(far, near, TOTAL / flows).await?);
    }
    let (mut near, mut far) = open(&session, &agent, 1).await;
    let (mut near, mut far) = (near.remove(0), far.remove(0));
    tasks.spawn(async move {
        while let Ok(byte) = far.read_u8().await {
            if far.write_u8(byte).await.is_err() {
                break;
            }
        }
    });
    let mut rounds = Vec::new();
    for _ in 0..20_000 {
        let start = Instant::now();
        near.write_u8(1).await?;
        near.read_u8().await?;
        rounds.push(start.elapsed());
    }
    rounds.sort_unstable();
    println!("  round trip: p50 {:?}, p99 {:?}", rounds[rounds.len() / 2], rounds[rounds.len() * 99 / 100]);
    Ok(())
}

async fn open(session: &Session, agent: &AgentSession, count: usize) -> (Vec<Flow>, Vec<Flow>) {
    let (mut near, mut far) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let (opened, accepted) = tokio::join!(session.open(Target::GuestApi), async {
            agent.accept().await.expect("the session lives").accept()
        });
        near.push(opened.expect("the agent accepts"));
        far.push(accepted);
    }
    (near, far)
}

async fn transfer(from: Vec<Flow>, to: Vec<Flow>, each: usize) -> io::Result<Duration> {
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for (mut from, mut to) in from.into_iter().zip(to) {
        tasks.spawn(async move {
            let chunk = vec![0x5A; 64 * 1024];
            for _ in 0..each / chunk.len() {
                from.write_all(&chunk).await?;
            }
            from.shutdown().await?;
            from.read_u8().await.map(drop)
        });
        tasks.spawn(async move {
            let mut buffer = vec![0; 64 * 1024];
            while to.read(&mut buffer).await? > 0 {}
            to.write_u8(1).await?;
            to.shutdown().await
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.map_err(io::Error::other)??;
    }
    Ok(start.elapsed())
}

#[allow(clippy::cast_precision_loss)]
fn report(direction: &str, flows: usize, time: Duration) {
    println!("  {direction}, {flows} flows: {:.2} GB/s", TOTAL as f64 / time.as_secs_f64() / 1e9);
}
