//! Connections: services that sandboxes may be let use with a credential that they never see.
//!
//! Those of the operator are for all teams. A team's own comes first, so what the operator adds takes none away.

use std::collections::BTreeSet;

use async_trait::async_trait;
use sandglass_broker::connection::{InvalidConnection, Written};
use sandglass_broker::vault::Place;
use sandglass_broker::{Connection, ConnectionName, Secret};
use sandglass_connections::{Granted, Grants, Reach, Use};
use sandglass_egress::policy::{Network, from_e2b};
use sandglass_egress::receipt::{Outcome, Receipt, Text};
use sandglass_store::{ConnectionRow, Kept};
use sandglass_types::{Error, ErrorKind, SandboxId, TeamId, Timestamp};

use super::broker::{MAX_GRANTED, OwnConnection, vault};
use super::{Control, stored};

/// A connection as whoever may use it is told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownConnection {
    /// As it was written down.
    pub written: Written,
    /// When the team made and changed it; `None` for one of the operator's.
    pub of_team: Option<(Timestamp, Timestamp)>,
}

impl From<ConnectionRow> for KnownConnection {
    fn from(row: ConnectionRow) -> Self {
        Self { written: row.written, of_team: Some((row.created_at, row.updated_at)) }
    }
}

impl From<&OwnConnection> for KnownConnection {
    fn from(own: &OwnConnection) -> Self {
        Self { written: own.written.clone(), of_team: None }
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

fn no_connection(name: &ConnectionName) -> Error {
    Error::new(ErrorKind::NotFound, format!("connection '{name}' not found"))
}

fn unread(error: InvalidConnection) -> Error {
    Error::internal("a connection that was kept can't be read", error)
}

impl Control {
    /// Keeps a connection of a team, in the place of the one of its name. Without a credential it has that of the one before, which
    /// leads to the same place. Says whether it is new.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`], [`ErrorKind::Quota`].
    pub async fn put_connection(
        &self,
        team: TeamId,
        written: Written,
        credential: Option<&Secret>,
    ) -> Result<(KnownConnection, bool), Error> {
        let connection = Connection::try_from(written.clone()).map_err(|error| invalid(error.to_string()))?;
        let Connection { name, target, .. } = &connection;
        if !target.tls {
            return Err(invalid(
                "target: only the operator can have a credential sent in clear: begin it with https://",
            ));
        }
        let before = self.0.store.connection(team, name).await.map_err(stored)?;
        let now = self.0.clock.now();
        let sealed = match (credential, &before) {
            (Some(credential), _) => {
                let place = Place::Connection(team, name, target);
                self.0.config.broker.vault.seal(credential, place).map_err(vault)?
            }
            (None, Some(before)) => {
                let there = Connection::try_from(before.written.clone()).map_err(unread)?.target;
                if there != *target {
                    return Err(invalid(
                        "value: the target is another one, so the credential is wanted again",
                    ));
                }
                before.sealed.clone()
            }
            (None, None) => return Err(invalid("value: a new connection needs its credential")),
        };
        let created_at = before.map_or(now, |before| before.created_at);
        let row = ConnectionRow { team, name: name.clone(), written, sealed, created_at, updated_at: now };
        match self.0.store.put_connection(&row).await.map_err(stored)? {
            Kept::Inserted => Ok((row.into(), true)),
            Kept::Replaced | Kept::NameTaken => Ok((row.into(), false)),
            Kept::TooMany { most } => {
                let message = format!(
                    "your team may have {most} connections: delete one that you do not need any more"
                );
                Err(Error::new(ErrorKind::Quota, message))
            }
        }
    }

    /// A connection that sandboxes of this team may be granted.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn connection(&self, team: TeamId, name: &ConnectionName) -> Result<KnownConnection, Error> {
        if let Some(row) = self.0.store.connection(team, name).await.map_err(stored)? {
            return Ok(row.into());
        }
        self.0.config.broker.own.get(name).map(Into::into).ok_or_else(|| no_connection(name))
    }

    /// All connections that sandboxes of this team may be granted, by their names.
    ///
    /// # Errors
    /// The store fails.
    pub async fn connections(&self, team: TeamId) -> Result<Vec<KnownConnection>, Error> {
        let rows = self.0.store.connections(team).await.map_err(stored)?;
        let own = &self.0.config.broker.own;
        let hidden = |name: &ConnectionName| rows.iter().any(|row| row.name == *name);
        let mut all: Vec<KnownConnection> =
            own.iter().filter(|(name, _)| !hidden(name)).map(|(_, own)| own.into()).collect();
        all.extend(rows.into_iter().map(Into::into));
        all.sort_by(|a, b| a.written.name.cmp(&b.written.name));
        Ok(all)
    }

    /// Deletes a connection of this team. Sandboxes that use it can't from now on.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::Forbidden`] for one of the operator's.
    pub async fn delete_connection(&self, team: TeamId, name: &ConnectionName) -> Result<(), Error> {
        if self.0.store.delete_connection(team, name).await.map_err(stored)? {
            return Ok(());
        }
        if self.0.config.broker.own.contains_key(name) {
            let message = format!("the connection '{name}' is the operator's, in the server's configuration");
            return Err(Error::new(ErrorKind::Forbidden, message));
        }
        Err(no_connection(name))
    }

    /// Checks that a sandbox of this team can be granted these.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] that says what to do.
    pub(super) async fn check_granted(&self, team: TeamId, names: &[ConnectionName]) -> Result<(), Error> {
        if names.len() > MAX_GRANTED {
            return Err(invalid(format!("connections may have at most {MAX_GRANTED} entries")));
        }
        for (at, name) in names.iter().enumerate() {
            if names[..at].contains(name) {
                return Err(invalid(format!("connections has '{name}' twice")));
            }
            match self.connection(team, name).await {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    return Err(invalid(format!(
                        "connections: your team has no connection '{name}': make it with PUT /v1/connections/{name}, \
                         or leave it out"
                    )));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Grants for Control {
    async fn granted(&self, sandbox: &SandboxId, name: &ConnectionName) -> Result<Option<Granted>, Error> {
        let Some(row) = self.0.store.sandbox(sandbox).await.map_err(stored)? else { return Ok(None) };
        if !row.connections.contains(name) {
            return Ok(None);
        }
        if let Some(kept) = self.0.store.connection(row.team, name).await.map_err(stored)? {
            let connection = Connection::try_from(kept.written).map_err(unread)?;
            let place = Place::Connection(row.team, name, &connection.target);
            let credential = self.0.config.broker.vault.open(&kept.sealed, place).map_err(vault)?;
            // A team reaches no more with a connection than its sandboxes could without.
            let everything = from_e2b(&Network::default(), Some(true))
                .map_err(|error| Error::internal("no policy that allows everything can be made", error))?;
            let (ceiling, _) = self.0.config.egress.effective(&everything, BTreeSet::new())?;
            return Ok(Some(Granted { connection, credential, reach: Reach::Ceiling(Box::new(ceiling)) }));
        }
        let own = self.0.config.broker.own.get(name);
        Ok(own.map(|OwnConnection { connection, credential, .. }| Granted {
            connection: connection.clone(),
            credential: credential.clone(),
            reach: Reach::Trusted,
        }))
    }

    fn used(&self, sandbox: &SandboxId, of: &Use) {
        let Some(enforcer) = self.0.enforcers.get(sandbox) else { return };
        let outcome = if of.allowed { Outcome::Allowed } else { Outcome::Denied };
        let text = |text: &str| Text::new(text.as_bytes());
        enforcer.record(Receipt {
            name: of.host.as_deref().map(text),
            method: Some(text(&of.method)),
            status: Some(of.status),
            sent: of.sent,
            received: of.received,
            ..enforcer.used(of.connection.as_str(), outcome)
        });
    }
}
