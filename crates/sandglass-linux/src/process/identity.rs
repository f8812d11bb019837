//! A pid is reused after its process is gone; a pid with its start time, within one boot, is not.

use std::io::{self, Read as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Upper bound for what is read from one file of `/proc`, in bytes. `comm` is at most 64 bytes and there are
/// about 50 numbers in `stat`.
pub(super) const MAX_STAT_LEN: u64 = 4096;

/// One process, for as long as this machine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProcessIdentity {
    /// Its pid in this process's pid namespace.
    pub pid: i32,
    /// When it started, in clock ticks since boot: field 22 of `/proc/PID/stat`.
    pub start_ticks: u64,
}

impl ProcessIdentity {
    /// Reads the identity of whatever has this pid now.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] when there is no such process.
    pub fn of(pid: i32) -> io::Result<Self> {
        let stat = read_stat(pid)?;
        let start_ticks = start_ticks(&stat)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "unexpected form of /proc/PID/stat"))?;
        Ok(Self { pid, start_ticks })
    }

    /// Opens a descriptor of this very process; `None` if it is gone, whoever has its pid now.
    ///
    /// # Errors
    /// The kernel refused for another reason than absence.
    pub fn open(&self) -> io::Result<Option<PidFd>> {
        let Some(fd) = PidFd::open(self.pid)? else { return Ok(None) };
        // The descriptor holds the process, so what is read now is about it or about nothing.
        match Self::of(self.pid) {
            Ok(found) if found == *self => Ok(Some(fd)),
            Ok(_) => Ok(None),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A descriptor that means one process and never another.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// Opens whatever has this pid now; `None` if nothing has.
    ///
    /// # Errors
    /// No descriptor was left, or the pid can't be one.
    pub fn open(pid: i32) -> io::Result<Option<Self>> {
        // `from_raw` panics on a negative number in debug builds.
        let pid = Some(pid)
            .filter(|pid| *pid > 0)
            .and_then(Pid::from_raw)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a pid"))?;
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => Ok(Some(Self(fd))),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(super) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Sends SIGKILL. `Ok` also when it is gone already.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Sends a signal. `Ok` also when the process is gone.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.0, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Blocks until the process has ended (all its threads; it may still be a zombie) or `deadline` has come,
    /// and says whether it has. `None` waits for ever.
    ///
    /// # Errors
    /// The kernel refused to poll.
    pub fn wait_end(&self, deadline: Option<Instant>) -> io::Result<bool> {
        loop {
            let timeout =
                deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            match poll(&mut fds, timeout.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A random id that the kernel makes at each boot: pids and start times of another boot mean nothing.
///
/// # Errors
/// `/proc` is not mounted.
pub fn boot_id() -> io::Result<String> {
    Ok(fs_err::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

pub(super) fn timespec(duration: Duration) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

fn read_stat(pid: i32) -> io::Result<Vec<u8>> {
    read_bounded(format!("/proc/{pid}/stat").as_ref(), MAX_STAT_LEN)
}

/// The first `max` bytes of a file of `/proc`.
pub(super) fn read_bounded(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(max).read_to_end(&mut text)?;
    Ok(text)
}

/// Whether an error of a `/proc/PID` file means that the process is gone: `open` says ENOENT, `read` says ESRCH.
pub(super) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

fn start_ticks(stat: &[u8]) -> Option<u64> {
    fields(stat)?.nth(22 - 3)?.parse().ok()
}

/// The fields of `stat` from the third on. The name in field 2 may hold spaces and parentheses, so counting starts at
/// the *last* `)`.
pub(super) fn fields(stat: &[u8]) -> Option<impl Iterator<Item = &str>> {
    let close = stat.iter().rposition(|byte| *byte == b')')?;
    Some(std::str::from_utf8(stat.get(close + 1..)?).ok()?.split_ascii_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_and_spaces_does_not_shift_the_fields() {
        let fields = (3..=52).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        let stat = format!("7 (a) 1 (b c) {fields}\n");
        assert_eq!(start_ticks(stat.as_bytes()), Some(22));
        assert_eq!(start_ticks(b"7 (x) S 1"), None);
        assert_eq!(start_ticks(b""), None);
    }

    #[test]
    fn another_start_time_is_another_process() {
        let me = ProcessIdentity::of(std::process::id().try_into().unwrap()).unwrap();
        assert!(me.open().unwrap().is_some());
        let earlier = ProcessIdentity { start_ticks: me.start_ticks.wrapping_sub(1), ..me };
        assert!(earlier.open().unwrap().is_none());
    }

    #[test]
    fn pids_that_mean_groups_are_refused() {
        for pid in [0, -1, i32::MIN] {
            assert_eq!(PidFd::open(pid).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
    }
}
