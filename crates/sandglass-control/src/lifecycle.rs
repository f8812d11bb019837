//! The state machine of a sandbox: which event leads where. Pure; the owner task acts on it.
//!
//! ```text
//!                 Ready               Pause
//!   Creating ─────────────► Running ─────────► Pausing
//!                            │  ▲ ◄──────────────┘ │
//!                            │  │     Failed       │ Imaged
//!                            │  │ Ready            ▼
//!                            │  └─────────────── Resuming ◄──── Paused
//!                            │                     └─────────────► │
//!                            │                        Failed       │
//!                            ▼   Resume                            │
//!   from all of these ──► Ending ◄─────────────────────────────────┘
//!   Kill, TimeUp,            │ Removed
//!   Exited, Missing          ▼
//!                          Ended
//! ```
//!
//! One task owns a sandbox and alone moves it. Every move is stored, with its event, before anything acts on it:
//! whoever reads `Ending` may destroy what is left, and whoever reads `Ended` knows that nothing is. What comes too
//! late changes nothing; the only events that have no meaning at all are those that would skip a state.
//!
//! A sandbox that is paused has no processes, so nothing but its owner's wish can end it, and what goes wrong while it
//! is being paused or resumed leaves it where it was: neither its memory nor its files are ever given up for a failure.

use sandglass_engine::Exit;
use sandglass_types::{EndReason, SandboxState};

/// What happened to a sandbox, or what is wanted of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The guest acknowledged its generation: commands can run.
    Ready,
    /// It could not be made, paused or resumed, or its agent stopped answering.
    Failed,
    /// It shall be paused.
    Pause,
    /// Its image is complete on the disk.
    Imaged,
    /// It shall run again.
    Resume,
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
    use SandboxState::{Creating, Ended, Ending, Paused, Pausing, Resuming, Running};
    match (state, event) {
        (Creating | Resuming, Event::Ready) | (Pausing, Event::Failed) => Next::Move(Running, None),
        (Running, Event::Pause) => Next::Move(Pausing, None),
        // What a sandbox was before somebody wanted it again is never given up for a failure or for a time limit.
        (Pausing, Event::Imaged)
        | (Resuming, Event::Failed | Event::Missing | Event::Exited(_) | Event::TimeUp) => {
            Next::Move(Paused, None)
        }
        (Paused, Event::Resume) => Next::Move(Resuming, None),
        (Creating, Event::Failed | Event::Missing) => Next::Move(Ending, Some(EndReason::CreateFailed)),
        (Running, Event::Failed) => Next::Move(Ending, Some(EndReason::Crashed)),
        (Running | Pausing, Event::Missing) => Next::Move(Ending, Some(EndReason::Lost)),
        (Creating | Running | Pausing | Paused | Resuming, Event::Kill) => {
            Next::Move(Ending, Some(EndReason::Killed))
        }
        (Creating | Running | Pausing, Event::TimeUp) => Next::Move(Ending, Some(EndReason::Timeout)),
        (Creating | Running | Pausing, Event::Exited(exit)) => Next::Move(Ending, Some(exit_reason(exit))),
        (Ending, Event::Removed) => Next::Move(Ended, None),
        (Creating | Running | Pausing | Paused | Resuming, Event::Removed)
        | (Creating | Running | Resuming | Paused, Event::Imaged)
        | (Creating | Running, Event::Resume)
        | (Creating | Resuming, Event::Pause)
        | (Paused | Pausing, Event::Ready) => Next::Impossible,
        (Running, Event::Ready)
        | (Pausing, Event::Pause | Event::Resume)
        | (Paused, Event::Pause | Event::TimeUp | Event::Failed | Event::Missing | Event::Exited(_))
        | (Resuming, Event::Resume)
        | (Ending | Ended, _) => Next::Stay,
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
        use SandboxState::{Creating, Ended, Ending, Paused, Pausing, Resuming, Running};
        let end = |reason| Move(Ending, Some(reason));
        let to = |state| Move(state, None);
        let no = Impossible;
        #[rustfmt::skip]
        let table = [
            // event                           Creating           Running           Pausing           Paused        Resuming      Ending     Ended
            (Event::Ready,                     [to(Running),       Stay,             no,               no,           to(Running),  Stay,      Stay]),
            (Event::Failed,                    [end(CreateFailed), end(Crashed),     to(Running),      Stay,         to(Paused),   Stay,      Stay]),
            (Event::Pause,                     [no,                to(Pausing),      Stay,             Stay,         no,           Stay,      Stay]),
            (Event::Imaged,                    [no,                no,               to(Paused),       no,           no,           Stay,      Stay]),
            (Event::Resume,                    [no,                no,               Stay,             to(Resuming), Stay,         Stay,      Stay]),
            (Event::Kill,                      [end(Killed),       end(Killed),      end(Killed),      end(Killed),  end(Killed),  Stay,      Stay]),
            (Event::TimeUp,                    [end(Timeout),      end(Timeout),     end(Timeout),     Stay,         to(Paused),   Stay,      Stay]),
            (Event::Exited(Exit::Ended),       [end(Crashed),      end(Crashed),     end(Crashed),     Stay,         to(Paused),   Stay,      Stay]),
            (Event::Exited(Exit::OutOfMemory), [end(OutOfMemory),  end(OutOfMemory), end(OutOfMemory), Stay,         to(Paused),   Stay,      Stay]),
            (Event::Exited(Exit::Processes),   [end(Processes),    end(Processes),   end(Processes),   Stay,         to(Paused),   Stay,      Stay]),
            (Event::Missing,                   [end(CreateFailed), end(Lost),        end(Lost),        Stay,         to(Paused),   Stay,      Stay]),
            (Event::Removed,                   [no,                no,               no,               no,           no,           to(Ended), Stay]),
        ];
        for (event, row) in table {
            let states = [Creating, Running, Pausing, Paused, Resuming, Ending, Ended];
            for (state, expected) in states.into_iter().zip(row) {
                assert_eq!(next(state, event), expected, "{state:?} on {event:?}");
            }
        }
    }
}
