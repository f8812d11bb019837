//! The agent's side of the session with the server: control messages, and flows that carry the guest API or reach
//! ports on the guest's loopback.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use sandglass_proto::control::{Configure, FromAgent, REVISION, ToAgent, Uncounted};
use sandglass_proto::session::{AgentEvent, AgentSession, Incoming, ResetCode, SendError, Target};
use tokio::net::TcpStream;

use crate::agent::Agent;
use crate::identity::{self, ConfigureError, Was};
use crate::process::Origin;
use crate::settings::Settings;
use crate::{deleted, hooks, http, in_use, log};

/// How long a connection to the guest's loopback may take: nothing is far away there.
const DIAL_TIME: Duration = Duration::from_secs(5);

/// How long control messages wait for the look for what no image can hold. It bounds itself, unless a file system that a
/// program of the sandbox serves does not answer.
const LOOK_TIME: Duration = Duration::from_secs(3);

/// Serves the session until it ends, which it does only with the engine.
pub(crate) async fn run(agent: Arc<Agent>, session: AgentSession, router: Router) {
    let flows = agent.tasks.spawn(accept(Arc::clone(&agent), session.clone(), router));
    let reason = control(&agent, &session).await;
    flows.abort();
    log::line(&format!("the session has ended: {reason:?}"));
}

/// Answers control messages, one after the other.
async fn control(agent: &Arc<Agent>, session: &AgentSession) -> sandglass_proto::session::Closed {
    loop {
        let event = match session.next_event().await {
            Ok(event) => event,
            Err(closed) => return closed,
        };
        let answer = match event {
            AgentEvent::Attached => {
                agent.processes.begin_epoch();
                // As the hold of the session, which ends with an attachment.
                agent.clock.go_on();
                FromAgent::Hello {
                    revision: REVISION,
                    agent_version: env!("CARGO_PKG_VERSION").into(),
                    generation: agent.settings.get().map_or(0, |settings| settings.generation()),
                }
            }
            AgentEvent::Control(ToAgent::Configure(configure)) => self::configure(agent, *configure).await,
            AgentEvent::Control(ToAgent::FreezeDisk) => {
                agent.blocking.run(rustix::fs::sync).await;
                if session.hold().await.is_err() {
                    continue;
                }
                agent.clock.stop();
                FromAgent::Frozen
            }
            AgentEvent::Control(ToAgent::Freeze) => {
                let holders = match agent.sole_user {
                    // What was not found in time, the engine refuses.
                    None => tokio::time::timeout(LOOK_TIME, agent.blocking.run(deleted::holders))
                        .await
                        .unwrap_or_default(),
                    // The machine's other programs are none of this sandbox.
                    Some(_) => Vec::new(),
                };
                let looked = if !holders.is_empty() {
                    Err(FromAgent::Unsavable { holders })
                } else if agent.sole_user.is_none() && in_use::has_volumes() {
                    // Whoever does not say in time has said nothing, and that is no "nothing".
                    tokio::time::timeout(LOOK_TIME, agent.blocking.run(in_use::on_volumes))
                        .await
                        .unwrap_or(Err(FromAgent::Uncounted { why: Uncounted::TooLong }))
                } else {
                    Ok(Vec::new())
                };
                match looked {
                    Ok(in_use) => {
                        if session.hold().await.is_err() {
                            continue;
                        }
                        agent.clock.stop();
                        if in_use.is_empty() { FromAgent::Frozen } else { FromAgent::FrozenWith { in_use } }
                    }
                    Err(refusal) => refusal,
                }
            }
            AgentEvent::Control(ToAgent::Idle) => {
                let millis = agent.processes.idle().as_millis();
                FromAgent::Idle { millis: u64::try_from(millis).unwrap_or(u64::MAX) }
            }
            AgentEvent::Control(ToAgent::Thaw) => {
                session.release();
                agent.clock.go_on();
                FromAgent::Thawed
            }
        };
        match session.send_control(&answer).await {
            // The server that it was for is gone; the next one asks again.
            Ok(()) | Err(SendError::Detached) => {}
            Err(SendError::Closed(closed)) => return closed,
            Err(error) => log::line(&format!("a control message was not sent: {error}")),
        }
    }
}

async fn configure(agent: &Arc<Agent>, configure: Configure) -> FromAgent {
    let generation = configure.generation;
    match put_in_force(agent, configure).await {
        Ok(()) => FromAgent::Configured { generation },
        Err(error) => {
            let reason = match std::error::Error::source(&error) {
                Some(source) => format!("{error}: {source}"),
                None => error.to_string(),
            };
            log::line(&format!("the configuration was refused: {reason}"));
            FromAgent::ConfigureFailed { reason }
        }
    }
}

async fn put_in_force(agent: &Arc<Agent>, configure: Configure) -> Result<(), ConfigureError> {
    let before = agent.settings.get();
    let current = before.as_ref().map_or(0, |settings| settings.generation());
    identity::check(&configure, current)?;
    let settings = Settings::new(configure.clone());
    if before.as_ref().is_some_and(|before| before.sandbox_id() != configure.sandbox_id) {
        // What its source was told to do is none of a copy's.
        agent.journal.clear();
    }
    // Otherwise the machine is not this sandbox's.
    if agent.sole_user.is_none() {
        let was = Was::of(before.as_deref(), &settings);
        let is_back = before.is_some() && configure.generation > current;
        agent.blocking.run(move || identity::apply(&configure, was)).await?;
        if is_back || was == Was::Another {
            hooks::run(agent, &settings).await?;
        }
    }
    agent.settings.set(settings);
    Ok(())
}

async fn accept(agent: Arc<Agent>, session: AgentSession, router: Router) {
    while let Ok(incoming) = session.accept().await {
        agent.tasks.spawn(serve(Arc::clone(&agent), router.clone(), incoming));
    }
}

async fn serve(agent: Arc<Agent>, router: Router, incoming: Incoming) {
    match incoming.target() {
        Target::GuestApi => {
            let origin = Origin::Session(agent.processes.epoch());
            let _borrower = agent.borrowers.enter();
            http::serve(&router, incoming.accept(), origin).await;
        }
        Target::Tcp(port) => match tokio::time::timeout(DIAL_TIME, TcpStream::connect(port.addr())).await {
            Ok(Ok(mut stream)) => {
                let _ = stream.set_nodelay(true);
                let mut flow = incoming.accept();
                let _ = tokio::io::copy_bidirectional(&mut flow, &mut stream).await;
            }
            Ok(Err(error)) => incoming.refuse(ResetCode::from(&error)),
            Err(_elapsed) => incoming.refuse(ResetCode::Failed),
        },
        // A newer server may know more targets.
        #[allow(unreachable_patterns)]
        _ => incoming.refuse(ResetCode::Unsupported),
    }
}
