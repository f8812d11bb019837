//! The verbs of the command line that work on a data folder of this machine, whether its server runs or not.

use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Context as _;
use sandglass_store::{SqliteStore, Store};
use sandglass_types::{Clock as _, SystemClock};

use crate::admin::{self, Format};
use crate::cli;
use crate::data_dir::DataDir;
use crate::ledger::{self, owners};

/// `sandglass team …`.
pub(crate) fn team(verb: &cli::Team) -> anyhow::Result<ExitCode> {
    let (cli::Team::Create { local, .. } | cli::Team::List { local } | cli::Team::Revoke { local, .. }) =
        &verb;
    let (format, now) = (format(local.json), SystemClock.now());
    with_store(&local.data_dir, async |store, out| {
        let (action, target, done) = match verb {
            cli::Team::List { .. } => return admin::team_list(store, format, out).await,
            cli::Team::Create { name, .. } => {
                ("team create", name, admin::team_create(store, name, now, format, out).await)
            }
            cli::Team::Revoke { team, .. } => {
                ("team revoke", team, admin::team_revoke(store, team, now, format, out).await)
            }
        };
        admin::record(store, action, target, now, &done).await?;
        done
    })
}

/// `sandglass key …`.
pub(crate) fn key(verb: &cli::Key) -> anyhow::Result<ExitCode> {
    let (cli::Key::Create { local, .. } | cli::Key::List { local, .. } | cli::Key::Revoke { local, .. }) =
        &verb;
    let (format, now) = (format(local.json), SystemClock.now());
    with_store(&local.data_dir, async |store, out| {
        let (action, target, done) = match verb {
            cli::Key::List { team, .. } => {
                return admin::key_list(store, team.as_deref(), format, out).await;
            }
            cli::Key::Create { team, name, operator, .. } => {
                let done = admin::key_create(store, team, name, *operator, now, format, out).await;
                ("key create", name, done)
            }
            cli::Key::Revoke { key, with_made, .. } => {
                ("key revoke", key, admin::key_revoke(store, key, *with_made, now, format, out).await)
            }
        };
        admin::record(store, action, target, now, &done).await?;
        done
    })
}

/// `sandglass audit`.
pub(crate) fn audit(args: &cli::Audit) -> anyhow::Result<ExitCode> {
    let format = format(args.local.json);
    with_store(&args.local.data_dir, async |store, out| {
        admin::audit(store, args.since, args.limit, format, out).await
    })
}

/// `sandglass ledger`. Exits with 1 if something is left over or missing, and with 2 if that could not be found out.
pub(crate) fn ledger(args: &cli::Ledger) -> anyhow::Result<ExitCode> {
    let outcome = (|| {
        let data = DataDir::open(&args.data_dir)?;
        let options = ledger::Options {
            engine: data.engine(),
            data_dir: data.path().to_owned(),
            instance: data.instance().clone(),
            json: args.json,
            wait: args.wait.map(Duration::from_secs),
        };
        let program = std::env::current_exe().context("this program can't find itself")?;
        let mut ask = || {
            let mut child = Command::new(&program);
            child.arg("owners").arg("--data-dir").arg(data.path());
            owners::ask(child)
        };
        ledger::run(&options, &mut ask, &mut std::io::stdout().lock())
    })();
    match outcome {
        Ok(clean) => Ok(ExitCode::from(u8::from(!clean))),
        Err(error) => {
            eprintln!("sandglass: {error:#}");
            Ok(ExitCode::from(2))
        }
    }
}

/// `sandglass owners`: what the ledger's child without privilege does.
pub(crate) fn owners(args: &cli::Owners) -> anyhow::Result<ExitCode> {
    let cell = DataDir::open(&args.data_dir)?.confine()?;
    owners::print(&cell.store, &mut std::io::stdout().lock())?;
    Ok(ExitCode::SUCCESS)
}

const fn format(json: bool) -> Format {
    if json { Format::Json } else { Format::Text }
}

/// Works on the store as the user that it belongs to, so that no file in it ever belongs to root.
fn with_store(
    data_dir: &Path,
    work: impl AsyncFnOnce(&dyn Store, &mut (dyn Write + Send)) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let cell = DataDir::open(data_dir)?.confine()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = SqliteStore::open(&cell.store).await?;
        let done = work(&store, &mut std::io::stdout()).await;
        store.close().await;
        done
    })?;
    Ok(ExitCode::SUCCESS)
}
