//! Carries signals and terminal contents between the caller and the command.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::termios::{OptionalActions, Termios};

use super::client::{Received, exit_code};
use super::{ToCommand, Tty, encode};

/// Signals that are passed on instead of acted on.
const PASSED: [i32; 8] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGCONT,
];

/// How long the last output of a command is waited for once it has ended.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A terminal in raw mode, as long as this lives.
struct Raw<'a> {
    fd: BorrowedFd<'a>,
    before: Termios,
}

impl<'a> Raw<'a> {
    /// Only for a process in the terminal's foreground: others would be stopped.
    fn enter(fd: BorrowedFd<'a>) -> Option<Self> {
        let foreground = rustix::termios::tcgetpgrp(fd).ok()?;
        if foreground != rustix::process::getpgrp() {
            return None;
        }
        let before = rustix::termios::tcgetattr(fd).ok()?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(fd, OptionalActions::Drain, &raw).ok()?;
        Some(Self { fd, before })
    }
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        let _ = rustix::termios::tcsetattr(self.fd, OptionalActions::Drain, &self.before);
    }
}

/// Receives the signals of this process as data.
pub(super) struct Relay {
    signals: OwnedFd,
}

/// Bytes that wait to be written to a terminal.
#[derive(Default)]
struct Pending {
    bytes: Vec<u8>,
}

impl Pending {
    const MAX: usize = 64 * 1024;

    fn fill(&mut self, from: BorrowedFd<'_>) -> Result<bool, Errno> {
        let mut buffer = [0; 8192];
        match rustix::io::read(from, &mut buffer) {
            Ok(0) | Err(Errno::IO) => Ok(false),
            Ok(n) => {
                self.bytes.extend_from_slice(&buffer[..n]);
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(true),
            Err(errno) => Err(errno),
        }
    }

    fn flush(&mut self, to: BorrowedFd<'_>) -> Result<(), Errno> {
        match rustix::io::write(to, &self.bytes) {
            Ok(n) => {
                self.bytes.drain(..n);
                Ok(())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}

impl Relay {
    /// Takes over the signals of this process, which has no other thread.
    pub(super) fn new() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set before anything else uses it.
        let signals = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in PASSED.into_iter().chain([libc::SIGWINCH]) {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            if libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if signals < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and nobody else owns it.
        Ok(Self { signals: unsafe { OwnedFd::from_raw_fd(signals) } })
    }

    fn next_signal(&self) -> Option<i32> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let n = rustix::io::read(&self.signals, &mut info).ok()?;
        // The number is the first field.
        let number = info.first_chunk::<4>().filter(|_| n == info.len())?;
        i32::try_from(u32::from_ne_bytes(*number)).ok()
    }

    /// Relays until the command has ended.
    pub(super) fn run(
        self,
        socket: &OwnedFd,
        mut received: Received,
        tty: Option<Tty>,
    ) -> io::Result<ExitCode> {
        let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
        let fds = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
        let terminal = received.terminal.take();
        if let Some(terminal) = &terminal {
            // A command that reads nothing must not keep its output from being shown.
            rustix::io::ioctl_fionbio(terminal, true)?;
        }
        let is_tty = tty.map_or([false; 3], |tty| tty.is_tty);
        // Output of the command's terminal goes to the first of ours that can show it.
        let screen = if is_tty[1] {
            fds[1]
        } else if is_tty[2] {
            fds[2]
        } else {
            fds[0]
        };
        let raw = if terminal.is_some() && is_tty[0] { Raw::enter(fds[0]) } else { None };
        let mut typing = raw.is_some();
        let (mut input, mut output) = (Pending::default(), Pending::default());
        let mut terminal_open = terminal.is_some();
        let mut code = None;
        let mut deadline: Option<Instant> = None;
        loop {
            if let Some(code) = code {
                let is_late = deadline.is_some_and(|deadline| Instant::now() > deadline);
                if is_late || (!terminal_open && output.bytes.is_empty()) {
                    return Ok(code);
                }
            }
            let mut polled = vec![(Source::Signals, self.signals.as_fd(), PollFlags::IN)];
            if code.is_none() {
                polled.push((Source::Agent, socket.as_fd(), PollFlags::IN));
            }
            if typing && input.bytes.len() < Pending::MAX {
                polled.push((Source::Keyboard, fds[0], PollFlags::IN));
            }
            if let Some(terminal) = terminal.as_ref().filter(|_| terminal_open) {
                let mut wanted = PollFlags::empty();
                wanted.set(PollFlags::IN, output.bytes.len() < Pending::MAX);
                wanted.set(PollFlags::OUT, !input.bytes.is_empty());
                polled.push((Source::Terminal, terminal.as_fd(), wanted));
            }
            if !output.bytes.is_empty() {
                polled.push((Source::Screen, screen, PollFlags::OUT));
            }
            let mut poll_fds: Vec<_> =
                polled.iter().map(|(_, fd, wanted)| PollFd::from_borrowed_fd(*fd, *wanted)).collect();
            let timeout = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
            match poll(&mut poll_fds, timeout.as_ref()) {
                Err(Errno::INTR) => continue,
                other => other?,
            };
            let ready: Vec<_> =
                poll_fds.iter().zip(&polled).map(|(fd, (source, ..))| (*source, fd.revents())).collect();
            for (source, events) in ready.into_iter().filter(|(_, events)| !events.is_empty()) {
                match source {
                    Source::Signals => {
                        while let Some(signal) = self.next_signal() {
                            let message = match signal {
                                libc::SIGWINCH => rustix::termios::tcgetwinsize(screen)
                                    .ok()
                                    .map(|size| ToCommand::Resize { cols: size.ws_col, rows: size.ws_row }),
                                _ => Some(ToCommand::Signal(signal)),
                            };
                            if let Some(message) = message {
                                let message = encode(&message)?;
                                let _ = rustix::net::send(socket, &message, SendFlags::NOSIGNAL);
                            }
                        }
                    }
                    Source::Agent => {
                        let more = received.fill(socket)?;
                        while let Some(answer) = received.next()? {
                            code = code.or_else(|| exit_code(&answer));
                        }
                        if !more && code.is_none() {
                            return Err(io::ErrorKind::UnexpectedEof.into());
                        }
                        if code.is_some() {
                            deadline = Some(Instant::now() + LAST_WORDS);
                        }
                    }
                    Source::Keyboard => typing = input.fill(fds[0])?,
                    Source::Screen => output.flush(screen)?,
                    Source::Terminal => {
                        let Some(terminal) = &terminal else { continue };
                        if events.contains(PollFlags::OUT) && input.flush(terminal.as_fd()).is_err() {
                            input.bytes.clear();
                        }
                        if events.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR)
                            && output.bytes.len() < Pending::MAX
                        {
                            terminal_open = output.fill(terminal.as_fd())?;
                        }
                    }
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Source {
    Signals,
    Agent,
    Keyboard,
    Terminal,
    Screen,
}
