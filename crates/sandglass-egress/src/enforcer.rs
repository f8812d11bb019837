//! The policy of one running sandbox, enforced: every answer of DNS and every connection out of it passes here.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandglass_types::net::Hostname;
use sandglass_types::{Clock, Generation, SandboxId};
use tokio::net::{TcpListener, UdpSocket, UnixDatagram};
use tokio::sync::{Notify, watch};

use crate::bindings::{Bindings, Full, Hold};
use crate::dns::{self, Lookups, Pace};
use crate::filter_log;
use crate::policy::{Effective, Question, Record, Verdict, decide};
use crate::receipt::{Chain, Head, Kind, Outcome, Receipt, Text};
use crate::remembered::{Carried, Remembered};
use crate::resolver::{MAX_ADDRESSES, Resolve, ResolveError, Resolved};
use crate::totals::Totals;

/// Where the lines of receipts go: append-only, one per sandbox.
pub trait Ledger: fmt::Debug + Send + Sync {
    /// Takes the next line, without its line feed. It must not block.
    ///
    /// # Errors
    /// There is no room for it now. The line is not in the ledger, and the next one that is will say so.
    fn append(&self, line: String) -> Result<(), NoRoom>;
}

/// A ledger has no room for a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ledger has no room")]
pub struct NoRoom;

/// What an [`Enforcer`] is made of.
#[derive(Debug)]
pub struct Settings {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Which life of it this is.
    pub generation: Generation,
    /// What may leave it.
    pub policy: Effective,
    /// What it resolved and carried in an earlier life, or before the server was restarted. Of the names, those that
    /// `policy` does not allow end here.
    pub remembered: Remembered,
    /// Where its receipts ended; `None` if it has none yet.
    pub head: Option<Head>,
    /// Where its receipts go.
    pub ledger: Arc<dyn Ledger>,
    /// What is asked about names that it may ask about.
    pub resolver: Arc<dyn Resolve>,
    /// What time it is.
    pub clock: Arc<dyn Clock>,
    /// Counts for all sandboxes of the server.
    pub totals: Arc<Totals>,
}

/// Enforces the policy of one running sandbox.
#[derive(Debug)]
pub struct Enforcer {
    sandbox: SandboxId,
    generation: Generation,
    policy: watch::Sender<Arc<Effective>>,
    bindings: Mutex<Bindings>,
    receipts: Mutex<Receipts>,
    lookups: Lookups,
    dns_pace: Pace,
    dns_refusals: Pace,
    clock: Arc<dyn Clock>,
    /// Bytes that left the sandbox.
    sent: AtomicU64,
    /// Bytes that came in.
    received: AtomicU64,
    totals: Arc<Totals>,
    /// Tells that there are bindings that were not remembered.
    learned: Notify,
    /// Changes when the other ends of all connections are gone.
    severed: watch::Sender<()>,
}

#[derive(Debug)]
struct Receipts {
    chain: Chain,
    ledger: Arc<dyn Ledger>,
    /// How many the ledger did not take since the last one that it took.
    lost: u64,
}

impl Enforcer {
    /// Takes up its work. Nothing passes before one of its `serve` methods runs.
    #[must_use]
    pub fn new(settings: Settings) -> Arc<Self> {
        let Settings { sandbox, generation, policy, remembered, head, ledger, resolver, clock, totals } =
            settings;
        let Remembered { bindings, carried } = remembered;
        let mut bindings = Bindings::restore(&bindings, clock.now());
        bindings.prune(&policy);
        let chain = match head {
            Some(head) => Chain::resume(sandbox.clone(), head),
            None => Chain::begin(sandbox.clone()),
        };
        Arc::new(Self {
            sandbox,
            generation,
            policy: watch::Sender::new(Arc::new(policy)),
            bindings: Mutex::new(bindings),
            receipts: Mutex::new(Receipts { chain, ledger, lost: 0 }),
            lookups: Lookups::new(resolver),
            dns_pace: dns::answers(),
            dns_refusals: dns::refusals(),
            clock,
            sent: AtomicU64::new(carried.sent),
            received: AtomicU64::new(carried.received),
            totals,
            learned: Notify::new(),
            severed: watch::Sender::new(()),
        })
    }

    /// The sandbox that it is for.
    #[must_use]
    pub const fn sandbox(&self) -> &SandboxId {
        &self.sandbox
    }

    /// The policy in force, and each that follows. A flow watches it, decides again when it changes, and ends if it may
    /// not go on.
    #[must_use]
    pub fn policy(&self) -> watch::Receiver<Arc<Effective>> {
        self.policy.subscribe()
    }

