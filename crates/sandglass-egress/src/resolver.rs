//! What addresses a name has: asked only about names that a policy allows.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use fs_err as fs;
use hickory_resolver::config::{NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{Name, RData, RecordType};
use hickory_resolver::system_conf::parse_resolv_conf;
use hickory_resolver::{Hosts, TokioResolver};
use sandglass_types::net::Hostname;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Most addresses of one name that are used. As many as fit in the smallest answer of DNS, behind the longest name.
pub const MAX_ADDRESSES: usize = 12;

/// Questions that all sandboxes together may have under way; more of them wait. Each may take a socket.
const MAX_QUESTIONS: usize = 256;

/// Longest time for an answer, in all. Less than the 5 s that clients wait before they ask again.
const PATIENCE: Duration = Duration::from_secs(4);

/// Longest time for an answer of one name server, and how often one is asked.
const MAX_ATTEMPT: (Duration, usize) = (Duration::from_millis(1500), 2);

/// Answers that are kept for as long as they hold.
const MAX_CACHED: u64 = 4096;

/// Longest time that one is kept.
const MAX_KEPT: Duration = Duration::from_hours(1);

/// Longest time that is believed of a name without addresses, or of none: it may be about to be made.
const MAX_MISSED: Duration = Duration::from_secs(10);

/// What a name was resolved to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// The addresses at the end of the chain of CNAMEs, of which [`MAX_ADDRESSES`] are used; none if the name exists
    /// without any.
    pub addresses: Vec<Ipv4Addr>,
    /// How long all of it holds.
    pub ttl: Duration,
}

/// Why a name was not resolved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// There is no such name.
    #[error("there is no such name")]
    NoSuchName,
    /// No answer could be had.
    #[error("no name server gave an answer: {0}")]
    Failed(String),
}

/// Turns names into addresses.
#[async_trait]
pub trait Resolve: fmt::Debug + Send + Sync {
    /// The IPv4 addresses of a name, in bounded time. The name is absolute: no search domain is put behind it.
    ///
    /// # Errors
    /// There is no such name, or nobody could tell.
    async fn resolve(&self, name: &Hostname) -> Result<Resolved, ResolveError>;
}

/// The resolver of this machine: the name servers of `/etc/resolv.conf` and the names of `/etc/hosts`.
///
/// Both files are read once, before the server gives up its view of the file system. Search domains are left out.
pub struct HostResolver {
    resolver: TokioResolver,
    questions: Semaphore,
}

/// The files by which this machine resolves names are of no use.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// One can't be read.
    #[error("the names or name servers of this machine can't be read")]
    Unreadable(#[source] io::Error),
    /// They name no name server, or something else is wrong with them.
    #[error("the resolver's configuration can't be used")]
    Invalid(#[source] NetError),
}

impl HostResolver {
    /// Reads the files of this machine. Without `/etc/hosts`, there are no names in it.
    ///
    /// # Errors
    /// There is no usable `/etc/resolv.conf`, or `/etc/hosts` can't be read.
    pub fn of_this_machine() -> Result<Self, Unusable> {
        let resolv_conf = fs::read("/etc/resolv.conf").map_err(Unusable::Unreadable)?;
        let hosts = match fs::read("/etc/hosts") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(Unusable::Unreadable)?,
        };
        Self::new(&resolv_conf, &hosts)
    }

    /// From the contents of such files.
    ///
    /// # Errors
    /// `resolv_conf` names no name server, or a search domain that is none; or `hosts` is not text.
    pub fn new(resolv_conf: &[u8], hosts: &[u8]) -> Result<Self, Unusable> {
        let (config, options) = parse_resolv_conf(resolv_conf).map_err(Unusable::Invalid)?;
        let (_domain, _search, servers) = config.into_parts();
        Self::with(servers, &options, hosts)
    }

    fn with(servers: Vec<NameServerConfig>, wanted: &ResolverOpts, hosts: &[u8]) -> Result<Self, Unusable> {
        let mut names = Hosts::default();
        names.read_hosts_conf(hosts).map_err(Unusable::Unreadable)?;
        let config = ResolverConfig::from_name_servers(servers);
        let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
        let options = builder.options_mut();
        let (attempt, attempts) = MAX_ATTEMPT;
        options.timeout = wanted.timeout.min(attempt);
        options.attempts = wanted.attempts.clamp(1, attempts);
        options.max_active_requests = MAX_QUESTIONS;
        options.cache_size = MAX_CACHED;
        options.positive_max_ttl = Some(MAX_KEPT);
        options.negative_max_ttl = Some(MAX_MISSED);
        let mut resolver = builder.build().map_err(Unusable::Invalid)?;
        resolver.set_hosts(names.into());
        Ok(Self { resolver, questions: Semaphore::new(MAX_QUESTIONS) })
    }

    async fn ask(&self, name: &Hostname) -> Result<Resolved, ResolveError> {
        let failed = |error: &dyn fmt::Display| ResolveError::Failed(error.to_string());
        let _question = self.questions.acquire().await.map_err(|closed| failed(&closed))?;
        let absolute = Name::from_ascii(format!("{name}.")).map_err(|error| failed(&error))?;
        match self.resolver.lookup(absolute, RecordType::A).await {
            Ok(lookup) => {
                let addresses = lookup.answers().iter().filter_map(|record| match &record.data {
                    RData::A(address) => Some(address.0),
                    _ => None,
                });
                let ttl = lookup.valid_until().saturating_duration_since(Instant::now());
                Ok(Resolved { addresses: addresses.take(MAX_ADDRESSES).collect(), ttl })
            }
            Err(error) if error.is_nx_domain() => Err(ResolveError::NoSuchName),
            Err(error) if error.is_no_records_found() => {
                Ok(Resolved { addresses: Vec::new(), ttl: Duration::ZERO })
            }
            Err(error) => Err(failed(&error)),
        }
    }
}

impl fmt::Debug for HostResolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostResolver").finish_non_exhaustive()
    }
}

#[async_trait]
impl Resolve for HostResolver {
    async fn resolve(&self, name: &Hostname) -> Result<Resolved, ResolveError> {
        let late = |_| ResolveError::Failed(format!("not within {PATIENCE:?}"));
        timeout(PATIENCE, self.ask(name)).await.map_err(late)?
    }
}

/// Names with fixed addresses, and no others.
#[derive(Debug, Clone, Default)]
pub struct FixedNames(pub BTreeMap<Hostname, Resolved>);

#[async_trait]
impl Resolve for FixedNames {
    async fn resolve(&self, name: &Hostname) -> Result<Resolved, ResolveError> {
        self.0.get(name).cloned().ok_or(ResolveError::NoSuchName)
    }
}

#[cfg(test)]
mod tests;
