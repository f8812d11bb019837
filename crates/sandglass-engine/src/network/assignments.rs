//! Which sandbox has which slot.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err as fs;
use sandglass_linux::namespace::PinFolder;
use sandglass_types::{InstanceId, SandboxId};

use super::{Filter, NetworkError, Pool, Slot, SlotName, step};
use crate::engine::AirlockSocket;
use crate::gvisor::{AirlockError, Airlocks, Release};

/// Which sandbox has which slot: one file a sandbox, with the slot's name in it.
///
/// The file is written before the slot is used and removed after it is gone. So a slot without a file was never used,
/// and [`Assignments::open`] removes it; a file without a slot is left by a machine that was switched off.
#[derive(Debug)]
pub struct Assigned {
    folder: PathBuf,
    pins: Arc<PinFolder>,
}

impl Assigned {
    /// Finds the assignments of an instance and changes nothing. `data` is the host's folder; `data/slots` and `data/ns`
    /// belong to this.
    ///
    /// # Errors
    /// The step that failed.
    pub fn open(data: &Path) -> Result<Self, NetworkError> {
        let (folder, pins) = (data.join("slots"), data.join("ns"));
        for needed in [&folder, &pins] {
            fs::create_dir_all(needed).map_err(step("make a folder of the network"))?;
        }
        let pins = PinFolder::open(&pins).map_err(step("open the folder of pinned namespaces"))?;
        Ok(Self { folder, pins: Arc::new(pins) })
    }

    fn file(&self, id: &SandboxId) -> PathBuf {
        self.folder.join(id.as_str())
    }

    fn slot(&self, id: &SandboxId) -> Result<Option<Slot>, NetworkError> {
        Ok(read(&self.file(id))?.map(|name| Slot::named(&self.pins, name)))
    }

    /// Takes away the mount under the pins, if nobody needs it.
    fn close(&self) {
        match self.pins.close() {
            // Busy: a sandbox needs it. Invalid: it is unmounted already.
            Err(error) if !matches!(error.kind(), ErrorKind::ResourceBusy | ErrorKind::InvalidInput) => {
                tracing::warn!(%error, "the folder of pinned namespaces could not be unmounted");
            }
            _ => {}
        }
    }
}

impl Drop for Assigned {
    fn drop(&mut self) {
        self.close();
    }
}

