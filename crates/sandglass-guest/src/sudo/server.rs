//! The agent's side: checks who asks, starts the command, and stays with it.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, UCred,
};
use rustix::process::Signal;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

use super::plan::{Plan, plan};
use super::{Answer, GREETING, MAX_MESSAGE, Request, SOCKET, ToCommand, decode, encode};
use crate::agent::Agent;
use crate::exec::{Spawn, Step};
use crate::job::Job;
use crate::process::{Size, c_string, env_strings, look_up, raw_terminal, winsize};
use crate::processes::signal_session;
use crate::reaper::{Child, Status};
use crate::settings::DEFAULT_MAX_PROCESSES;
use crate::users::{User, Users};

/// Commands that run through `sudo` at one time.
const MAX_COMMANDS: usize = 128;

/// How long a client may take to say what it wants.
const REQUEST_TIME: Duration = Duration::from_secs(5);

/// The standard descriptors.
const FDS: usize = 3;

/// Signals that a client may have passed on.
const SIGNALS: [Signal; 8] = [
    Signal::HUP,
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::USR1,
    Signal::USR2,
    Signal::ALARM,
    Signal::CONT,
];

/// The socket that clients connect to.
#[derive(Debug)]
pub(crate) struct Listener(UnixListener);

impl Listener {
    /// Listens where every user can connect; who may is decided later.
    ///
    /// # Errors
    /// The socket can't be made.
    pub(crate) fn bind() -> io::Result<Self> {
        match std::fs::remove_file(SOCKET) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(SOCKET)?;
        std::fs::set_permissions(Path::new(SOCKET), std::fs::Permissions::from_mode(0o666))?;
        Ok(Self(listener))
    }
}

