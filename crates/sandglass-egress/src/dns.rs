//! DNS as the guest sees it: every query that it sends anywhere is answered here.
//!
//! No name that is refused is ever given to a resolver, so a name can't carry data out. Of an allowed one, the sandbox is
//! told only addresses that it may connect to, and each of them is bound to the name before it is told.
//!
//! A sandbox that asks too much is answered later, not in another way: what waits fills its own sockets, and no memory.

mod lookups;
mod message;
mod pace;

use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use sandglass_types::net::Hostname;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

pub(crate) use self::lookups::Lookups;
#[cfg(any(test, fuzzing))]
pub(crate) use self::message::check_query;
use self::message::{Answer, Asked, MAX_QUERY, read};
pub(crate) use self::pace::Pace;
use crate::enforcer::{Enforcer, Untold};
use crate::policy::{Question, Record, Verdict};
use crate::receipt::{Kind, Receipt, Text};
use crate::resolver::ResolveError;

/// Queries over UDP that one sandbox may have under way. The next one is not read before one of them is answered.
const MAX_QUERIES: usize = 64;

/// Connections for DNS over TCP that one sandbox may hold, with one query at a time each; one more is closed at once.
const MAX_CONNECTIONS: usize = 8;

/// How often one sandbox is answered, and how often at once after a silence. Starting a large program asks for some
/// hundred names.
const ANSWERS: (Duration, u32) = (Duration::from_millis(5), 500);

/// How often a refusal is written down; others are counted.
const REFUSALS: (Duration, u32) = (Duration::from_millis(100), 1000);

/// How long a connection may take to send a query, or to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long the address of a name is good that this server answers for, in seconds. It is always the same.
const OWN_TTL: u32 = 60;

/// How long to wait after a connection could not be accepted.
const RETRY: Duration = Duration::from_millis(100);

/// The pace at which one sandbox is answered.
pub(crate) fn answers() -> Pace {
    Pace::new(ANSWERS.0, ANSWERS.1)
}

/// The pace at which its refusals are written down.
pub(crate) fn refusals() -> Pace {
    Pace::new(REFUSALS.0, REFUSALS.1)
}

/// The answer to the bytes of one query, or `None` if they deserve none.
async fn answer(enforcer: &Enforcer, query: &[u8]) -> Option<Vec<u8>> {
    let asked = match read(query)? {
        Ok(asked) => asked,
        Err(error) => {
            enforcer.record_dns(enforcer.refusal(Kind::Dns, "always/malformed"));
            return Some(error);
        }
    };
    let (receipt, answer) = decide(enforcer, &asked).await;
    enforcer.record_dns(Receipt {
        name: Some(Text::new(&asked.shown_name())),
        record: Some(Text::new(asked.shown_record().as_bytes())),
        ..receipt
    });
    Some(asked.answer(&answer))
}

async fn decide(enforcer: &Enforcer, asked: &Asked) -> (Receipt, Answer) {
    let refused = |rule| (enforcer.refusal(Kind::Dns, rule), Answer::Refused);
    let Ok(name) = asked.name() else { return refused("always/name") };
    let Some(record) = asked.record() else { return refused("always/class") };
    let verdict = enforcer.decide(Question::Dns { name: &name, record });
    let receipt = enforcer.receipt(Kind::Dns, &verdict);
    let grant = match verdict {
        Verdict::Allow(grant) => grant,
        Verdict::Deny(_) => return (receipt, Answer::Refused),
    };
    match (record, grant.own) {
        (Record::A, Some((_, own))) => {
            (Receipt { answer: vec![own.into()], ..receipt }, Answer::Addresses(vec![own], OWN_TTL))
        }
        (Record::A, None) => addresses(enforcer, &name, receipt).await,
        // Nothing inside routes IPv6; and without a record of the service, nobody learns how to hide the name in TLS.
        (Record::Aaaa | Record::Service | Record::Other(_), _) => (receipt, Answer::Nothing),
    }
}

