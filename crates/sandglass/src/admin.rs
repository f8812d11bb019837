//! Teams and keys, by hand: what `sandglass team` and `sandglass key` do with the store.

use std::io::Write;

use anyhow::bail;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use sandglass_control::{KEY_PREFIX, NewKey};
use sandglass_store::{ApiKey, AuditEntry, Store, StoreError, Team};
use sandglass_types::{KeyId, Name, Timestamp};
use serde::Serialize;

/// Longest target of a row of the audit, in bytes.
const MAX_TARGET: usize = 128;

/// How to say what was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// For people.
    Text,
    /// One JSON document.
    Json,
}

/// A new key and, this one time, its secret.
#[derive(Serialize)]
struct Shown<'a> {
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
    let team = store.create_team(name.parse::<Name>()?.as_str(), now).await?;
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
    let new = new_key(store, &team, name, operator, now).await?;
    match format {
        Format::Json => json(&Shown { key: &new.key, secret: &new.secret }, out),
        Format::Text => Ok(writeln!(out, "{}", new.secret)?),
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
) -> anyhow::Result<NewKey> {
    let new = NewKey::random(team.id, name.parse()?, operator, None, now)?;
    match store.create_key(&new.key).await {
        Err(StoreError::Missing { .. }) => bail!("team {} was revoked", shown(&team.name)),
        outcome => outcome?,
    }
    Ok(new)
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
            format!("{KEY_PREFIX}…{}", shown(&key.suffix)),
            if key.operator { "yes" } else { "-" }.to_owned(),
            key.created_at.to_string(),
            when(key.last_used_at),
            when(key.revoked_at),
            key.made_by.map_or_else(|| "-".to_owned(), |by| by.to_string()),
        ]
    });
    table(["ID", "TEAM", "NAME", "KEY", "OPERATOR", "CREATED", "LAST USED", "REVOKED", "MADE BY"], rows, out)
}

/// Ends a key, by its id, and with `with_made` all that were made with it over the API, and with those.
///
/// # Errors
/// There is none, it was ended before and nothing else is to be ended, or the store failed.
pub(crate) async fn key_revoke(
    store: &dyn Store,
    key: &str,
    with_made: bool,
    now: Timestamp,
    format: Format,
    out: &mut (dyn Write + Send),
) -> anyhow::Result<()> {
    let id: KeyId = key.parse()?;
    let Some(key) = store.keys(None).await?.into_iter().find(|key| key.id == id) else {
        bail!("there is no key {id}");
    };
    let mut ended = Vec::new();
    if store.revoke_key(id, now).await? {
        ended.push(ApiKey { revoked_at: Some(now), ..key });
    }
    // One that is used meanwhile makes no other once it is ended itself, so there is a last time.
    let working = async || Ok::<_, StoreError>(made_with(&store.keys(None).await?, id));
    let mut left = working().await?;
    while with_made && !left.is_empty() {
        for key in left {
            store.revoke_key(key.id, now).await?;
            ended.push(ApiKey { revoked_at: Some(now), ..key });
        }
        left = working().await?;
    }
    if ended.is_empty() {
        bail!("key {id} was revoked before");
    }
    if format == Format::Json {
        return json(&ended, out);
    }
    for key in &ended {
        writeln!(out, "key {} is revoked", key.id)?;
    }
    if !left.is_empty() {
        writeln!(
            out,
            "{} keys that were made with it work on: to end them too, say this once more with --with-made",
            left.len()
        )?;
    }
    Ok(())
}

/// The keys that work of those that were made with one, or with one of those. Pure.
fn made_with(keys: &[ApiKey], id: KeyId) -> Vec<ApiKey> {
    let mut found = vec![id];
    let mut at = 0;
    while let Some(by) = found.get(at).copied() {
        let made = keys.iter().filter(|key| key.made_by == Some(by)).map(|key| key.id);
        let new: Vec<_> = made.filter(|made| !found.contains(made)).collect();
        found.extend(new);
        at += 1;
    }
    keys.iter().filter(|key| found[1..].contains(&key.id) && key.revoked_at.is_none()).cloned().collect()
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
