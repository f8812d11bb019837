//! Removing what no instance needs.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sandglass_linux::lock::{FolderLock, LockError};
use sandglass_linux::mount;
use sandglass_types::InstanceId;

use super::home::{Home, Standing};
use super::{Entry, MAKING, forget, gone, pins, pins_of};

/// How the names of things begin that are being removed. Whoever finds one goes on with that.
const GOING: &str = ".going-";

/// The file in the folder of an instance that was not found, from then on until it is.
const MISSED: &str = "missed";

/// Removes what nobody has a pin on, and that nobody has touched for so long; and what was half made by processes that are
/// dead. It does nothing while somebody makes something or another one sweeps: the next time is soon enough. Returns what
/// was removed.
///
/// # Errors
/// The cache folder can't be read, or something can't be removed.
pub(in super::super) fn sweep(cache: &Path, untouched: Duration) -> io::Result<Vec<Entry>> {
    let alone = match FolderLock::acquire(&pins_of(cache)) {
        Ok(lock) => lock,
        Err(LockError::InUse) => return Ok(Vec::new()),
        Err(LockError::Io(error)) => return Err(error),
        Err(error) => return Err(io::Error::other(error)),
    };
    let pinned = pinned(cache, untouched)?;
    // Left by one that died here: in the way of what goes now.
    remove_going(cache)?;
    let mut removed = Vec::new();
    for entry in entries(cache)? {
        let path = entry.path(cache);
        // Nobody mounts anything in there; if somebody did, a removal would go on into it.
        if pinned.contains(&entry) || !is_old(&path, untouched)? || !mount::below(&path)?.is_empty() {
            continue;
        }
        let Some(folder) = path.parent() else { continue };
        gone(fs_err::rename(&path, folder.join(format!("{GOING}{}", entry.digest()))))?;
        removed.push(entry);
    }
    // Who makes something shares the lock, so these are nobody's.
    let half_made = half_made(cache)?;
    for path in half_made {
        gone(fs_err::remove_dir_all(path))?;
    }
    sandglass_failpoint::hit("engine.cache.swept")?;
    // It takes its time, and nobody finds them any more.
    drop(alone);
    remove_going(cache)?;
    Ok(removed)
}

fn remove_going(cache: &Path) -> io::Result<()> {
    for folder in ["agents", "rootfs"] {
        for path in named(&cache.join(folder), GOING)? {
            gone(fs_err::remove_dir_all(path))?;
        }
    }
    Ok(())
}

/// All that instances need which are there, or may be, or were a short while ago: somebody may be moving a data folder. The
/// pins of others are removed.
fn pinned(cache: &Path, untouched: Duration) -> io::Result<BTreeSet<Entry>> {
    let table = mount::table(None)?;
    let mut pinned = BTreeSet::new();
    for folder in children(&pins_of(cache))? {
        let name = folder.file_name().and_then(|name| name.to_str());
        let Some(instance) = name.and_then(|name| name.parse::<InstanceId>().ok()) else { continue };
        let standing = match Home::read(&folder.join("home")) {
            Ok(home) => home.standing(&instance, &table),
            Err(error) => {
                tracing::warn!(%instance, %error, "whose pins these are can't be read, so they count");
                Standing::Unknown
            }
        };
        let mark = folder.join(MISSED);
        if standing == Standing::Gone && !mark.try_exists()? {
            fs_err::write(&mark, [])?;
        } else if standing != Standing::Gone {
            gone(fs_err::remove_file(&mark))?;
        }
        if standing == Standing::Gone && is_old(&mark, untouched)? {
            tracing::info!(%instance, "an instance is gone, and what it needed of the cache folder is not needed by it");
            forget(cache, &instance)?;
        } else {
            pinned.extend(pins::read(&folder)?);
        }
    }
    Ok(pinned)
}

/// Whether nobody has changed or touched it for so long. A clock that was set back makes nothing old.
fn is_old(path: &Path, untouched: Duration) -> io::Result<bool> {
    let meta = fs_err::symlink_metadata(path)?;
    let seconds = u64::try_from(meta.ctime()).unwrap_or(0);
    let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    Ok(SystemTime::now().duration_since(changed).is_ok_and(|age| age >= untouched))
}

/// All that is named by its content.
fn entries(cache: &Path) -> io::Result<Vec<Entry>> {
    let mut found = Vec::new();
    for (folder, entry) in [("agents", Entry::Agent as fn(_) -> _), ("rootfs", Entry::Rootfs as fn(_) -> _)] {
        for path in children(&cache.join(folder))? {
            let name = path.file_name().and_then(|name| name.to_str());
            found.extend(name.and_then(|name| name.parse().ok()).map(entry));
        }
    }
    Ok(found)
}

/// What is being made, or was when its process died.
fn half_made(cache: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = named(&cache.join("disks"), MAKING)?;
    found.extend(named(&pins_of(cache), MAKING)?);
    for agent in children(&cache.join("agents"))? {
        found.extend(named(&agent, MAKING)?);
    }
    Ok(found)
}

fn named(folder: &Path, prefix: &str) -> io::Result<Vec<PathBuf>> {
    let is = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(prefix))
    };
    Ok(children(folder)?.into_iter().filter(is).collect())
}

/// The folders in a folder; none if there is none.
fn children(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs_err::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}
