//! Money under all that can happen to calls at the same time: many of them, clients that leave, providers that lie, and servers that end
//! at any moment and are followed by others on the same store.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use sandglass_egress::policy::{Own, Service};
use sandglass_egress::proxy::{Dial as _, Direct};
use sandglass_egress::resolver::FixedNames;
use sandglass_gateway::config::Caps;
use sandglass_gateway::{Config, Gateway, Limits, Nobody, Provider, Waits};
use sandglass_models::Dialect;
use sandglass_models::price::Prices;
use sandglass_models::token::{Claims, Signer};
use sandglass_store::conformance::{sandbox_of, step};
use sandglass_store::{Money, NewBudget, NewSandbox, SqliteStore, Store};
use sandglass_types::{BudgetId, Clock as _, Micros, SandboxId, SandboxState, SystemClock, TeamId};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

const MOST: u64 = 60_000;

const TABLE: &str = "[large]\nprovider = \"one\"\n\
    price = { input = 1_000_000, output = 2_000_000, max_input = 100_000, max_output = 4000 }\n";

/// How a provider answers one call.
#[derive(Debug, Clone, Copy)]
enum Says {
    /// That so many tokens were used.
    Used(u16, u16),
    /// Nothing of that.
    Nothing,
    /// A part.
    Half,
    /// No.
    No(u16),
    /// Never a word.
    Hangs,
    /// The connection ends.
    Gone,
}

/// What a client does.
#[derive(Debug, Clone, Copy)]
struct Client {
    says: Says,
    /// How much it writes at most.
    output: u16,
    /// After so many milliseconds it leaves.
    leaves: Option<u16>,
    /// So many milliseconds after the others.
    late: u16,
    /// Whether it is in the fork.
    forked: bool,
}

fn says() -> impl Strategy<Value = Says> {
    prop_oneof![
        4 => (1..600_u16, 0..3000_u16).prop_map(|(read, wrote)| Says::Used(read, wrote)),
        1 => Just(Says::Nothing),
        1 => Just(Says::Half),
        1 => prop_oneof![Just(429_u16), Just(500), Just(302)].prop_map(Says::No),
        1 => Just(Says::Hangs),
        1 => Just(Says::Gone),
    ]
}

fn client() -> impl Strategy<Value = Client> {
    (says(), 1..3000_u16, proptest::option::of(0..200_u16), 0..200_u16, any::<bool>())
        .prop_map(|(says, output, leaves, late, forked)| Client { says, output, leaves, late, forked })
}

/// A provider that does what each call tells it to.
async fn provide(listener: TcpListener) {
    let mut serving = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        serving.spawn(provided(stream));
    }
}

