//! Control groups, in every hierarchy of either version that is mounted.

use std::io;
use std::os::unix::ffi::OsStrExt as _;

use super::{Claim, Kind, Object, Scope, is_gone, mounts, shown};
use crate::ledger::claim::sandbox_named;

/// The instance's group and those of its sandboxes.
pub(super) fn objects(scope: &Scope) -> io::Result<Vec<Object>> {
    let mut folders: Vec<_> = mounts::table("self")?
        .into_iter()
        .filter(|mount| matches!(mount.fstype.as_str(), "cgroup" | "cgroup2"))
        .map(|mount| mount.target.join(scope.cgroup()))
        .collect();
    folders.sort();
    folders.dedup();
    let mut objects = Vec::new();
    for folder in folders {
        let entries = match fs_err::read_dir(&folder) {
            Err(error) if is_gone(&error) => continue,
            entries => entries?,
        };
        let object = |name: &std::path::Path, claim| Object {
            kind: Kind::Cgroup,
            name: shown(name.as_os_str().as_bytes()),
            claim,
        };
        objects.push(object(&folder, Claim::Instance));
        for entry in entries {
            let entry = entry?;
            let is_group = match entry.file_type() {
                Err(error) if is_gone(&error) => false,
                kind => kind?.is_dir(),
            };
            if is_group {
                objects.push(object(&entry.path(), sandbox_named(entry.file_name().as_bytes())));
            }
        }
    }
    Ok(objects)
}
