//! Walks and removes directories, by descriptor and within bounds.

use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;
use std::rc::Rc;

use connectrpc::ConnectError;
use rustix::fs::{AtFlags, Dir, FileType as Kind, Mode, OFlags, Stat};
use rustix::io::Errno;
use sandglass_proto::services::filesystem::EntryInfo;

use super::entry::Found;
use super::failed;
use crate::exec::Identity;
use crate::path::{PathError, Place, file_type, is_kept, may_empty};

/// Upper bound for one listing, what still waits to be looked at included.
const MAX_ENTRIES: usize = 50_000;

/// Directories below one another that are walked: each holds a descriptor meanwhile.
const MAX_DEPTH: usize = 200;

/// Subdirectories of one directory that wait for their removal at one time.
const MAX_PENDING: usize = 1024;

/// Names that one removal looks at.
const MAX_STEPS: usize = 5_000_000;

const DIR_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK);

fn too_many(path: &str) -> ConnectError {
    ConnectError::resource_exhausted(format!("'{path}' holds too much to list"))
}

fn too_deep(path: &str) -> ConnectError {
    ConnectError::failed_precondition(format!("'{path}' is nested too deeply"))
}

fn open(dir: &OwnedFd, name: &CStr) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(dir, name, DIR_FLAGS, Mode::empty())
}

/// Names in a directory, sorted, at most `limit`.
fn names(dir: &OwnedFd, path: &str, limit: usize) -> Result<Vec<CString>, ConnectError> {
    let mut names = Vec::new();
    let entries = Dir::read_from(dir).map_err(|errno| failed("listing", path, errno))?;
    for entry in entries {
        let entry = entry.map_err(|errno| failed("listing", path, errno))?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if names.len() >= limit {
            return Err(too_many(path));
        }
        names.push(name.to_owned());
    }
    names.sort_unstable();
    Ok(names)
}

/// One directory on the way down.
struct Level {
    dir: OwnedFd,
    path: String,
    /// In reverse order, so that the next is popped.
    names: Vec<CString>,
}

impl Level {
    fn new(dir: OwnedFd, path: String, limit: usize) -> Result<Self, ConnectError> {
        let mut names = names(&dir, &path, limit)?;
        names.reverse();
        Ok(Self { dir, path, names })
    }

    fn join(&self, name: &CStr) -> String {
        format!("{}/{}", self.path.trim_end_matches('/'), name.to_string_lossy())
    }
}

