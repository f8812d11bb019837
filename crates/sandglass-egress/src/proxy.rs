//! The transparent proxy: every TCP connection out of a sandbox ends here, whatever address it is for, and another one
//! is made in its place if the policy allows it.
//!
//! - What no byte could get allowed is reset before one is read.
//! - Where the policy needs a name to decide, on ports 443 and 80, it is read first ([`crate::tls`], [`crate::http`]).
//!   On all other ports, and where the policy allows the address whatever is sent there, nothing is waited for.
//! - What is allowed goes to the address that was decided on, and to no other: nothing is resolved, nothing is retried.
//! - What is for a name that the server answers for itself goes there, in the same process.
//! - HTTP on port 80 carries one request per connection, so that none goes unseen behind another.
//! - When the policy changes, each flow is decided anew with what it showed, and reset if it may not go on.
//!
//! A flow lives in one task, which owns both sockets. When that ends in any other way than by the end of both streams,
//! both are reset, and what was under way in them is thrown away.

mod answer;
mod body;
mod caps;
mod door;
mod flow;
mod http;
mod socket;
mod splice;

pub use caps::Caps;
pub use door::{Caller, Place};

use std::convert::Infallible;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use sandglass_types::SandboxId;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::enforcer::Enforcer;
use crate::policy::{Own, Service};
use caps::Meter;
use door::Door;
use flow::Flow;
use socket::Socket;

/// How long nothing is accepted after that failed: the server lacks descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Makes the connections that were allowed.
#[async_trait]
pub trait Dial: fmt::Debug + Send + Sync {
    /// Connects to this address and to no other, once.
    ///
    /// # Errors
    /// There is no connection.
    async fn dial(&self, to: SocketAddr) -> io::Result<TcpStream>;

    /// A stream from a sandbox to what the server answers for itself.
    ///
    /// # Errors
    /// There is none for this sandbox now.
    fn enter(&self, own: Own, from: &SandboxId) -> io::Result<TcpStream>;
}

/// Connects from where the server is.
#[derive(Debug)]
pub struct Direct {
    edge: Door,
    models: Door,
    connections: Door,
}

/// What sandboxes want of the server itself, as it comes from each of its doors.
#[derive(Debug)]
pub struct Callers {
    /// Ports of sandboxes, by names of the server's own domain.
    pub edge: mpsc::Receiver<Caller>,
    /// Calls of models.
    pub models: mpsc::Receiver<Caller>,
    /// Requests through connections.
    pub connections: mpsc::Receiver<Caller>,
}

impl Direct {
    /// What is for the server itself comes out at the other end, as from a listener; but it never was on a network. At the edge,
    /// sandboxes have a share of the `connections` into sandboxes that there are, and as many again for requests through connections; of `calls` of models at a time, all.
    #[must_use]
    pub fn new(connections: usize, calls: usize) -> (Self, Callers) {
        let (edge, to_edge) = Door::of_share(connections);
        let (models, to_models) = Door::new(calls);
        let (services, to_services) = Door::of_share(connections);
        let callers = Callers { edge: to_edge, models: to_models, connections: to_services };
        (Self { edge, models, connections: services }, callers)
    }
}

#[async_trait]
impl Dial for Direct {
    async fn dial(&self, to: SocketAddr) -> io::Result<TcpStream> {
        TcpStream::connect(to).await
    }

    fn enter(&self, own: Own, from: &SandboxId) -> io::Result<TcpStream> {
        match own {
            Own::Edge => self.edge.enter(from),
            Own::Service(Service::Models) => self.models.enter(from),
            Own::Service(Service::Connections) => self.connections.enter(from),
        }
    }
}

/// What the flows of one sandbox share.
#[derive(Debug)]
struct Proxy {
    enforcer: Arc<Enforcer>,
    dial: Arc<dyn Dial>,
    meter: Meter,
}

/// Carries the connections that arrive on a listener of the airlock. Dropping the future closes the listener and resets
/// all of them.
///
/// `original` says where a connection that was accepted is for.
pub async fn serve<O>(
    enforcer: Arc<Enforcer>,
    listener: TcpListener,
    original: O,
    dial: Arc<dyn Dial>,
    caps: Caps,
) -> Infallible
where
    O: Fn(&TcpStream) -> io::Result<SocketAddr>,
{
    let proxy = Arc::new(Proxy { enforcer: Arc::clone(&enforcer), dial, meter: Meter::new(caps, enforcer) });
    let mut severed = proxy.enforcer.severed();
    let mut flows = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            // Before what is newer than it.
            biased;
            Ok(()) = severed.changed() => {
                flows.abort_all();
                // Also those that nobody has looked at yet.
                while let Poll::Ready(Ok(_)) = poll_fn(|cx| Poll::Ready(listener.poll_accept(cx))).await {}
                continue;
            }
            accepted = listener.accept() => accepted,
            Some(ended) = flows.join_next() => {
                if let Err(error) = ended && !error.is_cancelled() {
                    tracing::error!(%error, "a flow failed");
                }
                continue;
            }
        };
        let guest = match accepted {
            Ok((stream, _)) => Socket::new(stream),
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let to = original(&guest);
        let flow = match to.and_then(|to| Flow::new(Arc::clone(&proxy), to).map_err(io::Error::other)) {
            Ok(flow) => flow,
            Err(error) => {
                tracing::debug!(%error, "a connection was for nowhere");
                continue;
            }
        };
        if flows.len() < caps.flows {
            flows.spawn(flow.run(guest));
        } else {
            flow.refuse_by("limit/flows");
        }
    }
}

#[cfg(test)]
mod tests;
