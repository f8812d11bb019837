//! Receipts: one line for each answer of DNS and each connection, chained so that none can be changed, left out or put in
//! without notice.
//!
//! A line is a JSON object. Its `digest` is over the sandbox's id and all of the line before it, in which stands the
//! digest of the line before. No key is in it: a chain alone can't show that lines are missing at its end, or that all
//! from some line on were written anew. For that, its [`Head`] is kept elsewhere.

use std::fmt;
use std::net::IpAddr;

use sandglass_types::net::Port;
use sandglass_types::{Digest, Generation, SandboxId, Timestamp};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::policy::{Transport, Verdict};

/// Longest text in a receipt, in bytes.
pub const MAX_TEXT: usize = 512;

/// Longest line, in bytes. Each character of its texts may need an escape.
pub const MAX_LINE: usize = 8192;

/// Goes into every digest, so that one over the same bytes for another purpose differs.
const PURPOSE: &str = "sandglass egress receipt 1";

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// When it was decided.
    pub time: Timestamp,
    /// Which life of the sandbox.
    pub generation: Generation,
    /// What it was.
    pub kind: Kind,
    /// The name that the sandbox resolved, or wanted to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Text>,
    /// The type of the record that DNS was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub record: Option<Text>,
    /// The addresses that DNS told, or would have told but for the rule.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub answer: Vec<IpAddr>,
    /// The address that was connected to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// The port that was connected to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<Port>,
    /// What would have carried it, or did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// The host that TLS or HTTP named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shown: Option<Text>,
    /// The method of a request through a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<Text>,
    /// The status of its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// What decided: see [`Verdict::rule`].
    pub rule: Text,
    /// What was decided.
    pub outcome: Outcome,
    /// Bytes that left the sandbox.
    pub sent: u64,
    /// Bytes that came in.
    pub received: u64,
    /// How many receipts there would have been between this one and the one before it, had there been room for them. Of what
    /// the packet filter holds up, each packet without a receipt of its own counts.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lost: u64,
}

const fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What a receipt is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// An answer of DNS.
    Dns,
    /// A connection.
    Connection,
    /// A request on a connection.
    Request,
    /// The use of a credential that the sandbox never sees: a request through a connection.
    Use,
}

/// What was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It went.
    Allowed,
    /// It did not go.
    Denied,
}

impl From<&Verdict> for Outcome {
    fn from(verdict: &Verdict) -> Self {
        if verdict.is_allowed() { Self::Allowed } else { Self::Denied }
    }
}

/// A text that may come from a sandbox, made harmless: printable ASCII of bounded length, all else escaped, what does not
/// fit left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Text(String);

/// A text that no [`Text`] would be written as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a text of a receipt is printable ASCII of at most {MAX_TEXT} bytes")]
pub struct InvalidText;

impl Text {
    /// Takes what fits.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Self {
        let mut text = String::new();
        for byte in bytes {
            let escaped = match byte {
                b' '..=b'~' => char::from(*byte).to_string(),
                _ => format!("\\x{byte:02x}"),
            };
            if text.len() + escaped.len() > MAX_TEXT {
                break;
            }
            text.push_str(&escaped);
        }
        Self(text)
    }
}

impl TryFrom<String> for Text {
    type Error = InvalidText;

    fn try_from(text: String) -> Result<Self, InvalidText> {
        let right = text.len() <= MAX_TEXT && text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        if right { Ok(Self(text)) } else { Err(InvalidText) }
    }
}

impl From<Text> for String {
    fn from(text: Text) -> Self {
        text.0
    }
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where a chain ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// Lines so far.
    pub count: u64,
    /// Digest of the last one; of an empty chain, of the sandbox's id alone.
    pub digest: Digest,
}

/// The receipts of one sandbox, as they are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    sandbox: SandboxId,
    head: Head,
}

/// What is digested of a line, in the order of its fields.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    number: u64,
    previous: Digest,
    receipt: Receipt,
}

impl Chain {
    /// The chain of a new sandbox.
    #[must_use]
    pub fn begin(sandbox: SandboxId) -> Self {
        let digest = digest(&sandbox, "");
        Self { sandbox, head: Head { count: 0, digest } }
    }

