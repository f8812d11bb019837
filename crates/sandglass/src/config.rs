//! Settings of the server: the command line over the file over the defaults.

mod broker;
pub(crate) mod budgets;
pub(crate) mod models;
mod runs;
pub(crate) mod tls;

use std::collections::{BTreeMap, HashMap};
use std::io::Read as _;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use fs_err as fs;
use sandglass_control::Kept;
use sandglass_control::MAX_POOL;
use sandglass_control::OwnConnection;
use sandglass_egress::policy::{Features, Openings, Operator, Rules};
use sandglass_egress::proxy::Caps;
use sandglass_egress::retention::Retention;
use sandglass_types::Limits;
use serde::Deserialize;

use crate::cli::{Engine, EngineChoice, LogFormat, Serve};
use crate::indexes;
use crate::startup::{Reason, StartupError};
use budgets::Quota;
use models::Models;
use tls::Tls;

/// The longest lifetime that can be configured: a year.
const MAX_LIFETIME_HOURS: u64 = 24 * 365;

/// How many seconds an agent may be silent: enough for a busy machine, and not so many that nobody notices.
const AGENT_SILENCE: RangeInclusive<u64> = 2..=3600;

/// Connections of one sandbox, at a time or in a second. Each costs the server two descriptors.
const CONNECTIONS: RangeInclusive<u64> = 1..=10_000;

/// MiB of something that is kept.
const KEEP_MIB: RangeInclusive<u64> = 1..=1 << 30;

/// Days that something is kept.
const KEEP_DAYS: RangeInclusive<u64> = 1..=3650;

/// How long nobody has used a snapshot when it is compressed, in seconds, where the file does not say: a week. Who has not come
/// back to one by then may as well wait a little.
const COMPRESS_AFTER: u64 = 7 * 24 * 3600;

/// The longest that can be said for that, in seconds: ten years.
const MAX_COMPRESS_AFTER: u64 = 3650 * 24 * 3600;

/// The largest file that is read, in bytes.
const MAX_FILE: u64 = 64 << 10;

/// What the connections of one sandbox may carry, in MiB.
const CARRIED_MIB: RangeInclusive<u64> = 1..=1 << 30;

/// The longest domain, in bytes, its port included (RFC 1035, 2.3.4).
const MAX_DOMAIN: usize = 253 + ":65535".len();

/// What the file may hold. An unknown key is an error: it is a typing mistake or of a newer version.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    listen: Option<SocketAddr>,
    data_dir: Option<PathBuf>,
    cache_dir: Option<PathBuf>,
    engine: Option<String>,
    #[serde(default)]
    unsafe_no_isolation: bool,
    domain: Option<String>,
    runsc: Option<PathBuf>,
    max_lifetime_hours: Option<u64>,
    agent_silence_seconds: Option<u64>,
    log_format: Option<LogFormat>,
    #[serde(default)]
    egress: EgressFile,
    #[serde(default)]
    sandbox: budgets::Sandbox,
    #[serde(default)]
    quota: Quota,
    #[serde(default)]
    volumes: budgets::Volumes,
    #[serde(default)]
    host: budgets::Host,
    #[serde(default)]
    audit: AuditFile,
    #[serde(default)]
    snapshots: SnapshotsFile,
    #[serde(default)]
    runs: runs::File,
    #[serde(default)]
    templates: BTreeMap<String, TemplateFile>,
    tls: Option<tls::File>,
    #[serde(default)]
    broker: broker::File,
    #[serde(default)]
    connections: Vec<broker::ConnectionFile>,
    #[serde(default)]
    models: models::File,
}

/// A table `[templates.NAME]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TemplateFile {
    pool: Option<u32>,
}

/// The table `[snapshots]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SnapshotsFile {
    keep_last: Option<u32>,
    keep_days: Option<u64>,
    compress_after_seconds: Option<u64>,
}

