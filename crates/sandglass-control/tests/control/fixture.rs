//! A data folder, and servers on it, one after the other.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sandglass_broker::connection::Written;
use sandglass_control::{
    Broker, Budgets, Config, Control, CreateSandbox, Egress, Kept, Models, OwnConnection, Patience,
    RunsConfig, template,
};
use sandglass_egress::policy::{Ingress, Operator, Policy};
use sandglass_egress::proxy::{Caps, Direct};
use sandglass_egress::resolver::FixedNames;
use sandglass_egress::retention::Retention;
use sandglass_engine::Engine;
use sandglass_engine::deadline::{self, Moment};
use sandglass_engine::fake::{FakeConfig, FakeEngine};
use sandglass_engine::host::{Host, server};
use sandglass_linux::fdpass;
use sandglass_store::{CommandDefaults, SandboxRow, SqliteStore, Store, TemplateSpec};
use sandglass_types::clock::ManualClock;
use sandglass_types::{
    Clock as _, Digest, EndReason, Error, InstanceId, Lifetime, SandboxId, SandboxState, SystemClock, TeamId,
};
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::task::AbortOnDropHandle;

use crate::scripted::{Agents, Manner};
use crate::trouble::{Trouble, Troubled};

/// What signs tokens.
pub(crate) const SIGNING: [u8; 32] = [7; 32];

/// Longest wait for anything: only reached when something is wrong.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) const DAY: Duration = Duration::from_secs(24 * 3600);

/// Looks again until `look` finds something.
pub(crate) async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A data folder with its clock and its trouble. Whatever still runs in it ends with this.
pub(crate) struct World {
    dir: TempDir,
    instance: InstanceId,
    /// What its sandboxes run, if they are threads.
    agents: Option<Arc<Agents>>,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) trouble: Arc<Trouble>,
    pub(crate) patience: Patience,
    pub(crate) budgets: Budgets,
    pub(crate) pools: HashMap<String, u32>,
    /// What sandboxes may reach at most.
    pub(crate) operator: Operator,
    /// Content of the root file system of `base`, if it is another one than that of nothing.
    pub(crate) rootfs: Option<Digest>,
    /// How long nobody has used a snapshot when it is compressed.
    pub(crate) compress_after: Option<Duration>,
}

impl World {
    pub(crate) fn new() -> Self {
        Self {
            dir: tempfile::Builder::new().prefix("sandglass-control-").tempdir().unwrap(),
            instance: InstanceId::random(),
            agents: None,
            clock: Arc::new(ManualClock::new(SystemClock.now())),
            trouble: Arc::default(),
            // The wall clock of these tests jumps, and nobody wants to wait for it.
            patience: Patience { clock_check: Duration::from_millis(100), ..Patience::default() },
            budgets: Budgets::UNBOUNDED,
            pools: HashMap::new(),
            operator: Operator::default(),
            rootfs: None,
            compress_after: None,
        }
    }

    /// One whose sandboxes are threads, which can be written to images.
    pub(crate) fn scripted(manner: Manner) -> Self {
        let mut world = Self::new();
        world.agents = Some(Arc::new(Agents::new(manner)));
        world
    }

    pub(crate) fn engine(&self) -> FakeEngine {
        let agent = std::env::var_os("SANDGLASS_GUEST").expect(
            "SANDGLASS_GUEST must name the guest agent: `make guest` builds it, and the Makefile sets it for all tests",
        );
        let config = FakeConfig {
            data: self.dir.path().join("host"),
            instance: self.instance.clone(),
            agent: agent.into(),
            agent_args: vec!["unsealed".into()],
        };
        match &self.agents {
            Some(agents) => FakeEngine::scripted(config, Arc::<Agents>::clone(agents)).unwrap(),
            None => FakeEngine::open(config).unwrap(),
        }
    }

    fn sandboxes(&self) -> PathBuf {
        self.dir.path().join("host/sandboxes")
    }

    /// The time that the host gives a sandbox, in seconds; `None` if it has no deadline there.
    pub(crate) fn kept(&self, id: &SandboxId) -> Option<u64> {
        let now = Moment { wall: self.clock.now(), ..Moment::now() };
        let all = deadline::all(&self.sandboxes()).unwrap();
        let (_, kept) = all.into_iter().find(|(found, _)| found == id)?;
        // Some of it has passed.
        Some(kept.left(now).as_secs().next_multiple_of(60))
    }

