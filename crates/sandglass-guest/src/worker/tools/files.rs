//! Files, as the sandbox's user may read and write them.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// Largest file that is read or edited, in bytes.
const MAX_FILE: u64 = 8 << 20;

/// Names that are listed at most, and looked at.
const MAX_NAMES: usize = 500;
const MAX_SEEN: usize = 20_000;

/// How deep a listing goes.
const MAX_DEPTH: usize = 6;

fn open(path: &Path) -> Result<String, String> {
    let say = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    // Of a pipe without a writer, the opening alone could last for ever.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = File::options().read(true).custom_flags(flags).open(path).map_err(|error| say(&error))?;
    let meta = file.metadata().map_err(|error| say(&error))?;
    if !meta.is_file() {
        return Err(say(&if meta.is_dir() { "this is a folder" } else { "this is no file" }));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|error| say(&error))?;
    if u64::try_from(bytes.len()).is_ok_and(|len| len > MAX_FILE) {
        return Err(say(&format!("it has more than {MAX_FILE} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| say(&"it holds no text in UTF-8"))
}

/// The file, or so many lines from one on.
pub(super) fn read(path: &Path, from: Option<usize>, lines: Option<usize>) -> Result<String, String> {
    let text = open(path)?;
    if from.is_none() && lines.is_none() {
        return Ok(text);
    }
    let skipped = from.unwrap_or(1).saturating_sub(1);
    Ok(text.split_inclusive('\n').skip(skipped).take(lines.unwrap_or(usize::MAX)).collect())
}

/// Replaces a file, or makes it.
pub(super) fn write(path: &Path, content: &str) -> Result<(), String> {
    let say = |error: std::io::Error| format!("{}: {error}", path.display());
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(say)?;
    }
    if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        return Err(format!("{}: there is something that is no file", path.display()));
    }
    File::create(path).and_then(|mut file| file.write_all(content.as_bytes())).map_err(say)
}

/// Replaces the one place where a file holds `old`: its length afterwards, in bytes.
pub(super) fn edit(path: &Path, old: &str, new: &str) -> Result<usize, String> {
    let text = open(path)?;
    let times = if old.is_empty() { 0 } else { text.matches(old).take(1000).count() };
    if times != 1 {
        return Err(match times {
            0 => "the old piece is not in the file: read it, and copy the piece exactly".into(),
            _ => format!("the old piece is in the file {times} times: take more of what is around it"),
        });
    }
    let text = text.replacen(old, new, 1);
    write(path, &text)?;
    Ok(text.len())
}

/// What is below a folder. What is linked is named, and not followed.
pub(super) fn list(folder: &Path) -> Result<String, String> {
    let mut names = Vec::new();
    let mut seen = 0;
    walk(folder, "", 0, &mut seen, &mut names).map_err(|error| format!("{}: {error}", folder.display()))?;
    let more = names.len().saturating_sub(MAX_NAMES);
    names.truncate(MAX_NAMES);
    let mut list = names.join("\n");
    if more > 0 || seen >= MAX_SEEN {
        list.push_str("\n[… more are left out: list a folder below this one …]");
    }
    Ok(if list.is_empty() { "(no files)".into() } else { list })
}

fn walk(
    folder: &Path,
    prefix: &str,
    depth: usize,
    seen: &mut usize,
    names: &mut Vec<String>,
) -> std::io::Result<()> {
    let mut entries: Vec<_> = fs::read_dir(folder)?.take(MAX_SEEN - *seen).filter_map(Result::ok).collect();
    *seen += entries.len();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let Ok(meta) = fs::symlink_metadata(entry.path()) else { continue };
        if !meta.is_dir() {
            names.push(format!("{name} ({} bytes)", meta.len()));
            continue;
        }
        // What packages and version control keep is rarely meant, and long.
        let dull = ["node_modules/", ".git/"].iter().any(|dull| format!("{name}/").ends_with(dull));
        names.push(format!("{name}/"));
        if !dull && depth < MAX_DEPTH && names.len() <= MAX_NAMES && *seen < MAX_SEEN {
            // One that can't be read is named all the same.
            let _ = walk(&entry.path(), &format!("{name}/"), depth + 1, seen, names);
        }
    }
    Ok(())
}
