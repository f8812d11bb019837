//! What programs in an image have of volumes, and whether it is still what it was.
//!
//! A sandbox that comes back opens its files again by their paths, and gVisor takes whatever is there. So it is noted with each
//! image what its programs had, once they stand still, and looked at before the image is brought back: by the numbers of
//! the files, which no program inside can see, and by times that none can set. Other sandboxes may write at any moment
//! afterwards, as they may while it runs; what is told here is what happened while it was away.

use sandglass_engine::volume::Mark;
use sandglass_proto::control::Holder;
use sandglass_types::error::Chain;
use sandglass_types::{Error, ErrorKind, SandboxId, VolumeId, VolumeMount};
use serde::{Deserialize, Serialize};

use crate::agent::{DISPLACED, unsavable};
use crate::control::marks_of;
use crate::shared::Shared;

/// One file or folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Noted {
    volume: VolumeId,
    /// From the top of the volume.
    path: String,
    mark: Option<Mark>,
}

/// Which volume a path of a sandbox is on, and where there.
fn place<'a>(volumes: &'a [VolumeMount], path: &str) -> Option<(&'a VolumeMount, String)> {
    volumes.iter().find_map(|volume| {
        let below = path.strip_prefix(volume.path.as_str())?;
        (below.is_empty() || below.starts_with('/')).then(|| (volume, below.to_owned()))
    })
}

async fn look(shared: &Shared, wanted: &[(VolumeId, String)]) -> Result<Vec<Noted>, Error> {
    let mut noted = Vec::new();
    let mut ids: Vec<_> = wanted.iter().map(|(id, _)| id.clone()).collect();
    ids.sort();
    ids.dedup();
    for id in ids {
        let of_this = wanted.iter().filter(|(of, _)| *of == id);
        let paths: Vec<_> = of_this.map(|(_, path)| path.clone()).collect();
        let marks = marks_of(shared, &id, paths.clone()).await?;
        let each = paths.into_iter().zip(marks);
        noted.extend(each.map(|(path, mark)| Noted { volume: id.clone(), path, mark }));
    }
    Ok(noted)
}

/// Notes what the programs of a sandbox have that stands still and is about to be written to this image. Its agent saw that each
/// was at its path, and whatever is not any more could never be opened again.
///
/// # Errors
/// [`ErrorKind::Conflict`] if something is not there, or is in use by a path that is on no volume; or it can't be looked at:
/// then nobody could tell later.
pub(crate) async fn note(
    shared: &Shared,
    id: &SandboxId,
    image: &SandboxId,
    in_use: &[Holder],
) -> Result<(), Error> {
    let row = shared.store.sandbox(id).await.map_err(crate::stored)?;
    let volumes = row.map(|row| row.volumes).unwrap_or_default();
    if volumes.is_empty() {
        return Ok(());
    }
    let wanted = wanted(&volumes, in_use)?;
    let noted = look(shared, &wanted).await?;
    let gone = gone(&volumes, in_use, &noted);
    if !gone.is_empty() {
        return Err(unsavable(&gone, DISPLACED));
    }
    let text = serde_json::to_string(&noted).map_err(|error| Error::internal("it can't be noted", error))?;
    shared.store.note_marks(image, &text).await.map_err(crate::stored)
}

/// Where all these are on volumes.
fn wanted(volumes: &[VolumeMount], in_use: &[Holder]) -> Result<Vec<(VolumeId, String)>, Error> {
    let (placed, unplaced): (Vec<_>, Vec<_>) =
        in_use.iter().map(|holder| (holder, place(volumes, &holder.file))).partition(|(_, at)| at.is_some());
    if !unplaced.is_empty() {
        let holders: Vec<_> = unplaced.into_iter().map(|(holder, _)| holder.clone()).collect();
        return Err(unsavable(&holders, "which is on a volume, by a mount of its own"));
    }
    Ok(placed.into_iter().filter_map(|(_, at)| at).map(|(volume, path)| (volume.id.clone(), path)).collect())
}

/// Who has what is not there.
fn gone(volumes: &[VolumeMount], in_use: &[Holder], noted: &[Noted]) -> Vec<Holder> {
    let is_gone = |holder: &&Holder| {
        place(volumes, &holder.file).is_none_or(|(volume, path)| {
            let here = noted.iter().find(|noted| noted.volume == volume.id && noted.path == path);
            here.is_none_or(|noted| noted.mark.is_none())
        })
    };
    in_use.iter().filter(is_gone).cloned().collect()
}

