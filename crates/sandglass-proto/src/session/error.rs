//! How flows and sessions end.

use std::io;

/// Why one side gave a flow up; on the wire a little-endian u32. Numbers without a name here mean
/// [`ResetCode::Other`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetCode {
    /// Its owner dropped it before both directions were finished.
    Cancelled,
    /// Nothing accepts connections at the target.
    Refused,
    /// More flows than [`super::MAX_FLOWS`].
    TooManyFlows,
    /// More data was sent than the window allowed.
    WindowExceeded,
    /// A frame that makes no sense for this flow.
    Protocol,
    /// The agent does not know this kind of target.
    Unsupported,
    /// The target could not be reached for another reason.
    Failed,
    /// A reason of a newer peer.
    Other(u32),
}

impl ResetCode {
    pub(super) const fn to_wire(self) -> u32 {
        match self {
            Self::Cancelled => 1,
            Self::Refused => 2,
            Self::TooManyFlows => 3,
            Self::WindowExceeded => 4,
            Self::Protocol => 5,
            Self::Unsupported => 6,
            Self::Failed => 7,
            Self::Other(code) => code,
        }
    }

    pub(super) const fn from_wire(code: u32) -> Self {
        match code {
            1 => Self::Cancelled,
            2 => Self::Refused,
            3 => Self::TooManyFlows,
            4 => Self::WindowExceeded,
            5 => Self::Protocol,
            6 => Self::Unsupported,
            7 => Self::Failed,
            other => Self::Other(other),
        }
    }
}

impl From<&io::Error> for ResetCode {
    /// What to answer when connecting to a target failed so.
    fn from(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => Self::Refused,
            _ => Self::Failed,
        }
    }
}

/// What a read or write on a flow fails with; wrapped in an [`io::Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// The peer gave the flow up.
    #[error("flow was reset by the peer ({0:?})")]
    Reset(ResetCode),
    /// The peer broke the rules of the protocol, so this side gave the flow up.
    #[error("flow was given up because the peer broke the protocol ({0:?})")]
    Violation(ResetCode),
    /// Another attachment of a server took the session over.
    #[error("flow belongs to an older attachment")]
    Detached,
    /// The session ended.
    #[error("session is closed")]
    Closed,
    /// Data was written after the end of the flow's data.
    #[error("flow was already shut down for writing")]
    WriteAfterShutdown,
}

impl From<FlowError> for io::Error {
    fn from(error: FlowError) -> Self {
        let kind = match error {
            FlowError::Reset(ResetCode::Refused) => io::ErrorKind::ConnectionRefused,
            FlowError::Reset(_) | FlowError::Detached => io::ErrorKind::ConnectionReset,
            FlowError::Violation(_) => io::ErrorKind::InvalidData,
            FlowError::Closed => io::ErrorKind::ConnectionAborted,
            FlowError::WriteAfterShutdown => io::ErrorKind::BrokenPipe,
        };
        io::Error::new(kind, error)
    }
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// The peer's end of the byte stream is gone.
    #[error("session reached the end of its byte stream")]
    Eof,
    /// Reading or writing the byte stream failed.
    #[error("session failed on its byte stream ({0})")]
    Io(io::ErrorKind),
    /// This side ended it, or dropped its handles or its driver.
    #[error("session was closed on this side")]
    Local,
}

/// Why no flow could be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The session ended.
    #[error("session is closed")]
    Closed(#[source] Closed),
    /// This side has [`super::MAX_FLOWS`] already.
    #[error("too many flows are open")]
    TooManyFlows,
    /// The agent gave this answer.
    #[error("agent did not connect the flow ({0:?})")]
    Refused(ResetCode),
}

/// Why a control message was not sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The session ended.
    #[error("session is closed")]
    Closed(#[source] Closed),
    /// No server is attached, or another one attached and its
    /// [`AgentEvent::Attached`](super::AgentEvent::Attached) was not taken yet: the message answers a server that
    /// is gone.
    #[error("message is for an older attachment")]
    Detached,
    /// Longer than [`MAX_CONTROL_LEN`](crate::control::MAX_CONTROL_LEN).
    #[error("control message of {0} bytes is too long")]
    TooLong(usize),
    /// It has no JSON form.
    #[error("control message could not be encoded")]
    Encode(#[source] serde_json::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reset_codes_keep_their_numbers() {
        for code in 0..20 {
            assert_eq!(ResetCode::from_wire(code).to_wire(), code);
        }
        assert_eq!(ResetCode::from_wire(2), ResetCode::Refused);
        assert_eq!(ResetCode::from_wire(99), ResetCode::Other(99));
    }

    #[test]
    fn a_refused_connection_looks_like_one() {
        let error = io::Error::from(FlowError::Reset(ResetCode::Refused));
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(ResetCode::from(&error), ResetCode::Refused);
    }
}
