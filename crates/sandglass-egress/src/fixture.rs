//! What the tests of this crate share: an enforcer of some rules, and what it writes down.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use sandglass_types::clock::ManualClock;
use sandglass_types::net::Hostname;
use sandglass_types::{Generation, SandboxId, Timestamp};

use crate::enforcer::{Enforcer, Ledger, NoRoom, Settings};
use crate::policy::{Effective, Operator, Policy, Rules, Surroundings};
use crate::receipt::{Receipt, verify};
use crate::remembered::Remembered;
use crate::resolver::{FixedNames, Resolve, ResolveError, Resolved};

/// A ledger in memory, which can be full.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    lines: Mutex<Vec<String>>,
    pub(crate) full: AtomicBool,
}

impl Ledger for Memory {
    fn append(&self, line: String) -> Result<(), NoRoom> {
        if self.full.load(Ordering::SeqCst) {
            return Err(NoRoom);
        }
        self.lines.lock().unwrap().push(line);
        Ok(())
    }
}

/// Fixed names, and how often somebody asked.
#[derive(Debug)]
pub(crate) struct Counted {
    names: FixedNames,
    pub(crate) asked: AtomicUsize,
}

#[async_trait]
impl Resolve for Counted {
    async fn resolve(&self, name: &Hostname) -> Result<Resolved, ResolveError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.names.resolve(name).await
    }
}

/// An enforcer, and what is behind it.
pub(crate) struct Fixture {
    pub(crate) enforcer: Arc<Enforcer>,
    pub(crate) resolver: Arc<Counted>,
    pub(crate) ledger: Arc<Memory>,
    pub(crate) clock: Arc<ManualClock>,
}

pub(crate) const TTL: Duration = Duration::from_mins(30);

pub(crate) fn sandbox() -> SandboxId {
    "abcdefghij0123456789".parse().unwrap()
}

pub(crate) fn host(name: &str) -> Hostname {
    name.parse().unwrap()
}

/// A policy of rules under a ceiling that allows as much.
pub(crate) fn policy(rules: &str) -> Effective {
    let rules: Rules = serde_json::from_str(rules).unwrap();
    let operator: Operator = serde_json::from_value(serde_json::json!({ "ceiling": rules.clone() })).unwrap();
    Effective::new(&Policy::of(rules), &operator, Surroundings::default()).unwrap().0
}

/// An enforcer of rules, where names have the addresses that stand behind them.
pub(crate) fn fixture(rules: &str, names: &[(&str, &[&str])]) -> Fixture {
    let resolved = |addresses: &[&str]| Resolved {
        addresses: addresses.iter().map(|address| address.parse::<Ipv4Addr>().unwrap()).collect(),
        ttl: TTL,
    };
    let names = names.iter().map(|(name, addresses)| (host(name), resolved(addresses))).collect();
    let resolver = Arc::new(Counted { names: FixedNames(names), asked: AtomicUsize::new(0) });
    let ledger = Arc::new(Memory::default());
    let clock = Arc::new(ManualClock::new(Timestamp::from_millis(1_764_424_800_123)));
    let enforcer = Enforcer::new(Settings {
        sandbox: sandbox(),
        generation: Generation::FIRST,
        policy: policy(rules),
        remembered: Remembered::default(),
        head: None,
        ledger: Arc::<Memory>::clone(&ledger),
        resolver: Arc::<Counted>::clone(&resolver),
        clock: Arc::<ManualClock>::clone(&clock),
        totals: Arc::default(),
    });
    Fixture { enforcer, resolver, ledger, clock }
}

impl Fixture {
    /// How often the resolver was asked.
    pub(crate) fn asked(&self) -> usize {
        self.resolver.asked.load(Ordering::SeqCst)
    }

    /// The receipts so far, of a chain that is whole.
    pub(crate) fn receipts(&self) -> Vec<Receipt> {
        let lines = self.ledger.lines.lock().unwrap();
        let chain = lines.iter().map(String::as_str);
        assert_eq!(verify(&sandbox(), None, chain, Some(&self.enforcer.head())), Ok(self.enforcer.head()));
        let receipt = |line: &String| {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            serde_json::from_value(value["receipt"].clone()).unwrap()
        };
        lines.iter().map(receipt).collect()
    }
}
