//! What a template or a user wants to be run in a computer that came back, before anybody uses it: programs that lived
//! through it may have to forget what their copies in other sandboxes know as well.

use std::collections::{BTreeMap, BTreeSet};
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
use crate::process::{basics, c_string, env_strings};
use crate::reaper::{Child, Status};
use crate::settings::Settings;
use crate::users::User;

/// Where they are, below the root: executable files of root's that nobody else can write, run in the order of their names.
const DIR: &str = "etc/sandglass/on-restore.d";

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
    #[error("/{DIR} can't be used: {0}")]
    Folder(io::Error),
    /// A file in it, or a folder on the way to what it links to, can be written by others than root.
    #[error(
        "the hook {0} is not root's alone: chown it and the folders that it is in to root, and take the right to \
         write from others"
    )]
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

/// Whether nobody but this user can write what is at this real path, or put something else there: that takes a right to
/// write in one of the folders that it is in, up to `top`.
fn is_out_of_reach(path: &Path, top: &Path, uid: u32) -> io::Result<bool> {
    for part in path.ancestors().take_while(|part| part.starts_with(top)) {
        if !is_only_for(&std::fs::metadata(part)?, uid) {
            return Ok(false);
        }
    }
    Ok(path.starts_with(top))
}

/// A program to be run.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Hook {
    /// As it is called in the folder.
    name: String,
    /// Where it really is. It is run there: what a link leads to may have changed meanwhile.
    program: PathBuf,
}

/// The hooks of this user's below `top`, which is a real path, in their order. Blocks.
fn hooks_in(top: &Path, uid: u32) -> Result<BTreeSet<Hook>, HookError> {
    let folder = match std::fs::canonicalize(top.join(DIR)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        folder => folder.map_err(HookError::Folder)?,
    };
    if !is_out_of_reach(&folder, top, uid).map_err(HookError::Folder)? {
        return Err(HookError::Folder(io::Error::other(
            "others than root can write it, or a folder that it is in",
        )));
    }
    let mut hooks = BTreeSet::new();
    for entry in std::fs::read_dir(&folder).map_err(HookError::Folder)? {
        let entry = entry.map_err(HookError::Folder)?;
        let Some(name) = entry.file_name().to_str().filter(|name| is_hook(name)).map(str::to_owned) else {
            continue;
        };
        // A link to what is not there is none.
        let Ok(program) = std::fs::canonicalize(entry.path()) else { continue };
        let Ok(meta) = std::fs::metadata(&program) else { continue };
        if !meta.is_file() || meta.mode() & 0o111 == 0 {
            continue;
        }
        if !is_out_of_reach(&program, top, uid).map_err(HookError::Folder)? {
            return Err(HookError::Foreign(name));
        }
        hooks.insert(Hook { name, program });
        if hooks.len() > MAX_HOOKS {
            return Err(HookError::Folder(io::Error::other(format!("it has more than {MAX_HOOKS} hooks"))));
        }
    }
    Ok(hooks)
}

/// What a hook is told. Nothing of it is a client's choice: a `PATH` or an `LD_PRELOAD` of programs that anybody inside can
/// write would make them root.
fn environment(user: &User, settings: &Settings) -> BTreeMap<String, String> {
    let mut env = basics(user);
    env.extend(settings.identity());
    env.insert(GENERATION.into(), settings.generation().to_string());
    env
}

