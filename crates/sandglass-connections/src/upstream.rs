//! The way to a service: one connection for each request, to an address that was decided on.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use sandglass_broker::connection::Target;
use sandglass_egress::policy::{Connection, Effective, Question, Seen, Transport, Verdict, decide};
use sandglass_egress::resolver::{Resolve, ResolveError};
use sandglass_types::net::Port;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::{error::Elapsed, timeout};
use tokio_rustls::TlsConnector;
use tokio_util::task::TaskTracker;

use crate::answer::Sent;
use crate::grants::Reach;

/// How long a service may take for a connection, TLS included.
const CONNECT: Duration = Duration::from_secs(10);

/// How long it may take to begin its answer, and to go on with it.
pub(crate) const SILENCE: Duration = Duration::from_secs(300);

/// Why there is no answer. No text has anything of the service's in it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoAnswer {
    /// The operator allows no sandbox to go there.
    #[error("the operator does not allow sandboxes to reach {host}: by {rule}")]
    NotAllowed {
        /// Where.
        host: String,
        /// What decided.
        rule: String,
    },
    /// The name has no address.
    #[error("{0} has no address: {1}")]
    NoAddress(String, ResolveError),
    /// It can't be connected to.
    #[error("the service can't be reached: {0}")]
    Connect(#[source] io::Error),
    /// It took too long.
    #[error("the service took too long")]
    Slow(#[from] Elapsed),
    /// What it sent is no answer.
    #[error("the service gave no answer")]
    Http(#[from] hyper::Error),
}

/// Asks services.
#[derive(Clone)]
pub(crate) struct Upstream {
    resolver: Arc<dyn Resolve>,
    tls: TlsConnector,
    tasks: TaskTracker,
}

impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upstream").field("resolver", &self.resolver).finish_non_exhaustive()
    }
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl Upstream {
    /// One that believes whom `tls` does.
    pub(crate) fn new(resolver: Arc<dyn Resolve>, mut tls: rustls::ClientConfig, tasks: TaskTracker) -> Self {
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        Self { resolver, tls: Arc::new(tls).into(), tasks }
    }

    /// Sends one request. No redirect is followed, and nothing is sent twice.
    pub(crate) async fn send(
        &self,
        target: &Target,
        reach: &Reach,
        parts: Parts,
        body: Sent,
    ) -> Result<Response<Incoming>, NoAnswer> {
        let stream = timeout(CONNECT, self.connect(target, reach)).await??;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // It ends with the answer, or when whoever waits for that is gone.
        self.tasks.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to a service failed");
            }
        });
        Ok(timeout(SILENCE, sender.send_request(Request::from_parts(parts, body))).await??)
    }

    async fn connect(&self, target: &Target, reach: &Reach) -> Result<Box<dyn Stream>, NoAnswer> {
        let name = || target.host.to_string();
        let denied = |verdict: &Verdict| NoAnswer::NotAllowed { host: name(), rule: verdict.rule() };
        if let Reach::Ceiling(policy) = reach {
            named(policy, target).map_err(|verdict| denied(&verdict))?;
        }
        let resolved = self.resolver.resolve(&target.host).await;
        let resolved = resolved.map_err(|error| NoAnswer::NoAddress(name(), error))?;
        let mut last = NoAnswer::NoAddress(name(), ResolveError::NoSuchName);
        for address in resolved.addresses.into_iter().map(IpAddr::from) {
            if let Reach::Ceiling(policy) = reach
                && let Err(verdict) = reached(policy, target, address)
            {
                last = denied(&verdict);
                continue;
            }
            match TcpStream::connect(SocketAddr::new(address, target.port.get())).await {
                Ok(stream) => return self.secured(stream, target).await.map_err(NoAnswer::Connect),
                Err(error) => last = NoAnswer::Connect(error),
            }
        }
        Err(last)
    }

    async fn secured(&self, stream: TcpStream, target: &Target) -> io::Result<Box<dyn Stream>> {
        stream.set_nodelay(true)?;
        if !target.tls {
            return Ok(Box::new(stream));
        }
        let name = ServerName::try_from(target.host.to_string())
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        Ok(Box::new(self.tls.connect(name, stream).await?))
    }
}

/// Whether a sandbox may ask for the name of a target at all.
fn named(policy: &Effective, target: &Target) -> Result<(), Verdict> {
    match decide(policy, Question::Reach { name: &target.host, port: target.port }) {
        // Names that the server answers for itself are none of a service.
        Verdict::Allow(grant) if grant.own.is_none() => Ok(()),
        verdict => Err(verdict),
    }
}

/// Whether a sandbox might connect there itself, to an address that it resolved the name to. Of what it asks over TLS nobody sees anything,
/// so what is allowed for single methods or paths alone is not allowed.
fn reached(policy: &Effective, target: &Target, address: IpAddr) -> Result<(), Verdict> {
    let seen = match (target.tls, target.port) {
        (true, Port::HTTPS) => Seen::Tls { sni: Some(&target.host), encrypted: false },
        _ => Seen::Nothing,
    };
    let bound = std::slice::from_ref(&target.host);
    let connection = Connection { address, port: target.port, transport: Transport::Tcp, bound, seen };
    match decide(policy, Question::Connect(connection)) {
        Verdict::Allow(grant) if grant.own.is_none() => Ok(()),
        verdict => Err(verdict),
    }
}

#[cfg(test)]
mod tests {
    use sandglass_egress::policy::{Network, Operator, Surroundings, from_e2b};
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_team_s_connection_leads_where_its_sandboxes_could_go() {
        let may = |ceiling: Value, target: &str, address: [u8; 4]| {
            let operator: Operator = serde_json::from_value(json!({ "ceiling": ceiling })).unwrap();
            let everything = from_e2b(&Network::default(), Some(true)).unwrap();
            let (policy, _) = Effective::new(&everything, &operator, Surroundings::default()).unwrap();
            let target: Target = target.parse().unwrap();
            named(&policy, &target).and_then(|()| reached(&policy, &target, address.into())).is_ok()
        };
        let (public, here) = ([93, 184, 216, 34], [127, 0, 0, 1]);
        let api = || json!([{"allow": "api.test.example"}]);
        assert!(may(api(), "https://api.test.example", public));
        assert!(!may(api(), "https://api.test.example", here));
        assert!(!may(api(), "https://api.test.example", [169, 254, 169, 254]));
        assert!(!may(api(), "https://api.test.example", [10, 0, 0, 1]));
        assert!(!may(api(), "https://api.test.example:8443", public));
        assert!(!may(api(), "https://other.example", public));
        assert!(!may(json!([]), "https://api.test.example", public));
        let port = json!([{"allow": "api.test.example", "ports": [8443]}]);
        assert!(may(port, "https://api.test.example:8443", public));
        // What is allowed for one method is not allowed where nobody sees the method.
        let reading = json!([{"allow": "api.test.example", "methods": ["GET"]}]);
        assert!(!may(reading, "https://api.test.example", public));
    }
}
