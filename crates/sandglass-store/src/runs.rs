//! Runs, as verbs of the store.

use async_trait::async_trait;
use sandglass_types::{NodeId, RunId, SandboxId, Timestamp};

use crate::StoreError;
use crate::model::{
    Artifact, NewRun, NewRunEvent, RunAdmitted, RunChange, RunEventRow, RunFilter, RunPage, RunRow,
};

/// The part of the store that keeps runs.
#[async_trait]
pub trait RunStore {
    /// Inserts a run as queued, opens its budget, and remembers the idempotency key: in one transaction with the check of that key
    /// and of how many runs the team has.
    async fn insert_run(&self, new: &NewRun) -> Result<RunAdmitted, StoreError>;

    /// Makes a change if the run is in the status that it is for, together with its events, whose numbers follow the last
    /// one. `false` if it is in another one, or its sandbox can't become what is said.
    async fn change_run(&self, id: &RunId, change: &RunChange) -> Result<bool, StoreError>;

    /// Adds events to a run that has not ended. `false` if it has, or there is none.
    async fn note_run(&self, id: &RunId, events: &[NewRunEvent]) -> Result<bool, StoreError>;

    /// Remembers that somebody wants a run to end that has not ended, with this event the first time. `false` if that was known,
    /// or it has ended, or there is none.
    async fn cancel_run(&self, id: &RunId, event: &NewRunEvent) -> Result<bool, StoreError>;

    /// One run.
    async fn run(&self, id: &RunId) -> Result<Option<RunRow>, StoreError>;

    /// The run that this is the sandbox of.
    async fn run_of_sandbox(&self, id: &SandboxId) -> Result<Option<RunRow>, StoreError>;

    /// A page of a team's runs.
    async fn runs(&self, filter: &RunFilter) -> Result<RunPage, StoreError>;

    /// All runs of a node that have not ended, oldest first.
    async fn runs_under_way(&self, node: NodeId) -> Result<Vec<RunRow>, StoreError>;

    /// Events of a run with numbers above `after`: the first `limit` of them.
    async fn run_events(&self, id: &RunId, after: u64, limit: u32) -> Result<Vec<RunEventRow>, StoreError>;

    /// Keeps something that a run left, with its content in pieces of [`crate::model::PIECE`] bytes, of which the last may be
    /// shorter; or without any.
    async fn keep_artifact(&self, id: &RunId, artifact: &Artifact, content: &[u8]) -> Result<(), StoreError>;

    /// Removes all that is kept of what a run left.
    async fn drop_artifacts(&self, id: &RunId) -> Result<(), StoreError>;

    /// What a run left, in the order of the numbers.
    async fn artifacts(&self, id: &RunId) -> Result<Vec<Artifact>, StoreError>;

    /// A piece of the content of an artifact, from 0 on; `None` after the last.
    async fn artifact_piece(
        &self,
        id: &RunId,
        number: u32,
        piece: u32,
    ) -> Result<Option<Vec<u8>>, StoreError>;

    /// Removes runs that have ended and whose time has come, with all that they left but their money. Returns how many.
    async fn forget_runs(&self, now: Timestamp) -> Result<u64, StoreError>;
}