async fn addresses(enforcer: &Enforcer, name: &Hostname, receipt: Receipt) -> (Receipt, Answer) {
    let resolved = match enforcer.resolve(name).await {
        Ok(resolved) if resolved.addresses.is_empty() => return (receipt, Answer::Nothing),
        Ok(resolved) => resolved,
        Err(ResolveError::NoSuchName) => return (receipt, Answer::NoSuchName),
        Err(error @ ResolveError::Failed(_)) => {
            tracing::debug!(%name, %error, "an allowed name could not be resolved");
            return (receipt, Answer::Failed);
        }
    };
    let listed = |addresses: &[_]| addresses.iter().copied().map(IpAddr::V4).collect();
    match enforcer.tell(name, &resolved) {
        Ok((verdict, told)) => {
            let receipt = Receipt { answer: listed(&told), ..enforcer.receipt(Kind::Dns, &verdict) };
            // Longer than any client believes is clipped later.
            let ttl = u32::try_from(resolved.ttl.as_secs()).unwrap_or(u32::MAX);
            (receipt, Answer::Addresses(told, ttl))
        }
        Err(untold) => {
            let receipt = match untold {
                Untold::Denied(verdict) => enforcer.receipt(Kind::Dns, &verdict),
                Untold::Full => enforcer.refusal(Kind::Dns, "limit/bindings"),
            };
            (Receipt { answer: listed(&resolved.addresses), ..receipt }, Answer::Refused)
        }
    }
}

/// Answers what arrives on a socket of the airlock, until the socket fails. Dropping the future closes it.
///
/// # Errors
/// The socket failed.
pub(crate) async fn serve_udp(enforcer: &Arc<Enforcer>, socket: UdpSocket) -> io::Result<Infallible> {
    let socket = Arc::new(socket);
    let mut answers = JoinSet::new();
    let mut buffer = [0; MAX_QUERY];
    loop {
        while answers.try_join_next().is_some() {}
        if answers.len() >= MAX_QUERIES {
            answers.join_next().await;
        }
        enforcer.pace_dns().await;
        let (len, from) = match socket.recv_from(&mut buffer).await {
            // The guest can make the kernel report its own unreachable ports here.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            received => received?,
        };
        let query = buffer.get(..len).unwrap_or_default().to_vec();
        let (enforcer, socket) = (Arc::clone(enforcer), Arc::clone(&socket));
        answers.spawn(async move {
            if let Some(answer) = answer(&enforcer, &query).await {
                // One lost answer is what UDP is like; the guest asks again.
                let _sent = socket.try_send_to(&answer, from);
            }
        });
    }
}

/// Answers the connections that arrive on a listener of the airlock. Dropping the future closes the listener and all
/// connections.
pub(crate) async fn serve_tcp(enforcer: &Arc<Enforcer>, listener: TcpListener) -> Infallible {
    let mut connections = JoinSet::new();
    loop {
        let connection = match listener.accept().await {
            Ok((connection, _)) => connection,
            Err(error) => {
                // A shortage of descriptors or memory, most likely. It passes, and DNS is there again.
                tracing::warn!(%error, "a DNS connection was not accepted");
                sleep(RETRY).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        if connections.len() < MAX_CONNECTIONS {
            let enforcer = Arc::clone(enforcer);
            connections.spawn(async move {
                if let Err(error) = serve_connection(&enforcer, connection).await {
                    tracing::trace!(%error, "a DNS connection ended");
                }
            });
        }
    }
}

async fn serve_connection(enforcer: &Enforcer, mut connection: TcpStream) -> io::Result<()> {
    let mut buffer = [0; MAX_QUERY];
    loop {
        let len = usize::from(timeout(PATIENCE, connection.read_u16()).await??);
        let Some(query) = buffer.get_mut(..len) else { return Ok(()) };
        timeout(PATIENCE, connection.read_exact(query)).await??;
        enforcer.pace_dns().await;
        let Some(response) = answer(enforcer, query).await else { return Ok(()) };
        let Ok(len) = u16::try_from(response.len()) else { return Ok(()) };
        let framed = [&len.to_be_bytes()[..], &response].concat();
        timeout(PATIENCE, connection.write_all(&framed)).await??;
    }
}

#[cfg(test)]
mod tests;
