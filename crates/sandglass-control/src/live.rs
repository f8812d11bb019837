//! A sandbox that runs here and now, as the edge sees it: a place to connect to.

use std::io;
use std::num::NonZeroU16;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use sandglass_egress::policy::RequestHost;
use sandglass_engine::host::Host;
use sandglass_proto::control::Holder;
use sandglass_proto::session::{Closed, Flow, Loopback, OpenError, ResetCode, Target};
use sandglass_store::SandboxRow;
use sandglass_types::{Error, ErrorKind, Limits, PauseMode, SandboxId, TeamId};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use self::airlock::Wire;
use crate::agent::{self, Line};
use crate::{Patience, TrafficToken};

mod airlock;

/// How often a port that refuses is tried: a program may have been started a moment ago.
const DIAL_ATTEMPTS: u32 = 5;

/// The wait between two tries.
const DIAL_PAUSE: Duration = Duration::from_millis(200);

/// How long one try may take: the guest is a neighbour, so silence means that it is stuck.
const DIAL_PATIENCE: Duration = Duration::from_secs(3);

/// Why an agent can't be heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CutOff {
    /// Its stream ended.
    #[error("its stream ended")]
    Closed(#[source] Closed),
    /// It gives no sign of life.
    #[error("it gave no sign of life for {0:?}")]
    Silent(Duration),
}

/// No stream into the sandbox.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The sandbox is gone, or going.
    #[error("the sandbox is gone")]
    Gone,
    /// Nothing listens on that port.
    #[error("the port is not open")]
    Refused,
    /// There are as many connections into sandboxes as there may be.
    #[error("this server has no more connections into sandboxes")]
    Full,
    /// The sandbox does not answer.
    #[error("the sandbox does not answer")]
    Unreachable(#[source] io::Error),
}

/// A running sandbox.
#[derive(Debug)]
pub struct Live {
    id: SandboxId,
    line: Line,
    /// What its agent understands.
    revision: u32,
    /// `None` if its engine gives it no airlock.
    wire: Option<Wire>,
    gone: CancellationToken,
    /// How many streams into it are open.
    streams: watch::Sender<usize>,
    /// When the last one ended, or it was taken up.
    used: Arc<Mutex<Instant>>,
    team: TeamId,
    limits: Limits,
    traffic_token: Option<TrafficToken>,
    request_host: Option<RequestHost>,
    /// What is left of the streams into all sandboxes together.
    connections: Arc<Semaphore>,
    /// Fires when the sandbox's own ends of the connections through its airlock are gone; then there is another one.
    lines: Mutex<CancellationToken>,
    /// Whether it stands still for a moment, while an image of it is made.
    still: watch::Sender<bool>,
}

impl Live {
    pub(crate) fn new(
        row: &SandboxRow,
        line: Line,
        revision: u32,
        airlock: Option<Host>,
        gone: CancellationToken,
        connections: Arc<Semaphore>,
    ) -> Self {
        let traffic_token = row.traffic_token.clone().map(TrafficToken::new);
        let request_host = row.request_host.clone();
        let streams = watch::Sender::new(0);
        Self {
            id: row.id.clone(),
            line,
            revision,
            wire: airlock.map(Wire::new),
            gone,
            streams,
            used: Arc::new(Mutex::new(Instant::now())),
            team: row.team,
            limits: row.limits,
            traffic_token,
            request_host,
            connections,
            lines: Mutex::default(),
            still: watch::Sender::new(false),
        }
    }

    /// Whose it is.
    #[must_use]
    pub const fn team(&self) -> TeamId {
        self.team
    }

    /// What it may use.
    pub(crate) const fn limits(&self) -> Limits {
        self.limits
    }

    /// What clients must send to reach its ports, the guest API's aside; `None` leaves them open.
    #[must_use]
    pub const fn traffic_token(&self) -> Option<&TrafficToken> {
        self.traffic_token.as_ref()
    }

    /// The Host header that programs inside see, if it is not to be the client's.
    #[must_use]
    pub const fn request_host(&self) -> Option<&RequestHost> {
        self.request_host.as_ref()
    }

    /// How many streams into it are open. Each that opens or ends is a change.
    pub(crate) fn streams(&self) -> watch::Receiver<usize> {
        self.streams.subscribe()
    }

