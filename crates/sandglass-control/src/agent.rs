//! Bringing up the agent of one sandbox: its byte stream, its identity, its airlock's listeners.

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rand::RngExt as _;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use sandglass_egress::enforcer::Enforcer;
use sandglass_egress::proxy;
use sandglass_engine::engine::{AirlockSocket, SessionEnds};
use sandglass_engine::host::{Host, RefusalKind};
use sandglass_linux::redirect::original_destination;
use sandglass_proto::control::{Configure, FromAgent, Holder, MAX_IN_USE, REVISION, ToAgent, Uncounted};
use sandglass_proto::session::{Epoch, Session};
use sandglass_store::{CommandDefaults, SandboxRow};
use sandglass_types::{Error, ErrorKind, PauseMode, SandboxId};
use tokio::net::unix::pipe;
use tokio::net::{TcpListener, TcpStream, UdpSocket, UnixDatagram};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::egress::Egress;

/// How long a started or adopted agent may take to say hello. It takes milliseconds unless the machine is stuck.
const HELLO_PATIENCE: Duration = Duration::from_secs(30);

/// How long it may take to fall silent, or to speak again.
const FREEZE_PATIENCE: Duration = Duration::from_secs(10);

/// The first revision of agents that know [`ToAgent::FreezeDisk`].
pub(crate) const FREEZE_DISK_SINCE: u32 = 3;

/// The first revision of agents that know [`ToAgent::Idle`].
pub(crate) const IDLE_SINCE: u32 = 4;

/// How long it may take to say how long no command has run.
const IDLE_PATIENCE: Duration = Duration::from_secs(5);

/// How long it may take to write what programs wrote to the disk, and then to fall silent.
const SYNC_PATIENCE: Duration = Duration::from_secs(60);

/// How long it may take to put a generation in force.
const CONFIGURE_PATIENCE: Duration = Duration::from_secs(20);

/// Notices that an agent may send before it is configured: each is a line of the operator's log.
const MAX_NOTICES: usize = 16;

/// Programs that an error names.
const MAX_HOLDERS: usize = 8;

/// Characters of an agent's text that a log shows.
const MAX_SHOWN: usize = 200;

/// As much of an agent's text as belongs in a log; print it with `Debug`, which leaves no control character in it.
fn shown(text: &str) -> &str {
    text.char_indices().nth(MAX_SHOWN).map_or(text, |(end, _)| &text[..end])
}

const SILENT: &str = "the sandbox's agent did not answer";

