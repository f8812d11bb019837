//! The folder of one server's state, and who owns what in it.
//!
//! ```text
//! DIR/instance     the id of this folder; every kernel object that its server makes carries it
//! DIR/serve/       the store: belongs to the half without privilege, which sees nothing else of the file system
//! DIR/host/        sandboxes: belongs to root
//! ```

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::fs::{CWD, Gid, Mode, OFlags, Uid, fchmod, fchown, fstat, mkdirat};
use rustix::io::Errno;
use sandglass_linux::lock::{FolderLock, LockError};
use sandglass_linux::privilege::{self, Enforcement, Identity, WithoutLandlock};
use sandglass_types::InstanceId;

use crate::startup::{Folder, Reason, StartupError};

/// The file with the id of the instance, and its name before it is whole.
const INSTANCE: &str = "instance";
const UNNAMED: &str = ".instance.new";

/// The file of the store, as the half without privilege sees it.
pub(crate) const STORE: &str = "/store.db";

/// How long a server that starts waits for the halves of one that was just killed.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// The range of the ids that servers run under: first and count. Nothing else uses them: see "UIDs and GIDs on systemd
/// systems", which has 1,879,048,192 to 2,147,352,575 as unused.
const UIDS: (u32, u32) = (1_879_048_192, 268_304_384);

/// With less free than this a file system counts as full, in bytes: the store needs some room even to be opened.
const FULL: u64 = 1 << 20;

/// A data folder.
#[derive(Debug)]
pub(crate) struct DataDir {
    path: PathBuf,
    instance: InstanceId,
}

