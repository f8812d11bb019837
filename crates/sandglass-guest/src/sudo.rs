//! `sudo` for an engine that ignores set-uid bits: a small client asks the agent, which is root anyway, to run the
//! command as the wanted user.
//!
//! Over a unix socket the client sends a [`Request`] and its standard descriptors. If any of them is a terminal,
//! the command gets a new one instead, whose other end the client relays: it never holds the caller's terminal, so
//! it can't type into the caller's shell. The command runs in the caller's group of processes, so whatever ends
//! the caller's command ends it as well.
//!
//! Who may: root, and members of the group `sudo` or the user named `user`, without a password. Inside a sandbox
//! that is no boundary: it keeps accidents away, as it does on a developer's machine.

mod client;
mod options;
mod plan;
mod relay;
mod server;

use std::collections::BTreeMap;
use std::io;

use serde::{Deserialize, Serialize};

pub(crate) use client::main;
pub(crate) use server::{Listener, serve};

/// Where the agent listens.
pub(crate) const SOCKET: &str = "/run/sandglass/sudo.sock";

/// Upper bound for one message, in bytes.
const MAX_MESSAGE: usize = 1 << 20;

/// The one byte that the agent sends first: it is ready to learn from the kernel who the client is.
const GREETING: u8 = 1;

/// Bytes before a message that hold its length.
const LEN_BYTES: usize = 4;

/// Which of the standard descriptors are terminals, and how large theirs is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Tty {
    is_tty: [bool; 3],
    cols: u16,
    rows: u16,
}

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Action {
    /// A program with its arguments.
    Command(Vec<String>),
    /// A shell, to which the command is passed if there is one.
    Shell {
        /// Whether it is the user's login shell in the user's home.
        login: bool,
        /// The command; empty for none.
        command: Vec<String>,
    },
    /// Nothing: only say whether it would be allowed.
    Validate,
}

/// How much of the caller's environment the command gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Preserve {
    /// What does no harm: terminal and language.
    Usual,
    /// These as well.
    Named(Vec<String>),
    /// All.
    All,
}

/// From the client to the agent, once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Request {
    action: Action,
    /// A login name, or `#` and a user id.
    user: String,
    /// A group name, or `#` and a group id, instead of the user's own.
    group: Option<String>,
    /// Where to start.
    cwd: String,
    /// The caller's environment.
    env: BTreeMap<String, String>,
    /// How much of it is kept.
    preserve: Preserve,
    /// Set whatever is kept.
    assignments: Vec<(String, String)>,
    /// Whether `HOME` is the target's in any case.
    set_home: bool,
    /// Whether the command lives on when the client goes away.
    background: bool,
    /// The caller's terminal; `None` if there is none.
    tty: Option<Tty>,
}

/// From the client to the agent, at any time after its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ToCommand {
    /// Pass on a signal.
    Signal(i32),
    /// The caller's terminal has another size now, and so shall the command's.
    Resize {
        /// Width in characters.
        cols: u16,
        /// Height in characters.
        rows: u16,
    },
}

/// From the agent to the client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// It runs. With a terminal, its other end comes along.
    Started,
    /// It ended with this code.
    Exited(i32),
    /// A signal ended it.
    Signaled(i32),
    /// It is not run.
    Refused(String),
}

/// A message with its length in front.
fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = serde_json::to_vec(message)?;
    let too_long = || io::Error::new(io::ErrorKind::InvalidInput, "arguments and environment are too long");
    if body.len() > MAX_MESSAGE {
        return Err(too_long());
    }
    let len = u32::try_from(body.len()).map_err(|_| too_long())?;
    Ok([&len.to_be_bytes(), body.as_slice()].concat())
}

/// Takes one whole message from the front of what was received, if there is one.
fn decode<T: for<'de> Deserialize<'de>>(received: &mut Vec<u8>) -> io::Result<Option<T>> {
    let Some(head) = received.first_chunk::<LEN_BYTES>() else { return Ok(None) };
    let len = usize::try_from(u32::from_be_bytes(*head)).unwrap_or(usize::MAX);
    if len > MAX_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too long"));
    }
    let Some(body) = received.get(LEN_BYTES..LEN_BYTES + len) else { return Ok(None) };
    let message = serde_json::from_slice(body)?;
    received.drain(..LEN_BYTES + len);
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_come_out_one_by_one_however_they_arrive() {
        let mut wire = encode(&Answer::Started).unwrap();
        wire.extend(encode(&Answer::Exited(3)).unwrap());
        let (mut received, mut messages) = (Vec::new(), Vec::new());
        for byte in wire {
            received.push(byte);
            messages.extend(decode::<Answer>(&mut received).unwrap());
        }
        assert_eq!(messages, [Answer::Started, Answer::Exited(3)]);
        assert!(received.is_empty());
    }

    #[test]
    fn long_messages_are_refused_on_both_sides() {
        assert!(encode(&"x".repeat(MAX_MESSAGE)).is_err());
        assert!(decode::<Answer>(&mut vec![0xff; 8]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail(mut bytes: Vec<u8>) {
            let _ = decode::<Request>(&mut bytes);
        }
    }
}
