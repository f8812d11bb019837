//! One started process: its start, its input and output, and its end.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use connectrpc::ConnectError;
use rustix::process::Signal;
use sandglass_proto::services::process::{ProcessConfig, StartRequest};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::output::{Cause, Channel, Chunk, End, MAX_PIPE_CHUNK, Origin, Output, Subscription};
use super::prepare::{Prepared, prepare};
use super::stdio::{self, Size, Terminal};
use crate::agent::Agent;
use crate::exec::{Spawn, SpawnError, Step};
use crate::job::Job;
use crate::journal::Level;
use crate::processes::signal_session;
use crate::reaper::{Child, Status};
use crate::settings::Settings;
use crate::users::User;

/// How long output may still arrive once everything that could write it was killed.
const AFTER_KILL: Duration = Duration::from_secs(5);

/// Where a process reads from.
#[derive(Debug)]
enum Input {
    /// The null device.
    Nothing,
    /// A pipe. The token is cancelled when it shall be closed, also while a write waits for the process to read.
    Pipe(Mutex<Option<pipe::Sender>>, CancellationToken),
    /// A terminal.
    Terminal(Terminal, Mutex<()>),
}

/// A started process.
#[derive(Debug)]
pub(crate) struct Process {
    config: ProcessConfig,
    tag: Option<String>,
    child: Arc<Child>,
    /// Until it has ended.
    job: std::sync::Mutex<Option<Arc<Job>>>,
    input: Input,
    output: Output,
}

/// What the agent reads a process's output from.
enum Source {
    Pipes { stdout: pipe::Receiver, stderr: pipe::Receiver },
    Terminal(Terminal),
}

/// Descriptors of a process that is about to start.
struct Wiring {
    input: Input,
    source: Source,
    theirs: [OwnedFd; 3],
    terminal: bool,
}

fn wire(terminal: Option<Size>, stdin: bool, user: &User) -> io::Result<Wiring> {
    if let Some(size) = terminal {
        let (ours, theirs) = Terminal::open(size, user.identity.uid)?;
        return Ok(Wiring {
            input: Input::Terminal(ours.clone(), Mutex::new(())),
            source: Source::Terminal(ours),
            theirs: [theirs.try_clone()?, theirs.try_clone()?, theirs],
            terminal: true,
        });
    }
    let (their_input, input) = if stdin {
        let (read, write) = stdio::pipe()?;
        (read, Input::Pipe(Mutex::new(Some(stdio::sender(write)?)), CancellationToken::new()))
    } else {
        (stdio::null()?, Input::Nothing)
    };
    let (stdout, their_stdout) = stdio::pipe()?;
    let (stderr, their_stderr) = stdio::pipe()?;
    let source = Source::Pipes { stdout: stdio::receiver(stdout)?, stderr: stdio::receiver(stderr)? };
    Ok(Wiring { input, source, theirs: [their_input, their_stdout, their_stderr], terminal: false })
}

fn start_error(config: &ProcessConfig, error: SpawnError) -> ConnectError {
    match error.step {
        Step::Exec if error.errno == rustix::io::Errno::AGAIN => {
            ConnectError::resource_exhausted("the user runs too many processes")
        }
        Step::Exec => ConnectError::invalid_argument(format!("exec: {:?}: {}", config.cmd, error.errno)),
        Step::Directory => ConnectError::invalid_argument(format!("chdir: {}", error.errno)),
        Step::Clone => ConnectError::resource_exhausted(format!("{error}: {}", error.errno)),
        _ => ConnectError::internal(format!("{error}: {}", error.errno)),
    }
}

