//! The command line. Scripts rely on it: names and meanings stay.

pub(crate) mod bench;
pub(crate) mod verify;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use sandglass_types::Timestamp;
use sandglass_types::net::Cidr;
use serde::Deserialize;

use crate::client::select;

/// The folder of a server's state, unless it is told another one.
pub(crate) const DATA_DIR: &str = "/var/lib/sandglass";

/// Disposable computers for AI agents, on machines that you own.
#[derive(Debug, Parser)]
#[command(name = "sandglass", version, propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start the server (as root: it starts its privileged half and then gives up all privilege)
    Serve(Serve),
    /// The privileged half; `serve` starts it
    #[command(hide = true)]
    Host(Host),
    /// Ends sandboxes in time after their host has ended, which starts it with its own arguments
    #[command(hide = true)]
    Watchdog(Watchdog),
    /// Create a sandbox, run a command in it, destroy it, and exit with the command's code
    Run(Run),
    /// List, inspect, use, copy and end sandboxes
    #[command(subcommand)]
    Sandbox(Sandbox),
    /// List, show and delete snapshots
    #[command(subcommand)]
    Snapshot(Snapshot),
    /// List, set and delete connections: services that sandboxes may use with a credential that they never see
    #[command(subcommand)]
    Connection(Connections),
    /// Create, list and delete volumes, which the sandboxes of a team share
    #[command(subcommand)]
    Volume(Volumes),
    /// Build, list, show and delete templates, which all teams make sandboxes from; with the key of an operator
    #[command(subcommand)]
    Template(Template),
    /// Say what a sandbox may reach, and what it reached
    #[command(subcommand)]
    Egress(Egress),
    /// Show what a data folder owns on this machine, and what nobody owns any more
    Ledger(Ledger),
    /// Say whether this machine can isolate, check by check, with the remedy
    Doctor(Doctor),
    /// Measure what is promised, against a reference of the same run
    Bench(bench::Bench),
    /// Try to break out of a sandbox in every known way, and say what held
    Verify(verify::Verify),
    /// The disposable machine of `verify`, which starts it
    #[command(hide = true)]
    VerifyStage,
    /// Clears up when `verify` ended in whatever way; it starts it
    #[command(hide = true)]
    VerifyJanitor(verify::Janitor),
    /// Make what is missing of a server's certificate; `serve` starts it
    #[command(hide = true)]
    Certify(Certify),
    /// Keep a server's certificate that may change; `serve` starts it
    #[command(hide = true)]
    KeepCertificate,
    /// Ask an authority for a certificate, without privilege
    #[command(hide = true)]
    Acme,
    /// Tell the ledger what the store says, without privilege
    #[command(hide = true)]
    Owners(Owners),
    /// Work on the content of a volume, for one question; the host starts it
    #[command(hide = true)]
    VolumeContent(Worker),
    /// Read the files of a sandbox, for one question; the host starts it
    #[command(hide = true)]
    CollectFiles(Worker),
    /// Add, list and end teams
    #[command(subcommand)]
    Team(Team),
    /// Add, list and end API keys
    #[command(subcommand)]
    Key(Key),
    /// Show which calls changed something, or were refused
    Audit(Audit),
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum EngineChoice {
    /// The strongest that works on this machine
    Auto,
    /// gVisor: a kernel in user space
    Gvisor,
    /// None: for development, without root; needs --unsafe-no-isolation and a loopback address
    Fake,
}

/// An engine that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    Gvisor,
    Fake,
}

/// How a log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object a line
    Json,
}

