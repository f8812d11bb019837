//! Calling `runsc`.
//!
//! Every call is made by a launcher (see [`sandglass_linux::process::Launch`]) that first:
//! - moves into a mount namespace of its own, which receives mounts and unmounts from the host's but gives none back
//!   (so it does not keep alive what the host unmounts, network namespaces of other sandboxes above all);
//! - puts an empty file system over `/proc/sys/net`: this `runsc` takes any network namespace for the host's on newer
//!   kernels, because they show `net/core/rmem_default` in all;
//! - keeps the Go runtime from waiting for RCU grace periods: `membarrier` answers ENOSYS, and the descriptor table is
//!   large from the start. This makes each call about twice as fast.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sandglass_linux::mount::{Mount, MountNamespace, Propagation};
use sandglass_linux::process::{ExitStatus, Launch, LaunchError, Step, run, spawn};
use sandglass_types::SandboxId;

use crate::engine::{EngineError, Lack, step};
use crate::files::private_folder;
use crate::record::Status;
use crate::session::AgentStdio;

/// Most bytes that are kept of anything `runsc` prints.
const MAX_OUTPUT: usize = 16 * 1024;

/// Most bytes of its message that go into an error.
const MAX_MESSAGE: usize = 400;

/// Descriptors that the sandbox's processes may have; the kernel's default for the hard limit of limits.
const OPEN_FILES: u64 = 1 << 20;

/// A high number: the table that holds it has room for all that `runsc` opens or passes on.
const RESERVED_DESCRIPTOR: i32 = 400;

/// Time limit of the verb that makes a new sandbox: a busy machine takes seconds. Clients give up after
/// a minute, and should hear why before.
pub(super) const MAKE_TIMEOUT: Duration = Duration::from_secs(30);

const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// Length limit of a socket's path, its NUL included: `runsc` puts one in its root folder.
const MAX_SOCKET_PATH: usize = 108;

/// The installed `runsc`, and the folder where it keeps its state.
#[derive(Debug, Clone)]
pub(super) struct Runsc {
    program: PathBuf,
    root: PathBuf,
    open_files: u64,
    pub(super) version: String,
}

/// Upper bound of a state file, in bytes: it holds the OCI spec and some more.
const MAX_STATE: u64 = 1 << 20;

/// The one part of a state file that is read here.
#[derive(serde::Deserialize)]
struct State {
    status: Status,
}

/// Removes what `runsc` remembers, in its root folder, of a sandbox whose processes are gone.
pub(super) fn forget(root: &Path, id: &SandboxId) -> io::Result<()> {
    let names = [format!("{id}_sandbox:{id}.state"), format!("{id}_sandbox:{id}.lock")];
    let paths = names.iter().map(|name| root.join(name)).chain([control_socket(root, id)]);
    for path in paths {
        match fs_err::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

fn control_socket(root: &Path, id: &SandboxId) -> PathBuf {
    root.join(format!("runsc-{id}.sock"))
}

/// Where the guest's interfaces come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Network {
    /// `runsc` finds them in the network namespace that it is told to join.
    Namespace,
    /// They are passed to the sandbox, which is in an empty namespace of its own, before it is started.
    OverControlSocket,
}

/// Who else writes below the mounts of a sandbox, its root file system apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MountAccess {
    /// Nobody: what it knows of a file stays true.
    Exclusive,
    /// Other sandboxes: it asks again each time. `runsc` of this age knows no such thing of a single mount: with its annotation
    /// `dev.gvisor.spec.mount.NAME.share`, sandboxes do not see what others write (seen with 20240729). So where a sandbox
    /// has a volume, this holds for its `/tmp` as well.
    Shared,
}

/// A call that makes a sandbox.
#[derive(Debug)]
pub(super) struct Make<'a> {
    pub(super) verb: &'static str,
    pub(super) options: &'a [&'a OsStr],
    pub(super) network: Network,
    pub(super) mounts: MountAccess,
    /// Where it writes its fatal errors.
    pub(super) log: &'a Path,
    /// Where the sandbox process writes those of its own.
    pub(super) panics: &'a Path,
    /// When it is given up.
    pub(super) within: Duration,
}

/// Where fatal errors go.
#[derive(Clone, Copy)]
struct Logs<'a> {
    log: &'a Path,
    panics: &'a Path,
}