    /// Its id.
    #[must_use]
    pub const fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Fires when the sandbox's end begins: whoever holds a connection drops it then, without ceremony.
    #[must_use]
    pub const fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    /// Waits until the agent can't be heard any more, and says why.
    ///
    /// The end of the session is seen at once; an agent that was stopped, or whose engine hangs, by its silence.
    pub(crate) async fn cut_off(&self, patience: Patience) -> CutOff {
        loop {
            if let Ok(closed) = timeout(patience.heartbeat, self.line.session().closed()).await {
                return CutOff::Closed(closed);
            }
            if timeout(patience.silence, self.line.session().ping()).await.is_err() {
                return CutOff::Silent(patience.silence);
            }
        }
    }

    /// Makes the agent say no more, so that an image of it has nothing half said. Who wants a stream from now on waits.
    /// Says what its programs have of volumes.
    pub(crate) async fn freeze(&self, mode: PauseMode) -> Result<Vec<Holder>, Error> {
        if mode == PauseMode::Filesystem && self.revision < agent::FREEZE_DISK_SINCE {
            let message = "the sandbox's agent is too old for that: pause it with its memory";
            return Err(Error::new(ErrorKind::Conflict, message));
        }
        self.still.send_replace(true);
        agent::freeze(&self.line, mode).await
    }

    /// How long no command has run in it; zero while one does, and where its agent can't say.
    pub(crate) async fn idle(&self) -> Result<Duration, Error> {
        if self.revision < agent::IDLE_SINCE {
            return Ok(Duration::ZERO);
        }
        agent::idle(&self.line).await
    }

    /// How long nobody has used it: no stream was open and no command ran. It counts from when this server took it up.
    pub(crate) async fn unused(&self) -> Result<Duration, Error> {
        if *self.streams.borrow() > 0 {
            return Ok(Duration::ZERO);
        }
        let unconnected = self.used.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        Ok(self.idle().await?.min(unconnected))
    }

    /// Ends a [`Self::freeze`].
    pub(crate) async fn thaw(&self) -> Result<(), Error> {
        let thawed = agent::thaw(&self.line).await;
        self.still.send_replace(false);
        thawed
    }

