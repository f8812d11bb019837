//! The decision, apart from everything that acts on it.

/// What becomes of a request to leave the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It goes nowhere, and the program inside is told at once.
    Deny,
}

/// Decides about a name that a program inside wants to resolve.
#[must_use]
pub const fn decide(_name: &hickory_proto::rr::Name) -> Verdict {
    Verdict::Deny
}