    /// The home of a sandbox's user.
    pub(crate) fn home(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.as_str()).join("home")
    }

    /// Starts a server, as a person would after the last one ended.
    pub(crate) async fn start(&self) -> Result<Server, Error> {
        let (ours, theirs) = fdpass::pair().unwrap();
        let line = theirs.try_clone().unwrap();
        let engine: Arc<dyn Engine> =
            Arc::new(Troubled { engine: self.engine(), trouble: Arc::clone(&self.trouble) });
        let host_thread = std::thread::spawn(move || server::run(theirs, &engine).unwrap());
        let (host, answers) = Host::connect(ours).unwrap();
        let answers = AbortOnDropHandle::new(tokio::spawn(answers));
        let store = Arc::new(SqliteStore::open(&self.dir.path().join("store.db")).await.unwrap());
        let team = match store.teams().await.unwrap().first() {
            Some(team) => team.id,
            None => store.create_team("default", self.clock.now()).await.unwrap().id,
        };
        let mut base = template::unbuilt("base").unwrap();
        base.rootfs = self.rootfs.unwrap_or(base.rootfs);
        let config = Config {
            templates: HashMap::from([(base.name.clone(), base)]),
            max_lifetime: DAY,
            idle_timeout: None,
            domain: None,
            patience: self.patience,
            egress: Egress {
                operator: self.operator.clone(),
                resolver: Arc::new(FixedNames::default()),
                receipts: self.dir.path().join("receipts"),
                retention: Retention { age: HOUR, bytes: 1 << 20 },
                caps: Caps::default(),
                dial: Arc::new(Direct::new(1, 1).0),
                domain: None,
                totals: Arc::default(),
            },
            models: Some(models()),
            broker: broker(),
            runs: RunsConfig::default(),
            limits: sandglass_types::Limits::default(),
            budgets: self.budgets,
            keep_audit: HOUR,
            pools: self.pools.clone(),
            warm_up: self.agents.is_none(),
            keep_snapshots: Kept { last: KEPT, time: DAY },
            compress_after: self.compress_after,
            probes: None,
        };
        let shared: Arc<dyn Store> = Arc::<SqliteStore>::clone(&store);
        let control = Control::start(config, shared, host, Arc::<ManualClock>::clone(&self.clock)).await?;
        Ok(Server { control, store, team, line, host: host_thread, answers })
    }

    /// Waits until nothing of any sandbox is left on the machine.
    pub(crate) async fn nothing_left(&self) {
        let engine = self.engine();
        eventually("nothing is left", async || engine.list().unwrap().is_empty().then_some(())).await;
        assert_eq!(std::fs::read_dir(self.sandboxes()).unwrap().count(), 0);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let engine = self.engine();
        for (id, _) in engine.list().unwrap_or_default() {
            let _ = engine.destroy(&id);
        }
    }
}

/// A server that runs.
pub(crate) struct Server {
    pub(crate) control: Control,
    pub(crate) store: Arc<SqliteStore>,
    pub(crate) team: TeamId,
    line: OwnedFd,
    host: JoinHandle<()>,
    answers: AbortOnDropHandle<()>,
}

/// A create request that lives for so long.
pub(crate) fn request(timeout: Duration) -> CreateSandbox {
    CreateSandbox {
        template: "base".into(),
        lifetime: Lifetime::of(timeout),
        secured: false,
        metadata: BTreeMap::new(),
        env: BTreeMap::new(),
        allow_internet_access: None,
        policy: Policy::default(),
        ingress: Ingress::default(),
        volumes: Vec::new(),
        connections: Vec::new(),
        idempotency: None,
    }
}

/// How many snapshots of a sandbox are kept that have no name.
pub(crate) const KEPT: NonZeroU32 = NonZeroU32::new(3).unwrap();

pub(crate) const HOUR: Duration = Duration::from_secs(3600);

impl Server {
    /// Stops it. Sandboxes run on.
    pub(crate) async fn stop(self) {
        let Self { control, store, line, host, answers, .. } = self;
        control.stop().await;
        store.close().await;
        drop((control, store, answers));
        // What the line's last user has closed.
        rustix::net::shutdown(&line, rustix::net::Shutdown::Both).unwrap();
        tokio::task::spawn_blocking(move || host.join().unwrap()).await.unwrap();
    }

    /// Cuts the line to the host, as the death of that process would.
    pub(crate) fn lose_host(&self) {
        rustix::net::shutdown(&self.line, rustix::net::Shutdown::Both).unwrap();
    }

    pub(crate) async fn create(&self) -> SandboxId {
        self.control.create(self.team, request(HOUR)).await.unwrap().id
    }

    pub(crate) async fn kill(&self, id: &SandboxId) {
        self.control.kill(self.team, id).await.unwrap();
    }

    pub(crate) async fn row(&self, id: &SandboxId) -> SandboxRow {
        self.store.sandbox(id).await.unwrap().unwrap()
    }