async fn provided(mut stream: TcpStream) {
    let mut read = Vec::new();
    let says = loop {
        if stream.read_buf(&mut read).await.unwrap_or(0) == 0 {
            return;
        }
        let text = String::from_utf8_lossy(&read).into_owned();
        // It stands at the end of the body.
        if let Some((_, rest)) = text.split_once("\"says:")
            && let Some((says, _)) = rest.split_once('"')
        {
            break says.to_owned();
        }
    };
    let mut words = says.split(' ');
    let kind = words.next().unwrap_or_default();
    let numbers: Vec<u64> = words.filter_map(|word| word.parse().ok()).collect();
    tokio::time::sleep(Duration::from_millis(5 + u64::try_from(says.len()).unwrap() % 40)).await;
    let answer = |status: u64, body: &str| {
        format!(
            "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
    };
    let text = match kind {
        "used" => {
            let usage =
                format!(r#"{{"usage":{{"input_tokens":{},"output_tokens":{}}}}}"#, numbers[0], numbers[1]);
            answer(200, &usage)
        }
        "nothing" => answer(200, r#"{"content":[]}"#),
        "half" => {
            answer(200, r#"{"content":[],"usage":{"input_tokens":1,"output_tokens":1}}"#)[..130].to_owned()
        }
        "no" => answer(numbers[0], r#"{"type":"error","error":{"type":"api_error","message":"no"}}"#),
        "hangs" => return std::future::pending().await,
        _ => return,
    };
    let _gone = stream.write_all(text.as_bytes()).await;
}

/// One server after the other, on one store.
struct World {
    folder: tempfile::TempDir,
    provider: SocketAddr,
    signer: Signer,
    budget: BudgetId,
    source: SandboxId,
    fork: SandboxId,
    token: String,
}

struct Server {
    store: Arc<SqliteStore>,
    dial: Direct,
    runs: JoinSet<()>,
    stop: CancellationToken,
}

async fn open(folder: &Path) -> Arc<SqliteStore> {
    Arc::new(SqliteStore::open(&folder.join("store.db")).await.unwrap())
}

async fn running(store: &SqliteStore, new: NewSandbox) -> SandboxId {
    let id = new.id.clone();
    store.insert_sandbox(&new).await.unwrap();
    assert!(store.transition(&id, &step(SandboxState::Creating, SandboxState::Running, 1)).await.unwrap());
    id
}

impl World {
    async fn new(provider: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = open(folder.path()).await;
        let prices = Prices::parse(TABLE).unwrap();
        store.keep_prices(prices.snapshot(), prices.text()).await.unwrap();
        let team: TeamId = store.create_team("acme", SystemClock.now()).await.unwrap().id;
        let source = running(&store, sandbox_of(team, 0)).await;
        let budget = BudgetId::random();
        let new = NewBudget {
            id: budget.clone(),
            team,
            most: Micros(MOST),
            prices: prices.snapshot(),
            with_sandboxes: true,
            created_at: SystemClock.now(),
        };
        store.grant_models(&source, &Money::New(new)).await.unwrap();
        let models = store.sandbox(&source).await.unwrap().unwrap().models;
        let fork = running(&store, NewSandbox { models, ..sandbox_of(team, 1) }).await;
        let signer = Signer::new([7; 32]);
        let claims = Claims {
            budget: budget.clone(),
            sandbox: source.clone(),
            dialects: vec![Dialect::Messages],
            models: vec!["large".into()],
            expires: SystemClock.now().plus(Duration::from_secs(3600)),
        };
        let token = signer.mint(&claims).unwrap();
        store.close().await;
        Self { folder, provider, signer, budget, source, fork, token }
    }

    async fn start(&self) -> Server {
        let store = open(self.folder.path()).await;
        store.forfeit_calls(SystemClock.now()).await.unwrap();
        let provider = Provider {
            base: format!("http://{}", self.provider).parse().unwrap(),
            dialects: vec![Dialect::Messages],
            key: None,
            headers: Vec::new(),
        };
        let tls =
            rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(rustls::RootCertStore::empty())
                .with_no_client_auth();
        let per_minute = NonZeroU32::new(10_000).unwrap();
        let config = Config {
            providers: BTreeMap::from([("one".to_owned(), provider)]),
            signer: self.signer.clone(),
            limits: Limits { output: 4000, at_once: 64, per_minute, together: 64 },
            caps: Caps::default(),
            waits: Waits {
                turn: Duration::from_millis(100),
                provider: Duration::from_millis(400),
                drain: Duration::from_millis(400),
                ..Waits::default()
            },
            resolver: Arc::new(FixedNames::default()),
            tls,
            totals: Arc::default(),
        };
        let (dial, callers) = Direct::new(1, 64);
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let shared: Arc<dyn Store> = Arc::<SqliteStore>::clone(&store);
        let gateway = Gateway::new(
            config,
            shared,
            Arc::new(SystemClock),
            Arc::new(Nobody),
            tasks.clone(),
            stop.clone(),
        )
        .unwrap();
        let mut runs = JoinSet::new();
        runs.spawn(async move {
            gateway.serve(callers.models).await;
            tasks.close();
            tasks.wait().await;
        });
        Server { store, dial, runs, stop }
    }

    async fn look(&self, store: &SqliteStore) -> (u64, u64) {
        let row = store.budget(&self.budget).await.unwrap().unwrap();
        assert!(row.reserved.and(row.charged) <= Micros(MOST), "{row:?}");
        (row.reserved.0, row.charged.0)
    }

    /// One call; the status that it got, if any.
    async fn call(&self, dial: &Direct, client: Client) -> Option<u16> {
        tokio::time::sleep(Duration::from_millis(client.late.into())).await;
        let says = match client.says {
            Says::Used(read, wrote) => format!("used {read} {wrote}"),
            Says::Nothing => "nothing".into(),
            Says::Half => "half".into(),
            Says::No(status) => format!("no {status}"),
            Says::Hangs => "hangs".into(),
            Says::Gone => "gone".into(),
        };
        let body = format!(
            r#"{{"model":"large","max_tokens":{},"messages":[{{"role":"user","content":"says:{says}"}}]}}"#,
            client.output
        );
        let from = if client.forked { &self.fork } else { &self.source };
        let mut stream = dial.enter(Own::Service(Service::Models), from).ok()?;
        let request = format!(
            "POST /v1/messages HTTP/1.1\r\nHost: models.internal\r\nx-api-key: {}\r\nContent-Length: {}\r\n\r\n{body}",
            self.token,
            body.len()
        );
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        let patience =
            client.leaves.map_or(Duration::from_secs(20), |leaves| Duration::from_millis(leaves.into()));
        let _left = tokio::time::timeout(patience, stream.read_to_end(&mut answer)).await.ok()?;
        std::str::from_utf8(answer.get(9..12)?).ok()?.parse().ok()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_all_that_can_happen_nothing_spends_more_than_there_is() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let provider = listener.local_addr().unwrap();
    let mut providing = JoinSet::new();
    providing.spawn(provide(listener));
    let mut runner = TestRunner::deterministic();
    let rounds = (proptest::collection::vec(client(), 64), 0..600_u64, any::<bool>());
    let (mut made, mut refused) = (0, 0);
    for _ in 0..6 {
        let world = Arc::new(World::new(provider).await);
        let mut charged_before = 0;
        for _ in 0..3 {
            let (clients, after, orderly) = rounds.new_tree(&mut runner).unwrap().current();
            let server = Arc::new(world.start().await);
            let (reserved, charged) = world.look(&server.store).await;
            assert_eq!(reserved, 0, "what a dead server left is charged");
            assert!(charged >= charged_before, "nothing comes back that was charged");
            let mut calls = JoinSet::new();
            for client in clients {
                let (world, server) = (Arc::clone(&world), Arc::clone(&server));
                calls.spawn(async move { world.call(&server.dial, client).await });
            }
            // It ends in the middle of all, or when all is done.
            tokio::time::sleep(Duration::from_millis(after)).await;
            for _ in 0..5 {
                world.look(&server.store).await;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            if orderly {
                server.stop.cancel();
            }
            if after > 300 {
                for status in calls.join_all().await.into_iter().flatten() {
                    made += usize::from(status == 200);
                    refused += usize::from(status == 402);
                }
            } else {
                calls.shutdown().await;
            }
            let Ok(mut server) = Arc::try_unwrap(server) else { panic!("somebody has the server") };
            if orderly {
                while server.runs.join_next().await.is_some() {}
                assert_eq!(world.look(&server.store).await.0, 0, "an orderly end settles all");
            } else {
                server.runs.shutdown().await;
            }
            charged_before = world.look(&server.store).await.1;
            server.store.close().await;
        }
        let store = open(world.folder.path()).await;
        let closed = store.close_budget(&world.budget, SystemClock.now()).await.unwrap().unwrap();
        assert!(closed.reserved == Micros::ZERO && closed.charged <= Micros(MOST), "{closed:?}");
        let calls = store.calls(&world.budget).await.unwrap();
        let sum: u64 = calls.iter().map(|call| call.charged.unwrap().0).sum();
        assert_eq!(Micros(sum), closed.charged, "each call is charged once");
        store.close().await;
    }
    assert!(made > 20 && refused > 20, "{made} calls were made, and {refused} refused for money");
}
