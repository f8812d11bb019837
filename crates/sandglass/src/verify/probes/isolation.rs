//! The machine below the sandbox.

use std::path::Path;
use std::time::{Duration, Instant};

use fs_err as fs;
use sandglass_linux::mount;
use sandglass_linux::netlink::Rtnetlink;

use super::{Aim, Attack, Control, Group, Probe};
use crate::verify::canary::bury;
use crate::verify::checklist::Point;
use crate::verify::ground::Surroundings;
use crate::verify::judge::Sight;
use crate::verify::secrets::{Place, fresh, holds};
use crate::verify::witness::{Held, holder_of};

const fn probe(id: &'static str, what: &'static str, attack: Attack) -> Probe {
    Probe { id, group: Group::Isolation, what, points: &[Point::Boundary], control: Control::Bare, attack }
}

const fn about_keys(id: &'static str, what: &'static str, attack: Attack) -> Probe {
    Probe { points: &[Point::Keys], ..probe(id, what, attack) }
}

/// A probe whose attack wants a secret; who tells it was where it lies.
macro_rules! secret {
    ($id:literal, $what:literal, $attack:literal, $place:ident, $args:expr) => {
        probe($id, $what, |aim| Box::pin(secret(aim, $attack, Place::$place, $args)))
    };
}

/// A probe whose attack holds on to something that the machine's kernel shows.
macro_rules! held {
    ($id:literal, $what:literal, $attack:literal, $args:expr, $held:expr) => {
        probe($id, $what, |aim| Box::pin(held(aim, $attack, &$args, $held)))
    };
}

const DEV_LOOP_CONTROL: Held<'_> = Held::Device { block: false, major: 10, minor: 237 };

/// All of them.
pub(super) const PROBES: &[Probe] = &[
    secret!("isolation.path", "read a file of the machine by its path, and by steps up", "path", File, file),
    secret!("isolation.proc-root", "read one through the root of another process", "proc-root", File, file),
    secret!(
        "isolation.leaked-descriptor",
        "read one through a descriptor left open",
        "descriptors",
        File,
        file
    ),
    secret!("isolation.chroot", "read one by leaving a root folder", "chroot", File, file),
    secret!("isolation.file-handle", "read one by its handle", "handle", File, handle),
    secret!("isolation.pivot-root", "read one from a mount namespace with another root", "pivot", File, file),
    probe("isolation.write", "change a file of the machine", |aim| Box::pin(write(aim))),
    probe("isolation.agent-program", "change the program of the agents to come", |aim| {
        Box::pin(program(aim))
    }),
    secret!(
        "isolation.host-paths",
        "find paths of the machine in what the kernel tells",
        "paths",
        Folder,
        none
    ),
    secret!("isolation.process-list", "see the processes of the machine", "arguments", Arguments, none),
    secret!("isolation.process-environment", "see their environment", "environment", Environment, none),
    secret!("isolation.process-memory", "read the memory of one", "memory", Memory, holder),
    probe("isolation.kill", "end one", |aim| Box::pin(kill(aim))),
    probe("isolation.renice", "take the processor from one", |aim| Box::pin(renice(aim))),
    probe("isolation.ptrace", "take control of one", |aim| Box::pin(trace(aim))),
    secret!("isolation.setns", "enter its mount namespace", "namespaces", Mounts, none),
    probe("isolation.hostname", "rename the machine", |aim| Box::pin(hostname(aim))),
    held!(
        "isolation.core-pattern",
        "choose the program that the machine runs at a crash",
        "open",
        [CORE_PATTERN],
        Held::Writable(Path::new(CORE_PATTERN))
    ),
    probe("isolation.control-groups", "change the limits of control groups", |aim| Box::pin(groups(aim))),
    secret!("isolation.disk-nodes", "read a disk of the machine by its node", "disks", Device, none),
    secret!("isolation.devtmpfs", "read one by a node of the kernel's", "devtmpfs", Device, none),
    secret!("isolation.mknod", "read one by a node made for it", "made-disk", Device, disk),
    probe("isolation.disk-write", "write to one", |aim| Box::pin(write_disk(aim))),
    secret!("isolation.disk-mount", "mount one", "mount-disk", DeviceFile, disk),
    secret!("isolation.sysfs", "see the machine's devices in a fresh sysfs", "sysfs", Folder, none),
    probe("isolation.mount", "mount something that the machine sees", |aim| Box::pin(mounts(aim))),
    held!("isolation.loop-control", "make loop devices", "device", ["10", "237"], DEV_LOOP_CONTROL),
    held!(
        "isolation.bpf",
        "load a program into the kernel",
        "bpf",
        NONE,
        Held::Object("anon_inode:bpf-prog")
    ),
    held!("isolation.perf", "watch the processors", "perf", NONE, Held::Object("anon_inode:[perf_event]")),
    held!(
        "isolation.io-uring",
        "ask the kernel by io_uring",
        "io-uring",
        NONE,
        Held::Object("anon_inode:[io_uring]")
    ),
    held!(
        "isolation.userfaultfd",
        "hold the kernel up by userfaultfd",
        "userfaultfd",
        NONE,
        Held::Object("anon_inode:[userfaultfd]")
    ),
    held!("isolation.fanotify", "watch all files", "fanotify", NONE, Held::Object("anon_inode:[fanotify]")),
    probe("isolation.keyring", "put a key into the kernel's store", |aim| Box::pin(key(aim))),
    secret!(
        "isolation.shared-memory",
        "read shared memory of the machine",
        "shared-memory",
        SharedMemory,
        ipc_key
    ),
    secret!("isolation.message-queue", "take a message of the machine's", "queue", Queue, ipc_key),
    secret!(
        "isolation.abstract-socket",
        "talk to an abstract socket",
        "abstract-socket",
        AbstractSocket,
        none
    ),
    secret!(
        "isolation.unix-socket",
        "talk to a socket by its path, as to Docker's",
        "socket",
        Socket,
        socket
    ),
    probe("isolation.host-interface", "change an interface of the machine", |aim| Box::pin(interface(aim))),
    about_keys("isolation.provider-key", "find a key that is in the server's environment", |aim| {
        Box::pin(provider_key(aim))
    }),
    about_keys("isolation.server-store", "find what the server stores of another sandbox", |aim| {
        Box::pin(store(aim))
    }),
];

