//! The one domain error: few kinds, each of which a caller would act on, and two messages.

use std::error::Error as StdError;
use std::fmt;

/// What kind of failure it is; every face maps it to its own transport once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The request can't be right, whatever the state is.
    Invalid,
    /// No valid credential came with the request.
    Unauthenticated,
    /// The credential is valid but must not do this.
    Forbidden,
    /// No such thing, or it belongs to another team.
    NotFound,
    /// Not legal in the present state; the same call may be legal later.
    Conflict,
    /// The idempotency key came before with another request.
    IdempotencyMismatch,
    /// The first request with this idempotency key is still running.
    IdempotencyInProgress,
    /// A quota of the caller's is used up.
    Quota,
    /// The machine has no room for it now.
    Capacity,
    /// The engine can't do this; another one may.
    Unsupported,
    /// It took longer than its limit.
    Timeout,
    /// Our fault, or the machine's.
    Internal,
}

/// A failure with a message for the client and a cause for the operator's log.
///
/// [`fmt::Display`] prints the client's message alone, so internals can't leak by accident; the cause is
/// reached through [`StdError::source`].
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// A failure with the message that the client sees: lower case, says what to do.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// [`ErrorKind::Internal`] with a cause that only the log shows.
    pub fn internal(message: impl Into<String>, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::new(ErrorKind::Internal, message).because(source)
    }

    /// Adds the cause, for the operator.
    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The kind of failure.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}

/// Prints an error and all its causes in one line: the only place where a chain is written.
#[derive(Debug)]
pub struct Chain<'a>(pub &'a (dyn StdError + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut next = self.0.source();
        while let Some(cause) = next {
            write!(f, ": {cause}")?;
            next = cause.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_never_sees_the_cause() {
        let cause = std::io::Error::other("/secret/path is broken");
        let error = Error::internal("the sandbox could not be created", cause);
        assert_eq!(error.to_string(), "the sandbox could not be created");
        assert_eq!(Chain(&error).to_string(), "the sandbox could not be created: /secret/path is broken");
    }
}