impl SnapshotsFile {
    /// How long nobody has used one when it is compressed; `None` for never, which is written as 0.
    fn compress_after(&self) -> anyhow::Result<Option<Duration>> {
        let seconds = self.compress_after_seconds.unwrap_or(COMPRESS_AFTER);
        if seconds > MAX_COMPRESS_AFTER {
            bail!(
                "snapshots.compress_after_seconds must be between 0 and {MAX_COMPRESS_AFTER}, not {seconds}"
            );
        }
        Ok((seconds > 0).then(|| Duration::from_secs(seconds)))
    }

    fn resolve(&self) -> anyhow::Result<Kept> {
        let days = self.keep_days.unwrap_or(30);
        if !KEEP_DAYS.contains(&days) {
            let (least, most) = (KEEP_DAYS.start(), KEEP_DAYS.end());
            bail!("snapshots.keep_days must be between {least} and {most}, not {days}");
        }
        let last = NonZeroU32::new(self.keep_last.unwrap_or(50))
            .context("snapshots.keep_last must be 1 or more, not 0")?;
        Ok(Kept { last, time: Duration::from_secs(days * 24 * 3600) })
    }
}

/// The table `[audit]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct AuditFile {
    keep_days: Option<u64>,
}

/// The table `[egress]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct EgressFile {
    #[serde(default)]
    ceiling: Rules,
    #[serde(default)]
    open_private: Openings,
    #[serde(default)]
    features: Features,
    max_connections: Option<u32>,
    connections_per_second: Option<u32>,
    max_mib: Option<u64>,
    keep_receipts_days: Option<u64>,
    keep_receipts_mib: Option<u64>,
}

/// What sandboxes may reach, how much of it, and what is kept of that.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Egress {
    /// What they may be allowed to reach.
    pub(crate) operator: Operator,
    /// Connections of one sandbox at a time.
    connections: u32,
    /// Connections that one sandbox may open in a second.
    pub(crate) per_second: u32,
    /// Bytes that all connections of one sandbox may carry in its life, both ways together.
    bytes: u64,
    /// What receipts are kept.
    pub(crate) retention: Retention,
}

impl Egress {
    fn resolve(file: EgressFile) -> anyhow::Result<Self> {
        let connections = file.max_connections.unwrap_or(256);
        let per_second = file.connections_per_second.unwrap_or(200);
        let carried = file.max_mib.unwrap_or(10 << 10);
        let days = file.keep_receipts_days.unwrap_or(7);
        let mib = file.keep_receipts_mib.unwrap_or(1024);
        for (key, value, range) in [
            ("max_connections", u64::from(connections), CONNECTIONS),
            ("connections_per_second", u64::from(per_second), CONNECTIONS),
            ("max_mib", carried, CARRIED_MIB),
            ("keep_receipts_days", days, KEEP_DAYS),
            ("keep_receipts_mib", mib, KEEP_MIB),
        ] {
            if !range.contains(&value) {
                let (least, most) = (range.start(), range.end());
                bail!("egress.{key} must be between {least} and {most}, not {value}");
            }
        }
        Ok(Self {
            operator: Operator::new(file.ceiling, file.open_private, file.features),
            connections,
            per_second,
            bytes: carried << 20,
            retention: Retention { age: Duration::from_secs(days * 24 * 3600), bytes: mib << 20 },
        })
    }

    /// What the proxy holds the connections of one sandbox to.
    pub(crate) fn caps(&self) -> Caps {
        let flows = usize::try_from(self.connections).unwrap_or(usize::MAX);
        Caps { flows, bytes: Some(self.bytes), ..Caps::default() }
    }

