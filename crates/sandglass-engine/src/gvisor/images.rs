//! What this engine does with images: it writes them, keeps them in one form or the other, and gives them to who wants them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::RwLockReadGuard;
use std::sync::atomic::Ordering;

use sandglass_linux::process::at_leisure;
use sandglass_types::SandboxId;

use super::image::{self, Image, Memory, Unfinished};
use super::record::Record;
use super::users::UsersOfOne;
use super::{GvisorEngine, disk, teardown};
use crate::engine::{Compression, EngineError, Keep, step};

impl GvisorEngine {
    pub(super) fn found_image(&self, image: &SandboxId) -> Result<Image, EngineError> {
        let path = self.holdings.paths.image(image);
        if path.exists() { Ok(Image::at(path)) } else { Err(EngineError::NotFound(image.clone())) }
    }

    /// An image that is not compressed, and stays so while the guard lives: one that is, is expanded first. The caller has
    /// said that it wants it, so nobody compresses it in between.
    pub(super) fn plain<'a>(
        &self,
        users: &'a UsersOfOne,
        image: &SandboxId,
    ) -> Result<(RwLockReadGuard<'a, ()>, Image), EngineError> {
        loop {
            let stays = users.stays();
            let found = self.found_image(image)?;
            if !found.meta()?.is_compressed() {
                return Ok((stays, found));
            }
            drop(stays);
            let _alone = users.change();
            // Somebody else may have been first.
            if self.found_image(image)?.meta()?.is_compressed() {
                let paths = &self.holdings.paths;
                image::expand(&paths.images(), &paths.image(image))?;
            }
        }
    }

    /// Compresses an image, unless somebody uses it or wants to.
    pub(super) fn compress(&self, image: &SandboxId) -> Result<Compression, EngineError> {
        self.found_image(image)?;
        let users = self.users.of(image);
        let Some(_alone) = users.try_change() else { return Ok(Compression::GivenUp) };
        let asked = users.asked();
        let go_on = || users.asked() == asked && !self.leaving.load(Ordering::SeqCst);
        if users.is_wanted() || !go_on() {
            return Ok(Compression::GivenUp);
        }
        let paths = &self.holdings.paths;
        at_leisure(|| image::compress(&paths.images(), &paths.image(image), &go_on))
            .map_err(|error| step("start a thread to compress", error))?
    }

    /// An image to be, and where it will be.
    pub(super) fn begin_image(&self, image: &SandboxId) -> Result<(Unfinished, PathBuf), EngineError> {
        let target = self.holdings.paths.image(image);
        if target.exists() {
            return Err(EngineError::Exists(image.clone()));
        }
        sandglass_failpoint::hit("engine.image.begin")?;
        let unfinished = Unfinished::begin(&self.holdings.paths.images());
        Ok((unfinished.map_err(|error| step("write the image", error))?, target))
    }

    /// Adds the disk of a paused sandbox to its image, and what both were made from. The caller holds its lock.
    pub(super) fn finish_image(
        &self,
        record: Record,
        unfinished: Unfinished,
        target: &Path,
        memory: Memory,
        keep: Keep,
    ) -> Result<(), EngineError> {
        let failed = |error: io::Error| step("write the image", error);
        let disk = self.holdings.paths.sandbox(&record.id).disk();
        sandglass_failpoint::hit("engine.image.sync")?;
        teardown::find_disk(&self.holdings.leaf(&record.id)?, &disk)
            .and_then(|mount| mount.ok_or_else(|| io::Error::other("it is not mounted"))?.sync())
            .map_err(|error| step("flush the disk", error))?;
        sandglass_failpoint::hit("engine.image.copy")?;
        disk::copy(&disk, &unfinished.image().disk(), None).map_err(failed)?;
        sandglass_failpoint::hit("engine.image.describe")?;
        unfinished.image().describe(record.pinned, record.limits, memory).map_err(failed)?;
        sandglass_failpoint::hit("engine.image.finish")?;
        unfinished.finish(target, keep).map_err(failed)
    }
}
