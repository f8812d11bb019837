//! Describes a name in the file system for clients.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use buffa_types::google::protobuf::Timestamp;
use rustix::fs::{FileType as Kind, Stat};
use sandglass_proto::services::filesystem::{EntryInfo, FileType};

use crate::metadata::Labels;
use crate::path::{Place, Walk, borrow, file_type, resolve};
use crate::users::Users;

/// The kind of a file, for clients.
fn wire_type(stat: &Stat) -> FileType {
    match file_type(stat) {
        Kind::RegularFile => FileType::FILE_TYPE_FILE,
        Kind::Directory => FileType::FILE_TYPE_DIRECTORY,
        Kind::Symlink => FileType::FILE_TYPE_SYMLINK,
        _ => FileType::FILE_TYPE_UNSPECIFIED,
    }
}

/// Kind and permissions in ten characters or more, as Go's standard library writes them.
fn permissions(stat: &Stat) -> String {
    let mode = stat.st_mode;
    let mut text = String::with_capacity(12);
    text.push_str(match file_type(stat) {
        Kind::Directory => "d",
        Kind::Symlink => "L",
        Kind::Fifo => "p",
        Kind::Socket => "S",
        Kind::BlockDevice => "D",
        Kind::CharacterDevice => "Dc",
        _ => "",
    });
    for (bit, letter) in [(0o4000, 'u'), (0o2000, 'g'), (0o1000, 't')] {
        if mode & bit != 0 {
            text.push(letter);
        }
    }
    if text.is_empty() {
        text.push('-');
    }
    for (index, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> index) == 0 { '-' } else { letter });
    }
    text
}

/// What descriptions need.
#[derive(Clone, Copy)]
pub(crate) struct Describer<'a> {
    /// Where links are followed from.
    pub root: &'a OwnedFd,
    /// Who has which number.
    pub users: &'a Users,
    /// What clients attached to files.
    pub labels: &'a Labels,
}

/// What is to be described.
#[derive(Clone, Copy)]
pub(crate) struct Found<'a> {
    /// How the client calls it.
    pub path: &'a str,
    /// The directory that it is in.
    pub dir: &'a OwnedFd,
    /// Its name there.
    pub name: &'a CStr,
    /// What it is, not following a link.
    pub stat: &'a Stat,
}

/// Describes what was found. Blocks.
pub(crate) fn describe(with: Describer<'_>, found: Found<'_>) -> EntryInfo {
    let (Describer { root, users, labels }, Found { path, dir, name, stat }) = (with, found);
    let is_link = file_type(stat) == Kind::Symlink;
    let metadata = match file_type(stat) {
        Kind::RegularFile => labels.of(dir, name, stat).into_map().into_iter().collect(),
        _ => Default::default(),
    };
    // A link is described by what it leads to, as far as that is known.
    let target = is_link
        .then(|| resolve(borrow(root), path, Walk::FOLLOW).ok().filter(|target| target.stat.is_some()));
    let (kind, mode, symlink_target) = match target {
        None => (wire_type(stat), stat.st_mode, None),
        Some(None) => (FileType::FILE_TYPE_UNSPECIFIED, 0, Some(path.to_owned())),
        Some(Some(Place { path: target, stat: target_stat, .. })) => {
            let (kind, mode) = target_stat
                .as_ref()
                .map_or((FileType::FILE_TYPE_UNSPECIFIED, 0), |stat| (wire_type(stat), stat.st_mode));
            (kind, mode, Some(target))
        }
    };
    EntryInfo {
        name: path.rsplit('/').next().filter(|name| !name.is_empty()).unwrap_or("/").into(),
        r#type: kind.into(),
        path: path.into(),
        size: stat.st_size,
        mode: mode & 0o777,
        permissions: permissions(stat),
        owner: users.user_name(stat.st_uid),
        group: users.group_name(stat.st_gid),
        modified_time: Timestamp {
            seconds: stat.st_mtime,
            nanos: i32::try_from(stat.st_mtime_nsec).unwrap_or(0),
            ..Default::default()
        }
        .into(),
        symlink_target,
        metadata,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::open_root;

    #[test]
    fn permissions_are_written_as_go_does() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, "").unwrap();
        for (mode, wanted) in [(0o644, "-rw-r--r--"), (0o755, "-rwxr-xr-x"), (0o4755, "urwxr-xr-x")] {
            std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
            assert_eq!(permissions(&rustix::fs::stat(&file).unwrap()), wanted);
        }
        assert_eq!(permissions(&rustix::fs::stat("/dev/null").unwrap()), "Dcrw-rw-rw-");
    }

    #[test]
    fn a_link_is_described_by_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let root = open_root(dir.path()).unwrap();
        std::fs::write(dir.path().join("file"), "abc").unwrap();
        std::os::unix::fs::symlink("file", dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink("none", dir.path().join("broken")).unwrap();
        let users = Users::default();
        let entry = |path: &str| {
            let place = resolve(borrow(&root), path, Walk::NO_FOLLOW).unwrap();
            let with = Describer { root: &root, users: &users, labels: &Labels::default() };
            let stat = place.existing().unwrap();
            describe(with, Found { path, dir: &place.dir, name: place.name(), stat })
        };
        let link = entry("/link");
        assert_eq!(link.r#type.as_known(), Some(FileType::FILE_TYPE_FILE));
        assert_eq!((link.mode, link.symlink_target.as_deref()), (0o644, Some("/file")));
        assert_eq!(link.permissions, "Lrwxrwxrwx");
        let broken = entry("/broken");
        assert_eq!(broken.r#type.as_known(), Some(FileType::FILE_TYPE_UNSPECIFIED));
        assert_eq!((broken.mode, broken.symlink_target.as_deref()), (0, Some("/broken")));
        assert_eq!(entry("/file").size, 3);
    }
}
