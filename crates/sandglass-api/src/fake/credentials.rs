//! Secrets and connections of the backend of tests, which keep no value at all.

use std::collections::BTreeMap;

use async_trait::async_trait;
use sandglass_broker::connection::Written;
use sandglass_broker::{ConnectionName, Secret, SecretName};
use sandglass_control::KnownConnection;
use sandglass_store::{PageCursor, SecretKey, SecretPage, SecretRow};
use sandglass_types::{Error, ErrorKind, SecretId, TeamId, Timestamp};

use super::{Fake, not_found};
use crate::backend::Credentials;

/// The most secrets of a team of the fake's.
pub(crate) const MAX_SECRETS: usize = 2;

fn means(row: &SecretRow, team: TeamId, key: &SecretKey) -> bool {
    row.team == team
        && match key {
            SecretKey::Id(id) => row.id == *id,
            SecretKey::Name(name) => row.name == *name,
        }
}

#[async_trait]
impl Credentials for Fake {
    async fn create_secret(
        &self,
        team: TeamId,
        name: SecretName,
        _: &Secret,
        metadata: BTreeMap<String, String>,
    ) -> Result<SecretRow, Error> {
        let mut secrets = self.secrets.lock().unwrap();
        if secrets.len() >= MAX_SECRETS {
            return Err(Error::new(ErrorKind::Quota, "too many"));
        }
        let at = Timestamp::from_millis(i64::try_from(secrets.len()).unwrap());
        let id = SecretId::random();
        let row = SecretRow {
            id,
            team,
            name,
            version: 1,
            sealed: Vec::new(),
            metadata,
            created_at: at,
            updated_at: at,
        };
        secrets.push(row.clone());
        Ok(row)
    }

    async fn update_secret(
        &self,
        team: TeamId,
        key: &SecretKey,
        _: &Secret,
        metadata: Option<BTreeMap<String, String>>,
    ) -> Result<SecretRow, Error> {
        let mut secrets = self.secrets.lock().unwrap();
        let row = secrets.iter_mut().find(|row| means(row, team, key)).ok_or_else(not_found)?;
        row.version += 1;
        row.metadata = metadata.unwrap_or_else(|| row.metadata.clone());
        Ok(row.clone())
    }

    async fn secret(&self, team: TeamId, key: &SecretKey) -> Result<SecretRow, Error> {
        let secrets = self.secrets.lock().unwrap();
        secrets.iter().find(|row| means(row, team, key)).cloned().ok_or_else(not_found)
    }

    async fn secrets(
        &self,
        team: TeamId,
        after: Option<PageCursor<SecretId>>,
        limit: u32,
    ) -> Result<SecretPage, Error> {
        let mut rows = self.secrets.lock().unwrap().clone();
        rows.reverse();
        rows.retain(|row| {
            row.team == team && after.as_ref().is_none_or(|after| row.created_at < after.created_at)
        });
        let more = rows.len() > usize::try_from(limit).unwrap();
        rows.truncate(usize::try_from(limit).unwrap());
        let next =
            rows.last().filter(|_| more).map(|row| PageCursor { created_at: row.created_at, id: row.id });
        Ok(SecretPage { rows, next })
    }

    async fn delete_secret(&self, team: TeamId, key: &SecretKey) -> Result<(), Error> {
        self.secret(team, key).await?;
        self.secrets.lock().unwrap().retain(|row| !means(row, team, key));
        Ok(())
    }

    async fn put_connection(
        &self,
        team: TeamId,
        written: Written,
        credential: Option<&Secret>,
    ) -> Result<(KnownConnection, bool), Error> {
        let mut all = self.connections.lock().unwrap();
        let before = all.len();
        all.retain(|(of, known)| *of != team || known.written.name != written.name);
        let new = before == all.len();
        if new && credential.is_none() {
            return Err(Error::new(ErrorKind::Invalid, "value"));
        }
        let at = Timestamp::from_millis(0);
        let known = KnownConnection { written, of_team: Some((at, at)) };
        all.push((team, known.clone()));
        Ok((known, new))
    }

    async fn connection(&self, team: TeamId, name: &ConnectionName) -> Result<KnownConnection, Error> {
        let all = self.connections(team).await?;
        all.into_iter().find(|known| known.written.name == name.as_str()).ok_or_else(not_found)
    }

    async fn connections(&self, team: TeamId) -> Result<Vec<KnownConnection>, Error> {
        let all = self.connections.lock().unwrap();
        Ok(all.iter().filter(|(of, _)| *of == team).map(|(_, known)| known.clone()).collect())
    }

    async fn delete_connection(&self, team: TeamId, name: &ConnectionName) -> Result<(), Error> {
        self.connection(team, name).await?;
        self.connections
            .lock()
            .unwrap()
            .retain(|(of, known)| *of != team || known.written.name != name.as_str());
        Ok(())
    }
}
