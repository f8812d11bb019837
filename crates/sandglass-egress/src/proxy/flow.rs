//! One connection, from its first byte to its receipt.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use sandglass_types::net::{Hostname, InvalidPort, Port};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use super::Proxy;
use super::caps::Way;
use super::socket::Socket;
use super::splice::{Broken, Lane};
use crate::enforcer::Held;
use crate::http::{self, Authority, RequestHead};
use crate::policy::{Cause, Connection, Denial, Effective, Own, Question, Seen, Service, Transport, Verdict};
use crate::receipt::{Kind, Receipt, Text};
use crate::tls::{self, ClientHello};

/// A connection that the guest made, and where it is for.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) proxy: Arc<Proxy>,
    /// In canonical form. What is decided on, and what is dialled.
    to: SocketAddr,
    /// The port of it.
    port: Port,
    /// What the guest showed of where it wants to go.
    shown: OnceLock<Text>,
}

/// What is known before the first byte.
enum Opening {
    /// It may go, whatever it shows.
    Allowed,
    /// It may not, whatever it shows.
    Refused(Denial),
    /// It may not as long as it shows nothing.
    Unseen(Denial),
}

/// A flow that was allowed. Its receipt is written when this is dropped.
#[derive(Debug)]
pub(super) struct Allowed<'a> {
    flow: &'a Flow,
    receipt: Option<Receipt>,
    /// Bytes that left the sandbox.
    out: AtomicU64,
    /// Bytes that came in.
    into: AtomicU64,
    /// The binding that it uses.
    _held: Option<Held>,
}

impl Drop for Allowed<'_> {
    fn drop(&mut self) {
        if let Some(receipt) = self.receipt.take() {
            self.flow.proxy.enforcer.record(Receipt {
                shown: self.flow.shown.get().cloned(),
                sent: self.out.load(Ordering::Relaxed),
                received: self.into.load(Ordering::Relaxed),
                ..receipt
            });
        }
    }
}

impl Allowed<'_> {
    pub(super) fn lane(&self, way: Way) -> Lane<'_> {
        let count = match way {
            Way::Out => &self.out,
            Way::In => &self.into,
        };
        Lane { meter: &self.flow.proxy.meter, way, count }
    }

    /// What decided.
    pub(super) fn rule(&self) -> String {
        self.receipt.as_ref().map(|receipt| receipt.rule.to_string()).unwrap_or_default()
    }

    /// Ends when no byte went for the time that a connection may rest.
    async fn rest(&self) {
        let count = || self.out.load(Ordering::Relaxed).wrapping_add(self.into.load(Ordering::Relaxed));
        let mut before = count();
        loop {
            tokio::time::sleep(self.flow.proxy.meter.caps.idle).await;
            let now = count();
            if now == before {
                return;
            }
            before = now;
        }
    }
}

/// Where a flow that was allowed is carried to.
#[derive(Debug)]
pub(super) enum Server {
    /// Where the guest wanted to.
    There,
    /// To the server itself, where it has a place.
    Own(Socket),
}

/// Why a flow is not carried.
#[derive(Debug)]
pub(super) enum Refused {
    /// The policy denies it.
    Denied(Denial),
    /// There is no room, by this rule. The guest is told nothing.
    Limit(&'static str),
}

/// Room for what a guest sends first, in bytes: most of it fits.
const FIRST: usize = 2 << 10;

/// After so many bytes, whatever they are would have shown. What reads them says so before.
const MAX_FIRST: usize = if tls::MAX_PEEK > http::MAX_HEAD { tls::MAX_PEEK } else { http::MAX_HEAD };

/// Why bytes were not read to the point where they say what they are.
#[derive(Debug)]
pub(super) enum Unread<E> {
    /// They are something else.
    Bad(E),
    /// There were not enough of them, within the time that there is.
    TooFew,
}

impl Flow {
    /// A connection to `to`.
    ///
    /// # Errors
    /// Nothing can be there.
    pub(super) fn new(proxy: Arc<Proxy>, to: SocketAddr) -> Result<Self, InvalidPort> {
        let port = Port::try_from(to.port())?;
        let to = SocketAddr::new(to.ip().to_canonical(), to.port());
        Ok(Self { proxy, to, port, shown: OnceLock::new() })
    }

