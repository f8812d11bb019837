//! Volumes: file systems of a team that sandboxes share.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::id::VolumeId;

/// Longest name of a volume, in bytes.
pub const MAX_VOLUME_NAME: usize = 128;

/// Longest path that a volume can be mounted at, in bytes.
pub const MAX_MOUNT_PATH: usize = 512;

/// Longest part of such a path, in bytes (`NAME_MAX`).
const MAX_PART: usize = 255;

/// Most volumes of one sandbox.
pub const MAX_VOLUMES: usize = 8;

/// The smallest volume, in MiB: less holds hardly more than a journal.
pub const MIN_VOLUME_MIB: u32 = 16;

/// The largest volume, in MiB: 1 TiB.
pub const MAX_VOLUME_MIB: u32 = 1 << 20;

/// What belongs to the computer and is no place for a volume, and neither is anything below.
const RESERVED: [&str; 10] = [
    "/proc",
    "/dev",
    "/sys",
    "/run",
    "/tmp",
    "/var/run",
    "/lib/sandglass",
    "/usr/lib/sandglass",
    "/etc/sandglass",
    "/lost+found",
];

/// What every program needs as it is. Below them is room.
const NEEDED: [&str; 13] = [
    "/bin", "/boot", "/etc", "/home", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr", "/usr/bin",
    "/usr/lib", "/var",
];

/// What clients call a volume, within its team: 1 to [`MAX_VOLUME_NAME`] of `[a-zA-Z0-9_-]`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeName(Box<str>);

/// Not a [`VolumeName`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the name of a volume must be 1 to {MAX_VOLUME_NAME} characters of a-z, A-Z, 0-9, '-' and '_'")]
pub struct InvalidVolumeName;

/// Where in a sandbox a volume is: an absolute path without `.`, `..` and empty parts, of at most [`MAX_MOUNT_PATH`] bytes
/// without control characters, and none that the computer itself needs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MountPath(Box<str>);

/// Not a [`MountPath`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMountPath {
    /// It is no plain absolute path.
    #[error(
        "must be an absolute path of at most {MAX_MOUNT_PATH} bytes, without '.', '..', control characters and parts of \
         more than {MAX_PART} bytes"
    )]
    Form,
    /// The computer has something there that nothing may cover.
    #[error("is reserved: mount the volume elsewhere, such as at /mnt/NAME")]
    Reserved,
}

/// A volume in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeMount {
    /// Which one.
    pub id: VolumeId,
    /// What its team calls it.
    pub name: VolumeName,
    /// Where it is.
    pub path: MountPath,
}

impl VolumeName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for VolumeName {
    type Err = InvalidVolumeName;

    fn from_str(text: &str) -> Result<Self, InvalidVolumeName> {
        let valid = (1..=MAX_VOLUME_NAME).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
        if valid { Ok(Self(text.into())) } else { Err(InvalidVolumeName) }
    }
}

impl MountPath {
    /// The path as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether one of both is the other, or below it.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        is_at_or_below(&self.0, &other.0) || is_at_or_below(&other.0, &self.0)
    }
}

fn is_at_or_below(path: &str, top: &str) -> bool {
    path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl FromStr for MountPath {
    type Err = InvalidMountPath;

    fn from_str(text: &str) -> Result<Self, InvalidMountPath> {
        let path = text.strip_suffix('/').unwrap_or(text);
        let Some(parts) = path.strip_prefix('/').or_else(|| (text == "/").then_some("")) else {
            return Err(InvalidMountPath::Form);
        };
        if parts.is_empty() {
            return Err(InvalidMountPath::Reserved);
        }
        let plain = |part: &str| {
            !matches!(part, "" | "." | "..") && part.len() <= MAX_PART && !part.chars().any(char::is_control)
        };
        if path.len() > MAX_MOUNT_PATH || !parts.split('/').all(plain) {
            return Err(InvalidMountPath::Form);
        }
        if NEEDED.contains(&path) || RESERVED.iter().any(|top| is_at_or_below(path, top)) {
            return Err(InvalidMountPath::Reserved);
        }
        Ok(Self(path.into()))
    }
}

macro_rules! text_type {
    ($name:ident, $error:ident) => {
        impl TryFrom<String> for $name {
            type Error = $error;

            fn try_from(text: String) -> Result<Self, $error> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.0.into()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

text_type!(VolumeName, InvalidVolumeName);
text_type!(MountPath, InvalidMountPath);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_plain() {
        assert!("my-Volume_1".parse::<VolumeName>().is_ok());
        for text in ["", "a b", "../x", "a/b", "\u{fc}", &"x".repeat(MAX_VOLUME_NAME + 1)] {
            assert_eq!(text.parse::<VolumeName>(), Err(InvalidVolumeName), "{text:?}");
        }
    }

    #[test]
    fn a_volume_is_mounted_where_it_covers_nothing_that_is_needed() {
        let path = |text: &str| text.parse::<MountPath>().map(|path| path.as_str().to_owned());
        for good in
            ["/mnt", "/mnt/data", "/home/user/work", "/data", "/opt/\u{fc}ber x", "/var/lib/x", "/processes"]
        {
            assert_eq!(path(good).as_deref(), Ok(good));
        }
        assert_eq!(path("/mnt/data/").as_deref(), Ok("/mnt/data"));
        for bad in ["", "mnt", "//mnt", "/mnt//x", "/mnt/.", "/mnt/../etc", "/a\nb", "/a\0", "/x//"] {
            assert_eq!(path(bad), Err(InvalidMountPath::Form), "{bad:?}");
        }
        assert_eq!(path(&format!("/{}", "x".repeat(MAX_MOUNT_PATH))), Err(InvalidMountPath::Form));
        for reserved in [
            "/",
            "/proc",
            "/proc/1",
            "/dev/shm",
            "/sys",
            "/run/x",
            "/tmp",
            "/etc",
            "/usr/lib/sandglass/x",
            "/home/",
        ] {
            assert_eq!(path(reserved), Err(InvalidMountPath::Reserved), "{reserved:?}");
        }
    }

    #[test]
    fn one_path_is_in_the_way_of_another() {
        let path = |text: &str| text.parse::<MountPath>().unwrap();
        assert!(path("/mnt/a").overlaps(&path("/mnt/a")));
        assert!(path("/mnt/a").overlaps(&path("/mnt/a/b")) && path("/mnt/a/b").overlaps(&path("/mnt/a")));
        assert!(!path("/mnt/a").overlaps(&path("/mnt/ab")));
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_plain(text in "/?(\\PC{0,6}/){0,4}\\PC{0,6}") {
            if let Ok(path) = text.parse::<MountPath>() {
                prop_assert!(path.as_str().starts_with('/') && !path.as_str().ends_with('/'));
                prop_assert!(path.as_str()[1..].split('/').all(|part| !matches!(part, "" | "." | "..")));
            }
        }
    }
}