impl Runsc {
    /// Asks the program for its version and prepares its root folder.
    pub(super) fn open(program: &Path, root: &Path) -> Result<Self, EngineError> {
        let name = format!("runsc-{}.sock", "x".repeat(sandglass_types::id::SANDBOX_ID_LEN));
        let longest = root.join(name).as_os_str().len();
        if longest >= MAX_SOCKET_PATH {
            let said = format!(
                "the data folder's path is {} bytes too long for a socket in it",
                longest + 1 - MAX_SOCKET_PATH
            );
            return Err(EngineError::Step { step: "prepare runsc", source: said.into() });
        }
        private_folder(root).map_err(|error| step("prepare runsc", error))?;
        let version = version(program)?;
        let nr_open = fs_err::read_to_string("/proc/sys/fs/nr_open").ok();
        let nr_open = nr_open.and_then(|text| text.trim().parse().ok()).unwrap_or(OPEN_FILES);
        Ok(Self {
            program: program.to_owned(),
            root: root.to_owned(),
            open_files: OPEN_FILES.min(nr_open),
            version,
        })
    }

    /// Runs a verb on a sandbox that exists, to its end.
    pub(super) fn verb(
        &self,
        id: &SandboxId,
        verb: &'static str,
        options: &[&OsStr],
        timeout: Duration,
    ) -> Result<(), EngineError> {
        let mounts = MountNamespace::furnish(Propagation::Slave, &[no_network_settings()])
            .map_err(|error| step(verb, error))?;
        let launch = self
            // Who has made it knows the mounts.
            .launch(None, Network::Namespace, MountAccess::Exclusive, verb)
            .and_then(|launch| {
                launch
                    .args(options)?
                    .arg(id.as_str())
                    .map(|launch| launch.step(Step::EnterMounts(mounts.into())))
            })
            .map_err(|error| step(verb, error))?;
        let output = run(launch, b"", timeout, MAX_OUTPUT).map_err(|error| step(verb, error))?;
        if output.status.success() {
            Ok(())
        } else {
            Err(ended(verb, output.status, &message(&output.stderr)))
        }
    }

    /// Runs a verb that makes a sandbox. Its processes inherit what the launcher did: namespace, cgroup, limits.
    pub(super) fn make(
        &self,
        id: &SandboxId,
        call: &Make<'_>,
        before: Vec<Step>,
        stdio: AgentStdio,
    ) -> Result<(), EngineError> {
        let &Make { verb, options, network, mounts, log, panics, within } = call;
        let deadline = Instant::now() + within;
        let launch = self
            .launch(Some(Logs { log, panics }), network, mounts, verb)
            .and_then(|launch| {
                launch.args(options)?.arg(id.as_str())?.steps(before).stdin(stdio.stdin)?.stdout(stdio.stdout)
            })
            .map_err(|error| step(verb, error))?;
        let child = spawn(&launch).map_err(|error| step(verb, error))?;
        drop(launch);
        let go_on = sandglass_failpoint::hit("engine.create.spawned").map_err(std::io::Error::from);
        match go_on.and_then(|()| child.wait(Some(deadline))).map_err(|error| step(verb, error))? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(ended(verb, status, &message(&read_tail(log)))),
            None => {
                let _ = child.pidfd().kill();
                let _ = child.wait(None);
                Err(step(verb, format!("runsc did not end within {} s and was killed", within.as_secs())))
            }
        }
    }

    /// How far `runsc` says that a sandbox has come. It does not notice when one ends.
    pub(super) fn status(&self, id: &SandboxId) -> Option<Status> {
        use std::io::Read as _;
        let mut text = Vec::new();
        let path = self.root.join(format!("{id}_sandbox:{id}.state"));
        std::fs::File::open(path).ok()?.take(MAX_STATE).read_to_end(&mut text).ok()?;
        serde_json::from_slice::<State>(&text).ok().map(|state| state.status)
    }

    /// Where the control socket of a sandbox is.
    pub(super) fn control_socket(&self, id: &SandboxId) -> PathBuf {
        control_socket(&self.root, id)
    }

    fn launch(
        &self,
        logs: Option<Logs<'_>>,
        network: Network,
        mounts: MountAccess,
        verb: &str,
    ) -> Result<Launch, LaunchError> {
        let mut launch = Launch::new(&self.program)?
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")?
            .step(Step::OpenFiles(self.open_files))
            .step(Step::ReserveDescriptor(RESERVED_DESCRIPTOR))
            .step(Step::DenyMembarrier)
            .arg("--root")?
            .arg(&self.root)?;
        if let Some(Logs { log, panics }) = logs {
            launch = launch.arg("--log")?.arg(log)?.args(["--log-format=json"])?;
            // One stack says enough; all of them are as long as the guest has threads.
            launch = launch.arg("--panic-log")?.arg(panics)?.args(["--traceback=single"])?;
        }
        let network = match network {
            Network::Namespace => "--network=sandbox",
            Network::OverControlSocket => "--network=none",
        };
        let mounts = match mounts {
            MountAccess::Exclusive => EXCLUSIVE_MOUNTS,
            MountAccess::Shared => "--file-access-mounts=shared",
        };
        // The launcher has joined the sandbox's groups already, in less time than `runsc` takes for it.
        launch.args(FLAGS)?.args([mounts, "--ignore-cgroups", network, verb])
    }
}

