//! Decides what a request to `sudo` runs, without doing it.

use std::collections::BTreeMap;

use super::{Action, Preserve, Request};
use crate::exec::Identity;
use crate::process::DEFAULT_PATH;
use crate::users::{User, Users};

/// Groups whose members may use it, beside root and the user named [`DEFAULT_CALLER`].
const GROUPS: [&str; 3] = ["sudo", "wheel", "admin"];

/// The user of every sandbox's commands.
const DEFAULT_CALLER: &str = "user";

/// Variables of the caller that always pass.
const USUAL: [&str; 7] = ["TERM", "COLORTERM", "LANG", "LANGUAGE", "LS_COLORS", "TZ", "NO_COLOR"];

/// Upper bound for `SUDO_COMMAND`, in bytes.
const MAX_COMMAND: usize = 4096;

/// What to run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// A path, or a name to look up in [`Plan::path`].
    pub(super) program: String,
    /// Arguments, the name first.
    pub(super) args: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) cwd: String,
    pub(super) identity: Identity,
    /// Where programs are looked for.
    pub(super) path: String,
}

/// Whether this user may use `sudo`.
pub(super) fn is_allowed(caller: &User, users: &Users) -> bool {
    caller.identity.uid == 0
        || caller.name == DEFAULT_CALLER
        || GROUPS.iter().filter_map(|name| users.gid(name)).any(|gid| caller.identity.groups.contains(&gid))
}

fn target(request: &Request, users: &Users) -> Result<User, String> {
    let user = match request.user.strip_prefix('#') {
        Some(uid) => uid.parse().ok().and_then(|uid| users.by_uid(uid)),
        None => users.by_name(&request.user),
    };
    let mut user = user.ok_or_else(|| format!("unknown user {}", request.user))?;
    if let Some(group) = &request.group {
        let gid = match group.strip_prefix('#') {
            Some(gid) => gid.parse().ok(),
            None => users.gid(group),
        };
        let gid = gid.ok_or_else(|| format!("unknown group {group}"))?;
        user.identity.gid = gid;
        if !user.identity.groups.contains(&gid) {
            user.identity.groups.insert(0, gid);
        }
    }
    Ok(user)
}

