//! What a sandbox can use up of the machine. What counts is what the machine has less, not what the sandbox meets.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::fs::statvfs;
use sandglass_linux::process;
use serde_json::json;
use tokio::time::{interval, sleep, timeout};

use super::{Aim, Attack, Control, Group, Probe};
use crate::bench::proc::{self, Halves};
use crate::bench::wire::Connection;
use crate::verify::checklist::Point;
use crate::verify::judge::Sight;
use crate::verify::sandbox::Sandbox;
use crate::verify::stage::DISK;
use crate::verify::witness::Kind;

/// What the sandboxes of the strict server may use. Little, so that what is beyond it does no machine harm.
pub(in crate::verify) const CONFIG: &str =
    "[sandbox]\ncpus = 1\nmemory_mib = 320\ndisk_mib = 128\nprocesses = 128\n";

/// Processes of the machine that such a sandbox never has: each one inside needs about two.
const PROCESSES: i64 = 450;

/// MiB of memory that it never has, with what its engine needs.
const MEMORY: i64 = 640;

/// MiB of disk that it never has.
const DISK_MIB: i64 = 220;

/// Files on the machine's disk that it never makes.
const FILES: i64 = 20_000;

/// Open files of the machine that it never has.
const DESCRIPTORS: i64 = 50_000;

/// Milliseconds of processor that it never gets in a second.
const CPU: i64 = 1400;

/// MiB that its output never takes of the server's memory.
const OUTPUT: i64 = 32;

/// How much slower a neighbour's slowest commands may become.
const SLOWER: f64 = 3.0;

/// How long an attack is watched.
const WATCH: Duration = Duration::from_secs(15);

/// How long what was used up is looked at, once it was.
const SETTLE: Duration = Duration::from_millis(500);

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(50);

/// How long an end that is due may take, apart from the time that it is due in.
const END: Duration = Duration::from_secs(10);

const MIB: i64 = 1 << 20;

const fn probe(id: &'static str, what: &'static str, attack: Attack) -> Probe {
    let (group, control) = (Group::Limits, Control::Bare);
    Probe { id, group, what, points: &[Point::Limits], control, attack }
}

/// A probe whose attack uses something up: what the machine has of it in use, and how much more is too much.
macro_rules! uses_up {
    ($id:literal, $what:literal, $user:literal, $attack:expr, $used:ident, $most:ident, $unit:literal) => {
        probe($id, $what, |aim| Box::pin(uses_up(aim, $user, &$attack, $used, $most, $unit)))
    };
}

/// All of them.
pub(super) const PROBES: &[Probe] = &[
    uses_up!(
        "limits.fork-bomb",
        "have too many processes, as a user",
        "user",
        ["fork", "700"],
        processes,
        PROCESSES,
        "processes"
    ),
    uses_up!(
        "limits.fork-bomb-root",
        "have too many, as root",
        "root",
        ["fork", "700"],
        processes,
        PROCESSES,
        "processes"
    ),
    uses_up!(
        "limits.memory-slow",
        "use up memory step by step",
        "root",
        ["allocate", "900", "2"],
        memory,
        MEMORY,
        "MiB"
    ),
    uses_up!(
        "limits.memory-fast",
        "use it up at once",
        "root",
        ["allocate", "900", "0"],
        memory,
        MEMORY,
        "MiB"
    ),
    uses_up!("limits.disk", "fill the disk", "root", ["fill", "400"], disk, DISK_MIB, "MiB"),
    uses_up!(
        "limits.files",
        "make more files than there may be",
        "root",
        ["files", "40000"],
        files,
        FILES,
        "files"
    ),
    uses_up!(
        "limits.descriptors",
        "open more files than there may be",
        "root",
        ["descriptors-many", "20000", "4"],
        descriptors,
        DESCRIPTORS,
        "open files"
    ),
    probe("limits.cpu", "use more processors than it has", |aim| Box::pin(cpu(aim))),
    Probe {
        control: Control::Asked,
        ..probe("limits.wall-clock", "outlive its time with an agent that hangs", |aim| {
            Box::pin(wall_clock(aim))
        })
    },
    Probe {
        control: Control::Asked,
        ..probe("limits.output", "fill the server's memory with output", |aim| Box::pin(output(aim)))
    },
    probe("limits.neighbour", "slow another sandbox down by all of this at once", |aim| {
        Box::pin(neighbour(aim))
    }),
];

/// How much of something is in use on the machine.
type Used = fn() -> anyhow::Result<i64>;

fn processes() -> anyhow::Result<i64> {
    Ok(i64::try_from(process::table()?.len())?)
}

