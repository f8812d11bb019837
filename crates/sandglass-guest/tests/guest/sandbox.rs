//! The agent as process 1 of a gVisor sandbox without a network, and the server's end of its session.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{BuildHasher as _, RandomState};
use std::net::SocketAddr;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Pid, Signal};
use sandglass_proto::control::{Configure, FromAgent, ToAgent};
use sandglass_proto::session::{Epoch, Session, Target};
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::net::unix::pipe;
use tokio_util::task::AbortOnDropHandle;

use crate::api::{PATIENCE, eventually};

/// Programs of this machine that the sandbox gets.
const PROGRAMS: [&str; 18] = [
    "bash", "cat", "cut", "echo", "env", "grep", "head", "id", "ls", "mkdir", "ps", "pwd", "setsid", "sleep",
    "stty", "tee", "touch", "tty",
];

/// Limit on the processes of the sandbox's user.
pub(crate) const MAX_PROCESSES: u32 = 60;

/// Mounts that are needed to start this version of gVisor on newer kernels, then the program.
const LAUNCH: &str = "mount -t tmpfs -o ro,size=4k none /proc/sys/net && exec \"$@\"";

/// A running sandbox; it ends with this.
pub(crate) struct Sandbox {
    dir: TempDir,
    name: String,
    runsc: Child,
}

fn copy(from: &Path, to: &Path) {
    if !to.exists() {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(from, to).unwrap();
    }
}

/// Copies a program with the libraries that it needs.
fn install(program: &Path, root: &Path, at: &str) {
    copy(program, &root.join(at));
    let listed = Command::new("ldd").arg(program).output().unwrap();
    for word in
        String::from_utf8_lossy(&listed.stdout).split_whitespace().filter(|word| word.starts_with('/'))
    {
        copy(Path::new(word), &root.join(word.trim_start_matches('/')));
    }
}

fn make_root(root: &Path) {
    for dir in ["etc", "proc", "sys", "dev", "tmp", "run", "root", "home/user", "usr/bin"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    // An empty one would be replaced by gVisor.
    fs::write(root.join("tmp/.keep"), "").unwrap();
    for program in PROGRAMS {
        let found = ["/usr/bin", "/bin"]
            .map(|dir| Path::new(dir).join(program))
            .into_iter()
            .find(|path| path.exists());
        install(&found.unwrap_or_else(|| panic!("no {program}")), root, &format!("usr/bin/{program}"));
    }
    symlink("usr/bin", root.join("bin")).unwrap();
    symlink("bash", root.join("usr/bin/sh")).unwrap();
    let agent = Path::new(env!("CARGO_BIN_EXE_sandglass-guest"));
    install(agent, root, "usr/lib/sandglass/guest");
    fs::hard_link(root.join("usr/lib/sandglass/guest"), root.join("usr/bin/sudo")).unwrap();
    let passwd = "root:x:0:0::/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n\
                  other:x:1001:1001::/home/user:/bin/bash\n";
    fs::write(root.join("etc/passwd"), passwd).unwrap();
    fs::write(root.join("etc/group"), "root:x:0:\nuser:x:1000:\nother:x:1001:\n").unwrap();
    fs::write(root.join("etc/profile"), "export PATH\n").unwrap();
    std::os::unix::fs::chown(root.join("home/user"), Some(1000), Some(1000)).unwrap();
}

fn spec(root: &Path) -> serde_json::Value {
    let capabilities = [
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "SETGID",
        "SETUID",
        "SETPCAP",
        "NET_BIND_SERVICE",
        "SYS_CHROOT",
        "SYS_ADMIN",
        "SYS_RESOURCE",
        "MKNOD",
        "AUDIT_WRITE",
        "SETFCAP",
    ]
    .map(|name| format!("CAP_{name}"));
    let tmpfs = |at: &str, mode: &str| json!({"destination": at, "type": "tmpfs", "source": "tmpfs", "options": [format!("mode={mode}"), "size=16777216"]});
    let namespaces = ["pid", "mount", "ipc", "uts", "network"].map(|kind| json!({"type": kind}));
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": ["/usr/lib/sandglass/guest"],
            "env": ["SECRET_OF_THE_AGENT=1"],
            "cwd": "/",
            "capabilities": {"bounding": &capabilities, "effective": &capabilities, "permitted": &capabilities},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 4096}],
        },
        "root": {"path": root, "readonly": false},
        "hostname": "unconfigured",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            tmpfs("/dev/shm", "1777"),
            tmpfs("/run", "0755"),
        ],
        "linux": {"namespaces": namespaces},
    })
}

