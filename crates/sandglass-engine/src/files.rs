//! Folders and small files of a host.

use std::io::{self, Read as _, Write as _};
use std::path::Path;
use std::str::FromStr;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use rustix::fs::OFlags;

use crate::engine::{EngineError, SandboxSpec, UNUSED, step};

/// Makes a folder that only this process's user can enter.
pub(crate) fn private_folder(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    fs_err::set_permissions(path, std::fs::Permissions::from_mode(0o700))
}

/// Says of a sandbox that it was made for nobody, if it was.
pub(crate) fn mark_unused(spec: &SandboxSpec, folder: &Path) -> io::Result<()> {
    if spec.unused { fs_err::write(folder.join(UNUSED), []) } else { Ok(()) }
}

/// Takes that back: it is somebody's from now on. `false` if it was before.
pub(crate) fn mark_used(folder: &Path) -> io::Result<bool> {
    match fs_err::remove_file(folder.join(UNUSED)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

/// Removes a folder with all that is in it; `Ok` if there is none.
pub(crate) fn remove_folder(path: &Path) -> Result<(), EngineError> {
    match fs_err::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(step("remove a folder", error)),
        _ => Ok(()),
    }
}

/// What in a folder is named by an id; what is not is none of ours.
pub(crate) fn ids_in<Id: FromStr>(path: &Path) -> io::Result<Vec<Id>> {
    let mut ids = Vec::new();
    for entry in fs_err::read_dir(path)? {
        ids.extend(entry?.file_name().to_str().and_then(|name| name.parse().ok()));
    }
    Ok(ids)
}

/// Reads a file of at most `max` bytes, which must be a file and no link to one; `None` if there is none. It waits for nobody,
/// whatever somebody has put there.
pub(crate) fn read_small(path: &Path, max: u64) -> io::Result<Option<Vec<u8>>> {
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or_default();
    let mut bytes = Vec::new();
    let opened = fs_err::OpenOptions::new().read(true).custom_flags(flags).open(path);
    let plain = |file: fs_err::File| match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::from(io::ErrorKind::InvalidInput)),
    };
    match opened.and_then(plain).and_then(|file| file.take(max + 1).read_to_end(&mut bytes)) {
        Ok(len) if len as u64 > max => Err(io::ErrorKind::FileTooLarge.into()),
        Ok(_) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes a file so that a reader sees the old one or the new one, whole.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut next = path.as_os_str().to_owned();
    next.push(".next");
    fs_err::File::create(&next)?.write_all(content)?;
    fs_err::rename(next, path)
}

/// The same, and it outlives a loss of power. What has this content already is left alone, which needs no room.
pub(crate) fn replace_for_good(path: &Path, content: &[u8]) -> io::Result<()> {
    let len = u64::try_from(content.len()).map_err(io::Error::other)?;
    if read_small(path, len).ok().flatten().as_deref() == Some(content) {
        return Ok(());
    }
    let mut next = path.as_os_str().to_owned();
    next.push(".next");
    let file = fs_err::File::create(&next)?;
    (&file).write_all(content)?;
    file.sync_all()?;
    fs_err::rename(next, path)?;
    path.parent().map_or(Ok(()), |folder| fs_err::File::open(folder)?.sync_all())
}
