//! The state machine of a sandbox: which event leads where. Pure; the owner task acts on it.
//!
//! ```text
//!                 Ready
//!   Creating ─────────────► Running
//!      │                       │
//!      │ Kill, TimeUp,         │ Kill, TimeUp,
//!      │ Exited, Failed,       │ Exited, Failed,
//!      │ Missing               │ Missing
//!      └────────► Ending ◄─────┘
//!                   │ Removed
//!                   ▼
//!                 Ended
//! ```
//!
//! One task owns a sandbox and alone moves it. Every move is stored, with its event, before anything acts on it:
//! whoever reads `Ending` may destroy what is left, and whoever reads `Ended` knows that nothing is. What comes too
//! late changes nothing; the only events that have no meaning at all are those that would skip a state.

use sandglass_engine::Exit;
use sandglass_types::{EndReason, SandboxState};

/// What happened to a sandbox, or what is wanted of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The guest acknowledged its generation: commands can run.
    Ready,
    /// It could not be made, or its agent stopped answering.
    Failed,
    /// A client wants it gone.
    Kill,
    /// Its wall-clock time is up.
    TimeUp,
    /// Its processes are gone.
    Exited(Exit),
    /// A reconciler did not find on the machine what the store says should be there.
    Missing,
    /// Nothing of it is left on the machine.
    Removed,
}

/// What an event does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The sandbox moves to this state; the reason is there when its end begins.
    Move(SandboxState, Option<EndReason>),
    /// Nothing: it came too late, or says what is known.
    Stay,
    /// It can't happen, so whoever sent it is wrong.
    Impossible,
}

/// The rule.
#[must_use]
pub const fn next(state: SandboxState, event: Event) -> Next {
    use SandboxState::{Creating, Ended, Ending, Running};
    match (state, event) {
        (Creating, Event::Ready) => Next::Move(Running, None),
        (Creating, Event::Failed | Event::Missing) => Next::Move(Ending, Some(EndReason::CreateFailed)),
        (Running, Event::Failed) => Next::Move(Ending, Some(EndReason::Crashed)),
        (Running, Event::Missing) => Next::Move(Ending, Some(EndReason::Lost)),
        (Creating | Running, Event::Kill) => Next::Move(Ending, Some(EndReason::Killed)),
        (Creating | Running, Event::TimeUp) => Next::Move(Ending, Some(EndReason::Timeout)),
        (Creating | Running, Event::Exited(exit)) => Next::Move(Ending, Some(exit_reason(exit))),
        (Ending, Event::Removed) => Next::Move(Ended, None),
        (Creating | Running, Event::Removed) => Next::Impossible,
        (Running, Event::Ready) | (Ending | Ended, _) => Next::Stay,
    }
}

const fn exit_reason(exit: Exit) -> EndReason {
    match exit {
        Exit::Ended => EndReason::Crashed,
        Exit::OutOfMemory => EndReason::OutOfMemory,
        Exit::Processes => EndReason::Processes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every pair, written out: a change of the rule is a change of this table.
    #[test]
    fn the_table() {
        use EndReason::{Crashed, CreateFailed, Killed, Lost, OutOfMemory, Processes, Timeout};
        use Next::{Impossible, Move, Stay};
        use SandboxState::{Creating, Ended, Ending, Running};
        let end = |reason| Move(Ending, Some(reason));
        #[rustfmt::skip]
        let table = [
            // event                           Creating             Running           Ending             Ended
            (Event::Ready,                     [Move(Running, None), Stay,            Stay,              Stay]),
            (Event::Failed,                    [end(CreateFailed),  end(Crashed),     Stay,              Stay]),
            (Event::Kill,                      [end(Killed),        end(Killed),      Stay,              Stay]),
            (Event::TimeUp,                    [end(Timeout),       end(Timeout),     Stay,              Stay]),
            (Event::Exited(Exit::Ended),       [end(Crashed),       end(Crashed),     Stay,              Stay]),
            (Event::Exited(Exit::OutOfMemory), [end(OutOfMemory),   end(OutOfMemory), Stay,              Stay]),
            (Event::Exited(Exit::Processes),   [end(Processes),     end(Processes),   Stay,              Stay]),
            (Event::Missing,                   [end(CreateFailed),  end(Lost),        Stay,              Stay]),
            (Event::Removed,                   [Impossible,         Impossible,       Move(Ended, None), Stay]),
        ];
        for (event, row) in table {
            for (state, expected) in [Creating, Running, Ending, Ended].into_iter().zip(row) {
                assert_eq!(next(state, event), expected, "{state:?} on {event:?}");
            }
        }
    }
}
