//! The way to a port of a sandbox over the wire of its airlock.

use std::io;
use std::net::{SocketAddr, SocketAddrV4};
use std::num::NonZeroU16;
use std::sync::{Mutex, PoisonError};

use sandglass_engine::engine::AirlockSocket;
use sandglass_engine::host::{Host, RefusalKind};
use sandglass_engine::network::GUEST_ADDRESS;
use sandglass_types::SandboxId;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use super::{DIAL_PATIENCE, DialError};

/// How many sockets the host makes at one time: to ask it takes longer than to connect one of them.
const AT_ONE_TIME: usize = 4;

/// Sockets in the airlock of a running sandbox. An airlock is never another sandbox's, so neither is what is kept here.
#[derive(Debug)]
pub(super) struct Wire {
    host: Host,
    /// Made, and not connected yet.
    spare: Mutex<Vec<TcpSocket>>,
}

impl Wire {
    pub(super) const fn new(host: Host) -> Self {
        Self { host, spare: Mutex::new(Vec::new()) }
    }

    /// A connection to a port of the guest's one address.
    pub(super) async fn connect(&self, id: &SandboxId, port: NonZeroU16) -> Result<TcpStream, DialError> {
        let socket = match self.spare() {
            Some(socket) => socket,
            None => self.make(id).await?,
        };
        let address = SocketAddr::V4(SocketAddrV4::new(GUEST_ADDRESS, port.get()));
        match timeout(DIAL_PATIENCE, socket.connect(address)).await {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true).map_err(DialError::Unreachable)?;
                Ok(stream)
            }
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Err(DialError::Refused),
            Ok(Err(error)) => Err(DialError::Unreachable(error)),
            Err(elapsed) => Err(DialError::Unreachable(elapsed.into())),
        }
    }

    fn spare(&self) -> Option<TcpSocket> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Makes some; one of them is for who asks.
    async fn make(&self, id: &SandboxId) -> Result<TcpSocket, DialError> {
        let made = self.host.airlock_sockets(id, [AirlockSocket::TcpToGuest; AT_ONE_TIME]).await;
        let made = made.map_err(|error| match error.refusal() {
            Some(RefusalKind::NotFound) => DialError::Gone,
            _ => DialError::Unreachable(io::Error::other(error)),
        })?;
        // They come as they are connected: without waiting.
        let [one, others @ ..] =
            made.map(|socket| TcpSocket::from_std_stream(std::net::TcpStream::from(socket)));
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        // Several may have made some at the same time.
        if spare.is_empty() {
            spare.extend(others);
        }
        Ok(one)
    }
}
