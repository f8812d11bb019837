//! What the kernel writes into the files of a group.

use std::io;
use std::path::Path;

use super::CgroupError;

/// The text of a file. A group can vanish between opening its file and reading it, which is `NotFound` as well.
pub(super) fn text(file: &Path) -> io::Result<String> {
    // Not by `fs_err`, whose errors hide their number.
    std::fs::read_to_string(file).map_err(|error| {
        let gone = error.raw_os_error() == Some(libc::ENODEV);
        let kind = if gone { io::ErrorKind::NotFound } else { error.kind() };
        io::Error::new(kind, format!("{}: {error}", file.display()))
    })
}

/// A file that holds one number.
pub(super) fn single(file: &Path) -> Result<u64, CgroupError> {
    let text = text(file)?;
    text.trim().parse().map_err(|_| CgroupError::Malformed(file.to_owned()))
}

/// A file that holds a line `key number` per counter ("flat keyed").
pub(super) fn keyed(file: &Path, key: &str) -> Result<u64, CgroupError> {
    let text = text(file)?;
    value_of(&text, key).ok_or_else(|| CgroupError::Malformed(file.to_owned()))
}

fn value_of(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_matched_whole() {
        let events = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n";
        assert_eq!(value_of(events, "oom_kill"), Some(2));
        assert_eq!(value_of(events, "oom"), Some(3));
        assert_eq!(value_of(events, "max"), Some(12));
        assert_eq!(value_of(events, "oom_"), None);
        assert_eq!(value_of("oom_kill x\n", "oom_kill"), None);
        assert_eq!(value_of("", "max"), None);
        // Version 1 writes states and counters into one file.
        assert_eq!(value_of("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n", "oom_kill"), Some(7));
    }
}
