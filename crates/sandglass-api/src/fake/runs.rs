//! There are no runs in memory: the faces' tests of them are end to end.

use std::time::Duration;

use async_trait::async_trait;
use sandglass_control::{CreateRun, RunDetail};
use sandglass_store::{Artifact, RunEventRow, RunFilter, RunPage, RunRow};
use sandglass_types::run::Turn;
use sandglass_types::{Error, ErrorKind, RunId, TeamId};

use super::Fake;
use crate::backend::RunBackend;

fn none<T>() -> Result<T, Error> {
    Err(Error::new(ErrorKind::NotFound, "run not found"))
}

#[async_trait]
impl RunBackend for Fake {
    async fn create_run(&self, _: TeamId, _: CreateRun) -> Result<(RunRow, bool), Error> {
        none()
    }

    async fn run(&self, _: TeamId, _: &RunId) -> Result<RunDetail, Error> {
        none()
    }

    async fn runs(&self, _: RunFilter) -> Result<RunPage, Error> {
        Ok(RunPage { rows: Vec::new(), next: None })
    }

    async fn run_events(
        &self,
        _: TeamId,
        _: &RunId,
        _: u64,
        _: Duration,
    ) -> Result<(Vec<RunEventRow>, bool), Error> {
        none()
    }

    async fn cancel_run(&self, _: TeamId, _: &RunId) -> Result<RunRow, Error> {
        none()
    }

    async fn next_turn(&self, _: TeamId, _: &RunId, _: Turn) -> Result<RunRow, Error> {
        none()
    }

    async fn artifacts(&self, _: TeamId, _: &RunId) -> Result<Vec<Artifact>, Error> {
        none()
    }

    async fn artifact_piece(&self, _: TeamId, _: &RunId, _: u32, _: u32) -> Result<Option<Vec<u8>>, Error> {
        none()
    }
}