    /// Carries it to its end. Dropping the future resets it.
    pub(super) async fn run(self, guest: Socket) {
        if let Some(rule) = self.proxy.meter.spent() {
            return self.refuse_by(rule);
        }
        // Before the first decision, so that no change of the policy is missed.
        let mut policy = self.proxy.enforcer.policy();
        match (self.opening(), self.port) {
            (Opening::Refused(denial), _) => self.refuse(denial),
            (Opening::Allowed, _) => self.carry(&mut policy, guest, Vec::new(), Seen::Nothing).await,
            (Opening::Unseen(denial), Port::HTTP) => {
                super::http::run(&self, &mut policy, guest, denial).await;
            }
            (Opening::Unseen(denial), _) => self.run_tls(&mut policy, guest, denial).await,
        }
    }

    async fn run_tls(&self, policy: &mut watch::Receiver<Arc<Effective>>, guest: Socket, unseen: Denial) {
        let peek = |bytes: &[u8]| {
            tls::peek(bytes).map(|peek| match peek {
                tls::Peek::More => None,
                tls::Peek::Hello(hello) => Some(hello),
            })
        };
        match self.read_first(&guest, peek).await {
            Ok((bytes, hello)) => {
                self.show_name(hello.sni.as_ref());
                self.carry(policy, guest, bytes, hello.seen()).await;
            }
            Err(why) => {
                tracing::debug!(?why, to = %self.to, "no ClientHello");
                self.refuse(unseen);
            }
        }
    }

    /// Decides by what was seen, and carries what may go.
    async fn carry(
        &self,
        policy: &mut watch::Receiver<Arc<Effective>>,
        guest: Socket,
        read: Vec<u8>,
        seen: Seen<'_>,
    ) {
        match self.admit(seen) {
            Ok((allowed, server)) => {
                let work = self.splice(&allowed, server, guest, read);
                self.while_allowed(policy, seen, &allowed, work).await;
            }
            Err(Refused::Denied(denial)) => self.refuse(denial),
            Err(Refused::Limit(rule)) => self.refuse_by(rule),
        }
    }

    /// Connects both sides, and sends what was read already.
    async fn splice(
        &self,
        allowed: &Allowed<'_>,
        server: Server,
        mut guest: Socket,
        read: Vec<u8>,
    ) -> Result<(), Broken> {
        let mut server = self.dial(server).await?;
        {
            let (from_guest, mut to_guest) = guest.split();
            let (from_server, mut to_server) = server.split();
            let (out, into) = (allowed.lane(Way::Out), allowed.lane(Way::In));
            out.write(&mut to_server, &read).await?;
            drop(read);
            tokio::try_join!(
                out.carry(&from_guest, &mut to_server, |first| self.note(first)),
                into.carry(&from_server, &mut to_guest, |_| {}),
            )?;
        }
        guest.close();
        server.close();
        Ok(())
    }

    /// What is known before the first byte.
    fn opening(&self) -> Opening {
        let denial = match self.ask(Seen::Nothing) {
            Verdict::Allow(_) => return Opening::Allowed,
            Verdict::Deny(denial) => denial,
        };
        let may_show = match (self.port, &denial.cause) {
            (_, Cause::Address(_)) => false,
            // The answer to a request says why.
            (Port::HTTP, _) => true,
            (Port::HTTPS, _) => self
                .bound()
                .iter()
                .any(|name| self.ask(Seen::Tls { sni: Some(name), encrypted: false }).is_allowed()),
            _ => false,
        };
        if may_show { Opening::Unseen(denial) } else { Opening::Refused(denial) }
    }