/// Serves clients until the agent ends.
pub(crate) async fn serve(agent: Arc<Agent>, listener: Listener) {
    let places = Arc::new(Semaphore::new(MAX_COMMANDS));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        match listener.0.accept().await {
            Ok((stream, _)) => {
                let agent_of_task = Arc::clone(&agent);
                agent.tasks.spawn(async move {
                    // Errors are those of the client: it went away or does not speak as it should.
                    let _ = converse(&agent_of_task, &stream).await;
                    drop(place);
                });
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// What came from a client so far.
#[derive(Default)]
struct Received {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// Who sent it, as the kernel has it.
    sender: Option<UCred>,
}

/// Receives bytes and what comes along.
fn receive(stream: &UnixStream, into: &mut Received) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut buffer = vec![0; 64 * 1024];
    let mut slices = [io::IoSliceMut::new(&mut buffer)];
    let received = rustix::net::recvmsg(stream, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?.bytes;
    for message in ancillary.drain() {
        match message {
            // What is too much is closed again at once.
            RecvAncillaryMessage::ScmRights(more) => {
                into.fds.extend(more.take(FDS.saturating_sub(into.fds.len())));
            }
            // The first sender counts: whoever shares its socket with another answers for it.
            RecvAncillaryMessage::ScmCredentials(sender) => {
                into.sender.get_or_insert(sender);
            }
            _ => {}
        }
    }
    into.bytes.extend_from_slice(&buffer[..received]);
    Ok(received)
}

async fn read_request(stream: &UnixStream, received: &mut Received) -> io::Result<Request> {
    // Only now the kernel says who sends, so only now the client may: gVisor's answer to SO_PEERCRED is the one
    // who asks.
    rustix::net::sockopt::set_socket_passcred(stream, true)?;
    loop {
        stream.writable().await?;
        match stream.try_write(&[GREETING]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => {
                other?;
                break;
            }
        }
    }
    loop {
        if let Some(request) = decode(&mut received.bytes)? {
            return Ok(request);
        }
        stream.readable().await?;
        match stream.try_io(Interest::READABLE, || receive(stream, received)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) if received.bytes.len() > MAX_MESSAGE + 64 * 1024 => {
                return Err(io::ErrorKind::InvalidData.into());
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

async fn answer(stream: &UnixStream, answer: &Answer, terminal: Option<&OwnedFd>) -> io::Result<()> {
    let message = encode(answer)?;
    let send = || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = terminal.iter().map(|fd| fd.as_fd()).collect();
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(rustix::net::sendmsg(stream, &[io::IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)?)
    };
    loop {
        stream.writable().await?;
        match stream.try_io(Interest::WRITABLE, send) {
            // Answers are short, so they go out whole or not at all.
            Ok(n) if n == message.len() => return Ok(()),
            Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// The user behind the kernel's word.
fn caller(users: &Users, sender: Option<UCred>) -> Result<(User, i32), String> {
    let sender = sender.ok_or("the kernel does not say who you are")?;
    let uid = sender.uid.as_raw();
    let user = users.by_uid(uid).ok_or_else(|| format!("you do not exist in the passwd database: {uid}"))?;
    Ok((user, sender.pid.as_raw_nonzero().get()))
}

struct Started {
    terminal: Option<OwnedFd>,
    /// A group made for it, because the caller is in none.
    own_job: Option<Arc<Job>>,
}

fn refused(name: &str, step: Step, errno: Errno) -> String {
    match (step, errno) {
        (Step::Exec, Errno::NOENT) => format!("{name}: command not found"),
        (Step::Exec, _) => format!("unable to execute {name}: {errno}"),
        (Step::Directory, _) => format!("unable to change to the directory: {errno}"),
        _ => format!("{step} failed: {errno}"),
    }
}

/// Starts a command in the caller's group of processes. Blocks.
fn start(
    agent: &Agent,
    plan: Plan,
    request: &Request,
    fds: &[OwnedFd; FDS],
    caller: i32,
    child: &Arc<Child>,
) -> Result<Started, String> {
    let program =
        look_up(&plan.program, &plan.path).ok_or_else(|| format!("{}: command not found", plan.program))?;
    let text = |text: String| c_string(text).map_err(|error| error.message.unwrap_or_default());
    let env = env_strings(plan.env).map_err(|error| error.message.unwrap_or_default())?;
    let args = plan.args.into_iter().map(text).collect::<Result<_, _>>()?;
    let (master, slave) = match request.tty {
        None => (None, None),
        Some(tty) => {
            let size = Size { cols: tty.cols, rows: tty.rows };
            let pair =
                raw_terminal(size, plan.identity.uid).map_err(|error| format!("no terminal: {error}"))?;
            (Some(pair.0), Some(pair.1))
        }
    };
    let is_tty = request.tty.map_or([false; FDS], |tty| tty.is_tty);
    let stdio = std::array::from_fn(|i| match &slave {
        Some(slave) if is_tty[i] => slave.as_fd(),
        _ => fds[i].as_fd(),
    });
    let failed = |error: io::Error| format!("no group of processes: {error}");
    let theirs = agent.jobs.join_of(caller);
    let own_job = theirs.is_none().then(|| agent.jobs.create()).transpose().map_err(failed)?;
    let own_procs = own_job.as_ref().map(|job| job.open()).transpose().map_err(failed)?.flatten();
    let spawn = Spawn {
        program: text(program)?,
        args,
        env,
        cwd: text(plan.cwd)?,
        identity: Some(&plan.identity),
        stdio,
        terminal: slave.as_ref().map(|slave| slave.as_fd()),
        join: theirs.as_ref().or(own_procs.as_ref()).map(|fd| fd.as_fd()),
        max_processes: agent
            .settings
            .get()
            .map_or(DEFAULT_MAX_PROCESSES, |settings| settings.max_processes()),
    };
    match agent.reaper.spawn(&spawn, child) {
        Ok(()) => Ok(Started { terminal: master, own_job }),
        Err(error) => {
            if let Some(job) = own_job {
                agent.jobs.retire(job);
            }
            Err(refused(&plan.program, error.step, error.errno))
        }
    }
}

async fn prepare(
    agent: &Arc<Agent>,
    stream: &UnixStream,
    received: &mut Received,
) -> io::Result<Option<(Started, Arc<Child>, bool)>> {
    let read = tokio::time::timeout(REQUEST_TIME, read_request(stream, received)).await;
    let request = read.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    let fds = std::mem::take(&mut received.fds);
    let fds: [OwnedFd; FDS] = fds.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    let background = request.background;
    let decide = || {
        let users = agent.users().map_err(|error| format!("reading the users failed: {error}"))?;
        let (user, pid) = caller(&users, received.sender)?;
        Ok((plan(&request, &user, &users)?, pid))
    };
    let decided: Result<_, String> = decide();
    let (plan, pid) = match decided {
        Ok((Some(plan), pid)) => (plan, pid),
        Ok((None, _)) => {
            answer(stream, &Answer::Exited(0), None).await?;
            return Ok(None);
        }
        Err(reason) => {
            answer(stream, &Answer::Refused(reason), None).await?;
            return Ok(None);
        }
    };
    match agent.start(move |agent, child| start(agent, plan, &request, &fds, pid, child)).await {
        (Ok(started), child) => Ok(Some((started, child, background))),
        (Err(reason), _) => {
            answer(stream, &Answer::Refused(reason), None).await?;
            Ok(None)
        }
    }
}

async fn converse(agent: &Arc<Agent>, stream: &UnixStream) -> io::Result<()> {
    let mut received = Received::default();
    let Some((started, child, background)) = prepare(agent, stream, &mut received).await? else {
        return Ok(());
    };
    let Started { terminal, own_job } = started;
    let told = answer(stream, &Answer::Started, terminal.as_ref()).await;
    let connected = match told {
        Ok(()) => follow_client(agent, stream, &child, terminal.as_ref(), received.bytes).await,
        Err(_) => false,
    };
    drop(terminal);
    if !connected && !background {
        agent.reaper.signal(&child, Signal::HUP, true);
    }
    let status = child.wait().await;
    if let Some(job) = own_job {
        agent.jobs.retire(job);
    }
    let end = match status {
        Status::Exited(code) => Answer::Exited(code),
        Status::Signaled(signal) => Answer::Signaled(signal),
    };
    if connected { answer(stream, &end, None).await } else { Ok(()) }
}

async fn obey(agent: &Agent, child: &Child, terminal: Option<&OwnedFd>, message: ToCommand) {
    match message {
        ToCommand::Signal(number) => {
            if let Some(signal) = SIGNALS.into_iter().find(|signal| signal.as_raw() == number) {
                agent.reaper.signal(child, signal, true);
            }
        }
        ToCommand::Resize { cols, rows } => {
            let Some(terminal) = terminal else { return };
            let _ = rustix::termios::tcsetwinsize(terminal, winsize(Size { cols, rows }));
            let session = child.pid();
            agent.blocking.run(move || signal_session(session, Signal::WINCH)).await;
        }
    }
}

/// Does what the client says until the command has ended; `false` if the client went away before.
async fn follow_client(
    agent: &Agent,
    stream: &UnixStream,
    child: &Child,
    terminal: Option<&OwnedFd>,
    mut bytes: Vec<u8>,
) -> bool {
    loop {
        loop {
            match decode(&mut bytes) {
                Ok(Some(message)) => obey(agent, child, terminal, message).await,
                Ok(None) => break,
                Err(_) => return false,
            }
        }
        tokio::select! {
            _ = child.wait() => return true,
            ready = stream.readable() => {
                let mut buffer = [0; 1024];
                match ready.and_then(|()| stream.try_read(&mut buffer)) {
                    Ok(0) => return false,
                    Ok(n) => bytes.extend_from_slice(&buffer[..n]),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => return false,
                }
            }
        }
    }
}
