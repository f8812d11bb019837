//! For how long a sandbox stands still while it is forked: the longest silence of a program in it that has something to
//! say every millisecond.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::end;
use crate::bench::server::{Endpoint, Server};
use crate::bench::wire::{Connection, Event, Events};
use crate::client::Reach;

/// It talks until it is told not to.
const TICKER: &str = "rm -f /tmp/quiet; exec python3 -c 'import os,time\nwhile not os.path.exists(\"/tmp/quiet\"): os.write(1, b\".\"); time.sleep(0.001)'";
const QUIET: &str = "touch /tmp/quiet";

/// How long it talks before and after.
const MARGIN: Duration = Duration::from_millis(200);

/// The longest time between two signs of life of a source while it is forked.
pub(super) async fn stopped(
    server: &Server,
    endpoint: &Endpoint,
    connection: &mut Connection,
    source: &Reach,
) -> anyhow::Result<Duration> {
    let mut ticking = Connection::open(&endpoint.url).await?;
    let mut ticks = ticking.shell(source, TICKER).await?;
    ticks.first_stdout().await?;
    longest_silence(&mut ticks, tokio::time::sleep(MARGIN)).await?;
    let forked = async {
        let copy = connection.fork(&endpoint.key, &source.id).await;
        tokio::time::sleep(MARGIN).await;
        copy
    };
    let (copy, silence) = longest_silence(&mut ticks, forked).await?;
    end(server, endpoint, &copy?.id).await?;
    let quiet = connection.shell(source, QUIET).await?;
    ticks.end().await?;
    quiet.drain().await?;
    Ok(silence)
}

/// Listens until `work` is done.
async fn longest_silence<T>(
    ticks: &mut Events,
    work: impl Future<Output = T>,
) -> anyhow::Result<(T, Duration)> {
    tokio::pin!(work);
    let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
    loop {
        tokio::select! {
            event = ticks.next() => match event?.context("the stream ended before the program did")? {
                Event::End(code) => bail!("the program ended with {code}"),
                _ => {
                    longest = longest.max(last.elapsed());
                    last = Instant::now();
                }
            },
            done = &mut work => return Ok((done, longest)),
        }
    }
}
