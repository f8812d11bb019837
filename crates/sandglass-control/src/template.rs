//! Templates: prepared root file systems that sandboxes start from.
//!
//! A template is built from a recipe that is part of this program. The result lives in the cache folder
//! that all servers of a machine share, and is named by its content:
//!
//! ```text
//! <cache>/templates/base.KEY.json   what the recipe KEY gave: a Template
//! <cache>/templates/base.lock       held by the server that prepares it
//! <cache>/rootfs/<digest>/          one root file system, never changed after it appeared
//! <cache>/build/                    scratch folders of the server that holds the lock
//! ```
//!
//! A changed recipe, or a new release of the machine's Debian, gives a new root file system beside the old
//! one, which running sandboxes and servers of another version still use. All functions block.

mod build;
mod recipe;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use fs_err as fs;
use rustix::fs::FlockOperation;
use sandglass_engine::gvisor::cache;
use sandglass_store::CommandDefaults;
use sandglass_types::error::Chain;
use sandglass_types::{Clock as _, Digest, SystemClock, Timestamp};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

pub use build::BuildFailure;
use recipe::Recipe;

/// Longest record that [`load`] reads, in bytes.
const MAX_RECORD: u64 = 64 * 1024;

/// A template that is ready to use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// Its name: `[a-z0-9_-]`, at most 64 characters.
    pub name: String,
    /// The recipe and the release that it was built from.
    pub recipe: Digest,
    /// The root file system, by content.
    pub rootfs: Digest,
    /// When it was built.
    pub built_at: Timestamp,
    /// The Debian release inside, for people: `bookworm`.
    pub release: String,
    /// Who runs a command when the client names nobody.
    pub default_user: String,
    /// Where that command runs; empty for its user's home.
    pub default_workdir: String,
    /// The environment of every command, before the sandbox's and the command's own variables.
    pub env: BTreeMap<String, String>,
}

impl Template {
    /// What commands have that say nothing else.
    #[must_use]
    pub fn defaults(&self) -> CommandDefaults {
        CommandDefaults {
            user: self.default_user.clone(),
            workdir: self.default_workdir.clone(),
            env: self.env.clone(),
        }
    }
}

/// A template that could not be read or prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// There is no recipe of that name.
    #[error("there is no template {0:?}")]
    Unknown(String),
    /// Building needs root.
    #[error("preparing the template {0:?} needs root: start the server as root once")]
    NotRoot(String),
    /// The build script failed.
    #[error("the template {name:?} could not be built: {}; the last lines of the build:\n{tail}", failure.remedy())]
    Build {
        /// Which template.
        name: String,
        /// Why, as far as the output tells.
        failure: BuildFailure,
        /// The end of the build's output.
        tail: String,
    },
    /// The record in the cache folder is not one of ours.
    #[error("{path} is not a template record: remove it, and the server prepares the template again")]
    Record {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A step on the file system failed.
    #[error("{step} failed")]
    Step {
        /// Which one, as a verb phrase.
        step: &'static str,
        /// Why, with the path.
        #[source]
        source: io::Error,
    },
}

/// Names the step of an I/O error.
trait Context<T> {
    fn step(self, step: &'static str) -> Result<T, TemplateError>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn step(self, step: &'static str) -> Result<T, TemplateError> {
        self.map_err(|source| TemplateError::Step { step, source: source.into() })
    }
}

/// Where root file systems live in a cache folder.
#[must_use]
pub fn rootfs_dir(cache_dir: &Path, rootfs: Digest) -> PathBuf {
    cache_dir.join("rootfs").join(rootfs.to_string())
}

/// Reads what this program's recipe of that name gave on this machine, without any privilege. `None` if it was
/// never prepared, or there is no such recipe.
///
/// # Errors
/// The record is there but can't be read.
pub fn load(cache_dir: &Path, name: &str) -> Result<Option<Template>, TemplateError> {
    match recipe::find(name) {
        Some(recipe) => read_record(cache_dir, name, recipe.key(&release()?)),
        None => Ok(None),
    }
}

/// The template of that name for an engine whose sandboxes have no files of their own: they see this machine's, there is
/// nothing to build, and a command runs at home.
///
/// # Errors
/// There is no such recipe, or the machine does not say which release it is.
pub fn unbuilt(name: &str) -> Result<Template, TemplateError> {
    let recipe = recipe::find(name).ok_or_else(|| TemplateError::Unknown(name.to_owned()))?;
    let release = release()?;
    Ok(Template {
        name: recipe.name.to_owned(),
        recipe: recipe.key(&release),
        // The content of nothing.
        rootfs: Digest::from_bytes(Sha256::digest(b"").into()),
        built_at: SystemClock.now(),
        release,
        default_user: recipe.meta.user,
        default_workdir: String::new(),
        env: recipe.meta.env,
    })
}