/// The flags that every call gets; some matter when a sandbox is made, some when it is started.
pub(super) const FLAGS: [&str; 5] = [
    "--platform=systrap",
    // Connections do not survive a checkpoint; without this, one open connection makes it fail.
    "--net-disconnect-ok=true",
    // The disk of the sandbox is its own file system with its own size.
    "--overlay2=none",
    "--host-uds=none",
    // Nobody else writes below the root that a sandbox gets.
    "--file-access=exclusive",
];

/// For one whose mounts are its own.
pub(super) const EXCLUSIVE_MOUNTS: &str = "--file-access-mounts=exclusive";

const MS_RDONLY: u64 = 1;

/// Every `runsc` is started where this is mounted: it takes any network namespace for the machine's where it can see
/// those settings.
#[must_use]
pub fn no_network_settings() -> Mount {
    Mount {
        source: c"none".into(),
        target: c"/proc/sys/net".into(),
        fstype: c"tmpfs".into(),
        flags: MS_RDONLY,
        data: c"size=4k".into(),
    }
}

/// Asks a `runsc` for its version, as `20240729` is one in `0.0~20240729.0`.
///
/// # Errors
/// It can't be run, it failed, or what it said is no version.
pub fn version(program: &Path) -> Result<String, EngineError> {
    let launch = Launch::new(program).and_then(|launch| launch.arg("--version"));
    let output = launch
        .map_err(Into::into)
        .and_then(|launch| run(launch, b"", VERSION_TIMEOUT, MAX_OUTPUT))
        .map_err(|error| step("ask runsc for its version", error))?;
    if !output.status.success() {
        return Err(ended("ask runsc for its version", output.status, &message(&output.stderr)));
    }
    parse_version(&output.stdout)
        .ok_or_else(|| step("ask runsc for its version", "it answered in an unknown form"))
}

fn parse_version(output: &[u8]) -> Option<String> {
    let version = std::str::from_utf8(output).ok()?.lines().next()?.strip_prefix("runsc version ")?.trim();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-~+_".contains(&byte);
    (!version.is_empty() && version.len() <= 64 && version.bytes().all(plain)).then(|| version.to_owned())
}

/// A call that failed, in `runsc`'s own words.
fn ended(verb: &'static str, status: ExitStatus, said: &str) -> EngineError {
    let source = format!("runsc ended with {status}: {said}").into();
    match lack(status, said) {
        Some(lack) => EngineError::NoRoom { lack, step: verb, source },
        None => EngineError::Step { step: verb, source },
    }
}

/// What the machine ran out of, if that is what ended a call. Nobody but the kernel, when memory is short, kills
/// `runsc` so.
fn lack(status: ExitStatus, said: &str) -> Option<Lack> {
    const SIGKILL: i32 = 9;
    const WORDS: [(&str, Lack); 5] = [
        ("no space left on device", Lack::Disk),
        ("cannot allocate memory", Lack::Memory),
        ("resource temporarily unavailable", Lack::Processes),
        ("failed to create new os thread", Lack::Processes),
        ("too many open files", Lack::Descriptors),
    ];
    if status == ExitStatus::Signaled(SIGKILL) {
        return Some(Lack::Memory);
    }
    let said = said.to_lowercase();
    WORDS.iter().find(|(words, _)| said.contains(words)).map(|(_, lack)| *lack)
}

/// The end of a log that may have any length.
fn read_tail(path: &Path) -> Vec<u8> {
    use std::io::{Read as _, Seek as _};
    let mut tail = Vec::new();
    let read = fs_err::File::open(path).and_then(|mut file| {
        let limit = u64::try_from(MAX_OUTPUT).unwrap_or(u64::MAX);
        let start = file.metadata()?.len().saturating_sub(limit);
        file.seek(io::SeekFrom::Start(start))?;
        file.take(limit).read_to_end(&mut tail)
    });
    match read {
        Ok(_) => tail,
        Err(_) => Vec::new(),
    }
}

/// Says in the log what the guest's kernel died of, if it did: nobody else knows.
pub(super) fn report_panic(id: &SandboxId, panics: &Path) {
    use std::io::Read as _;
    let mut head = Vec::new();
    let limit = u64::try_from(MAX_OUTPUT).unwrap_or(u64::MAX);
    let read = std::fs::File::open(panics).and_then(|file| file.take(limit).read_to_end(&mut head));
    if read.is_ok_and(|len| len > 0) {
        // The guest may have written it. It is never parsed: this thread's stack is small.
        let said = shown(first_line(&String::from_utf8_lossy(&head)));
        tracing::warn!(%id, said, "the guest's kernel has died");
    }
}

