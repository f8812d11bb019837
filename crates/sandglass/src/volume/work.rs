//! What is done with files and folders of a volume.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rand::RngExt as _;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Stat, Uid};
use rustix::io::Errno;
use rustix::path::Arg;
use sandglass_engine::volume::{Access, Entry, Kind, MAX_MARKS, Mark, Why};

use super::paths::{Parts, Refusal, Top};

/// Who has what is made for nobody in particular: the user of `base`.
const OWNER: u32 = 1000;

/// Permissions of files and folders whose maker says none.
const FILE_MODE: u32 = 0o644;
const FOLDER_MODE: u32 = 0o755;

/// What of the permissions of a file speaks about its content, and goes with it.
const SET_ID: u32 = 0o6000;

/// How a file or folder is called that is being made. One that is left by a crash may be removed by anybody.
const UPLOAD: &str = ".sandglass-upload-";

/// A name that nobody has.
pub(super) fn unused(prefix: &str) -> String {
    format!("{prefix}{:016x}", rand::rng().random::<u64>())
}

pub(super) fn kind(stat: &Stat) -> Kind {
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

/// What is said of something, with its name and path as they are shown.
pub(super) fn entry(name: String, path: String, stat: &Stat, target: Option<String>) -> Entry {
    Entry {
        name,
        kind: kind(stat),
        path,
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
pub(super) fn target_of(folder: impl AsFd, name: impl Arg, stat: &Stat) -> Option<String> {
    (kind(stat) == Kind::Symlink)
        .then(|| rustix::fs::readlinkat(folder, name, Vec::new()).ok())
        .flatten()
        .map(|target| target.to_string_lossy().into_owned())
}

/// What is there.
pub(super) fn stat(top: &Top, path: &str) -> Result<Entry, Refusal> {
    let path = Parts::parse(path)?;
    let shown = |stat: &Stat, target| entry(path.name().to_owned(), path.to_string(), stat, target);
    let Some((above, name)) = path.split() else {
        return Ok(shown(&rustix::fs::fstat(top.folder(&path)?)?, None));
    };
    let folder = top.folder(&above)?;
    let stat = rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(shown(&stat, target_of(&folder, name, &stat)))
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
        // The kernel leaves a set-group-id bit out in silence, for who is in no group.
        if rustix::fs::fstat(&fd)?.st_mode & 0o7777 != mode & 0o7777 {
            return Err(Errno::PERM);
        }
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

/// Makes one folder below one that is there. It has its owner from the first moment, and is on the disk.
fn make_one(top: &Top, path: &Parts, access: Access) -> Result<(), Errno> {
    let Some((above, name)) = path.split() else { return Err(Errno::EXIST) };
    let above = top.folder(&above)?;
    match rustix::fs::statat(&above, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => {}
        there => return there.and(Err(Errno::EXIST)),
    }
    let temporary = unused(UPLOAD);
    rustix::fs::mkdirat(&above, &*temporary, Mode::RWXU)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let placed = rustix::fs::openat(&above, &*temporary, flags, Mode::empty()).and_then(|made| {
        give(&made, or(access, FOLDER_MODE))?;
        top.keep(&made)?;
        rustix::fs::renameat_with(&above, &*temporary, &above, name, RenameFlags::NOREPLACE)
    });
    if placed.is_err() {
        let _gone = rustix::fs::unlinkat(&above, &*temporary, AtFlags::REMOVEDIR);
        return placed;
    }
    top.keep(&above).inspect_err(|_| {
        // So that it is not taken for one that lasts when it is made once more.
        let _gone = rustix::fs::unlinkat(&above, name, AtFlags::REMOVEDIR);
    })
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
            mode: access.mode.or(Some(stat.st_mode & 0o7777 & !SET_ID)),
        },
        Ok(_) | Err(Errno::NOENT) => or(access, FILE_MODE),
        Err(errno) => return Err(errno.into()),
    };
    let temporary = unused(UPLOAD);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&folder, &*temporary, flags, Mode::RUSR | Mode::WUSR)?;
    Ok(Upload { top, folder, temporary, access, file: file.into(), finished: false, path: path.clone() })
}

impl Upload<'_> {
    /// Puts it in its place, where it outlasts a loss of power.
    pub(super) fn finish(mut self) -> Result<Entry, Refusal> {
        give(&self.file, self.access)?;
        // First, for a name that is on the disk before its content would be that of half a file. What the disk has no
        // room for, or fails with, is often said only here.
        self.top.keep(&self.file)?;
        rustix::fs::renameat(&self.folder, &*self.temporary, &self.folder, self.path.name())?;
        self.finished = true;
        // Where this fails, nobody knows which of the two the disk has, but it has it as a whole.
        self.top.keep(&self.folder)?;
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
    use std::cell::RefCell;
    use std::io::Write as _;
    use std::rc::Rc;

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
    fn a_file_is_on_the_disk_before_its_name_and_its_name_before_it_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        // Whether there was a file of that name when the content, and when the folder was put on the disk.
        let seen = Rc::new(RefCell::new(Vec::new()));
        let (sees, looks) = (Rc::clone(&seen), file.clone());
        let top = Top::with(dir.path(), move |fd| {
            let kind = kind(&rustix::fs::fstat(fd)?);
            sees.borrow_mut().push((kind, looks.exists()));
            Ok(())
        });
        begin(&top, "/f", own(), false).unwrap().finish().unwrap();
        assert_eq!(seen.take(), [(Kind::File, false), (Kind::Directory, true)]);
        // Each new folder, and the one that holds it.
        make_dir(&top, "/a/b", own(), true).unwrap();
        assert_eq!(seen.take().len(), 4);
        begin(&top, "/c/f", own(), true).unwrap();
        assert_eq!(seen.take().len(), 2);
    }

    #[test]
    fn what_the_disk_fails_to_keep_is_an_error_and_what_was_there_stays() {
        let dir = tempfile::tempdir().unwrap();
        let names = || {
            let read = std::fs::read_dir(dir.path()).unwrap();
            read.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>()
        };
        std::fs::write(dir.path().join("f"), "old").unwrap();
        for (errno, why) in [(Errno::IO, Why::Failed), (Errno::NOSPC, Why::NoRoom)] {
            let top = Top::with(dir.path(), move |_| Err(errno));
            let mut upload = begin(&top, "/f", own(), false).unwrap();
            upload.file.write_all(b"new").unwrap();
            assert!(upload.finish().is_err_and(|refusal| refusal.why == why));
            assert!(make_dir(&top, "/d", own(), false).is_err_and(|refusal| refusal.why == why));
            assert!(begin(&top, "/d/f", own(), true).is_err_and(|refusal| refusal.why == why));
            assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), b"old");
            assert_eq!(names(), ["f"]);
        }
        // Where only the folder that holds it can't be kept.
        let top = Top::with(dir.path(), |fd| {
            let is_new = rustix::fs::fstat(fd)?.st_mode & 0o777 == 0o600;
            if is_new { Ok(()) } else { Err(Errno::IO) }
        });
        assert!(make_dir(&top, "/d", own(), false).is_err());
        assert_eq!(names(), ["f"]);
        assert!(begin(&top, "/f", own(), false).unwrap().finish().is_err());
    }

    #[test]
    fn a_set_id_bit_does_not_pass_to_other_content() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::at(dir.path());
        let given = Access { mode: Some(0o4751), ..own() };
        assert_eq!(begin(&top, "/f", given, false).unwrap().finish().unwrap().mode, 0o4751, "the control");
        let as_it_was = Access { mode: None, ..own() };
        assert_eq!(begin(&top, "/f", as_it_was, false).unwrap().finish().unwrap().mode, 0o751);
    }

    #[test]
    fn a_folder_takes_the_place_of_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::at(dir.path());
        assert_eq!(make_dir(&top, "/d", own(), false).unwrap().mode, 0o600);
        std::os::unix::fs::symlink("d", dir.path().join("l")).unwrap();
        for path in ["/d", "/l", "/"] {
            assert!(make_dir(&top, path, own(), false).is_err_and(|refusal| refusal.why == Why::Conflict));
        }
        assert!(make_dir(&top, "/d", own(), true).is_ok());
        assert!(make_dir(&top, "/l", own(), true).is_err());
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