/// The Debian release of this machine.
fn release() -> Result<String, TemplateError> {
    let os_release = fs::read_to_string("/etc/os-release").step("reading the release of this machine")?;
    Ok(recipe::release(&os_release))
}

fn read_record(cache_dir: &Path, name: &str, key: Digest) -> Result<Option<Template>, TemplateError> {
    let path = record_path(cache_dir, name, key);
    let mut text = String::new();
    match fs::File::open(&path) {
        Ok(file) => file.take(MAX_RECORD).read_to_string(&mut text).step("reading the template")?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).step("reading the template"),
    };
    serde_json::from_str(&text).map(Some).map_err(|source| TemplateError::Record { path, source })
}

/// Makes sure that a template is ready, which takes about a minute the first time and nothing afterwards.
/// Of several servers that call it at once, one builds and the others wait. Needs root, and a package
/// mirror when there is something to build. `progress` gets one line per step that takes long.
///
/// # Errors
/// There is no such recipe, this machine can't build it, or a step failed.
pub fn prepare(
    cache_dir: &Path,
    name: &str,
    mut progress: impl FnMut(&str),
) -> Result<Template, TemplateError> {
    let recipe = recipe::find(name).ok_or_else(|| TemplateError::Unknown(name.to_owned()))?;
    prepare_recipe(cache_dir, &recipe, &release()?, &mut progress)
}

fn prepare_recipe(
    cache_dir: &Path,
    recipe: &Recipe,
    release: &str,
    progress: &mut dyn FnMut(&str),
) -> Result<Template, TemplateError> {
    let key = recipe.key(release);
    let prepared = || -> Result<_, TemplateError> {
        let Some(template) = read_record(cache_dir, recipe.name, key)? else { return Ok(None) };
        // Whoever removes what nobody needs leaves it alone from now on, until it is needed.
        let there = cache::touch(cache_dir, &rootfs_dir(cache_dir, template.rootfs));
        Ok(there.step("looking at the root file system")?.then_some(template))
    };
    if !rustix::process::geteuid().is_root() {
        return Err(TemplateError::NotRoot(recipe.name.to_owned()));
    }
    // The record appears by a rename, so that a reader needs no lock.
    if let Some(template) = prepared()? {
        clear_up(cache_dir, recipe.name);
        return Ok(template);
    }
    make_folders(cache_dir)?;
    let _lock = lock(cache_dir, recipe.name, progress)?;
    if let Some(template) = prepared()? {
        return Ok(template);
    }
    let started = Instant::now();
    progress(&format!("preparing the template {:?}: once, about a minute", recipe.name));
    let template = build_template(cache_dir, recipe, release, progress)?;
    progress(&format!("the template {:?} is ready after {} s", recipe.name, started.elapsed().as_secs()));
    Ok(template)
}

/// Builds, unpacks and records. The caller holds the lock.
fn build_template(
    cache_dir: &Path,
    recipe: &Recipe,
    release: &str,
    progress: &mut dyn FnMut(&str),
) -> Result<Template, TemplateError> {
    remove_leftovers(cache_dir, recipe.name)?;
    let work = scratch(cache_dir, recipe.name)?;
    let tar = work.path().join("rootfs.tar");
    let tmp = work.path().join("tmp");
    fs::create_dir(&tmp)
        .and_then(|()| fs::set_permissions(&tmp, Permissions::from_mode(0o711)))
        .step("making the build folder")?;
    let recipe_dir = work.path().join("recipe");
    recipe.write_to(&recipe_dir).step("writing the recipe")?;
    build::run(recipe.name, &recipe_dir, &tar, &tmp, progress)?;

    progress("unpacking the root file system");
    let rootfs = sha256_of(&tar).step("reading the built root file system")?;
    let unpacked = scratch(cache_dir, recipe.name)?;
    unpack(&tar, unpacked.path())?;
    // Only what is safely on disk may carry a digest as its name.
    File::open(unpacked.path())
        .and_then(|dir| Ok(rustix::fs::syncfs(dir)?))
        .step("writing the root file system to disk")?;
    let target = rootfs_dir(cache_dir, rootfs);
    match fs::rename(unpacked.path(), &target) {
        Ok(()) => drop(unpacked.keep()),
        // The same content is there already, whole, because it only ever appears by this rename.
        Err(_) if cache::touch(cache_dir, &target).step("looking at the root file system")? => {}
        Err(e) => return Err(e).step("placing the root file system"),
    }

    let template = Template {
        name: recipe.name.to_owned(),
        recipe: recipe.key(release),
        rootfs,
        built_at: SystemClock.now(),
        release: release.to_owned(),
        default_user: recipe.meta.user.clone(),
        default_workdir: recipe.meta.workdir.clone(),
        env: recipe.meta.env.clone(),
    };
    record(cache_dir, &template)?;
    Ok(template)
}

fn record_path(cache_dir: &Path, name: &str, key: Digest) -> PathBuf {
    cache_dir.join("templates").join(format!("{name}.{key}.json"))
}

