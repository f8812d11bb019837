//! What people who run hostile code ask of a sandbox, in eight points. Each stands on the probes that name it.

/// A point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Point {
    Boundary,
    Egress,
    Metadata,
    Peers,
    Keys,
    Limits,
    Disposal,
    Tested,
}

impl Point {
    /// All of them, in order.
    pub(super) const ALL: [Self; 8] = [
        Self::Boundary,
        Self::Egress,
        Self::Metadata,
        Self::Peers,
        Self::Keys,
        Self::Limits,
        Self::Disposal,
        Self::Tested,
    ];

    /// For people.
    pub(super) const fn text(self) -> &'static str {
        match self {
            Self::Boundary => "a boundary of hardware or gVisor",
            Self::Egress => "default-deny egress with an allowlist",
            Self::Metadata => "metadata endpoints are blocked",
            Self::Peers => "sandboxes can't reach each other",
            Self::Keys => "no provider key inside",
            Self::Limits => "CPU, memory, disk and wall clock are set, and fire",
            Self::Disposal => "destroyed after one unit of work",
            Self::Tested => "tested by breaking out",
        }
    }
}
