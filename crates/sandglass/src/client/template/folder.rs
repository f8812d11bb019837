//! The folder of a template: its `template.toml`, and the files that its setup script needs.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};
use fs_err as fs;
use serde_json::Value;

/// What the folder says of the template.
const DEFINITION: &str = "template.toml";

/// The most that all files may have together, in bytes: they are in memory while the script runs.
const MAX_BYTES: u64 = 16 << 20;

/// The most files, and the deepest folder.
const MAX_FILES: usize = 1000;
const MAX_DEPTH: usize = 16;

/// A file of the folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct File {
    /// Its path from there.
    pub(super) name: String,
    pub(super) content: Vec<u8>,
    /// Whether it can be executed.
    pub(super) is_program: bool,
}

/// All that is sent to a server.
#[derive(Debug)]
pub(super) struct Folder {
    /// The fields of `template.toml`, for the server to check.
    pub(super) definition: Value,
    /// The script among the files that sets the template up.
    pub(super) setup: Option<String>,
    pub(super) files: Vec<File>,
}

impl Folder {
    /// Reads it. A template without a name has that of its folder.
    pub(super) fn read(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join(DEFINITION);
        let text = fs::read_to_string(&path).context("a template is a folder with a template.toml")?;
        let mut table: toml::Table =
            text.parse().with_context(|| format!("{} is no TOML", path.display()))?;
        if !table.contains_key("name") {
            let real = fs::canonicalize(dir)?;
            let name = real.file_name().and_then(|name| name.to_str());
            let name =
                name.context("the folder has no name to call the template by: say `name` in template.toml")?;
            table.insert("name".into(), name.into());
        }
        let setup = table.get("setup").and_then(toml::Value::as_str).map(str::to_owned);
        let mut files = Vec::new();
        if let Some(setup) = &setup {
            collect(dir, "", 0, &mut 0, &mut files)?;
            if !files.iter().any(|file| file.name == *setup) {
                bail!("{} says setup = {setup:?}, which is no file of the folder", path.display());
            }
        }
        Ok(Self { definition: serde_json::to_value(table)?, setup, files })
    }

    /// What the template will be called.
    pub(super) fn name(&self) -> &str {
        self.definition["name"].as_str().unwrap_or_default()
    }
}

fn collect(
    dir: &Path,
    prefix: &str,
    depth: usize,
    bytes: &mut u64,
    files: &mut Vec<File>,
) -> anyhow::Result<()> {
    let mut entries: Vec<_> = fs::read_dir(dir)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let file_name = entry.file_name();
        let name = file_name
            .to_str()
            .with_context(|| format!("{}: a name that is no text", entry.path().display()))?;
        let (name, kind) = (format!("{prefix}{name}"), entry.file_type()?);
        if kind.is_dir() && depth < MAX_DEPTH {
            collect(&entry.path(), &format!("{name}/"), depth + 1, bytes, files)?;
        } else if kind.is_file() {
            if name == DEFINITION {
                continue;
            }
            let about = entry.metadata()?;
            *bytes += about.len();
            if *bytes > MAX_BYTES || files.len() >= MAX_FILES {
                bail!(
                    "the folder has more than {} MiB or {MAX_FILES} files: let the setup script fetch what is large",
                    MAX_BYTES >> 20
                );
            }
            let is_program = about.permissions().mode() & 0o111 != 0;
            files.push(File { name, content: fs::read(entry.path())?, is_program });
        } else {
            bail!(
                "{}: only files and folders can be sent, no links or anything else, at most {MAX_DEPTH} deep",
                entry.path().display()
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_read_with_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let web = dir.path().join("web");
        fs::create_dir_all(web.join("conf")).unwrap();
        fs::write(web.join("template.toml"), "setup = \"setup.sh\"\nmemory_mib = 512\n").unwrap();
        assert!(Folder::read(&web).unwrap_err().to_string().contains("no file of the folder"));
        fs::write(web.join("setup.sh"), "true").unwrap();
        fs::set_permissions(web.join("setup.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(web.join("conf/a"), "x").unwrap();
        let folder = Folder::read(&web).unwrap();
        assert_eq!((folder.name(), folder.setup.as_deref()), ("web", Some("setup.sh")));
        assert_eq!(folder.definition["memory_mib"], 512);
        let files: Vec<_> = folder.files.iter().map(|file| (file.name.as_str(), file.is_program)).collect();
        assert_eq!(files, [("conf/a", false), ("setup.sh", true)]);
        std::os::unix::fs::symlink("/etc/shadow", web.join("link")).unwrap();
        assert!(Folder::read(&web).unwrap_err().to_string().contains("no links"));
        fs::remove_file(web.join("link")).unwrap();
        fs::write(web.join("large"), vec![0; 17 << 20]).unwrap();
        assert!(Folder::read(&web).unwrap_err().to_string().contains("16 MiB"));
    }

    #[test]
    fn a_folder_without_a_script_sends_nothing() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Folder::read(dir.path()).unwrap_err().to_string().contains("template.toml"));
        fs::write(dir.path().join("template.toml"), "name = \"other\"\n").unwrap();
        fs::write(dir.path().join("more"), "").unwrap();
        let folder = Folder::read(dir.path()).unwrap();
        assert_eq!((folder.name(), folder.files.len()), ("other", 0));
        fs::write(dir.path().join("template.toml"), "name =").unwrap();
        assert!(Folder::read(dir.path()).unwrap_err().to_string().contains("no TOML"));
    }
}
