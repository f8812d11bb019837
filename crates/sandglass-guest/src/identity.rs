//! Puts a configuration into force: host name, the files that say whose sandbox this is, then the settings.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use sandglass_proto::control::Configure;

/// Upper bound for `/etc/hosts` as it was before, in bytes.
const MAX_HOSTS: usize = 64 * 1024;

/// Upper bound for the environment in all, in bytes, and for its entries.
const MAX_ENV: (usize, usize) = (128 * 1024, 4096);

/// Marks the agent's own line in `/etc/hosts`.
const MARK: &str = "# sandglass";

/// A configuration that can't be put into force.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigureError {
    /// It is older than the one in force.
    #[error("generation {wanted} is older than {current}")]
    Stale {
        /// What was sent.
        wanted: u32,
        /// What is in force.
        current: u32,
    },
    /// A value is out of its bounds.
    #[error("{0} is not valid")]
    Invalid(&'static str),
    /// A step failed.
    #[error("{step} failed")]
    Step {
        /// Which.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Checks a configuration against the generation in force, 0 for none.
///
/// # Errors
/// [`ConfigureError::Stale`] or [`ConfigureError::Invalid`].
pub(crate) fn check(configure: &Configure, current: u32) -> Result<(), ConfigureError> {
    let wanted = configure.generation;
    if wanted == 0 || wanted < current {
        return Err(ConfigureError::Stale { wanted, current });
    }
    let is_label = |text: &str| {
        (1..=63).contains(&text.len())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !text.starts_with('-')
    };
    let is_text = |text: &str| text.len() <= 4096 && !text.contains('\0');
    if !is_label(&configure.sandbox_id) {
        return Err(ConfigureError::Invalid("the sandbox id"));
    }
    if !is_text(&configure.template_id) || configure.template_id.contains('\n') {
        return Err(ConfigureError::Invalid("the template id"));
    }
    if configure.access_token.as_ref().is_some_and(String::is_empty) {
        return Err(ConfigureError::Invalid("the access token"));
    }
    if !is_text(&configure.default_user) || !configure.default_workdir.as_deref().is_none_or(is_text) {
        return Err(ConfigureError::Invalid("the default user or directory"));
    }
    let (max_bytes, max_entries) = MAX_ENV;
    let bytes = configure.env.iter().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>();
    let is_variable = |(name, value): (&String, &String)| {
        !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0')
    };
    if bytes > max_bytes || configure.env.len() > max_entries || !configure.env.iter().all(is_variable) {
        return Err(ConfigureError::Invalid("the environment"));
    }
    Ok(())
}

/// `/etc/hosts` with the sandbox's own name, keeping what others wrote. Without an entry for `localhost` it would
/// be asked of a name server.
fn hosts(before: &str, name: &str) -> String {
    let mut text = String::new();
    let mut has_localhost = false;
    for line in before.lines().filter(|line| !line.trim_end().ends_with(MARK)) {
        let entry = line.split('#').next().unwrap_or("");
        has_localhost |= entry.split_whitespace().skip(1).any(|host| host == "localhost");
        text.push_str(line);
        text.push('\n');
    }
    if !has_localhost {
        text.insert_str(0, "127.0.0.1 localhost\n");
    }
    text.push_str(&format!("127.0.1.1 {name} {MARK}\n"));
    text
}

/// Replaces a file at once. Whatever is at the path, a link or a FIFO, is replaced and not followed.
fn put(path: &Path, contents: &str) -> io::Result<()> {
    let mut temporary = path.to_path_buf().into_os_string();
    temporary.push(".sandglass");
    let temporary = PathBuf::from(temporary);
    let create = || fs::OpenOptions::new().write(true).create_new(true).mode(0o644).open(&temporary);
    let mut file = match create() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(&temporary)?;
            create()?
        }
        created => created?,
    };
    file.write_all(contents.as_bytes())?;
    drop(file);
    fs::rename(&temporary, path)
}