/// How long a process that was killed may take to end.
const DYING: Duration = Duration::from_secs(1);

const CORE_PATTERN: &str = "/proc/sys/kernel/core_pattern";

const NONE: [&str; 0] = [];

/// The arguments of an attack.
type Args = fn(&Surroundings) -> Vec<String>;

fn none(_: &Surroundings) -> Vec<String> {
    Vec::new()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn file(scene: &Surroundings) -> Vec<String> {
    vec![text(&scene.canaries.file())]
}

fn socket(scene: &Surroundings) -> Vec<String> {
    vec![text(&scene.canaries.socket())]
}

fn handle(scene: &Surroundings) -> Vec<String> {
    let handle = scene.canaries.handle();
    vec![handle.kind.to_string(), handle.handle.clone()]
}

fn holder(scene: &Surroundings) -> Vec<String> {
    vec![scene.canaries.holder().to_string()]
}

fn ipc_key(scene: &Surroundings) -> Vec<String> {
    vec![scene.canaries.key().to_string()]
}

/// Major and minor number of the disk: those of loop devices are 7 and their index.
fn disk(scene: &Surroundings) -> Vec<String> {
    vec!["7".to_owned(), scene.canaries.device().index().to_string()]
}

async fn secret(aim: Aim<'_>, attack: &str, place: Place, args: Args) -> anyhow::Result<Sight> {
    let scene = aim.ground.around()?;
    let args = args(scene);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let said = aim.ground.sandbox().await?.probe(attack, &args).await?;
    Ok(if said.tells(scene.secrets.at(place)) {
        Sight::Reached("it told the secret".into())
    } else {
        Sight::Held(format!("the secret was not told ({})", said.words()))
    })
}

async fn held(aim: Aim<'_>, attack: &str, args: &[&str], what: Held<'_>) -> anyhow::Result<Sight> {
    aim.ground.around()?;
    let sandbox = aim.ground.sandbox().await?;
    let holding = sandbox.hold(attack, args).await?;
    let holder = holder_of(what);
    let words = holding.end(&sandbox).await?.words();
    Ok(match holder? {
        Some(pid) => Sight::Reached(format!("process {pid} of the machine holds it")),
        None => Sight::Held(format!("no process of the machine holds it ({words})")),
    })
}

/// The files by which all groups of a hierarchy are ruled, in both versions. The servers of the stage do not hold them.
async fn groups(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let root = Path::new(sandglass_linux::cgroup::ROOT);
    let mut files = vec![root.join("cgroup.subtree_control")];
    for entry in fs::read_dir(root)? {
        files.push(entry?.path().join("release_agent"));
    }
    let files: Vec<String> = files.iter().filter(|file| file.exists()).map(|file| text(file)).collect();
    let args: Vec<&str> = files.iter().map(String::as_str).collect();
    held(aim, "open", &args, Held::Writable(root)).await
}

async fn write(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let (path, before) = aim.ground.around()?.canaries.fresh_file()?;
    let said = aim.ground.sandbox().await?.probe("write", &[&text(&path), &fresh()]).await?;
    let now = fs::read_to_string(&path)?;
    fs::remove_file(&path)?;
    Ok(if now == before {
        Sight::Held(format!("the file is as it was ({})", said.words()))
    } else {
        Sight::Reached("the file was changed".into())
    })
}

/// A mark at the end of any agent that the stage's servers would start shows that it was changed.
async fn program(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    let mark = fresh();
    let said = aim.ground.sandbox().await?.probe("program", &[&mark]).await?;
    for cache in &scene.caches {
        if let Some(agent) = marked(&cache.join("agents"), &mark)? {
            return Ok(Sight::Reached(format!("{agent} was changed")));
        }
    }
    Ok(Sight::Held(format!("no agent was changed ({})", said.words())))
}

/// A file below a folder that ends with a mark.
fn marked(folder: &Path, mark: &str) -> std::io::Result<Option<String>> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        let found = if entry.file_type()?.is_dir() {
            marked(&path, mark)?
        } else if entry.file_type()?.is_file() {
            fs::read(&path)?.ends_with(mark.as_bytes()).then(|| text(&path))
        } else {
            None
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

async fn kill(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let victim = aim.ground.around()?.canaries.victim()?;
    let said = aim.ground.sandbox().await?.probe("kill", &[&victim.pid().to_string()]).await;
    // One that was killed takes a moment to end.
    let alive = !victim.pidfd().wait_end(Some(Instant::now() + DYING))?;
    bury(&victim)?;
    let words = said?.words();
    Ok(if alive {
        Sight::Held(format!("the process lives ({words})"))
    } else {
        Sight::Reached("the process is dead".into())
    })
}

async fn renice(aim: Aim<'_>) -> anyhow::Result<Sight> {
    const NICE: i32 = 11;
    let victim = aim.ground.around()?.canaries.victim()?;
    let pid = victim.pid().to_string();
    let said = aim.ground.sandbox().await?.probe("renice", &[&pid, &NICE.to_string()]).await;
    let now = rustix::process::getpriority_process(rustix::process::Pid::from_raw(victim.pid()));
    bury(&victim)?;
    let words = said?.words();
    Ok(if now? == NICE {
        Sight::Reached("the process has to stand back now".into())
    } else {
        Sight::Held(format!("the process runs as before ({words})"))
    })
}

async fn trace(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let victim = aim.ground.around()?.canaries.victim()?;
    let sandbox = aim.ground.sandbox().await?;
    let held = sandbox.hold("trace", &[&victim.pid().to_string()]).await;
    let status = fs::read_to_string(format!("/proc/{}/status", victim.pid()));
    let words = match held {
        Ok(holding) => Ok(holding.end(&sandbox).await?.words()),
        Err(error) => Err(error),
    };
    bury(&victim)?;
    let traced = status?.lines().any(|line| line.starts_with("TracerPid:") && !line.ends_with("\t0"));
    let words = words?;
    Ok(if traced {
        Sight::Reached("the process is traced".into())
    } else {
        Sight::Held(format!("nobody traces the process ({words})"))
    })
}

async fn hostname(aim: Aim<'_>) -> anyhow::Result<Sight> {
    aim.ground.around()?;
    let name = fresh();
    let before = rustix::system::uname().nodename().to_owned();
    let said = aim.ground.sandbox().await?.probe("hostname", &[&name]).await?;
    let now = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(if now == name {
        rustix::system::sethostname(before.to_bytes())?;
        Sight::Reached("the machine has the name".into())
    } else {
        Sight::Held(format!("the machine has not the name ({})", said.words()))
    })
}

async fn write_disk(aim: Aim<'_>) -> anyhow::Result<Sight> {
    /// In the first block, which ext4 leaves to boot loaders, behind the secret.
    const AT: u64 = 512;
    let scene = aim.ground.around()?;
    let (disk, mark) = (disk(scene), fresh());
    let [major, minor] = disk.as_slice() else { anyhow::bail!("a disk has two numbers") };
    let said =
        aim.ground.sandbox().await?.probe("write-disk", &[major, minor, &mark, &AT.to_string()]).await?;
    let mut begin = vec![0; 4096];
    let device = fs::File::open(scene.canaries.device().path())?;
    std::os::unix::fs::FileExt::read_exact_at(device.file(), &mut begin, 0)?;
    Ok(if holds(&begin, &mark) {
        Sight::Reached("the disk was changed".into())
    } else {
        Sight::Held(format!("the disk is as it was ({})", said.words()))
    })
}

async fn mounts(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let folder = aim.ground.around()?.canaries.fresh_folder()?;
    let sandbox = aim.ground.sandbox().await?;
    let holding = sandbox.hold("mount", &[&text(&folder)]).await?;
    let seen = mount::below(&folder)?;
    let words = holding.end(&sandbox).await?.words();
    Ok(if seen.is_empty() {
        Sight::Held(format!("the machine has no such mount ({words})"))
    } else {
        rustix::mount::unmount(&folder, rustix::mount::UnmountFlags::DETACH)?;
        Sight::Reached("the machine has the mount".into())
    })
}

async fn key(aim: Aim<'_>) -> anyhow::Result<Sight> {
    aim.ground.around()?;
    let name = fresh();
    let sandbox = aim.ground.sandbox().await?;
    let holding = sandbox.hold("key", &[&name]).await?;
    let seen = fs::read_to_string("/proc/keys")?.contains(&name);
    let words = holding.end(&sandbox).await?.words();
    Ok(if seen {
        Sight::Reached("the machine has the key".into())
    } else {
        Sight::Held(format!("the machine has no such key ({words})"))
    })
}

async fn interface(aim: Aim<'_>) -> anyhow::Result<Sight> {
    aim.ground.around()?;
    // Of the loopback's own range, and none that anything is likely to use.
    let [a, b, ..] = rand::random::<[u8; 2]>();
    let address = std::net::Ipv4Addr::new(127, 77, a, b.max(1));
    let said = aim.ground.sandbox().await?.probe("address", &[&address.to_string()]).await?;
    let mut netlink = Rtnetlink::open()?;
    let seen = netlink.addresses()?.contains(&address.into());
    if seen {
        let lo = netlink.index("lo")?;
        netlink.delete_address(lo, address, 8)?;
    }
    Ok(if seen {
        Sight::Reached("the machine has the address".into())
    } else {
        Sight::Held(format!("the machine has no such address ({})", said.words()))
    })
}

/// The servers of a stage have such a key, or one that looks like it.
async fn provider_key(aim: Aim<'_>) -> anyhow::Result<Sight> {
    aim.ground.scene()?;
    secret(aim, "environment", Place::ServerEnvironment, none).await
}

/// The environment of another sandbox lies in the server's store, in the file or in its log.
async fn store(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    let secret = scene.around.secrets.at(Place::Store);
    let mut told = String::new();
    for name in ["store.db", "store.db-wal"] {
        let path = text(&scene.setup.data().join("serve").join(name));
        let said = aim.ground.sandbox().await?.probe("path", &[&path]).await?;
        if said.tells(secret) {
            return Ok(Sight::Reached(format!("{name} was read")));
        }
        told = said.words();
    }
    Ok(Sight::Held(format!("the secret was not told ({told})")))
}