    /// Connections of one sandbox that its packet filter lets be. Some have ended for the proxy and not yet for the kernel,
    /// and of one too many the proxy writes a receipt.
    pub(crate) const fn tracked_connections(&self) -> u32 {
        self.connections.saturating_mul(4)
    }
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
    /// What isolates; one that does not was accepted.
    pub(crate) engine: Engine,
    /// The domain that clients reach sandboxes under.
    pub(crate) domain: Option<String>,
    /// How they speak TLS there.
    pub(crate) tls: Tls,
    /// The program of the gVisor engine; looked up in `PATH` if not set.
    pub(crate) runsc: Option<PathBuf>,
    /// The longest that a sandbox may live.
    pub(crate) max_lifetime: Duration,
    /// How long a running sandbox's agent may give no sign of life.
    pub(crate) agent_silence: Duration,
    /// What sandboxes may be allowed to reach.
    pub(crate) egress: Egress,
    /// Which models sandboxes may be granted, if there are any.
    pub(crate) models: Option<Models>,
    /// What each team may have.
    pub(crate) quota: Quota,
    /// What volumes are.
    pub(crate) volumes: budgets::Volumes,
    /// What each sandbox may use.
    pub(crate) limits: Limits,
    /// How long nobody may use one whose client did not say.
    pub(crate) idle_timeout: Option<Duration>,
    /// What this machine gives.
    pub(crate) host: budgets::Host,
    /// How the log is written.
    pub(crate) log_format: LogFormat,
    /// How long rows of the audit are kept.
    pub(crate) keep_audit: Duration,
    /// What runs may be, and what they cost.
    pub(crate) runs: sandglass_control::RunsConfig,
    /// How many unused sandboxes of a template are kept ready.
    pub(crate) pools: HashMap<String, u32>,
    /// Which snapshots are kept that have no name.
    pub(crate) keep_snapshots: Kept,
    /// How long nobody has used a snapshot when it is compressed, if ever.
    pub(crate) compress_after: Option<Duration>,
    /// Where the key is that what teams keep is sealed with; in the data folder if not set.
    pub(crate) master_key_file: Option<PathBuf>,
    /// Connections that sandboxes of every team may be granted.
    pub(crate) connections: Vec<OwnConnection>,
}

/// How large the pools shall be of which the file says that.
fn pools(templates: BTreeMap<String, TemplateFile>) -> anyhow::Result<HashMap<String, u32>> {
    let mut pools = HashMap::new();
    for (name, TemplateFile { pool }) in templates {
        let Some(pool) = pool else { continue };
        if pool > MAX_POOL {
            bail!("templates.{name}.pool must be at most {MAX_POOL}, not {pool}");
        }
        pools.insert(name, pool);
    }
    Ok(pools)
}

/// How the log of a server is to be written, before anything else is known of its configuration. What is wrong with that
/// is said later, in the log.
pub(crate) fn log_format(args: &Serve) -> LogFormat {
    let of_file = || {
        let mut text = String::new();
        fs::File::open(args.config.as_deref()?).ok()?.take(MAX_FILE).read_to_string(&mut text).ok()?;
        text.parse::<toml::Table>().ok()?.remove("log_format")?.try_into().ok()
    };
    args.log_format.or_else(of_file).unwrap_or_default()
}

impl Config {
    /// Puts the command line over the file that it names. `root` says who starts the server.
    pub(crate) fn resolve(args: &Serve, root: bool) -> Result<Self, StartupError> {
        Self::merge(args, root).map_err(|error| StartupError::new(Reason::Config, format!("{error:#}")))
    }

