//! Which models sandboxes may be granted, who runs them, and what they may cost.

use std::collections::{BTreeMap, HashMap};
use std::io::Read as _;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use fs_err as fs;
use http::{HeaderName, HeaderValue};
use rustix::fs::{Mode, OFlags};
use sandglass_gateway::config::{Caps, Key, Limits, Provider};
use sandglass_models::Dialect;
use sandglass_models::price::{Model, Prices};
use sandglass_store::SpendCaps;
use sandglass_types::Micros;
use serde::Deserialize;

/// Calls: of one token, or of all; at a time, or in a minute.
const CALLS: RangeInclusive<u64> = 1..=10_000;

/// Money, in micro-dollars: up to a million dollars.
const MONEY: RangeInclusive<u64> = 1..=1_000_000_000_000;

/// The longest name of a model or of a provider, in bytes.
const MAX_NAME: usize = 128;

/// The longest key, in bytes.
const MAX_KEY: u64 = 4096;

/// The table `[models]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    #[serde(default)]
    providers: BTreeMap<String, ProviderFile>,
    #[serde(default)]
    offered: BTreeMap<String, Model>,
    max_output: Option<u64>,
    calls_at_once: Option<u64>,
    calls_per_minute: Option<u64>,
    calls_together: Option<u64>,
    max_budget_micros: Option<u64>,
    team_day_micros: Option<u64>,
    team_month_micros: Option<u64>,
    #[serde(default)]
    teams: HashMap<String, TeamFile>,
}

/// A table `[models.providers.NAME]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProviderFile {
    base_url: String,
    dialects: Vec<Dialect>,
    key_file: Option<PathBuf>,
    key_header: Option<String>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

/// A table `[models.teams.NAME]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TeamFile {
    day_micros: Option<u64>,
    month_micros: Option<u64>,
}

/// What is in force.
#[derive(Debug)]
pub(crate) struct Models {
    providers: Vec<(String, Provider, Option<PathBuf>, Option<HeaderName>)>,
    /// Those that there are, and what they cost.
    pub(crate) prices: Arc<Prices>,
    /// What calls may take.
    pub(crate) limits: Limits,
    /// What teams may spend.
    pub(crate) caps: Caps,
    /// The most that one budget can be.
    pub(crate) most: Micros,
}

impl Models {
    /// `None` if no model is offered.
    pub(super) fn resolve(file: File) -> anyhow::Result<Option<Self>> {
        if file.offered.is_empty() {
            return Ok(None);
        }
        let named = |table: &str, name: &str| {
            ensure!(
                (1..=MAX_NAME).contains(&name.len()) && !name.contains(char::is_control),
                "models.{table}: a name has 1 to {MAX_NAME} bytes, and no control characters"
            );
            Ok(())
        };
        for (name, model) in &file.offered {
            for name in std::iter::once(name).chain(&model.aliases) {
                named("offered", name)?;
            }
            ensure!(
                file.providers.contains_key(&model.provider),
                "models.offered.{name}: there is no models.providers.{}",
                model.provider
            );
        }
        let mut providers = Vec::new();
        for (name, provider) in file.providers {
            named("providers", &name)?;
            providers.push(resolve_provider(name, provider)?);
        }
        let number = |key: &str, value: Option<u64>, default: u64, range: RangeInclusive<u64>| {
            let value = value.unwrap_or(default);
            let (least, most) = (range.start(), range.end());
            ensure!(range.contains(&value), "models.{key} must be between {least} and {most}, not {value}");
            Ok(value)
        };
        let money = |key: &str, value: Option<u64>| {
            value.map(|value| number(key, Some(value), 0, MONEY).map(Micros)).transpose()
        };
        let count = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
        let per_minute = number("calls_per_minute", file.calls_per_minute, 300, CALLS)?;
        let limits = Limits {
            output: number("max_output", file.max_output, 32_000, 1..=10_000_000)?,
            at_once: count(number("calls_at_once", file.calls_at_once, 8, CALLS)?),
            per_minute: u32::try_from(per_minute).ok().and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN),
            together: count(number("calls_together", file.calls_together, 512, CALLS)?),
        };
        let each = SpendCaps {
            day: money("team_day_micros", file.team_day_micros)?,
            month: money("team_month_micros", file.team_month_micros)?,
        };
        let teams = file.teams.into_iter().map(|(name, own)| {
            // What is not said of a team holds as for all.
            let caps = SpendCaps {
                day: money(&format!("teams.{name}.day_micros"), own.day_micros)?.or(each.day),
                month: money(&format!("teams.{name}.month_micros"), own.month_micros)?.or(each.month),
            };
            Ok((name, caps))
        });
        let caps = Caps { each, teams: teams.collect::<anyhow::Result<_>>()? };
        let most = Micros(number("max_budget_micros", file.max_budget_micros, 100_000_000, MONEY)?);
        let prices = Arc::new(Prices::new(file.offered).context("models.offered")?);
        Ok(Some(Self { providers, prices, limits, caps, most }))
    }

    /// The providers with their keys, which are read now: this half will see no file of the machine any more.
    pub(crate) fn providers(&self) -> anyhow::Result<BTreeMap<String, Provider>> {
        let open =
            |(name, provider, file, header): &(String, Provider, Option<PathBuf>, Option<HeaderName>)| {
                let key = file.as_deref().map(|file| {
                    let secret = key(file).with_context(|| format!("models.providers.{name}.key_file"))?;
                    Ok::<_, anyhow::Error>(Key { secret: secret.into(), header: header.clone() })
                });
                Ok((name.clone(), Provider { key: key.transpose()?, ..provider.clone() }))
            };
        self.providers.iter().map(open).collect()
    }
}