impl Sandbox {
    /// Starts one. Nobody is attached to it yet.
    pub(crate) fn start() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("sandglass-guest-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        make_root(&root);
        fs::write(dir.path().join("config.json"), spec(&root).to_string()).unwrap();
        let fifo = |name: &str| {
            let path = dir.path().join(name);
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
            fs::File::options().read(true).write(true).open(path).unwrap()
        };
        let (input, output) = (fifo("in"), fifo("out"));
        let log = fs::File::options().create(true).append(true).open(dir.path().join("log")).unwrap();
        let runsc = Command::new("unshare")
            .args(["--mount", "--propagation", "slave", "sh", "-c", LAUNCH, "sh", "runsc", "--root"])
            .arg(dir.path().join("state"))
            .args(["--network=none", "--overlay2=none", "--ignore-cgroups", "run", "--bundle"])
            .arg(dir.path())
            .arg(&name)
            .stdin(Stdio::from(input))
            .stdout(Stdio::from(output))
            .stderr(Stdio::from(log))
            .spawn()
            .expect("these tests need root and runsc");
        Self { dir, name, runsc }
    }

    /// Attaches as a server does; the generation that the agent says hello with.
    pub(crate) async fn attach(&self) -> (Server, u32) {
        attach(self.dir.path()).await
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let runsc = |args: &[&str]| {
            let mut command = Command::new("runsc");
            command.arg("--root").arg(self.dir.path().join("state")).args(args).arg(&self.name);
            let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        };
        runsc(&["kill"]);
        // The name comes before the signal, which is SIGTERM by default: the agent has no handler and is init.
        if let Some(pid) = Pid::from_raw(i32::try_from(self.runsc.id()).unwrap()) {
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
        runsc(&["delete", "-force"]);
        eventually("the sandbox ends", || self.runsc.try_wait().unwrap());
    }
}

/// Opens one of the FIFOs in a sandbox's folder, `in` or `out`, so that it does not end while this is open.
pub(crate) fn open_fifo(dir: &Path, name: &str) -> fs::File {
    let file = fs::File::options().read(true).write(true).open(dir.join(name)).unwrap();
    rustix::io::ioctl_fionbio(&file, true).unwrap();
    file
}

/// Attaches as a server does, to the agent behind the FIFOs in `dir`, which also has its `log`.
pub(crate) async fn attach(dir: &Path) -> (Server, u32) {
    let reader = pipe::Receiver::from_file(open_fifo(dir, "out")).unwrap();
    let writer = pipe::Sender::from_file(open_fifo(dir, "in")).unwrap();
    let random = RandomState::new().hash_one(dir);
    let (session, driver) = Session::connect(reader, writer, Epoch::from_random(random));
    let driver = AbortOnDropHandle::new(tokio::spawn(async {
        let _ = driver.await;
    }));
    let hello = tokio::time::timeout(PATIENCE, session.recv_control()).await;
    let Ok(Ok(FromAgent::Hello { generation, .. })) = hello else {
        panic!("{hello:?}; {}", fs::read_to_string(dir.join("log")).unwrap_or_default());
    };
    (Server { session, _driver: driver }, generation)
}

/// A server that is attached to a sandbox; dropping it is its crash.
pub(crate) struct Server {
    pub(crate) session: Session,
    _driver: AbortOnDropHandle<()>,
}

/// A configuration that the agent accepts.
pub(crate) fn configure(generation: u32, token: Option<&str>) -> Configure {
    Configure {
        generation,
        sandbox_id: format!("sandbox{generation}"),
        template_id: "base".into(),
        access_token: token.map(Into::into),
        default_user: "user".into(),
        default_workdir: None,
        env: BTreeMap::from([("FROM_SERVER".into(), "yes".into())]),
        max_processes: MAX_PROCESSES,
    }
}

/// The guest API of a sandbox on a TCP port of this machine.
pub(crate) struct Bridge {
    pub(crate) api: SocketAddr,
    _task: AbortOnDropHandle<()>,
}

impl Server {
    /// Sends a message and waits for the answer.
    pub(crate) async fn ask(&self, message: &ToAgent) -> FromAgent {
        self.session.send_control(message).await.unwrap();
        tokio::time::timeout(PATIENCE, self.session.recv_control()).await.unwrap().unwrap()
    }

    /// Configures the sandbox without a token.
    pub(crate) async fn configure(&self, generation: u32) {
        let answer = self.ask(&ToAgent::Configure(Box::new(configure(generation, None)))).await;
        assert_eq!(answer, FromAgent::Configured { generation });
    }

    /// Makes its guest API reachable.
    pub(crate) async fn bridge(&self) -> Bridge {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let api = listener.local_addr().unwrap();
        let session = self.session.clone();
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let session = session.clone();
                connections.spawn(async move {
                    if let Ok(mut flow) = session.open(Target::GuestApi).await {
                        let _ = tokio::io::copy_bidirectional(&mut stream, &mut flow).await;
                    }
                });
            }
        });
        Bridge { api, _task: AbortOnDropHandle::new(task) }
    }
}

/// Paths of a sandbox are those of its root on this machine.
impl Sandbox {
    /// A path inside, as this machine sees it.
    pub(crate) fn path(&self, inside: &str) -> PathBuf {
        self.dir.path().join("root").join(inside.trim_start_matches('/'))
    }
}
