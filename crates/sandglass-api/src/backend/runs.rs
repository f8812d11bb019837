//! What the faces need of runs.

use std::time::Duration;

use async_trait::async_trait;
use sandglass_control::{Control, CreateRun, RunDetail};
use sandglass_store::{Artifact, RunEventRow, RunFilter, RunPage, RunRow};
use sandglass_types::run::Turn;
use sandglass_types::{Error, RunId, TeamId};

/// The verbs of [`Control`] for runs.
#[async_trait]
pub(crate) trait RunBackend: Send + Sync + 'static {
    async fn create_run(&self, team: TeamId, request: CreateRun) -> Result<(RunRow, bool), Error>;
    async fn run(&self, team: TeamId, id: &RunId) -> Result<RunDetail, Error>;
    async fn runs(&self, filter: RunFilter) -> Result<RunPage, Error>;
    async fn run_events(
        &self,
        team: TeamId,
        id: &RunId,
        after: u64,
        wait: Duration,
    ) -> Result<(Vec<RunEventRow>, bool), Error>;
    async fn cancel_run(&self, team: TeamId, id: &RunId) -> Result<RunRow, Error>;
    async fn next_turn(&self, team: TeamId, id: &RunId, turn: Turn) -> Result<RunRow, Error>;
    async fn artifacts(&self, team: TeamId, id: &RunId) -> Result<Vec<Artifact>, Error>;
    async fn artifact_piece(
        &self,
        team: TeamId,
        id: &RunId,
        number: u32,
        piece: u32,
    ) -> Result<Option<Vec<u8>>, Error>;
}

#[async_trait]
impl RunBackend for Control {
    async fn create_run(&self, team: TeamId, request: CreateRun) -> Result<(RunRow, bool), Error> {
        Self::create_run(self, team, request).await
    }

    async fn run(&self, team: TeamId, id: &RunId) -> Result<RunDetail, Error> {
        Self::run(self, team, id).await
    }

    async fn runs(&self, filter: RunFilter) -> Result<RunPage, Error> {
        Self::runs(self, filter).await
    }

    async fn run_events(
        &self,
        team: TeamId,
        id: &RunId,
        after: u64,
        wait: Duration,
    ) -> Result<(Vec<RunEventRow>, bool), Error> {
        Self::run_events(self, team, id, after, wait).await
    }

    async fn cancel_run(&self, team: TeamId, id: &RunId) -> Result<RunRow, Error> {
        Self::cancel_run(self, team, id).await
    }

    async fn next_turn(&self, team: TeamId, id: &RunId, turn: Turn) -> Result<RunRow, Error> {
        Self::next_turn(self, team, id, turn).await
    }

    async fn artifacts(&self, team: TeamId, id: &RunId) -> Result<Vec<Artifact>, Error> {
        Self::artifacts(self, team, id).await
    }

    async fn artifact_piece(
        &self,
        team: TeamId,
        id: &RunId,
        number: u32,
        piece: u32,
    ) -> Result<Option<Vec<u8>>, Error> {
        Self::artifact_piece(self, team, id, number, piece).await
    }
}