/// That all that an image's programs have of volumes is what it was.
///
/// # Errors
/// [`ErrorKind::Conflict`], which names what is not; or it can't be looked at.
pub(crate) async fn check(shared: &Shared, image: &SandboxId, volumes: &[VolumeMount]) -> Result<(), Error> {
    if volumes.is_empty() {
        return Ok(());
    }
    let unknown = |error| Error::internal("what its programs have of volumes is not known", error);
    let Some(text) = shared.store.marks(image).await.map_err(crate::stored)? else {
        return Err(unknown("nothing was noted".to_owned()));
    };
    let before: Vec<Noted> = serde_json::from_str(&text).map_err(|error| unknown(error.to_string()))?;
    let wanted: Vec<_> = before.iter().map(|noted| (noted.volume.clone(), noted.path.clone())).collect();
    let now = look(shared, &wanted).await?;
    for noted in &before {
        let is = now.iter().find(|is| (&is.volume, &is.path) == (&noted.volume, &noted.path));
        if is.is_some_and(|is| is.mark.is_some() && is.mark == noted.mark) {
            continue;
        }
        let what =
            if is.is_none_or(|is| is.mark.is_none()) { "deleted or renamed" } else { "changed or replaced" };
        let mount = volumes.iter().find(|volume| volume.id == noted.volume);
        let (top, name) = mount.map_or(("", ""), |volume| (volume.path.as_str(), volume.name.as_str()));
        let message = format!(
            "programs of the sandbox have {:?} on the volume '{name}' in use, and it was {what} since: put it back as it \
             was, or go without the memory: a paused sandbox is started anew from its files where it is resumed with \
             \"memory\": false",
            format!("{top}{}", noted.path),
        );
        return Err(Error::new(ErrorKind::Conflict, message));
    }
    Ok(())
}

/// What the engine says where a path leads to nothing that could be opened as what it was.
const UNOPENED: [&str; 3] = ["no such file or directory", "not a directory", "is a directory"];

/// Why an image could not be brought back: what its programs have of volumes may have been taken away since it was looked at, or may
/// have been opened after it was.
pub(crate) async fn explain(
    shared: &Shared,
    image: &SandboxId,
    volumes: &[VolumeMount],
    error: Error,
) -> Error {
    if volumes.is_empty() || error.kind() != ErrorKind::Internal {
        return error;
    }
    match check(shared, image, volumes).await {
        Err(found) if found.kind() == ErrorKind::Conflict => found.because(error),
        _ if is_unopened(&Chain(&error).to_string()) => {
            let names: Vec<_> = volumes.iter().map(|volume| format!("'{}'", volume.name)).collect();
            let message = format!(
                "a file that programs of the sandbox have in use is not there any more, on a volume of {}: put it back as \
                 it was, or go without the memory: a paused sandbox is started anew from its files where it is resumed \
                 with \"memory\": false",
                names.join(", ")
            );
            Error::new(ErrorKind::Conflict, message).because(error)
        }
        _ => error,
    }
}

fn is_unopened(text: &str) -> bool {
    text.contains("restore") && UNOPENED.iter().any(|said| text.contains(said))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(path: &str) -> VolumeMount {
        VolumeMount { id: VolumeId::random(), name: "v".parse().unwrap(), path: path.parse().unwrap() }
    }

    fn holder(file: &str) -> Holder {
        Holder { pid: 7, program: "tail".into(), file: file.into() }
    }

    #[test]
    fn what_is_not_there_or_on_no_volume_refuses_the_image() {
        let volumes = [volume("/mnt/a")];
        let in_use = [holder("/mnt/a/f"), holder("/mnt/a/g")];
        let wanted_here = wanted(&volumes, &in_use).unwrap();
        assert_eq!(wanted_here.len(), 2);
        let mark = |inode| Some(Mark { inode, file: None });
        let noted = |marks: [Option<Mark>; 2]| -> Vec<_> {
            let each = wanted_here.iter().cloned().zip(marks);
            each.map(|((volume, path), mark)| Noted { volume, path, mark }).collect()
        };
        assert_eq!(gone(&volumes, &in_use, &noted([mark(1), mark(2)])), []);
        assert_eq!(gone(&volumes, &in_use, &noted([mark(1), None])), [holder("/mnt/a/g")]);
        assert_eq!(gone(&volumes, &in_use, &[]), in_use);

        let bound = wanted(&volumes, &[holder("/bound/f")]).unwrap_err();
        assert!(bound.kind() == ErrorKind::Conflict && bound.to_string().contains("/bound/f"), "{bound}");
    }

    #[test]
    fn what_could_not_be_opened_is_told_from_other_failures() {
        assert!(is_unopened("the engine failed: restore: restore failed: no such file or directory"));
        assert!(!is_unopened("make the disk: no such file or directory"));
        assert!(!is_unopened("restore: out of memory"));
    }

    #[test]
    fn a_path_is_on_the_volume_that_it_is_below() {
        let volumes = [volume("/mnt/a"), volume("/mnt/ab")];
        let found = |path| place(&volumes, path).map(|(volume, path)| (volume.path.as_str(), path));
        assert_eq!(found("/mnt/a/f"), Some(("/mnt/a", "/f".into())));
        assert_eq!(found("/mnt/ab"), Some(("/mnt/ab", String::new())));
        assert_eq!((found("/mnt/abc"), found("/etc")), (None, None));
    }
}
