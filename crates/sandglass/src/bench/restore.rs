//! Sandboxes that come back: made of a snapshot, resumed, and forked.

mod stopped;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fs_err as fs;
use sandglass_control::template;
use sandglass_engine::EngineError;
use sandglass_engine::gvisor::HostPaths;
use sandglass_engine::gvisor::bare::Bare;
use sandglass_linux::lock::FolderLock;
use sandglass_types::{SandboxId, SnapshotId};
use tokio::task::JoinSet;

use super::millis;
use super::report::{Bound, Report};
use super::server::{Endpoint, Server};
use super::wire::Connection;
use crate::cli;
use crate::client::Reach;
use crate::data_dir::DataDir;
use crate::guest_binary;
use crate::serve::find_runsc;

/// How slow each may be, as a multiple of its reference.
const MAX_CREATE: f64 = 1.0;
const MAX_RESUME: f64 = 0.5;
const MAX_FORK: f64 = 1.0;

/// For how much longer its source may stand still than for the same by hand.
const MAX_STOPPED: f64 = 1.3;

/// How many are made of one snapshot at a time, and how long that may take, in milliseconds.
const AT_ONCE: usize = 20;
const MAX_AT_ONCE: f64 = 800.0;

/// How long what is prepared in the background may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Has 64 MB of memory that is no zeros, and says so.
const HEAP: &str =
    "python3 -c 'import os,time; heap=os.urandom(64<<20); print(len(heap),flush=True); time.sleep(1e6)'";

pub(crate) async fn run(
    server: &Server,
    endpoint: &Endpoint,
    common: &cli::bench::Common,
    samples: &cli::bench::Samples,
    report: &mut Report,
) -> anyhow::Result<()> {
    if !server.shares_blocks()? {
        report.note("its file system can't share blocks between files, so each copy of a disk is written");
    }
    let reference = Reference::open(server, common)?;
    let mut connection = Connection::open(&endpoint.url).await?;
    let source = connection.create(&endpoint.key).await?;
    let snapshot = Snapshot::of(server, endpoint, &source).await?;
    let (mut created, mut resumed, mut restored) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..samples.warmup + samples.n {
        server.rest().await?;
        let made = report.keep(create(server, endpoint, &snapshot.name).await);
        let back = report.keep(resume(server, endpoint, &mut connection, &source).await);
        server.rest().await?;
        let bare = report.keep(reference.restore(&snapshot));
        if round >= samples.warmup {
            created.extend(made.map(millis));
            resumed.extend(back.map(millis));
            restored.extend(bare.map(millis));
        }
    }
    let (mut forked, mut written) = (Vec::new(), Vec::new());
    let (mut stopped, mut bare_stopped) = (Vec::new(), Vec::new());
    let mut busy = Connection::open(&endpoint.url).await?;
    let heap = Heap::fill(endpoint, &mut busy).await?;
    let of_heap = Snapshot::of(server, endpoint, &heap).await?;
    for round in 0..samples.warmup + samples.n {
        server.rest().await?;
        let ours = report.keep(fork(server, endpoint, &mut connection, &heap).await);
        server.rest().await?;
        let silence = report.keep(stopped::stopped(server, endpoint, &mut connection, &heap).await);
        server.rest().await?;
        let bare = report.keep(reference.fork(&of_heap));
        if round >= samples.warmup {
            forked.extend(ours.map(millis));
            stopped.extend(silence.map(millis));
            written.extend(bare.as_ref().map(|bare| millis(bare.to_copy)));
            bare_stopped.extend(bare.map(|bare| millis(bare.stopped)));
        }
    }
    server.rest().await?;
    let at_once = report.keep(many(server, endpoint, &snapshot.name).await);
    for snapshot in [&snapshot, &of_heap] {
        report.keep(endpoint.api()?.delete_snapshot(&snapshot.name).await);
    }

    let restored = report.series("reference: runsc restore", "ms", restored);
    let against = |ours: Option<super::stats::Summary>, bare: Option<super::stats::Summary>| {
        ours.zip(bare).map(|(ours, bare)| ours.p50 / bare.p50)
    };
    let created = report.series("create of a snapshot", "ms", created);
    report.target("p50 of create against it", Bound::AtMost, MAX_CREATE, "times", against(created, restored));
    let resumed = report.series("resume", "ms", resumed);
    report.target("p50 of resume against it", Bound::AtMost, MAX_RESUME, "times", against(resumed, restored));
    let written = report.series("reference: runsc checkpoint and restore, 64 MB", "ms", written);
    let forked = report.series("fork to first output of the copy, 64 MB", "ms", forked);
    report.target("p50 of fork against them", Bound::AtMost, MAX_FORK, "times", against(forked, written));
    let bare_stopped =
        report.series("reference: runsc pause, checkpoint and resume, 64 MB", "ms", bare_stopped);
    let stopped = report.series("its source stands still, 64 MB", "ms", stopped);
    let against_bare = against(stopped, bare_stopped);
    report.target("p50 of the standstill against them", Bound::AtMost, MAX_STOPPED, "times", against_bare);
    let at_once: Vec<f64> = at_once.map(millis).into_iter().collect();
    report.series("20 of a snapshot at once", "ms", at_once.clone());
    report.target("20 at once", Bound::AtMost, MAX_AT_ONCE, "ms", at_once.first().copied());
    Ok(())
}

