//! The agent's log: short lines on standard error, which the engine keeps. It never blocks on or fails with its
//! reader.

use std::io::Write as _;

/// Upper bound for one line, in bytes.
const MAX_LINE: usize = 512;

/// Writes one line.
pub(crate) fn line(message: &str) {
    let mut line = String::with_capacity(message.len().min(MAX_LINE) + 16);
    line.push_str("agent: ");
    // Whatever the guest put into a message must not forge another line.
    line.extend(message.chars().take(MAX_LINE).map(|c| if c.is_control() { ' ' } else { c }));
    line.push('\n');
    let _ = std::io::stderr().write_all(line.as_bytes());
}