    fn bound(&self) -> Vec<Hostname> {
        self.proxy.enforcer.names_of(self.to.ip())
    }

    /// Decides by the policy and the bindings of this moment.
    fn ask(&self, seen: Seen<'_>) -> Verdict {
        let connection = Connection {
            transport: Transport::Tcp,
            address: self.to.ip(),
            port: self.port,
            bound: &self.bound(),
            seen,
        };
        self.proxy.enforcer.decide(Question::Connect(connection))
    }

    /// Decides, and keeps the binding that the decision is based on. What is for the server itself has its place there by then:
    /// without one, nothing ever says that it was allowed.
    pub(super) fn admit(&self, seen: Seen<'_>) -> Result<(Allowed<'_>, Server), Refused> {
        let enforcer = &self.proxy.enforcer;
        loop {
            let verdict = self.ask(seen);
            let grant = match &verdict {
                Verdict::Deny(denial) => return Err(Refused::Denied(denial.clone())),
                Verdict::Allow(grant) => grant,
            };
            // Of names that the server answers for itself, none is bound: whatever their address, the name says where to.
            let held = match &grant.name {
                Some(name) if grant.own.is_none() => match enforcer.hold(self.to.ip(), name) {
                    Some(held) => Some(held),
                    // It ended just now. Without it the verdict is another one.
                    None => continue,
                },
                _ => None,
            };
            let server = match grant.own {
                None => Server::There,
                Some((own, _)) => Server::Own(self.enter(own)?),
            };
            let receipt = Some(self.receipt(&verdict));
            let (out, into) = (AtomicU64::new(0), AtomicU64::new(0));
            return Ok((Allowed { flow: self, receipt, out, into, _held: held }, server));
        }
    }

    fn enter(&self, own: Own) -> Result<Socket, Refused> {
        let entered = self.proxy.dial.enter(own, self.proxy.enforcer.sandbox());
        entered.map(Socket::new).map_err(|error| {
            tracing::debug!(%error, ?own, "no place with the server itself");
            Refused::Limit(match own {
                Own::Edge => "limit/edge",
                Own::Service(Service::Models) => "limit/models",
                Own::Service(Service::Connections) => "limit/services",
            })
        })
    }

    /// Does its work until that ends, the flow may not go on, or it has rested for too long. In all cases but the first
    /// the work is dropped, and its sockets are reset.
    pub(super) async fn while_allowed(
        &self,
        policy: &mut watch::Receiver<Arc<Effective>>,
        seen: Seen<'_>,
        allowed: &Allowed<'_>,
        work: impl Future<Output = Result<(), Broken>>,
    ) {
        tokio::select! {
            // A change counts before the bytes that would go.
            biased;
            denial = self.denied(policy, seen) => self.refuse(denial),
            ended = work => match ended {
                Ok(()) => {}
                Err(Broken::Rule(rule)) => self.refuse_by(rule),
                Err(Broken::Socket(error)) => tracing::debug!(%error, to = %self.to, "a flow broke"),
            },
            () = allowed.rest() => tracing::debug!(to = %self.to, "a flow rested for too long"),
        }
    }

    /// Waits until a change of the policy denies what was allowed.
    async fn denied(&self, policy: &mut watch::Receiver<Arc<Effective>>, seen: Seen<'_>) -> Denial {
        // The enforcer is there for as long as this is, so there is no end of changes.
        while policy.changed().await.is_ok() {
            if let Verdict::Deny(denial) = self.ask(seen) {
                return denial;
            }
        }
        std::future::pending().await
    }