/// A snapshot, and where its image is.
struct Snapshot {
    name: String,
    image: PathBuf,
}

impl Snapshot {
    async fn of(server: &Server, endpoint: &Endpoint, source: &Reach) -> anyhow::Result<Self> {
        let answer = endpoint.api()?.snapshot(&source.id, None).await?;
        let name = answer["snapshotID"].as_str().context("the snapshot has no name")?.to_owned();
        let id: SnapshotId = name.split(':').next().unwrap_or(&name).parse()?;
        Ok(Self { image: server.image(&id.image()), name })
    }
}

/// A sandbox with much in its memory.
struct Heap;

impl Heap {
    async fn fill(endpoint: &Endpoint, connection: &mut Connection) -> anyhow::Result<Reach> {
        let sandbox = connection.create(&endpoint.key).await?;
        // It goes on when its client has gone.
        let line = format!(
            "nohup {HEAP} > /tmp/heap 2>&1 & until grep -q . /tmp/heap; do sleep 0.1; done; cat /tmp/heap"
        );
        let said = connection.shell(&sandbox, &line).await?.end().await?;
        if said != b"67108864\n" {
            bail!("no memory was filled: {:?}", String::from_utf8_lossy(&said));
        }
        Ok(sandbox)
    }
}

async fn end(server: &Server, endpoint: &Endpoint, id: &str) -> anyhow::Result<()> {
    endpoint.api()?.kill(id).await?;
    server.settle(id).await
}

/// One sandbox of a snapshot, over a new connection, to the answer: then it can be reached.
async fn create(server: &Server, endpoint: &Endpoint, snapshot: &str) -> anyhow::Result<Duration> {
    let started = Instant::now();
    let mut connection = Connection::open(&endpoint.url).await?;
    let sandbox = connection.create_of(&endpoint.key, snapshot).await?;
    let took = started.elapsed();
    end(server, endpoint, &sandbox.id).await?;
    Ok(took)
}

/// A resume, to the answer. The pause is long enough ago that what is prepared then is there.
async fn resume(
    server: &Server,
    endpoint: &Endpoint,
    connection: &mut Connection,
    sandbox: &Reach,
) -> anyhow::Result<Duration> {
    endpoint.api()?.pause(&sandbox.id, true).await?;
    server.prepared(&sandbox.id.parse()?, PATIENCE).await?;
    server.rest().await?;
    let started = Instant::now();
    connection.connect(&endpoint.key, &sandbox.id).await?;
    Ok(started.elapsed())
}

/// A fork, to the first output of a command in the copy.
async fn fork(
    server: &Server,
    endpoint: &Endpoint,
    connection: &mut Connection,
    source: &Reach,
) -> anyhow::Result<Duration> {
    let started = Instant::now();
    let copy = connection.fork(&endpoint.key, &source.id).await?;
    let mut events = connection.shell(&copy, "echo hi").await?;
    let output = events.first_stdout().await?;
    let took = started.elapsed();
    if output != b"hi\n" {
        bail!("the command wrote {:?}", String::from_utf8_lossy(&output));
    }
    events.end().await?;
    events.drain().await?;
    end(server, endpoint, &copy.id).await?;
    Ok(took)
}

