//! Mounts: reading the tables of them, and making namespaces of them.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

mod namespace;

pub use namespace::{Mount, MountError, MountNamespace, Propagation};

/// One line of a mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Where it is mounted, as seen by the process whose table this is.
    pub target: PathBuf,
    /// The file system's type.
    pub fstype: String,
    /// What is mounted: a device, a path, or a name without meaning.
    pub source: OsString,
}

/// Reads the mount table of a process; `None` means the calling one.
///
/// # Errors
/// The process is gone, or `/proc` is not mounted.
pub fn table(pid: Option<i32>) -> io::Result<Vec<MountEntry>> {
    let path = pid.map_or_else(|| "/proc/self/mountinfo".into(), |pid| format!("/proc/{pid}/mountinfo"));
    Ok(parse(&fs_err::read(path)?))
}

/// The mounts at or below a path in the calling process's table.
///
/// # Errors
/// As [`table`].
pub fn below(path: &Path) -> io::Result<Vec<MountEntry>> {
    Ok(table(None)?.into_iter().filter(|entry| entry.target.starts_with(path)).collect())
}

fn parse(text: &[u8]) -> Vec<MountEntry> {
    text.split(|byte| *byte == b'\n').filter_map(entry).collect()
}

/// `proc_pid_mountinfo(5)`: the target is field 5; a lone `-` ends the optional fields, then type and source follow.
fn entry(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let target = fields.nth(4)?;
    let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
    let fstype = String::from_utf8(rest.next()?.to_vec()).ok()?;
    Some(MountEntry {
        target: OsString::from_vec(unescape(target)).into(),
        fstype,
        source: OsString::from_vec(unescape(rest.next()?)),
    })
}

/// Space, tab, newline and backslash are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|_| *first == b'\\').and_then(|digits| {
            let text = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(text, 8).ok()
        });
        match octal {
            Some(byte) => {
                out.push(byte);
                rest = tail.get(3..).unwrap_or_default();
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_fields_and_escapes_are_understood() {
        let text =
            b"36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue\n\
                     124 123 7:0 /tmp /a rw - tmpfs none rw\n\ngarbage\n";
        let entries = parse(text);
        assert_eq!(entries.len(), 2);
        assert_eq!(entries[0].target, Path::new("/mnt 2"));
        assert_eq!((entries[0].fstype.as_str(), entries[0].source.to_str()), ("ext3", Some("/dev/root")));
        assert_eq!(entries[1].target, Path::new("/a"));
        assert_eq!(unescape(b"a\\"), b"a\\");
        assert_eq!(unescape(b"\\999"), b"\\999");
    }

    #[test]
    fn this_process_has_a_root() {
        assert!(table(None).unwrap().iter().any(|entry| entry.target == Path::new("/")));
    }
}