    /// Puts another policy in force. What was resolved and is not allowed any more is forgotten.
    pub fn set_policy(&self, policy: Effective) {
        let policy = Arc::new(policy);
        // In this order: who holds the bindings reads the policy afterwards, so what the old one bound is pruned here.
        self.policy.send_replace(Arc::clone(&policy));
        self.bindings().prune(&policy);
    }

    /// Decides by the policy in force.
    #[must_use]
    pub fn decide(&self, question: Question<'_>) -> Verdict {
        let policy = Arc::clone(&self.policy.borrow());
        decide(&policy, question)
    }

    /// The names that are bound to an address now, for [`crate::policy::Connection::bound`].
    #[must_use]
    pub fn names_of(&self, address: IpAddr) -> Vec<Hostname> {
        self.bindings().names(self.clock.now(), address)
    }

    /// Keeps the binding of [`crate::policy::Grant::name`] to the flow's address for as long as the flow uses it. `None`
    /// if there is no such binding any more: the flow must not go on by that name.
    #[must_use]
    pub fn hold(self: &Arc<Self>, address: IpAddr, name: &Hostname) -> Option<Held> {
        let hold = self.bindings().hold(self.clock.now(), address, name)?;
        Some(Held { enforcer: Arc::clone(self), hold })
    }

    /// A receipt of what was decided just now, to be completed and given to [`Self::record`] once it is known how it went.
    #[must_use]
    pub fn receipt(&self, kind: Kind, verdict: &Verdict) -> Receipt {
        self.decided(kind, &verdict.rule(), Outcome::from(verdict))
    }

    /// A receipt of what was refused just now without asking the policy: `rule` is `always/…` for what can't be allowed,
    /// or `limit/…` for what was too much.
    #[must_use]
    pub fn refusal(&self, kind: Kind, rule: &str) -> Receipt {
        self.decided(kind, rule, Outcome::Denied)
    }

    /// A receipt of the use of a connection, by its name.
    #[must_use]
    pub fn used(&self, connection: &str, outcome: Outcome) -> Receipt {
        self.decided(Kind::Use, &format!("connection/{connection}"), outcome)
    }

    fn decided(&self, kind: Kind, rule: &str, outcome: Outcome) -> Receipt {
        Receipt {
            time: self.clock.now(),
            generation: self.generation,
            kind,
            name: None,
            record: None,
            answer: Vec::new(),
            address: None,
            port: None,
            transport: None,
            shown: None,
            method: None,
            status: None,
            rule: Text::new(rule.as_bytes()),
            outcome,
            sent: 0,
            received: 0,
            lost: 0,
        }
    }

    /// Writes a receipt down, as the next of the sandbox's chain.
    pub fn record(&self, receipt: Receipt) {
        self.totals.decided(receipt.kind, receipt.outcome, 1);
        let mut receipts = self.receipts();
        let mut chain = receipts.chain.clone();
        let taken = match chain.append(Receipt { lost: receipts.lost, ..receipt }) {
            Ok(line) => receipts.ledger.append(line).is_ok(),
            Err(error) => {
                tracing::error!(%error, "a receipt could not be written");
                false
            }
        };
        if taken {
            receipts.chain = chain;
            receipts.lost = 0;
        } else {
            receipts.lost = receipts.lost.saturating_add(1);
            self.totals.unwritten(1);
        }
    }

    /// Counts receipts without writing them, since there are too many: the next that is written says so.
    pub(crate) fn leave_out(&self, kind: Kind, outcome: Outcome, count: u64) {
        self.totals.decided(kind, outcome, count);
        self.totals.unwritten(count);
        let mut receipts = self.receipts();
        receipts.lost = receipts.lost.saturating_add(count);
    }

    /// Where the receipts end now: kept elsewhere, it shows whether lines are missing at the end.
    #[must_use]
    pub fn head(&self) -> Head {
        self.receipts().chain.head().clone()
    }

    /// What travels with the sandbox when it is paused or forked, and what the next server takes up.
    #[must_use]
    pub fn remembered(&self) -> Remembered {
        Remembered { bindings: self.bindings().save(self.clock.now()), carried: self.carried() }
    }

    /// Resets all connections that the sandbox has now: its own ends of them are gone, and nobody else would say so.
    pub fn sever(&self) {
        self.severed.send_replace(());
    }

    /// Each [`Self::sever`] from now on is a change.
    pub(crate) fn severed(&self) -> watch::Receiver<()> {
        self.severed.subscribe()
    }

    /// Waits until there are bindings that [`Self::remembered`] did not have when this was asked last.
    pub async fn learned(&self) {
        self.learned.notified().await;
    }

