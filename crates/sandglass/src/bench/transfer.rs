//! Bytes up and down: with the Python SDK, with a plain client, and what this machine does without a sandbox.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use hyper::body::Bytes;
use serde::Deserialize;

use super::megabytes;
use super::report::{Bound, Report};
use super::server::Endpoint;
use super::wire::Connection;
use crate::client::Reach;

/// The same with the SDK: one line of standard input is one upload and one download, answered by a line of JSON.
const SDK: &str = include_str!("../../../../benches/transfer.py");

/// Bytes of one transfer.
const TOTAL: u64 = 100_000_000;

/// What a plain client hands over at one time, in bytes.
const CHUNK: usize = 256 << 10;

const PATH: &str = "/home/user/transfer.bin";

/// Writes as many bytes from inside, without anything of ours.
const DD: &str =
    "dd if=/dev/zero of=/home/user/dd.bin bs=1000000 count=100 2>&1 | tail -n 1; rm /home/user/dd.bin";

/// Where the SDK is after `make setup`.
const PYTHON: &str = ".venv/bin/python";

/// The least that is wanted, in MB/s.
const MIN_SDK: f64 = 200.0;
const MIN_PLAIN: f64 = 500.0;

#[derive(Default)]
struct Rates {
    up: Vec<f64>,
    down: Vec<f64>,
    sdk_up: Vec<f64>,
    sdk_down: Vec<f64>,
    loopback: Vec<f64>,
    disk: Vec<f64>,
}

pub(crate) async fn run(
    endpoint: &Endpoint,
    n: u32,
    python: Option<&Path>,
    report: &mut Report,
) -> anyhow::Result<()> {
    let python =
        python.map(Path::to_owned).or_else(|| Some(PathBuf::from(PYTHON)).filter(|path| path.exists()));
    let mut sdk = match python {
        Some(python) => Some(Sdk::start(&python, endpoint)?),
        None => {
            report.note("the SDK was not measured: no --python was given, and there is no .venv/bin/python");
            None
        }
    };
    let sandbox = Connection::open(&endpoint.url).await?.create(&endpoint.key).await?;
    let chunk = Bytes::from(vec![0x5a; CHUNK]);
    let mut rates = Rates::default();
    // The first round is not counted.
    for round in 0..=n {
        let mut sample = Rates::default();
        sample.up.extend(report.keep(upload(endpoint, &sandbox, &chunk).await.context("upload")));
        sample.down.extend(report.keep(download(endpoint, &sandbox).await.context("download")));
        if let Some(sdk) = &mut sdk {
            let answer = sdk.transfer().context("the SDK")?;
            sample.sdk_up.push(rate(Duration::from_secs_f64(answer.up)));
            sample.sdk_down.push(rate(Duration::from_secs_f64(answer.down)));
        }
        sample.loopback.extend(report.keep(loopback(&chunk).context("loopback")));
        sample.disk.extend(report.keep(disk(endpoint, &sandbox).await.context("dd")));
        if round > 0 {
            rates.add(sample);
        }
    }
    if let Some(sdk) = sdk {
        sdk.finish()?;
    }
    endpoint.api()?.kill(&sandbox.id).await?;
    let up = report.series("up, plain client", "MB/s", rates.up);
    let down = report.series("down, plain client", "MB/s", rates.down);
    let sdk_up = report.series("up, Python SDK", "MB/s", rates.sdk_up);
    let sdk_down = report.series("down, Python SDK", "MB/s", rates.sdk_down);
    report.series("reference: loopback TCP", "MB/s", rates.loopback);
    report.series("reference: dd inside, to the disk", "MB/s", rates.disk);
    for (name, least, rate) in [
        ("up, plain client, p50", MIN_PLAIN, up),
        ("down, plain client, p50", MIN_PLAIN, down),
        ("up, Python SDK, p50", MIN_SDK, sdk_up),
        ("down, Python SDK, p50", MIN_SDK, sdk_down),
    ] {
        report.target(name, Bound::AtLeast, least, "MB/s", rate.map(|rate| rate.p50));
    }
    Ok(())
}

impl Rates {
    fn add(&mut self, other: Self) {
        let Self { up, down, sdk_up, sdk_down, loopback, disk } = other;
        for (all, more) in [
            (&mut self.up, up),
            (&mut self.down, down),
            (&mut self.sdk_up, sdk_up),
            (&mut self.sdk_down, sdk_down),
            (&mut self.loopback, loopback),
            (&mut self.disk, disk),
        ] {
            all.extend(more);
        }
    }
}

