//! Where in a sandbox something is.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest path, in bytes: of the folder, and of a file from the folder on.
pub const MAX_PATH: usize = 1024;

/// Most parts of a path, of either kind.
pub const MAX_DEPTH: usize = 64;

/// Longest part of a path, in bytes (`NAME_MAX`).
const MAX_PART: usize = 255;

/// The file systems of a sandbox on its disk, each of which is read by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tree {
    /// All but what is mounted in it.
    Root,
    /// `/tmp`.
    Tmp,
}

/// A folder of a sandbox: an absolute path of plain parts, at most [`MAX_PATH`] bytes and [`MAX_DEPTH`] parts. More than one
/// `/` is as good as one, and one at its end as none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    tree: Tree,
    /// From the top of the tree on.
    below: String,
}

/// Not a [`Place`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be an absolute path of at most {MAX_PATH} bytes and {MAX_DEPTH} parts, without '.', '..' and NUL characters"
)]
pub struct InvalidPlace;

impl Place {
    /// Where it is looked for.
    #[must_use]
    pub const fn tree(&self) -> Tree {
        self.tree
    }

    /// The path from the top of the tree on, without a `/` at its beginning; empty for the top itself.
    #[must_use]
    pub fn below(&self) -> &str {
        &self.below
    }
}

impl FromStr for Place {
    type Err = InvalidPlace;

    fn from_str(text: &str) -> Result<Self, InvalidPlace> {
        let path = text.strip_prefix('/').filter(|_| text.len() <= MAX_PATH).ok_or(InvalidPlace)?;
        let mut parts: Vec<_> = path.split('/').filter(|part| !part.is_empty()).collect();
        if parts.len() > MAX_DEPTH || !parts.iter().all(|part| is_part(part)) {
            return Err(InvalidPlace);
        }
        let tree = if parts.first() == Some(&"tmp") { Tree::Tmp } else { Tree::Root };
        if tree == Tree::Tmp {
            parts.remove(0);
        }
        Ok(Self { tree, below: parts.join("/") })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.tree, self.below.as_str()) {
            (Tree::Root, below) => write!(f, "/{below}"),
            (Tree::Tmp, "") => f.write_str("/tmp"),
            (Tree::Tmp, below) => write!(f, "/tmp/{below}"),
        }
    }
}

fn is_part(part: &str) -> bool {
    !matches!(part, "" | "." | "..") && part.len() <= MAX_PART && !part.contains('\0')
}

/// Whether this is the path of something inside a folder, from the folder on: plain parts that lead nowhere else.
#[must_use]
pub fn is_inside(path: &str) -> bool {
    path.len() <= MAX_PATH && path.split('/').count() <= MAX_DEPTH && path.split('/').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_plain_absolute_path() {
        for (text, tree, below, shown) in [
            ("/", Tree::Root, "", "/"),
            ("//workspace///project/", Tree::Root, "workspace/project", "/workspace/project"),
            ("/tmp", Tree::Tmp, "", "/tmp"),
            ("/tmp//a/", Tree::Tmp, "a", "/tmp/a"),
            ("/tmpx/tmp", Tree::Root, "tmpx/tmp", "/tmpx/tmp"),
        ] {
            let place: Place = text.parse().unwrap();
            assert_eq!((place.tree(), place.below(), &*place.to_string()), (tree, below, shown));
        }
        let deep = "/x".repeat(MAX_DEPTH);
        assert!(deep.parse::<Place>().is_ok());
        let part = format!("/{}", "x".repeat(256));
        let long = format!("/{}", format!("{}/", "x".repeat(250)).repeat(5));
        for bad in
            ["", "a", "tmp", "/..", "/a/../b", "/a/.", "/tmp/..", "/a\0b", &format!("{deep}/x"), &part, &long]
        {
            assert!(bad.parse::<Place>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_is_inside_leads_nowhere_else() {
        for good in ["a", "a/b", "..a/...", " ", "ü/\n", &format!("x{}", "/x".repeat(63))] {
            assert!(is_inside(good), "{good:?}");
        }
        let long = "x".repeat(256);
        let deep = format!("x{}", "/x".repeat(64));
        let far = format!("{}x", format!("{}/", "x".repeat(250)).repeat(5));
        for bad in ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\0", &long, &deep, &far] {
            assert!(!is_inside(bad), "{bad:?}");
        }
    }
}
