//! Files of the privileged half.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use sandglass_engine::engine::UNUSED;
use sandglass_types::SandboxId;

use super::{Claim, Kind, Object, Scope, is_gone, shown};
use crate::ledger::claim::{network_of_config, sandbox_named};

/// Upper bound for what is read of one file, in bytes. An OCI configuration has some thousand.
const MAX_LEN: u64 = 1024 * 1024;

/// What is in the folders that hold one entry per sandbox, and what was only written half beside them.
pub(super) fn objects(scope: &Scope) -> io::Result<Vec<Object>> {
    let mut objects = Vec::new();
    for folder in ["sandboxes", "runsc", "slots", "images"] {
        for path in entries(&scope.host.join(folder))? {
            let claim = scope.of_path(&path).unwrap_or(Claim::Nobody);
            objects.push(file(&path, claim));
        }
    }
    for (folder, hidden) in [(&scope.host, true), (&scope.data_dir, false)] {
        let temporary = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().as_bytes();
            (hidden && name.starts_with(b"."))
                || [&b".next"[..], b".new", b".tmp"].iter().any(|end| name.ends_with(end))
        };
        let left = entries(folder)?.into_iter().filter(temporary);
        objects.extend(left.map(|path| file(&path, Claim::Nobody)));
    }
    Ok(objects)
}

/// The sandboxes that were made for nobody.
pub(super) fn unused(scope: &Scope) -> io::Result<BTreeSet<SandboxId>> {
    let folders = entries(&scope.host.join("sandboxes"))?.into_iter();
    let unused = folders.filter(|folder| folder.join(UNUSED).exists());
    Ok(unused
        .filter_map(|folder| match sandbox_named(folder.file_name()?.as_bytes()) {
            Claim::Sandbox(id) => Some(id),
            _ => None,
        })
        .collect())
}

fn file(path: &Path, claim: Claim) -> Object {
    Object { kind: Kind::File, name: shown(path.as_os_str().as_bytes()), claim }
}

/// Which sandbox has which slot: as the network remembers it, and as the engine was told.
pub(super) fn configured_slots(scope: &Scope) -> io::Result<BTreeMap<String, SandboxId>> {
    let mut slots = BTreeMap::new();
    for folder in entries(&scope.host.join("sandboxes"))? {
        let Claim::Sandbox(sandbox) = sandbox_named(folder.file_name().unwrap_or_default().as_bytes()) else {
            continue;
        };
        let config = read(&folder.join("bundle/config.json"))?;
        let claim = network_of_config(&config).and_then(|path| scope.of_path(&path));
        if let Some(Claim::Slot(slot)) = claim {
            slots.insert(slot, sandbox);
        }
    }
    for file in entries(&scope.host.join("slots"))? {
        let Claim::Sandbox(sandbox) = sandbox_named(file.file_name().unwrap_or_default().as_bytes()) else {
            continue;
        };
        if let Ok(slot) = String::from_utf8(read(&file)?) {
            slots.insert(slot.trim_end().to_owned(), sandbox);
        }
    }
    Ok(slots)
}

/// What is in a small file; nothing if there is none.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    match std::fs::File::open(path) {
        Ok(file) => file.take(MAX_LEN).read_to_end(&mut content)?,
        Err(error) if is_gone(&error) => 0,
        Err(error) => return Err(error),
    };
    Ok(content)
}

fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs_err::read_dir(folder) {
        Err(error) if is_gone(&error) => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.path())).collect(),
    }
}
