//! What is done with files and folders of a volume.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rand::RngExt as _;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;
use sandglass_engine::volume::{Access, Entry, Kind, MAX_MARKS, Mark, Why};

use super::paths::{Parts, Refusal, Top};

/// Most entries that are listed at one time.
const MAX_ENTRIES: usize = 10_000;

/// Most layers that are listed at one time.
const MAX_DEPTH: u32 = 64;

/// Who has what is made for nobody in particular: the user of `base`.
const OWNER: u32 = 1000;

/// Permissions of files and folders whose maker says none.
const FILE_MODE: u32 = 0o644;
const FOLDER_MODE: u32 = 0o755;

/// How a file is called that is being sent. One that is left by a crash may be removed by anybody.
const UPLOAD: &str = ".sandglass-upload-";

fn kind(stat: &Stat) -> Kind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        _ => Kind::Unknown,
    }
}

fn millis(seconds: i64, nanos: u64) -> i64 {
    let part = i64::try_from(nanos / 1_000_000).unwrap_or_default();
    seconds.saturating_mul(1000).saturating_add(part)
}

fn nanos(seconds: i64, nanos: u64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(i64::try_from(nanos).unwrap_or_default())
}

fn entry(path: &Parts, stat: &Stat, target: Option<String>) -> Entry {
    Entry {
        name: path.name().to_owned(),
        kind: kind(stat),
        path: path.to_string(),
        size: u64::try_from(stat.st_size).unwrap_or_default(),
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        atime: millis(stat.st_atime, stat.st_atime_nsec),
        mtime: millis(stat.st_mtime, stat.st_mtime_nsec),
        ctime: millis(stat.st_ctime, stat.st_ctime_nsec),
        target,
    }
}

/// Where a link leads, as text.
fn target_of(folder: impl AsFd, name: &str, stat: &Stat) -> Option<String> {
    (kind(stat) == Kind::Symlink)
        .then(|| rustix::fs::readlinkat(folder, name, Vec::new()).ok())
        .flatten()
        .map(|target| target.to_string_lossy().into_owned())
}

/// What is there.
pub(super) fn stat(top: &Top, path: &str) -> Result<Entry, Refusal> {
    let path = Parts::parse(path)?;
    let Some((above, name)) = path.split() else {
        return Ok(entry(&path, &rustix::fs::fstat(top.folder(&path)?)?, None));
    };
    let folder = top.folder(&above)?;
    let stat = rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(entry(&path, &stat, target_of(&folder, name, &stat)))
}

