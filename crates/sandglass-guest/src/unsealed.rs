//! The agent of a sandbox that nothing isolates: an ordinary process of an ordinary user, for the development of what is
//! around sandboxes.
//!
//! It speaks the same session as process 1 of a sandbox does. But the machine is not its own, so it changes nothing of
//! it, and there is nobody that it could become: every user name means the user that it runs as, at home in the
//! sandbox's folder.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use rustix::process::Pid;
use sandglass_proto::session::AgentSession;

use crate::agent::Agent;
use crate::job::Jobs;
use crate::users::User;
use crate::{http, init, log, session};

/// Runs until the session ends, and ends what it started.
pub(crate) fn main(mut args: impl Iterator<Item = String>) -> ExitCode {
    let (Some(home), None) = (args.next(), args.next()) else {
        log::line("usage: sandglass-guest unsealed HOME");
        return ExitCode::from(2);
    };
    match run(&home) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(&format!("starting failed: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(home: &str) -> io::Result<()> {
    if !home.starts_with('/') || !Path::new(home).is_dir() {
        return Err(io::Error::new(io::ErrorKind::NotADirectory, format!("{home} is no absolute directory")));
    }
    let (input, output) = init::take_stdio()?;
    init::raise_open_files()?;
    // What leaves its parent is still the agent's to collect.
    rustix::process::set_child_subreaper(Pid::from_raw(1))?;
    let agent = Arc::new(Agent::new(Jobs::marked(), Some(User::own(home)?))?);
    crate::agent::runtime()?.block_on(async {
        let router = http::router(&agent);
        let (session, _threads) = AgentSession::start(input, output)?;
        session::run(Arc::clone(&agent), session, router).await;
        agent.jobs.end_all()
    })
}
