//! Puts a configuration into force: host name, the files that say whose sandbox this is, then the settings.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::mount::UnmountFlags;
use sandglass_proto::control::Configure;
use sha2::{Digest as _, Sha256};

use crate::hooks::HookError;
use crate::init::RUN_DIR;
use crate::settings::Settings;

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
    /// A hook does not let the sandbox come back.
    #[error(transparent)]
    Hook(#[from] HookError),
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

/// `/etc/hosts` with the sandbox's own name, keeping what others wrote, and where. Without an entry for `localhost` it
/// would be asked of a name server.
fn hosts(before: &str, name: &str) -> String {
    let own = format!("127.0.1.1 {name} {MARK}\n");
    let mut text = String::new();
    let (mut has_localhost, mut has_own) = (false, false);
    for line in before.lines() {
        if line.trim_end().ends_with(MARK) {
            if !has_own {
                text.push_str(&own);
            }
            has_own = true;
            continue;
        }
        let entry = line.split('#').next().unwrap_or("");
        has_localhost |= entry.split_whitespace().skip(1).any(|host| host == "localhost");
        text.push_str(line);
        text.push('\n');
    }
    if !has_localhost {
        text.insert_str(0, "127.0.0.1 localhost\n");
    }
    if !has_own {
        text.push_str(&own);
    }
    text
}

/// Replaces a file at once, unless it says so already: a sandbox whose disk is full must be able to come back. Whatever
/// else is at the path, a link or a FIFO, is replaced and not followed.
fn put(path: &Path, contents: &str) -> io::Result<()> {
    if read(path, contents.len() + 1).is_some_and(|before| before == contents.as_bytes()) {
        return Ok(());
    }
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
    let written = file.write_all(contents.as_bytes()).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// The first bytes of a file, and of nothing else that may be at the path.
fn read(path: &Path, limit: usize) -> Option<Vec<u8>> {
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    if !file.metadata().is_ok_and(|meta| meta.is_file()) {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(u64::try_from(limit).unwrap_or(u64::MAX)).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Whose the machine was until now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Was {
    /// Nobody's.
    New,
    /// Another sandbox's, of which this one is a copy.
    Another,
    /// The same one's: its files say so already, or what its own root made of them.
    Same,
}

impl Was {
    /// What it was with the settings `before`, and is with these.
    pub(crate) fn of(before: Option<&Settings>, now: &Settings) -> Self {
        match before {
            None => Self::New,
            Some(before) if before.sandbox_id() != now.sandbox_id() => Self::Another,
            Some(before) if before.identity() == now.identity() => Self::Same,
            Some(_) => Self::New,
        }
    }
}

/// Makes the machine say whose sandbox it is; for process 1 of a sandbox, whose machine it is. Somebody waits for one that
/// comes back, so what it says already is left alone. Blocks.
///
/// # Errors
/// The step that failed.
pub(crate) fn apply(configure: &Configure, was: Was) -> Result<(), ConfigureError> {
    let step = |step| move |source| ConfigureError::Step { step, source };
    rustix::system::sethostname(configure.sandbox_id.as_bytes())
        .map_err(io::Error::from)
        .map_err(step("setting the host name"))?;
    let root = Path::new("/");
    if was != Was::Same {
        write_files(configure, root)?;
    }
    write_generation(configure, root)?;
    if was == Was::Another {
        renew_boot_id().map_err(step("changing the boot id"))?;
    }
    Ok(())
}

/// Where programs read which boot of the machine this is (random(4)). The kernel of a copy says what the original's does,
/// and can't be told anything else, so a file hides what it says.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

fn renew_boot_id() -> io::Result<()> {
    let mut random = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut random)?;
    let file = Path::new(RUN_DIR).join("boot_id");
    put(&file, &format!("{}\n", uuid(random, true)))?;
    // The copy of a copy hides it already.
    let _ = rustix::mount::unmount(BOOT_ID, UnmountFlags::DETACH);
    Ok(rustix::mount::mount_bind(&file, BOOT_ID)?)
}

/// A name for the machine that no other sandbox has, as systemd makes them of what it knows (machine-id(5)).
fn machine_id(sandbox_id: &str) -> String {
    let digest: [u8; 32] = Sha256::digest(format!("sandglass machine-id {sandbox_id}")).into();
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    uuid(id, false)
}

/// The text of a random UUID (RFC 9562, version 4), with or without its hyphens.
fn uuid(mut bytes: [u8; 16], hyphens: bool) -> String {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(36);
    for (at, byte) in bytes.into_iter().enumerate() {
        if hyphens && matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

fn write_files(configure: &Configure, root: &Path) -> Result<(), ConfigureError> {
    let step = |step| move |source| ConfigureError::Step { step, source };
    let name = &configure.sandbox_id;
    put(&root.join("etc/hostname"), &format!("{name}\n")).map_err(step("writing /etc/hostname"))?;
    let path = root.join("etc/hosts");
    let before = read(&path, MAX_HOSTS).unwrap_or_default();
    put(&path, &hosts(&String::from_utf8_lossy(&before), name)).map_err(step("writing /etc/hosts"))?;
    let machine = format!("{}\n", machine_id(name));
    put(&root.join("etc/machine-id"), &machine).map_err(step("writing /etc/machine-id"))?;
    let dir = root.join("run/e2b");
    fs::create_dir_all(&dir).map_err(step("making /run/e2b"))?;
    for (file, value) in
        [(".E2B_SANDBOX", "true"), (".E2B_SANDBOX_ID", name), (".E2B_TEMPLATE_ID", &configure.template_id)]
    {
        put(&dir.join(file), value).map_err(step("writing /run/e2b"))?;
    }
    Ok(())
}

/// Into the agent's own folder, which is there before anything else is.
fn write_generation(configure: &Configure, root: &Path) -> Result<(), ConfigureError> {
    let generation = format!("{}\n", configure.generation);
    put(&root.join("run/sandglass/generation"), &generation)
        .map_err(|source| ConfigureError::Step { step: "writing the generation", source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

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
        let edited = once.clone() + "10.0.0.2 cache\n";
        assert_eq!(hosts(&edited, "one"), edited);
        assert_eq!(hosts(&(once.clone() + &once), "one").matches(MARK).count(), 1);
        assert_eq!(hosts("::1 ip6 localhost\n", "x"), "::1 ip6 localhost\n127.0.1.1 x # sandglass\n");
    }

    #[test]
    fn whose_a_machine_was_is_told_by_all_that_its_files_say() {
        let before = Settings::new(configure(None));
        let with = |change: fn(&mut Configure)| {
            let mut changed = configure(Some("token"));
            changed.generation = 2;
            change(&mut changed);
            Settings::new(changed)
        };
        assert_eq!(Was::of(None, &before), Was::New);
        assert_eq!(Was::of(Some(&before), &with(|_| {})), Was::Same);
        assert_eq!(Was::of(Some(&before), &with(|c| c.sandbox_id = "another".into())), Was::Another);
        assert_eq!(Was::of(Some(&before), &with(|c| c.template_id = "another".into())), Was::New);
    }

    #[test]
    fn every_sandbox_is_another_machine() {
        assert_eq!(machine_id("a"), machine_id("a"));
        assert_ne!(machine_id("a"), machine_id("b"));
        assert_eq!(uuid([0xff; 16], true), "ffffffff-ffff-4fff-bfff-ffffffffffff");
        assert_eq!(uuid([0; 16], false), "00000000000040008000000000000000");
    }

    #[test]
    fn what_is_right_already_is_not_written_again() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["etc", "run/sandglass"] {
            fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let inodes = || {
            ["etc/hostname", "etc/hosts", "etc/machine-id", "run/sandglass/generation"]
                .map(|file| fs::metadata(root.path().join(file)).unwrap().ino())
        };
        let write = |configure: &Configure| {
            write_files(configure, root.path()).unwrap();
            write_generation(configure, root.path()).unwrap();
        };
        let mut configure = configure(None);
        write(&configure);
        let before = inodes();
        write(&configure);
        assert_eq!(inodes(), before);
        configure.generation = 2;
        write(&configure);
        assert_eq!(inodes()[..3], before[..3]);
        assert_ne!(inodes()[3], before[3]);
        // What only begins as it should is another.
        fs::write(root.path().join("etc/hostname"), "s\nmore").unwrap();
        write(&configure);
        assert_eq!(fs::read_to_string(root.path().join("etc/hostname")).unwrap(), "s\n");
    }

    #[test]
    fn files_replace_links_and_do_not_follow_them() {
        let root = tempfile::tempdir().unwrap();
        let etc = root.path().join("etc");
        fs::create_dir(&etc).unwrap();
        fs::create_dir_all(root.path().join("run/sandglass")).unwrap();
        let precious = root.path().join("precious");
        fs::write(&precious, "untouched").unwrap();
        for name in ["hosts", "hostname", "hosts.sandglass"] {
            std::os::unix::fs::symlink(&precious, etc.join(name)).unwrap();
        }
        write_files(&configure(None), root.path()).unwrap();
        write_generation(&configure(None), root.path()).unwrap();
        assert_eq!(fs::read_to_string(&precious).unwrap(), "untouched");
        assert_eq!(fs::read_to_string(etc.join("hostname")).unwrap(), "s\n");
        assert_eq!(fs::read_to_string(root.path().join("run/e2b/.E2B_TEMPLATE_ID")).unwrap(), "base");
        assert_eq!(fs::read_to_string(root.path().join("run/sandglass/generation")).unwrap(), "1\n");
        assert_eq!(fs::read_to_string(etc.join("machine-id")).unwrap(), machine_id("s") + "\n");
    }
}
