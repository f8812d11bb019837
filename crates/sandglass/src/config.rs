//! Settings of the server: the command line over the file over the defaults.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use fs_err as fs;
use serde::Deserialize;

use crate::cli::{EngineChoice, Serve};

/// The longest lifetime that can be configured: a year.
const MAX_LIFETIME_HOURS: u64 = 24 * 365;

/// What the file may hold. An unknown key is an error: it is a typing mistake or of a newer version.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    listen: Option<SocketAddr>,
    data_dir: Option<PathBuf>,
    cache_dir: Option<PathBuf>,
    engine: Option<String>,
    domain: Option<String>,
    runsc: Option<PathBuf>,
    max_lifetime_hours: Option<u64>,
}

/// The settings in force.
#[derive(Debug)]
pub(crate) struct Config {
    /// Where to listen.
    pub(crate) listen: SocketAddr,
    /// State of this server.
    pub(crate) data_dir: PathBuf,
    /// What all servers of a machine share.
    pub(crate) cache_dir: PathBuf,
    /// What isolates.
    pub(crate) engine: EngineChoice,
    /// The domain that clients reach sandboxes under.
    pub(crate) domain: Option<String>,
    /// The program of the gVisor engine; looked up in `PATH` if not set.
    pub(crate) runsc: Option<PathBuf>,
    /// The longest that a sandbox may live.
    pub(crate) max_lifetime: Duration,
}

impl Config {
    /// Puts the command line over the file that it names.
    pub(crate) fn resolve(args: &Serve) -> anyhow::Result<Self> {
        let file = args.config.as_deref().map(read).transpose()?.unwrap_or_default();
        let engine = match (args.engine, file.engine.as_deref()) {
            (Some(engine), _) => engine,
            (None, None | Some("auto")) => EngineChoice::Auto,
            (None, Some("gvisor")) => EngineChoice::Gvisor,
            (None, Some(other)) => bail!("engine in the config must be auto or gvisor, not {other:?}"),
        };
        let hours = file.max_lifetime_hours.unwrap_or(24);
        if !(1..=MAX_LIFETIME_HOURS).contains(&hours) {
            bail!("max_lifetime_hours must be between 1 and {MAX_LIFETIME_HOURS}, not {hours}");
        }
        let default_listen = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 3000));
        let folder = |args: &Option<PathBuf>, file: Option<PathBuf>, default: &str| {
            args.clone().or(file).unwrap_or_else(|| default.into())
        };
        Ok(Self {
            listen: args.listen.or(file.listen).unwrap_or(default_listen),
            data_dir: folder(&args.data_dir, file.data_dir, "/var/lib/sandglass"),
            cache_dir: folder(&args.cache_dir, file.cache_dir, "/var/cache/sandglass"),
            engine,
            domain: file.domain,
            runsc: file.runsc,
            max_lifetime: Duration::from_secs(hours * 3600),
        })
    }
}

fn read(path: &Path) -> anyhow::Result<File> {
    let text = fs::read_to_string(path)?;
    toml::from_str(&text).with_context(|| format!("{} is not a valid config", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(file: &str, listen: Option<&str>) -> anyhow::Result<Config> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, file).unwrap();
        let listen = listen.map(|text| text.parse().unwrap());
        let args =
            Serve { listen, data_dir: None, cache_dir: None, engine: None, config: Some(path), guest: None };
        Config::resolve(&args)
    }

    #[test]
    fn the_command_line_wins_over_the_file_over_the_default() {
        let file = "listen = \"127.0.0.1:1\"\ndata_dir = \"/d\"\nmax_lifetime_hours = 2\n";
        let config = resolve(file, Some("127.0.0.1:2")).unwrap();
        assert_eq!(config.listen.port(), 2);
        assert_eq!(config.data_dir, Path::new("/d"));
        assert_eq!(config.cache_dir, Path::new("/var/cache/sandglass"));
        assert_eq!(config.max_lifetime, Duration::from_secs(7200));
        assert_eq!(resolve(file, None).unwrap().listen.port(), 1);
    }

    #[test]
    fn mistakes_are_named() {
        let error = |file| format!("{:#}", resolve(file, None).unwrap_err());
        assert!(error("lisen = \"127.0.0.1:1\"").contains("lisen"));
        assert!(error("engine = \"docker\"").contains("docker"));
        assert!(error("max_lifetime_hours = 0").contains("between 1 and"));
    }
}