/// In MiB, by the largest process of all that descend from this one: the attacks are single programs. What the machine has
/// left would tell more, but of all the others that use it as well; and the sum would count some pages twice, because what
/// the engine runs a program with may be several processes with one memory.
fn memory() -> anyhow::Result<i64> {
    let all = process::table()?;
    let mut ours = BTreeSet::from([i32::try_from(std::process::id())?]);
    loop {
        let known = ours.len();
        let children: Vec<_> = all.iter().filter(|entry| ours.contains(&entry.parent)).collect();
        ours.extend(children.iter().map(|entry| entry.identity.pid));
        if ours.len() == known {
            break;
        }
    }
    // One may have ended meanwhile.
    let largest = ours.into_iter().map(|pid| proc::rss(pid).unwrap_or(0)).max().unwrap_or(0);
    Ok(i64::try_from(largest)? / MIB)
}

/// In MiB.
fn disk() -> anyhow::Result<i64> {
    let system = statvfs(DISK)?;
    let free = i64::try_from(system.f_bfree.saturating_mul(system.f_frsize))?;
    Ok(-free / MIB)
}

fn files() -> anyhow::Result<i64> {
    Ok(-i64::try_from(statvfs(DISK)?.f_ffree)?)
}

fn descriptors() -> anyhow::Result<i64> {
    let mut open = 0;
    for entry in process::table()? {
        // It may have ended meanwhile.
        open += proc::descriptors(entry.identity.pid).unwrap_or_default().values().sum::<u64>();
    }
    Ok(i64::try_from(open)?)
}

/// What is in use, once it falls no more: what the attack before this one had is given back bit by bit.
async fn at_rest(used: Used) -> anyhow::Result<i64> {
    let deadline = Instant::now() + END;
    let (mut least, mut since) = (used()?, Instant::now());
    while since.elapsed() < SETTLE && Instant::now() < deadline {
        sleep(INTERVAL).await;
        let now = used()?;
        if now < least {
            (least, since) = (now, Instant::now());
        }
    }
    Ok(least)
}

/// The most that comes in use on top while some work goes on.
async fn most<T>(used: Used, work: impl Future<Output = T>) -> anyhow::Result<(i64, T)> {
    let before = at_rest(used).await?;
    let mut most = 0;
    let mut ticks = interval(INTERVAL);
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => {
                most = most.max(used()? - before);
                return Ok((most, done));
            }
            _ = ticks.tick() => most = most.max(used()? - before),
        }
    }
}

async fn uses_up(
    aim: Aim<'_>,
    user: &str,
    attack: &[&str],
    used: Used,
    limit: i64,
    unit: &str,
) -> anyhow::Result<Sight> {
    aim.ground.scene()?;
    let sandbox = aim.ground.fresh(&json!({})).await?;
    let (name, args) = attack.split_first().context("an attack has a name")?;
    // It holds what it got, ends by itself, or is ended: all three are answers.
    let attack = async {
        let held = timeout(WATCH, sandbox.hold_as(name, args, user)).await;
        sleep(SETTLE).await;
        drop(held);
    };
    let (more, ()) = most(used, attack).await?;
    // It may have ended itself.
    let _ended = sandbox.kill().await;
    Ok(if more > limit {
        Sight::Reached(format!("{more} {unit} more than before"))
    } else {
        Sight::Held(format!("{more} {unit} more than before, of at most {limit}"))
    })
}

async fn cpu(aim: Aim<'_>) -> anyhow::Result<Sight> {
    aim.ground.scene()?;
    let sandbox = aim.ground.fresh(&json!({})).await?;
    let watched = async {
        // It has begun by then, and lasts for longer than is looked.
        sleep(Duration::from_secs(1)).await;
        let (began, before) = (Instant::now(), process::table()?);
        sleep(Duration::from_secs(3)).await;
        let (after, took) = (process::table()?, began.elapsed());
        let ran: u64 = after
            .iter()
            .filter(|entry| entry.identity.pid != 1)
            .map(|entry| {
                let same = before.iter().find(|other| other.identity == entry.identity);
                entry.cpu_micros.saturating_sub(same.map_or(0, |other| other.cpu_micros))
            })
            .sum();
        anyhow::Ok(i64::try_from(u128::from(ran) / took.as_millis().max(1))?)
    };
    let words = [sandbox.guest.as_str(), "probe", "burn", "4", "6000"];
    let (_burnt, ran) = tokio::join!(sandbox.run_as(&words, "root", WATCH), watched);
    sandbox.kill().await?;
    let ran = ran?;
    Ok(if ran > CPU {
        Sight::Reached(format!("{ran} ms in a second"))
    } else {
        Sight::Held(format!("{ran} ms in a second, of at most {CPU}"))
    })
}

