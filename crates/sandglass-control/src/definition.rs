//! What an operator says of a template that is to be built, and what it comes to on this server.

use std::collections::BTreeMap;

use sandglass_egress::policy::Policy;
use sandglass_store::{CommandDefaults, TemplateSpec};
use sandglass_types::limits::Unchecked;
use sandglass_types::{Error, ErrorKind, Limits, Reference, SnapshotId};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::request::check_env;

/// The template that others are built on unless they say something else.
const DEFAULT_BASE: &str = "base";

/// How long the ready command may take unless it is said, in seconds.
const READY_TIMEOUT: u32 = 60;

/// The longest that it may take, in seconds.
const MAX_READY_TIMEOUT: u32 = 3600;

/// The most unused copies that may be kept ready.
const MAX_POOL: u32 = 1000;

/// Longest command, in bytes.
const MAX_COMMAND: usize = 16 * 1024;

/// Longest folder, in bytes.
const MAX_WORKDIR: usize = 4096;

/// A template as its author writes it: the fields of `template.toml`. Nothing of it is checked yet.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateDefinition {
    /// What clients say for it: `a-z`, `0-9`, `-` and `_`, at most 64.
    pub name: String,
    /// The template that it is built on; `base` unless given.
    #[serde(default)]
    pub base: Option<String>,
    /// The file of the script that prepares it, which whoever builds it runs.
    #[serde(default)]
    pub setup: Option<String>,
    /// The command that runs on in every copy.
    #[serde(default)]
    pub start: Option<String>,
    /// The command that ends with 0 once the other is ready.
    #[serde(default)]
    pub ready: Option<String>,
    /// How long that may take, in seconds: 1 to 3600, 60 unless given.
    #[serde(default)]
    pub ready_timeout: Option<u32>,
    /// Environment of every command, beside that of the base.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Who runs commands; as in the base unless given.
    #[serde(default)]
    pub user: Option<String>,
    /// Where; as in the base unless given, or at home if `user` is.
    #[serde(default)]
    pub workdir: Option<String>,
    /// Whole cores; as the server has it unless given.
    #[serde(default)]
    pub cpu: Option<u32>,
    /// Memory, in MiB.
    #[serde(default)]
    pub memory_mib: Option<u32>,
    /// Disk, in MiB.
    #[serde(default)]
    pub disk_mib: Option<u32>,
    /// How many unused copies are kept ready.
    #[serde(default)]
    pub pool: u32,
    /// Hosts that it may reach while it is built, where the server allows them.
    #[serde(default)]
    pub allow: Vec<String>,
    /// Features of the server's configuration that it may use while it is built.
    #[serde(default)]
    pub features: Vec<String>,
}

/// What the base of a template gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BaseOf {
    pub(crate) defaults: CommandDefaults,
    pub(crate) limits: Limits,
    /// Whether its memory is in an image, which has these limits and no others.
    pub(crate) running: bool,
}

/// A checked definition, with all that it does not say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) name: String,
    pub(crate) spec: TemplateSpec,
    pub(crate) defaults: CommandDefaults,
    pub(crate) limits: Limits,
    pub(crate) policy: Policy,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message.into())
}

/// Whether a text is a name that a template can have.
pub(crate) fn is_name(text: &str) -> bool {
    let plain = text.parse::<Reference>().is_ok_and(|reference| reference.to_string() == text)
        && !text.contains(['/', ':']);
    // Which a client would mean is not to be guessed.
    plain && text.parse::<SnapshotId>().is_err()
}

fn is_user(text: &str) -> bool {
    text.len() <= 32
        && text.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
}

impl TemplateDefinition {
    /// The name of its base.
    #[must_use]
    pub fn base(&self) -> &str {
        self.base.as_deref().unwrap_or(DEFAULT_BASE)
    }

