//! The control lane of a session: JSON messages between the server and the agent itself.
//!
//! They set a sandbox up and quiesce it; everything that a client asks for travels in flows instead. One
//! message is at most [`MAX_CONTROL_LEN`] bytes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The newest protocol revision that this code speaks. An agent announces its own in [`FromAgent::Hello`].
///
/// Revision 2 knows [`FromAgent::Unsavable`], revision 3 [`ToAgent::FreezeDisk`], revision 4 [`ToAgent::Idle`], and revision 5
/// [`FromAgent::FrozenWith`], [`FromAgent::Displaced`] and [`FromAgent::Uncounted`].
pub const REVISION: u32 = 5;

/// Upper bound for one encoded control message, in bytes. The largest is [`Configure`]: clients may set 64 KiB
/// of environment.
pub const MAX_CONTROL_LEN: usize = 128 * 1024;

/// Most files of [`FromAgent::FrozenWith`]. Whoever has more says [`FromAgent::Uncounted`].
pub const MAX_IN_USE: usize = 256;

/// Most bytes of all files of [`FromAgent::FrozenWith`] as they are encoded: a path may have 4096 bytes, and a message is at
/// most [`MAX_CONTROL_LEN`].
pub const MAX_IN_USE_LEN: usize = MAX_CONTROL_LEN - 1024;

/// From the server to the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToAgent {
    /// Sets identity, secrets and defaults of this generation. No client request is served before it.
    Configure(Box<Configure>),
    /// Asks the agent to write nothing more to the session once it has answered [`FromAgent::Frozen`]. It may answer
    /// [`FromAgent::Unsavable`], [`FromAgent::Displaced`] or [`FromAgent::Uncounted`] instead, and goes on then.
    Freeze,
    /// Asks the agent to write all that programs wrote to the disk, and then the same. No image is made of their memory, so
    /// nothing that they have is in the way. Since revision 3.
    FreezeDisk,
    /// Asks how long no command has run. Since revision 4.
    Idle,
    /// Ends a freeze. After a restore a [`ToAgent::Configure`] with the next generation comes first.
    Thaw,
}

/// Everything that makes a started computer *this* sandbox.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configure {
    /// Counts restores; 1 for a cold start. The agent refuses one that is older than what it has.
    pub generation: u32,
    /// The id of the sandbox; also its host name.
    pub sandbox_id: String,
    /// The id of the template it was made from.
    pub template_id: String,
    /// What clients must send as `X-Access-Token`; `None` leaves the guest API open.
    pub access_token: Option<String>,
    /// The user of commands and files when a request names none.
    pub default_user: String,
    /// Where commands start when a request names no directory; `None` means the user's home.
    pub default_workdir: Option<String>,
    /// Environment of every later process, under what its request sets.
    pub env: BTreeMap<String, String>,
    /// Processes and threads that one unprivileged user may have at one time.
    pub max_processes: u32,
}

impl std::fmt::Debug for Configure {
    /// Leaves out the token and the environment: both may hold secrets, and this is what logs print.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Configure")
            .field("generation", &self.generation)
            .field("sandbox_id", &self.sandbox_id)
            .field("template_id", &self.template_id)
            .finish_non_exhaustive()
    }
}

/// A program that has a file. Its names are what the guest says they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Process id inside.
    pub pid: u32,
    /// Name of the program.
    pub program: String,
    /// Path of the file, or the one that it had.
    pub file: String,
}

/// Why an agent can't say what is in use on volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Uncounted {
    /// It is more than a message holds.
    TooMany,
    /// It took too long to find out.
    TooLong,
}

/// From the agent to the server. Whatever arrives here was written by the enemy's neighbour: it is bounded and
/// validated before use, and never trusted for a decision about anything but this sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    /// The first message of a session.
    Hello {
        /// [`REVISION`] of the agent.
        revision: u32,
        /// Version of the guest binary, for people.
        agent_version: String,
        /// The generation that it is configured for; 0 if it never was.
        generation: u32,
    },
    /// The generation is in force; client requests are served from here on.
    Configured {
        /// As in [`Configure::generation`].
        generation: u32,
    },
    /// [`ToAgent::Configure`] could not be obeyed; the sandbox must not be handed out.
    ConfigureFailed {
        /// For the operator.
        reason: String,
    },
    /// All that the agent had to say is in the stream; it stays silent until [`ToAgent::Thaw`].
    Frozen,
    /// The same as [`FromAgent::Frozen`], and these files and folders are in use that are on volumes: what comes back from an image
    /// relies on them. Since revision 5.
    FrozenWith {
        /// They, each with one of the programs that have it; there is at least one, and there are at most [`MAX_IN_USE`].
        in_use: Vec<Holder>,
    },
    /// No image can be made of the sandbox as it is: what programs have on volumes is not what is at its path. Since
    /// revision 5.
    Displaced {
        /// Some of them; there is at least one.
        holders: Vec<Holder>,
    },
    /// No image can be made of the sandbox as it is: nobody would know what it relies on. Since revision 5.
    Uncounted {
        /// What is in the way.
        why: Uncounted,
    },
    /// No image can be made of the sandbox as it is: programs have files that were deleted.
    Unsavable {
        /// Some of them; there is at least one.
        holders: Vec<Holder>,
    },
    /// Answers [`ToAgent::Idle`].
    Idle {
        /// How long no command of a client has run, in milliseconds; zero while one does. The time in which the sandbox was
        /// away counts.
        millis: u64,
    },
    /// The agent speaks again.
    Thawed,
    /// Something that an operator should see.
    Notice {
        /// One line.
        message: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_form_is_stable() {
        let hello = FromAgent::Hello { revision: 1, agent_version: "0.1.0".into(), generation: 0 };
        assert_eq!(
            serde_json::to_string(&hello).unwrap(),
            r#"{"type":"hello","revision":1,"agent_version":"0.1.0","generation":0}"#
        );
        assert_eq!(serde_json::to_string(&ToAgent::FreezeDisk).unwrap(), r#"{"type":"freeze_disk"}"#);
        assert_eq!(serde_json::to_string(&ToAgent::Freeze).unwrap(), r#"{"type":"freeze"}"#);
    }

    #[test]
    fn debug_output_holds_no_secret() {
        let configure = Configure {
            generation: 1,
            sandbox_id: "s".into(),
            template_id: "base".into(),
            access_token: Some("hunter2".into()),
            default_user: "user".into(),
            default_workdir: None,
            env: BTreeMap::from([("KEY".into(), "hunter2".into())]),
            max_processes: 10,
        };
        assert!(!format!("{configure:?}").contains("hunter2"));
    }
}
