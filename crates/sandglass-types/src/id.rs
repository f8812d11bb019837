//! Typed identifiers. Add new ones here; never pass a bare `String` or `Uuid` between crates.

use std::fmt;
use std::str::FromStr;

use rand::RngExt as _;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Length of a [`SandboxId`] in characters: 20 base-36 characters carry 103 random bits.
pub const SANDBOX_ID_LEN: usize = 20;

/// Length of an [`InstanceId`] in characters: short, because it is part of kernel object names.
pub const INSTANCE_ID_LEN: usize = 8;

const BASE36: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// A text that is not a valid id of the wanted kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a valid {kind} id: expected {expected}")]
pub struct InvalidId {
    kind: &'static str,
    expected: &'static str,
}

fn random_base36(len: usize) -> String {
    let mut rng = rand::rng();
    (0..len).map(|_| char::from(BASE36[rng.random_range(0..BASE36.len())])).collect()
}

fn is_base36(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
}

macro_rules! base36_id {
    ($(#[$doc:meta])* $name:ident, $len:expr, $kind:literal, $expected:literal) => {
        base36_id!($(#[$doc])* $name, "", $len, $kind, $expected);
    };
    ($(#[$doc:meta])* $name:ident, $prefix:literal, $len:expr, $kind:literal, $expected:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Box<str>);

        impl $name {
            /// A fresh random id.
            #[must_use]
            pub fn random() -> Self {
                Self(($prefix.to_owned() + &random_base36($len)).into())
            }

            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                if text.strip_prefix($prefix).is_some_and(|rest| is_base36(rest, $len)) {
                    Ok(Self(text.into()))
                } else {
                    Err(InvalidId { kind: $kind, expected: $expected })
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;

            fn try_from(text: String) -> Result<Self, InvalidId> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0.into()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}

base36_id!(
    /// Names one sandbox for ever: `[a-z0-9]{20}`, no dash, because host names are split on it.
    SandboxId,
    SANDBOX_ID_LEN,
    "sandbox",
    "20 characters of a-z and 0-9"
);

base36_id!(
    /// Names one snapshot for ever.
    SnapshotId,
    SANDBOX_ID_LEN,
    "snapshot",
    "20 characters of a-z and 0-9"
);

impl SnapshotId {
    /// The name of its image. Images of paused sandboxes have names of the same kind: the sandboxes' own.
    #[must_use]
    pub fn image(&self) -> SandboxId {
        SandboxId(self.0.clone())
    }
}

base36_id!(
    /// Names one volume for ever.
    VolumeId,
    SANDBOX_ID_LEN,
    "volume",
    "20 characters of a-z and 0-9"
);

base36_id!(
    /// Names one budget of money for ever.
    BudgetId,
    SANDBOX_ID_LEN,
    "budget",
    "20 characters of a-z and 0-9"
);

base36_id!(
    /// Names one run for ever.
    RunId,
    "run_",
    SANDBOX_ID_LEN,
    "run",
    "run_ and 20 characters of a-z and 0-9"
);

base36_id!(
    /// Names one data folder, made once with it. Every kernel object that a server makes carries it, and a
    /// server lists and destroys only what carries its own.
    InstanceId,
    INSTANCE_ID_LEN,
    "instance",
    "8 characters of a-z and 0-9"
);

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// A fresh id; sorts by the time at which it was made.
            #[must_use]
            pub fn random() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl FromStr for $name {
            type Err = InvalidId;

            fn from_str(text: &str) -> Result<Self, InvalidId> {
                Uuid::parse_str(text).map(Self).map_err(|_| InvalidId { kind: $kind, expected: "a UUID" })
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.hyphenated().fmt(f)
            }
        }
    };
}

uuid_id!(
    /// A team: the owner of keys, sandboxes and quotas.
    TeamId,
    "team"
);
uuid_id!(
    /// An API key, not its secret.
    KeyId,
    "key"
);
uuid_id!(
    /// A secret of a team.
    SecretId,
    "secret"
);
uuid_id!(
    /// A call of a model.
    CallId,
    "call"
);
uuid_id!(
    /// A machine that runs sandboxes.
    NodeId,
    "node"
);

/// Counts how often a sandbox was brought back from a checkpoint; 1 for one that never was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u32);

impl Generation {
    /// The generation of a sandbox that was started cold.
    pub const FIRST: Self = Self(1);
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn random_sandbox_ids_are_valid_and_differ() {
        let (a, b) = (SandboxId::random(), SandboxId::random());
        assert_ne!(a, b);
        assert_eq!(a.as_str().parse::<SandboxId>(), Ok(a.clone()));
    }

    #[test]
    fn a_run_is_told_by_its_prefix() {
        let id = RunId::random();
        assert!(id.as_str().starts_with("run_") && id.as_str().parse() == Ok(id.clone()));
        for text in [&id.as_str()[4..], "run_", "run_abc", "ru_01234567890123456789"] {
            assert!(text.parse::<RunId>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn foreign_text_is_refused() {
        for text in ["", "..", "ABCDEFGHIJ0123456789", "abcdefghij-123456789", "abcdefghij01234567890"] {
            assert!(text.parse::<SandboxId>().is_err(), "{text:?}");
        }
        assert!(serde_json::from_str::<SandboxId>("\"../../etc/passwd00000\"").is_err());
    }

    proptest! {
        #[test]
        fn parse_accepts_exactly_the_grammar(text in "\\PC{0,24}") {
            let valid = text.len() == 20 && text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9'));
            prop_assert_eq!(text.parse::<SandboxId>().is_ok(), valid);
        }
    }
}
