//! What a template or a user wants to be run in a computer that came back, before anybody uses it: programs that lived
//! through it may have to forget what their copies in other sandboxes know as well.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::agent::Agent;
use crate::exec::Spawn;
use crate::job::Job;
use crate::process::{c_string, env_strings, environment};
use crate::reaper::{Child, Status};
use crate::settings::Settings;
use crate::users::User;

/// Where they are: executable files of root's that nobody else can write, run in the order of their names.
const DIR: &str = "/etc/sandglass/on-restore.d";

/// Hooks that there may be.
const MAX_HOOKS: usize = 64;

/// How long all of them may take together. The server waits for twice as long.
const TIME: Duration = Duration::from_secs(10);

/// How a hook is told which restore this is.
const GENERATION: &str = "SANDGLASS_GENERATION";

/// A restore that a hook does not let be.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    /// The folder can't be trusted or read.
    #[error("{DIR} can't be used: {0}")]
    Folder(io::Error),
    /// A file in it can be written by others than root.
    #[error("the hook {0} is not root's alone: chown it to root, and take the right to write from others")]
    Foreign(String),
    /// It could not be started.
    #[error("the hook {0} could not be started: {1}")]
    NotStarted(String, String),
    /// It did not end well.
    #[error("the hook {name} ended with {end}")]
    Failed {
        /// Its file's name.
        name: String,
        /// How.
        end: String,
    },
    /// It did not end.
    #[error("the hook {name} took longer than what was left of {} s", TIME.as_secs())]
    Slow {
        /// Its file's name.
        name: String,
    },
}

/// Whether a file of this name is a hook: neither hidden nor what an editor or a package leaves.
fn is_hook(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    !name.starts_with('.') && !name.is_empty() && name.bytes().all(plain)
}

/// Whether nobody but this user can write it.
fn is_only_for(meta: &std::fs::Metadata, uid: u32) -> bool {
    meta.uid() == uid && meta.mode() & 0o022 == 0
}

/// The hooks of a folder of this user's, in their order. Blocks.
fn hooks_in(folder: &Path, uid: u32) -> Result<BTreeSet<PathBuf>, HookError> {
    let meta = match std::fs::metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        meta => meta.map_err(HookError::Folder)?,
    };
    if !is_only_for(&meta, uid) {
        return Err(HookError::Folder(io::Error::other("others than root can write it")));
    }
    let mut hooks = BTreeSet::new();
    for entry in std::fs::read_dir(folder).map_err(HookError::Folder)? {
        let entry = entry.map_err(HookError::Folder)?;
        let Some(name) = entry.file_name().to_str().filter(|name| is_hook(name)).map(str::to_owned) else {
            continue;
        };
        // A link to what is not there is none.
        let Ok(meta) = std::fs::metadata(entry.path()) else { continue };
        if !meta.is_file() || meta.mode() & 0o111 == 0 {
            continue;
        }
        if !is_only_for(&meta, uid) {
            return Err(HookError::Foreign(name));
        }
        hooks.insert(entry.path());
        if hooks.len() > MAX_HOOKS {
            return Err(HookError::Folder(io::Error::other(format!("it has more than {MAX_HOOKS} hooks"))));
        }
    }
    Ok(hooks)
}

