//! Decides what a request to start a program means: its environment, its directory, the file to execute.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::Path;

use connectrpc::ConnectError;
use sandglass_proto::services::process::ProcessConfig;

use crate::settings::Settings;
use crate::users::User;

/// `PATH` of every program, unless something else was set.
pub(crate) const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Arguments and environment together, in bytes: what Linux takes with its usual stack limit.
const MAX_STRINGS: usize = 2 << 20;

/// A request that was understood.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// The file to execute.
    pub program: CString,
    /// The arguments, the name first.
    pub args: Vec<CString>,
    /// The whole environment.
    pub env: Vec<CString>,
    /// The working directory.
    pub cwd: CString,
}

/// The environment of a user's program before anybody has added to it.
pub(crate) fn basics(user: &User) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("PATH".into(), DEFAULT_PATH.into()),
        ("HOME".into(), user.home.clone()),
        ("USER".into(), user.name.clone()),
        ("LOGNAME".into(), user.name.clone()),
    ])
}

/// The environment: later ones win.
fn environment(
    user: &User,
    settings: &Settings,
    request: impl IntoIterator<Item = (String, String)>,
) -> BTreeMap<String, String> {
    let mut env = basics(user);
    env.extend(settings.env());
    env.extend(request);
    env
}

/// An absolute path: `~` is the user's home, relative paths start there, and an empty one is the default.
///
/// # Errors
/// `~other`: only the own home has a short name.
pub(crate) fn absolute(path: &str, user: &User, settings: &Settings) -> Result<String, ConnectError> {
    let home = user.home.trim_end_matches('/');
    match path {
        "" => match settings.default_workdir() {
            Some(dir) if dir.starts_with('/') => Ok(dir.into()),
            Some(dir) => Ok(format!("{home}/{dir}")),
            None => Ok(user.home.clone()),
        },
        "~" => Ok(user.home.clone()),
        _ if path.starts_with('/') => Ok(path.into()),
        _ => match path.strip_prefix('~') {
            Some(rest) if rest.starts_with('/') => Ok(format!("{home}{rest}")),
            Some(_) => {
                Err(ConnectError::invalid_argument("home directories of other users have no short name"))
            }
            None => Ok(format!("{home}/{path}")),
        },
    }
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// The file that a name stands for. A name with a slash is a path; others are looked up in `path`, of which
/// only absolute directories count.
pub(crate) fn look_up(name: &str, path: &str) -> Option<String> {
    if name.is_empty() {
        return None;
    }
    if name.contains('/') {
        return Some(name.into());
    }
    path.split(':')
        .filter(|dir| dir.starts_with('/'))
        .map(|dir| format!("{}/{name}", dir.trim_end_matches('/')))
        .find(|candidate| is_executable(Path::new(candidate)))
}

/// A string for the kernel.
///
/// # Errors
/// It contains a NUL byte.
pub(crate) fn c_string(text: impl Into<Vec<u8>>) -> Result<CString, ConnectError> {
    CString::new(text).map_err(|_| ConnectError::invalid_argument("a string contains a NUL byte"))
}

/// `NAME=value` pairs.
///
/// # Errors
/// A name is empty or holds `=`, or a NUL byte is somewhere.
pub(crate) fn env_strings(env: BTreeMap<String, String>) -> Result<Vec<CString>, ConnectError> {
    let pair = |(name, value): (String, String)| {
        if name.is_empty() || name.contains('=') {
            return Err(ConnectError::invalid_argument("an environment variable has an invalid name"));
        }
        c_string(format!("{name}={value}"))
    };
    env.into_iter().map(pair).collect()
}

/// Understands a request. Looks at the file system, so it blocks.
///
/// # Errors
/// `invalid_argument`, with the words that E2B's clients know.
pub(crate) fn prepare(
    config: &ProcessConfig,
    user: &User,
    settings: &Settings,
) -> Result<Prepared, ConnectError> {
    let env = environment(user, settings, config.envs.iter().map(|(k, v)| (k.clone(), v.clone())));
    let cwd = absolute(config.cwd.as_deref().unwrap_or(""), user, settings)?;
    if !Path::new(&cwd).is_dir() {
        return Err(ConnectError::invalid_argument(format!("cwd '{cwd}' does not exist")));
    }
    let path = env.get("PATH").map_or("", String::as_str);
    let program = look_up(&config.cmd, path).ok_or_else(|| {
        ConnectError::invalid_argument(format!("exec: {:?}: executable file not found in $PATH", config.cmd))
    })?;
    let args = [&config.cmd].into_iter().chain(&config.args).map(|arg| c_string(arg.as_str()));
    let prepared = Prepared {
        program: c_string(program)?,
        args: args.collect::<Result<_, _>>()?,
        env: env_strings(env)?,
        cwd: c_string(cwd)?,
    };
    let len = |strings: &[CString]| strings.iter().map(|s| s.as_bytes_with_nul().len()).sum::<usize>();
    if len(&prepared.args) + len(&prepared.env) > MAX_STRINGS {
        return Err(ConnectError::invalid_argument("arguments and environment are too long"));
    }
    Ok(prepared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Identity;
    use crate::settings::tests::configure;

    fn user() -> User {
        User {
            name: "user".into(),
            home: "/home/user".into(),
            shell: "/bin/bash".into(),
            identity: Identity { uid: 1000, gid: 1000, groups: vec![1000] },
        }
    }

    #[test]
    fn paths_start_at_home() {
        let (user, settings) = (user(), Settings::new(configure(None)));
        let absolute = |path| absolute(path, &user, &settings).ok();
        for (given, wanted) in [
            ("", Some("/home/user")),
            ("~", Some("/home/user")),
            ("~/x", Some("/home/user/x")),
            ("x/y", Some("/home/user/x/y")),
            ("/x", Some("/x")),
            ("~root", None),
        ] {
            assert_eq!(absolute(given).as_deref(), wanted, "{given:?}");
        }
    }

    #[test]
    fn the_request_wins_in_the_environment() {
        let settings = Settings::new(configure(None));
        let env = environment(&user(), &settings, [("HOME".into(), "/tmp".into())]);
        assert_eq!(
            (env["HOME"].as_str(), env["USER"].as_str(), env["E2B_SANDBOX"].as_str()),
            ("/tmp", "user", "true")
        );
    }

    #[test]
    fn programs_are_found_in_absolute_directories_of_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tool");
        std::fs::write(&file, "").unwrap();
        let path = format!("relative::{}/", dir.path().display());
        assert_eq!(look_up("tool", &path), None, "it is not executable");
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        assert_eq!(look_up("tool", &path), Some(file.display().to_string()));
        assert_eq!(look_up("./tool", ""), Some("./tool".into()));
        assert_eq!(look_up("", &path), None);
    }

    #[test]
    fn strings_that_the_kernel_can_t_take_are_refused() {
        let (user, settings) = (user(), Settings::new(configure(None)));
        let with = |cmd: &str, envs: &[(&str, &str)]| {
            let envs = envs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
            let config = ProcessConfig { cmd: cmd.into(), envs, cwd: Some("/".into()), ..Default::default() };
            prepare(&config, &user, &settings).map(|_| ())
        };
        assert!(with("/bin/true", &[("A", "1")]).is_ok());
        assert!(with("/bin/true", &[("A=B", "1")]).is_err());
        assert!(with("/bin/true", &[("", "1")]).is_err());
        assert!(with("/bin/true", &[("A", "\0")]).is_err());
        assert!(with("/bin/\0true", &[]).is_err());
        assert!(with("/bin/true", &[("A", &"x".repeat(MAX_STRINGS))]).is_err());
    }
}