    /// Connects to where the guest wanted to, when it is its turn.
    pub(super) async fn dial(&self, server: Server) -> io::Result<Socket> {
        if let Server::Own(entered) = server {
            return Ok(entered);
        }
        let meter = &self.proxy.meter;
        let dialled = timeout(meter.caps.dial, async {
            let _turn = meter.dials.acquire().await.map_err(io::Error::other)?;
            self.proxy.dial.dial(self.to).await
        });
        Ok(Socket::new(dialled.await??))
    }

    /// Reads from the guest until `peek` finds something.
    pub(super) async fn read_first<T, E>(
        &self,
        guest: &TcpStream,
        peek: impl Fn(&[u8]) -> Result<Option<T>, E>,
    ) -> Result<(Vec<u8>, T), Unread<E>> {
        let found = timeout(self.proxy.meter.caps.head, async {
            let mut bytes = Vec::with_capacity(FIRST);
            loop {
                guest.readable().await.map_err(|_| Unread::TooFew)?;
                match guest.try_read_buf(&mut bytes) {
                    Ok(0) => return Err(Unread::TooFew),
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                    Err(_) => return Err(Unread::TooFew),
                }
                if let Some(found) = peek(&bytes).map_err(Unread::Bad)? {
                    return Ok((bytes, found));
                }
                if bytes.len() > MAX_FIRST {
                    return Err(Unread::TooFew);
                }
            }
        });
        found.await.unwrap_or(Err(Unread::TooFew))
    }

    /// Writes down what the first bytes show, of a flow that was not decided by it.
    fn note(&self, first: &[u8]) {
        match self.port {
            Port::HTTPS => {
                if let Ok(tls::Peek::Hello(ClientHello { sni, .. })) = tls::peek(first) {
                    self.show_name(sni.as_ref());
                }
            }
            Port::HTTP => {
                if let Ok(http::Peek::Head(head)) = http::peek(first) {
                    self.show_host(&head);
                }
            }
            _ => {}
        }
    }

    /// Writes down that it may not go, or not go on.
    pub(super) fn refuse(&self, denial: Denial) {
        self.write_refusal(self.receipt(&Verdict::Deny(denial)));
    }

    /// The same, by a rule that is not of a policy.
    pub(super) fn refuse_by(&self, rule: &str) {
        self.write_refusal(self.fill(None, self.proxy.enforcer.refusal(Kind::Connection, rule)));
    }

    fn write_refusal(&self, receipt: Receipt) {
        if self.proxy.meter.refusals.try_pass() {
            self.proxy.enforcer.record(receipt);
        } else {
            self.proxy.enforcer.leave_out(receipt.kind, receipt.outcome, 1);
        }
    }

    fn show_name(&self, name: Option<&Hostname>) {
        if let Some(name) = name {
            // What was shown first counts: nothing is decided on twice.
            let _known = self.shown.set(Text::new(name.as_str().as_bytes()));
        }
    }

    pub(super) fn show_host(&self, head: &RequestHead) {
        let host = match &head.host {
            Authority::Name(name) => name.to_string(),
            Authority::Address(address) => address.to_string(),
        };
        let _known = self.shown.set(Text::new(host.as_bytes()));
    }

    /// The receipt of a verdict on this flow.
    fn receipt(&self, verdict: &Verdict) -> Receipt {
        let name = match verdict {
            Verdict::Allow(grant) => grant.name.as_ref(),
            Verdict::Deny(_) => None,
        };
        self.fill(name, self.proxy.enforcer.receipt(Kind::Connection, verdict))
    }

    /// A receipt, with what is known of this flow.
    fn fill(&self, name: Option<&Hostname>, receipt: Receipt) -> Receipt {
        let bound = self.bound();
        // Without a name that counted, the address may still have only one.
        let name = name.or(if let [only] = &bound[..] { Some(only) } else { None });
        Receipt {
            name: name.map(|name| Text::new(name.as_str().as_bytes())),
            address: Some(self.to.ip()),
            port: Some(self.port),
            transport: Some(Transport::Tcp),
            shown: self.shown.get().cloned(),
            ..receipt
        }
    }
}