impl DataDir {
    /// Opens a folder that a server made before.
    pub(crate) fn open(path: &Path) -> Result<Self, StartupError> {
        let path = fs::canonicalize(path).map_err(|error| unusable(path, &error))?;
        let foreign =
            |what: &str| StartupError::new(Reason::ForeignFolder, format!("{} {what}", path.display()));
        let text = match fs::read_to_string(path.join(INSTANCE)) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(foreign("is no data folder of Sandglass"));
            }
            Err(error) => return Err(unusable(&path, &error)),
        };
        let instance = text.trim_end().parse().map_err(|_| foreign("has a malformed instance file"))?;
        Ok(Self { path, instance })
    }

    /// Opens a folder, making it if it is missing or empty, and locks it.
    pub(crate) fn open_or_create(path: &Path) -> Result<(Self, FolderLock), StartupError> {
        fs::create_dir_all(path).map_err(|error| unusable(path, &error))?;
        let path = fs::canonicalize(path).map_err(|error| unusable(path, &error))?;
        let lock = lock(&path)?;
        if !path.join(INSTANCE).try_exists().map_err(|error| unusable(&path, &error))? {
            if holds_anything(&path).map_err(|error| unusable(&path, &error))? {
                let what = format!("{} is neither empty nor a data folder of Sandglass", path.display());
                return Err(StartupError::new(Reason::ForeignFolder, what));
            }
            name(&path).map_err(|error| unusable(&path, &error))?;
        }
        let folder = Self::open(&path)?;
        let system = rustix::fs::statvfs(&folder.path).map_err(|error| unusable(&path, &error.into()))?;
        if system.f_bavail.saturating_mul(system.f_frsize) < FULL {
            let path = folder.path.display();
            tracing::warn!(%path, "the file system is full, and the store may not open: make room and start again");
        }
        folder.lay_out()?;
        Ok((folder, lock))
    }

    /// Makes the folders of both halves. Never through a link: whatever one led to would belong to the half without
    /// privilege.
    fn lay_out(&self) -> Result<(), StartupError> {
        let failed = |error: Errno| unusable(&self.path, &error.into());
        let Identity { uid, gid } = self.identity();
        let data = open_folder(CWD, &self.path).map_err(failed)?;
        let about = fstat(&data).map_err(failed)?;
        if about.st_uid != 0 || about.st_mode & 0o022 != 0 {
            let what =
                format!("{} must belong to root, and nobody else may write in it", self.path.display());
            return Err(StartupError::new(Reason::UnusableFolder, what));
        }
        for (name, owner) in [("serve", Some((uid, gid))), ("host", None)] {
            match mkdirat(&data, name, Mode::RWXU) {
                Err(error) if error != Errno::EXIST => return Err(failed(error)),
                _ => {}
            }
            let folder = open_folder(&data, Path::new(name)).map_err(|_| {
                let what = format!("{} is no folder", self.path.join(name).display());
                StartupError::new(Reason::ForeignFolder, what)
            })?;
            fchmod(&folder, Mode::RWXU).map_err(failed)?;
            if let Some((uid, gid)) = owner {
                fchown(&folder, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Its absolute path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of the privileged half.
    pub(crate) fn host(&self) -> PathBuf {
        self.path.join("host")
    }

    /// Its id.
    pub(crate) const fn instance(&self) -> &InstanceId {
        &self.instance
    }

    /// Whom the half without privilege runs as: an own user and group for each data folder, so that not even two servers
    /// of one machine can touch each other.
    pub(crate) fn identity(&self) -> Identity {
        // FNV-1a; any hash does.
        let hash = self
            .instance
            .as_str()
            .bytes()
            .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        let id = UIDS.0 + hash % UIDS.1;
        Identity { uid: id, gid: id }
    }

    /// Gives up all privilege: from here on this process has an own user, no capability, and sees `serve/` as the whole
    /// file system. Call it before the second thread starts.
    pub(crate) fn confine(&self) -> Result<Enforcement, StartupError> {
        let folder = self.path.join("serve");
        Ok(privilege::enter_cell(&folder, self.identity(), WithoutLandlock::Refuse)?)
    }
}

fn open_folder(at: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, path, flags, Mode::empty())
}

fn unusable(path: &Path, error: &io::Error) -> StartupError {
    StartupError::folder(Folder::Data, path, error)
}

/// Whether a folder holds anything but what a start that was cut off leaves.
fn holds_anything(path: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(path)? {
        if entry?.file_name() != UNNAMED {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes a folder one of an instance.
fn name(path: &Path) -> io::Result<()> {
    let temporary = path.join(UNNAMED);
    let named = fs::write(&temporary, format!("{}\n", InstanceId::random()))
        .and_then(|()| fs::rename(&temporary, path.join(INSTANCE)));
    if named.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    named
}

fn lock(path: &Path) -> Result<FolderLock, StartupError> {
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match FolderLock::acquire(path) {
            Ok(lock) => return Ok(lock),
            Err(LockError::InUse) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(LockError::InUse) => {
                let what = format!("another server uses {}", path.display());
                return Err(StartupError::new(Reason::FolderInUse, what));
            }
            Err(LockError::Io(error)) => return Err(unusable(path, &error)),
            Err(error) => return Err(unusable(path, &io::Error::other(error))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_of_a_folder_is_given_away() {
        use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (data, precious) = (folder.path().join("data"), folder.path().join("precious"));
        for path in [&data, &precious] {
            std::fs::create_dir(path).unwrap();
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        std::fs::write(data.join("instance"), "abcdefgh\n").unwrap();
        symlink(&precious, data.join("serve")).unwrap();
        let error = DataDir::open_or_create(&data).unwrap_err();
        assert!(error.to_string().contains("serve is no folder"), "{error:#}");
        let meta = std::fs::metadata(&precious).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o777), (0, 0o755));
        // Who may write in the folder could put a link there at any time.
        std::fs::remove_file(data.join("serve")).unwrap();
        std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = DataDir::open_or_create(&data).unwrap_err();
        assert!(error.to_string().contains("must belong to root"), "{error:#}");
        std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o755)).unwrap();
        DataDir::open_or_create(&data).unwrap();
        assert_ne!(std::fs::metadata(data.join("serve")).unwrap().uid(), 0);
    }

    #[test]
    fn a_folder_keeps_its_instance_and_its_lock() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("data");
        let (first, held) = DataDir::open_or_create(&path).unwrap();
        assert!(matches!(FolderLock::acquire(&path), Err(LockError::InUse)));
        drop(held);
        let (second, _held) = DataDir::open_or_create(&path).unwrap();
        assert_eq!(first.instance(), second.instance());
        assert!(first.identity().uid >= UIDS.0);
    }

    #[test]
    fn a_folder_of_others_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("thesis.txt"), "years of work").unwrap();
        let error = DataDir::open_or_create(folder.path()).unwrap_err();
        assert_eq!(error.reason(), Reason::ForeignFolder);
        assert!(error.to_string().contains("neither empty nor a data folder"), "{error}");
    }

    #[test]
    fn a_start_that_was_cut_off_leaves_no_foreign_folder() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(UNNAMED), "").unwrap();
        let (data, _lock) = DataDir::open_or_create(folder.path()).unwrap();
        assert_eq!(DataDir::open(folder.path()).unwrap().instance(), data.instance());
    }
}