/// Starts what `request` asks for, attaches `origin` to it, and looks after it until it has ended. Not to be
/// cancelled: call it in a task.
///
/// # Errors
/// `invalid_argument` if it can't be right, `resource_exhausted` if there is no room.
pub(crate) async fn start(
    agent: &Arc<Agent>,
    request: StartRequest,
    user: User,
    settings: Arc<Settings>,
    limit: Option<Duration>,
    origin: Origin,
) -> Result<(Arc<Process>, Subscription), ConnectError> {
    if !agent.processes.has_room() {
        return Err(ConnectError::resource_exhausted("too many processes"));
    }
    let config = request.process.into_option().unwrap_or_default();
    let size = request.pty.into_option().map(|pty| {
        let size = pty.size.into_option().unwrap_or_default();
        terminal_size(size.cols, size.rows)
    });
    let stdin = request.stdin.unwrap_or(true);
    let failed = |error: io::Error| ConnectError::resource_exhausted(format!("starting failed: {error}"));
    let wiring = wire(size, stdin, &user).map_err(failed)?;

    let (theirs, terminal) = (wiring.theirs, wiring.terminal);
    let work = move |agent: &Agent, child: &Arc<Child>| -> Result<_, ConnectError> {
        let Prepared { program, args, mut env, cwd } = prepare(&config, &user, &settings)?;
        let job = agent.jobs.create().map_err(failed)?;
        let procs = job.open().map_err(failed)?;
        job.mark(&mut env);
        let request = Spawn {
            program,
            args,
            env,
            cwd,
            identity: agent.sole_user.is_none().then_some(&user.identity),
            stdio: [theirs[0].as_fd(), theirs[1].as_fd(), theirs[2].as_fd()],
            terminal: terminal.then(|| theirs[0].as_fd()),
            join: procs.as_ref().map(|procs| procs.as_fd()),
            max_processes: settings.max_processes(),
        };
        match agent.reaper.spawn(&request, child) {
            Ok(()) => Ok((config, job)),
            Err(error) => {
                agent.jobs.retire(job);
                Err(start_error(&config, error))
            }
        }
    };
    let (spawned, child) = agent.start(work).await;
    let (config, job) = spawned?;

    let process = Arc::new(Process {
        config,
        tag: request.tag,
        child,
        job: std::sync::Mutex::new(Some(job)),
        input: wiring.input,
        output: Output::default(),
    });
    // Before anything is read: what it writes at once must not be lost.
    let subscription =
        process.output.attach(origin).ok_or_else(|| ConnectError::internal("no subscriber"))?;
    agent.processes.add(Arc::clone(&process));
    agent.journal.add(Level::Info, &format!("started: {}", shown(&process.config)), &about(&process));
    agent.tasks.spawn(supervise(Arc::clone(agent), Arc::clone(&process), wiring.source, limit));
    Ok((process, subscription))
}

/// A size that a terminal can have.
pub(crate) fn terminal_size(cols: u32, rows: u32) -> Size {
    let clip = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
    Size { cols: clip(cols), rows: clip(rows) }
}

/// A command, for people.
fn shown(config: &ProcessConfig) -> String {
    // What a client's shell was told says more than that it is one.
    match config.args.as_slice() {
        [first, second, command] if first == "-l" && second == "-c" => command.clone(),
        args => std::iter::once(&config.cmd).chain(args).map(String::as_str).collect::<Vec<_>>().join(" "),
    }
}