    fn merge(args: &Serve, root: bool) -> anyhow::Result<Self> {
        let file = args.config.as_deref().map(read).transpose()?.unwrap_or_default();
        let engine = match (args.engine, file.engine.as_deref()) {
            (Some(engine), _) => engine,
            (None, None | Some("auto")) => EngineChoice::Auto,
            (None, Some("gvisor")) => EngineChoice::Gvisor,
            (None, Some("fake")) => EngineChoice::Fake,
            (None, Some(other)) => bail!("engine in the config must be auto, gvisor or fake, not {other:?}"),
        };
        let runs = file.runs.resolve()?;
        let pools = pools(file.templates)?;
        let keep_audit = file.audit.keep_days.unwrap_or(90);
        if !KEEP_DAYS.contains(&keep_audit) {
            let (least, most) = (KEEP_DAYS.start(), KEEP_DAYS.end());
            bail!("audit.keep_days must be between {least} and {most}, not {keep_audit}");
        }
        let hours = file.max_lifetime_hours.unwrap_or(24);
        if !(1..=MAX_LIFETIME_HOURS).contains(&hours) {
            bail!("max_lifetime_hours must be between 1 and {MAX_LIFETIME_HOURS}, not {hours}");
        }
        let silence = file.agent_silence_seconds.unwrap_or(30);
        if !AGENT_SILENCE.contains(&silence) {
            let (least, most) = (AGENT_SILENCE.start(), AGENT_SILENCE.end());
            bail!("agent_silence_seconds must be between {least} and {most}, not {silence}");
        }
        let domain = args.domain.clone().or(file.domain);
        if let Some(domain) = domain.as_deref().filter(|domain| !is_domain(domain)) {
            bail!("domain must be a host name, with or without :PORT, not {domain:?}");
        }
        file.quota.check()?;
        file.volumes.check()?;
        file.host.check()?;
        let default_listen = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 3000));
        let listen = args.listen.or(file.listen).unwrap_or(default_listen);
        let accepted = args.unsafe_no_isolation || file.unsafe_no_isolation;
        let engine = engine_for(engine, accepted, listen)?;
        let data_dir = args.data_dir.clone().or(file.data_dir);
        let cache_dir = args.cache_dir.clone().or(file.cache_dir);
        let (data_dir, cache_dir) = if root || engine == Engine::Gvisor {
            (
                data_dir.unwrap_or_else(|| crate::cli::DATA_DIR.into()),
                cache_dir.unwrap_or_else(|| "/var/cache/sandglass".into()),
            )
        } else {
            // Only root may write in those.
            let data_dir = data_dir
                .context("without root, say with --data-dir which folder of yours this server may have")?;
            let cache_dir = cache_dir.unwrap_or_else(|| data_dir.join("cache"));
            (data_dir, cache_dir)
        };
        Ok(Self {
            listen,
            data_dir,
            cache_dir,
            engine,
            tls: Tls::resolve(file.tls, domain.as_deref())?,
            domain,
            runsc: file.runsc,
            max_lifetime: Duration::from_secs(hours * 3600),
            agent_silence: Duration::from_secs(silence),
            egress: Egress::resolve(file.egress)?,
            models: Models::resolve(file.models)?,
            quota: file.quota,
            volumes: file.volumes,
            limits: file.sandbox.limits()?,
            idle_timeout: file.sandbox.idle_timeout(),
            host: file.host,
            log_format: args.log_format.or(file.log_format).unwrap_or_default(),
            keep_audit: Duration::from_secs(keep_audit * 24 * 3600),
            runs,
            pools,
            keep_snapshots: file.snapshots.resolve()?,
            compress_after: file.snapshots.compress_after()?,
            master_key_file: file.broker.master_key_file,
            connections: broker::resolve(file.connections)?,
        })
    }
}

/// The engine that a choice means. The one that isolates nothing is never meant by accident: somebody must have
/// `accepted` it, and nobody else may reach it.
fn engine_for(choice: EngineChoice, accepted: bool, listen: SocketAddr) -> anyhow::Result<Engine> {
    match choice {
        EngineChoice::Auto | EngineChoice::Gvisor => Ok(Engine::Gvisor),
        EngineChoice::Fake if !accepted => bail!(
            "the fake engine isolates nothing: what runs in its sandboxes can do all that you can; if you want that, \
             for development, add --unsafe-no-isolation"
        ),
        EngineChoice::Fake if !listen.ip().is_loopback() => bail!(
            "the fake engine isolates nothing, so nobody else may reach its server: listen on a loopback address, as \
             in --listen 127.0.0.1:3000, and not on {listen}"
        ),
        EngineChoice::Fake => Ok(Engine::Fake),
    }
}

