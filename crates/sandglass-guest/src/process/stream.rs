//! The events of a process as one subscriber sees them: `start`, output and keepalives, `end`.

use std::sync::Arc;
use std::time::Duration;

use connectrpc::ConnectError;
use futures_util::{Stream, stream};
use sandglass_proto::services::process::ProcessEvent;
use sandglass_proto::services::process::process_event::data_event::Output as Data;
use sandglass_proto::services::process::process_event::{DataEvent, Event, StartEvent};

use super::exit::end_event;
use super::live::Process;
use super::output::{Cause, Channel, Chunk, Subscription};

struct State {
    process: Arc<Process>,
    subscription: Subscription,
    keepalive: Duration,
    /// Whether a time limit is reported as an error: to the one who set it.
    starter: bool,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Start,
    Output,
    Done,
}

/// All events, the first and the last included.
pub(super) fn events(
    process: Arc<Process>,
    subscription: Subscription,
    keepalive: Duration,
    starter: bool,
) -> impl Stream<Item = Result<ProcessEvent, ConnectError>> + Send {
    stream::unfold(State { process, subscription, keepalive, starter, stage: Stage::Start }, next)
}

async fn next(mut state: State) -> Option<(Result<ProcessEvent, ConnectError>, State)> {
    let event = match state.stage {
        Stage::Done => return None,
        Stage::Start => {
            state.stage = Stage::Output;
            Ok(event(Event::Start(Box::new(StartEvent { pid: state.process.pid(), ..Default::default() }))))
        }
        Stage::Output => match state.subscription.backlog.pop_front() {
            Some(chunk) => Ok(data(chunk)),
            None => tokio::select! {
                biased;
                chunk = state.subscription.live.recv() => match chunk {
                    Some(chunk) => Ok(data(chunk)),
                    None => {
                        state.stage = Stage::Done;
                        end(&state)
                    }
                },
                () = tokio::time::sleep(state.keepalive) => Ok(event(Event::Keepalive(Box::default()))),
            },
        },
    };
    Some((event, state))
}

fn event(event: Event) -> ProcessEvent {
    ProcessEvent { event: Some(event), ..Default::default() }
}

fn data(chunk: Chunk) -> ProcessEvent {
    let bytes = Vec::from(chunk.bytes);
    let output = match chunk.channel {
        Channel::Stdout => Data::Stdout(bytes),
        Channel::Stderr => Data::Stderr(bytes),
        Channel::Pty => Data::Pty(bytes),
    };
    event(Event::Data(Box::new(DataEvent { output: Some(output), ..Default::default() })))
}

fn end(state: &State) -> Result<ProcessEvent, ConnectError> {
    match state.process.output().end() {
        Some(end) if end.cause == Cause::TimeLimit && state.starter => {
            Err(ConnectError::deadline_exceeded("the time limit of the process was reached"))
        }
        Some(end) => Ok(event(Event::End(Box::new(end_event(end.status, end.cause))))),
        // The queue closes before the end only when the session was replaced: nobody reads this.
        None => Err(ConnectError::unavailable("the session was replaced")),
    }
}