/// The weaker sandbox has more time than is waited.
async fn wall_clock(aim: Aim<'_>) -> anyhow::Result<Sight> {
    const TIME: u64 = 4;
    let scene = aim.ground.scene()?;
    let before = scene.counts()?.of(Kind::Processes);
    let time = if aim.control { 600 } else { TIME };
    let sandbox = aim.ground.fresh(&json!({"timeout": time})).await?;
    let command = format!("{} probe stop-agent 1; while :; do :; done", sandbox.guest);
    let _hung = timeout(Duration::from_secs(1), sandbox.run(&["sh", "-c", &command])).await;
    let deadline = Instant::now() + Duration::from_secs(TIME) + END;
    let ended = loop {
        if scene.counts()?.of(Kind::Processes) <= before {
            break true;
        }
        if Instant::now() > deadline {
            break false;
        }
        sleep(INTERVAL).await;
    };
    if !ended {
        sandbox.kill().await?;
    }
    Ok(if ended {
        Sight::Held(format!("its processes are gone after {TIME} s"))
    } else {
        Sight::Reached("its processes run on".into())
    })
}

/// Nobody reads the output. In the control somebody does, and keeps all of it.
async fn output(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    let halves = Halves::of(u32::try_from(scene.server.lock().await.child.pid())?)?;
    let (own, control) = (i32::try_from(std::process::id())?, aim.control);
    let used = move || -> anyhow::Result<i64> {
        let pids = if control { vec![own] } else { vec![halves.serve, halves.host] };
        let rss = pids.into_iter().map(proc::rss).sum::<anyhow::Result<u64>>()?;
        Ok(i64::try_from(rss)? / MIB)
    };
    let sandbox = aim.ground.fresh(&json!({})).await?;
    let before = used()?;
    let mut connection = Connection::open(&sandbox.endpoint.url).await?;
    let mut events = connection.start(&sandbox.reach, &sandbox.guest, &["probe", "flood", "300"]).await?;
    let (mut most, mut kept) = (0, Vec::new());
    let deadline = Instant::now() + if control { END } else { Duration::from_secs(4) };
    while Instant::now() < deadline {
        if control {
            match timeout(INTERVAL, events.next()).await {
                Ok(Ok(Some(event))) => kept.push(event),
                Ok(_) => break,
                Err(_) => {}
            }
        } else {
            sleep(INTERVAL).await;
        }
        most = most.max(used()? - before);
        if most > OUTPUT {
            break;
        }
    }
    drop((events, kept));
    sandbox.kill().await?;
    Ok(if most > OUTPUT {
        Sight::Reached(format!("{most} MiB more than before"))
    } else {
        Sight::Held(format!("{most} MiB more than before, of at most {OUTPUT}"))
    })
}

/// Times of commands in a quiet sandbox, in milliseconds: the 99th of 100. It is looked no longer once that is certainly
/// more than `enough`: what makes it so slow is felt by the whole machine where nothing bounds it.
async fn p99(sandbox: &Sandbox, enough: f64) -> anyhow::Result<f64> {
    const COMMANDS: usize = 150;
    const SLOWER: usize = COMMANDS / 100 + 1;
    let mut times = Vec::with_capacity(COMMANDS);
    let mut beyond = 0;
    while times.len() < COMMANDS && beyond <= SLOWER {
        let began = Instant::now();
        sandbox.run(&["true"]).await?;
        let took = began.elapsed().as_secs_f64() * 1e3;
        beyond += usize::from(took > enough);
        times.push(took);
    }
    times.sort_by(f64::total_cmp);
    times.into_iter().rev().nth(SLOWER).context("there are no times")
}

async fn neighbour(aim: Aim<'_>) -> anyhow::Result<Sight> {
    aim.ground.scene()?;
    let quiet = aim.ground.fresh(&json!({})).await?;
    let mut ratio = f64::INFINITY;
    // Once more if need be: a machine may have had something else to do.
    for _ in 0..2 {
        let before = p99(&quiet, f64::INFINITY).await?;
        let loud = [aim.ground.fresh(&json!({})).await?, aim.ground.fresh(&json!({})).await?];
        let commands = ["burn 32 20000", "fork 100"].map(|attack| {
            let (guest, attack) = (&loud[0].guest, attack);
            format!("{guest} probe {attack} </dev/null >/dev/null 2>&1 & ")
        });
        let command = commands.concat();
        for sandbox in &loud {
            sandbox.run(&["sh", "-c", &command]).await?;
        }
        let during = p99(&quiet, before * SLOWER).await?;
        for sandbox in &loud {
            sandbox.kill().await?;
        }
        ratio = ratio.min(during / before);
        if ratio <= SLOWER {
            break;
        }
    }
    quiet.kill().await?;
    Ok(if ratio > SLOWER {
        Sight::Reached(format!("its slowest commands take {ratio:.1} times as long"))
    } else {
        Sight::Held(format!("its slowest commands take {ratio:.1} times as long, of at most {SLOWER}"))
    })
}
