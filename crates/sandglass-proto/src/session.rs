//! The session: one byte stream in each direction that carries everything between a server and the agent of one
//! sandbox.
//!
//! ```text
//!  Session (server)                                             AgentSession (guest)
//!    open ─► Flow ┐                                            ┌ accept ─► Flow
//!  control messages ┼─ state ─ Link ═══ two byte streams ═══ Link ─ state ┼ control messages
//! ```
//!
//! - [`frame`] cuts the streams, and says how the cut is found again after a server was gone.
//! - A *flow* is one connection. Only the server opens flows; the agent connects them to their [`Target`].
//! - A *window* per flow and direction is what may be on its way unread. Who reads grants more, up to [`WINDOW`].
//!   So a flow that nobody reads stops its own sender, and never the session.
//! - Each attachment of a server begins an *epoch*: flows and messages of older ones are gone.
//! - The state of a session knows nothing of I/O: a [`Link`] feeds it and asks what to send, from an asynchronous
//!   task ([`Link::run`]) or from two threads ([`Link::spawn_threads`]).
//!
//! # Rules for change
//! Kinds of frames, targets and reset codes are added, never changed; a receiver ignores kinds it does not know,
//! bits of the flags without a meaning, and payload beyond what it knows.

pub mod frame;

mod agent;
mod batch;
mod error;
mod flow;
mod link;
mod server;
mod state;
mod target;

pub use agent::{AgentEvent, AgentSession, Incoming};
pub use batch::Batch;
pub use error::{Closed, FlowError, OpenError, ResetCode, SendError};
pub use flow::Flow;
pub use frame::Epoch;
pub use link::{Inbound, Link, Outbound};
pub use server::Session;
pub use state::Stats;
pub use target::{Loopback, Target};

/// Upper bound for the flows of one session.
pub const MAX_FLOWS: usize = 1024;
/// What may be sent on a new flow in each direction before the receiver grants more, in bytes.
pub const INITIAL_WINDOW: u32 = 64 * 1024;
/// Upper bound for the bytes of one direction of one flow that were sent and not yet read.
pub const WINDOW: u32 = 512 * 1024;
/// So many flows at a time get the full [`WINDOW`], once their data was seen to be read; others keep
/// [`INITIAL_WINDOW`]. It bounds what unread data costs: 92 MiB per session and side.
pub const WIDE_FLOWS: usize = 64;

#[cfg(test)]
mod tests;