fn about(process: &Process) -> [(&'static str, String); 1] {
    [("pid", process.child.pid().to_string())]
}

/// How a process ended, for people.
fn told(status: Status, cause: Cause) -> (Level, String) {
    match (cause, status) {
        (Cause::Memory, _) => (Level::Error, "ended for want of memory".into()),
        (Cause::TimeLimit, _) => (Level::Warn, "ended at its time limit".into()),
        (Cause::Itself, Status::Exited(0)) => (Level::Info, "ended with code 0".into()),
        (Cause::Itself, Status::Exited(code)) => (Level::Warn, format!("ended with code {code}")),
        (Cause::Itself, Status::Signaled(signal)) => (Level::Warn, format!("ended by signal {signal}")),
    }
}

/// Carries the output until there can't be any more, ends the process at its time limit, and records its end.
async fn supervise(agent: Arc<Agent>, process: Arc<Process>, source: Source, limit: Option<Duration>) {
    let mut pumps = JoinSet::new();
    match source {
        Source::Pipes { stdout, stderr } => {
            pumps.spawn(pump_pipe(Arc::clone(&process), Channel::Stdout, stdout));
            pumps.spawn(pump_pipe(Arc::clone(&process), Channel::Stderr, stderr));
        }
        Source::Terminal(terminal) => {
            pumps.spawn(pump_terminal(Arc::clone(&process), terminal));
        }
    }
    let ended = async {
        while pumps.join_next().await.is_some() {}
        process.child.wait().await
    };
    let mut cause = Cause::Itself;
    let status = match limit {
        None => ended.await,
        Some(limit) => {
            tokio::pin!(ended);
            tokio::select! {
                status = &mut ended => status,
                () = agent.clock.sleep(limit) => {
                    cause = Cause::TimeLimit;
                    process.kill(&agent).await;
                    match tokio::time::timeout(AFTER_KILL, &mut ended).await {
                        Ok(status) => status,
                        Err(_) => process.child.wait().await,
                    }
                }
            }
        }
    };
    if process.job().is_some_and(|job| job.ran_out_of_memory()) {
        cause = Cause::Memory;
    }
    let (level, how) = told(status, cause);
    agent.journal.add(level, &format!("{how}: {}", shown(&process.config)), &about(&process));
    process.output.finish(End { status, cause, at: Instant::now(), epoch: agent.processes.epoch() });
    process.close_input().await;
    let job = process.job.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(job) = job {
        let retiring = Arc::clone(&agent);
        agent.blocking.run(move || retiring.jobs.retire(job)).await;
    }
}

async fn pump_pipe(process: Arc<Process>, channel: Channel, mut pipe: pipe::Receiver) {
    let mut buffer = vec![0; MAX_PIPE_CHUNK];
    loop {
        match pipe.read(&mut buffer).await {
            Ok(0) | Err(_) => return,
            Ok(n) => {
                // A copy, for it may be kept: it must not keep a whole buffer for each byte.
                let bytes = Bytes::copy_from_slice(&buffer[..n]);
                process.output.publish(Chunk { channel, bytes }, &process.child).await;
            }
        }
    }
}

/// A terminal stays open as long as any background process holds it, so it is done once the process that it was
/// made for has ended and what was in it has been read.
async fn pump_terminal(process: Arc<Process>, terminal: Terminal) {
    let publish = async |bytes: Bytes| {
        process.output.publish(Chunk { channel: Channel::Pty, bytes }, &process.child).await;
    };
    loop {
        let read = tokio::select! {
            read = terminal.read() => read,
            _ = process.child.wait() => break,
        };
        match read {
            Ok(Some(bytes)) => publish(bytes).await,
            Ok(None) | Err(_) => break,
        }
    }
    process.child.wait().await;
    while let Ok(Some(bytes)) = terminal.read_now() {
        publish(bytes).await;
    }
}

impl Process {
    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        u32::try_from(self.child.pid()).unwrap_or(0)
    }

    /// The name that its starter gave it.
    pub(crate) fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// What it was started as.
    pub(crate) const fn config(&self) -> &ProcessConfig {
        &self.config
    }

    /// Its group, until it has ended.
    fn job(&self) -> Option<Arc<Job>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What it writes.
    pub(crate) const fn output(&self) -> &Output {
        &self.output
    }

    /// Ends it and all that it started, and waits until that is done.
    pub(crate) async fn kill(&self, agent: &Arc<Agent>) {
        agent.reaper.signal(&self.child, Signal::KILL, true);
        let Some(job) = self.job() else { return };
        if let Err(error) = agent.blocking.run(move || job.kill()).await {
            crate::log::line(&format!("ending a group of processes failed: {error}"));
        }
    }

    /// Asks it to end.
    pub(crate) fn terminate(&self, agent: &Agent) {
        agent.reaper.signal(&self.child, Signal::TERM, false);
    }

    /// Changes the size of its terminal, and tells the programs on it.
    ///
    /// # Errors
    /// It has none.
    pub(crate) async fn resize(&self, agent: &Agent, size: Size) -> Result<(), ConnectError> {
        let Input::Terminal(terminal, _) = &self.input else {
            return Err(ConnectError::failed_precondition("tty not assigned to process"));
        };
        terminal
            .resize(size)
            .map_err(|error| ConnectError::internal(format!("resizing the terminal failed: {error}")))?;
        let session = self.child.pid();
        agent.blocking.run(move || signal_session(session, Signal::WINCH)).await;
        Ok(())
    }

    /// Writes to its standard input, as fast as it reads.
    ///
    /// # Errors
    /// `internal` if it has no such pipe, or not any more.
    pub(crate) async fn write_stdin(&self, bytes: &[u8]) -> Result<(), ConnectError> {
        let Input::Pipe(sender, closing) = &self.input else {
            return Err(ConnectError::internal("stdin not enabled or closed"));
        };
        let mut sender = sender.lock().await;
        let Some(pipe) = sender.as_mut() else {
            return Err(ConnectError::internal("stdin not enabled or closed"));
        };
        let result = tokio::select! {
            biased;
            () = closing.cancelled() => Err(io::ErrorKind::BrokenPipe.into()),
            result = pipe.write_all(bytes) => result,
        };
        result.map_err(|error| ConnectError::internal(format!("error writing to stdin: {error}")))
    }

    /// Types into its terminal.
    ///
    /// # Errors
    /// `internal` if it has none, or not any more.
    pub(crate) async fn write_terminal(&self, bytes: &[u8]) -> Result<(), ConnectError> {
        let Input::Terminal(terminal, turn) = &self.input else {
            return Err(ConnectError::internal("tty not assigned to process"));
        };
        let _turn = turn.lock().await;
        tokio::select! {
            result = terminal.write_all(bytes) => {
                result.map_err(|error| ConnectError::internal(format!("error writing to tty: {error}")))
            }
            _ = self.child.wait() => Err(ConnectError::internal("error writing to tty: the process has ended")),
        }
    }

    /// Closes its standard input; a write in progress ends.
    ///
    /// # Errors
    /// `unknown` if it has a terminal: type the end-of-file character instead.
    pub(crate) async fn close_stdin(&self) -> Result<(), ConnectError> {
        if matches!(self.input, Input::Terminal(..)) {
            return Err(ConnectError::new(
                connectrpc::ErrorCode::Unknown,
                "cannot close stdin for a process with a tty, send Ctrl+D (0x04) instead",
            ));
        }
        self.close_input().await;
        Ok(())
    }

    async fn close_input(&self) {
        if let Input::Pipe(sender, closing) = &self.input {
            closing.cancel();
            *sender.lock().await = None;
        }
    }
}
