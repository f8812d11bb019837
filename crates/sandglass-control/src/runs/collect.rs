//! What a run made is taken out of its sandbox before anything of that goes: by the sandbox's owner, so that it happens however the
//! sandbox comes to its end, once, and whoever wants that end.

use std::sync::Arc;
use std::time::Duration;

use sandglass_engine::collect::{Bounds, Globs, LeftOut};
use sandglass_store::{Artifact, RunChange, RunRow, SandboxRow, Source};
use sandglass_types::error::Chain;
use sandglass_types::run::{PROJECT, Pattern, Retention};
use sandglass_types::{Error, ErrorKind, RunId};
use serde_json::json;
use tokio::time::{sleep, timeout};

use super::{RUN_LABEL, event, kept};
use crate::control::{CollectFiles, Found, FoundFile, collect_at_end, stored};
use crate::shared::Shared;

/// What of a run is kept at most. One file is held in memory at a time.
const BOUNDS: Bounds = Bounds { files: 2000, bytes: 64 << 20, file_bytes: 32 << 20, seconds: 60 };

/// How long a collection may take, and how often it is tried. After that its sandbox goes without.
const PATIENCE: Duration = Duration::from_secs(120);
const TRIES: u32 = 3;

/// The wait between two tries.
const PAUSE: Duration = Duration::from_millis(500);

/// How many files have an event each.
const TOLD: u32 = 200;

/// What came of a collection.
#[derive(Debug, Default)]
struct Outcome {
    files: u32,
    bytes: u64,
    /// Files that changed while they were read.
    changed: u64,
    left_out: LeftOut,
}

/// Collects what a run made, if this is the sandbox of one that has not been collected. Returns when that is done, or given up.
pub(crate) async fn before_it_goes(shared: &Arc<Shared>, sandbox: &SandboxRow) {
    let Some(label) = sandbox.metadata.get(RUN_LABEL) else { return };
    let Ok(id) = label.parse::<RunId>() else { return };
    for tries in 1..=TRIES {
        let failed = match timeout(PATIENCE, once(shared, &id, sandbox)).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(elapsed) => Error::internal("it took too long", elapsed),
        };
        tracing::error!(run = %id, tries, error = %Chain(&failed), "what a run made could not be collected");
        sleep(PAUSE).await;
    }
    if let Err(error) = give_up(shared, &id).await {
        tracing::error!(run = %id, error = %Chain(&error), "that could not be noted");
    }
}

/// The patterns of a run as they are matched.
pub(crate) fn globs(outputs: &[Pattern]) -> Result<Globs, Error> {
    let patterns: Vec<String> = outputs.iter().map(ToString::to_string).collect();
    Globs::try_from(patterns).map_err(|error| Error::new(ErrorKind::Invalid, format!("outputs: {error}")))
}

/// The run, if this is its sandbox and nothing was collected of it.
async fn wanted(shared: &Shared, id: &RunId, sandbox: &SandboxRow) -> Result<Option<RunRow>, Error> {
    let row = shared.store.run(id).await.map_err(stored)?;
    Ok(row.filter(|row| {
        let its_own = row.sandbox_id.as_ref().is_none_or(|id| *id == sandbox.id) && row.team == sandbox.team;
        its_own && row.collected_at.is_none() && !row.status.is_terminal()
    }))
}

async fn once(shared: &Arc<Shared>, id: &RunId, sandbox: &SandboxRow) -> Result<(), Error> {
    let Some(row) = wanted(shared, id, sandbox).await? else { return Ok(()) };
    // Of a try that failed, or of a server that died.
    shared.store.drop_artifacts(id).await.map_err(stored)?;
    let place = PROJECT.parse().map_err(|error| Error::internal("the folder of runs is no place", error))?;
    let files = CollectFiles { place, globs: globs(&row.spec.outputs)?, bounds: BOUNDS };
    let outcome = match collect_at_end(shared, &sandbox.id, &files).await {
        Ok(mut collection) => {
            let mut outcome = Outcome::default();
            let mut file: Option<(FoundFile, Vec<u8>)> = None;
            loop {
                match collection.next().await? {
                    Found::File(found) => file = Some((found, Vec::new())),
                    Found::Piece(bytes) => {
                        if let Some((_, content)) = &mut file {
                            content.extend_from_slice(&bytes);
                        }
                    }
                    Found::End { sha256, whole } => {
                        if let Some((found, content)) = file.take() {
                            outcome.files += 1;
                            outcome.bytes += u64::try_from(content.len()).unwrap_or(u64::MAX);
                            outcome.changed += u64::from(!whole);
                            keep(shared, &row, &outcome, found, &content, sha256).await?;
                        }
                    }
                    Found::Done(left_out) => break Outcome { left_out, ..outcome },
                }
            }
        }
        // It had no folder yet, or made something else of it, or nothing of it is there any more.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => Outcome::default(),
        Err(error) => return Err(error),
    };
    sandglass_failpoint::hit_async("control.run.collect").await.map_err(crate::injected)?;
    let LeftOut { symlinks, special, too_large, too_many, too_deep, names, changed, mounts, cut_short } =
        outcome.left_out;
    let data = json!({
        "files": outcome.files, "bytes": outcome.bytes, "changed": outcome.changed + changed, "symlinks": symlinks,
        "special": special, "too_large": too_large, "too_many": too_many, "too_deep": too_deep, "names": names, "mounts": mounts,
        "cut_short": cut_short,
    });
    settle(shared, id, "artifacts.collected", data).await
}

/// Keeps one file, as far as it may be.
async fn keep(
    shared: &Shared,
    row: &RunRow,
    outcome: &Outcome,
    found: FoundFile,
    content: &[u8],
    sha256: sandglass_types::Digest,
) -> Result<(), Error> {
    let retention = row.spec.retention;
    let full = retention == Retention::Full;
    let size = u64::try_from(content.len()).unwrap_or(u64::MAX);
    let artifact = Artifact {
        number: outcome.files,
        path: full.then(|| found.path.clone()),
        mode: found.mode,
        size,
        sha256: (retention != Retention::None).then_some(sha256),
    };
    shared.store.keep_artifact(&row.id, &artifact, if full { content } else { &[] }).await.map_err(stored)?;
    if outcome.files > TOLD {
        return Ok(());
    }
    let data = json!({ "path": found.path, "bytes": size, "sha256": sha256 });
    let told = kept(retention, event(shared.clock.now(), Source::Host, "artifact.collected", data));
    shared.store.note_run(&row.id, &[told]).await.map_err(stored)?;
    Ok(())
}

async fn give_up(shared: &Shared, id: &RunId) -> Result<(), Error> {
    settle(shared, id, "artifacts.lost", json!({})).await
}

/// Stores that it is done, in whatever status the run is at that moment.
async fn settle(shared: &Shared, id: &RunId, kind: &str, data: serde_json::Value) -> Result<(), Error> {
    loop {
        let Some(row) = shared.store.run(id).await.map_err(stored)? else { return Ok(()) };
        if row.collected_at.is_some() || row.status.is_terminal() {
            return Ok(());
        }
        let now = shared.clock.now();
        let change = RunChange {
            collected: true,
            events: vec![kept(row.spec.retention, event(now, Source::Host, kind, data.clone()))],
            ..RunChange::within(row.status, now)
        };
        if shared.store.change_run(id, &change).await.map_err(stored)? {
            shared.runs.tell(id);
            return Ok(());
        }
    }
}