/// All that is in a folder, so many layers deep, folder by folder. What vanishes meanwhile is left out.
pub(super) fn list(top: &Top, path: &str, depth: u32) -> Result<Vec<Entry>, Refusal> {
    let first = Parts::parse(path)?;
    let opened = match top.folder(&first) {
        // A file has nothing in it, which is another thing than not to be there.
        Err(Errno::NOTDIR) if stat(top, path).is_ok() => return Err(Refusal::invalid("it is no folder")),
        opened => opened?,
    };
    let (mut found, mut waiting) = (Vec::new(), VecDeque::from([(first, Some(opened), 1)]));
    while let Some((path, opened, layer)) = waiting.pop_front() {
        let Some(folder) = opened.map_or_else(|| top.folder(&path).ok(), Some) else { continue };
        for read in rustix::fs::Dir::read_from(&folder)? {
            let read = read?;
            let name = read.file_name();
            if matches!(name.to_bytes(), b"." | b"..") {
                continue;
            }
            if found.len() == MAX_ENTRIES {
                let message =
                    format!("there are more than {MAX_ENTRIES} entries: list its folders one by one");
                return Err(Refusal::invalid(message));
            }
            let Ok(stat) = rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            // A name that is no text is shown, and can't be asked for.
            let name = name.to_string_lossy().into_owned();
            let Ok(below) = Parts::parse(&format!("{path}/{name}")) else { continue };
            if kind(&stat) == Kind::Directory && layer < depth.min(MAX_DEPTH) {
                waiting.push_back((below.clone(), None, layer + 1));
            }
            found.push(entry(&below, &stat, target_of(&folder, &name, &stat)));
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Gives an open file or folder to somebody.
fn give(fd: impl AsFd, access: Access) -> Result<(), Errno> {
    let Access { uid, gid, mode } = access;
    if uid.is_some() || gid.is_some() {
        rustix::fs::fchown(&fd, uid.map(Uid::from_raw), gid.map(Gid::from_raw))?;
    }
    // Last, because a change of its owner takes some of it away.
    if let Some(mode) = mode {
        rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode & 0o7777))?;
    }
    Ok(())
}

const fn or(access: Access, mode: u32) -> Access {
    Access {
        uid: Some(match access.uid {
            Some(uid) => uid,
            None => OWNER,
        }),
        gid: Some(match access.gid {
            Some(gid) => gid,
            None => OWNER,
        }),
        mode: Some(match access.mode {
            Some(mode) => mode,
            None => mode,
        }),
    }
}

/// Makes one folder below one that is there.
fn make_one(top: &Top, path: &Parts, access: Access) -> Result<(), Errno> {
    let Some((above, name)) = path.split() else { return Err(Errno::EXIST) };
    rustix::fs::mkdirat(top.folder(&above)?, name, Mode::RWXU)?;
    give(top.folder(path)?, or(access, FOLDER_MODE))
}

/// Makes a folder, and with `force` all those above it.
pub(super) fn make_dir(top: &Top, path: &str, access: Access, force: bool) -> Result<Entry, Refusal> {
    let parts = Parts::parse(path)?;
    if force {
        make_above(top, &parts)?;
    }
    match make_one(top, &parts, access) {
        Err(Errno::EXIST) if force => drop(top.folder(&parts)?),
        made => made?,
    }
    stat(top, path)
}

/// Makes the folders that lead to something.
fn make_above(top: &Top, path: &Parts) -> Result<(), Refusal> {
    let Some((above, _)) = path.split() else { return Ok(()) };
    for folder in above.prefixes() {
        match make_one(top, &folder, Access::default()) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Gives a file or folder to somebody else.
pub(super) fn change(top: &Top, path: &str, access: Access) -> Result<Entry, Refusal> {
    let fd = top.reach(&Parts::parse(path)?, OFlags::RDONLY, Mode::empty())?;
    give(fd, access)?;
    stat(top, path)
}

/// A regular file, and its size.
pub(super) fn open(top: &Top, path: &str) -> Result<(File, u64), Refusal> {
    let file = File::from(top.reach(&Parts::parse(path)?, OFlags::RDONLY, Mode::empty())?);
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(Refusal::invalid("it is a folder"));
    }
    if !metadata.is_file() {
        return Err(Refusal::invalid("it is no file"));
    }
    Ok((file, metadata.len()))
}

/// A file that is being sent.
pub(super) struct Upload<'a> {
    top: &'a Top,
    path: Parts,
    folder: OwnedFd,
    temporary: String,
    access: Access,
    pub(super) file: File,
    finished: bool,
}

/// Begins a file beside what is there.
pub(super) fn begin<'a>(
    top: &'a Top,
    path: &str,
    access: Access,
    force: bool,
) -> Result<Upload<'a>, Refusal> {
    let path = Parts::parse(path)?;
    if force {
        make_above(top, &path)?;
    }
    let Some((above, name)) = path.split() else { return Err(Refusal::invalid("it is a folder")) };
    let folder = top.folder(&above)?;
    let access = match rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if kind(&stat) == Kind::Directory => return Err(Refusal::invalid("it is a folder")),
        // It stays whose it was.
        Ok(stat) if kind(&stat) == Kind::File => Access {
            uid: access.uid.or(Some(stat.st_uid)),
            gid: access.gid.or(Some(stat.st_gid)),
            mode: access.mode.or(Some(stat.st_mode & 0o7777)),
        },
        Ok(_) | Err(Errno::NOENT) => or(access, FILE_MODE),
        Err(errno) => return Err(errno.into()),
    };
    let temporary = format!("{UPLOAD}{:016x}", rand::rng().random::<u64>());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&folder, &*temporary, flags, Mode::RUSR | Mode::WUSR)?;
    Ok(Upload { top, folder, temporary, access, file: file.into(), finished: false, path: path.clone() })
}