/// Opens the session with an agent that was started: what is sent waits for it. The session's tasks end with `gone`.
///
/// # Errors
/// The host has no such sandbox, or it has ended.
pub(crate) async fn attach(
    host: &Host,
    id: &SandboxId,
    gone: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Session, Error> {
    let ends = host.attach(id).await.map_err(|error| match error.refusal() {
        // It has ended by itself, which is no state that a client could have known of.
        Some(RefusalKind::WrongState) => Error::internal(SILENT, error),
        _ => error.into(),
    })?;
    session(ends, gone, tasks)
}

/// The session over these ends. Its tasks end with `gone`.
///
/// # Errors
/// They can't be watched.
pub(crate) fn session(
    ends: SessionEnds,
    gone: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Session, Error> {
    let SessionEnds { to_agent, from_agent } = ends;
    let io = |error: std::io::Error| Error::internal(SILENT, error);
    for end in [&to_agent, &from_agent] {
        fcntl_getfl(end)
            .and_then(|flags| fcntl_setfl(end, flags | OFlags::NONBLOCK))
            .map_err(|error| io(error.into()))?;
    }
    // Unchecked, because the ends are open for both directions: so the stream survives when nobody reads or writes.
    let to_agent = pipe::Sender::from_owned_fd_unchecked(to_agent).map_err(io)?;
    let from_agent = pipe::Receiver::from_owned_fd_unchecked(from_agent).map_err(io)?;
    let (session, driver) = Session::connect(from_agent, to_agent, Epoch::from_random(rand::rng().random()));
    tasks.spawn(gone.clone().run_until_cancelled_owned(driver));
    Ok(session)
}

/// What an agent says of itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hello {
    /// What it understands.
    pub(crate) revision: u32,
    /// What is in force in it.
    pub(crate) generation: u32,
}

/// Waits for the hello of an agent that was started.
///
/// # Errors
/// It said nothing in time, or something else than hello.
pub(crate) async fn greet(session: &Session, id: &SandboxId) -> Result<Hello, Error> {
    let hello = timeout(HELLO_PATIENCE, session.recv_control())
        .await
        .map_err(|elapsed| Error::internal(SILENT, elapsed))?;
    match hello {
        Ok(FromAgent::Hello { revision, agent_version, generation }) if revision <= REVISION => {
            let version = shown(&agent_version);
            tracing::debug!(sandbox = %id, ?version, generation, "the agent said hello");
            Ok(Hello { revision, generation })
        }
        other => {
            let other = format!("{other:?}");
            tracing::warn!(sandbox = %id, hello = shown(&other), "bad hello");
            Err(Error::internal(SILENT, "its first message was no hello that this server understands"))
        }
    }
}

const UNCONFIGURED: &str = "the sandbox's agent could not be configured";

/// Tells an agent the row's generation: identity, token, environment, limits. [`configured`] waits for the answer.
///
/// # Errors
/// The session ended.
pub(crate) async fn configure(
    session: &Session,
    row: &SandboxRow,
    defaults: CommandDefaults,
) -> Result<(), Error> {
    let CommandDefaults { user, workdir, mut env } = defaults;
    env.extend(row.env.clone());
    let message = Configure {
        generation: row.generation.0,
        sandbox_id: row.id.to_string(),
        template_id: row.template.clone(),
        access_token: row.access_token.clone(),
        default_user: user,
        default_workdir: Some(workdir),
        env,
        max_processes: row.limits.processes(),
    };
    session
        .send_control(&ToAgent::Configure(Box::new(message)))
        .await
        .map_err(|error| Error::internal(UNCONFIGURED, error))
}

/// Waits until the row's generation is in force.
///
/// # Errors
/// The agent refused, or took too long.
pub(crate) async fn configured(session: &Session, row: &SandboxRow) -> Result<(), Error> {
    let answer = async {
        let mut notices = 0;
        loop {
            match session.recv_control().await {
                Ok(FromAgent::Configured { generation }) if generation == row.generation.0 => return Ok(()),
                Ok(FromAgent::Notice { message }) if notices < MAX_NOTICES => {
                    notices += 1;
                    tracing::info!(sandbox = %row.id, notice = ?shown(&message), "notice of the agent");
                }
                // A new one has nothing of its user's that could refuse.
                Ok(FromAgent::ConfigureFailed { reason }) if row.generation.0 > 1 => {
                    let message = format!("the sandbox does not let itself be resumed: {:?}", shown(&reason));
                    return Err(Error::new(ErrorKind::Conflict, message));
                }
                Ok(FromAgent::ConfigureFailed { reason }) => {
                    return Err(Error::internal(UNCONFIGURED, format!("{:?}", shown(&reason))));
                }
                Ok(_) => return Err(Error::internal(UNCONFIGURED, "it answered something else")),
                Err(closed) => return Err(Error::internal(UNCONFIGURED, closed)),
            }
        }
    };
    timeout(CONFIGURE_PATIENCE, answer).await.map_err(|elapsed| Error::internal(UNCONFIGURED, elapsed))?
}

const UNHEARD: &str = "the sandbox's agent did not answer, and it runs on";

/// Makes an agent say no more until [`thaw`]: what it has said is in the stream, and nothing is half said. Flows wait. Where
/// its files alone are kept, all that programs wrote is on its disk. Says what its programs have of volumes: it is the agent's word.
///
/// # Errors
/// It took too long, or the session ended.
pub(crate) async fn freeze(line: &Line, mode: PauseMode) -> Result<Vec<Holder>, Error> {
    let (message, patience) = match mode {
        PauseMode::Full => (ToAgent::Freeze, FREEZE_PATIENCE),
        PauseMode::Filesystem => (ToAgent::FreezeDisk, SYNC_PATIENCE),
    };
    let frozen = async {
        line.session.hold().await.map_err(|closed| Error::internal(UNHEARD, closed))?;
        let answer = line.ask(&message).await?;
        match answer {
            FromAgent::Frozen => Ok(Vec::new()),
            FromAgent::FrozenWith { in_use } if in_use.len() <= MAX_IN_USE => Ok(in_use),
            FromAgent::Unsavable { holders } => Err(unsavable(&holders, "deleted from its disk")),
            FromAgent::Displaced { holders } => Err(unsavable(&holders, DISPLACED)),
            FromAgent::Uncounted { why } => Err(uncounted(why)),
            other => Err(Error::internal(UNHEARD, format!("it answered {:?}", shown(&format!("{other:?}"))))),
        }
    };
    timeout(patience, frozen).await.map_err(|elapsed| Error::internal(UNHEARD, elapsed))?
}

/// Lets an agent speak again that has a new session, on which nothing is held. Whoever asks it next leaves its answer out.
///
/// # Errors
/// The session ended.
pub(crate) async fn awake(line: &Line) -> Result<(), Error> {
    line.tell(&ToAgent::Thaw).await
}

/// Lets an agent speak again.
///
/// # Errors
/// As [`freeze`].
pub(crate) async fn thaw(line: &Line) -> Result<(), Error> {
    line.session.release();
    let thawed = async {
        match line.ask(&ToAgent::Thaw).await? {
            FromAgent::Thawed => Ok(()),
            other => Err(Error::internal(UNHEARD, format!("it answered {:?}", shown(&format!("{other:?}"))))),
        }
    };
    timeout(FREEZE_PATIENCE, thawed).await.map_err(|elapsed| Error::internal(UNHEARD, elapsed))?
}

/// How long no command has run; zero while one does.
///
/// # Errors
/// It took too long, or the session ended.
pub(crate) async fn idle(line: &Line) -> Result<Duration, Error> {
    let asked = async {
        match line.ask(&ToAgent::Idle).await? {
            FromAgent::Idle { millis } => Ok(Duration::from_millis(millis)),
            other => Err(Error::internal(UNHEARD, format!("it answered {:?}", shown(&format!("{other:?}"))))),
        }
    };
    timeout(IDLE_PATIENCE, asked).await.map_err(|elapsed| Error::internal(UNHEARD, elapsed))?
}

/// A session on which questions are asked, one after the other. The agent answers each with one message, in their order; so
/// whoever stops to wait for an answer owes the next one to leave it out, or it would be taken for another's.
#[derive(Debug)]
pub(crate) struct Line {
    session: Session,
    /// Answers that are still to come.
    owed: AtomicU32,
}

impl Line {
    /// That of an agent which has answered all that it was asked.
    pub(crate) const fn new(session: Session) -> Self {
        Self { session, owed: AtomicU32::new(0) }
    }

    /// The session itself, for all but questions.
    pub(crate) const fn session(&self) -> &Session {
        &self.session
    }

    /// Sends a message.
    async fn tell(&self, message: &ToAgent) -> Result<(), Error> {
        self.session.send_control(message).await.map_err(|error| Error::internal(UNHEARD, error))?;
        self.owed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Sends a message, and waits for the answer.
    async fn ask(&self, message: &ToAgent) -> Result<FromAgent, Error> {
        let owed = self.owed.load(Ordering::Relaxed);
        self.tell(message).await?;
        for _late in 0..owed {
            self.answer().await?;
        }
        self.answer().await
    }

    async fn answer(&self) -> Result<FromAgent, Error> {
        let answer = hear(&self.session).await?;
        self.owed.fetch_sub(1, Ordering::Relaxed);
        Ok(answer)
    }
}

/// The next message that is no notice.
async fn hear(session: &Session) -> Result<FromAgent, Error> {
    for _ in 0..MAX_NOTICES {
        match session.recv_control().await {
            Ok(FromAgent::Notice { message }) => {
                tracing::info!(notice = ?shown(&message), "notice of an agent");
            }
            Ok(answer) => return Ok(answer),
            Err(closed) => return Err(Error::internal(UNHEARD, closed)),
        }
    }
    Err(Error::internal(UNHEARD, "it said too much else"))
}

/// What is said of files on volumes that others took away from under a program.
pub(crate) const DISPLACED: &str = "which was deleted, renamed or replaced on the volume";

/// What is said of a sandbox that no image can be made of. The names are the guest's own words to its owner.
pub(crate) fn unsavable(holders: &[Holder], what: &str) -> Error {
    let one = |Holder { pid, program, file }: &Holder| {
        format!("process {pid} ({:?}) has {:?}", shown(program), shown(file))
    };
    let named: Vec<_> = holders.iter().take(MAX_HOLDERS).map(one).collect();
    let message = format!(
        "no image can be made of the sandbox as it is, and it runs on: {}, {what}; let the program close the file, or \
         end it, and try again",
        named.join(", ")
    );
    Error::new(ErrorKind::Conflict, message)
}

/// What is said where nobody knows which files of volumes an image would rely on.
fn uncounted(why: Uncounted) -> Error {
    let why = match why {
        Uncounted::TooMany => {
            format!(
                "its programs have too many files in use on volumes: at most {MAX_IN_USE}, with all their paths in 127 KiB"
            )
        }
        Uncounted::TooLong => {
            "its agent did not find out in time which files its programs have in use on volumes".to_owned()
        }
    };
    let message = format!(
        "no image can be made of the sandbox as it is, and it runs on: {why}; let programs close files, or end them, \
         and try again, or pause it without its memory"
    );
    Error::new(ErrorKind::Conflict, message)
}

/// Opens the sockets of the sandbox's airlock, and enforces its policy on them until `gone`.
///
/// # Errors
/// The host could not make them.
pub(crate) async fn guard_airlock(
    host: &Host,
    id: &SandboxId,
    enforcer: &Arc<Enforcer>,
    egress: &Egress,
    gone: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<(), Error> {
    let io = |error: std::io::Error| Error::internal("the sandbox's network could not be guarded", error);
    let listener = |socket| {
        let tcp = std::net::TcpListener::from(socket);
        tcp.set_nonblocking(true).map_err(io)?;
        TcpListener::from_std(tcp).map_err(io)
    };
    // The last may be refused where the others are not.
    let (sockets, log) = tokio::join!(
        host.airlock_sockets(id, [AirlockSocket::DnsUdp, AirlockSocket::DnsTcp, AirlockSocket::TcpEgress]),
        host.airlock_sockets(id, [AirlockSocket::FilterLog]),
    );
    let [udp, tcp, connections] = sockets?;
    let udp = std::net::UdpSocket::from(udp);
    udp.set_nonblocking(true).map_err(io)?;
    let udp = UdpSocket::from_std(udp).map_err(io)?;
    let (tcp, connections) = (listener(tcp)?, listener(connections)?);
    // What the packet filter holds up is held up whether it is written down or not.
    let log = match log {
        Ok([log]) => Some(UnixDatagram::from_std(log.into()).map_err(io)?),
        // The host has said so at its start.
        Err(error) if error.refusal() == Some(RefusalKind::Unsupported) => None,
        Err(error) => {
            tracing::error!(sandbox = %id, %error, "what its packet filter holds up gets no receipt");
            None
        }
    };
    let (id, gone, enforcer) = (id.clone(), gone.clone(), Arc::clone(enforcer));
    let (dial, caps) = (Arc::clone(&egress.dial), egress.caps);
    tasks.spawn(async move {
        let held_up = Arc::clone(&enforcer);
        let logging = async {
            let Some(log) = log else { return pending().await };
            let Err(error) = held_up.serve_filter_log(log).await;
            tracing::error!(sandbox = %id, %error, "what its packet filter holds up gets no receipt any more");
            pending::<Infallible>().await
        };
        let original = |stream: &TcpStream| original_destination(stream).map(SocketAddr::V4);
        let carrying = proxy::serve(Arc::clone(&enforcer), connections, original, dial, caps);
        // What ends takes the other with it, and the packet filter resets all that comes then.
        tokio::select! {
            () = gone.cancelled() => {}
            Err(error) = enforcer.serve_dns(udp, tcp) => tracing::error!(sandbox = %id, %error, "its DNS ended"),
            _never = carrying => {}
            _never = logging => {}
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_image_can_be_made_of_is_named() {
        let holder = |file: &str| Holder { pid: 7, program: "py\n".into(), file: file.into() };
        let error = unsavable(&[holder("/a"), holder("/b\u{1b}[2J")], "deleted from its disk");
        assert_eq!(error.kind(), ErrorKind::Conflict);
        let text = error.to_string();
        assert!(text.contains(r#"process 7 ("py\n") has "/a", process 7"#), "{text}");
        assert!(text.contains(r#""/b\u{1b}[2J", deleted"#), "{text}");
        assert!(unsavable(&vec![holder(&"x".repeat(10_000)); 1000], DISPLACED).to_string().len() < 5000);
    }

    #[test]
    fn of_an_agent_s_text_a_log_shows_little() {
        assert_eq!(shown("short"), "short");
        assert_eq!(shown(&"\u{fc}".repeat(100_000)), "\u{fc}".repeat(MAX_SHOWN));
    }
}