/// What is in a directory, `depth` levels deep, in lexical order of the walk. `path` is how the client calls it.
/// What vanishes meanwhile is left out.
///
/// # Errors
/// It can't be read, or holds too much.
pub(super) fn list(
    place: &Place,
    path: &str,
    depth: usize,
    describe: impl Fn(Found<'_>) -> EntryInfo,
) -> Result<Vec<EntryInfo>, ConnectError> {
    let top = open(&place.dir, place.name()).map_err(|errno| failed("listing", path, errno))?;
    let mut found = Vec::new();
    let mut levels = vec![Level::new(top, path.to_owned(), MAX_ENTRIES)?];
    let mut room = MAX_ENTRIES.saturating_sub(levels.iter().map(|level| level.names.len()).sum());
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.names.pop() else {
            levels.pop();
            continue;
        };
        let Ok(stat) = rustix::fs::statat(&level.dir, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        let path = level.join(&name);
        found.push(describe(Found { path: &path, dir: &level.dir, name: &name, stat: &stat }));
        if file_type(&stat) == Kind::Directory && levels.len() < depth {
            if levels.len() >= MAX_DEPTH {
                return Err(too_deep(&path));
            }
            let level = levels.last().map(|level| open(&level.dir, &name));
            if let Some(Ok(dir)) = level {
                let level = Level::new(dir, path, room)?;
                room -= level.names.len();
                levels.push(level);
            }
        }
    }
    Ok(found)
}

/// A directory that is to be removed, by its name in another.
struct Doomed {
    parent: Rc<OwnedFd>,
    name: CString,
    depth: usize,
}

/// Refuses to empty a folder, or to take a name out of it, for a user who may not.
fn check(folder: &Stat, entry: Option<&Stat>, user: &Identity, path: &str) -> Result<(), ConnectError> {
    if may_empty(folder, user) && !entry.is_some_and(|entry| is_kept(folder, entry, user)) {
        return Ok(());
    }
    Err(PathError::Denied(path.to_owned()).into())
}

/// Removes a directory with all that is in it; of a `user`, only what that one could remove.
///
/// # Errors
/// The kernel or the permissions refused, it is nested too deeply, or someone fills it as fast as it is emptied; a part is
/// gone then.
pub(super) fn remove(place: &Place, path: &str, user: Option<&Identity>) -> Result<(), ConnectError> {
    let refused = |errno| failed("removing", path, errno);
    let parent =
        place.dir.try_clone().map_err(|_| ConnectError::resource_exhausted("no descriptors are left"))?;
    let mut doomed = vec![Doomed { parent: Rc::new(parent), name: place.name().to_owned(), depth: 1 }];
    let mut steps = 0;
    while let Some(Doomed { parent, name, depth }) = doomed.last() {
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {
                doomed.pop();
                continue;
            }
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            Err(errno) => return Err(refused(errno)),
        }
        let depth = depth + 1;
        if depth > MAX_DEPTH {
            return Err(too_deep(path));
        }
        let here = Rc::new(open(parent, name).map_err(refused)?);
        let checked = match user {
            Some(user) => {
                let stat = rustix::fs::fstat(&here).map_err(refused)?;
                check(&stat, None, user, path)?;
                Some((stat, user))
            }
            None => None,
        };
        let before = doomed.len();
        for entry in Dir::read_from(&here).map_err(refused)? {
            let entry = entry.map_err(refused)?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            steps += 1;
            if steps > MAX_STEPS {
                return Err(ConnectError::resource_exhausted(format!(
                    "'{path}' holds too much to remove at once"
                )));
            }
            if let Some((folder, user)) = &checked
                && let Ok(entry) = rustix::fs::statat(&here, name, AtFlags::SYMLINK_NOFOLLOW)
            {
                check(folder, Some(&entry), user, path)?;
            }
            match rustix::fs::unlinkat(&here, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                // A directory: Linux says EISDIR, others EPERM. Those beyond the bound, and what is behind them, are found
                // when this one is read again.
                Err(Errno::ISDIR | Errno::PERM) => {
                    doomed.push(Doomed { parent: Rc::clone(&here), name: name.to_owned(), depth });
                    if doomed.len() - before >= MAX_PENDING {
                        break;
                    }
                }
                Err(errno) => return Err(refused(errno)),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::path::{Walk, borrow, open_root, resolve};

    fn place(root: &Path, path: &str) -> Place {
        let root = open_root(root).unwrap();
        resolve(borrow(&root), path, Walk::NO_FOLLOW).unwrap()
    }

    fn paths(root: &Path, depth: usize) -> Vec<String> {
        let describe = |found: Found<'_>| EntryInfo { path: found.path.into(), ..Default::default() };
        let entries = list(&place(root, "/"), "/", depth, describe).unwrap();
        entries.into_iter().map(|entry| entry.path).collect()
    }

    fn sample() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("b/c/d")).unwrap();
        std::fs::write(root.path().join("a"), "").unwrap();
        std::fs::write(root.path().join("b/c/file"), "").unwrap();
        std::os::unix::fs::symlink("b", root.path().join("link")).unwrap();
        root
    }

    #[test]
    fn lists_in_order_to_a_depth_without_following_links() {
        let root = sample();
        assert_eq!(paths(root.path(), 1), ["/a", "/b", "/link"]);
        assert_eq!(paths(root.path(), 9), ["/a", "/b", "/b/c", "/b/c/d", "/b/c/file", "/link"]);
    }

    #[test]
    fn removes_trees_but_not_what_links_lead_to() {
        let root = sample();
        std::os::unix::fs::symlink("/", root.path().join("b/c/root")).unwrap();
        let outside = root.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("precious"), "").unwrap();
        std::os::unix::fs::symlink("../outside", root.path().join("b/outside")).unwrap();
        remove(&place(root.path(), "/b"), "/b", None).unwrap();
        assert!(!root.path().join("b").exists() && outside.join("precious").exists());
        remove(&place(root.path(), "/b"), "/b", None).unwrap();
    }

    #[test]
    fn removes_broad_trees_and_refuses_too_deep_ones() {
        let root = tempfile::tempdir().unwrap();
        for i in 0..300 {
            std::fs::create_dir_all(root.path().join(format!("wide/{i}/x"))).unwrap();
        }
        remove(&place(root.path(), "/wide"), "/wide", None).unwrap();
        assert!(!root.path().join("wide").exists());
        std::fs::create_dir_all(root.path().join("deep").join("d/".repeat(MAX_DEPTH + 5))).unwrap();
        assert_eq!(
            remove(&place(root.path(), "/deep"), "/deep", None).unwrap_err().code,
            connectrpc::ErrorCode::FailedPrecondition
        );
    }

    #[test]
    fn of_a_user_only_what_that_one_could_remove() {
        let dir = tempfile::tempdir().unwrap();
        let user = Identity { uid: 1000, gid: 1000, groups: vec![1000] };
        let mode = |path: &str, mode| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(dir.path().join(path), mode).unwrap();
        };
        let sample = |most: u32| {
            std::fs::create_dir_all(dir.path().join("top/roots")).unwrap();
            std::fs::write(dir.path().join("top/roots/file"), "").unwrap();
            mode("top", most);
        };
        let removed = |user| {
            let result = remove(&place(dir.path(), "/top"), "/top", user);
            assert!(result.is_ok() || dir.path().join("top/roots/file").exists());
            result.map_err(|error| error.code)
        };
        let denied = Err(connectrpc::ErrorCode::PermissionDenied);
        // The folder is everybody's, and what is in it is not.
        sample(0o777);
        assert_eq!(removed(Some(&user)), denied);
        mode("top/roots", 0o777);
        sample(0o1777);
        assert_eq!(removed(Some(&user)), denied);
        std::os::unix::fs::chown(dir.path().join("top/roots"), Some(1000), None).unwrap();
        assert_eq!(removed(Some(&user)), Ok(()));
        sample(0o700);
        assert_eq!((removed(Some(&user)), removed(None)), (denied, Ok(())));
    }
}