/// Runs all hooks, one after the other, for the generation of these settings.
///
/// # Errors
/// One could not be run, or did not end with 0 in time. Those after it were not run.
pub(crate) async fn run(agent: &Arc<Agent>, settings: &Settings) -> Result<(), HookError> {
    let hooks = agent.blocking.run(|| hooks_in(Path::new(DIR), 0)).await?;
    let deadline = Instant::now() + TIME;
    for hook in hooks {
        let name = hook.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let not_started = |why: String| HookError::NotStarted(name.clone(), why);
        let user = agent.users().map_err(|error| not_started(error.to_string()))?.by_uid(0);
        let user = user.ok_or_else(|| not_started("there is no root in /etc/passwd".into()))?;
        let settings = settings.clone();
        let (started, child) =
            agent.start(move |agent, child| start(agent, &hook, &user, &settings, child)).await;
        let job = started.map_err(not_started)?;
        let ended = timeout_at(deadline, child.wait()).await;
        // Whatever it has left is not wanted: a service is started by the template.
        let ending = Arc::clone(agent);
        agent
            .blocking
            .run(move || {
                if let Err(error) = job.kill() {
                    crate::log::line(&format!("what a hook left could not be ended: {error}"));
                }
                ending.jobs.retire(job);
            })
            .await;
        match ended {
            Ok(Status::Exited(0)) => {}
            Ok(end) => return Err(HookError::Failed { name, end: said(end) }),
            Err(_elapsed) => return Err(HookError::Slow { name }),
        }
    }
    Ok(())
}

fn said(end: Status) -> String {
    match end {
        Status::Exited(code) => format!("code {code}"),
        Status::Signaled(signal) => format!("signal {signal}"),
    }
}

/// Starts a hook in a group of its own. Blocks.
fn start(
    agent: &Agent,
    hook: &Path,
    user: &User,
    settings: &Settings,
    child: &Arc<Child>,
) -> Result<Arc<Job>, String> {
    let why = |error: &dyn std::fmt::Display| error.to_string();
    let null = File::options().read(true).write(true).open("/dev/null").map_err(|error| why(&error))?;
    let program = c_string(hook.as_os_str().as_encoded_bytes()).map_err(|error| why(&error))?;
    let generation = (GENERATION.to_owned(), settings.generation().to_string());
    let mut env = env_strings(environment(user, settings, [generation])).map_err(|error| why(&error))?;
    let job = agent.jobs.create().map_err(|error| why(&error))?;
    let procs = job.open().map_err(|error| why(&error))?;
    job.mark(&mut env);
    let request = Spawn {
        args: vec![program.clone()],
        program,
        env,
        cwd: c"/".into(),
        identity: Some(&user.identity),
        stdio: [null.as_fd(); 3],
        terminal: None,
        join: procs.as_ref().map(|procs| procs.as_fd()),
        max_processes: settings.max_processes(),
    };
    match agent.reaper.spawn(&request, child) {
        Ok(()) => Ok(job),
        Err(error) => {
            agent.jobs.retire(job);
            Err(format!("{error}: {}", error.errno))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn hooks_are_programs_of_root_alone_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::fs::metadata(dir.path()).unwrap().uid();
        let folder = dir.path().join("on-restore.d");
        assert!(hooks_in(&folder, own).unwrap().is_empty());
        std::fs::create_dir(&folder).unwrap();
        let put = |name: &str, mode| {
            let path = folder.join(name);
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        };
        for (name, mode) in
            [("20-b", 0o755), ("10-a", 0o700), ("README", 0o644), (".hidden", 0o755), ("old~", 0o755)]
        {
            put(name, mode);
        }
        symlink("nowhere", folder.join("30-c")).unwrap();
        symlink("10-a", folder.join("40-d")).unwrap();
        let names = |hooks: BTreeSet<PathBuf>| -> Vec<String> {
            hooks.iter().map(|hook| hook.file_name().unwrap().to_str().unwrap().to_owned()).collect()
        };
        assert_eq!(names(hooks_in(&folder, own).unwrap()), ["10-a", "20-b", "40-d"]);
        assert!(matches!(hooks_in(&folder, own + 1), Err(HookError::Folder(_))));
        put("50-e", 0o775);
        assert!(matches!(hooks_in(&folder, own), Err(HookError::Foreign(name)) if name == "50-e"));
        std::fs::remove_file(folder.join("50-e")).unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).unwrap();
        assert!(matches!(hooks_in(&folder, own), Err(HookError::Folder(_))));
    }
}
