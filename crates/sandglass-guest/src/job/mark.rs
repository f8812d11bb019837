//! Processes that belong together because of a variable in their environment, which every child inherits.

use std::collections::HashSet;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStringExt as _;
use std::time::{Duration, Instant};

use crate::job::KILL_TIME;
use crate::processes::{self, Entry};

/// The variable.
const NAME: &str = "SANDGLASS_COMMAND";

/// Variables of the agent that begin so are the engine's marks, for the sandbox as a whole.
const ENGINE: &str = "SANDGLASS_";

/// Upper bound for what is read of an environment, in bytes: what a command can be started with, and more.
const MAX_ENVIRONMENT: u64 = 4 << 20;

/// Makes marks that nobody else makes.
#[derive(Debug)]
pub(super) struct Series {
    random: u64,
    /// What the agent itself is marked with.
    engine: Vec<CString>,
}

impl Series {
    pub(super) fn new() -> Self {
        let engine = std::env::vars_os().filter(|(name, _)| {
            let name = name.as_encoded_bytes();
            name.starts_with(ENGINE.as_bytes()) && name != NAME.as_bytes()
        });
        let entry = |(name, value): (OsString, OsString)| {
            CString::new([name.into_vec(), value.into_vec()].join(&b'=')).ok()
        };
        // Its keys are random, and so is what they make of any value.
        Self { random: RandomState::new().hash_one(NAME), engine: engine.filter_map(entry).collect() }
    }

    pub(super) fn mark(&self, number: u64) -> Mark {
        let own = CString::new(format!("{NAME}={:016x}-{number}", self.random)).unwrap_or_default();
        Mark { own, engine: self.engine.clone() }
    }
}

/// What marks the processes of one command.
#[derive(Debug)]
pub(crate) struct Mark {
    own: CString,
    engine: Vec<CString>,
}

impl Mark {
    /// Puts it into an environment, together with the engine's, in place of any other that is there.
    pub(super) fn put(&self, env: &mut Vec<CString>) {
        let marks = || [&self.own].into_iter().chain(&self.engine);
        env.retain(|entry| !marks().any(|mark| name(mark) == name(entry)));
        env.extend(marks().cloned());
    }

    fn is_on(&self, process: &Entry) -> bool {
        let mut environment = Vec::new();
        let read = File::open(format!("/proc/{}/environ", process.pid))
            .and_then(|file| file.take(MAX_ENVIRONMENT).read_to_end(&mut environment));
        read.is_ok() && environment.split(|byte| *byte == 0).any(|entry| entry == self.own.to_bytes())
    }

    /// All that carry it, with their descendants and their sessions: those may have cleared their environment. Blocks.
    pub(super) fn members(&self) -> Vec<Entry> {
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        let all: Vec<_> = processes::all().filter(|process| process.pid != own).collect();
        with_kin(&all, |process| self.is_on(process))
    }

    /// Kills all of them, and whatever they fork meanwhile, until nothing is left. Blocks.
    ///
    /// # Errors
    /// Something survived for several seconds.
    pub(super) fn kill(&self) -> io::Result<()> {
        let deadline = Instant::now() + KILL_TIME;
        loop {
            let members = self.members();
            if members.is_empty() {
                return Ok(());
            }
            members.iter().for_each(Entry::kill);
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The name in an entry of an environment.
fn name(entry: &CString) -> &[u8] {
    entry.to_bytes().split(|byte| *byte == b'=').next().unwrap_or_default()
}

/// Those that `is_marked`, with all their descendants and what is in a session with one of them.
fn with_kin(all: &[Entry], is_marked: impl Fn(&Entry) -> bool) -> Vec<Entry> {
    let (mut members, mut others): (Vec<Entry>, Vec<Entry>) = all.iter().partition(|entry| is_marked(entry));
    loop {
        let pids: HashSet<_> = members.iter().map(|member| member.pid).collect();
        let sessions: HashSet<_> = members.iter().map(|member| member.session).collect();
        let (kin, rest): (Vec<Entry>, Vec<Entry>) = others
            .into_iter()
            .partition(|other| pids.contains(&other.parent) || sessions.contains(&other.session));
        if kin.is_empty() {
            return members;
        }
        members.extend(kin);
        others = rest;
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn entry(pid: i32, parent: i32, session: i32) -> Entry {
        Entry { pid, parent, session, started: 0 }
    }

    #[test]
    fn a_client_cannot_mark_in_another_s_name() {
        let entry = |text: &str| CString::new(text).unwrap();
        let mut series = Series::new();
        series.engine = vec![entry("SANDGLASS_SANDBOX=mine")];
        let mark = series.mark(3);
        let mut env: Vec<_> =
            ["A=1", "SANDGLASS_COMMAND=theirs", "SANDGLASS_SANDBOX=theirs", "SANDGLASS_SANDBOX2=x"]
                .map(entry)
                .to_vec();
        mark.put(&mut env);
        assert_eq!(
            env,
            [entry("A=1"), entry("SANDGLASS_SANDBOX2=x"), mark.own, entry("SANDGLASS_SANDBOX=mine")]
        );
    }

    #[test]
    fn kin_of_every_degree_belongs_to_it_and_nobody_else() {
        let all = [
            entry(10, 1, 10),
            entry(11, 10, 10),
            entry(12, 1, 10),
            entry(13, 12, 13),
            entry(20, 1, 20),
            entry(1, 0, 1),
        ];
        let pids = |marked: i32| -> Vec<i32> {
            with_kin(&all, |entry| entry.pid == marked).iter().map(|entry| entry.pid).collect()
        };
        assert_eq!(pids(11), [11, 10, 12, 13]);
        assert_eq!(pids(20), [20]);
        assert_eq!(pids(99), [0; 0]);
    }

    #[test]
    fn whoever_leaves_parent_and_session_is_killed_all_the_same() {
        let mark = Series::new().mark(1);
        let variable = mark.own.to_str().unwrap().to_owned();
        let (name, value) = variable.split_once('=').unwrap();
        // One that is nobody's child in a session of its own, and one that also has no environment.
        let script = "(setsid sleep 1000 &); env -i sleep 1000 & sleep 1000";
        let mut child = Command::new("setsid")
            .args(["sh", "-c", script])
            .env(name, value)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while mark.members().len() < 4 {
            assert!(Instant::now() < deadline, "{:?}", mark.members());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(Series::new().mark(1).members().is_empty(), "another one of the same number");
        // Here nobody else collects the child, and one that was not collected still counts.
        let killed = std::thread::scope(|scope| {
            let killed = scope.spawn(|| mark.kill());
            assert!(!child.wait().unwrap().success());
            killed.join().unwrap()
        });
        killed.unwrap();
        assert!(mark.members().is_empty());
    }
}