/// What `runsc` said, as printable ASCII of bounded length: the last entry of a log, or the first line of what it
/// printed, which a stack trace may follow.
fn message(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let logged = |line: &str| {
        let entry = serde_json::from_str::<serde_json::Value>(line).ok()?;
        Some(entry.get("msg")?.as_str()?.to_owned())
    };
    let message = text.lines().next_back().and_then(logged).unwrap_or_else(|| first_line(&text).to_owned());
    shown(&message)
}

fn first_line(text: &str) -> &str {
    text.lines().find(|line| !line.trim().is_empty()).unwrap_or("it gave no reason")
}

/// A text of any content and length, as it may stand in a log.
fn shown(text: &str) -> String {
    // Of what is not ASCII, some is shown nowhere and some reverses what follows.
    let plain = |c: char| if c.is_ascii() { c } else { char::REPLACEMENT_CHARACTER };
    text.chars().filter(|c| !c.is_control()).map(plain).take(MAX_MESSAGE).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_version_is_taken() {
        assert_eq!(
            parse_version(b"runsc version 0.0~20240729.0\nspec: 1.0.2-dev\n").as_deref(),
            Some("0.0~20240729.0")
        );
        assert_eq!(
            parse_version(b"runsc version release-20260601.0\n").as_deref(),
            Some("release-20260601.0")
        );
        let long = format!("runsc version {}\n", "1".repeat(65));
        for text in ["", "runsc version \n", "usage: …", "runsc version a b\n", "\u{fffd}", &long] {
            assert_eq!(parse_version(text.as_bytes()), None, "{text}");
        }
        assert_eq!(parse_version(b"\xff\xfe"), None);
    }

    #[test]
    fn messages_are_bounded_and_printable() {
        assert_eq!(message(b""), "it gave no reason");
        assert_eq!(message(b"\nfirst\ngoroutine 1\n\n"), "first");
        let log = br#"{"msg":"older","level":"error"}
{"msg":"no such file","level":"error"}
"#;
        assert_eq!(message(log), "no such file");
        assert_eq!(message(br#"{"msg":7}"#), r#"{"msg":7}"#);
        assert_eq!(message(b"\x1b[31mred\x07"), "[31mred");
        assert_eq!(message(&b"x".repeat(100_000)).len(), MAX_MESSAGE);
        assert_eq!(message(&[0xff; 10]).chars().count(), 10);
        assert_eq!(message("a\u{202e}b\u{e000}\u{85}".as_bytes()), "a\u{fffd}b\u{fffd}");
    }

    #[test]
    fn what_a_guest_may_have_written_is_not_parsed() {
        let deep = "{\"a\":".repeat(1000);
        let report = move || {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("panics");
            std::fs::write(&path, format!("\n{deep}\npanic")).unwrap();
            report_panic(&SandboxId::random(), &path);
        };
        // The thread that waits for a sandbox has no more.
        std::thread::Builder::new().stack_size(64 << 10).spawn(report).unwrap().join().unwrap();
        assert_eq!(shown(first_line("\n \npanic: x\x1b\nmore")), "panic: x");
        assert_eq!(first_line("\n"), "it gave no reason");
    }

    #[test]
    fn a_machine_without_room_is_told_from_other_failures() {
        let code = ExitStatus::Exited(128);
        for (status, said, expected) in [
            (
                code,
                "creating container: fork/exec /proc/self/exe: cannot allocate memory",
                Some(Lack::Memory),
            ),
            (code, "open /x: Too many open files", Some(Lack::Descriptors)),
            (code, "mkdir /x: no space left on device", Some(Lack::Disk)),
            (
                ExitStatus::Exited(2),
                "runtime: failed to create new OS thread (errno=11)",
                Some(Lack::Processes),
            ),
            (ExitStatus::Signaled(9), "it gave no reason", Some(Lack::Memory)),
            (ExitStatus::Signaled(11), "it gave no reason", None),
            (code, "permission denied", None),
        ] {
            assert_eq!(lack(status, said), expected, "{said}");
        }
    }

    #[test]
    fn a_tail_of_any_file_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        assert!(read_tail(&path).is_empty());
        std::fs::write(&path, "y".repeat(1 << 20)).unwrap();
        assert_eq!(read_tail(&path).len(), MAX_OUTPUT);
    }

    #[test]
    fn a_folder_too_deep_for_a_socket_is_refused() {
        let deep = PathBuf::from("/").join("d".repeat(80));
        let error = Runsc::open(Path::new("/usr/bin/runsc"), &deep).unwrap_err();
        let EngineError::Step { source, .. } = error else { panic!("{error}") };
        assert!(source.to_string().contains("too long"), "{source}");
    }
}
