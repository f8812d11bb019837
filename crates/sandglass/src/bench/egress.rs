//! What the proxy costs a guest's connections, against a bare copy loop on a socket in the same airlock.
//!
//! The guest does the same in both cases, towards the same address: only the port is another, and by it the airlock
//! takes connections to the proxy or, by two rules that this bench adds there, to the copy loop.

mod network;
mod upstream;

use std::net::{SocketAddr, SocketAddrV4, TcpListener};

use anyhow::{Context as _, bail};
use hyper::body::Bytes;
use sandglass_engine::network::AIRLOCK_ADDRESS;
use sandglass_linux::{namespace::Netns, nft};
use serde::Deserialize;

use super::megabytes;
use super::proc;
use super::report::{Bound, Report};
use super::server::{Endpoint, Server};
use super::wire::{Connection, Events};
use crate::client::Reach;

use upstream::Listening;

pub(crate) use network::Network;

/// The guest's side.
const SCRIPT: &[u8] = include_bytes!("../../../../benches/egress.py");
const SCRIPT_PATH: &str = "/tmp/egress.py";

/// What the guest's side waits for, while it holds connections.
const RELEASE_PATH: &str = "/tmp/release";

/// Bytes of one transfer.
const TOTAL: u64 = 100_000_000;

/// Connections that are timed in one go.
const BLOCK: u32 = 20;

/// Where names are shown and peeked at, and a port on which the guest's connections take the bare way.
const TLS_PORT: u16 = 443;
const BARE_PORT: u16 = 9;

/// Where the copy loop listens.
const COPY_PORT: u16 = 15_002;

/// Connections at one time.
const HELD: u32 = 1000;

/// The least share of the bare transfer's rate, most that a connection may take longer, in milliseconds, and most
/// memory of the server for one that is idle, in KB.
const MIN_SHARE: f64 = 0.5;
const MAX_ADDED: f64 = 2.0;
const MAX_MEMORY: f64 = 64.0;

/// What the server is told.
pub(crate) fn settings() -> toml::Table {
    toml::toml! {
        [egress]
        max_connections = 1100
        open_private = ["198.51.100.0/24"]

        [[egress.ceiling]]
        allow = "upstream.example"
    }
}

pub(crate) async fn run(
    server: &Server,
    endpoint: &Endpoint,
    network: &Network,
    n: u32,
    report: &mut Report,
) -> anyhow::Result<()> {
    let upstream = SocketAddr::V4(SocketAddrV4::new(network::ADDRESS, TLS_PORT));
    let _upstream = upstream::answer_all(network.far().run(|| TcpListener::bind(upstream))??)?;
    let mut connection = Connection::open(&endpoint.url).await?;
    let sandbox = connection.create(&endpoint.key).await?;
    let script = Bytes::from_static(SCRIPT);
    connection.upload(&sandbox, SCRIPT_PATH, &script, script.len() as u64).await?;
    let airlock = server.airlock(&sandbox.id)?;
    let _bare_way = bare_way(&airlock, upstream)?;
    let mut guest = Guest { connection, sandbox };
    let (mut rates, mut bare_rates, mut times, mut bare_times) = (vec![], vec![], vec![], vec![]);
    // The first round is not counted.
    for round in 0..=n {
        let rate = report.keep(guest.transfer(TLS_PORT).await.context("transfer"));
        let bare_rate = report.keep(guest.transfer(BARE_PORT).await.context("bare transfer"));
        let took = report.keep(guest.connect(TLS_PORT).await.context("connect"));
        let bare_took = report.keep(guest.connect(BARE_PORT).await.context("bare connect"));
        if round > 0 {
            rates.extend(rate);
            bare_rates.extend(bare_rate);
            times.extend(took.into_iter().flatten());
            bare_times.extend(bare_took.into_iter().flatten());
        }
    }
    let per_connection = hold(server, endpoint, &mut guest, report).await.context("many connections");
    let per_connection = report.keep(per_connection);
    endpoint.api()?.kill(&guest.sandbox.id).await?;
    let rate = report.series("100 MB over an allowed TLS connection", "MB/s", rates);
    let bare_rate = report.series("reference: over a bare copy loop", "MB/s", bare_rates);
    let took = report.series("a new TLS connection", "ms", times);
    let bare_took = report.series("reference: by a bare copy loop", "ms", bare_times);
    report.series("memory of serve for an idle connection", "KB", per_connection.into_iter().collect());
    let share = rate.zip(bare_rate).map(|(rate, bare)| rate.p50 / bare.p50);
    let added = took.zip(bare_took).map(|(took, bare)| took.p50 - bare.p50);
    report.target("rate, p50 over the reference's", Bound::AtLeast, MIN_SHARE, "", share);
    report.target("p50 of a connection over the reference's", Bound::AtMost, MAX_ADDED, "ms", added);
    report.target("memory of an idle connection", Bound::AtMost, MAX_MEMORY, "KB", per_connection);
    Ok(())
}

