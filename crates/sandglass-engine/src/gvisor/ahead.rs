//! Sandboxes that stand still: those that are made ahead for an image, until it is brought back in them, and those that
//! nobody uses yet.

use std::path::Path;

use sandglass_linux::process;
use sandglass_types::SandboxId;

use super::GvisorEngine;
use super::record::{Record, Restore};
use super::runsc;
use crate::engine::{EngineError, Presence, step};
use crate::files::mark_used;
use crate::record::Status;

impl GvisorEngine {
    /// Whether its sandbox process is stopped.
    pub(super) fn is_frozen(&self, record: &Record) -> bool {
        let process = record.process(&self.holdings.boot_id);
        process.is_some_and(|process| process::is_stopped(process.pid).unwrap_or(false))
    }

    /// Stops the sandbox process, which takes no CPU time then, or lets it go on.
    pub(super) fn signal(&self, record: &Record, signal: process::Signal) -> Result<(), EngineError> {
        let process =
            self.holdings.process(record)?.ok_or_else(|| EngineError::NotFound(record.id.clone()))?;
        process.signal(signal).map_err(|error| step("stop the sandbox process, or let it go on", error))
    }

    /// Stops one that nobody uses yet, with all that runs in it: programs that only compute do not need the sandbox process.
    pub(super) fn hold_still(&self, id: &SandboxId) -> Result<(), EngineError> {
        let record = self.holdings.record(id)?;
        if record.progress.is_some() {
            self.control(id).pause()?;
        }
        self.signal(&record, process::Signal::STOP)
    }

    /// Lets one go on that nobody has used so far: it is somebody's from now on. One that is somebody's already goes on as
    /// it does. The caller holds its lock.
    pub(super) fn wake(&self, id: &SandboxId) -> Result<(), EngineError> {
        sandglass_failpoint::hit("engine.pool.used")?;
        let folder = self.holdings.paths.sandbox(id);
        if !mark_used(folder.dir()).map_err(|error| step("say that it is used", error))? {
            return Ok(());
        }
        self.turns.made(id, &self.holdings.leaf(id)?);
        let record = self.holdings.record(id)?;
        sandglass_failpoint::hit("engine.pool.signal")?;
        self.signal(&record, process::Signal::CONT)?;
        if record.progress.is_some() { self.control(id).resume() } else { Ok(()) }
    }

    /// Takes the sandbox that was prepared for this image, if there is one. One that has ended meanwhile is as good as none. The
    /// caller holds its lock.
    pub(super) fn take_prepared(
        &self,
        id: &SandboxId,
        image: &SandboxId,
    ) -> Result<Option<Record>, EngineError> {
        match self.holdings.record(id) {
            Ok(record) if record.restore.as_ref() == Some(&Restore::Waits(image.clone())) => {
                if self.presence(id)? == Presence::Created {
                    return Ok(Some(record));
                }
                self.remove(id)?;
            }
            _ => self.expect_nothing(id)?,
        }
        Ok(None)
    }

    /// Brings an image back in a sandbox that was made for it. The caller holds its lock.
    pub(super) fn bring_back(&self, mut record: Record, checkpoint: &Path) -> Result<(), EngineError> {
        sandglass_failpoint::hit("engine.restore.begin")?;
        // It may have been made long ago; somebody waits for it only now.
        self.turns.made(&record.id, &self.holdings.leaf(&record.id)?);
        if let Some(Restore::Waits(_)) = record.restore {
            // Never twice: who finds it half way does not know how far that was.
            record.restore = Some(Restore::Begun);
            self.save(&record)?;
            self.signal(&record, process::Signal::CONT)?;
        }
        let link = self.guest_link(&record.id)?;
        self.control(&record.id).restore(link.as_ref(), checkpoint).inspect_err(|_| {
            runsc::report_panic(&record.id, &self.holdings.paths.sandbox(&record.id).panics());
        })?;
        sandglass_failpoint::hit("engine.restore.save")?;
        record.restore = None;
        self.advance(&mut record, Status::Running)
    }
}
