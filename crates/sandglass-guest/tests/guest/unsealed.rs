//! The agent as an ordinary process of a user without any privilege.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use connectrpc::ErrorCode;
use sandglass_proto::control::{FromAgent, ToAgent};
use sandglass_proto::services::process::Signal;
use tempfile::TempDir;

use crate::api::{bash, eventually, http, run, run_with, signal, start_detached, user_header};
use crate::sandbox::{Server, attach, configure, open_fifo};

/// The conventional user without rights.
const NOBODY: u32 = 65534;

/// A running agent; it ends with this, or before.
struct Unsealed {
    dir: TempDir,
    agent: Child,
}

impl Unsealed {
    /// Starts it, and attaches to it. With the server's end of the session, the agent's ends as well.
    async fn start() -> (Self, Server) {
        let dir = TempDir::new().unwrap();
        let (program, home) = (dir.path().join("guest"), dir.path().join("home"));
        fs::copy(env!("CARGO_BIN_EXE_sandglass-guest"), &program).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(&home).unwrap();
        chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
        for name in ["in", "out"] {
            let kind = rustix::fs::FileType::Fifo;
            rustix::fs::mknodat(rustix::fs::CWD, dir.path().join(name), kind, 0o600.into(), 0).unwrap();
        }
        let held = ["in", "out"].map(|name| open_fifo(dir.path(), name));
        let agent = Command::new("setpriv")
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
            .arg(program)
            .arg("unsealed")
            .arg(home)
            .env("SANDGLASS_TEST_MARK", "engine")
            .stdin(fs::File::open(dir.path().join("in")).unwrap())
            .stdout(fs::File::options().write(true).open(dir.path().join("out")).unwrap())
            .stderr(fs::File::create(dir.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let unsealed = Self { dir, agent };
        let (server, generation) = attach(unsealed.dir.path()).await;
        assert_eq!(generation, 0);
        drop(held);
        let mut settings = configure(1, None);
        settings.default_workdir = Some(String::new());
        let answer = server.ask(&ToAgent::Configure(Box::new(settings))).await;
        assert_eq!(answer, FromAgent::Configured { generation: 1 });
        (unsealed, server)
    }

    fn home(&self) -> PathBuf {
        self.dir.path().join("home")
    }

    fn ended(&mut self) -> ExitStatus {
        eventually("the agent ends", || self.agent.try_wait().unwrap())
    }
}

impl Drop for Unsealed {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}

/// Processes of this machine that were started with exactly these arguments.
fn count(args: &str) -> usize {
    let listed = Command::new("ps").args(["ax", "-o", "args"]).stderr(Stdio::inherit()).output().unwrap();
    String::from_utf8(listed.stdout).unwrap().lines().filter(|line| *line == args).count()
}

#[tokio::test]
async fn everybody_is_the_user_that_it_runs_as_and_at_home_in_its_folder() {
    let before = ["/etc/hosts", "/etc/hostname"].map(fs::read);
    let (unsealed, server) = Unsealed::start().await;
    let bridge = server.bridge().await;
    let (api, home) = (bridge.api, unsealed.home());
    let home = home.to_str().unwrap();
    let line = "id -u; pwd; echo $HOME ~ $E2B_SANDBOX_ID $FROM_SERVER $SANDGLASS_TEST_MARK";
    let wanted = format!("65534\n{home}\n{home} {home} sandbox1 yes engine\n");
    assert_eq!(run(api, line).await.stdout, wanted);
    for user in ["root", "user", "whoever"] {
        let outcome = run_with(api, bash(line), &[user_header(user)]).await.unwrap();
        assert_eq!(outcome.stdout, wanted, "{user}");
    }
    let put = |path: &'static str| {
        let target = format!("/files?path={path}&username=root");
        tokio::task::spawn_blocking(move || {
            http(api, "POST", &target, "Content-Type: application/octet-stream\r\n", b"text").status
        })
    };
    assert_eq!(put("a/relative").await.unwrap(), 200);
    assert_eq!(put("~/short").await.unwrap(), 200);
    for name in ["a/relative", "short"] {
        let path = unsealed.home().join(name);
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
        assert_eq!(fs::metadata(&path).unwrap().uid(), NOBODY);
    }
    // It has no way to more than it was given, and the machine has not noticed.
    assert_eq!(put("/etc/sandglass-test").await.unwrap(), 403);
    for (path, before) in ["/etc/hosts", "/etc/hostname"].into_iter().zip(before) {
        assert_eq!(fs::read(path).ok(), before.ok(), "{path}");
    }
}

#[tokio::test]
async fn the_end_of_a_command_is_the_end_of_what_left_it() {
    let (_unsealed, server) = Unsealed::start().await;
    let bridge = server.bridge().await;
    let api = bridge.api;
    // Twice away from everything that a shell knows, and once without an environment.
    let line = "(setsid bash -c '(setsid sleep 8890 &) ; setsid sleep 8890' >/dev/null 2>&1 &)
                env -i sleep 8890 & sleep 8890";
    let error = run_with(api, bash(line), &[("connect-timeout-ms", "1000".into())]).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::DeadlineExceeded);
    assert_eq!(count("sleep 8890"), 0);
    let pid = start_detached(api, line).await;
    let other = start_detached(api, "sleep 8891").await;
    eventually("all of them run", || (count("sleep 8890") == 4 && count("sleep 8891") == 1).then_some(()));
    signal(api, pid, Signal::SIGNAL_SIGKILL).await.unwrap();
    assert_eq!((count("sleep 8890"), count("sleep 8891")), (0, 1));
    signal(api, other, Signal::SIGNAL_SIGKILL).await.unwrap();
    assert_eq!(count("sleep 8891"), 0);
}

#[tokio::test]
async fn it_ends_with_its_session_and_takes_its_commands_along() {
    let (mut unsealed, server) = Unsealed::start().await;
    let bridge = server.bridge().await;
    start_detached(bridge.api, "setsid sleep 8892").await;
    eventually("the command runs", || (count("sleep 8892") == 1).then_some(()));
    drop((bridge, server));
    // The runtime must get to close what they held.
    let ended = tokio::task::spawn_blocking(move || unsealed.ended().success());
    assert!(ended.await.unwrap());
    assert_eq!(count("sleep 8892"), 0);
}

#[test]
fn a_home_that_is_none_is_refused() {
    for args in
        [&["unsealed"][..], &["unsealed", "relative"], &["unsealed", "/nonexistent"], &["unsealed", "/", "/"]]
    {
        let program = env!("CARGO_BIN_EXE_sandglass-guest");
        let ended = Command::new(program).args(args).stdin(Stdio::null()).output().unwrap();
        assert!(!ended.status.success() && !ended.stderr.is_empty(), "{args:?}");
    }
}
