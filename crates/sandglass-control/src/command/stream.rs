//! What the guest API says of a command that runs: messages of the Connect protocol, as JSON. Every byte is the guest's, so
//! each length has a bound, and of what is written only the end is kept.

use std::collections::VecDeque;

use data_encoding::BASE64;
use serde::Deserialize;

/// Longest message that is read, in bytes. The agent's own are much shorter.
const MAX_MESSAGE: usize = 1 << 20;

/// How much of the output is kept, in bytes.
const MAX_TAIL: usize = 4096;

/// The flag of the last message of a stream.
const LAST: u8 = 2;

/// How a command ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Its exit code; `None` if a signal or a time limit ended it.
    pub(crate) code: Option<i32>,
    /// The same in words.
    pub(crate) status: String,
    /// The end of what it wrote, without control characters other than line breaks and tabs.
    pub(crate) tail: String,
}

/// What is no stream of a command.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    /// A message is too long.
    #[error("the guest sent a message of {0} bytes")]
    Long(usize),
    /// It is nothing that we know.
    #[error("the guest sent what is no event of a command")]
    Unknown,
    /// It refused.
    #[error("the guest said: {0}")]
    Refused(String),
    /// The end is missing.
    #[error("the guest did not say how it ended")]
    Endless,
}

#[derive(Deserialize)]
struct Message {
    event: Option<Event>,
}

#[derive(Deserialize)]
struct Event {
    start: Option<Start>,
    data: Option<Data>,
    end: Option<End>,
}

#[derive(Deserialize)]
struct Start {
    #[serde(default)]
    pid: u32,
}

#[derive(Deserialize)]
struct Data {
    stdout: Option<String>,
    stderr: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[derive(Default)]
struct End {
    exit_code: i32,
    exited: bool,
    status: String,
}

#[derive(Deserialize)]
struct Last {
    error: Option<Refusal>,
}

#[derive(Deserialize)]
struct Refusal {
    message: Option<String>,
    code: Option<String>,
}

/// Something that the guest says of a command that has not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Told {
    /// It runs under this number.
    Began(u32),
    /// It wrote this to its standard output.
    Out(Vec<u8>),
    /// It wrote this to its standard error.
    Err(Vec<u8>),
}

/// Puts the head of a message before it.
pub(super) fn message(json: &[u8]) -> Vec<u8> {
    let length = u32::try_from(json.len()).unwrap_or(u32::MAX);
    [&[0][..], &length.to_be_bytes(), json].concat()
}

/// Text of a guest as it may be shown.
pub(crate) fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// Reads a stream as it comes.
#[derive(Debug, Default)]
pub(super) struct Reader {
    unread: Vec<u8>,
    told: VecDeque<Told>,
    tail: Vec<u8>,
    ended: Option<(Option<i32>, String)>,
}

impl Reader {
    /// Takes the next bytes.
    ///
    /// # Errors
    /// They are no stream of a command.
    pub(super) fn read(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        let mut unread = std::mem::take(&mut self.unread);
        unread.extend_from_slice(bytes);
        let mut rest = unread.as_slice();
        while let Some((head, behind)) = rest.split_first_chunk::<5>() {
            let [flags, length @ ..] = *head;
            let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
            if length > MAX_MESSAGE {
                return Err(Malformed::Long(length));
            }
            let Some((message, behind)) = behind.split_at_checked(length) else { break };
            self.take(flags, message)?;
            rest = behind;
        }
        self.unread = rest.to_vec();
        Ok(())
    }

    fn take(&mut self, flags: u8, message: &[u8]) -> Result<(), Malformed> {
        if flags & LAST != 0 {
            let last: Last = serde_json::from_slice(message).map_err(|_| Malformed::Unknown)?;
            return match last.error {
                None => Ok(()),
                // That is how a time limit is told, where there is no other end.
                Some(_) if self.ended.is_some() => Ok(()),
                Some(Refusal { code: Some(code), .. }) if code == "deadline_exceeded" => {
                    self.ended = Some((None, "it took too long".into()));
                    Ok(())
                }
                Some(Refusal { message, code }) => {
                    let said = message.or(code).unwrap_or_default();
                    Err(Malformed::Refused(shown(said.as_bytes()).chars().take(MAX_TAIL).collect()))
                }
            };
        }
        let message: Message = serde_json::from_slice(message).map_err(|_| Malformed::Unknown)?;
        let Some(event) = message.event else { return Ok(()) };
        if let Some(Start { pid }) = event.start {
            self.told.push_back(Told::Began(pid));
        }
        if let Some(data) = event.data {
            let read = |text: String| BASE64.decode(text.as_bytes()).map_err(|_| Malformed::Unknown);
            let pieces = [
                data.stdout.map(read).transpose()?.map(Told::Out),
                data.stderr.map(read).transpose()?.map(Told::Err),
            ];
            for piece in pieces.into_iter().flatten() {
                if let Told::Out(bytes) | Told::Err(bytes) = &piece {
                    self.tail.extend(bytes);
                }
                self.told.push_back(piece);
            }
            let over = self.tail.len().saturating_sub(MAX_TAIL);
            self.tail.drain(..over);
        }
        if let Some(end) = event.end {
            let status: String = shown(end.status.as_bytes()).chars().take(MAX_TAIL).collect();
            self.ended = Some((end.exited.then_some(end.exit_code), status));
        }
        Ok(())
    }

