//! Running a program to its end with bounds on time and output.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};

use super::children::{Child, ExitStatus, spawn};
use super::identity::timespec;
use super::launch::{Launch, LaunchError};

/// What a program left.
#[derive(Debug)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// The first bytes of its standard output.
    pub stdout: Vec<u8>,
    /// The first bytes of its standard error.
    pub stderr: Vec<u8>,
}

/// A program that could not be run to its end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// It did not start.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// It took too long and was killed.
    #[error("{program} did not end within {} ms and was killed", limit.as_millis())]
    Timeout {
        /// Its path.
        program: String,
        /// What it was given.
        limit: Duration,
    },
    /// Talking to it failed; it was killed.
    #[error("could not talk to {program}")]
    Io {
        /// Its path.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Starts a program, writes `stdin` to it, and waits until it has ended. At most `max_output` bytes of each of
/// its outputs are kept; the rest is read and dropped. What its descendants still hold open is not waited for.
///
/// Standard descriptors that `launch` has set are replaced.
///
/// # Errors
/// Any [`RunError`]; then the process (not its descendants) is gone.
pub fn run(launch: Launch, stdin: &[u8], timeout: Duration, max_output: usize) -> Result<Output, RunError> {
    let deadline = Instant::now() + timeout;
    let program = launch.program();
    let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(|errno| LaunchError::Start(errno.into()));
    let (in_read, in_write) = pipe()?;
    let (out_read, out_write) = pipe()?;
    let (err_read, err_write) = pipe()?;
    let launch = launch.stdin(in_read)?.stdout(out_write)?.stderr(err_write)?;
    let child = spawn(&launch)?;
    // The launch holds the program's ends, and they must close with the program.
    drop(launch);

    let mut talk = Talk {
        stdin: (!stdin.is_empty()).then_some(in_write),
        unsent: stdin,
        outputs: [Some(out_read), Some(err_read)],
        kept: [Vec::new(), Vec::new()],
        max_output,
    };
    let talked = talk.until_end(&child, deadline);
    let [stdout, stderr] = talk.kept;
    let source = match talked {
        Ok(true) => match child.wait(None) {
            Ok(Some(status)) => return Ok(Output { status, stdout, stderr }),
            Ok(None) => io::Error::other("no exit status"),
            Err(source) => source,
        },
        Ok(false) => {
            let _ = child.pidfd().kill();
            let _ = child.wait(None);
            return Err(RunError::Timeout { program, limit: timeout });
        }
        Err(source) => {
            let _ = child.pidfd().kill();
            let _ = child.wait(None);
            source
        }
    };
    Err(RunError::Io { program, source })
}

struct Talk<'a> {
    stdin: Option<OwnedFd>,
    unsent: &'a [u8],
    outputs: [Option<OwnedFd>; 2],
    kept: [Vec<u8>; 2],
    max_output: usize,
}

