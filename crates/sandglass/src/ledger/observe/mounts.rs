//! Mounts, in this process's mount namespace and in those of others, and the loop devices below them.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use sandglass_linux::loopdev;

use super::{Claim, Kind, Object, Process, Scope, is_gone, shown};

/// One line of a mount table.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mount {
    pub(super) target: PathBuf,
    pub(super) fstype: String,
    pub(super) source: OsString,
    /// The file system's own options: overlayfs names its layers there.
    pub(super) options: Vec<u8>,
}

/// Mounts in every mount namespace that a process is in.
pub(super) fn objects(
    scope: &Scope,
    processes: &[Process],
    unreadable: &mut Vec<String>,
) -> io::Result<Vec<Object>> {
    let loops = loopdev::attached()?;
    let mut objects = Vec::new();
    let mut add = |mounts: &[Mount], place: &str, skip_pins: bool| {
        for mount in mounts {
            // Pins are listed as namespaces already.
            if skip_pins && mount.fstype == "nsfs" {
                continue;
            }
            if let Some(claim) = claim(scope, mount, &loops) {
                let name =
                    format!("{} ({}){place}", shown(mount.target.as_os_str().as_bytes()), mount.fstype);
                objects.push(Object { kind: Kind::Mount, name, claim });
            }
        }
    };
    add(&table("self")?, "", true);
    let mut seen: BTreeSet<u64> = own_namespace().into_iter().collect();
    for process in processes {
        let Some(namespace) = process.mounts else { continue };
        if seen.contains(&namespace) {
            continue;
        }
        match table(&process.pid.to_string()) {
            // An empty table is that of a process that is ending; another one may show the namespace.
            Ok(mounts) if mounts.is_empty() => {}
            Ok(mounts) => {
                seen.insert(namespace);
                add(&mounts, &format!(" seen by process {} ({})", process.pid, process.name), false);
            }
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::InvalidInput => {}
            Err(error) => unreadable.push(format!("mounts of process {}: {error}", process.pid)),
        }
    }
    Ok(objects)
}

/// Loop devices whose file is in the instance's folder.
pub(super) fn loop_devices(scope: &Scope) -> io::Result<Vec<Object>> {
    let attached = loopdev::attached()?;
    let ours = attached.into_iter().filter_map(|(index, file)| Some((index, scope.of_path(&file)?, file)));
    Ok(ours
        .map(|(index, claim, file)| Object {
            kind: Kind::LoopDevice,
            name: format!("/dev/loop{index} ({})", shown(file.as_os_str().as_bytes())),
            claim,
        })
        .collect())
}

fn own_namespace() -> Option<u64> {
    let link = std::fs::read_link("/proc/self/ns/mnt").ok()?;
    super::processes::inode_of(link.as_os_str())
}

/// Whose a mount is: by its place, by what its options or source mention, by the file below its loop device.
fn claim(scope: &Scope, mount: &Mount, loops: &[(u32, PathBuf)]) -> Option<Claim> {
    let by_device = || {
        let index: u32 = mount.source.to_str()?.strip_prefix("/dev/loop")?.parse().ok()?;
        let (_, file) = loops.iter().find(|(attached, _)| *attached == index)?;
        scope.of_path(file)
    };
    scope
        .of_path(&mount.target)
        .or_else(|| scope.of_text(&mount.options))
        .or_else(|| scope.of_path(Path::new(&mount.source)))
        .or_else(by_device)
}

/// The mount table of a process.
pub(super) fn table(process: &str) -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read(format!("/proc/{process}/mountinfo"))?))
}

/// `proc_pid_mountinfo(5)`: the target is field 5; a lone `-` ends the optional fields, then type, source and options
/// follow.
fn parse(text: &[u8]) -> Vec<Mount> {
    let line = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ');
        let target = fields.nth(4)?;
        let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
        let fstype = String::from_utf8(rest.next()?.to_vec()).ok()?;
        let source = OsString::from_vec(unescape(rest.next()?));
        let options = unescape(rest.next().unwrap_or_default());
        Some(Mount { target: OsString::from_vec(unescape(target)).into(), fstype, source, options })
    };
    text.split(|byte| *byte == b'\n').filter_map(line).collect()
}

/// Space, tab, newline, backslash and some others are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let digits =
            tail.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(byte) = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            out.push(byte);
            rest = &tail[3..];
        } else {
            out.push(*first);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaa";

    #[test]
    fn mounts_are_found_by_place_layers_and_device() {
        let scope = Scope::new(Path::new("/srv/s g"), &"inst0001".parse().unwrap());
        let table = format!(
            "36 35 7:7 / /srv/s\\040g/host/sandboxes/{A}/disk rw - ext4 /dev/loop7 rw\n\
             37 35 0:44 / / rw master:1 - overlay overlay rw,lowerdir=/c,upperdir=/srv/s\\134040g/host/x\n\
             38 35 0:44 / / rw - overlay overlay rw,lowerdir=/c,upperdir=/srv/other/host/sandboxes/{A}/up\n\
             39 35 7:7 / /mnt rw - ext4 /dev/loop7 rw\n\
             40 35 7:8 / /mnt rw - ext4 /dev/loop8 rw\n\
             41 35 0:4 net:[7] /srv/s\\040g/host/ns/inst0001-abcde-in rw - nsfs nsfs rw\n\
             42 35 0:9 / /srv/s\\040g rw - tmpfs tmpfs rw\n\n"
        );
        let mounts = parse(table.as_bytes());
        assert_eq!(mounts.len(), 7);
        let loops = [(7, PathBuf::from(format!("/srv/s g/host/sandboxes/{A}/disk.img (deleted)")))];
        let claims: Vec<_> = mounts.iter().map(|mount| claim(&scope, mount, &loops)).collect();
        let sandbox = Some(Claim::Sandbox(A.parse().unwrap()));
        let slot = Some(Claim::Slot("inst0001-abcde".into()));
        assert_eq!(claims, [sandbox.clone(), None, None, sandbox, None, slot, None]);
    }

    #[test]
    fn layers_of_overlays_are_found() {
        let scope = Scope::new(Path::new("/srv/sg"), &"inst0001".parse().unwrap());
        let table = format!(
            "37 35 0:44 / / rw - overlay overlay rw,lowerdir=/c,upperdir=/srv/sg/host/sandboxes/{A}/disk/upper,x\n"
        );
        let mounts = parse(table.as_bytes());
        assert_eq!(claim(&scope, &mounts[0], &[]), Some(Claim::Sandbox(A.parse().unwrap())));
    }

    #[test]
    fn this_process_has_mounts() {
        assert!(table("self").unwrap().iter().any(|mount| mount.target == Path::new("/")));
        assert!(own_namespace().is_some());
    }
}
