//! The two forms in which the kernel writes its counters.

use std::path::Path;

use super::CgroupError;

/// A file that holds one number.
pub(super) fn single(file: &Path) -> Result<u64, CgroupError> {
    let text = fs_err::read_to_string(file)?;
    text.trim().parse().map_err(|_| CgroupError::Malformed(file.to_owned()))
}

/// A file that holds a line `key number` per counter ("flat keyed").
pub(super) fn keyed(file: &Path, key: &str) -> Result<u64, CgroupError> {
    let text = fs_err::read_to_string(file)?;
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
