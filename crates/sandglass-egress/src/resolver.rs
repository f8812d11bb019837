//! What addresses a name has: asked only about names that a policy allows.

use std::fmt;
use std::net::Ipv4Addr;
use std::time::Duration;

use async_trait::async_trait;
use sandglass_types::net::Hostname;

/// Most addresses of one name that are used. As many as fit in the smallest answer of DNS, behind the longest name.
pub const MAX_ADDRESSES: usize = 12;

/// What a name was resolved to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// The addresses at the end of the chain of CNAMEs, at most [`MAX_ADDRESSES`]; none if the name exists without any.
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
