//! Secrets of teams: kept, listed, given other values, deleted. No verb tells a value.

use std::collections::BTreeMap;

use sandglass_broker::vault::Place;
use sandglass_broker::{Secret, SecretName};
use sandglass_store::{Kept, PageCursor, SecretChange, SecretFilter, SecretKey, SecretPage, SecretRow};
use sandglass_types::{Error, ErrorKind, SecretId, TeamId};

use super::broker::vault;
use super::{Control, stored};
use crate::request::check_pairs;

fn no_secret() -> Error {
    Error::new(ErrorKind::NotFound, "secret not found")
}

impl Control {
    /// Keeps a secret under a name that no other of the team has.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`], [`ErrorKind::Conflict`] for the name, [`ErrorKind::Quota`].
    pub async fn create_secret(
        &self,
        team: TeamId,
        name: SecretName,
        value: &Secret,
        metadata: BTreeMap<String, String>,
    ) -> Result<SecretRow, Error> {
        check_pairs("metadata", &metadata)?;
        let sealed = self.0.config.broker.vault.seal(value, Place::Secret(team, &name)).map_err(vault)?;
        let now = self.0.clock.now();
        let id = SecretId::random();
        let new =
            SecretRow { id, team, name, version: 1, sealed, metadata, created_at: now, updated_at: now };
        match self.0.store.insert_secret(&new).await.map_err(stored)? {
            Kept::Inserted | Kept::Replaced => Ok(new),
            Kept::NameTaken => {
                let message = format!("your team has a secret '{}' already", new.name);
                Err(Error::new(ErrorKind::Conflict, message))
            }
            Kept::TooMany { most } => {
                let message =
                    format!("your team may have {most} secrets: delete one that you do not need any more");
                Err(Error::new(ErrorKind::Quota, message))
            }
        }
    }

    /// Gives a secret another value, and other labels if there are some.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`], [`ErrorKind::NotFound`].
    pub async fn update_secret(
        &self,
        team: TeamId,
        key: &SecretKey,
        value: &Secret,
        metadata: Option<BTreeMap<String, String>>,
    ) -> Result<SecretRow, Error> {
        if let Some(metadata) = &metadata {
            check_pairs("metadata", metadata)?;
        }
        // It is sealed for its name, which never changes.
        let SecretRow { id, name, .. } = self.secret(team, key).await?;
        let sealed = self.0.config.broker.vault.seal(value, Place::Secret(team, &name)).map_err(vault)?;
        let change = SecretChange { sealed, metadata, at: self.0.clock.now() };
        let changed = self.0.store.update_secret(team, &SecretKey::Id(id), &change).await.map_err(stored)?;
        changed.ok_or_else(no_secret)
    }

    /// A secret of this team, without its value.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn secret(&self, team: TeamId, key: &SecretKey) -> Result<SecretRow, Error> {
        self.0.store.secret(team, key).await.map_err(stored)?.ok_or_else(no_secret)
    }

    /// A page of a team's secrets, newest first.
    ///
    /// # Errors
    /// The store fails.
    pub async fn secrets(
        &self,
        team: TeamId,
        after: Option<PageCursor<SecretId>>,
        limit: u32,
    ) -> Result<SecretPage, Error> {
        self.0.store.list_secrets(&SecretFilter { team, after, limit }).await.map_err(stored)
    }

    /// Deletes a secret: nothing opens it any more.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn delete_secret(&self, team: TeamId, key: &SecretKey) -> Result<(), Error> {
        let done = self.0.store.delete_secret(team, key).await.map_err(stored)?;
        if done { Ok(()) } else { Err(no_secret()) }
    }
}
