//! Memory that is nearly used up.
//!
//! At the hard limit the machine's kernel ends the whole sandbox. So before it comes to that, the largest process is ended
//! with all of its command, and whoever waits for that is told why. What grows too fast for this meets the hard limit.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use crate::agent::Agent;
use crate::log;
use crate::memory::meminfo;
use crate::processes;

/// With this share of its memory in use, in per cent, a sandbox is short of it.
const SHORT: u64 = 92;

/// What a sandbox may come to use in a second, in bytes: looks are as frequent as that wants. One core writes about so
/// much to pages that it has not touched yet.
const GROWTH: u64 = 1 << 30;

/// The shortest time between two looks: a sandbox that is always nearly full pays for them.
const OFTEN: Duration = Duration::from_millis(20);

/// The longest time between two looks.
const SELDOM: Duration = Duration::from_millis(250);

/// How long memory that was given up may still count as in use.
const SETTLING: Duration = Duration::from_secs(2);

/// What there is, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    total: u64,
    available: u64,
}

impl Memory {
    fn parse(text: &str) -> Self {
        Self { total: meminfo(text, "MemTotal"), available: meminfo(text, "MemAvailable") }
    }

    /// What may be used from here on until it is short.
    const fn room(&self) -> u64 {
        self.available.saturating_sub(self.total / 100 * (100 - SHORT))
    }

    /// Whether nearly all is used up.
    pub(super) const fn is_short(&self) -> bool {
        self.total > 0 && self.room() == 0
    }

    /// How soon it may be short.
    pub(super) fn next_look(&self) -> Duration {
        Duration::from_millis(self.room() / (GROWTH / 1000)).clamp(OFTEN, SELDOM)
    }
}

/// Where the kernel says how much memory there is. Opened before any program runs that could hide it.
#[derive(Debug)]
pub(super) struct Gauge(File);

impl Gauge {
    /// Opens it.
    ///
    /// # Errors
    /// It can't be opened.
    pub(super) fn open() -> io::Result<Self> {
        File::open("/proc/meminfo").map(Self)
    }

    /// What there is now. If that can't be read there is no limit to be seen, and the hard one is left.
    pub(super) fn read(&self) -> Memory {
        let mut text = [0; 4096];
        let filled = self.0.read_at(&mut text, 0).unwrap_or(0);
        Memory::parse(&String::from_utf8_lossy(&text[..filled]))
    }
}

/// Ends the largest process and its command, and waits until that shows: the next largest has done nothing wrong yet.
pub(super) fn relieve(agent: &Agent, gauge: &Gauge) {
    match agent.jobs.end_for_memory(|| processes::largest(std::process::id())) {
        Ok(pid) => log::line(&format!("memory is short; process {pid:?} was ended with its command")),
        Err(error) => log::line(&format!("memory is short, and a command could not be ended: {error}")),
    }
    let deadline = Instant::now() + SETTLING;
    while gauge.read().is_short() && Instant::now() < deadline {
        std::thread::sleep(OFTEN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn it_is_short_at_92_per_cent() {
        let text = |available: u64| {
            format!("MemTotal:  {} kB\nMemFree: 7 kB\nMemAvailable: {available} kB\n", 100_000)
        };
        assert!(!Memory::parse(&text(8_001)).is_short());
        assert!(Memory::parse(&text(8_000)).is_short());
        assert!(Memory::parse(&text(0)).is_short());
        assert!(!Memory::parse("").is_short(), "what is not known is no reason to end anything");
    }

    #[test]
    fn looks_are_as_frequent_as_it_may_grow() {
        let look =
            |mib: u64| Memory { total: 1000 * MIB, available: (80 + mib) * MIB }.next_look().as_millis();
        assert_eq!([look(920), look(300), look(100), look(10), look(0)], [250, 250, 97, 20, 20]);
    }

    #[test]
    fn the_kernel_says_how_much_there_is() {
        let memory = Gauge::open().unwrap().read();
        assert!(memory.total > memory.available && memory.available > 0, "{memory:?}");
    }
}