    /// Checks it and completes it with its base. `of_server` says that the server prepares a template of its name itself.
    pub(crate) fn plan(&self, base: BaseOf, of_server: bool) -> Result<Plan, Error> {
        if !is_name(&self.name) {
            return Err(invalid(format!(
                "{:?} is no name for a template: use 1 to 64 of a-z, 0-9, - and _, and not what an id looks like",
                self.name
            )));
        }
        if of_server {
            // What it says is so anyway, or is its pool.
            let as_it_is = self.base() == self.name
                && [&self.setup, &self.start, &self.ready].into_iter().all(Option::is_none)
                && self.policy()? == Policy::default()
                && self.limits(&base)? == base.limits
                && self.defaults(base.defaults.clone())? == base.defaults;
            if !as_it_is {
                return Err(invalid(format!(
                    "the template '{}' is prepared by the server itself, so nothing but its pool can be said: choose \
                     another name",
                    self.name
                )));
            }
        } else if self.base() == self.name {
            return Err(invalid("a template can't be built on itself: choose another base, or another name"));
        }
        for (field, command) in [("setup", &self.setup), ("start", &self.start), ("ready", &self.ready)] {
            let Some(command) = command else { continue };
            if command.trim().is_empty() || command.len() > MAX_COMMAND || command.contains('\0') {
                let message = format!("{field} must be 1 to {MAX_COMMAND} bytes without NUL, or be left out");
                return Err(invalid(message));
            }
        }
        let ready_timeout = self.ready_timeout.unwrap_or(READY_TIMEOUT);
        if !(1..=MAX_READY_TIMEOUT).contains(&ready_timeout) {
            return Err(invalid(format!("ready_timeout must be 1 to {MAX_READY_TIMEOUT} seconds")));
        }
        if self.pool > MAX_POOL {
            return Err(invalid(format!("pool must be 0 to {MAX_POOL}")));
        }
        Ok(Plan {
            name: self.name.clone(),
            spec: TemplateSpec {
                base: self.base().to_owned(),
                start: self.start.clone(),
                ready: self.ready.clone(),
                ready_timeout,
                pool: self.pool,
                agent: None,
                inherited: Vec::new(),
            },
            limits: self.limits(&base)?,
            defaults: self.defaults(base.defaults)?,
            policy: self.policy()?,
        })
    }

    fn defaults(&self, base: CommandDefaults) -> Result<CommandDefaults, Error> {
        if let Some(user) = self.user.as_ref().filter(|user| !is_user(user)) {
            return Err(invalid(format!("user: {user:?} is no name of a user")));
        }
        let absolute = |workdir: &&String| {
            workdir.starts_with('/') && workdir.len() <= MAX_WORKDIR && !workdir.contains('\0')
        };
        if let Some(workdir) = self.workdir.as_ref().filter(|workdir| !absolute(workdir)) {
            return Err(invalid(format!("workdir: {workdir:?} is no absolute path of a folder")));
        }
        check_env("env", &self.env)?;
        let at_home = || if self.user.is_some() { String::new() } else { base.workdir.clone() };
        let workdir = self.workdir.clone().unwrap_or_else(at_home);
        let mut env = base.env;
        env.extend(self.env.clone());
        Ok(CommandDefaults { user: self.user.clone().unwrap_or(base.user), workdir, env })
    }

    fn limits(&self, base: &BaseOf) -> Result<Limits, Error> {
        let has: Unchecked = base.limits.into();
        let wanted = Unchecked {
            cpus: self.cpu.unwrap_or(has.cpus),
            memory_mib: self.memory_mib.unwrap_or(has.memory_mib),
            disk_mib: self.disk_mib.unwrap_or(has.disk_mib),
            ..has
        };
        let wanted = Limits::try_from(wanted).map_err(|error| invalid(error.to_string()))?;
        if base.running && wanted != base.limits {
            return Err(invalid(format!(
                "what is built on '{}' has its cpu, memory_mib and disk_mib, because its memory is of that size: leave \
                 them out",
                self.base()
            )));
        }
        Ok(wanted)
    }

