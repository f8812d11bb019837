//! What `sandglass verify` can be told.

use std::path::PathBuf;

use clap::Args;
use sandglass_types::InstanceId;

use crate::verify::Group;

#[derive(Debug, Args)]
pub(crate) struct Verify {
    /// Attack this server, as it runs, and without controls: a probe that could never succeed is not noticed then
    #[arg(long, value_name = "URL", requires = "api_key")]
    pub(crate) url: Option<String>,
    /// An API key of it
    #[arg(long, env = "E2B_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// The folder of root file systems and agents
    #[arg(long, default_value = "/var/cache/sandglass", value_name = "DIR")]
    pub(crate) cache_dir: PathBuf,
    /// The `runsc` to use [default: the one in PATH]
    #[arg(long, value_name = "FILE")]
    pub(crate) runsc: Option<PathBuf>,
    /// Only the probes of these groups; the others count as skipped
    #[arg(long, value_name = "GROUP", value_delimiter = ',')]
    pub(crate) only: Vec<Group>,
    /// How many sandboxes are created and killed to see whether something is left
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(8..=100_000))]
    pub(crate) cycles: u32,
    /// List the probes, and attack nothing
    #[arg(long)]
    pub(crate) list: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Janitor {
    #[arg(long)]
    pub(crate) cache_dir: PathBuf,
    #[arg(long, required = true)]
    pub(crate) instance: Vec<InstanceId>,
}
