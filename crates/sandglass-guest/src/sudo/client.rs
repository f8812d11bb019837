//! The program that users call.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitCode;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::options::{Options, Wanted, parse};
use super::relay::Relay;
use super::{Action, Answer, GREETING, MAX_MESSAGE, Request, SOCKET, Tty, decode, encode};

const USAGE: &str =
    "usage: sudo [-nHEibs] [-u user] [-g group] [-D directory] [VAR=value] [-i | -s] [command [arg ...]]
       sudo -l | -v | -k | -V
";

/// Descriptors that go along with a request.
const FDS: usize = 3;

/// Runs as `sudo`.
pub(crate) fn main(args: impl Iterator<Item = String>) -> ExitCode {
    match run(args) {
        Ok(code) => code,
        Err(message) => {
            let _ = writeln!(io::stderr(), "sudo: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: impl Iterator<Item = String>) -> Result<ExitCode, String> {
    let print = |text: &str| {
        let _ = io::stdout().write_all(text.as_bytes());
        Ok(ExitCode::SUCCESS)
    };
    match parse(args)? {
        Wanted::Run(options) => ask(*options),
        Wanted::List => {
            let options = match parse(["-v".into()])? {
                Wanted::Run(options) => *options,
                _ => return Err("internal error".into()),
            };
            ask(options)?;
            print("User may run the following commands here:\n    (ALL : ALL) NOPASSWD: ALL\n")
        }
        Wanted::Version => print(concat!("Sandglass sudo ", env!("CARGO_PKG_VERSION"), "\n")),
        Wanted::Help => print(USAGE),
        Wanted::Usage => {
            let _ = io::stderr().write_all(USAGE.as_bytes());
            Ok(ExitCode::FAILURE)
        }
        Wanted::Nothing => Ok(ExitCode::SUCCESS),
    }
}

/// The terminal behind the standard descriptors, if any of them is one.
fn find_tty(fds: [BorrowedFd<'_>; FDS]) -> Option<Tty> {
    let is_tty = fds.map(rustix::termios::isatty);
    let size = fds.iter().zip(is_tty).filter(|(_, is_tty)| *is_tty);
    let size = size.map(|(fd, _)| rustix::termios::tcgetwinsize(fd).ok()).next()?;
    let (cols, rows) = size.map_or((80, 24), |size| (size.ws_col, size.ws_row));
    Some(Tty { is_tty, cols, rows })
}

fn request(options: Options, tty: Option<Tty>) -> Result<Request, String> {
    let cwd = match options.chdir {
        Some(dir) => dir,
        None => {
            let cwd = std::env::current_dir().map_err(|error| format!("no current directory: {error}"))?;
            cwd.into_os_string().into_string().map_err(|_| "the current directory has no readable name")?
        }
    };
    // What is no text can't be passed on, and nobody means it.
    let env: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    Ok(Request {
        action: options.action,
        user: options.user,
        group: options.group,
        cwd,
        env,
        preserve: options.preserve,
        assignments: options.assignments,
        set_home: options.set_home,
        background: options.background,
        tty,
    })
}

fn connect() -> io::Result<OwnedFd> {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(SOCKET)?)?;
    let mut greeting = [0; 1];
    match rustix::net::recv(&socket, &mut greeting, RecvFlags::empty())? {
        (1, _) if greeting == [GREETING] => Ok(socket),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn send(socket: &OwnedFd, message: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut sent =
        rustix::net::sendmsg(socket, &[io::IoSlice::new(message)], &mut ancillary, SendFlags::NOSIGNAL)?;
    while sent < message.len() {
        sent += rustix::net::send(socket, &message[sent..], SendFlags::NOSIGNAL)?;
    }
    Ok(())
}

/// What the agent sent, and the terminal that came along.
pub(super) struct Received {
    bytes: Vec<u8>,
    pub(super) terminal: Option<OwnedFd>,
}

impl Received {
    /// Reads what has arrived; `false` at the end.
    pub(super) fn fill(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut buffer = [0; 4096];
        let received = loop {
            let mut slices = [io::IoSliceMut::new(&mut buffer)];
            match rustix::net::recvmsg(socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                other => break other?,
            }
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.terminal = fds.last().or(self.terminal.take());
            }
        }
        if received.bytes == 0 || self.bytes.len() > MAX_MESSAGE {
            return Ok(false);
        }
        self.bytes.extend_from_slice(&buffer[..received.bytes]);
        Ok(true)
    }

    /// The next whole message.
    pub(super) fn next(&mut self) -> io::Result<Option<Answer>> {
        decode(&mut self.bytes)
    }
}

/// The exit code that stands for how a command ended.
pub(super) fn exit_code(answer: &Answer) -> Option<ExitCode> {
    let code = match answer {
        Answer::Started | Answer::Refused(_) => return None,
        Answer::Exited(code) => *code,
        Answer::Signaled(signal) => 128 + signal,
    };
    Some(ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1)))
}

fn ask(options: Options) -> Result<ExitCode, String> {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let fds = [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()];
    let validate = options.action == Action::Validate;
    let background = options.background;
    let tty = find_tty(fds).filter(|_| !validate);
    let message = encode(&request(options, tty)?).map_err(|error| error.to_string())?;
    // Signals from here on are for the command.
    let relay = Relay::new().map_err(|error| format!("no signals: {error}"))?;
    let unreachable = |error: io::Error| format!("the sandbox's agent can't be reached: {error}");
    let socket = connect().map_err(unreachable)?;
    send(&socket, &message, &fds).map_err(unreachable)?;
    let mut received = Received { bytes: Vec::new(), terminal: None };
    loop {
        match received.next().map_err(unreachable)? {
            Some(Answer::Refused(reason)) => return Err(reason),
            Some(Answer::Started) if background => return Ok(ExitCode::SUCCESS),
            Some(Answer::Started) => break,
            Some(answer) => return exit_code(&answer).ok_or_else(|| "internal error".into()),
            None => {
                if !received.fill(&socket).map_err(unreachable)? {
                    return Err("the sandbox's agent hung up".into());
                }
            }
        }
    }
    relay.run(&socket, received, tty).map_err(unreachable)
}