impl Talk<'_> {
    /// Moves bytes until the process has ended and its pipes are drained; `false` if the deadline came first.
    fn until_end(&mut self, child: &Child, deadline: Instant) -> io::Result<bool> {
        for fd in self.stdin.iter().chain(self.outputs.iter().flatten()) {
            rustix::io::ioctl_fionbio(fd, true)?;
        }
        loop {
            let left = timespec(deadline.saturating_duration_since(Instant::now()));
            let (ended, ready) = {
                let mut fds = vec![PollFd::new(child.pidfd(), PollFlags::IN)];
                fds.extend(self.stdin.iter().map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::OUT)));
                fds.extend(
                    self.outputs
                        .iter()
                        .flatten()
                        .map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)),
                );
                match poll(&mut fds, Some(&left)) {
                    Ok(ready) => (fds.first().is_some_and(|fd| !fd.revents().is_empty()), ready),
                    Err(Errno::INTR) => continue,
                    Err(errno) => return Err(errno.into()),
                }
            };
            if ready == 0 {
                return Ok(false);
            }
            self.send()?;
            for index in 0..self.outputs.len() {
                self.receive(index)?;
            }
            if ended {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
        }
    }

    fn send(&mut self) -> io::Result<()> {
        while let Some(fd) = &self.stdin {
            match rustix::io::write(fd, self.unsent) {
                Ok(n) => self.unsent = self.unsent.get(n..).unwrap_or_default(),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                // It does not want the rest: its own business.
                Err(Errno::PIPE) => self.unsent = &[],
                Err(errno) => return Err(errno.into()),
            }
            if self.unsent.is_empty() {
                self.stdin = None;
            }
        }
        Ok(())
    }

    fn receive(&mut self, index: usize) -> io::Result<()> {
        let mut buffer = [0; 8192];
        // A bound, so that a program that writes without end can't keep this loop from seeing the deadline.
        for _ in 0..64 {
            let Some(fd) = &self.outputs[index] else { return Ok(()) };
            match rustix::io::read(fd, &mut buffer) {
                Ok(0) => self.outputs[index] = None,
                Ok(n) => {
                    let kept = &mut self.kept[index];
                    let room = self.max_output.saturating_sub(kept.len()).min(n);
                    kept.extend_from_slice(&buffer[..room]);
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Step;

    fn sh(script: &str) -> Launch {
        Launch::new("/bin/sh").unwrap().args(["-c", script]).unwrap().env("PATH", "/usr/bin:/bin").unwrap()
    }

    #[test]
    fn input_output_and_status_arrive() {
        let out = run(sh("cat; echo no >&2; exit 3"), b"hello", Duration::from_secs(10), 1024).unwrap();
        assert_eq!(out.status, ExitStatus::Exited(3));
        assert_eq!((out.stdout.as_slice(), out.stderr.as_slice()), (&b"hello"[..], &b"no\n"[..]));
    }

    #[test]
    fn output_without_end_is_bounded_and_time_is_too() {
        let error =
            run(sh("while :; do echo yyyyyyyyyyyyyyyyyyyyyyyy; done"), b"", Duration::from_millis(300), 64)
                .unwrap_err();
        assert!(matches!(error, RunError::Timeout { .. }), "{error}");
        let out = run(sh("head -c 1000000 /dev/zero"), b"", Duration::from_secs(10), 64).unwrap();
        assert_eq!(out.stdout.len(), 64);
        assert!(out.status.success());
    }

    #[test]
    fn a_descendant_that_holds_the_pipe_open_is_not_waited_for() {
        let before = Instant::now();
        let out = run(sh("sleep 5 & echo done"), b"", Duration::from_secs(10), 64).unwrap();
        assert_eq!(out.stdout, b"done\n");
        assert!(before.elapsed() < Duration::from_secs(4));
    }

    #[test]
    fn a_missing_program_and_a_failed_step_name_themselves() {
        let missing =
            run(Launch::new("/no/such/program").unwrap(), b"", Duration::from_secs(5), 64).unwrap_err();
        assert_eq!(missing.to_string(), "could not execute /no/such/program");
        let step = sh("true").step(Step::JoinCgroup(c"/no/such/cgroup.procs".into()));
        let failed = run(step, b"", Duration::from_secs(5), 64).unwrap_err();
        assert_eq!(failed.to_string(), "could not join a cgroup");
    }

    #[test]
    fn the_program_gets_its_three_descriptors_and_no_other() {
        let out = run(sh("ls /proc/self/fd"), b"", Duration::from_secs(5), 1024).unwrap();
        // 3 is the directory that `ls` itself reads.
        assert_eq!(String::from_utf8_lossy(&out.stdout), "0\n1\n2\n3\n");
    }

    #[test]
    fn the_membarrier_filter_and_the_reserved_descriptor_reach_the_program() {
        let launch = sh("grep Seccomp: /proc/self/status; test -e /proc/self/fd/400 && ulimit -n").steps([
            Step::OpenFiles(4096),
            Step::ReserveDescriptor(400),
            Step::DenyMembarrier,
        ]);
        let out = run(launch, b"", Duration::from_secs(5), 1024).unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stdout), "Seccomp:\t2\n4096\n");
    }
}
