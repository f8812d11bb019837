//! Which names a sandbox resolved to which addresses: what ties an address back to the rule that allowed its name.
//!
//! An address at the end of a chain of CNAMEs is bound to the name that was asked for, since that is the name that was
//! decided on. A pure structure: the caller says what time it is.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use sandglass_types::Timestamp;
use sandglass_types::net::Hostname;
use serde::{Deserialize, Serialize};

use crate::policy::{Effective, Question, Record, decide};

/// Most pairs of a name and an address that one sandbox has.
pub const MAX_BINDINGS: usize = 4096;

/// Most names that are bound to one address. Some answer for thousands of names; each connection asks about all.
pub const MAX_NAMES: usize = 64;

/// Least time that a binding lasts: programs use an answer for longer than its TTL says.
pub const MIN_SPAN: Duration = Duration::from_mins(5);

/// Longest time that one lasts without being used.
pub const MAX_SPAN: Duration = Duration::from_hours(24);

/// The bindings of one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Bindings {
    by_address: BTreeMap<IpAddr, BTreeMap<Hostname, Binding>>,
    /// Number of pairs.
    count: usize,
    /// How many pairs there ever were.
    made: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Binding {
    until: Timestamp,
    /// Flows that use it.
    flows: u32,
    /// Which of all pairs ever made it is.
    serial: u64,
}

impl Binding {
    fn holds(&self, now: Timestamp) -> bool {
        self.flows > 0 || self.until > now
    }
}

/// A flow's claim on a binding, to be given back when the flow ends.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a binding that is held and not released lasts for ever"]
pub struct Hold {
    address: IpAddr,
    name: Hostname,
    serial: u64,
}

/// All bindings that could make room are in use by flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "connections of this sandbox use {MAX_BINDINGS} resolved addresses already, or {MAX_NAMES} names of one address"
)]
pub struct Full;

impl Bindings {
    /// Binds the addresses that `name` was resolved to, or renews them. Of those that do not fit, whose end is nearest
    /// go first.
    ///
    /// # Errors
    /// There is no room; some of the addresses may be bound all the same.
    pub fn bind(
        &mut self,
        now: Timestamp,
        name: &Hostname,
        addresses: impl IntoIterator<Item = IpAddr>,
        ttl: Duration,
    ) -> Result<(), Full> {
        let until = now.plus(ttl.clamp(MIN_SPAN, MAX_SPAN));
        for address in addresses {
            let address = address.to_canonical();
            if let Some(known) = self.by_address.get_mut(&address).and_then(|names| names.get_mut(name)) {
                known.until = known.until.max(until);
                continue;
            }
            self.make_room(now, address)?;
            self.made += 1;
            self.count += 1;
            let binding = Binding { until, flows: 0, serial: self.made };
            self.by_address.entry(address).or_default().insert(name.clone(), binding);
        }
        Ok(())
    }

    /// The names that are bound to an address, in alphabetical order.
    #[must_use]
    pub fn names(&self, now: Timestamp, address: IpAddr) -> Vec<Hostname> {
        let names = self.by_address.get(&address.to_canonical());
        let bound = names.into_iter().flatten().filter(|(_, binding)| binding.holds(now));
        bound.map(|(name, _)| name.clone()).collect()
    }

    /// Keeps a binding for as long as a flow uses it; `None` if there is no such binding.
    pub fn hold(&mut self, now: Timestamp, address: IpAddr, name: &Hostname) -> Option<Hold> {
        let address = address.to_canonical();
        let binding =
            self.by_address.get_mut(&address)?.get_mut(name).filter(|binding| binding.holds(now))?;
        binding.flows += 1;
        Some(Hold { address, name: name.clone(), serial: binding.serial })
    }

    /// Ends a flow's claim. One on a binding that was pruned, and perhaps made anew, does nothing.
    pub fn release(&mut self, hold: &Hold) {
        let binding = self.by_address.get_mut(&hold.address).and_then(|names| names.get_mut(&hold.name));
        if let Some(binding) = binding.filter(|binding| binding.serial == hold.serial) {
            binding.flows = binding.flows.saturating_sub(1);
        }
    }

