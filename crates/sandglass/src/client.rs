//! The verbs of the command line that talk to a server, over the same public API that everybody uses.

pub(crate) mod connections;
pub(crate) mod exec;
mod rest;
pub(crate) mod select;
pub(crate) mod template;
mod transport;
pub(crate) mod trust;
pub(crate) mod volumes;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::cli;
use exec::{Command, Outcome};
pub(crate) use rest::{Api, Reach};
use sandglass_types::{Clock as _, SystemClock};
use select::Selection;

/// What `run` and `exec` exit with when they themselves fail, as other tools of this kind do: a command that ran and
/// failed is not to be taken for one that never ran.
const OWN_FAILURE: u8 = 125;

/// `sandglass run`.
pub(crate) fn run(args: cli::Run) -> anyhow::Result<ExitCode> {
    own_failure(block_on(async {
        let api = Api::new(&args.remote)?;
        let sandbox = api.create(&args.template, args.timeout).await?;
        warn_if_unsealed(&sandbox);
        let command = Command { words: args.command, user: None, cwd: None };
        let outcome = tokio::select! {
            outcome = exec::run(&api, &sandbox, command, args.remote.json) => outcome,
            _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        };
        let killed = api.kill(&sandbox.id).await;
        let outcome = outcome?;
        killed.context("the command ended, but its sandbox could not be ended; its timeout will")?;
        finish(&outcome, args.remote.json)
    }))
}

/// `sandglass sandbox …`.
pub(crate) fn sandbox(verb: cli::Sandbox) -> anyhow::Result<ExitCode> {
    match verb {
        cli::Sandbox::List { remote, metadata, older, idle } => {
            block_on(list(&remote, &Selection { metadata, older, idle }))
        }
        cli::Sandbox::Info { remote, id } => block_on(info(&remote, &id)),
        cli::Sandbox::Kill { remote, ids } => block_on(kill(&remote, &ids)),
        cli::Sandbox::Pause { remote, files_only, ids } => block_on(pause(&remote, &ids, !files_only)),
        cli::Sandbox::Resume { remote, ids, reboot, timeout } => {
            block_on(resume(&remote, &ids, timeout, !reboot))
        }
        cli::Sandbox::Snapshot { remote, id, name } => block_on(snapshot(&remote, &id, name.as_deref())),
        cli::Sandbox::Fork { remote, id, count, timeout } => block_on(fork(&remote, &id, count, timeout)),
        cli::Sandbox::Exec { remote, id, user, cwd, command } => own_failure(block_on(async {
            let api = Api::new(&remote)?;
            let sandbox = api.reach(&id).await?;
            warn_if_unsealed(&sandbox);
            let command = Command { words: command, user, cwd };
            finish(&exec::run(&api, &sandbox, command, remote.json).await?, remote.json)
        })),
    }
}

/// `sandglass snapshot …`.
pub(crate) fn snapshots(verb: cli::Snapshot) -> anyhow::Result<ExitCode> {
    match verb {
        cli::Snapshot::List { remote } => block_on(list_snapshots(&remote)),
        cli::Snapshot::Show { remote, snapshot } => block_on(show_snapshot(&remote, &snapshot)),
        cli::Snapshot::Delete { remote, snapshots } => block_on(delete_snapshots(&remote, &snapshots)),
    }
}

fn warn_if_unsealed(sandbox: &Reach) {
    if sandbox.unsealed {
        eprintln!(
            "sandglass: warning: nothing isolates this sandbox; its commands can do what its server can"
        );
    }
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

fn own_failure(outcome: anyhow::Result<ExitCode>) -> anyhow::Result<ExitCode> {
    outcome.or_else(|error| {
        eprintln!("sandglass: {error:#}");
        Ok(ExitCode::from(OWN_FAILURE))
    })
}

fn finish(outcome: &Outcome, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        print_json(&outcome.to_json())?;
    } else if let Some(error) = outcome.error() {
        eprintln!("sandglass: {error}");
    }
    Ok(ExitCode::from(outcome.code()))
}