    fn policy(&self) -> Result<Policy, Error> {
        let rules: Vec<_> = self.allow.iter().map(|host| json!({ "allow": host })).collect();
        let policy = serde_json::from_value(json!({ "rules": rules, "features": self.features }));
        policy.map_err(|error| invalid(format!("allow, features: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> BaseOf {
        let env = BTreeMap::from([("PATH".to_owned(), "/bin".to_owned()), ("A".into(), "base".into())]);
        let defaults = CommandDefaults { user: "user".into(), workdir: "/home/user".into(), env };
        BaseOf { defaults, limits: Limits::default(), running: false }
    }

    fn web() -> TemplateDefinition {
        TemplateDefinition { name: "web".into(), ..TemplateDefinition::default() }
    }

    fn refused(change: impl Fn(&mut TemplateDefinition)) -> String {
        let mut definition = web();
        change(&mut definition);
        let error = definition.plan(base(), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        error.to_string()
    }

    #[test]
    fn what_is_not_said_is_as_in_the_base() {
        let plan = web().plan(base(), false).unwrap();
        assert_eq!((plan.defaults, plan.limits), (base().defaults, Limits::default()));
        assert_eq!((plan.spec.base.as_str(), plan.spec.ready_timeout), ("base", 60));
        assert_eq!(plan.policy, Policy::default());
        let env = BTreeMap::from([("A".into(), "own".into())]);
        let own = TemplateDefinition { user: Some("zoe".into()), env, memory_mib: Some(512), ..web() };
        let plan = own.plan(base(), false).unwrap();
        assert_eq!((plan.defaults.user.as_str(), plan.defaults.workdir.as_str()), ("zoe", ""));
        assert_eq!((&*plan.defaults.env["A"], &*plan.defaults.env["PATH"]), ("own", "/bin"));
        assert_eq!((plan.limits.memory_mib(), plan.limits.cpus()), (512, 2));
        let reaching = TemplateDefinition {
            allow: vec!["a.example".into()],
            features: vec!["packages".into()],
            ..web()
        };
        let policy = serde_json::to_value(reaching.plan(base(), false).unwrap().policy).unwrap();
        assert_eq!(
            (&policy["rules"][0]["allow"], &policy["features"]),
            (&json!("a.example"), &json!(["packages"]))
        );
    }

    #[test]
    fn each_field_has_its_bounds() {
        for name in ["", "Web", "a/b", "a:b", "a b", "\u{fc}", &"a".repeat(65), SnapshotId::random().as_str()]
        {
            assert!(refused(|d| d.name = name.into()).contains("no name for a template"), "{name}");
        }
        assert!(refused(|d| d.base = Some("web".into())).contains("on itself"));
        assert!(refused(|d| d.start = Some(" ".into())).contains("start must be"));
        assert!(refused(|d| d.ready = Some("x".repeat(20_000))).contains("ready must be"));
        assert!(refused(|d| d.setup = Some("a\0".into())).contains("setup must be"));
        assert!(refused(|d| d.ready_timeout = Some(0)).contains("ready_timeout"));
        assert!(refused(|d| d.pool = 1001).contains("pool"));
        for user in ["", "0", "a b", "-a", "A", "a:"] {
            assert!(refused(|d| d.user = Some(user.into())).contains("no name of a user"), "{user}");
        }
        assert!(refused(|d| d.workdir = Some("srv".into())).contains("workdir"));
        assert!(refused(|d| drop(d.env.insert("A=".into(), String::new()))).contains("env"));
        assert!(refused(|d| d.cpu = Some(0)).contains("cpus"));
        assert!(refused(|d| d.allow = vec!["not a host".into()]).contains("allow"));
        assert!(refused(|d| d.features = vec!["No".into()]).contains("features"));
    }

    #[test]
    fn a_running_base_has_its_own_size_and_one_of_the_server_is_as_it_is() {
        let running = BaseOf { running: true, ..base() };
        assert!(web().plan(running.clone(), false).is_ok());
        let larger = TemplateDefinition { memory_mib: Some(2048), ..web() };
        assert!(larger.plan(running, false).unwrap_err().to_string().contains("leave"));
        let own = TemplateDefinition { name: "base".into(), pool: 3, ..web() };
        assert_eq!(own.plan(base(), true).unwrap().spec.pool, 3);
        let same = TemplateDefinition {
            user: Some("user".into()),
            workdir: Some("/home/user".into()),
            ..own.clone()
        };
        assert!(same.plan(base(), true).is_ok());
        for changed in [
            TemplateDefinition { start: Some("x".into()), ..own.clone() },
            TemplateDefinition { user: Some("root".into()), ..own.clone() },
            TemplateDefinition { memory_mib: Some(2048), ..own.clone() },
            TemplateDefinition { features: vec!["packages".into()], ..own.clone() },
        ] {
            assert!(changed.plan(base(), true).unwrap_err().to_string().contains("another name"));
        }
        let moved = TemplateDefinition { base: Some("web".into()), ..own };
        assert!(moved.plan(base(), true).is_err());
    }
}