/// Megabytes a second.
fn rate(took: Duration) -> f64 {
    megabytes(TOTAL) / took.as_secs_f64()
}

async fn upload(endpoint: &Endpoint, sandbox: &Reach, chunk: &Bytes) -> anyhow::Result<f64> {
    let started = Instant::now();
    Connection::open(&endpoint.url).await?.upload(sandbox, PATH, chunk, TOTAL).await?;
    Ok(rate(started.elapsed()))
}

async fn download(endpoint: &Endpoint, sandbox: &Reach) -> anyhow::Result<f64> {
    let started = Instant::now();
    let read = Connection::open(&endpoint.url).await?.download(sandbox, PATH).await?;
    let took = started.elapsed();
    if read != TOTAL {
        bail!("{read} bytes came back");
    }
    Ok(rate(took))
}

/// As many bytes between two threads of this process.
fn loopback(chunk: &Bytes) -> anyhow::Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let chunk = chunk.clone();
    let started = Instant::now();
    let writer = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address)?;
        let mut left = TOTAL;
        while left > 0 {
            let len = usize::try_from(left).unwrap_or(CHUNK).min(chunk.len());
            stream.write_all(&chunk[..len])?;
            left -= len as u64;
        }
        std::io::Result::Ok(())
    });
    let (mut stream, _) = listener.accept()?;
    let mut buffer = vec![0; CHUNK];
    let mut total = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 => break,
            n => total += n as u64,
        }
    }
    let took = started.elapsed();
    writer.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
    if total != TOTAL {
        bail!("{total} bytes came through");
    }
    Ok(rate(took))
}

async fn disk(endpoint: &Endpoint, sandbox: &Reach) -> anyhow::Result<f64> {
    let mut connection = Connection::open(&endpoint.url).await?;
    let output = connection.shell(sandbox, DD).await?.end().await?;
    let text = String::from_utf8_lossy(&output);
    let seconds = dd_seconds(&text).with_context(|| format!("dd said {text:?}"))?;
    Ok(rate(Duration::try_from_secs_f64(seconds)?))
}

/// `100000000 bytes (100 MB, 95 MiB) copied, 0.0523 s, 1.9 GB/s`
fn dd_seconds(text: &str) -> Option<f64> {
    let seconds = text.split_once("copied, ")?.1.split_once(" s,")?.0.parse().ok()?;
    (seconds > 0.0).then_some(seconds)
}

/// A Python process that uses the SDK.
struct Sdk {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// Seconds.
#[derive(Debug, Deserialize)]
struct Answer {
    up: f64,
    down: f64,
}

impl Sdk {
    fn start(python: &Path, endpoint: &Endpoint) -> anyhow::Result<Self> {
        let mut child = Command::new(python)
            .args(["-c", SDK, &TOTAL.to_string()])
            .envs([("E2B_API_URL", &endpoint.url), ("E2B_SANDBOX_URL", &endpoint.url)])
            .env("E2B_API_KEY", &endpoint.key)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("{} could not be started", python.display()))?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("the SDK's process has no output")?);
        Ok(Self { child, orders, answers })
    }

    fn transfer(&mut self) -> anyhow::Result<Answer> {
        self.orders.as_mut().context("the SDK's process was finished")?.write_all(b"\n")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        let answer: Answer = serde_json::from_str(&line).context("its process answered nothing")?;
        if answer.up > 0.0 && answer.down > 0.0 { Ok(answer) } else { bail!("it answered {answer:?}") }
    }

    /// Lets it end its sandbox, and itself.
    fn finish(mut self) -> anyhow::Result<()> {
        self.orders = None;
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { bail!("the SDK's process ended with {status}") }
    }
}

impl Drop for Sdk {
    fn drop(&mut self) {
        // Without effect on one that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dd_says_how_long_it_took() {
        let said = "100000000 bytes (100 MB, 95 MiB) copied, 0.0523 s, 1.9 GB/s\n";
        assert_eq!(dd_seconds(said), Some(0.0523));
        assert_eq!(dd_seconds("dd: failed to open"), None);
        assert_eq!(dd_seconds("100 bytes copied, 0 s, 1 GB/s"), None);
    }

    #[test]
    fn loopback_is_measured() {
        assert!(loopback(&Bytes::from(vec![1; CHUNK])).unwrap() > 0.0);
    }
}