/// One word as a shell reads it back.
fn escape(word: &str) -> String {
    let mut escaped = String::new();
    for c in word.chars() {
        if !(c.is_alphanumeric() || matches!(c, '_' | '-' | '$')) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    if escaped.is_empty() { "''".into() } else { escaped }
}

fn environment(request: &Request, caller: &User, target: &User, login: bool) -> BTreeMap<String, String> {
    let is_kept = |name: &str| match &request.preserve {
        _ if USUAL.contains(&name) || name.starts_with("LC_") => true,
        Preserve::Usual => false,
        Preserve::Named(names) => names.iter().any(|kept| kept == name),
        Preserve::All => !login,
    };
    let mut env: BTreeMap<String, String> =
        request.env.iter().filter(|(name, _)| is_kept(name)).map(|(k, v)| (k.clone(), v.clone())).collect();
    let mut set = |name: &str, value: &str| env.insert(name.into(), value.into());
    set("PATH", DEFAULT_PATH);
    set("USER", &target.name);
    set("LOGNAME", &target.name);
    set("SHELL", &target.shell);
    let keeps_home = request.preserve == Preserve::All && !request.set_home && !login;
    if !(keeps_home && request.env.contains_key("HOME")) {
        set("HOME", &target.home);
    }
    set("SUDO_USER", &caller.name);
    set("SUDO_UID", &caller.identity.uid.to_string());
    set("SUDO_GID", &caller.identity.gid.to_string());
    env
}

/// Decides. [`Action::Validate`] yields nothing to run.
///
/// # Errors
/// In the words of `sudo`.
pub(super) fn plan(request: &Request, caller: &User, users: &Users) -> Result<Option<Plan>, String> {
    if !is_allowed(caller, users) {
        return Err(format!("{} is not allowed to use sudo here", caller.name));
    }
    let target = target(request, users)?;
    let login = matches!(request.action, Action::Shell { login: true, .. });
    let mut env = environment(request, caller, &target, login);
    let shell = match (login, request.env.get("SHELL")) {
        (false, Some(shell)) if shell.starts_with('/') => shell.clone(),
        _ => target.shell.clone(),
    };
    let (program, args) = match &request.action {
        Action::Validate => return Ok(None),
        Action::Command(words) => (words.first().cloned().unwrap_or_default(), words.clone()),
        Action::Shell { login, command } => {
            let name = shell.rsplit('/').next().unwrap_or("sh");
            let mut args = vec![if *login { format!("-{name}") } else { name.to_owned() }];
            if !command.is_empty() {
                let line: Vec<_> = command.iter().map(|word| escape(word)).collect();
                args.extend(["-c".into(), line.join(" ")]);
            }
            (shell, args)
        }
    };
    let mut line = [std::slice::from_ref(&program), args.get(1..).unwrap_or_default()].concat().join(" ");
    line.truncate(line.floor_char_boundary(MAX_COMMAND));
    env.insert("SUDO_COMMAND".into(), line);
    env.extend(request.assignments.iter().cloned());
    let path = env.get("PATH").cloned().unwrap_or_default();
    let cwd = if login { target.home.clone() } else { request.cwd.clone() };
    Ok(Some(Plan { program, args, env, cwd, identity: target.identity, path }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        Users::from_texts(
            "root:x:0:0::/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n\
             admin:x:1001:1001::/home/admin:/bin/sh\nguest:x:1002:1002::/home/guest:/bin/sh\n",
            "root:x:0:\nsudo:x:27:admin\nstaff:x:50:\n",
        )
    }

    fn request(action: Action) -> Request {
        let env =
            [("TERM", "xterm"), ("LC_ALL", "C"), ("HOME", "/home/user"), ("LD_PRELOAD", "x"), ("A", "1")];
        Request {
            action,
            user: "root".into(),
            group: None,
            cwd: "/work".into(),
            env: env.into_iter().map(|(k, v)| (k.into(), v.into())).collect(),
            preserve: Preserve::Usual,
            assignments: Vec::new(),
            set_home: false,
            background: false,
            tty: None,
        }
    }

    fn decide(request: &Request, caller: &str) -> Result<Option<Plan>, String> {
        let users = users();
        plan(request, &users.by_name(caller).unwrap(), &users)
    }

    fn command(words: &[&str]) -> Action {
        Action::Command(words.iter().map(|word| (*word).into()).collect())
    }

    #[test]
    fn who_may() {
        let request = request(command(&["id"]));
        for caller in ["root", "user", "admin"] {
            assert!(decide(&request, caller).is_ok(), "{caller}");
        }
        assert!(decide(&request, "guest").is_err());
    }

    #[test]
    fn the_environment_is_reset() {
        let mut request = request(command(&["id", "-u"]));
        let plan = decide(&request, "user").unwrap().unwrap();
        let get = |plan: &Plan, name: &str| plan.env.get(name).cloned();
        assert_eq!(get(&plan, "A"), None);
        assert_eq!(get(&plan, "LD_PRELOAD"), None);
        assert_eq!(get(&plan, "TERM").as_deref(), Some("xterm"));
        assert_eq!(get(&plan, "HOME").as_deref(), Some("/root"));
        assert_eq!(get(&plan, "SUDO_USER").as_deref(), Some("user"));
        assert_eq!(get(&plan, "SUDO_COMMAND").as_deref(), Some("id -u"));
        assert_eq!((plan.cwd.as_str(), plan.identity.uid), ("/work", 0));
        request.preserve = Preserve::Named(vec!["A".into()]);
        request.assignments = vec![("PATH".into(), "/mine".into())];
        let plan = decide(&request, "user").unwrap().unwrap();
        assert_eq!((get(&plan, "A").as_deref(), plan.path.as_str()), (Some("1"), "/mine"));
        request.preserve = Preserve::All;
        let plan = decide(&request, "user").unwrap().unwrap();
        assert_eq!(get(&plan, "HOME").as_deref(), Some("/home/user"));
        request.set_home = true;
        let plan = decide(&request, "user").unwrap().unwrap();
        assert_eq!(get(&plan, "HOME").as_deref(), Some("/root"));
    }

    #[test]
    fn shells() {
        let shell = |login, words: &[&str]| Action::Shell {
            login,
            command: words.iter().map(|w| (*w).into()).collect(),
        };
        let plan = decide(&request(shell(true, &[])), "user").unwrap().unwrap();
        assert_eq!(
            (plan.program.as_str(), plan.args, plan.cwd.as_str()),
            ("/bin/bash", vec!["-bash".into()], "/root")
        );
        let plan = decide(&request(shell(false, &["echo", "a b;", "$HOME"])), "user").unwrap().unwrap();
        assert_eq!(plan.args, ["bash", "-c", r"echo a\ b\; $HOME"]);
        assert_eq!(plan.cwd, "/work");
    }

    #[test]
    fn targets() {
        let mut request = request(command(&["id"]));
        request.user = "#1001".into();
        request.group = Some("staff".into());
        let plan = decide(&request, "user").unwrap().unwrap();
        assert_eq!(plan.identity, Identity { uid: 1001, gid: 50, groups: vec![50, 1001, 27] });
        for unknown in ["nobody", "#77", "#", "#-1"] {
            request.user = unknown.into();
            assert!(decide(&request, "user").is_err(), "{unknown}");
        }
    }
}
