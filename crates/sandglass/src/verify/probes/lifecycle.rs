//! What is left of a sandbox.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use fs_err as fs;
use sandglass_linux::loopdev::LoopDevice;
use sandglass_linux::namespace::Netns;
use sandglass_linux::process::{Launch, run as run_program};
use sandglass_types::SandboxId;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{Aim, Attack, Control, Group, Probe};
use crate::verify::canary::bury;
use crate::verify::checklist::Point;
use crate::verify::ground::{GUEST, Scene};
use crate::verify::judge::Sight;
use crate::verify::sandbox::Sandbox;
use crate::verify::secrets::fresh;
use crate::verify::server::Endpoint;
use crate::verify::witness::{Counts, Kind};

/// How many sandboxes are there at one time.
const AT_A_TIME: u32 = 8;

/// How long what is being removed may still be there.
const PATIENCE: Duration = Duration::from_secs(40);

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(200);

/// How many equal looks make a machine that is at rest.
const AT_REST: u32 = 4;

const fn probe(id: &'static str, what: &'static str, attack: Attack) -> Probe {
    let (group, control) = (Group::Lifecycle, Control::Asked);
    Probe { id, group, what, points: &[Point::Disposal], control, attack }
}

/// All of them.
pub(super) const PROBES: &[Probe] = &[
    probe("lifecycle.processes", "leave a process behind, in many lives", |aim| {
        Box::pin(left(aim, Kind::Processes))
    }),
    probe("lifecycle.mounts", "leave a mount behind", |aim| Box::pin(left(aim, Kind::Mounts))),
    probe("lifecycle.loop-devices", "leave a loop device behind", |aim| {
        Box::pin(left(aim, Kind::LoopDevices))
    }),
    probe("lifecycle.namespaces", "leave a namespace behind", |aim| Box::pin(left(aim, Kind::Namespaces))),
    probe("lifecycle.control-groups", "leave a control group behind", |aim| {
        Box::pin(left(aim, Kind::ControlGroups))
    }),
    probe("lifecycle.files", "leave a file behind", |aim| Box::pin(left(aim, Kind::Files))),
    probe("lifecycle.ledger", "leave what the ledger would name", |aim| Box::pin(ledger(aim))),
    probe("lifecycle.daemons", "outlive the sandbox as a daemon", |aim| Box::pin(daemons(aim))),
    probe("lifecycle.server-killed", "outlive a server that is killed", |aim| Box::pin(server_killed(aim))),
    Probe {
        control: Control::Bare,
        ..probe("lifecycle.next-sandbox", "leave a text for the next sandbox", |aim| Box::pin(next(aim)))
    },
];

/// What there was before many sandboxes, and after.
#[derive(Debug)]
pub(in crate::verify) struct Cycled {
    before: Counts,
    after: Counts,
}

/// The counts of a machine on which nothing is being made or removed any more.
async fn at_rest(scene: &Scene) -> anyhow::Result<Counts> {
    let deadline = Instant::now() + PATIENCE;
    let (mut last, mut equal) = (scene.counts()?, 0);
    while equal < AT_REST && Instant::now() < deadline {
        sleep(INTERVAL).await;
        let now = scene.counts()?;
        equal = if now == last { equal + 1 } else { 0 };
        last = now;
    }
    Ok(last)
}

/// The counts, as soon as none is higher than before, or when that takes too long.
async fn back_to(scene: &Scene, before: &Counts) -> anyhow::Result<Counts> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = scene.counts()?;
        if now.excess(before).is_empty() || Instant::now() > deadline {
            return Ok(now);
        }
        sleep(INTERVAL).await;
    }
}