    /// Ends all connections through the airlock: the sandbox's own ends of them are gone, and nobody else would say so.
    pub(crate) fn sever(&self) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *lines).cancel();
    }

    fn lines(&self) -> CancellationToken {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits while it stands still. Afterwards, what is returned has changed if it stood still since.
    async fn moving(&self) -> Result<watch::Receiver<bool>, DialError> {
        let mut still = self.still.subscribe();
        tokio::select! {
            moves = still.wait_for(|still| !still) => drop(moves.map_err(|_| DialError::Gone)?),
            () = self.gone.cancelled() => return Err(DialError::Gone),
        }
        Ok(still)
    }

    /// A connection to the guest API, for HTTP/1.1.
    ///
    /// # Errors
    /// [`DialError`]; never `Refused`.
    pub async fn guest_api(&self) -> Result<GuestStream, DialError> {
        let place = self.place()?;
        Ok(self.count(self.flow(Target::GuestApi).await?, place))
    }

    /// A place among the connections into all sandboxes.
    fn place(&self) -> Result<OwnedSemaphorePermit, DialError> {
        Arc::clone(&self.connections).try_acquire_owned().map_err(|_| DialError::Full)
    }

    /// A connection to a TCP port of a program inside, also one that listens on the guest's loopback alone.
    ///
    /// # Errors
    /// [`DialError::Refused`] if nothing listened for about a second.
    pub async fn dial(&self, port: NonZeroU16) -> Result<GuestStream, DialError> {
        // First, so that those who wait count as well.
        let place = self.place()?;
        let mut outcome = Err(DialError::Refused);
        for attempt in 0..DIAL_ATTEMPTS {
            if attempt > 0 {
                tokio::select! {
                    () = sleep(DIAL_PAUSE) => {}
                    () = self.gone.cancelled() => return Err(DialError::Gone),
                }
            }
            let still = self.moving().await?;
            let direct = match &self.wire {
                Some(wire) => self.dial_airlock(wire, port, &still).await,
                None => Err(DialError::Refused),
            };
            outcome = match direct {
                Err(DialError::Refused) => self.dial_loopback(port).await,
                other => other,
            };
            if !matches!(outcome, Err(DialError::Refused)) {
                break;
            }
        }
        outcome.map(|carrier| self.count(carrier, place))
    }

    async fn dial_airlock(
        &self,
        wire: &Wire,
        port: NonZeroU16,
        still: &watch::Receiver<bool>,
    ) -> Result<Carrier, DialError> {
        // Before there is a connection that may be cut.
        let severed = Box::pin(self.lines().cancelled_owned());
        match wire.connect(&self.id, port).await {
            Ok(stream) => Ok(Carrier::Tcp(stream, severed)),
            // It could not answer meanwhile.
            Err(DialError::Unreachable(_)) if still.has_changed().unwrap_or(false) => Err(DialError::Refused),
            Err(error) => Err(error),
        }
    }

    async fn dial_loopback(&self, port: NonZeroU16) -> Result<Carrier, DialError> {
        let v4 = self.flow(Target::Tcp(Loopback::v4(port))).await;
        if !matches!(v4, Err(DialError::Refused)) {
            return v4;
        }
        match self.flow(Target::Tcp(Loopback::v6(port))).await {
            // Without IPv6 inside there is no such address, and IPv4 has said what there is to say.
            Err(DialError::Unreachable(_)) => Err(DialError::Refused),
            v6 => v6,
        }
    }

    fn count(&self, carrier: Carrier, place: OwnedSemaphorePermit) -> GuestStream {
        self.streams.send_modify(|open| *open += 1);
        GuestStream { carrier, streams: self.streams.clone(), used: Arc::clone(&self.used), _place: place }
    }

    async fn flow(&self, target: Target) -> Result<Carrier, DialError> {
        let opened = loop {
            let still = self.moving().await?;
            match timeout(DIAL_PATIENCE, self.line.session().open(target)).await {
                // It could not answer meanwhile.
                Err(_) if still.has_changed().unwrap_or(false) => {}
                opened => break opened,
            }
        };
        let unreachable = |error: OpenError| DialError::Unreachable(io::Error::other(error));
        match opened.map_err(|elapsed| DialError::Unreachable(elapsed.into()))? {
            Ok(flow) => Ok(Carrier::Flow(flow)),
            Err(OpenError::Refused(ResetCode::Refused)) => Err(DialError::Refused),
            Err(_) if self.gone.is_cancelled() => Err(DialError::Gone),
            Err(error) => Err(unreachable(error)),
        }
    }
}

/// A byte stream to something inside a sandbox.
#[derive(Debug)]
pub struct GuestStream {
    carrier: Carrier,
    streams: watch::Sender<usize>,
    used: Arc<Mutex<Instant>>,
    _place: OwnedSemaphorePermit,
}

#[derive(Debug)]
enum Carrier {
    /// Through the agent.
    Flow(Flow),
    /// Through the airlock, until the sandbox's own end is gone.
    Tcp(TcpStream, Pin<Box<WaitForCancellationFutureOwned>>),
}

/// Fails once the sandbox's own end of a connection is gone.
fn whole(
    severed: &mut Pin<Box<WaitForCancellationFutureOwned>>,
    context: &mut Context<'_>,
) -> io::Result<()> {
    match severed.as_mut().poll(context) {
        Poll::Ready(()) => Err(io::ErrorKind::ConnectionReset.into()),
        Poll::Pending => Ok(()),
    }
}

impl Drop for GuestStream {
    fn drop(&mut self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.streams.send_modify(|open| *open -= 1);
    }
}

impl AsyncRead for GuestStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.get_mut().carrier {
            Carrier::Flow(flow) => Pin::new(flow).poll_read(context, buffer),
            Carrier::Tcp(stream, severed) => {
                whole(severed, context)?;
                Pin::new(stream).poll_read(context, buffer)
            }
        }
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().carrier {
            Carrier::Flow(flow) => Pin::new(flow).poll_write(context, bytes),
            Carrier::Tcp(stream, severed) => {
                whole(severed, context)?;
                Pin::new(stream).poll_write(context, bytes)
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().carrier {
            Carrier::Flow(flow) => Pin::new(flow).poll_flush(context),
            Carrier::Tcp(stream, _) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().carrier {
            Carrier::Flow(flow) => Pin::new(flow).poll_shutdown(context),
            Carrier::Tcp(stream, _) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
