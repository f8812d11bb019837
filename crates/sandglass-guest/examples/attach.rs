//! Attaches to an agent by its two FIFOs, configures it, and serves its guest API on a TCP port: the server's part
//! of the session and nothing else, for development.
//!
//! `attach TO_AGENT FROM_AGENT ADDRESS:PORT [GENERATION]`

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};

use sandglass_proto::control::{Configure, FromAgent, ToAgent};
use sandglass_proto::session::{Epoch, Session, Target};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

type Error = Box<dyn std::error::Error + Send + Sync>;

fn fifo(path: &str) -> Result<File, Error> {
    Ok(File::options().read(true).write(true).open(path)?)
}

fn main() -> Result<(), Error> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(run())
}

async fn run() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let mut next = || args.next().ok_or("usage: attach TO_AGENT FROM_AGENT ADDRESS:PORT [GENERATION]");
    let (to_agent, from_agent, listen) = (fifo(&next()?)?, fifo(&next()?)?, next()?);
    let generation = next().ok().map_or(Ok(1), |text| text.parse())?;
    let tasks = TaskTracker::new();
    let (session, link) = Session::new(Epoch::from_random(RandomState::new().hash_one(std::process::id())));
    let _threads = link.spawn_threads(from_agent, to_agent)?;
    eprintln!("{:?}", session.recv_control().await);
    let configure = Configure {
        generation,
        sandbox_id: "developmentsandbox00".into(),
        template_id: "base".into(),
        access_token: None,
        default_user: "user".into(),
        default_workdir: None,
        env: BTreeMap::new(),
        max_processes: std::env::var("MAX_PROCESSES").map_or(Ok(300), |text| text.parse())?,
    };
    session.send_control(&ToAgent::Configure(Box::new(configure))).await?;
    match session.recv_control().await {
        Ok(FromAgent::Configured { .. }) => eprintln!("configured"),
        other => return Err(format!("{other:?}").into()),
    }
    let listener = TcpListener::bind(listen).await?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        let session = session.clone();
        tasks.spawn(async move {
            match session.open(Target::GuestApi).await {
                Ok(mut flow) => {
                    let _ = tokio::io::copy_bidirectional(&mut stream, &mut flow).await;
                }
                Err(error) => eprintln!("no flow: {error}"),
            }
        });
    }
}
