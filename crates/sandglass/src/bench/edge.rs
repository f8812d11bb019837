//! Requests to a program's port through the edge, against the same requests from inside the sandbox's airlock: there the
//! machine itself has a wire to the guest, which no client has.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use hyper::body::Bytes;
use sandglass_engine::network::GUEST_ADDRESS;
use sandglass_linux::namespace::Netns;

use super::report::{Bound, Report};
use super::server::{Endpoint, Server};
use super::wire::Connection;
use super::{megabytes, millis};
use crate::cli;

/// The guest's side, and where it is put.
const SCRIPT: &[u8] = include_bytes!("../../../../benches/edge.py");
const SCRIPT_PATH: &str = "/tmp/edge.py";

/// Where it listens.
const PORT: u16 = 8000;

/// Bytes of one transfer.
const TOTAL: usize = 100_000_000;

/// Most that the edge may add to a request, in milliseconds, and the least share of the direct rate.
const MAX_ADDED: f64 = 0.3;
const MIN_SHARE: f64 = 0.7;

/// How many large answers are read for each that is counted of the small ones.
const SMALL_FOR_LARGE: u32 = 10;

/// A request waits no longer than that for the next byte.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) async fn run(
    server: &Server,
    endpoint: &Endpoint,
    samples: &cli::bench::Samples,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut connection = Connection::open(&endpoint.url).await?;
    let sandbox = connection.create(&endpoint.key).await?;
    let script = Bytes::from_static(SCRIPT);
    connection.upload(&sandbox, SCRIPT_PATH, &script, script.len() as u64).await?;
    let total = TOTAL.to_string();
    let mut program = connection.start(&sandbox, "/usr/bin/python3", &[SCRIPT_PATH, &total]).await?;
    program.first_stdout().await.context("the program inside does not listen")?;
    let airlock = server.airlock(&sandbox.id)?;
    let edge: SocketAddr =
        endpoint.url.strip_prefix("http://").context("the server's address is odd")?.parse()?;
    let ways = [
        Way {
            to: edge,
            from: None,
            headers: format!("E2b-Sandbox-Id: {}\r\nE2b-Sandbox-Port: {PORT}\r\n", sandbox.id),
        },
        Way { to: SocketAddr::from((GUEST_ADDRESS, PORT)), from: Some(airlock), headers: String::new() },
    ];
    let measured = tokio::task::spawn_blocking({
        let (n, warmup) = (samples.n, samples.warmup);
        move || measure(&ways, n, warmup)
    });
    let Measured { small, large, failures } = measured.await?;
    for failure in failures {
        report.keep::<()>(Err(failure));
    }
    endpoint.api()?.kill(&sandbox.id).await?;
    let [through, direct] = small;
    let through = report.series("a request on a new connection", "ms", through);
    let direct = report.series("reference: from the airlock", "ms", direct);
    let [rate, direct_rate] = large;
    let rate = report.series("100 MB of one answer", "MB/s", rate);
    let direct_rate = report.series("reference: 100 MB from the airlock", "MB/s", direct_rate);
    let added = through.zip(direct).map(|(ours, direct)| ours.p50 - direct.p50);
    report.target("p50 over the reference's", Bound::AtMost, MAX_ADDED, "ms", added);
    let share = rate.zip(direct_rate).map(|(ours, direct)| ours.p50 / direct.p50);
    report.target("rate, p50 over the reference's", Bound::AtLeast, MIN_SHARE, "", share);
    Ok(())
}

/// How a request gets to the program.
struct Way {
    to: SocketAddr,
    /// The network that it is sent from, if not the machine's.
    from: Option<Netns>,
    headers: String,
}

/// Samples of both ways, in the same order as these.
#[derive(Default)]
struct Measured {
    /// Milliseconds.
    small: [Vec<f64>; 2],
    /// MB/s.
    large: [Vec<f64>; 2],
    failures: Vec<anyhow::Error>,
}

/// Both ways in turns.
fn measure(ways: &[Way; 2], n: u32, warmup: u32) -> Measured {
    let mut measured = Measured::default();
    for round in 0..warmup + n {
        for (index, way) in ways.iter().enumerate() {
            match way.get("/small", 2) {
                Ok(took) if round >= warmup => measured.small[index].push(millis(took)),
                Ok(_) => {}
                Err(error) => measured.failures.push(error.context("a small answer")),
            }
        }
        if round < warmup || !(round - warmup).is_multiple_of(SMALL_FOR_LARGE) {
            continue;
        }
        for (index, way) in ways.iter().enumerate() {
            match way.get("/large", TOTAL) {
                Ok(took) => measured.large[index].push(megabytes(TOTAL as u64) / took.as_secs_f64()),
                Err(error) => measured.failures.push(error.context("a large answer")),
            }
        }
    }
    measured
}

impl Way {
    /// Asks for a path on a new connection, and answers how long it took until the last of so many bytes was there.
    fn get(&self, path: &str, expected: usize) -> anyhow::Result<Duration> {
        let ask = || -> anyhow::Result<Duration> {
            let began = Instant::now();
            let mut stream = TcpStream::connect(self.to)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.write_all(
                format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{}\r\n", self.headers).as_bytes(),
            )?;
            read_answer(&mut stream, expected)?;
            Ok(began.elapsed())
        };
        match &self.from {
            Some(network) => network.run(ask)?,
            None => ask(),
        }
    }
}

/// Reads a head that says 200, and so many bytes after it.
fn read_answer(stream: &mut TcpStream, expected: usize) -> anyhow::Result<()> {
    const END: &[u8] = b"\r\n\r\n";
    let mut buffer = vec![0; 256 << 10];
    let mut len = 0;
    let body = loop {
        match stream.read(&mut buffer[len..])? {
            0 => bail!("the answer ended in its head"),
            read => len += read,
        }
        if let Some(at) = buffer[..len].windows(END.len()).position(|window| window == END) {
            break at + END.len();
        }
    };
    if !buffer.starts_with(b"HTTP/1.1 200 ") {
        bail!("not 200: {}", String::from_utf8_lossy(&buffer[..len.min(200)]));
    }
    let mut had = len - body;
    while had < expected {
        match stream.read(&mut buffer)? {
            0 => bail!("the answer ended after {had} of {expected} bytes"),
            read => had += read,
        }
    }
    Ok(())
}
