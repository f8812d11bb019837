//! Teams and keys, by hand: what `sandglass team` and `sandglass key` do with the store.

use std::io::Write;

use anyhow::{Context as _, bail};
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use data_encoding::HEXLOWER;
use rand::TryRng as _;
use sandglass_store::{ApiKey, AuditEntry, Store, StoreError, Team};
use sandglass_types::{KeyId, Timestamp};
use serde::Serialize;

/// What every secret begins with: E2B's SDKs check it.
const PREFIX: &str = "e2b_";

/// Random bytes in a secret.
const RANDOM_LEN: usize = 20;

/// Characters of a secret that are kept, to tell keys apart.
const SUFFIX_LEN: usize = 4;

/// Longest target of a row of the audit, in bytes.
const MAX_TARGET: usize = 128;

/// Longest name of a team or key, in bytes.
const MAX_NAME_LEN: usize = 64;

/// How to say what was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// For people.
    Text,
    /// One JSON document.
    Json,
}

/// The secret of a key. It is shown once and kept nowhere.
struct Secret(String);

impl Secret {
    /// Takes it from the operating system.
    fn random() -> anyhow::Result<Self> {
        let mut bytes = [0; RANDOM_LEN];
        rand::rngs::SysRng.try_fill_bytes(&mut bytes).context("the system gave no random bytes")?;
        Ok(Self(format!("{PREFIX}{}", HEXLOWER.encode(&bytes))))
    }

    fn suffix(&self) -> &str {
        &self.0[self.0.len() - SUFFIX_LEN..]
    }
}

/// A new key and, this one time, its secret.
#[derive(Serialize)]
struct NewKey<'a> {
    #[serde(flatten)]
    key: &'a ApiKey,
    secret: &'a str,
}

/// Adds a team.
///
/// # Errors
/// The name is taken or malformed, or the store failed.
pub(crate) async fn team_create(
    store: &dyn Store,
    name: &str,
    now: Timestamp,
    format: Format,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let team = store.create_team(checked_name(name)?, now).await?;
    match format {
        Format::Json => json(&team, out),
        Format::Text => Ok(writeln!(out, "team {} has id {}", team.name, team.id)?),
    }
}

/// Lists teams.
///
/// # Errors
/// The store failed.
pub(crate) async fn team_list(
    store: &dyn Store,
    format: Format,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let teams = store.teams().await?;
    if format == Format::Json {
        return json(&teams, out);
    }
    let rows = teams.iter().map(|team| {
        let revoked = when(team.revoked_at);
        [team.id.to_string(), shown(&team.name), team.created_at.to_string(), revoked]
    });
    table(["ID", "NAME", "CREATED", "REVOKED"], rows, out)
}

/// Ends a team, by name or id.
///
/// # Errors
/// There is none, it was ended before, or the store failed.
pub(crate) async fn team_revoke(
    store: &dyn Store,
    team: &str,
    now: Timestamp,
    format: Format,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let team = find_team(store, team).await?;
    if !store.revoke_team(team.id, now).await? {
        bail!("team {} was revoked before", shown(&team.name));
    }
    match format {
        Format::Json => json(&Team { revoked_at: Some(now), ..team }, out),
        Format::Text => Ok(writeln!(out, "team {} is revoked, and all its keys with it", team.name)?),
    }
}

/// Makes a key for a team, by name or id, and writes its secret: there is no second time.
///
/// # Errors
/// There is no such team or it was revoked, the name is malformed, or the store failed.
pub(crate) async fn key_create(
    store: &dyn Store,
    team: &str,
    name: &str,
    operator: bool,
    now: Timestamp,
    format: Format,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let team = find_team(store, team).await?;
    let (key, secret) = new_key(store, &team, name, operator, now).await?;
    match format {
        Format::Json => json(&NewKey { key: &key, secret: &secret }, out),
        Format::Text => Ok(writeln!(out, "{secret}")?),
    }
}

/// Makes a key for a team. Returns it with its secret, which is kept nowhere.
///
/// # Errors
/// The team was revoked, the name is malformed, or the store failed.
pub(crate) async fn new_key(
    store: &dyn Store,
    team: &Team,
    name: &str,
    operator: bool,
    now: Timestamp,
) -> anyhow::Result<(ApiKey, String)> {
    let secret = Secret::random()?;
    let key = ApiKey {
        id: KeyId::random(),
        team: team.id,
        name: checked_name(name)?.to_owned(),
        digest: ApiKey::digest_of(&secret.0),
        suffix: secret.suffix().to_owned(),
        operator,
        created_at: now,
        last_used_at: None,
        revoked_at: None,
    };
    match store.create_key(&key).await {
        Err(StoreError::Missing { .. }) => bail!("team {} was revoked", shown(&team.name)),
        outcome => outcome?,
    }
    Ok((key, secret.0))
}

