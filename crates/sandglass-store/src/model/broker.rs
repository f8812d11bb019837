//! What teams keep for requests that they never send themselves.

use std::collections::BTreeMap;
use std::fmt;

use sandglass_broker::connection::Written;
use sandglass_broker::{ConnectionName, SecretName};
use sandglass_types::{SecretId, TeamId, Timestamp};

use super::PageCursor;

/// The most secrets of a team.
pub const MAX_SECRETS: u32 = 1000;

/// The most connections of a team.
pub const MAX_CONNECTIONS: u32 = 100;

/// A secret as it is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretRow {
    /// Its id.
    pub id: SecretId,
    /// Whose it is.
    pub team: TeamId,
    /// What they call it.
    pub name: SecretName,
    /// Counts its values, from 1.
    pub version: u32,
    /// Its value, sealed.
    pub sealed: Vec<u8>,
    /// The client's labels.
    pub metadata: BTreeMap<String, String>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it got its value.
    pub updated_at: Timestamp,
}

impl fmt::Debug for SecretRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SecretRow").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

/// Which secret a client means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretKey {
    /// That with this id.
    Id(SecretId),
    /// That with this name.
    Name(SecretName),
}

/// Another value of a secret.
#[derive(Clone)]
pub struct SecretChange {
    /// The value, sealed.
    pub sealed: Vec<u8>,
    /// Labels in place of those that it has; `None` leaves them.
    pub metadata: Option<BTreeMap<String, String>>,
    /// When.
    pub at: Timestamp,
}

/// What became of something new that has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// It is there.
    Inserted,
    /// It is there in the place of the one of its name.
    Replaced,
    /// There is one of its name. Nothing changed.
    NameTaken,
    /// The team has as many as it may have. Nothing changed.
    TooMany {
        /// How many.
        most: u32,
    },
}

/// Which secrets to list, newest first.
#[derive(Debug, Clone)]
pub struct SecretFilter {
    /// Of this team.
    pub team: TeamId,
    /// After this one.
    pub after: Option<PageCursor<SecretId>>,
    /// At most so many; 1 to 100.
    pub limit: u32,
}

/// One page.
#[derive(Debug, Clone)]
pub struct SecretPage {
    /// The rows, in order.
    pub rows: Vec<SecretRow>,
    /// Set if there are more.
    pub next: Option<PageCursor<SecretId>>,
}

/// A connection as it is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectionRow {
    /// Whose it is.
    pub team: TeamId,
    /// What they call it.
    pub name: ConnectionName,
    /// As it was written down.
    pub written: Written,
    /// Its credential, sealed.
    pub sealed: Vec<u8>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was changed.
    pub updated_at: Timestamp,
}

impl fmt::Debug for ConnectionRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionRow").field("name", &self.name).finish_non_exhaustive()
    }
}
