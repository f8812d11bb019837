//! An agent that is a script: it speaks the control lane of a session, and knows who it was told to be. So its sandbox can
//! be written to an image without root.

use std::collections::HashMap;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Mutex;
use std::task::{Context, Poll, Waker};

use sandglass_engine::fake::{Memory, Next, Script, Turn};
use sandglass_proto::control::{FromAgent, REVISION, ToAgent};
use sandglass_proto::session::{AgentEvent, AgentSession, Link};

/// What it does when it is told who it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// It becomes that.
    Obedient,
    /// It becomes that at first. Once it has been written to an image, it says that it is what comes next already.
    Liar,
    /// It does so once, and refuses from then on.
    Stubborn,
}

/// The file in a home that is there while the agent's clock stands still.
pub(crate) const STOPPED: &str = "stopped";

/// The agents of a world.
#[derive(Debug)]
pub(crate) struct Agents {
    manner: Manner,
    /// By the folder of the sandbox: a copy has another one, and so a session of its own, which begins with the next
    /// attachment. Nothing of the one before matters then, as with a real agent.
    sessions: Mutex<HashMap<PathBuf, (AgentSession, Link)>>,
}

impl Agents {
    pub(crate) fn new(manner: Manner) -> Self {
        Self { manner, sessions: Mutex::default() }
    }

    fn answer(&self, message: ToAgent, turn: &mut Turn<'_>) -> FromAgent {
        match message {
            ToAgent::Configure(configure) => {
                let generation = configure.generation;
                if self.manner == Manner::Stubborn && number(turn.memory, "generation") != 0 {
                    return FromAgent::ConfigureFailed { reason: "it likes itself as it is".into() };
                }
                keep(turn.memory, "generation", generation);
                let said = format!("{} {generation} {:?}\n", configure.sandbox_id, configure.access_token);
                std::fs::write(turn.home.join("identity"), said).unwrap();
                FromAgent::Configured { generation }
            }
            ToAgent::Freeze | ToAgent::FreezeDisk => FromAgent::Frozen,
            ToAgent::Thaw => FromAgent::Thawed,
            ToAgent::Idle => FromAgent::Idle { millis: 0 },
        }
    }

    fn generation(&self, memory: &Memory) -> u32 {
        let generation = number(memory, "generation");
        if self.manner == Manner::Liar && generation > 0 { generation + 1 } else { generation }
    }
}

fn number(memory: &Memory, name: &str) -> u32 {
    memory.get(name).map_or(0, |value| u32::from_be_bytes(value[..].try_into().unwrap()))
}

fn keep(memory: &mut Memory, name: &str, value: u32) {
    memory.insert(name.into(), value.to_be_bytes().into());
}

/// What a future gives now, or after what waits is sent.
fn now<T>(future: impl Future<Output = T>, link: &mut Link, output: &mut Vec<u8>) -> Option<T> {
    let (mut future, mut context) = (pin!(future), Context::from_waker(Waker::noop()));
    for _ in 0..2 {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return Some(value);
        }
        send(link, output);
    }
    None
}

fn send(link: &mut Link, output: &mut Vec<u8>) {
    while let Some(batch) = link.outbound.try_next() {
        batch.write_to(&mut *output).unwrap();
    }
}

impl Script for Agents {
    fn turn(&self, mut turn: Turn<'_>) -> Next {
        let mut sessions = self.sessions.lock().unwrap();
        let (session, link) = sessions.entry(turn.home.to_owned()).or_insert_with(AgentSession::new);
        link.inbound.on_bytes(turn.input);
        while let Some(event) = now(session.next_event(), link, turn.output) {
            let answer = match event.unwrap() {
                AgentEvent::Attached => {
                    let _was_moving = std::fs::remove_file(turn.home.join(STOPPED));
                    FromAgent::Hello {
                        revision: REVISION,
                        agent_version: "script".into(),
                        generation: self.generation(turn.memory),
                    }
                }
                AgentEvent::Control(message) => {
                    if matches!(message, ToAgent::Freeze | ToAgent::FreezeDisk) {
                        now(session.hold(), link, turn.output).expect("all is sent").unwrap();
                        std::fs::write(turn.home.join(STOPPED), []).unwrap();
                    }
                    if message == ToAgent::Thaw {
                        session.release();
                        let _was_moving = std::fs::remove_file(turn.home.join(STOPPED));
                    }
                    self.answer(message, &mut turn)
                }
            };
            let _detached = now(session.send_control(&answer), link, turn.output);
        }
        send(link, turn.output);
        Next::GoOn
    }
}