/// Whether clients can build names below it: labels of letters, digits and dashes, and perhaps a port.
fn is_domain(text: &str) -> bool {
    let (name, port) = match text.split_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (text, None),
    };
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    text.len() <= MAX_DOMAIN
        && name.split('.').all(is_label)
        && port.is_none_or(|port| port.parse::<std::num::NonZeroU16>().is_ok())
}

fn read(path: &Path) -> anyhow::Result<File> {
    let mut text = String::new();
    fs::File::open(path)?.take(MAX_FILE + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        bail!("{} is no config: it has more than {} KiB", path.display(), MAX_FILE >> 10);
    }
    let invalid = || format!("{} is not a valid config", path.display());
    let mut file: toml::Table = toml::from_str(&text).with_context(invalid)?;
    match packages_from_host(&mut file) {
        // From the text, so that errors say in which line.
        None => toml::from_str(&text).with_context(invalid),
        Some(packages) => {
            let found = indexes::of_this_machine(std::env::var_os("HOME").map(PathBuf::from).as_deref());
            tracing::info!(?found, "the feature packages allows where this machine gets its own from");
            *packages = toml::Value::try_from(indexes::feature(&found))?;
            file.try_into().with_context(invalid)
        }
    }
}

/// The feature `packages`, if it is to be made of this machine's settings.
fn packages_from_host(file: &mut toml::Table) -> Option<&mut toml::Value> {
    let packages = file.get_mut("egress")?.get_mut("features")?.get_mut("packages")?;
    let from_host = packages.as_table()?.len() == 1 && packages.get("from")?.as_str()? == "host";
    from_host.then_some(packages)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(file: &str, listen: Option<&str>) -> anyhow::Result<Config> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, file).unwrap();
        let listen = listen.map(|text| text.parse().unwrap());
        let args = Serve { listen, config: Some(path), ..Serve::default() };
        Ok(Config::resolve(&args, true)?)
    }

    #[test]
    fn what_isolates_nothing_is_never_taken_by_accident() {
        let (local, open) = (SocketAddr::from(([127, 0, 0, 1], 1)), SocketAddr::from(([0, 0, 0, 0], 1)));
        let refused =
            |accepted, listen| engine_for(EngineChoice::Fake, accepted, listen).unwrap_err().to_string();
        assert!(refused(false, local).contains("add --unsafe-no-isolation"));
        assert!(refused(false, open).contains("add --unsafe-no-isolation"));
        for listen in ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "[::ffff:192.0.2.1]:1"] {
            assert!(refused(true, listen.parse().unwrap()).contains("loopback"), "{listen}");
        }
        for listen in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1"] {
            assert_eq!(engine_for(EngineChoice::Fake, true, listen.parse().unwrap()).unwrap(), Engine::Fake);
        }
        for choice in [EngineChoice::Auto, EngineChoice::Gvisor] {
            for (accepted, listen) in [(false, local), (false, open), (true, local), (true, open)] {
                assert_eq!(engine_for(choice, accepted, listen).unwrap(), Engine::Gvisor);
            }
        }
        // The same in a file.
        let fake = "engine = \"fake\"\n";
        assert!(resolve(fake, None).is_err());
        let accepted = format!("{fake}unsafe_no_isolation = true\n");
        assert!(resolve(&accepted, Some("0.0.0.0:1")).is_err());
        assert_eq!(resolve(&accepted, None).unwrap().engine, Engine::Fake);
        assert_eq!(resolve("unsafe_no_isolation = true\n", None).unwrap().engine, Engine::Gvisor);
    }

    #[test]
    fn without_root_it_wants_a_folder_of_its_own() {
        let mut args = Serve { data_dir: Some("/d".into()), unsafe_no_isolation: true, ..Serve::default() };
        assert_eq!(Config::resolve(&args, false).unwrap().engine, Engine::Gvisor);
        args.engine = Some(EngineChoice::Fake);
        let config = Config::resolve(&args, false).unwrap();
        assert_eq!((config.data_dir, config.cache_dir), ("/d".into(), "/d/cache".into()));
        args.data_dir = None;
        assert!(Config::resolve(&args, false).unwrap_err().to_string().contains("--data-dir"));
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
    fn the_log_is_text_unless_somebody_wants_json() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let written = |file: &str, log_format| {
            std::fs::write(&path, file).unwrap();
            let args = Serve { log_format, config: Some(path.clone()), ..Serve::default() };
            let early = super::log_format(&args);
            if let Ok(config) = Config::resolve(&args, true) {
                assert_eq!(config.log_format, early);
            }
            early
        };
        let json = "log_format = \"json\"\n";
        assert_eq!(written("", None), LogFormat::Text);
        assert_eq!(written(json, None), LogFormat::Json);
        assert_eq!(written(json, Some(LogFormat::Text)), LogFormat::Text);
        assert_eq!(written("nonsense", Some(LogFormat::Json)), LogFormat::Json);
        assert_eq!(written("nonsense", None), LogFormat::Text);
    }

    const EGRESS: &str = r#"
        [egress]
        open_private = ["10.20.0.0/16"]

        [[egress.ceiling]]
        id = "metadata-service"
        deny = "secret.example.com"

        [[egress.ceiling]]
        allow = "*.example.com"
        ports = [443, "8000-8010"]

        [[egress.features.packages.rules]]
        allow = "packages.example.com"
    "#;

    #[test]
    fn the_ceiling_is_empty_unless_the_file_has_one() {
        assert_eq!(resolve("", None).unwrap().egress.operator, Operator::default());
        let egress = resolve(EGRESS, None).unwrap().egress.operator;
        assert_eq!(egress.openings().barrier().opened, ["10.20.0.0/16".parse().unwrap()]);
        let written = serde_json::to_value(&egress).unwrap();
        assert_eq!(written["ceiling"][0]["deny"], "secret.example.com");
        assert_eq!(written["features"]["packages"]["rules"][0]["allow"], "packages.example.com");
        assert_eq!(egress.warnings().len(), 2, "{:?}", egress.warnings());
    }

    #[test]
    fn connections_are_bounded_unless_the_file_says_more() {
        let egress = resolve("", None).unwrap().egress;
        assert_eq!(
            (egress.caps(), egress.tracked_connections(), egress.per_second),
            (Caps { bytes: Some(10 << 30), ..Caps::default() }, 1024, 200)
        );
        let file = "[egress]\nmax_connections = 2000\nconnections_per_second = 500\nkeep_receipts_days = 2\nkeep_receipts_mib = 5\n";
        let egress = resolve(file, None).unwrap().egress;
        assert_eq!((egress.tracked_connections(), egress.per_second), (8000, 500));
        assert_eq!(egress.caps().flows, 2000);
        let little = resolve("[egress]\nmax_mib = 3", None).unwrap().egress;
        assert_eq!(little.caps().bytes, Some(3 << 20));
        assert_eq!(egress.retention, Retention { age: Duration::from_hours(48), bytes: 5 << 20 });
    }

    #[test]
    fn the_feature_packages_can_be_made_of_the_machine_s_own_settings() {
        let from = |what: &str| format!("[egress.features.packages]\nfrom = \"{what}\"\n");
        let egress = resolve(&from("host"), None).unwrap().egress.operator;
        let written = serde_json::to_value(&egress).unwrap();
        assert!(written["features"]["packages"]["rules"].is_array(), "{written}");
        for wrong in
            [from("elsewhere"), from("host") + "rules = []\n", from("host").replace("packages", "models")]
        {
            assert!(format!("{:#}", resolve(&wrong, None).unwrap_err()).contains("from"), "{wrong}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        let error = |file: &str| format!("{:#}", resolve(file, None).unwrap_err());
        assert!(error("lisen = \"127.0.0.1:1\"").contains("lisen"));
        assert!(error("engine = \"docker\"").contains("docker"));
        assert!(error("log_format = \"xml\"").contains("xml"));
        assert!(error("[audit]\nkeep_days = 0").contains("audit.keep_days"));
        assert!(error("[snapshots]\nkeep_days = 0").contains("snapshots.keep_days"));
        assert!(error("[snapshots]\nkeep_last = 0").contains("snapshots.keep_last"));
        assert!(error("[snapshots]\ncompress_after_seconds = 999999999").contains("between 0 and"));
        assert!(error("max_lifetime_hours = 0").contains("between 1 and"));
        assert!(error("agent_silence_seconds = 1").contains("between 2 and"));
        assert!(error("domain = \"a b/c\"").contains("a b/c"));
        assert!(error("[tls]\nplain = \"nobody\"").contains("set `domain`"));
        assert!(error("domain = \"a.test\"\n[tls]\nkey = \"k\"").contains("given together"));
        assert!(error("domain = \"a.test\"\n[tls]\nplain = \"some\"").contains("everybody"));
        assert!(error("[egress]\nmax_connections = 0").contains("egress.max_connections must be between"));
        assert!(error("[egress]\nmax_mib = 0").contains("egress.max_mib must be between"));
        assert!(error("[egress]\nkeep_receipts_days = 0").contains("egress.keep_receipts_days"));
        assert!(error("[egress]\nmax_connection = 1").contains("max_connection"));
        assert!(error("[sandbox]\ncpus = 0").contains("cpus must be between 1 and 64"));
        assert!(error("[sandbox]\ncores = 1").contains("cores"));
        assert!(error("[quota]\nsandboxes = 0").contains("quota.sandboxes must be between 1 and"));
        assert!(error("[quota]\ncpus = -1").contains("cpus"));
        assert!(error("[quota]\nsandboxs = 1").contains("sandboxs"));
        assert!(error("[quota]\nvolumes = 0").contains("quota.volumes must be between 1 and"));
        assert!(error("[volumes]\ndefault_mib = 1").contains("volumes.default_mib must be between 16 and"));
        assert!(error("[host]\nmemory_mib = 0").contains("host.memory_mib must be between 1 and"));
        assert!(error("[host]\ndisk_mib = \"all\"").contains("disk_mib"));
        assert!(error("[host]\nloops = 1").contains("loops"));
        let egress = |from: &str, to: &str| error(&EGRESS.replace(from, to));
        assert!(egress("10.20.0.0/16", "169.254.0.0/16").contains("can't be opened"));
        assert!(egress("10.20.0.0/16", "127.0.0.0/8").contains("can't be opened"));
        assert!(egress("open_private", "open_privat").contains("open_privat"));
        assert!(egress("8000-8010", "https").contains("a port is a number"));
        assert!(egress("allow = \"packages", "deny = \"packages").contains("a feature only allows"));
        assert!(
            egress("deny = \"secret", "allow = \"a.example\"\ndeny = \"secret").contains("metadata-service")
        );
        assert!(error(&format!("#{}", "x".repeat(70_000))).contains("64 KiB"));
    }

    #[test]
    fn a_file_without_end_is_refused() {
        let error = read(Path::new("/dev/zero")).unwrap_err();
        assert!(error.to_string().contains("64 KiB"), "{error}");
    }

    #[test]
    fn domains() {
        for good in ["sandboxes.example.com", "localhost:3000", "A-b.c", "x"] {
            assert!(is_domain(good), "{good}");
        }
        let long = "a.".repeat(130) + "a";
        for bad in
            ["", ".", "a..b", "a b", "a/b", "-a", "a-", "a:", "a:0", "a:99999", "http://a", "*.a", &long]
        {
            assert!(!is_domain(bad), "{bad}");
        }
    }
}