/// Lists keys without their secrets, of one team or of all.
///
/// # Errors
/// There is no such team, or the store failed.
pub(crate) async fn key_list(
    store: &dyn Store,
    team: Option<&str>,
    format: Format,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let team = match team {
        Some(team) => Some(find_team(store, team).await?.id),
        None => None,
    };
    let keys = store.keys(team).await?;
    if format == Format::Json {
        return json(&keys, out);
    }
    let teams = store.teams().await?;
    let rows = keys.iter().map(|key| {
        let team = teams.iter().find(|team| team.id == key.team);
        [
            key.id.to_string(),
            team.map_or_else(|| key.team.to_string(), |team| shown(&team.name)),
            shown(&key.name),
            format!("{PREFIX}…{}", shown(&key.suffix)),
            if key.operator { "yes" } else { "-" }.to_owned(),
            key.created_at.to_string(),
            when(key.last_used_at),
            when(key.revoked_at),
        ]
    });
    table(["ID", "TEAM", "NAME", "KEY", "OPERATOR", "CREATED", "LAST USED", "REVOKED"], rows, out)
}

/// Ends a key, by its id.
///
/// # Errors
/// There is none, it was ended before, or the store failed.
pub(crate) async fn key_revoke(
    store: &dyn Store,
    key: &str,
    now: Timestamp,
    format: Format,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let id: KeyId = key.parse()?;
    let Some(key) = store.keys(None).await?.into_iter().find(|key| key.id == id) else {
        bail!("there is no key {id}");
    };
    if !store.revoke_key(id, now).await? {
        bail!("key {id} was revoked before");
    }
    match format {
        Format::Json => json(&ApiKey { revoked_at: Some(now), ..key }, out),
        Format::Text => Ok(writeln!(out, "key {id} is revoked")?),
    }
}

/// Writes down what a verb of the command line did, or why it did nothing.
///
/// # Errors
/// The store failed.
pub(crate) async fn record(
    store: &dyn Store,
    action: &str,
    target: &str,
    now: Timestamp,
    outcome: &anyhow::Result<()>,
) -> Result<(), StoreError> {
    let entry = AuditEntry {
        at: now,
        team: None,
        key: None,
        request: format!("cli-{}", std::process::id()),
        action: action.to_owned(),
        target: Some(target[..target.floor_char_boundary(MAX_TARGET)].to_owned()),
        status: if outcome.is_ok() { 200 } else { 400 },
        detail: outcome.as_ref().err().map(|error| format!("{error:#}")),
    };
    store.audit(&entry).await
}

/// Lists the last calls that changed something, or were to; oldest first.
///
/// # Errors
/// The store failed.
pub(crate) async fn audit(
    store: &dyn Store,
    since: Option<Timestamp>,
    limit: u32,
    format: Format,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let entries = store.audited(since, limit).await?;
    if format == Format::Json {
        return json(&entries, out);
    }
    let some = |text: Option<String>| text.map_or_else(|| "-".to_owned(), |text| shown(&text));
    let rows = entries.into_iter().map(|entry| {
        [
            entry.at.to_string(),
            some(entry.team.map(|team| team.to_string())),
            some(entry.key.map(|key| key.to_string())),
            shown(&entry.request),
            shown(&entry.action),
            some(entry.target),
            entry.status.to_string(),
            some(entry.detail),
        ]
    });
    table(["TIME", "TEAM", "KEY", "REQUEST", "ACTION", "TARGET", "STATUS", "WHY NOT"], rows, out)
}

/// A team by its id or name.
async fn find_team(store: &dyn Store, wanted: &str) -> anyhow::Result<Team> {
    let teams = store.teams().await?;
    let by_id = wanted.parse().ok().and_then(|id| teams.iter().find(|team| team.id == id));
    match by_id.or_else(|| teams.iter().find(|team| team.name == wanted)) {
        Some(team) => Ok(team.clone()),
        None => bail!("there is no team {}", shown(wanted)),
    }
}

/// Names appear in terminals and logs, and a name that reads as an id could be taken for one.
fn checked_name(name: &str) -> anyhow::Result<&str> {
    let plain = !name.is_empty() && name.len() <= MAX_NAME_LEN && !name.chars().any(char::is_control);
    if !plain || name.trim() != name {
        bail!("a name has 1 to {MAX_NAME_LEN} bytes, no control characters, and no blank at its ends");
    }
    if name.parse::<KeyId>().is_ok() {
        bail!("a name must not look like an id");
    }
    Ok(name)
}

fn when(time: Option<Timestamp>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| time.to_string())
}

/// A text fit for a terminal.
fn shown(text: &str) -> String {
    text.escape_debug().to_string()
}

fn json(value: &impl Serialize, out: &mut dyn Write) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    Ok(out.write_all(b"\n")?)
}

fn table<const N: usize>(
    header: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header);
    table.add_rows(rows);
    Ok(writeln!(out, "{}", table.trim_fmt())?)
}

#[cfg(test)]
mod tests;
