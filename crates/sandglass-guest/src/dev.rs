//! The guest API on a TCP port, outside of any sandbox: for development and tests. It has the rights of whoever
//! starts it, and any client can run commands with them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use sandglass_proto::control::Configure;
use tokio::net::TcpListener;

use crate::agent::Agent;
use crate::job::Jobs;
use crate::process::Origin;
use crate::settings::Settings;
use crate::{http, log};

/// What the command line says.
#[derive(Debug)]
struct Options {
    listen: SocketAddr,
    groups: Option<PathBuf>,
    configure: Configure,
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        listen: SocketAddr::from(([127, 0, 0, 1], 49983)),
        groups: None,
        configure: Configure {
            generation: 1,
            sandbox_id: "debug_sandbox_id".into(),
            template_id: "base".into(),
            access_token: None,
            default_user: "user".into(),
            default_workdir: None,
            env: BTreeMap::new(),
            max_processes: 0,
        },
    };
    while let Some(arg) = args.next() {
        let value = args.next().ok_or_else(|| format!("{arg} needs a value"))?;
        let invalid = |what: &str| format!("{arg}: {value:?} is not {what}");
        match arg.as_str() {
            "--listen" => options.listen = value.parse().map_err(|_| invalid("an address and a port"))?,
            "--groups" => options.groups = Some(value.into()),
            "--token" => options.configure.access_token = Some(value),
            "--user" => options.configure.default_user = value,
            "--workdir" => options.configure.default_workdir = Some(value),
            "--max-processes" => {
                options.configure.max_processes = value.parse().map_err(|_| invalid("a number"))?;
            }
            "--env" => {
                let (name, value) = value.split_once('=').ok_or_else(|| invalid("NAME=VALUE"))?;
                options.configure.env.insert(name.into(), value.into());
            }
            _ => return Err(format!("unknown option {arg}")),
        }
    }
    Ok(options)
}

/// Serves until killed.
pub(crate) fn main(args: impl Iterator<Item = String>) -> ExitCode {
    match parse(args).and_then(|options| run(options).map_err(|error| error.to_string())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            log::line(&message);
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> std::io::Result<()> {
    let jobs = match &options.groups {
        Some(base) => Jobs::below(base, false)?,
        None => Jobs::marked(),
    };
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1))?;
    let agent = Arc::new(Agent::new(jobs, None)?);
    agent.settings.set(Settings::new(options.configure));
    crate::agent::runtime()?.block_on(async {
        let listener = TcpListener::bind(options.listen).await?;
        log::line(&format!("listening on {}", listener.local_addr()?));
        let router = http::router(&agent);
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            agent.tasks.spawn(http::serve(&router, stream, Origin::Local));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_checked() {
        let parse = |text: &str| parse(text.split_whitespace().map(Into::into));
        let options = parse("--listen 127.0.0.1:0 --token t --env A=b=c --user root").unwrap();
        assert_eq!(options.configure.env["A"], "b=c");
        assert_eq!(options.listen.port(), 0);
        for wrong in ["--listen localhost:1", "--token", "--env A", "--nonsense 1"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