    /// The next of what the guest said. What nobody asks for is kept until somebody does.
    pub(super) fn next(&mut self) -> Option<Told> {
        self.told.pop_front()
    }

    /// How it ended.
    ///
    /// # Errors
    /// The stream was over before its end.
    pub(super) fn finish(self) -> Result<Ended, Malformed> {
        let (code, status) = self.ended.ok_or(Malformed::Endless)?;
        Ok(Ended { code, status, tail: shown(&self.tail) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(messages: &[(u8, &str)]) -> Vec<u8> {
        let one = |(flags, json): &(u8, &str)| {
            let mut bytes = message(json.as_bytes());
            bytes[0] = *flags;
            bytes
        };
        messages.iter().flat_map(one).collect()
    }

    fn read(bytes: &[u8], piece: usize) -> Result<Ended, Malformed> {
        let mut reader = Reader::default();
        for piece in bytes.chunks(piece) {
            reader.read(piece)?;
        }
        reader.finish()
    }

    #[test]
    fn a_command_is_followed_to_its_end_however_its_stream_is_cut() {
        let bytes = of(&[
            (0, r#"{"event":{"start":{"pid":7}}}"#),
            (0, r#"{"event":{"data":{"stdout":"b25lCg=="}}}"#),
            (0, r#"{"event":{"keepalive":{}}}"#),
            (0, r#"{"event":{"data":{"stderr":"dAn/GxtbMko="}}}"#),
            (0, r#"{"event":{"end":{"exitCode":3,"exited":true,"status":"exit status 3"}}}"#),
            (2, "{}"),
        ]);
        let tail = "one\nt\t\u{fffd}[2J".into();
        let expected = Ended { code: Some(3), status: "exit status 3".into(), tail };
        for piece in 1..bytes.len() {
            assert_eq!(read(&bytes, piece), Ok(expected.clone()));
        }
        let mut reader = Reader::default();
        reader.read(&bytes).unwrap();
        let told: Vec<_> = std::iter::from_fn(|| reader.next()).collect();
        let written = Told::Err(b"t\t\xff\x1b\x1b[2J".to_vec());
        assert_eq!(told, [Told::Began(7), Told::Out(b"one\n".to_vec()), written]);
        let ok = of(&[(0, r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#), (2, "{}")]);
        assert_eq!(read(&ok, 9).unwrap().code, Some(0));
        let killed = of(&[(0, r#"{"event":{"end":{"exitCode":-1,"status":"signal: killed"}}}"#), (2, "{}")]);
        assert_eq!(read(&killed, 9).unwrap().code, None);
    }

    #[test]
    fn what_does_not_end_is_no_success() {
        let late = of(&[(2, r#"{"error":{"code":"deadline_exceeded","message":"too late"}}"#)]);
        assert_eq!(read(&late, 99).unwrap().code, None);
        let refused = of(&[(2, r#"{"error":{"code":"not_found","message":"no such user"}}"#)]);
        assert_eq!(read(&refused, 99), Err(Malformed::Refused("no such user".into())));
        assert_eq!(read(&of(&[(2, "{}")]), 99), Err(Malformed::Endless));
        assert_eq!(read(b"", 99), Err(Malformed::Endless));
        assert_eq!(read(&of(&[(0, "nothing")]), 99), Err(Malformed::Unknown));
        assert_eq!(read(&[0, 255, 255, 255, 255], 99), Err(Malformed::Long(0xffff_ffff)));
    }

    #[test]
    fn of_much_output_the_end_is_kept() {
        let text = BASE64.encode(&[b'x'; 60_000]);
        let data = format!(r#"{{"event":{{"data":{{"stdout":"{text}"}}}}}}"#);
        let end = r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#;
        let mut messages = vec![(0, data.as_str()); 20];
        messages.push((0, end));
        assert_eq!(read(&of(&messages), 8192).unwrap().tail.len(), MAX_TAIL);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), piece in 1_usize..50) {
            let _any = read(&bytes, piece);
        }
    }
}