/// Takes the guest's connections to [`BARE_PORT`] to a copy loop that leads to the upstream.
fn bare_way(airlock: &Netns, upstream: SocketAddr) -> anyhow::Result<Listening> {
    let listen = SocketAddrV4::new(AIRLOCK_ADDRESS, COPY_PORT);
    let listener = airlock.run(|| TcpListener::bind(listen))??;
    let listening = upstream::copy_all(listener, upstream)?;
    let rules = format!(
        "insert rule inet sandglass redirection tcp dport {BARE_PORT} redirect to :{COPY_PORT}\n\
         insert rule inet sandglass input ip daddr {AIRLOCK_ADDRESS} tcp dport {COPY_PORT} accept\n"
    );
    nft::apply(airlock, &rules)?;
    Ok(listening)
}

/// Opens many connections, and answers what one costs the server while nothing happens on it, in KB.
async fn hold(
    server: &Server,
    endpoint: &Endpoint,
    guest: &mut Guest,
    report: &mut Report,
) -> anyhow::Result<f64> {
    #[derive(Deserialize)]
    struct Outcome {
        whole: u32,
        failures: Vec<String>,
    }
    let serve = proc::Halves::of(server.pid())?.serve;
    let before = proc::rss(serve)?;
    let mut events = guest.start("hold", TLS_PORT, HELD.into()).await?;
    let held: u32 = serde_json::from_slice(&events.first_stdout().await?)?;
    let grown = proc::rss(serve)?.saturating_sub(before);
    let nothing = Bytes::new();
    Connection::open(&endpoint.url).await?.upload(&guest.sandbox, RELEASE_PATH, &nothing, 0).await?;
    let outcome: Outcome = serde_json::from_slice(&events.end().await?)?;
    events.drain().await?;
    let missing = HELD.saturating_sub(outcome.whole);
    if missing > 0 {
        report.fail(format!("{missing} of {HELD} connections failed: {}", outcome.failures.join("; ")));
    }
    if held == 0 {
        bail!("no connection was open");
    }
    Ok(megabytes(grown) * 1e3 / f64::from(held))
}

/// The sandbox, and the connection by which commands are run in it.
struct Guest {
    connection: Connection,
    sandbox: Reach,
}

impl Guest {
    async fn start(&mut self, what: &str, port: u16, count: u64) -> anyhow::Result<Events> {
        let (port, count) = (port.to_string(), count.to_string());
        let args = [SCRIPT_PATH, what, network::NAME, &port, &count];
        self.connection.start(&self.sandbox, "/usr/bin/python3", &args).await
    }

    async fn told<T: for<'de> Deserialize<'de>>(
        &mut self,
        what: &str,
        port: u16,
        count: u64,
    ) -> anyhow::Result<T> {
        let mut events = self.start(what, port, count).await?;
        let output = events.end().await?;
        events.drain().await?;
        serde_json::from_slice(&output).context("the process inside printed no result")
    }

    /// MB/s.
    async fn transfer(&mut self, port: u16) -> anyhow::Result<f64> {
        let seconds: f64 = self.told("transfer", port, TOTAL).await?;
        Ok(megabytes(TOTAL) / seconds)
    }

    /// Milliseconds of each.
    async fn connect(&mut self, port: u16) -> anyhow::Result<Vec<f64>> {
        let seconds: Vec<f64> = self.told("connect", port, BLOCK.into()).await?;
        Ok(seconds.into_iter().map(|seconds| seconds * 1e3).collect())
    }
}
