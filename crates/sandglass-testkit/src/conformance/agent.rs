//! The agent that does what it is told, one line at a time, and the session with it.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandglass_engine::engine::SessionEnds;

/// The agent, as a script for any shell.
pub const LINE_AGENT: &str = "while read -r line; do eval \"$line\"; done";

/// Most that one answer may take on a busy machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// What stands around a command so that its end is seen.
pub(super) const QUESTION: [&str; 2] = ["{ ", " ; } 2>&1; echo \"<$?>\""];

/// A session with a line agent.
#[derive(Debug)]
pub struct LineAgent {
    ends: SessionEnds,
    unread: Vec<u8>,
}

impl LineAgent {
    /// Over the two ends of its session.
    #[must_use]
    pub fn new(ends: SessionEnds) -> Self {
        Self { ends, unread: Vec::new() }
    }

    /// Has a line evaluated and does not ask what becomes of it.
    ///
    /// # Panics
    /// Nobody reads it.
    pub fn send(&self, line: &str) {
        let mut bytes = format!("{line}\n").into_bytes();
        while !bytes.is_empty() {
            match rustix::io::write(&self.ends.to_agent, &bytes) {
                Ok(n) => drop(bytes.drain(..n)),
                Err(rustix::io::Errno::AGAIN) => {
                    assert!(ready(&self.ends.to_agent, PollFlags::OUT, PATIENCE), "nobody reads");
                }
                Err(errno) => panic!("{errno}"),
            }
        }
    }

    /// Has a command line run.
    pub fn ask(&self, command: &str) {
        let [before, after] = QUESTION;
        self.send(&format!("{before}{command}{after}"));
    }

    /// All that the oldest command printed, its exit code last; `None` if the agent ended before.
    ///
    /// # Panics
    /// There is no answer in time.
    pub fn answer(&mut self) -> Option<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(end) = self.unread.windows(2).position(|two| two == b">\n") {
                let answer: Vec<u8> = self.unread.drain(..end + 2).collect();
                return Some(String::from_utf8(answer).unwrap().trim_end().to_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let so_far = String::from_utf8_lossy(&self.unread);
            assert!(ready(&self.ends.from_agent, PollFlags::IN, left), "no answer, only: {so_far}");
            let mut buffer = [0; 65536];
            match rustix::io::read(&self.ends.from_agent, &mut buffer) {
                Ok(0) => return None,
                Ok(n) => self.unread.extend_from_slice(&buffer[..n]),
                Err(rustix::io::Errno::AGAIN) => {}
                Err(errno) => panic!("{errno}"),
            }
        }
    }

    /// Has a command line run and returns all that it printed, its exit code last.
    ///
    /// # Panics
    /// The agent ended, or there is no answer in time.
    pub fn sh(&mut self, command: &str) -> String {
        self.ask(command);
        self.answer().unwrap_or_else(|| panic!("the agent ended at {command}"))
    }

    /// Whether something of an answer arrives within this time.
    #[must_use]
    pub fn says_something(&self, within: Duration) -> bool {
        ready(&self.ends.from_agent, PollFlags::IN, within)
    }
}

fn ready(fd: &OwnedFd, flags: PollFlags, patience: Duration) -> bool {
    let timeout =
        Timespec { tv_sec: patience.as_secs().try_into().unwrap(), tv_nsec: patience.subsec_nanos().into() };
    poll(&mut [PollFd::new(fd, flags)], Some(&timeout)).unwrap() > 0
}
