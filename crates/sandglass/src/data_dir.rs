//! The folder of one server's state, and who owns what in it.
//!
//! ```text
//! DIR/instance     the id of this folder; every kernel object that its server makes carries it
//! DIR/models.key   what signs the tokens that sandboxes have in place of a provider's key
//! DIR/serve/       the store: belongs to the half without privilege, which sees nothing else of the file system
//! DIR/host/        sandboxes: belongs to root
//! ```
//!
//! Without root there is nobody else to give anything to, so all of it belongs to the user who starts the server. The
//! second line of `instance` names the engine, unless that is gVisor: sandboxes of one are not taken for another's.

use std::fs::DirBuilder;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;
use rand::TryRng as _;
use rand::rngs::SysRng;
use rustix::fs::{CWD, Gid, Mode, OFlags, Uid, fchmod, fchown, fstat, mkdirat};
use rustix::io::Errno;
use rustix::process::geteuid;
use sandglass_linux::lock::{self, FolderLock, LockError};
use sandglass_linux::privilege::{self, Enforcement, Identity, WithoutLandlock};
use sandglass_types::InstanceId;

use crate::cli::Engine;
use crate::startup::{Folder, Reason, StartupError};

/// The file with the id of the instance, and its name before it is whole.
const INSTANCE: &str = "instance";
const MODELS_KEY: &str = "models.key";
const UNNAMED: &str = ".instance.new";

/// The engine in that file.
const FAKE: &str = "fake";

/// How long a server that starts waits for the halves of one that was just killed, and for a watchdog that ends sandboxes:
/// longer than the privileged half gives verbs that are under way, and than the watchdog has the lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(25);

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
    engine: Engine,
}

/// Where the half without privilege is.
#[derive(Debug)]
pub(crate) struct Cell {
    /// The file of the store, as this half sees it.
    pub(crate) store: PathBuf,
    /// The folder of the receipts.
    pub(crate) receipts: PathBuf,
    /// How much of its walls the kernel enforces; `None` if it was not started as root, and so has none.
    pub(crate) walls: Option<Enforcement>,
}