/// Many of a snapshot at the same time, to the last answer.
async fn many(server: &Server, endpoint: &Endpoint, snapshot: &str) -> anyhow::Result<Duration> {
    let started = Instant::now();
    let mut all = JoinSet::new();
    for _ in 0..AT_ONCE {
        let (endpoint, snapshot) = (endpoint.clone(), snapshot.to_owned());
        all.spawn(
            async move { Connection::open(&endpoint.url).await?.create_of(&endpoint.key, &snapshot).await },
        );
    }
    let made = all.join_all().await;
    let took = started.elapsed();
    for sandbox in made {
        end(server, endpoint, &sandbox?.id).await?;
    }
    Ok(took)
}

/// The same images under a bare `runsc`, in a folder of its own that the ledger can be asked about.
struct Reference {
    bare: Bare,
    folder: PathBuf,
    _lock: FolderLock,
}

impl Reference {
    fn open(server: &Server, common: &cli::bench::Common) -> anyhow::Result<Self> {
        let base = template::load(server.cache(), "base")?.context("the template is not prepared")?;
        let (data, lock) = DataDir::open_or_create(&server.reference(), cli::Engine::Gvisor)?;
        let paths = HostPaths { data: data.host(), cache: server.cache().to_owned() };
        let runsc = find_runsc(common.runsc.as_deref())?;
        let guest = guest_binary::install(server.cache(), None)?;
        let bare = Bare::open(&paths, data.instance(), &runsc, &guest, &base.rootfs)?;
        Ok(Self { bare, folder: data.host(), _lock: lock })
    }

    fn restore(&self, of: &Snapshot) -> anyhow::Result<Duration> {
        let (_restored, took) = self.bare.restore(&of.image).context("the reference failed")?;
        Ok(took)
    }

    /// A pause of a running one, a checkpoint, a resume, and a restore of that. No command is run in it, so it does less.
    fn fork(&self, of: &Snapshot) -> anyhow::Result<BareFork> {
        let (source, _) = self.bare.restore(&of.image).context("the reference failed")?;
        let folder = tempfile::tempdir_in(&self.folder)?;
        let image = folder.path().join("image");
        fs::create_dir(&image)?;
        let checkpoint = image.join("checkpoint");
        fs::create_dir(&checkpoint)?;
        let by_hand = || {
            let paused = source.pause()?;
            let written = source.checkpoint(&checkpoint)?;
            Ok::<_, EngineError>((paused, written, source.resume()?))
        };
        let (paused, written, resumed) = by_hand().context("the reference failed")?;
        // What it is described by, and its disk, are those of the image that it is made of: nothing has changed there.
        for name in ["meta.json", "disk.img"] {
            fs::hard_link(of.image.join(name), image.join(name))?;
        }
        let (_restored, took) = self.bare.restore(&image).context("the reference failed")?;
        Ok(BareFork { to_copy: written + took, stopped: paused + written + resumed })
    }
}

/// How long it took by hand.
struct BareFork {
    to_copy: Duration,
    stopped: Duration,
}

impl Server {
    /// Where an image of it is.
    fn image(&self, image: &SandboxId) -> PathBuf {
        self.host_paths().image(image)
    }

    /// Waits until the next computer of a paused sandbox is made.
    async fn prepared(&self, id: &SandboxId, patience: Duration) -> anyhow::Result<()> {
        let record = self.host_paths().sandbox(id).dir().join("state.json");
        let deadline = Instant::now() + patience;
        while !fs::read_to_string(&record).is_ok_and(|text| text.contains("\"waits\"")) {
            if Instant::now() > deadline {
                bail!("nothing was prepared for sandbox {id} within {} s", patience.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // It is stopped right after that.
        tokio::time::sleep(Duration::from_millis(20)).await;
        Ok(())
    }

    /// Whether its data folder is on a file system where a copy of a file is none until it is written to.
    fn shares_blocks(&self) -> anyhow::Result<bool> {
        let folder = tempfile::tempdir_in(self.host_paths().data)?;
        let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
        fs::write(&one, "x")?;
        let (from, to) = (fs::File::open(one)?, fs::File::create(two)?);
        Ok(rustix::fs::ioctl_ficlone(&to, &from).is_ok())
    }
}