/// Many sandboxes, some at a time, each made, used and ended.
async fn cycle(endpoint: &Endpoint, count: u32) -> anyhow::Result<()> {
    let done = Arc::new(AtomicU32::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..AT_A_TIME.min(count) {
        let (endpoint, done) = (endpoint.clone(), Arc::clone(&done));
        workers.spawn(async move {
            while done.fetch_add(1, Ordering::Relaxed) < count {
                let sandbox = Sandbox::create(&endpoint, GUEST, &json!({})).await?;
                let used = sandbox.run(&["sh", "-c", "echo x > /tmp/x; echo y > /dev/shm/y"]).await;
                sandbox.kill().await?;
                used?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker??;
    }
    Ok(())
}

async fn cycled(scene: &Scene, endpoint: &Endpoint) -> anyhow::Result<Cycled> {
    // What a server makes once and keeps is not left behind.
    cycle(endpoint, AT_A_TIME).await?;
    let before = at_rest(scene).await?;
    cycle(endpoint, scene.cycles).await?;
    let after = back_to(scene, &before).await?;
    Ok(Cycled { before, after })
}

async fn left(aim: Aim<'_>, kind: Kind) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    let cycled = scene.cycled.get_or_try_init(|| cycled(scene, &aim.ground.endpoint)).await?;
    let more = if aim.control {
        let before = at_rest(scene).await?;
        let planted = Planted::of(scene, kind)?;
        let after = scene.counts()?;
        planted.remove()?;
        after.of(kind).saturating_sub(before.of(kind))
    } else {
        cycled.after.of(kind).saturating_sub(cycled.before.of(kind))
    };
    let (name, cycles) = (kind.name(), scene.cycles);
    Ok(if more == 0 {
        Sight::Held(format!(
            "{} {name} before {cycles} sandboxes, and not more after",
            cycled.before.of(kind)
        ))
    } else {
        Sight::Reached(format!("{more} {name} more than before"))
    })
}

/// Something that an end which is not whole would leave.
enum Planted {
    Process(sandglass_linux::process::Child),
    Mount(std::path::PathBuf),
    Loop(#[expect(dead_code, reason = "it is there as long as this is")] LoopDevice),
    Namespace(#[expect(dead_code, reason = "it is there as long as this is")] Netns),
    Folder(std::path::PathBuf),
}

impl Planted {
    fn of(scene: &Scene, kind: Kind) -> anyhow::Result<Self> {
        let folder = || scene.around.canaries.fresh_folder();
        Ok(match kind {
            Kind::Processes => Self::Process(scene.around.canaries.victim()?),
            Kind::Mounts => {
                let folder = folder()?;
                rustix::mount::mount_bind(&folder, &folder)?;
                Self::Mount(folder)
            }
            Kind::LoopDevices => {
                let file = fs::OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create_new(true)
                    .open(folder()?.join("image"))?;
                file.set_len(1 << 20)?;
                Self::Loop(LoopDevice::attach(file.file())?)
            }
            Kind::Namespaces => Self::Namespace(Netns::create()?),
            Kind::ControlGroups => {
                let parent =
                    scene.groups()?.parent_folders().next().context("there are no control groups")?;
                let folder = parent.join("left");
                fs::create_dir(&folder)?;
                Self::Folder(folder)
            }
            Kind::Files => {
                let folder = scene.setup.data().join("host").join(fresh());
                fs::create_dir(&folder)?;
                Self::Folder(folder)
            }
        })
    }

    fn remove(self) -> anyhow::Result<()> {
        match self {
            Self::Process(process) => bury(&process),
            Self::Mount(folder) => Ok(rustix::mount::unmount(folder, rustix::mount::UnmountFlags::DETACH)?),
            Self::Loop(_) | Self::Namespace(_) => Ok(()),
            Self::Folder(folder) => Ok(fs::remove_dir(folder)?),
        }
    }
}

/// The program's own proof that nothing is left. What must be noticed is the folder of a sandbox that nobody has.
async fn ledger(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    scene.cycled.get_or_try_init(|| cycled(scene, &aim.ground.endpoint)).await?;
    let folder = scene.setup.data().join("host/sandboxes").join(SandboxId::random().as_str());
    let wait = if aim.control {
        fs::create_dir(&folder)?;
        "0"
    } else {
        "30"
    };
    let program = std::env::current_exe()?;
    let launch = Launch::new(program)?
        .args(["ledger", "--json", "--wait", wait, "--data-dir"])?
        .arg(scene.setup.data())?;
    let output = tokio::task::spawn_blocking(move || run_program(launch, b"", PATIENCE, 1 << 20)).await??;
    if aim.control && folder.exists() {
        fs::remove_dir(&folder)?;
    }
    Ok(if output.status.success() {
        Sight::Held("the ledger is clean".into())
    } else {
        Sight::Reached("the ledger is not clean".into())
    })
}

/// Processes that left their session and their parent. As long as the sandbox is there, so are they.
async fn daemons(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    let before = at_rest(scene).await?;
    let sandbox = aim.ground.fresh(&json!({})).await?;
    // Nothing of it may hold the command's output, or that would not end.
    let command = format!("{} probe daemons 50 </dev/null >/dev/null 2>&1", sandbox.guest);
    sandbox.run(&["sh", "-c", &command]).await?;
    let after = if aim.control {
        let after = scene.counts()?;
        sandbox.kill().await?;
        back_to(scene, &before).await?;
        after
    } else {
        sandbox.kill().await?;
        back_to(scene, &before).await?
    };
    let more = after.of(Kind::Processes).saturating_sub(before.of(Kind::Processes));
    Ok(if more == 0 {
        Sight::Held("all of them are gone".into())
    } else {
        Sight::Reached(format!("{more} processes more than before"))
    })
}

/// The server dies at once, and the next one finds and ends all that it had. Before there is a next one, it is there.
async fn server_killed(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    let before = at_rest(scene).await?;
    let sandboxes = [aim.ground.fresh(&json!({})).await?, aim.ground.fresh(&json!({})).await?];
    let mut server = scene.server.lock().await;
    server.kill()?;
    let orphaned = scene.counts()?;
    let Endpoint { url, key } = server.endpoint.clone();
    let listen = url.strip_prefix("http://").context("the server has no address")?;
    *server = scene.setup.start(listen, Some(&key)).await?;
    drop(server);
    for sandbox in &sandboxes {
        sandbox.kill().await.context("a sandbox was lost")?;
    }
    let after = back_to(scene, &before).await?;
    let excess = after.excess(&before);
    if !excess.is_empty() {
        tracing::error!(
            excess,
            log = scene.setup.log_tail(),
            "the next server did not end all that there was"
        );
    }
    let excess = if aim.control { orphaned.excess(&before) } else { after.excess(&before) };
    Ok(if excess.is_empty() {
        Sight::Held("the next server ended all that it had".into())
    } else {
        Sight::Reached(excess)
    })
}

async fn next(aim: Aim<'_>) -> anyhow::Result<Sight> {
    aim.ground.scene()?;
    let secret = fresh();
    let first = aim.ground.fresh(&json!({})).await?;
    first.probe("leave", &[&secret]).await?;
    first.kill().await?;
    let second = aim.ground.fresh(&json!({})).await?;
    let said = second.probe("find", &[]).await?;
    second.kill().await?;
    Ok(if said.tells(&secret) {
        Sight::Reached("the next sandbox found it".into())
    } else {
        Sight::Held("the next sandbox did not find it".into())
    })
}
