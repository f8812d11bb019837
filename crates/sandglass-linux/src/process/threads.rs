//! What the kernel keeps for each thread by itself, set for all threads of another process.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::time::Duration;

use fs_err as fs;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// What every process starts with.
pub const DEFAULT_TIMER_SLACK: Duration = Duration::from_micros(50);

/// Looks at what there is before it is taken that new ones are started faster than they can be found.
const PASSES: u32 = 10;

/// Sets how late the kernel may wake the threads of processes, and all that they start from now on, so that it can wake
/// many together: `PR_SET_TIMERSLACK` in prctl(2), `timerslack_ns` in proc(5). A process that is gone is no error.
///
/// `processes` lists them, and is asked until it names none that is new: what was started meanwhile has the old slack.
/// Needs `CAP_SYS_NICE` over the processes.
///
/// # Errors
/// `processes` failed, or the kernel refused.
pub fn set_timer_slack<E: From<io::Error>>(
    processes: impl Fn() -> Result<Vec<i32>, E>,
    slack: Duration,
) -> Result<(), E> {
    let text = slack.as_nanos().to_string();
    // Only the main folder of a process has this file, but every thread has such a folder under its own number.
    let set = |thread| fs::write(format!("/proc/{thread}/timerslack_ns"), &text);
    for_each(|| Ok(processes()?.into_iter().collect()), |process| Ok(for_each_thread(process, set)?))
}

/// Processors that a process may run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpus(CpuSet);

impl Cpus {
    /// Those of this process.
    ///
    /// # Errors
    /// The machine has more processors than a [`CpuSet`] holds.
    pub fn own() -> io::Result<Self> {
        Ok(Self(sched_getaffinity(None)?))
    }

    /// How many they are.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.count()
    }

    /// `count` of them, and all if there are no more; which ones turns with `turn`, so that not all get the same.
    #[must_use]
    pub fn some(&self, count: u32, turn: u64) -> Self {
        let all: Vec<usize> = self.numbers().collect();
        let mut chosen = CpuSet::new();
        let (count, len) = (usize::try_from(count).unwrap_or(usize::MAX), all.len().max(1));
        let first = usize::try_from(turn % u64::try_from(len).unwrap_or(1)).unwrap_or(0);
        for &cpu in all.iter().cycle().skip(first).take(count.min(all.len())) {
            chosen.set(cpu);
        }
        Self(chosen)
    }

    /// Their numbers, rising.
    pub(super) fn numbers(&self) -> impl Iterator<Item = usize> {
        (0..CpuSet::MAX_CPU).filter(|&cpu| self.0.is_set(cpu))
    }

    /// Lets a process, with all its threads and what they start from now on, run on these. A process that is gone is no
    /// error.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn allow(&self, pid: i32) -> io::Result<()> {
        for_each_thread(pid, |thread| Ok(sched_setaffinity(Pid::from_raw(thread), &self.0)?))
    }
}

fn for_each_thread(pid: i32, set: impl Fn(i32) -> io::Result<()>) -> io::Result<()> {
    let tasks = format!("/proc/{pid}/task");
    for_each(|| threads(Path::new(&tasks)), |thread| gone_is_fine(set(thread)).map(drop))
}

/// Does something to each that `list` finds, until it finds no new one: a new thread or process takes after the one that
/// started it, which may have been as before a moment ago.
fn for_each<E>(
    list: impl Fn() -> Result<BTreeSet<i32>, E>,
    act: impl Fn(i32) -> Result<(), E>,
) -> Result<(), E> {
    let mut done = BTreeSet::new();
    for _ in 0..PASSES {
        let found = list()?;
        let mut new = found.difference(&done).peekable();
        if new.peek().is_none() {
            break;
        }
        new.try_for_each(|&one| act(one))?;
        done = found;
    }
    Ok(())
}

fn threads(tasks: &Path) -> io::Result<BTreeSet<i32>> {
    let mut found = BTreeSet::new();
    let Some(entries) = gone_is_fine(fs::read_dir(tasks))? else { return Ok(found) };
    for entry in entries {
        let Some(entry) = gone_is_fine(entry)? else { break };
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        found.extend(number.filter(|&number: &i32| number > 0));
    }
    Ok(found)
}

fn gone_is_fine<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::io::Read as _;

    use super::*;
    use crate::process::{Launch, Step, spawn};

    #[test]
    fn every_thread_has_the_slack_and_what_is_gone_is_no_error() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let slack_of = |thread: &i32| {
            let text = std::fs::read_to_string(format!("/proc/{thread}/timerslack_ns")).unwrap();
            Duration::from_nanos(text.trim().parse().unwrap())
        };
        std::thread::scope(|scope| {
            scope.spawn(move || stopped.recv());
            for slack in [Duration::from_millis(7), DEFAULT_TIMER_SLACK] {
                let own = || io::Result::Ok(vec![std::process::id().try_into().unwrap(), i32::MAX]);
                set_timer_slack(own, slack).unwrap();
                let all = threads(Path::new("/proc/self/task")).unwrap();
                assert!(all.len() >= 2, "{all:?}");
                assert!(all.iter().all(|thread| slack_of(thread) == slack), "{all:?}");
            }
            drop(stop);
        });
    }

    #[test]
    fn what_is_started_while_others_are_set_is_set_as_well() {
        // The second starts a third, once.
        let (there, set) = (RefCell::new(BTreeSet::from([1, 2])), RefCell::new(Vec::new()));
        let act = |one| {
            set.borrow_mut().push(one);
            if one == 2 {
                there.borrow_mut().insert(3);
            }
            io::Result::Ok(())
        };
        for_each(|| Ok(there.borrow().clone()), act).unwrap();
        assert_eq!(*set.borrow(), [1, 2, 3]);
        // One that always starts others ends nevertheless.
        let count = Cell::new(0);
        let more = || io::Result::Ok((0..=count.get()).collect());
        let act = |_| {
            count.set(count.get() + 1);
            Ok(())
        };
        for_each(more, act).unwrap();
    }

    #[test]
    fn some_processors_are_as_many_as_asked_for_and_turn() {
        let mut all = CpuSet::new();
        [1, 4, 5, 9].into_iter().for_each(|cpu| all.set(cpu));
        let all = Cpus(all);
        let some = |count, turn| all.some(count, turn).numbers().collect::<Vec<_>>();
        assert_eq!(some(2, 0), [1, 4]);
        assert_eq!(some(2, 3), [1, 9]);
        assert_eq!(some(3, 5), [4, 5, 9]);
        assert_eq!(some(9, 2), [1, 4, 5, 9]);
        assert_eq!(all.some(4, 7), all);
    }

    #[test]
    fn a_program_counts_the_processors_it_was_started_on_and_may_use_all_afterwards() {
        let all = Cpus::own().unwrap();
        let (mut said, into) = std::io::pipe().unwrap();
        let one = Step::RunOn(all.some(1, 0));
        let launch = Launch::new("/bin/sh").unwrap().args(["-c", "nproc; exec sleep 1000"]).unwrap();
        let launch = launch.env("PATH", "/usr/bin:/bin").unwrap().step(one).stdout(&into).unwrap();
        let child = spawn(&launch).unwrap();
        drop((launch, into));
        let mut line = [0; 2];
        said.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"1\n");
        all.allow(child.pid()).unwrap();
        let allowed = sched_getaffinity(Pid::from_raw(child.pid())).unwrap();
        child.pidfd().kill().unwrap();
        child.wait(None).unwrap();
        assert_eq!(Cpus(allowed), all);
    }
}