    /// Bytes that its connections carried.
    #[must_use]
    pub fn carried(&self) -> Carried {
        Carried { sent: self.sent.load(Ordering::Relaxed), received: self.received.load(Ordering::Relaxed) }
    }

    /// Counts bytes that are about to leave.
    pub(crate) fn count_out(&self, bytes: u64) {
        self.totals.sent.fetch_add(bytes, Ordering::Relaxed);
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that are about to come in.
    pub(crate) fn count_in(&self, bytes: u64) {
        self.totals.received.fetch_add(bytes, Ordering::Relaxed);
        self.received.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Answers DNS on the sockets of the sandbox's airlock, until one of them fails. Dropping the future closes both and
    /// all connections.
    ///
    /// # Errors
    /// A socket failed. No DNS is answered any more.
    pub async fn serve_dns(self: Arc<Self>, udp: UdpSocket, tcp: TcpListener) -> io::Result<Infallible> {
        tokio::select! {
            outcome = dns::serve_udp(&self, udp) => outcome,
            never = dns::serve_tcp(&self, tcp) => match never {},
        }
    }

    /// Writes down what the packet filter of the sandbox's airlock holds up by itself, as it arrives on a socket of
    /// [`crate::filter_log::GROUP`], until that fails. For it, one of datagrams is like any other.
    ///
    /// # Errors
    /// The socket failed. What is held up is not written down any more, and is held up all the same.
    pub async fn serve_filter_log(&self, log: UnixDatagram) -> io::Result<Infallible> {
        filter_log::serve(self, log).await
    }

    /// Waits until the sandbox may be answered once more.
    pub(crate) async fn pace_dns(&self) {
        self.dns_pace.pass().await;
    }

    /// Writes down what DNS answered. Of many refusals some are only counted, so that asking for what it may not have pushes
    /// only slowly out of the ledger what a sandbox did before. Refused connections, and what the packet filter holds up,
    /// have paces of their own beside this one.
    pub(crate) fn record_dns(&self, receipt: Receipt) {
        if receipt.outcome == Outcome::Allowed || self.dns_refusals.try_pass() {
            self.record(receipt);
        } else {
            self.leave_out(receipt.kind, receipt.outcome, 1);
        }
    }

    /// What the resolver says about a name that may be asked for, and no more of it than fits in an answer.
    pub(crate) async fn resolve(&self, name: &Hostname) -> Result<Resolved, ResolveError> {
        let mut found = self.lookups.resolve(name).await?;
        found.addresses.truncate(MAX_ADDRESSES);
        Ok(found)
    }

    /// Binds those addresses of a name that the sandbox may be told, by the policy in force: it may be another one than
    /// when the resolver was asked.
    ///
    /// # Errors
    /// None of them may be told.
    pub(crate) fn tell(&self, name: &Hostname, found: &Resolved) -> Result<(Verdict, Vec<Ipv4Addr>), Untold> {
        let mut bindings = self.bindings();
        let policy = Arc::clone(&self.policy.borrow());
        let mut verdict = decide(&policy, Question::Dns { name, record: Record::A });
        if !verdict.is_allowed() {
            return Err(Untold::Denied(verdict));
        }
        let mut told = Vec::new();
        for address in &found.addresses {
            let answer = decide(&policy, Question::Answer { name, address: IpAddr::V4(*address) });
            let allowed = answer.is_allowed();
            if told.is_empty() {
                verdict = answer;
            }
            if allowed {
                told.push(*address);
            }
        }
        if told.is_empty() {
            return Err(Untold::Denied(verdict));
        }
        let addresses = told.iter().copied().map(IpAddr::V4);
        bindings.bind(self.clock.now(), name, addresses, found.ttl).map_err(|Full| Untold::Full)?;
        self.learned.notify_one();
        Ok((verdict, told))
    }

    fn receipts(&self) -> MutexGuard<'_, Receipts> {
        self.receipts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bindings(&self) -> MutexGuard<'_, Bindings> {
        self.bindings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why the sandbox is told no address of a name.
#[derive(Debug)]
pub(crate) enum Untold {
    /// The policy denies all that there are.
    Denied(Verdict),
    /// There is no room for a binding.
    Full,
}

/// A flow's claim on a binding; it ends when this is dropped.
#[derive(Debug)]
#[must_use = "the binding is kept only while this is"]
pub struct Held {
    enforcer: Arc<Enforcer>,
    hold: Hold,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.enforcer.bindings().release(&self.hold);
    }
}

#[cfg(test)]
mod tests;
