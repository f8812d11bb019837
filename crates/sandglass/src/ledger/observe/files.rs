//! Files of the privileged half.

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use sandglass_types::SandboxId;

use super::{Claim, Kind, Object, Scope, is_gone, shown};
use crate::ledger::claim::{network_of_config, sandbox_named};

/// Upper bound of an OCI configuration, in bytes. A real one has some thousand.
const MAX_CONFIG: u64 = 1024 * 1024;

/// What is in the folders that hold one entry per sandbox, and what was only written half beside them.
pub(super) fn objects(scope: &Scope) -> io::Result<Vec<Object>> {
    let mut objects = Vec::new();
    for folder in ["sandboxes", "runsc", "images"] {
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

fn file(path: &Path, claim: Claim) -> Object {
    Object { kind: Kind::File, name: shown(path.as_os_str().as_bytes()), claim }
}

/// Which sandbox is configured to use which slot.
pub(super) fn configured_slots(scope: &Scope) -> io::Result<BTreeMap<String, SandboxId>> {
    let mut slots = BTreeMap::new();
    for folder in entries(&scope.host.join("sandboxes"))? {
        let Claim::Sandbox(sandbox) = sandbox_named(folder.file_name().unwrap_or_default().as_bytes()) else {
            continue;
        };
        let mut config = Vec::new();
        match std::fs::File::open(folder.join("bundle/config.json")) {
            Ok(file) => file.take(MAX_CONFIG).read_to_end(&mut config)?,
            Err(error) if is_gone(&error) => continue,
            Err(error) => return Err(error),
        };
        let claim = network_of_config(&config).and_then(|path| scope.of_path(&path));
        if let Some(Claim::Slot(slot)) = claim {
            slots.insert(slot, sandbox);
        }
    }
    Ok(slots)
}

fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    match fs_err::read_dir(folder) {
        Err(error) if is_gone(&error) => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.path())).collect(),
    }
}