/// Runs all hooks, one after the other, for the generation of these settings.
///
/// # Errors
/// One could not be run, or did not end with 0 in time. Those after it were not run.
pub(crate) async fn run(agent: &Arc<Agent>, settings: &Settings) -> Result<(), HookError> {
    let hooks = agent.blocking.run(|| hooks_in(Path::new("/"), 0)).await?;
    let deadline = Instant::now() + TIME;
    for Hook { name, program } in hooks {
        let not_started = |why: String| HookError::NotStarted(name.clone(), why);
        let user = agent.users().map_err(|error| not_started(error.to_string()))?.by_uid(0);
        let user = user.ok_or_else(|| not_started("there is no root in /etc/passwd".into()))?;
        let settings = settings.clone();
        let (started, child) =
            agent.start(move |agent, child| start(agent, &program, &user, &settings, child)).await;
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
    program: &Path,
    user: &User,
    settings: &Settings,
    child: &Arc<Child>,
) -> Result<Arc<Job>, String> {
    let why = |error: &dyn std::fmt::Display| error.to_string();
    let null = File::options().read(true).write(true).open("/dev/null").map_err(|error| why(&error))?;
    let program = c_string(program.as_os_str().as_encoded_bytes()).map_err(|error| why(&error))?;
    let mut env = env_strings(environment(user, settings)).map_err(|error| why(&error))?;
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
        let top = std::fs::canonicalize(dir.path()).unwrap();
        let own = std::fs::metadata(&top).unwrap().uid();
        let allow =
            |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        let folder = top.join(DIR);
        assert!(hooks_in(&top, own).unwrap().is_empty());
        std::fs::create_dir_all(&folder).unwrap();
        for made in folder.ancestors().take_while(|made| *made != top) {
            allow(made, 0o755);
        }
        let put = |path: &Path, mode| {
            std::fs::write(path, "").unwrap();
            allow(path, mode);
        };
        for (name, mode) in
            [("20-b", 0o755), ("10-a", 0o700), ("README", 0o644), (".hidden", 0o755), ("old~", 0o755)]
        {
            put(&folder.join(name), mode);
        }
        symlink("nowhere", folder.join("30-c")).unwrap();
        symlink("10-a", folder.join("40-d")).unwrap();
        let found = hooks_in(&top, own).unwrap();
        let names = found.iter().map(|hook| hook.name.as_str()).collect::<Vec<_>>();
        assert_eq!(names, ["10-a", "20-b", "40-d"]);
        assert_eq!(found.last().unwrap().program, folder.join("10-a"));
        assert!(matches!(hooks_in(&top, own + 1), Err(HookError::Folder(_))));
        put(&folder.join("50-e"), 0o775);
        assert!(matches!(hooks_in(&top, own), Err(HookError::Foreign(name)) if name == "50-e"));
        std::fs::remove_file(folder.join("50-e")).unwrap();
        // A program of root's that others can exchange for their own.
        let elsewhere = top.join("elsewhere");
        std::fs::create_dir_all(elsewhere.join("deep")).unwrap();
        allow(&elsewhere.join("deep"), 0o755);
        put(&elsewhere.join("deep/program"), 0o755);
        symlink(elsewhere.join("deep/program"), folder.join("60-f")).unwrap();
        allow(&elsewhere, 0o777);
        assert!(matches!(hooks_in(&top, own), Err(HookError::Foreign(name)) if name == "60-f"));
        allow(&elsewhere, 0o755);
        assert_eq!(hooks_in(&top, own).unwrap().len(), 4);
        for open in [folder.as_path(), folder.parent().unwrap()] {
            allow(open, 0o777);
            assert!(matches!(hooks_in(&top, own), Err(HookError::Folder(_))));
            allow(open, 0o755);
        }
    }

    #[test]
    fn a_client_chooses_nothing_of_a_hook_s_environment() {
        let mut configure = crate::settings::tests::configure(None);
        for name in ["PATH", "HOME", "LD_PRELOAD", GENERATION] {
            configure.env.insert(name.into(), "/home/user".into());
        }
        let identity = crate::exec::Identity { uid: 0, gid: 0, groups: vec![] };
        let user = User { name: "root".into(), home: "/root".into(), shell: "/bin/sh".into(), identity };
        let env = environment(&user, &Settings::new(configure));
        let names = env.keys().map(String::as_str).collect::<Vec<_>>();
        let wanted = [
            "E2B_SANDBOX",
            "E2B_SANDBOX_ID",
            "E2B_TEMPLATE_ID",
            "HOME",
            "LOGNAME",
            "PATH",
            GENERATION,
            "USER",
        ];
        assert_eq!(names, wanted);
        assert!(env.values().all(|value| value != "/home/user") && env["E2B_SANDBOX_ID"] == "s");
    }
}