fn read_hosts(path: &Path) -> String {
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    let open = fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
    let Ok(file) = open else { return String::new() };
    if !file.metadata().is_ok_and(|meta| meta.is_file()) {
        return String::new();
    }
    let mut bytes = Vec::new();
    let limit = u64::try_from(MAX_HOSTS).unwrap_or(u64::MAX);
    let _ = io::Read::read_to_end(&mut io::Read::take(file, limit), &mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Makes the machine say whose sandbox it is; for process 1 of a sandbox, whose machine it is. Blocks.
///
/// # Errors
/// The step that failed.
pub(crate) fn apply(configure: &Configure) -> Result<(), ConfigureError> {
    rustix::system::sethostname(configure.sandbox_id.as_bytes())
        .map_err(|errno| ConfigureError::Step { step: "setting the host name", source: errno.into() })?;
    write_files(configure, Path::new("/"))
}

fn write_files(configure: &Configure, root: &Path) -> Result<(), ConfigureError> {
    let step = |step| move |source| ConfigureError::Step { step, source };
    let name = &configure.sandbox_id;
    put(&root.join("etc/hostname"), &format!("{name}\n")).map_err(step("writing /etc/hostname"))?;
    let path = root.join("etc/hosts");
    put(&path, &hosts(&read_hosts(&path), name)).map_err(step("writing /etc/hosts"))?;
    let dir = root.join("run/e2b");
    fs::create_dir_all(&dir).map_err(step("making /run/e2b"))?;
    for (file, value) in
        [(".E2B_SANDBOX", "true"), (".E2B_SANDBOX_ID", name), (".E2B_TEMPLATE_ID", &configure.template_id)]
    {
        put(&dir.join(file), value).map_err(step("writing /run/e2b"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::configure;

    #[test]
    fn older_generations_and_odd_values_are_refused() {
        let good = configure(Some("t"));
        assert!(check(&good, 0).is_ok() && check(&good, 1).is_ok());
        assert!(matches!(check(&good, 2), Err(ConfigureError::Stale { wanted: 1, current: 2 })));
        let with = |change: fn(&mut Configure)| {
            let mut changed = good.clone();
            change(&mut changed);
            check(&changed, 0).is_err()
        };
        assert!(with(|c| c.generation = 0));
        assert!(with(|c| c.sandbox_id = "a\nb".into()));
        assert!(with(|c| c.sandbox_id = String::new()));
        assert!(with(|c| c.template_id = "a\nb".into()));
        assert!(with(|c| c.access_token = Some(String::new())));
        assert!(with(|c| c.default_user = "u\0".into()));
        assert!(with(|c| drop(c.env.insert("A=B".into(), String::new()))));
        assert!(with(|c| drop(c.env.insert("A".into(), "x".repeat(200_000)))));
    }

    #[test]
    fn hosts_keep_what_others_wrote_and_one_own_line() {
        let once = hosts("10.0.0.1 db # mine\n", "one");
        assert_eq!(once, "127.0.0.1 localhost\n10.0.0.1 db # mine\n127.0.1.1 one # sandglass\n");
        assert_eq!(hosts(&once, "two"), once.replace("one", "two"));
        assert_eq!(hosts("::1 ip6 localhost\n", "x"), "::1 ip6 localhost\n127.0.1.1 x # sandglass\n");
    }

    #[test]
    fn files_replace_links_and_do_not_follow_them() {
        let root = tempfile::tempdir().unwrap();
        let etc = root.path().join("etc");
        fs::create_dir(&etc).unwrap();
        let precious = root.path().join("precious");
        fs::write(&precious, "untouched").unwrap();
        for name in ["hosts", "hostname", "hosts.sandglass"] {
            std::os::unix::fs::symlink(&precious, etc.join(name)).unwrap();
        }
        write_files(&configure(None), root.path()).unwrap();
        assert_eq!(fs::read_to_string(&precious).unwrap(), "untouched");
        assert_eq!(fs::read_to_string(etc.join("hostname")).unwrap(), "s\n");
        assert_eq!(fs::read_to_string(root.path().join("run/e2b/.E2B_TEMPLATE_ID")).unwrap(), "base");
    }
}