fn resolve_provider(
    name: String,
    file: ProviderFile,
) -> anyhow::Result<(String, Provider, Option<PathBuf>, Option<HeaderName>)> {
    let base = file.base_url.trim_end_matches('/');
    if base.ends_with("/v1") {
        bail!("models.providers.{name}.base_url: leave /v1 out, it is put behind it");
    }
    if file.dialects.is_empty() {
        bail!("models.providers.{name}.dialects: name at least one of messages, chat, responses and images");
    }
    let base = base.parse().with_context(|| format!("models.providers.{name}.base_url"))?;
    let header = |key: &str| {
        HeaderName::try_from(key).with_context(|| format!("models.providers.{name}: {key:?} is no header"))
    };
    let headers = file.headers.iter().map(|(key, value)| {
        let value = HeaderValue::from_str(value);
        Ok((header(key)?, value.with_context(|| format!("models.providers.{name}.headers.{key}"))?))
    });
    let headers = headers.collect::<anyhow::Result<_>>()?;
    let key_header = file.key_header.as_deref().map(header).transpose()?;
    let provider = Provider { base, dialects: file.dialects, key: None, headers };
    Ok((name, provider, file.key_file, key_header))
}

/// What is in the file of a key: one that nobody else can read, or it is no secret.
fn key(path: &Path) -> anyhow::Result<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::empty()).with_context(|| path.display().to_string())?;
    let file = fs::File::from_parts(file.into(), path);
    let about = file.metadata()?;
    ensure!(about.is_file(), "{} is no file", path.display());
    ensure!(about.mode() & 0o077 == 0, "{} can be read by others: `chmod 600` it", path.display());
    let mut text = String::new();
    file.take(MAX_KEY + 1).read_to_string(&mut text).context("it holds no key")?;
    let key = text.trim();
    ensure!(!key.is_empty() && text.len() as u64 <= MAX_KEY, "{} holds no key", path.display());
    Ok(key.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use secrecy::ExposeSecret as _;

    use super::*;

    const ONE: &str = r#"
[providers.one]
base_url = "https://api.example/"
dialects = ["messages", "chat"]
headers = { x-team = "ops" }
[offered.large]
provider = "one"
price = { input = 4_000_000, output = 20_000_000, max_input = 200_000, max_output = 64_000 }
"#;

    fn resolve(text: &str) -> anyhow::Result<Option<Models>> {
        Models::resolve(toml::from_str(text)?)
    }

    #[test]
    fn what_is_offered_is_there_with_its_price() {
        assert!(resolve("").unwrap().is_none());
        let models = resolve(ONE).unwrap().unwrap();
        assert!(models.prices.model("large").is_some());
        assert_eq!((models.limits.at_once, models.limits.output), (8, 32_000));
        assert_eq!(models.caps.each, SpendCaps::default());
        let providers = models.providers().unwrap();
        assert_eq!(providers["one"].base.to_string(), "https://api.example/");
        let more = format!("max_output = 5\nteam_day_micros = 7\n{ONE}[teams.acme]\nmonth_micros = 9\n");
        let models = resolve(&more).unwrap().unwrap();
        assert_eq!(models.limits.output, 5);
        assert_eq!(models.caps.each.day, Some(Micros(7)));
        assert_eq!(models.caps.teams["acme"], SpendCaps { day: Some(Micros(7)), month: Some(Micros(9)) });
        let more = format!("team_day_micros = 7\n{ONE}[teams.acme]\nday_micros = 9\n");
        let models = resolve(&more).unwrap().unwrap();
        assert_eq!(models.caps.teams["acme"], SpendCaps { day: Some(Micros(9)), month: None });
    }

    #[test]
    fn what_makes_no_sense_is_said_with_its_place() {
        for (text, expected) in [
            (ONE.replace("provider = \"one\"", "provider = \"two\""), "no models.providers.two"),
            (ONE.replace("example/", "example/v1"), "leave /v1 out"),
            (ONE.replace(r#"["messages", "chat"]"#, "[]"), "at least one"),
            (ONE.replace("x-team", "\"x team\""), "is no header"),
            (ONE.replace("output = 20_000_000,", ""), "missing field `output`"),
            (ONE.replace("input = 4_000_000", "input = 4.5"), "invalid type"),
            (format!("calls_at_once = 0\n{ONE}"), "models.calls_at_once must be between"),
            (format!("team_day_micros = 0\n{ONE}"), "models.team_day_micros"),
            (format!("surprise = 0\n{ONE}"), "surprise"),
            (ONE.replace("max_output = 64_000", "max_output = 0"), "max_output"),
        ] {
            let error = format!("{:#}", resolve(&text).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_key_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        std::fs::write(&file, "sk-1\n").unwrap();
        let text = ONE.replace("dialects", &format!("key_file = {file:?}\ndialects"));
        let models = resolve(&text).unwrap().unwrap();
        let set = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        set(0o640);
        let error = format!("{:#}", models.providers().unwrap_err());
        assert!(error.contains("models.providers.one.key_file") && error.contains("chmod 600"), "{error}");
        set(0o600);
        let providers = models.providers().unwrap();
        assert_eq!(providers["one"].key.as_ref().unwrap().secret.expose_secret(), "sk-1");
        assert!(!format!("{providers:?}").contains("sk-1"));
        std::fs::write(&file, "\n").unwrap();
        assert!(format!("{:#}", models.providers().unwrap_err()).contains("holds no key"));
        std::fs::remove_file(&file).unwrap();
        assert!(format!("{:#}", models.providers().unwrap_err()).contains("No such file"));
    }
}