impl Release for Assigned {
    fn release(&self, id: &SandboxId) -> Result<(), AirlockError> {
        if let Some(slot) = self.slot(id)? {
            slot.destroy()?;
        }
        sandglass_failpoint::hit("network.release.forget")?;
        match fs::remove_file(self.file(id)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// Gives each sandbox a slot of its own, and remembers which.
#[derive(Debug)]
pub struct Assignments {
    /// Ends before the mount under the pins can.
    pool: Pool,
    assigned: Assigned,
    logs: bool,
}

impl Assignments {
    /// Takes up the assignments of an instance, removes slots that nobody has, and starts a pool that keeps `spare` ready.
    ///
    /// `data` is as for [`Assigned::open`]. Slots from now on have `filter`.
    ///
    /// # Errors
    /// The step that failed.
    pub fn open(
        data: &Path,
        instance: &InstanceId,
        filter: Filter,
        spare: usize,
    ) -> Result<Self, NetworkError> {
        let assigned = Assigned::open(data)?;
        sweep(&assigned.folder)?;
        let mut owned = BTreeSet::new();
        for id in ids(&assigned.folder)? {
            owned.extend(read(&assigned.file(&id))?);
        }
        let logs = filter.log;
        let pool = Pool::start(Arc::clone(&assigned.pins), instance.clone(), filter, spare, &owned)?;
        Ok(Self { pool, assigned, logs })
    }

    /// Ends the pool and removes its unused slots, and the mount under the pins if no sandbox needs it. Sandboxes keep
    /// their slots. Nothing can be assigned afterwards.
    pub fn close(&self) {
        self.pool.shutdown();
        self.assigned.close();
    }

    fn take(&self, id: &SandboxId) -> Result<Slot, NetworkError> {
        let slot = self.pool.take()?;
        let aside = self.assigned.folder.join(format!("{UNFINISHED}{id}"));
        let remember = || {
            sandglass_failpoint::hit("network.assign.remember")?;
            fs::write(&aside, slot.name().to_string())?;
            sandglass_failpoint::hit("network.assign.rename")?;
            fs::rename(&aside, self.assigned.file(id))
        };
        if let Err(error) = remember() {
            let _absent = fs::remove_file(&aside);
            slot.destroy()?;
            return Err(step("remember the slot of a sandbox")(error));
        }
        Ok(slot)
    }
}

impl Release for Assignments {
    fn release(&self, id: &SandboxId) -> Result<(), AirlockError> {
        self.assigned.release(id)
    }
}

impl Airlocks for Assignments {
    fn assign(&self, id: &SandboxId) -> Result<PathBuf, AirlockError> {
        if let Some(slot) = self.assigned.slot(id)? {
            if Slot::reopen(&self.assigned.pins, slot.name()).is_ok() {
                return Ok(slot.inner_path()?);
            }
            self.release(id)?;
        }
        Ok(self.take(id)?.inner_path()?)
    }

    fn sockets(&self, id: &SandboxId, sockets: &[AirlockSocket]) -> Result<Vec<OwnedFd>, AirlockError> {
        let slot = self.assigned.slot(id)?.ok_or_else(|| io::Error::from(ErrorKind::NotFound))?;
        Ok(slot.airlock_sockets(sockets)?)
    }

    fn logs(&self) -> bool {
        self.logs
    }

    fn guest_link(&self, id: &SandboxId) -> Result<OwnedFd, AirlockError> {
        let slot = self.assigned.slot(id)?.ok_or_else(|| io::Error::from(ErrorKind::NotFound))?;
        Ok(slot.guest_link()?)
    }

    fn assigned(&self) -> Result<Vec<SandboxId>, AirlockError> {
        Ok(ids(&self.assigned.folder)?)
    }
}

/// How the names of unfinished files begin; those of sandboxes never do.
const UNFINISHED: &str = ".";

/// Removes what a host left that died while it wrote a file.
fn sweep(folder: &Path) -> Result<(), NetworkError> {
    let failed = step::<io::Error>("remove unfinished files of the network");
    let sweep = || {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    };
    sweep().map_err(failed)
}

/// The sandboxes that have a file.
fn ids(folder: &Path) -> Result<Vec<SandboxId>, NetworkError> {
    let failed = step::<io::Error>("list the slots in use");
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let names = entries.map_err(failed)?.into_iter().map(|entry| entry.file_name());
    Ok(names.filter_map(|name| name.to_str()?.parse().ok()).collect())
}

/// The slot that a file names. `None` without a file, and for one that names none: nothing was ever made under it.
fn read(file: &Path) -> Result<Option<SlotName>, NetworkError> {
    match fs::read_to_string(file) {
        Ok(text) => Ok(text.parse().ok()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(step("read which slot a sandbox has")(error)),
    }
}

#[cfg(test)]
mod tests {
    use sandglass_egress::policy::Openings;

    use super::super::DEFAULT_SIZE;
    use super::*;

    /// Needs root, as all that makes namespaces does.
    #[test]
    fn a_slot_is_found_again_and_what_nobody_has_is_removed() {
        let data = tempfile::tempdir().unwrap();
        let instance = InstanceId::random();
        let [kept, released, late] = [(); 3].map(|()| SandboxId::random());
        let filter = Filter::new(&Openings::default());
        let open = || Assignments::open(data.path(), &instance, filter.clone(), DEFAULT_SIZE).unwrap();

        let first = open();
        let path = first.assign(&kept).unwrap();
        first.assign(&released).unwrap();
        first.release(&released).unwrap();
        first.release(&released).unwrap();
        assert_eq!(first.assigned().unwrap(), std::slice::from_ref(&kept));
        first.sockets(&kept, &[AirlockSocket::DnsUdp]).unwrap();
        assert!(first.sockets(&released, &[AirlockSocket::DnsUdp]).is_err());
        first.assign(&late).unwrap();
        drop(first);

        // A server that was killed between taking a slot and remembering it.
        let folder = data.path().join("ns");
        let pins = Arc::new(PinFolder::open(&folder).unwrap());
        let forgotten = Slot::create(&pins, &instance, &filter).unwrap();
        // And one that was killed while it remembered.
        let unfinished = data.path().join("slots").join(format!(".{released}"));
        fs::write(&unfinished, "").unwrap();
        // Who only releases leaves both as they are, and is kept from nothing by them.
        Assigned::open(data.path()).unwrap().release(&late).unwrap();
        assert!(Slot::reopen(&pins, forgotten.name()).is_ok() && unfinished.exists());
        let second = open();
        assert!(Slot::reopen(&pins, forgotten.name()).is_err());
        assert!(!unfinished.exists());
        assert_eq!(second.assign(&kept).unwrap(), path);
        let mounted = || {
            let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
            table.contains(folder.canonicalize().unwrap().to_str().unwrap())
        };
        assert!(mounted(), "a sandbox needs it");
        second.release(&kept).unwrap();
        drop(second);
        assert_eq!(Slot::list(&pins, &instance).unwrap(), []);
        assert!(!mounted());
    }
}
