//! Where the data folder of an instance is, so that others can tell whether there is one any more.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use sandglass_linux::mount::{self, MountEntry};
use sandglass_types::InstanceId;

use crate::files::{read_small, replace_for_good};

/// The file in a data folder that names its instance.
const NAME: &str = "instance";
const MAX_NAME: u64 = 64;

/// Upper bound of a home on disk, in bytes: three paths.
const MAX_LEN: u64 = 4 * 4096;

/// Where an instance lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Home {
    data: PathBuf,
    /// What was mounted where that is: if it is not any more, nobody knows what the folder holds.
    mount: Mounted,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Mounted {
    target: PathBuf,
    fstype: OsString,
    source: OsString,
    /// The folder that it is, by device and inode: to another container, another one may be at the same place.
    folder: OsString,
}

/// Whether an instance's pins count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its data folder is there.
    There,
    /// Its data folder is gone, or another instance's: nobody needs what it needed.
    Gone,
    /// That can't be found out, so they count.
    Unknown,
}

impl Home {
    /// Names a data folder, given by its canonical path, as this instance's.
    pub(super) fn claim(data: &Path, instance: &InstanceId) -> io::Result<Self> {
        replace_for_good(&data.join(NAME), format!("{instance}\n").as_bytes())?;
        let mount = mounted_at(data, &mount::table(None)?)?;
        Ok(Self { data: data.to_owned(), mount })
    }

    /// Bytes without an encoding, as paths are; none of them holds a NUL.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let Mounted { target, fstype, source, folder } = &self.mount;
        let fields: [&OsStr; 5] = [self.data.as_os_str(), target.as_os_str(), fstype, source, folder];
        fields.map(OsStr::as_bytes).join(&0)
    }

    pub(super) fn read(path: &Path) -> io::Result<Self> {
        let bytes = read_small(path, MAX_LEN)?.ok_or(io::ErrorKind::NotFound)?;
        let fields: Vec<_> =
            bytes.split(|byte| *byte == 0).map(|field| OsString::from_vec(field.to_vec())).collect();
        let [data, target, fstype, source, folder] =
            <[OsString; 5]>::try_from(fields).map_err(|_| io::ErrorKind::InvalidData)?;
        let data = PathBuf::from(data);
        if !data.is_absolute() {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self { data, mount: Mounted { target: target.into(), fstype, source, folder } })
    }

    /// What became of this instance, which is said to live here.
    pub(super) fn standing(&self, instance: &InstanceId, table: &[MountEntry]) -> Standing {
        let named = match read_small(&self.data.join(NAME), MAX_NAME) {
            Ok(named) => named,
            Err(error) => {
                tracing::warn!(%instance, %error, "whether there still is an instance can't be found out");
                return Standing::Unknown;
            }
        };
        let named = named.map(|name| String::from_utf8_lossy(&name).trim().parse::<InstanceId>());
        match named {
            Some(Ok(named)) if named == *instance => Standing::There,
            Some(Err(_)) => Standing::Unknown,
            _ if mounted_at(&self.data, table).ok().as_ref() != Some(&self.mount) => {
                tracing::info!(%instance, data = %self.data.display(), "the disk of an instance is not mounted, so its pins count");
                Standing::Unknown
            }
            _ => Standing::Gone,
        }
    }
}

/// What is mounted at a path, or at the nearest folder above it.
fn mounted_at(path: &Path, table: &[MountEntry]) -> io::Result<Mounted> {
    let around = table.iter().filter(|entry| path.starts_with(&entry.target));
    // Of two at one place, the later one is on top.
    let nearest = around.max_by_key(|entry| entry.target.components().count());
    let MountEntry { target, fstype, source } = nearest.ok_or(io::ErrorKind::NotFound)?.clone();
    let folder = fs_err::metadata(&target).map(|meta| format!("{}:{}", meta.dev(), meta.ino()))?;
    Ok(Mounted { target, fstype: fstype.into(), source, folder: folder.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(target: &str, source: &str) -> MountEntry {
        MountEntry { target: target.into(), fstype: "ext4".into(), source: source.into() }
    }

    #[test]
    fn the_nearest_mount_counts_and_of_two_at_one_place_the_upper_one() {
        let table =
            [entry("/", "root"), entry("/usr", "lower"), entry("/usr", "upper"), entry("/us", "beside")];
        let at = |path: &str| mounted_at(Path::new(path), &table).unwrap();
        assert_eq!(at("/usr/b").source, "upper");
        assert_eq!(at("/usrx").source, "root");
        assert_ne!(at("/usr").folder, at("/").folder);
        assert!(mounted_at(Path::new("/a"), &[]).is_err());
    }

    #[test]
    fn an_instance_is_gone_only_if_nothing_else_can_be_so() {
        use Standing::{Gone, There, Unknown};
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        std::fs::create_dir(&data).unwrap();
        let (instance, other) = (InstanceId::random(), InstanceId::random());
        let home = Home::claim(&data, &instance).unwrap();
        let file = dir.path().join("home");
        std::fs::write(&file, home.to_bytes()).unwrap();
        let home = Home::read(&file).unwrap();
        let table = mount::table(None).unwrap();
        let mut unmounted = table.clone();
        unmounted.push(MountEntry { source: "another".into(), ..entry(data.to_str().unwrap(), "") });
        let standing = |table: &[MountEntry]| home.standing(&instance, table);
        let mut elsewhere = home.clone();
        elsewhere.mount.folder = "1:2".into();
        assert_eq!(standing(&table), There);
        assert_eq!(standing(&unmounted), There, "whatever its disk is called today");
        // Another's in its place.
        Home::claim(&data, &other).unwrap();
        assert_eq!(standing(&table), Gone);
        assert_eq!(standing(&unmounted), Unknown, "it may be on the disk that is not mounted now");
        assert_eq!(elsewhere.standing(&instance, &table), Unknown, "or in another container");
        std::fs::remove_file(data.join(NAME)).unwrap();
        assert_eq!(standing(&table), Gone);
        std::fs::remove_dir(&data).unwrap();
        assert_eq!(standing(&table), Gone);
        assert_eq!(standing(&unmounted), Unknown);
        // What is no folder, and what can't be read or makes no sense.
        std::fs::write(&data, "").unwrap();
        assert_eq!(standing(&table), Unknown);
        std::fs::remove_file(&data).unwrap();
        std::fs::create_dir_all(data.join(NAME)).unwrap();
        assert_eq!(standing(&table), Unknown);
        std::fs::remove_dir(data.join(NAME)).unwrap();
        std::fs::write(data.join(NAME), "").unwrap();
        assert_eq!(standing(&table), Unknown, "a loss of power may leave this");
    }

    #[test]
    fn what_is_no_home_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("home");
        assert!(Home::read(&file).is_err());
        for text in ["", "/a\0/\0ext4\0x", "a\0/\0ext4\0x\x001:2", "/a\0/\0ext4\0x\x001:2\0y"] {
            std::fs::write(&file, text).unwrap();
            assert!(Home::read(&file).is_err(), "{text:?}");
        }
        let bytes = b"/\xff\0/\0ext4\0x\x001:2";
        std::fs::write(&file, bytes).unwrap();
        assert_eq!(Home::read(&file).unwrap().to_bytes(), bytes);
    }
}