impl Upload<'_> {
    /// Puts it in its place.
    pub(super) fn finish(mut self) -> Result<Entry, Refusal> {
        give(&self.file, self.access)?;
        rustix::fs::renameat(&self.folder, &*self.temporary, &self.folder, self.path.name())?;
        self.finished = true;
        stat(self.top, &self.path.to_string())
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if !self.finished {
            let _gone = rustix::fs::unlinkat(&self.folder, &*self.temporary, AtFlags::empty());
        }
    }
}

/// What tells whether these were changed.
pub(super) fn marks(top: &Top, paths: &[String]) -> Result<Vec<Option<Mark>>, Refusal> {
    if paths.len() > MAX_MARKS {
        return Err(Refusal::invalid("too many paths"));
    }
    let mark = |path: &String| {
        let parts = Parts::parse(path)?;
        let stat = match top.reach(&parts, OFlags::PATH, Mode::empty()) {
            Ok(fd) => rustix::fs::fstat(fd)?,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let file = (kind(&stat) != Kind::Directory).then(|| {
            (
                u64::try_from(stat.st_size).unwrap_or_default(),
                nanos(stat.st_mtime, stat.st_mtime_nsec),
                nanos(stat.st_ctime, stat.st_ctime_nsec),
            )
        });
        Ok(Some(Mark { inode: stat.st_ino, file }))
    };
    paths.iter().map(mark).collect()
}

/// That nothing else will do.
pub(super) fn gone() -> Refusal {
    Refusal { why: Why::Failed, message: "nobody waits for it any more".into() }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn own() -> Access {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        Access { uid: Some(uid), gid: Some(gid), mode: Some(0o600) }
    }

    #[test]
    fn a_file_is_there_as_a_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::at(dir.path());
        let mut upload = begin(&top, "/f", own(), false).unwrap();
        upload.file.write_all(b"new").unwrap();
        assert!(!dir.path().join("f").exists());
        assert_eq!(upload.finish().unwrap().size, 3);
        let mut upload = begin(&top, "/f", own(), false).unwrap();
        upload.file.write_all(b"half").unwrap();
        drop(upload);
        assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
        // What a link leads to is not written.
        std::os::unix::fs::symlink("f", dir.path().join("l")).unwrap();
        begin(&top, "/l", own(), false).unwrap().finish().unwrap();
        assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), b"new");
        assert!(begin(&top, "/missing/f", own(), false).is_err_and(|refusal| refusal.why == Why::NotFound));
        begin(&top, "/missing/f", own(), true).err();
    }

    #[test]
    fn what_is_no_file_is_not_read_and_nobody_waits() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::at(dir.path());
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join("p"), Mode::RWXU).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("l")).unwrap();
        for path in ["/p", "/l", "/"] {
            assert!(open(&top, path).is_err_and(|refusal| refusal.why == Why::Invalid), "{path}");
        }
        let entry = stat(&top, "/l").unwrap();
        assert_eq!((entry.kind, entry.target.as_deref()), (Kind::Symlink, Some("/etc/passwd")));
        assert_eq!(list(&top, "/", 1).unwrap().len(), 2);
    }

    #[test]
    fn a_mark_changes_with_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::at(dir.path());
        std::fs::write(dir.path().join("f"), "a").unwrap();
        let of = |path: &str| marks(&top, &[path.to_owned()]).unwrap().remove(0);
        let before = of("/f");
        assert!(before.is_some() && before == of("/f"));
        assert_eq!(of("/g"), None);
        // Another file of the same name, size and time.
        let time = std::fs::metadata(dir.path().join("f")).unwrap().modified().unwrap();
        std::fs::write(dir.path().join("g"), "b").unwrap();
        std::fs::File::options().write(true).open(dir.path().join("g")).unwrap().set_modified(time).unwrap();
        std::fs::rename(dir.path().join("g"), dir.path().join("f")).unwrap();
        assert_ne!(of("/f"), before);
    }
}
