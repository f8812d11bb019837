//! Images of scripted sandboxes: what they knew and a copy of their files.

use std::io;
use std::path::Path;

use sandglass_types::{Digest, Limits};
use serde::{Deserialize, Serialize};

use super::Inside;
use crate::engine::{EngineError, SandboxSpec, step};

/// What an image was made from, and what its script knew, if that was kept.
#[derive(Debug, Serialize, Deserialize)]
struct Content {
    rootfs: Digest,
    limits: Limits,
    inside: Option<Inside>,
}

/// Writes an image, whole or not at all.
pub(super) fn write(
    target: &Path,
    spec: &SandboxSpec,
    inside: Option<&Inside>,
    home: &Path,
) -> Result<(), EngineError> {
    let write = || -> io::Result<()> {
        let images = target.parent().ok_or_else(|| io::Error::other("an image has a folder"))?;
        let aside = tempfile::Builder::new().prefix(".making-").tempdir_in(images)?;
        let image = aside.path().join("image");
        copy_folder(home, &image.join("home"))?;
        let content = Content { rootfs: spec.rootfs, limits: spec.limits, inside: inside.cloned() };
        fs_err::write(image.join("content.json"), serde_json::to_vec(&content)?)?;
        fs_err::rename(image, target)?;
        aside.close()
    };
    write().map_err(|error| step("write the image", error))
}

/// Reads an image that a sandbox can be made from, and copies its files into `home`.
pub(super) fn read(source: &Path, spec: &SandboxSpec, home: &Path) -> Result<Option<Inside>, EngineError> {
    let inside = check(source, spec)?;
    copy_folder(&source.join("home"), home).map_err(|error| step("copy the image's files", error))?;
    Ok(inside)
}

/// What the script knew in an image that a sandbox can be made from.
pub(super) fn check(source: &Path, spec: &SandboxSpec) -> Result<Option<Inside>, EngineError> {
    let failed = |error: io::Error| step("read the image", error);
    let text = fs_err::read(source.join("content.json")).map_err(failed)?;
    let content: Content = serde_json::from_slice(&text).map_err(|error| failed(error.into()))?;
    let other = |what: &str| step("match the image", format!("it was made with another {what}"));
    if content.rootfs != spec.rootfs {
        return Err(other("root file system"));
    }
    if content.limits != spec.limits {
        return Err(other("set of limits"));
    }
    Ok(content.inside)
}

/// Copies folders, files with their modes, and links.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs_err::create_dir_all(to)?;
    for entry in fs_err::read_dir(from)? {
        let entry = entry?;
        let (kind, target) = (entry.file_type()?, to.join(entry.file_name()));
        if kind.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else if kind.is_symlink() {
            fs_err::os::unix::fs::symlink(fs_err::read_link(entry.path())?, target)?;
        } else {
            fs_err::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
