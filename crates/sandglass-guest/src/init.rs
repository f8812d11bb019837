//! The agent as PID 1 of a sandbox.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use sandglass_proto::session::AgentSession;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::agent::Agent;
use crate::job::Jobs;
use crate::process::Origin;
use crate::{guard, http, log, session, sudo};

/// The port of the guest API, for programs inside.
const API_PORT: u16 = 49983;

/// Connections from programs inside at one time.
const MAX_LOCAL: usize = 128;

/// The agent's own folder: sockets and mounts, nothing for others to write.
pub(crate) const RUN_DIR: &str = "/run/sandglass";

/// Where the groups of processes are.
const JOBS_DIR: &str = "/run/sandglass/jobs";

/// Hierarchies that can hold groups, in order of preference: gVisor's own without controllers, then Linux's.
const HIERARCHIES: [(&str, &std::ffi::CStr); 3] =
    [("cgroup", c"job"), ("cgroup2", c""), ("cgroup", c"none,name=sandglass")];

/// Runs until the session ends, and with it the sandbox.
pub(crate) fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(&format!("starting failed: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// The two ends of the session, taken out of reach of anything that writes to standard output by habit.
///
/// # Errors
/// One of them is closed, or there is no null device.
pub(crate) fn take_stdio() -> io::Result<(File, File)> {
    let input: OwnedFd = io::stdin().as_fd().try_clone_to_owned()?;
    let output: OwnedFd = io::stdout().as_fd().try_clone_to_owned()?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok((input.into(), output.into()))
}

fn make_dir(path: &str, mode: u32) -> io::Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if !std::fs::symlink_metadata(path)?.is_dir() {
        return Err(io::Error::other(format!("{path} is not a directory")));
    }
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode))
}

fn mount_jobs() -> io::Result<Jobs> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let mut last = Errno::NODEV;
    for (kind, options) in HIERARCHIES {
        match rustix::mount::mount(kind, JOBS_DIR, kind, flags, options) {
            Ok(()) => return Jobs::below(Path::new(JOBS_DIR), true),
            Err(errno) => last = errno,
        }
    }
    Err(last.into())
}

/// Allows the agent, and what it starts, as many descriptors as there may be.
///
/// # Errors
/// The kernel refused.
pub(crate) fn raise_open_files() -> io::Result<()> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    Ok(rustix::process::setrlimit(Resource::Nofile, raised)?)
}

/// What a PID 1 has to see to before anything else runs.
fn prepare() -> io::Result<Jobs> {
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // Nobody inside, the guest's root included, may look into the agent's memory and descriptors.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    raise_open_files()?;
    make_dir("/run", 0o755)?;
    make_dir(RUN_DIR, 0o755)?;
    make_dir(JOBS_DIR, 0o755)?;
    make_dir("/tmp", 0o1777)?;
    mount_jobs().map_err(|error| io::Error::new(error.kind(), format!("mounting {JOBS_DIR}: {error}")))
}

fn run() -> io::Result<()> {
    let (input, output) = take_stdio()?;
    let jobs = prepare()?;
    let agent = Arc::new(Agent::new(jobs, None)?);
    crate::agent::runtime()?.block_on(async {
        let router = http::router(&agent);
        let api = TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, API_PORT))).await?;
        agent.tasks.spawn(serve_local(Arc::clone(&agent), api, router.clone()));
        agent.tasks.spawn(sudo::serve(Arc::clone(&agent), sudo::Listener::bind()?));
        guard::start(Arc::clone(&agent), tokio::runtime::Handle::current())?;
        let (session, _threads) = AgentSession::start(input, output)?;
        session::run(Arc::clone(&agent), session, router).await;
        Ok(())
    })
}

/// Serves programs inside, as many at one time as is sensible.
async fn serve_local(agent: Arc<Agent>, listener: TcpListener, router: axum::Router) {
    let places = Arc::new(Semaphore::new(MAX_LOCAL));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        match listener.accept().await {
            Ok((stream, _)) => {
                let _ = stream.set_nodelay(true);
                let connection = http::serve(&router, stream, Origin::Local);
                agent.tasks.spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            // Out of descriptors, mostly: others must be closed first.
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(100)).await,
        }
    }
}