#[derive(Debug, Default, Args)]
pub(crate) struct Serve {
    /// Where to listen; port 0 takes a free one [default: 127.0.0.1:3000]
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) listen: Option<SocketAddr>,
    /// The domain that clients reach this server and ports of sandboxes under, by https [default: none]
    #[arg(long, value_name = "NAME[:PORT]")]
    pub(crate) domain: Option<String>,
    /// The folder of this server's state [default: /var/lib/sandglass]
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// The folder of root file systems and agents, shared by all servers of a machine [default: /var/cache/sandglass]
    #[arg(long, value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// What isolates sandboxes [default: auto]
    #[arg(long, value_enum)]
    pub(crate) engine: Option<EngineChoice>,
    /// Accept that nothing isolates what runs in sandboxes: it can do all that the server's user can
    #[arg(long)]
    pub(crate) unsafe_no_isolation: bool,
    /// How the log is written to standard error [default: text]
    #[arg(long, value_enum)]
    pub(crate) log_format: Option<LogFormat>,
    /// A TOML file with the same settings and more; the command line wins
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The guest binary to use instead of the one in this program
    #[arg(long, value_name = "FILE", hide = true)]
    pub(crate) guest: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Worker {
    /// Where what it works on is mounted.
    pub(crate) root: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Certify {
    pub(crate) data_dir: PathBuf,
    pub(crate) domain: String,
}

#[derive(Debug, Args)]
pub(crate) struct Host {
    #[arg(long)]
    pub(crate) data_dir: PathBuf,
    #[arg(long)]
    pub(crate) cache_dir: PathBuf,
    #[arg(long)]
    pub(crate) guest: PathBuf,
    #[arg(long)]
    pub(crate) engine: Engine,
    #[arg(long, required_if_eq("engine", "gvisor"))]
    pub(crate) runsc: Option<PathBuf>,
    #[arg(long)]
    pub(crate) open_private: Vec<Cidr>,
    #[arg(long)]
    pub(crate) connections: u32,
    #[arg(long)]
    pub(crate) connections_per_second: u32,
    #[arg(long, value_enum)]
    pub(crate) log_format: LogFormat,
}

#[derive(Debug, Args)]
pub(crate) struct Watchdog {
    #[command(flatten)]
    pub(crate) host: Host,
    /// End what is due, and exit
    #[arg(long)]
    pub(crate) round: bool,
}

/// Which server to talk to, and as whom.
#[derive(Debug, Args)]
pub(crate) struct Remote {
    /// The server [default: https://api.DOMAIN, or http://127.0.0.1:3000 without one]
    #[arg(long, env = "E2B_API_URL", value_name = "URL")]
    pub(crate) url: Option<String>,
    /// The domain of the server
    #[arg(long, env = "E2B_DOMAIN", value_name = "NAME[:PORT]")]
    pub(crate) domain: Option<String>,
    /// Believe an https server by the authorities in this file (PEM) alone, and by none that this machine trusts
    #[arg(long, env = "SANDGLASS_CA", value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// An API key of it
    #[arg(long, env = "E2B_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

impl Remote {
    /// A server that is known by its address.
    pub(crate) const fn at(url: String, api_key: String) -> Self {
        Self { url: Some(url), domain: None, ca: None, api_key: Some(api_key), json: false }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) remote: Remote,
    /// The template to start from, or a snapshot to go on from
    #[arg(long, default_value = "base", value_name = "T")]
    pub(crate) template: String,
    /// Seconds that sandbox and command may take
    #[arg(long, default_value_t = 300, value_name = "S")]
    pub(crate) timeout: u64,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Sandbox {
    /// List sandboxes
    List {
        #[command(flatten)]
        remote: Remote,
        /// Only those with this label; may be said more than once
        #[arg(long, value_name = "KEY=VALUE", value_parser = select::label)]
        metadata: Vec<(String, String)>,
        /// Only those that were made so long ago, or earlier: 90s, 15m, 1h, 2d
        #[arg(long, value_name = "TIME", value_parser = select::span)]
        older: Option<Duration>,
        /// Only those that nobody has used for so long, or that are paused for so long
        #[arg(long, value_name = "TIME", value_parser = select::span)]
        idle: Option<Duration>,
    },
    /// Show one sandbox
    Info {
        #[command(flatten)]
        remote: Remote,
        /// Its id
        id: String,
    },
    /// Run a command in a sandbox, and exit with its code
    Exec {
        #[command(flatten)]
        remote: Remote,
        /// Its id
        id: String,
        /// Run as this user instead of the template's
        #[arg(long, value_name = "USER")]
        user: Option<String>,
        /// Run in this folder
        #[arg(long, value_name = "DIR")]
        cwd: Option<String>,
        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
        command: Vec<String>,
    },
    /// Pause sandboxes: memory, processes and files are kept, and they use no CPU and no memory
    Pause {
        #[command(flatten)]
        remote: Remote,
        /// Keep their files alone: they start anew from them
        #[arg(long)]
        files_only: bool,
        /// Their ids
        #[arg(required = true)]
        ids: Vec<String>,
    },
    /// Let paused sandboxes run on from where they were
    Resume {
        #[command(flatten)]
        remote: Remote,
        /// Their ids
        #[arg(required = true)]
        ids: Vec<String>,
        /// Give up the memory that was kept, and start anew from their files
        #[arg(long)]
        reboot: bool,
        /// How long they may run from now on, in seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 300)]
        timeout: u64,
    },
    /// Write a running sandbox to a snapshot, and print its id; the sandbox runs on
    Snapshot {
        #[command(flatten)]
        remote: Remote,
        /// Its id
        id: String,
        /// What to call the snapshot; another one of that name keeps only its id
        #[arg(long, value_name = "NAME[:TAG]")]
        name: Option<String>,
    },
    /// Make copies of a running sandbox that go on from where it is, and print their ids; the sandbox runs on
    Fork {
        #[command(flatten)]
        remote: Remote,
        /// Its id
        id: String,
        /// How many
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
        count: u16,
        /// How long each may run, in seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 300)]
        timeout: u64,
    },
    /// End sandboxes, also paused ones
    Kill {
        #[command(flatten)]
        remote: Remote,
        /// Their ids
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Snapshot {
    /// List snapshots
    List {
        #[command(flatten)]
        remote: Remote,
    },
    /// Show one snapshot, as JSON: among other things, what it takes on the disk and what its deletion would free
    Show {
        #[command(flatten)]
        remote: Remote,
        /// Its id or name
        snapshot: String,
    },
    /// Delete snapshots; sandboxes that were made from them have all that they need
    Delete {
        #[command(flatten)]
        remote: Remote,
        /// Their ids or names
        #[arg(required = true)]
        snapshots: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Connections {
    /// List the connections that sandboxes of the team may be granted
    List {
        #[command(flatten)]
        remote: Remote,
    },
    /// Make a connection, or change it; its credential comes from a file or from standard input, and is never shown again
    Set {
        #[command(flatten)]
        remote: Remote,
        /// Its name; sandboxes reach it at http://NAME.broker.internal
        name: String,
        /// Where it leads
        #[arg(value_name = "https://HOST[:PORT]")]
        target: String,
        /// A method that may be used; may be given more than once
        #[arg(long = "method", value_name = "METHOD", default_value = "GET")]
        methods: Vec<String>,
        /// The beginning of paths that may be asked for; may be given more than once
        #[arg(long = "path", value_name = "PATH", default_value = "/")]
        paths: Vec<String>,
        /// Show the credential as HTTP Basic, for this user
        #[arg(long, value_name = "USER", conflicts_with_all = ["header", "query"])]
        basic: Option<String>,
        /// Show it in this header, and not as a bearer token
        #[arg(long, value_name = "NAME", conflicts_with = "query")]
        header: Option<String>,
        /// What stands before it in that header
        #[arg(long, value_name = "TEXT", requires = "header")]
        prefix: Option<String>,
        /// Show it as this parameter of the query
        #[arg(long, value_name = "NAME")]
        query: Option<String>,
        /// Let requests name a second resource, as copies and GraphQL do, which nobody looks at
        #[arg(long)]
        second_resource: bool,
        /// Where the credential is; `-` is standard input. Without, it stays as it is
        #[arg(long, value_name = "FILE")]
        credential_file: Option<PathBuf>,
    },
    /// Delete connections; sandboxes that use them can't any more
    Delete {
        #[command(flatten)]
        remote: Remote,
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Volumes {
    /// Create a volume, and print its id
    Create {
        #[command(flatten)]
        remote: Remote,
        /// What sandboxes mount it by: 1 to 128 of a-z, A-Z, 0-9, - and _
        name: String,
        /// All that can be on it [default: what the server says]
        #[arg(long, value_name = "MIB")]
        size: Option<u32>,
    },
    /// List volumes
    List {
        #[command(flatten)]
        remote: Remote,
    },
    /// Delete volumes that no sandbox and no snapshot has, with all that is on them
    Delete {
        #[command(flatten)]
        remote: Remote,
        /// Their ids or names
        #[arg(required = true)]
        volumes: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Template {
    /// Build a template in a sandbox of its own: run its script, start what it starts, and keep that running state
    Build {
        #[command(flatten)]
        remote: Remote,
        /// A folder with a template.toml
        dir: PathBuf,
    },
    /// List templates
    List {
        #[command(flatten)]
        remote: Remote,
    },
    /// Show one template, as JSON
    Show {
        #[command(flatten)]
        remote: Remote,
        /// Its name
        name: String,
    },
    /// Delete templates; sandboxes that were made from them have all that they need
    Delete {
        #[command(flatten)]
        remote: Remote,
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Egress {
    /// Say whether a sandbox may connect somewhere, which rule decides, and what would allow it
    Explain {
        #[command(flatten)]
        remote: Remote,
        /// Its id
        sandbox: String,
        /// A host name or an address; port 443 unless given
        #[arg(value_name = "HOST[:PORT]")]
        target: String,
    },
    /// Show what a sandbox asked for last, oldest first
    Log {
        #[command(flatten)]
        remote: Remote,
        /// Its id
        sandbox: String,
        /// At most so many lines
        #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
        limit: u16,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Ledger {
    /// The folder of the server's state
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Seconds to wait for nothing to be left over
    #[arg(long, value_name = "S")]
    pub(crate) wait: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// The folder of a server's state, there already or not
    #[arg(long, default_value = DATA_DIR, value_name = "DIR")]
    pub(crate) data_dir: PathBuf,
    /// The folder of root file systems and agents, there already or not
    #[arg(long, default_value = "/var/cache/sandglass", value_name = "DIR")]
    pub(crate) cache_dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Owners {
    #[arg(long)]
    pub(crate) data_dir: PathBuf,
}

/// The store to work on. The server may run meanwhile.
#[derive(Debug, Args)]
pub(crate) struct Local {
    /// The folder of the server's state
    #[arg(long, default_value = DATA_DIR, value_name = "DIR")]
    pub(crate) data_dir: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Team {
    /// Add a team
    Create {
        #[command(flatten)]
        local: Local,
        /// Its name
        name: String,
    },
    /// List teams
    List {
        #[command(flatten)]
        local: Local,
    },
    /// End a team: its keys are refused from now on
    Revoke {
        #[command(flatten)]
        local: Local,
        /// Its name or id
        team: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Audit {
    #[command(flatten)]
    pub(crate) local: Local,
    /// How many calls, the last ones
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub(crate) limit: u32,
    /// None before this time, in RFC 3339
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<Timestamp>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Key {
    /// Make a key and print it, once
    Create {
        #[command(flatten)]
        local: Local,
        /// The name or id of the team that it acts for
        #[arg(long, default_value = "default")]
        team: String,
        /// What to call it
        #[arg(long, default_value = "key")]
        name: String,
        /// Let it see and do what concerns all teams: GET /metrics, and templates
        #[arg(long)]
        operator: bool,
    },
    /// List keys, without their secrets
    List {
        #[command(flatten)]
        local: Local,
        /// Only those of this team, by name or id
        #[arg(long)]
        team: Option<String>,
    },
    /// End a key
    Revoke {
        #[command(flatten)]
        local: Local,
        /// Its id
        key: String,
        /// And all keys that were made with it over the API, and with those
        #[arg(long)]
        with_made: bool,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_definition_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