/// The record is for every user to read; the root file systems, which hold set-uid programs, are not. apt
/// downloads as a user of its own, which must be able to reach its folder in `build`.
fn make_folders(cache_dir: &Path) -> Result<(), TemplateError> {
    for (dir, mode) in [("", 0o755), ("templates", 0o755), ("rootfs", 0o700), ("build", 0o711)] {
        let dir = cache_dir.join(dir);
        fs::create_dir_all(&dir)
            .and_then(|()| fs::set_permissions(&dir, Permissions::from_mode(mode)))
            .step("making the cache folder")?;
    }
    Ok(())
}

/// Waits until no other server prepares this template. Dropping the file, also by a crash, ends the lock.
fn lock(cache_dir: &Path, name: &str, progress: &mut dyn FnMut(&str)) -> Result<File, TemplateError> {
    let step = "locking the template";
    let (file, locked) = try_lock(cache_dir, name)?;
    if locked {
        return Ok(file);
    }
    progress(&format!("waiting for another server that prepares the template {name:?}"));
    rustix::io::retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::LockExclusive)).step(step)?;
    Ok(file)
}

/// The file of the lock, and whether it was free and is held now.
fn try_lock(cache_dir: &Path, name: &str) -> Result<(File, bool), TemplateError> {
    let step = "locking the template";
    let path = cache_dir.join("templates").join(format!("{name}.lock"));
    let file =
        fs::OpenOptions::new().write(true).create(true).truncate(false).open(path).step(step)?.into_parts().0;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok((file, true)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok((file, false)),
        Err(e) => Err(e).step(step),
    }
}

/// Removes what a crashed build of a template left that is ready by now, unless somebody builds it. No server needs that to
/// start.
fn clear_up(cache_dir: &Path, name: &str) {
    let cleared = try_lock(cache_dir, name)
        .and_then(|(_lock, locked)| if locked { remove_leftovers(cache_dir, name) } else { Ok(()) });
    if let Err(error) = cleared {
        tracing::warn!(template = name, error = %Chain(&error), "what a crashed build left stays");
    }
}

/// A folder that is removed when dropped, on the file system of the cache.
fn scratch(cache_dir: &Path, name: &str) -> Result<tempfile::TempDir, TemplateError> {
    tempfile::Builder::new()
        .prefix(&scratch_prefix(name))
        .permissions(Permissions::from_mode(0o711))
        .tempdir_in(cache_dir.join("build"))
        .step("making the build folder")
}

/// Never the start of another template's prefix, because names hold no dot.
fn scratch_prefix(name: &str) -> String {
    format!("{name}.")
}

/// Removes what a crashed build left. The caller holds the lock, so nobody uses it.
fn remove_leftovers(cache_dir: &Path, name: &str) -> Result<(), TemplateError> {
    let step = "removing what a crashed build left";
    let prefix = scratch_prefix(name);
    let mounts = fs::read_to_string("/proc/self/mountinfo").step(step)?;
    for entry in fs::read_dir(cache_dir.join("build")).step(step)? {
        let entry = entry.step(step)?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            if has_mount(&mounts, &entry.path()) {
                return Err(io::Error::other(format!(
                    "{}: something is mounted in it",
                    entry.path().display()
                )))
                .step(step);
            }
            fs::remove_dir_all(entry.path()).step(step)?;
        }
    }
    Ok(())
}

/// Whether anything is mounted at or under `path` (proc_pid_mountinfo(5): the fifth field is the place). A
/// recursive removal would go on into the machine's own folders.
fn has_mount(mountinfo: &str, path: &Path) -> bool {
    mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .any(|place| Path::new(place).starts_with(path))
}

fn sha256_of(path: &Path) -> io::Result<Digest> {
    let mut file = fs::File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(Digest::from_bytes(hash.finalize().into())),
            n => hash.update(&buffer[..n]),
        }
    }
}

fn unpack(tar: &Path, into: &Path) -> Result<(), TemplateError> {
    let step = "unpacking the root file system";
    let output = Command::new("tar")
        .args(["--numeric-owner", "--xattrs", "--xattrs-include=*", "-xpf"])
        .arg(tar)
        .arg("-C")
        .arg(into)
        .stdin(Stdio::null())
        .output()
        .step(step)?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())).step(step)
}

fn record(cache_dir: &Path, template: &Template) -> Result<(), TemplateError> {
    let step = "recording the template";
    let path = record_path(cache_dir, &template.name, template.recipe);
    let json = serde_json::to_vec_pretty(template).map_err(io::Error::from).step(step)?;
    let mut file = tempfile::NamedTempFile::new_in(cache_dir.join("templates")).step(step)?;
    file.as_file().set_permissions(Permissions::from_mode(0o644)).step(step)?;
    file.write_all(&json).and_then(|()| file.as_file().sync_all()).step(step)?;
    file.persist(path).map_err(|e| e.error).step(step)?;
    Ok(())
}
