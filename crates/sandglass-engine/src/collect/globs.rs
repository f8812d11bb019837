//! Which files are wanted.

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use serde::{Deserialize, Serialize};

/// Most patterns.
pub const MAX_GLOBS: usize = 64;

/// Longest pattern, in bytes.
pub const MAX_GLOB: usize = 256;

/// Patterns of paths from a folder on: `*` and `?` stand for all but `/`, `**` for any folders, `[a-z]` for one of these, and
/// `{a,b}` for either. A name that begins with a `.` is like any other. What is in a folder that is wanted is wanted, too.
/// None at all want everything.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct Globs {
    patterns: Vec<String>,
    set: GlobSet,
}

/// Not [`Globs`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidGlobs {
    /// There are too many.
    #[error("there may be {MAX_GLOBS} patterns")]
    TooMany,
    /// One of them has the wrong form.
    #[error("'{0}' is no pattern of at most {MAX_GLOB} bytes from the folder on, without '.' and '..'")]
    Form(String),
}

impl Globs {
    /// As they were given.
    #[must_use]
    pub fn patterns(&self) -> &[String] {
        &self.patterns
    }

    /// Whether a file or folder of this path from the folder on is wanted: it, or a folder that it is in.
    #[must_use]
    pub fn want(&self, path: &str) -> bool {
        let above = path.match_indices('/').map(|(end, _)| path.get(..end).unwrap_or(path));
        self.patterns.is_empty() || above.chain([path]).any(|path| self.set.is_match(path))
    }
}

impl PartialEq for Globs {
    fn eq(&self, other: &Self) -> bool {
        self.patterns == other.patterns
    }
}

impl Eq for Globs {}

impl From<Globs> for Vec<String> {
    fn from(globs: Globs) -> Self {
        globs.patterns
    }
}

impl TryFrom<Vec<String>> for Globs {
    type Error = InvalidGlobs;

    fn try_from(patterns: Vec<String>) -> Result<Self, InvalidGlobs> {
        if patterns.len() > MAX_GLOBS {
            return Err(InvalidGlobs::TooMany);
        }
        let mut set = GlobSetBuilder::new();
        for pattern in &patterns {
            let form = || InvalidGlobs::Form(pattern.chars().take(MAX_GLOB).collect());
            // `dist/` is what is in it, as `dist` is.
            let plain = pattern.strip_suffix('/').unwrap_or(pattern);
            let parts_are_plain = plain.split('/').all(|part| !matches!(part, "" | "." | ".."));
            if plain.len() > MAX_GLOB || !parts_are_plain || plain.contains('\0') {
                return Err(form());
            }
            let built = GlobBuilder::new(plain).literal_separator(true).backslash_escape(true).build();
            set.add(built.map_err(|_| form())?);
        }
        let set = set.build().map_err(|_| InvalidGlobs::TooMany)?;
        Ok(Self { patterns, set })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn globs(patterns: &[&str]) -> Result<Globs, InvalidGlobs> {
        patterns.iter().map(|&pattern| pattern.to_owned()).collect::<Vec<_>>().try_into()
    }

    #[test]
    fn patterns_want_files_and_what_is_in_folders() {
        for (pattern, wanted, unwanted) in [
            ("*.txt", &["a.txt", ".txt", "d.txt/below"][..], &["a/b.txt", "a.txt2"][..]),
            ("**/*.txt", &["a.txt", "a/b/c.txt"], &["a.md"]),
            ("dist", &["dist", "dist/a", "dist/a/b"], &["dist2", "x/dist", "dis"]),
            ("dist/", &["dist/a"], &["dist2/a"]),
            ("dist/**", &["dist/a", "dist/a/b"], &["a"]),
            ("a?c", &["abc"], &["a/c", "ac"]),
            ("{a,b}/[0-9]", &["a/1", "b/2/c"], &["c/1", "a/x"]),
            (r"\*", &["*"], &["a"]),
        ] {
            let globs = globs(&[pattern]).unwrap();
            for path in wanted {
                assert!(globs.want(path), "{pattern} {path}");
            }
            for path in unwanted {
                assert!(!globs.want(path), "{pattern} {path}");
            }
        }
        assert!(globs(&[]).unwrap().want("any/thing"));
        assert!(globs(&["a", "b"]).unwrap().want("b/x"));
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for bad in
            ["", "/", "/etc/*", "..", "../x", "a/../b", "./a", "a//b", "[a", "{a", "a\0", &"x".repeat(257)]
        {
            assert!(matches!(globs(&[bad]), Err(InvalidGlobs::Form(_))), "{bad:?}");
        }
        assert_eq!(globs(&["a"; MAX_GLOBS + 1]), Err(InvalidGlobs::TooMany));
        assert!(globs(&["a"; MAX_GLOBS]).is_ok());
    }

    #[test]
    fn the_longest_patterns_are_quick() {
        // Each could be matched in a great many ways.
        let pattern = "*a".repeat(MAX_GLOB / 2);
        let globs = globs(&vec![pattern.as_str(); MAX_GLOBS]).unwrap();
        let began = std::time::Instant::now();
        assert!(!globs.want(&format!("{}b", "a".repeat(250))));
        assert!(began.elapsed() < std::time::Duration::from_secs(2), "{:?}", began.elapsed());
    }
}
