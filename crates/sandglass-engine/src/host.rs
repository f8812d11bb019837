//! The privileged half of Sandglass and the line that leads to it.
//!
//! `sandglass host` runs as root and does nothing but the verbs of [`protocol`]: it reads no byte that a guest, a
//! client or the internet sent, but where it compresses a cold image, or expands it. `sandglass serve` parses all of those and has no privilege; it asks over one
//! `SOCK_SEQPACKET` socket pair that it was born with, and gets descriptors back: the two ends of a sandbox's
//! session, and sockets made in its airlock. A verb names a sandbox by a validated id, never by a path.
//!
//! The host ends when the socket is closed. Sandboxes outlive it, and the next host finds them again.

pub mod client;
pub mod protocol;
pub mod server;

pub use client::{Host, HostError};
pub use protocol::RefusalKind;