impl DataDir {
    /// Opens a folder that a server of this user made before.
    pub(crate) fn open(path: &Path) -> Result<Self, StartupError> {
        let path = fs::canonicalize(path).map_err(|error| unusable(path, &error))?;
        require_owner(&path)?;
        let foreign =
            |what: &str| StartupError::new(Reason::ForeignFolder, format!("{} {what}", path.display()));
        let text = match fs::read_to_string(path.join(INSTANCE)) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(foreign("is no data folder of Sandglass"));
            }
            Err(error) => return Err(unusable(&path, &error)),
        };
        let malformed = || foreign("has a malformed instance file");
        let mut lines = text.lines();
        let instance = lines.next().unwrap_or_default().parse().map_err(|_| malformed())?;
        let engine = match (lines.next(), lines.next()) {
            (None, None) => Engine::Gvisor,
            (Some(FAKE), None) => Engine::Fake,
            _ => return Err(malformed()),
        };
        Ok(Self { path, instance, engine })
    }

    /// Opens a folder for a server with this engine, making it if it is missing or empty, and locks it.
    pub(crate) fn open_or_create(path: &Path, engine: Engine) -> Result<(Self, FolderLock), StartupError> {
        // Whatever the umask is, nobody else gets to write in it.
        let made = DirBuilder::new().recursive(true).mode(0o755).create(path);
        made.map_err(|error| unusable(path, &error))?;
        let path = fs::canonicalize(path).map_err(|error| unusable(path, &error))?;
        require_owner(&path)?;
        let lock = lock(&path)?;
        if !path.join(INSTANCE).try_exists().map_err(|error| unusable(&path, &error))? {
            if holds_anything(&path).map_err(|error| unusable(&path, &error))? {
                let what = format!("{} is neither empty nor a data folder of Sandglass", path.display());
                return Err(StartupError::new(Reason::ForeignFolder, what));
            }
            name(&path, engine).map_err(|error| unusable(&path, &error))?;
        }
        let folder = Self::open(&path)?;
        if folder.engine != engine {
            let what = format!("{} belongs to a server with another engine", path.display());
            return Err(StartupError::new(Reason::ForeignFolder, what));
        }
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
        let other = geteuid().is_root().then_some((uid, gid));
        let data = open_folder(CWD, &self.path).map_err(failed)?;
        for (name, owner) in [("serve", other), ("host", None)] {
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

    /// What signs tokens for models: made once, so that they are good beyond a start, and for this user's eyes alone.
    pub(crate) fn models_key(&self) -> Result<[u8; 32], StartupError> {
        let path = self.path.join(MODELS_KEY);
        let failed = |error: io::Error| unusable(&path, &error);
        loop {
            match fs::read(&path) {
                Ok(bytes) => {
                    return bytes.try_into().map_err(|_| failed(io::ErrorKind::InvalidData.into()));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(failed(error)),
            }
            let mut secret = [0; 32];
            SysRng.try_fill_bytes(&mut secret).map_err(|error| failed(io::Error::other(error)))?;
            // Another name until it is whole and on the disk, where whoever writes to it can't be watched.
            let mut new = tempfile::NamedTempFile::new_in(&self.path).map_err(failed)?;
            new.write_all(&secret).and_then(|()| new.as_file().sync_all()).map_err(failed)?;
            new.persist(&path).map_err(|error| failed(error.error))?;
        }
    }

    /// Its absolute path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of the privileged half.
    pub(crate) fn host(&self) -> PathBuf {
        self.path.join("host")
    }

    /// A folder for each sandbox, as both engines have it.
    pub(crate) fn sandboxes(&self) -> PathBuf {
        self.host().join("sandboxes")
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

    /// The engine of its sandboxes.
    pub(crate) const fn engine(&self) -> Engine {
        self.engine
    }

    /// Gives up all privilege: from here on this process has an own user, no capability, and sees `serve/` as the whole
    /// file system. Call it before the second thread starts. Without root there is nothing to give up.
    pub(crate) fn confine(&self) -> Result<Cell, StartupError> {
        let folder = self.path.join("serve");
        if !geteuid().is_root() {
            return Ok(Cell {
                store: folder.join("store.db"),
                receipts: folder.join("receipts"),
                walls: None,
            });
        }
        let walls = privilege::enter_cell(&folder, self.identity(), WithoutLandlock::Refuse)?;
        Ok(Cell { store: "/store.db".into(), receipts: "/receipts".into(), walls: Some(walls) })
    }
}

/// What others may change is not to be believed.
fn require_owner(path: &Path) -> Result<(), StartupError> {
    let about = open_folder(CWD, path).and_then(fstat).map_err(|error| unusable(path, &error.into()))?;
    let own = geteuid();
    if about.st_uid == own.as_raw() && about.st_mode & 0o022 == 0 {
        return Ok(());
    }
    let must =
        |who: &str| format!("{} must belong to {who}, and nobody else may write in it", path.display());
    Err(if own.is_root() {
        StartupError::new(Reason::UnusableFolder, must("root"))
    } else {
        let remedy = "become its owner, or name a folder of yours with --data-dir";
        StartupError::with_remedy(Reason::UnusableFolder, must("the user who does this"), remedy)
    })
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
fn name(path: &Path, engine: Engine) -> io::Result<()> {
    let temporary = path.join(UNNAMED);
    let second = if engine == Engine::Fake { format!("{FAKE}\n") } else { String::new() };
    let named = fs::write(&temporary, format!("{}\n{second}", InstanceId::random()))
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
                let what = format!("{} is in use by {}", path.display(), holder(path));
                return Err(StartupError::new(Reason::FolderInUse, what));
            }
            Err(LockError::Io(error)) => return Err(unusable(path, &error)),
            Err(error) => return Err(unusable(path, &io::Error::other(error))),
        }
    }
}

/// Who has the lock, for a person who wants it.
fn holder(path: &Path) -> String {
    let found = lock::holder(path).ok().flatten().and_then(|pid| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let first: Vec<_> = arguments.split(|byte| *byte == 0).take(2).map(String::from_utf8_lossy).collect();
        let command = first.join(" ").escape_debug().to_string();
        (!command.trim().is_empty()).then(|| format!("process {pid} (`{command}`)"))
    });
    found.unwrap_or_else(|| "another server".into())
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
        let error = DataDir::open_or_create(&data, Engine::Gvisor).unwrap_err();
        assert!(error.to_string().contains("serve is no folder"), "{error:#}");
        let meta = std::fs::metadata(&precious).unwrap();
        assert_eq!((meta.uid(), meta.mode() & 0o777), (0, 0o755));
        // Who may write in the folder could put a link there at any time.
        std::fs::remove_file(data.join("serve")).unwrap();
        std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o777)).unwrap();
        let error = DataDir::open_or_create(&data, Engine::Gvisor).unwrap_err();
        assert!(error.to_string().contains("must belong to root"), "{error:#}");
        std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o755)).unwrap();
        DataDir::open_or_create(&data, Engine::Gvisor).unwrap();
        assert_ne!(std::fs::metadata(data.join("serve")).unwrap().uid(), 0);
    }

    #[test]
    fn what_signs_tokens_is_made_once_and_is_nobody_else_s() {
        use std::os::unix::fs::MetadataExt as _;
        let parent = tempfile::tempdir().unwrap();
        let open = |name: &str| {
            let (data, _lock) = DataDir::open_or_create(&parent.path().join(name), Engine::Gvisor).unwrap();
            data.models_key().unwrap()
        };
        assert_eq!(open("a"), open("a"));
        assert_ne!(open("a"), open("b"));
        let file = parent.path().join("a").join(MODELS_KEY);
        let about = std::fs::metadata(&file).unwrap();
        assert_eq!((about.mode() & 0o777, about.len()), (0o600, 32));
        std::fs::write(&file, "short").unwrap();
        let (data, _lock) = DataDir::open_or_create(&parent.path().join("a"), Engine::Gvisor).unwrap();
        assert!(data.models_key().is_err(), "tokens that were made would be worth nothing");
    }

    #[test]
    fn a_folder_keeps_its_instance_and_its_lock() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("data");
        let (first, held) = DataDir::open_or_create(&path, Engine::Gvisor).unwrap();
        assert!(matches!(FolderLock::acquire(&path), Err(LockError::InUse)));
        drop(held);
        let (second, _held) = DataDir::open_or_create(&path, Engine::Gvisor).unwrap();
        assert_eq!(first.instance(), second.instance());
        assert!(first.identity().uid >= UIDS.0);
    }

    #[test]
    fn sandboxes_of_one_engine_are_not_taken_for_another_s() {
        let parent = tempfile::tempdir().unwrap();
        for (name, own, other) in [("a", Engine::Fake, Engine::Gvisor), ("b", Engine::Gvisor, Engine::Fake)] {
            let path = parent.path().join(name);
            drop(DataDir::open_or_create(&path, own).unwrap());
            let error = DataDir::open_or_create(&path, other).unwrap_err();
            assert!(error.to_string().contains("another engine"), "{error:#}");
            assert_eq!(DataDir::open(&path).unwrap().engine(), own);
            drop(DataDir::open_or_create(&path, own).unwrap());
        }
    }

    #[test]
    fn a_folder_of_others_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("thesis.txt"), "years of work").unwrap();
        let error = DataDir::open_or_create(folder.path(), Engine::Gvisor).unwrap_err();
        assert_eq!(error.reason(), Reason::ForeignFolder);
        assert!(error.to_string().contains("neither empty nor a data folder"), "{error}");
    }

    #[test]
    fn a_start_that_was_cut_off_leaves_no_foreign_folder() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(UNNAMED), "").unwrap();
        let (data, _lock) = DataDir::open_or_create(folder.path(), Engine::Gvisor).unwrap();
        assert_eq!(DataDir::open(folder.path()).unwrap().instance(), data.instance());
    }
}
