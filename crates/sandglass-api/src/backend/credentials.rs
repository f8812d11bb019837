//! What the faces need of secrets and connections.

use std::collections::BTreeMap;

use async_trait::async_trait;
use sandglass_broker::connection::Written;
use sandglass_broker::{ConnectionName, Secret, SecretName};
use sandglass_control::{Control, KnownConnection};
use sandglass_store::{PageCursor, SecretKey, SecretPage, SecretRow};
use sandglass_types::{Error, SecretId, TeamId};

/// The verbs of [`Control`] that the faces call.
#[async_trait]
pub(crate) trait Credentials: Send + Sync {
    async fn create_secret(
        &self,
        team: TeamId,
        name: SecretName,
        value: &Secret,
        metadata: BTreeMap<String, String>,
    ) -> Result<SecretRow, Error>;
    async fn update_secret(
        &self,
        team: TeamId,
        key: &SecretKey,
        value: &Secret,
        metadata: Option<BTreeMap<String, String>>,
    ) -> Result<SecretRow, Error>;
    async fn secret(&self, team: TeamId, key: &SecretKey) -> Result<SecretRow, Error>;
    async fn secrets(
        &self,
        team: TeamId,
        after: Option<PageCursor<SecretId>>,
        limit: u32,
    ) -> Result<SecretPage, Error>;
    async fn delete_secret(&self, team: TeamId, key: &SecretKey) -> Result<(), Error>;
    async fn put_connection(
        &self,
        team: TeamId,
        written: Written,
        credential: Option<&Secret>,
    ) -> Result<(KnownConnection, bool), Error>;
    async fn connection(&self, team: TeamId, name: &ConnectionName) -> Result<KnownConnection, Error>;
    async fn connections(&self, team: TeamId) -> Result<Vec<KnownConnection>, Error>;
    async fn delete_connection(&self, team: TeamId, name: &ConnectionName) -> Result<(), Error>;
}

#[async_trait]
impl Credentials for Control {
    async fn create_secret(
        &self,
        team: TeamId,
        name: SecretName,
        value: &Secret,
        metadata: BTreeMap<String, String>,
    ) -> Result<SecretRow, Error> {
        Self::create_secret(self, team, name, value, metadata).await
    }

    async fn update_secret(
        &self,
        team: TeamId,
        key: &SecretKey,
        value: &Secret,
        metadata: Option<BTreeMap<String, String>>,
    ) -> Result<SecretRow, Error> {
        Self::update_secret(self, team, key, value, metadata).await
    }

    async fn secret(&self, team: TeamId, key: &SecretKey) -> Result<SecretRow, Error> {
        Self::secret(self, team, key).await
    }

    async fn secrets(
        &self,
        team: TeamId,
        after: Option<PageCursor<SecretId>>,
        limit: u32,
    ) -> Result<SecretPage, Error> {
        Self::secrets(self, team, after, limit).await
    }

    async fn delete_secret(&self, team: TeamId, key: &SecretKey) -> Result<(), Error> {
        Self::delete_secret(self, team, key).await
    }

    async fn put_connection(
        &self,
        team: TeamId,
        written: Written,
        credential: Option<&Secret>,
    ) -> Result<(KnownConnection, bool), Error> {
        Self::put_connection(self, team, written, credential).await
    }

    async fn connection(&self, team: TeamId, name: &ConnectionName) -> Result<KnownConnection, Error> {
        Self::connection(self, team, name).await
    }

    async fn connections(&self, team: TeamId) -> Result<Vec<KnownConnection>, Error> {
        Self::connections(self, team).await
    }

    async fn delete_connection(&self, team: TeamId, name: &ConnectionName) -> Result<(), Error> {
        Self::delete_connection(self, team, name).await
    }
}