    /// Removes what has ended.
    pub fn sweep(&mut self, now: Timestamp) {
        self.retain(|_, _, binding| binding.holds(now));
    }

    /// Removes what `policy` does not allow any more, also under flows, and says what that was.
    pub fn prune(&mut self, policy: &Effective) -> Vec<(Hostname, IpAddr)> {
        let mut removed = Vec::new();
        self.retain(|address, name, _| {
            let asked = decide(policy, Question::Dns { name, record: Record::A }).is_allowed();
            let stays = asked && decide(policy, Question::Answer { name, address }).is_allowed();
            if !stays {
                removed.push((name.clone(), address));
            }
            stays
        });
        removed
    }

    /// What travels with a paused or forked sandbox. Time stands still for it, and its flows end.
    #[must_use]
    pub fn save(&self, now: Timestamp) -> SavedBindings {
        let pairs = self.by_address.iter().flat_map(|(address, names)| {
            let holding = names.iter().filter(|(_, binding)| binding.holds(now));
            holding.map(|(name, binding)| SavedBinding {
                name: name.clone(),
                address: *address,
                remaining_ms: u64::try_from(binding.until.since(now).as_millis()).unwrap_or(u64::MAX),
            })
        });
        SavedBindings(pairs.collect())
    }

    /// Takes up what was saved. The policy may be another one now: [`Self::prune`] follows.
    #[must_use]
    pub fn restore(saved: &SavedBindings, now: Timestamp) -> Self {
        let mut bindings = Self::default();
        for SavedBinding { name, address, remaining_ms } in &saved.0 {
            let until = now.plus(Duration::from_millis(*remaining_ms).min(MAX_SPAN));
            bindings.made += 1;
            let binding = Binding { until, flows: 0, serial: bindings.made };
            let names = bindings.by_address.entry(address.to_canonical()).or_default();
            if names.len() < MAX_NAMES && names.insert(name.clone(), binding).is_none() {
                bindings.count += 1;
            }
        }
        bindings
    }

    /// Makes room for one more name of `address`.
    fn make_room(&mut self, now: Timestamp, address: IpAddr) -> Result<(), Full> {
        let crowded =
            |bindings: &Self| bindings.by_address.get(&address).is_some_and(|names| names.len() >= MAX_NAMES);
        if self.count < MAX_BINDINGS && !crowded(self) {
            return Ok(());
        }
        self.sweep(now);
        let at = match (crowded(self), self.count < MAX_BINDINGS) {
            (true, _) => Some(address),
            (false, false) => None,
            (false, true) => return Ok(()),
        };
        let near = self.by_address.iter().filter(|(other, _)| at.is_none_or(|at| at == **other));
        let unused = near.flat_map(|(_, names)| names.values()).filter(|binding| binding.flows == 0);
        let next = unused.map(|binding| (binding.until, binding.serial)).min().ok_or(Full)?.1;
        self.retain(|_, _, binding| binding.serial != next);
        Ok(())
    }

    fn retain(&mut self, mut stays: impl FnMut(IpAddr, &Hostname, &Binding) -> bool) {
        self.by_address.retain(|address, names| {
            names.retain(|name, binding| stays(*address, name, binding));
            !names.is_empty()
        });
        self.count = self.by_address.values().map(BTreeMap::len).sum();
    }
}

/// [`Bindings`] as they are stored, with the time that each has left.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<SavedBinding>", into = "Vec<SavedBinding>")]
pub struct SavedBindings(Vec<SavedBinding>);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedBinding {
    name: Hostname,
    address: IpAddr,
    remaining_ms: u64,
}

/// More bindings than there can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("at most {MAX_BINDINGS} bindings, not {0}")]
pub struct TooMany(usize);

impl TryFrom<Vec<SavedBinding>> for SavedBindings {
    type Error = TooMany;

    fn try_from(saved: Vec<SavedBinding>) -> Result<Self, TooMany> {
        if saved.len() > MAX_BINDINGS { Err(TooMany(saved.len())) } else { Ok(Self(saved)) }
    }
}

impl From<SavedBindings> for Vec<SavedBinding> {
    fn from(saved: SavedBindings) -> Self {
        saved.0
    }
}

#[cfg(test)]
mod tests;