    /// All sandboxes in a state.
    pub(crate) async fn in_state(&self, state: SandboxState) -> Vec<SandboxId> {
        let node = self.store.node().await.unwrap();
        self.store.on_node(node, &[state]).await.unwrap().into_iter().map(|row| row.id).collect()
    }

    /// Waits for the end of a sandbox; why it came.
    pub(crate) async fn ended(&self, id: &SandboxId) -> EndReason {
        let row = eventually("the sandbox ends", async || {
            Some(self.row(id).await).filter(|row| row.state == SandboxState::Ended)
        });
        row.await.end_reason.unwrap()
    }

    /// What its history says about the step that began its end.
    pub(crate) async fn why(&self, id: &SandboxId) -> String {
        let events = self.control.events(self.team, id).await.unwrap();
        events.into_iter().find(|event| event.end_reason.is_some()).unwrap().detail
    }

    /// Starts a line of bash in a sandbox and returns when it runs. It goes on when this returns.
    pub(crate) async fn run(&self, id: &SandboxId, line: &str) {
        let message =
            serde_json::json!({ "process": { "cmd": "/bin/bash", "args": ["-c", line] }, "stdin": false });
        let message = message.to_string();
        // One message of the Connect protocol's streams: no flags, its length, itself.
        let mut body = vec![0];
        body.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
        body.extend(message.bytes());
        let head = format!(
            "POST /process.Process/Start HTTP/1.1\r\nHost: guest\r\nContent-Type: application/connect+json\r\n\
             Connect-Protocol-Version: 1\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let live = self.control.live(id).expect("it can be reached");
        let mut stream = live.guest_api().await.unwrap();
        stream.write_all(&[head.as_bytes(), &body].concat()).await.unwrap();
        let mut answer = Vec::new();
        let started = async {
            while !String::from_utf8_lossy(&answer).contains("\"pid\"") {
                let read = stream.read_buf(&mut answer).await.unwrap();
                assert_ne!(read, 0, "{}", String::from_utf8_lossy(&answer));
            }
        };
        tokio::time::timeout(PATIENCE, started).await.expect("the command starts");
    }
}

/// Waits for a file that a command writes, and reads it.
pub(crate) async fn written(path: &Path) -> String {
    eventually("the file is written", async || {
        std::fs::read_to_string(path).ok().filter(|text| text.ends_with('\n'))
    })
    .await
}

/// Signals a process of the test.
pub(crate) fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// Whether a process runs, and was not only left uncollected.
pub(crate) fn runs(pid: i32) -> bool {
    std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|environment| !environment.is_empty())
}

impl World {
    /// Starts a command that runs until it is ended. Returns the process of the command, and that of the agent.
    pub(crate) async fn start_command(&self, server: &Server, id: &SandboxId) -> (i32, i32) {
        server.run(id, "echo $PPID $$ >pids; exec sleep 100000").await;
        let pids = written(&self.home(id).join("pids")).await;
        let pids: Vec<i32> = pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
        (pids[1], pids[0])
    }
}

/// What a template is built on this from, and nothing more.
pub(crate) fn spec(base: &str) -> TemplateSpec {
    TemplateSpec {
        base: base.into(),
        start: None,
        ready: None,
        ready_timeout: 60,
        pool: 0,
        agent: None,
        inherited: Vec::new(),
    }
}

/// What its commands have that say nothing else.
pub(crate) fn defaults() -> CommandDefaults {
    CommandDefaults { user: "zoe".into(), workdir: "/srv".into(), env: BTreeMap::new() }
}

/// One connection of the operator's.
pub(crate) fn broker() -> Broker {
    let written = json!({"name": "operators", "target": "http://api.test", "methods": ["GET"], "paths": ["/"],
        "credential": "bearer"});
    let written: Written = serde_json::from_value(written).unwrap();
    let connection = written.clone().try_into().unwrap();
    let credential = "the operator's own".parse().unwrap();
    Broker::new(&[9; 32], [OwnConnection { written, connection, credential }])
}

/// One model, at a micro-dollar a token.
fn models() -> Models {
    let table = "[large]\nprovider = \"one\"\naliases = [\"latest\"]\n\
         price = { input = 1_000_000, output = 1_000_000, max_input = 1000, max_output = 1000 }\n";
    let prices = sandglass_models::price::Prices::parse(table).unwrap();
    let signer = sandglass_models::token::Signer::new(SIGNING);
    Models {
        prices: Arc::new(prices),
        signer,
        most: sandglass_types::Micros(1_000_000),
        totals: Arc::default(),
    }
}
