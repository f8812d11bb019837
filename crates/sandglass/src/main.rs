//! The Sandglass binary: wiring only.
#![forbid(unsafe_code)]

mod admin;
mod bench;
mod certificate;
mod cli;
mod client;
mod collect;
mod config;
mod data_dir;
mod doctor;
mod failpoints;
mod guest_binary;
mod indexes;
mod ledger;
mod link;
mod local;
mod master_key;
mod models;
mod privileged;
mod serve;
mod startup;
mod verify;
mod volume;
mod watchdog;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::Parser as _;
use tracing_subscriber::EnvFilter;

use cli::{Cli, Command, LogFormat};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let format = match &cli.command {
        Command::Serve(args) => config::log_format(args),
        Command::Host(args) => args.log_format,
        Command::Watchdog(args) => args.host.log_format,
        _ => LogFormat::Text,
    };
    // A server in it that lets everything out has much to tell, and nobody to tell it to.
    log(format, if matches!(cli.command, Command::VerifyStage) { "error" } else { "info" });
    let outcome = match cli.command {
        Command::Serve(args) => {
            failpoints::arm().and_then(|()| serve::run(&args)).map(|()| ExitCode::SUCCESS)
        }
        Command::Host(args) => {
            failpoints::arm().and_then(|()| privileged::run(args)).map(|()| ExitCode::SUCCESS)
        }
        Command::Watchdog(args) => failpoints::arm().and_then(|()| watchdog::run(args)),
        Command::Run(args) => client::run(args),
        Command::Sandbox(verb) => client::sandbox(verb),
        Command::Snapshot(verb) => client::snapshots(verb),
        Command::Volume(verb) => client::volumes::volumes(verb),
        Command::Connection(verb) => client::connections::connections(verb),
        Command::Template(verb) => client::template::templates(verb),
        Command::Egress(verb) => client::egress(verb),
        Command::Ledger(args) => local::ledger(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::VerifyStage => verify::stage::run(),
        Command::VerifyJanitor(args) => verify::janitor::run(&args),
        Command::Certify(args) => {
            certificate::certify(&args.data_dir, &args.domain).map(|()| ExitCode::SUCCESS)
        }
        Command::KeepCertificate => certificate::keep().map(|()| ExitCode::SUCCESS),
        Command::Acme => certificate::acme().map(|()| ExitCode::SUCCESS),
        Command::VolumeContent(args) => volume::run(&args).map(|()| ExitCode::SUCCESS),
        Command::CollectFiles(args) => collect::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Owners(args) => local::owners(&args),
        Command::Team(verb) => local::team(&verb),
        Command::Key(verb) => local::key(&verb),
        Command::Audit(args) => local::audit(&args),
    };
    outcome.unwrap_or_else(|error| startup::report(&error))
}

/// Starts the log, at this level unless the environment says another. In JSON, `span` has what is known of the request that a line is about: `request`, `team`, `sandbox`.
fn log(format: LogFormat, level: &str) {
    let filter = EnvFilter::try_from_env("SANDGLASS_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        // A line that can't be written because nobody reads the log any more would be told there, and that panics.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().flatten_event(true).with_span_list(false).init(),
    }
}