    /// Goes on where a chain ended.
    #[must_use]
    pub const fn resume(sandbox: SandboxId, head: Head) -> Self {
        Self { sandbox, head }
    }

    /// Where the chain ends.
    #[must_use]
    pub const fn head(&self) -> &Head {
        &self.head
    }

    /// The next line, without its line feed.
    ///
    /// # Errors
    /// The receipt can't be written as JSON. The chain is as it was.
    pub fn append(&mut self, receipt: Receipt) -> Result<String, serde_json::Error> {
        let body = Body { number: self.head.count, previous: self.head.digest, receipt };
        let mut line = serde_json::to_string(&body)?;
        // Open at its end, so that the digest becomes the last field.
        line.pop();
        let digest = digest(&self.sandbox, &line);
        line.push_str(&format!("{DIGEST_FIELD}{digest}{END}"));
        self.head = Head { count: self.head.count + 1, digest };
        Ok(line)
    }
}

const DIGEST_FIELD: &str = ",\"digest\":\"";
const END: &str = "\"}";

fn digest(sandbox: &SandboxId, line: &str) -> Digest {
    let mut hash = Sha256::new();
    for part in [PURPOSE, sandbox.as_str(), line] {
        hash.update(part);
        hash.update([0]);
    }
    Digest::from_bytes(hash.finalize().into())
}

/// Where a chain is broken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// A line that no chain has.
    #[error("line {0} is not a receipt")]
    Malformed(u64),
    /// A line was changed, or is another sandbox's.
    #[error("line {0} is not as it was written, or not of this sandbox")]
    Changed(u64),
    /// A line does not follow on the one before.
    #[error("line {0} does not follow on the line before it")]
    Order(u64),
    /// The chain is whole, but is not the one that was to be here.
    #[error("the chain has {0} lines, and is not the one whose end is known")]
    End(u64),
}

impl Head {
    /// Where the chain ended before `line`, by what the line says. Of a chain whose first lines are gone, the first
    /// that is left says how many those were.
    #[must_use]
    pub fn before(line: &str) -> Option<Self> {
        let (_, body, _) = parse(line)?;
        Some(Self { count: body.number, digest: body.previous })
    }

    /// Where the chain ends behind `line`.
    ///
    /// # Errors
    /// The line is not one of the sandbox's.
    pub fn after(sandbox: &SandboxId, line: &str) -> Result<Self, Broken> {
        let before = Self::before(line).ok_or(Broken::Malformed(1))?;
        before.follow(sandbox, line)
    }

    fn follow(&self, sandbox: &SandboxId, line: &str) -> Result<Self, Broken> {
        let place = self.count.saturating_add(1);
        let (open, body, written) = parse(line).ok_or(Broken::Malformed(place))?;
        let digest = digest(sandbox, open);
        if written.parse() != Ok(digest) {
            return Err(Broken::Changed(place));
        }
        if body.number != self.count || body.previous != self.digest {
            return Err(Broken::Order(place));
        }
        Ok(Self { count: place, digest })
    }
}

/// A line without its digest, what it says, and its digest.
fn parse(line: &str) -> Option<(&str, Body, &str)> {
    let open = line.strip_suffix(END).filter(|line| line.len() <= MAX_LINE)?;
    let (open, written) = open.rsplit_once(DIGEST_FIELD)?;
    let body = serde_json::from_str(&format!("{open}}}")).ok()?;
    Some((open, body, written))
}

/// Checks the lines of a sandbox that follow on `start`, or on nothing, and says where they end.
///
/// # Errors
/// Where the chain breaks first. With `end`, also that it ends elsewhere.
pub fn verify<'a>(
    sandbox: &SandboxId,
    start: Option<Head>,
    lines: impl IntoIterator<Item = &'a str>,
    end: Option<&Head>,
) -> Result<Head, Broken> {
    let mut head = start.unwrap_or_else(|| Chain::begin(sandbox.clone()).head);
    for line in lines {
        head = head.follow(sandbox, line)?;
    }
    match end {
        Some(end) if *end != head => Err(Broken::End(head.count)),
        _ => Ok(head),
    }
}

#[cfg(test)]
mod tests;
