//! What `sandglass bench` can be told.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Args)]
#[command(arg_required_else_help = true, args_conflicts_with_subcommands = true)]
pub(crate) struct Bench {
    /// List the benches and their targets
    #[arg(long)]
    pub(crate) list: bool,
    #[command(subcommand)]
    pub(crate) which: Option<Which>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Which {
    /// From asking for a sandbox to the first output of a command in it, against a bare `runsc run`
    ColdCreate {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        samples: Samples,
    },
    /// A command in a running sandbox, against the same spawn by a process inside
    Exec {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        there: There,
        #[command(flatten)]
        samples: Samples,
    },
    /// 100 MB up and down, against the same bytes over loopback and to the sandbox's disk
    Transfer {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        there: There,
        /// How many times each is measured
        #[arg(short, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        n: u32,
        /// A Python with the E2B SDK [default: .venv/bin/python, if there is one]
        #[arg(long, value_name = "FILE")]
        python: Option<PathBuf>,
    },
    /// What sandboxes cost in which nothing happens: memory and CPU, of them and of the server
    Idle {
        #[command(flatten)]
        common: Common,
        /// How many sandboxes
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
        count: u32,
        /// Seconds between the last start and the measurement
        #[arg(long, default_value_t = 10, value_name = "S")]
        settle: u64,
        /// Seconds that are measured
        #[arg(long, default_value_t = 30, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
        window: u64,
    },
    /// A guest's connections through the proxy, against a bare copy loop in the same airlock
    Egress {
        #[command(flatten)]
        common: Common,
        /// How many times 100 MB are carried, and 20 connections made
        #[arg(short, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        n: u32,
    },
    /// Requests to a program's port through the edge, against the same from inside its airlock
    Edge {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        samples: Samples,
    },
    /// The echo of a key in a terminal, word of a changed file, and many streams at one time
    Live {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        there: There,
        #[command(flatten)]
        samples: Samples,
    },
    /// From asking for a sandbox of a warm pool to the first output of a command in it
    Pool {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        on: On,
        #[command(flatten)]
        samples: Samples,
    },
    /// Sandboxes that are made of a snapshot, resumed and forked, against a bare `runsc restore`
    Restore {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        on: On,
        #[command(flatten)]
        samples: Samples,
    },
    /// Sandboxes created, used, paused, resumed and ended, many at a time, and what is left of them
    Soak {
        #[command(flatten)]
        common: Common,
        /// How many sandboxes that are created, used and ended
        #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
        cycles: u32,
        /// How many more that are paused and resumed as well
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
        pauses: u32,
        /// How many at a time
        #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100))]
        parallel: u32,
    },
}

/// How the bench's own server is started, and how results are told.
#[derive(Debug, Args)]
pub(crate) struct Common {
    /// The folder of root file systems and agents
    #[arg(long, default_value = "/var/cache/sandglass", value_name = "DIR")]
    pub(crate) cache_dir: PathBuf,
    /// The `runsc` to use [default: the one in PATH]
    #[arg(long, value_name = "FILE")]
    pub(crate) runsc: Option<PathBuf>,
    /// Print JSON, with every sample
    #[arg(long)]
    pub(crate) json: bool,
    /// Exit with 2 if a target is missed
    #[arg(long)]
    pub(crate) check: bool,
}

/// Where the bench's own server keeps its disks.
#[derive(Debug, Args)]
pub(crate) struct On {
    /// An XFS of the bench's own (needs `mkfs.xfs`), or whatever `/var/tmp` is on
    #[arg(long, value_enum, default_value = "xfs", value_name = "WHICH")]
    pub(crate) file_system: FileSystem,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum FileSystem {
    Xfs,
    Host,
}

/// A server that runs already, to use instead of one of the bench's own. Its ledger is not looked at.
#[derive(Debug, Args)]
pub(crate) struct There {
    /// A server that runs already
    #[arg(long, value_name = "URL", requires = "api_key")]
    pub(crate) url: Option<String>,
    /// An API key of it
    #[arg(long, env = "E2B_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Samples {
    /// How many times each is measured
    #[arg(short, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) n: u32,
    /// How many times before that, without counting
    #[arg(long, default_value_t = 3)]
    pub(crate) warmup: u32,
}
