//! The recipes that are part of this program.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use fs_err as fs;
use sandglass_types::Digest;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

/// How a root file system is built.
#[derive(Debug, Clone)]
pub(super) struct Recipe {
    /// The template's name.
    pub(super) name: &'static str,
    /// Its files by name; `build.sh OUT.tar` builds it.
    pub(super) files: Vec<(&'static str, &'static str)>,
    /// What is not in the files.
    pub(super) meta: Meta,
}

/// The content of `template.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Meta {
    /// Who runs a command when the client names nobody.
    pub(super) user: String,
    /// Where.
    pub(super) workdir: String,
    pub(super) env: BTreeMap<String, String>,
}

macro_rules! embedded {
    ($folder:literal: $($file:literal),+ $(,)?) => {
        vec![$(($file, include_str!(concat!("../../../../templates/", $folder, "/", $file)))),+]
    };
}

/// The recipe named `name`.
pub(super) fn find(name: &str) -> Option<Recipe> {
    match name {
        "base" => Some(Recipe {
            name: "base",
            files: embedded!("base": "apt-sources.sh", "bashrc", "build.sh", "packages", "profile", "setup.sh",
                "template.toml", "user.bashrc", "user.profile"),
            meta: toml::from_str(include_str!("../../../../templates/base/template.toml")).ok()?,
        }),
        _ => None,
    }
}

impl Recipe {
    /// Names what a build of this recipe on a machine with this Debian release gives.
    pub(super) fn key(&self, release: &str) -> Digest {
        let mut hash = Sha256::new();
        let mut field = |bytes: &str| {
            hash.update(u64::try_from(bytes.len()).unwrap_or(u64::MAX).to_le_bytes());
            hash.update(bytes);
        };
        field("sandglass recipe 1");
        field(std::env::consts::ARCH);
        field(release);
        for (name, content) in &self.files {
            field(name);
            field(content);
        }
        Digest::from_bytes(hash.finalize().into())
    }

    /// Writes the files into a new folder.
    pub(super) fn write_to(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir(dir)?;
        self.files.iter().try_for_each(|(name, content)| fs::write(dir.join(name), content))
    }
}

/// The codename in `/etc/os-release` (os-release(5)); empty if there is none, which the build refuses with
/// words of its own.
pub(super) fn release(os_release: &str) -> String {
    os_release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(|value| value.trim_matches(['"', '\'']).to_owned())
        .unwrap_or_default()
}