async fn list(remote: &cli::Remote, selection: &Selection) -> anyhow::Result<ExitCode> {
    let api = Api::new(remote)?;
    let mut sandboxes = api.list(&selection.query()).await?;
    let now = SystemClock.now();
    sandboxes.retain(|listed| selection.has_age(listed, now));
    if selection.idle.is_some() {
        let mut idle = Vec::new();
        for listed in sandboxes {
            let id = listed["sandboxID"].as_str().context("the server lists a sandbox without its id")?;
            // It may have ended meanwhile.
            if api.info(id).await.is_ok_and(|info| selection.is_idle(&info)) {
                idle.push(listed);
            }
        }
        sandboxes = idle;
    }
    if remote.json {
        print_json(&Value::Array(sandboxes))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["SANDBOX", "TEMPLATE", "STATE", "STARTED", "ENDS"]);
    for sandbox in &sandboxes {
        let text = |field: &str| sandbox[field].as_str().unwrap_or("?").to_owned();
        table.add_row(["sandboxID", "templateID", "state", "startedAt", "endAt"].map(text));
    }
    writeln!(std::io::stdout(), "{table}")?;
    Ok(ExitCode::SUCCESS)
}

async fn info(remote: &cli::Remote, id: &str) -> anyhow::Result<ExitCode> {
    let info = Api::new(remote)?.info(id).await?;
    if remote.json {
        print_json(&info)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = std::io::stdout().lock();
    for (field, value) in info.as_object().context("the server's answer is no object")? {
        match value {
            Value::String(text) => writeln!(out, "{field:<20} {text}")?,
            Value::Null => {}
            value => writeln!(out, "{field:<20} {value}")?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn pause(remote: &cli::Remote, ids: &[String], memory: bool) -> anyhow::Result<ExitCode> {
    let api = Api::new(remote)?;
    for id in ids {
        api.pause(id, memory).await?;
    }
    if remote.json {
        print_json(&json!({ "paused": ids }))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn resume(
    remote: &cli::Remote,
    ids: &[String],
    timeout: u64,
    memory: bool,
) -> anyhow::Result<ExitCode> {
    let api = Api::new(remote)?;
    for id in ids {
        api.resume(id, timeout, memory).await?;
    }
    if remote.json {
        print_json(&json!({ "resumed": ids }))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn snapshot(remote: &cli::Remote, id: &str, name: Option<&str>) -> anyhow::Result<ExitCode> {
    let made = Api::new(remote)?.snapshot(id, name).await?;
    if remote.json {
        print_json(&made)?;
    } else {
        let id = made["snapshotID"].as_str().context("the server's answer names no snapshot")?;
        // As it is listed.
        writeln!(std::io::stdout(), "{}", id.strip_suffix(":default").unwrap_or(id))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints those that there are, and fails if one is missing.
async fn fork(remote: &cli::Remote, id: &str, count: u16, timeout: u64) -> anyhow::Result<ExitCode> {
    let made = Api::new(remote)?.fork(id, count, timeout).await?;
    if remote.json {
        print_json(&Value::Array(made.clone()))?;
    }
    let mut code = ExitCode::SUCCESS;
    for copy in &made {
        match copy["sandbox"]["sandboxID"].as_str() {
            Some(_) if remote.json => {}
            Some(id) => writeln!(std::io::stdout(), "{id}")?,
            None => {
                let why = copy["error"]["message"].as_str().unwrap_or("the server does not say why");
                eprintln!("sandglass: a copy could not be made: {why}");
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

async fn list_snapshots(remote: &cli::Remote) -> anyhow::Result<ExitCode> {
    let snapshots = Api::new(remote)?.snapshots().await?;
    if remote.json {
        print_json(&Value::Array(snapshots))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["SNAPSHOT", "NAME", "TEMPLATE", "SANDBOX", "CREATED", "MIB", "UNIQUE"]);
    for snapshot in &snapshots {
        let text = |field: &str| snapshot[field].as_str().unwrap_or("").to_owned();
        let [id, name, template, sandbox, created] =
            ["id", "name", "template", "sandbox", "created_at"].map(text);
        let [all, unique] = ["bytes", "unique_bytes"].map(|field| mib(&snapshot["disk"][field]));
        table.add_row([id, name, template, sandbox, created, all, unique]);
    }
    writeln!(std::io::stdout(), "{table}")?;
    Ok(ExitCode::SUCCESS)
}

/// A number of bytes in MiB, as tables have it.
fn mib(bytes: &Value) -> String {
    bytes.as_u64().map_or_else(|| "-".into(), |bytes| bytes.div_ceil(1 << 20).to_string())
}

async fn show_snapshot(remote: &cli::Remote, snapshot: &str) -> anyhow::Result<ExitCode> {
    print_json(&Api::new(remote)?.show_snapshot(snapshot).await?)?;
    Ok(ExitCode::SUCCESS)
}

async fn delete_snapshots(remote: &cli::Remote, snapshots: &[String]) -> anyhow::Result<ExitCode> {
    let api = Api::new(remote)?;
    for snapshot in snapshots {
        api.delete_snapshot(snapshot).await?;
    }
    if remote.json {
        print_json(&json!({ "deleted": snapshots }))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn kill(remote: &cli::Remote, ids: &[String]) -> anyhow::Result<ExitCode> {
    let api = Api::new(remote)?;
    for id in ids {
        api.kill(id).await?;
    }
    if remote.json {
        print_json(&json!({ "killed": ids }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// `sandglass egress …`.
pub(crate) fn egress(verb: cli::Egress) -> anyhow::Result<ExitCode> {
    match verb {
        cli::Egress::Explain { remote, sandbox, target } => block_on(explain(&remote, &sandbox, &target)),
        cli::Egress::Log { remote, sandbox, limit } => block_on(log(&remote, &sandbox, limit)),
    }
}

/// Exits with 0 if it is allowed and with 1 if it is not, for scripts.
async fn explain(remote: &cli::Remote, sandbox: &str, target: &str) -> anyhow::Result<ExitCode> {
    let told = Api::new(remote)?.explain(sandbox, target).await?;
    let allowed = told["allowed"].as_bool().context("the server's answer says nothing")?;
    if remote.json {
        print_json(&told)?;
    } else {
        let text = |field: &str| told[field].as_str().unwrap_or_default();
        let mut out = std::io::stdout().lock();
        let verdict = if allowed { "allowed" } else { "denied" };
        writeln!(out, "{verdict}: {} port {}", text("host"), told["port"])?;
        for (label, field) in [("by", "rule"), ("because", "reason"), ("remedy", "remedy")] {
            if !text(field).is_empty() {
                writeln!(out, "{label:<8} {}", text(field))?;
            }
        }
    }
    Ok(if allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn log(remote: &cli::Remote, sandbox: &str, limit: u16) -> anyhow::Result<ExitCode> {
    let lines = Api::new(remote)?.receipts(sandbox, limit).await?;
    if remote.json {
        print_json(&Value::Array(lines))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["TIME", "WHAT", "VERDICT", "NAME", "ADDRESS", "PORT", "SENT", "RECEIVED", "RULE"]);
    for line in &lines {
        let cell = |field: &str| match &line["receipt"][field] {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        };
        let fields =
            ["time", "kind", "outcome", "name", "address", "port", "sent", "received", "rule"].map(cell);
        table.add_row(fields);
    }
    writeln!(std::io::stdout(), "{table}")?;
    Ok(ExitCode::SUCCESS)
}

fn print_json(value: &Value) -> anyhow::Result<()> {
    writeln!(std::io::stdout(), "{value:#}").context("nothing reads the output")
}
