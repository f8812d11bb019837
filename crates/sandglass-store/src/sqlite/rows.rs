//! Between columns and typed values, strictly: what can't have been written by us is an error, never a default.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use sandglass_broker::ConnectionName;
use sandglass_egress::policy::RequestHost;
use sandglass_types::budget::Amount;
use sandglass_types::limits::Unchecked;
use sandglass_types::reference::namespace_of;
use sandglass_types::{
    EndReason, Generation, Lifetime, Limits, OnTimeout, PauseMode, SandboxState, Timestamp, VolumeMount,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use crate::{
    ApiKey, AuditEntry, ConnectionRow, Event, Identity, ImageState, MadeFrom, ModelGrant, Purpose, Sample,
    SandboxRow, SecretRow, SnapshotName, SnapshotRow, StartPath, StoreError, Team, TeamSample, VolumeRow,
    VolumeState,
};

/// The columns of a sandbox, for use in `concat!`; [`sandbox`] reads them.
macro_rules! sandbox_columns {
    () => {
        "id, node, team, template, rootfs, cpus, memory_mib, disk_mib, processes, access_token, metadata, env, \
         allow_internet_access, policy, traffic_token, request_host, timeout, on_timeout, idle_timeout, pause_mode, \
         state, generation, created_at, end_at, max_end_at, ended_at, end_reason, origin, made_from, defaults, \
         start_path, volumes, models_budget, models_origin, connections"
    };
}
pub(super) use sandbox_columns;

pub(super) fn corrupt(what: &'static str, detail: impl Display) -> StoreError {
    StoreError::Corrupt { what, detail: detail.to_string() }
}

/// Parses one text.
pub(super) fn parse<T>(what: &'static str, text: &str) -> Result<T, StoreError>
where
    T: FromStr,
    T::Err: Display,
{
    text.parse().map_err(|error| corrupt(what, error))
}

/// How a state is written.
pub(super) const fn state_text(state: SandboxState) -> &'static str {
    match state {
        SandboxState::Creating => "creating",
        SandboxState::Running => "running",
        SandboxState::Pausing => "pausing",
        SandboxState::Paused => "paused",
        SandboxState::Resuming => "resuming",
        SandboxState::Ending => "ending",
        SandboxState::Ended => "ended",
    }
}

/// Reads [`state_text`].
pub(super) fn parse_state(what: &'static str, text: &str) -> Result<SandboxState, StoreError> {
    Ok(match text {
        "creating" => SandboxState::Creating,
        "running" => SandboxState::Running,
        "pausing" => SandboxState::Pausing,
        "paused" => SandboxState::Paused,
        "resuming" => SandboxState::Resuming,
        "ending" => SandboxState::Ending,
        "ended" => SandboxState::Ended,
        _ => return Err(corrupt(what, format_args!("state {text:?}"))),
    })
}

/// How a reason is written.
pub(super) const fn reason_text(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Killed => "killed",
        EndReason::Timeout => "timeout",
        EndReason::CreateFailed => "create_failed",
        EndReason::OutOfMemory => "out_of_memory",
        EndReason::Processes => "pids",
        EndReason::Crashed => "crashed",
        EndReason::Lost => "lost",
    }
}

/// How it is written what happens when the time is up.
pub(super) const fn on_timeout_text(on_timeout: OnTimeout) -> &'static str {
    match on_timeout {
        OnTimeout::Kill => "kill",
        OnTimeout::Pause { auto_resume: false } => "pause",
        OnTimeout::Pause { auto_resume: true } => "pause_auto_resume",
        OnTimeout::PauseFilesystem => "pause_filesystem",
    }
}

fn parse_on_timeout(what: &'static str, text: &str) -> Result<OnTimeout, StoreError> {
    Ok(match text {
        "kill" => OnTimeout::Kill,
        "pause" => OnTimeout::Pause { auto_resume: false },
        "pause_auto_resume" => OnTimeout::Pause { auto_resume: true },
        "pause_filesystem" => OnTimeout::PauseFilesystem,
        _ => return Err(corrupt(what, format_args!("action at its timeout {text:?}"))),
    })
}

/// How it is written what a pause keeps.
pub(super) const fn pause_mode_text(mode: PauseMode) -> &'static str {
    match mode {
        PauseMode::Full => "full",
        PauseMode::Filesystem => "filesystem",
    }
}

fn parse_pause_mode(what: &'static str, text: &str) -> Result<PauseMode, StoreError> {
    Ok(match text {
        "full" => PauseMode::Full,
        "filesystem" => PauseMode::Filesystem,
        _ => return Err(corrupt(what, format_args!("pause mode {text:?}"))),
    })
}

/// How a span of time is written: in milliseconds.
pub(super) fn span(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn parse_reason(what: &'static str, text: &str) -> Result<EndReason, StoreError> {
    Ok(match text {
        "killed" => EndReason::Killed,
        "timeout" => EndReason::Timeout,
        "create_failed" => EndReason::CreateFailed,
        "out_of_memory" => EndReason::OutOfMemory,
        "pids" => EndReason::Processes,
        "crashed" => EndReason::Crashed,
        "lost" => EndReason::Lost,
        _ => return Err(corrupt(what, format_args!("end reason {text:?}"))),
    })
}

/// How a purpose is written.
pub(super) const fn purpose_text(purpose: &Purpose) -> &'static str {
    match purpose {
        Purpose::Snapshot => "snapshot",
        Purpose::Fork => "fork",
        Purpose::Template(_) => "template",
    }
}

/// What it is written that a sandbox came from.
pub(super) fn made_from_text(made_from: &MadeFrom) -> Option<&str> {
    match made_from {
        MadeFrom::Template => None,
        MadeFrom::Snapshot(id) => Some(id.as_str()),
        MadeFrom::Fork(id) => Some(id.as_str()),
    }
}

/// How a map is written.
pub(super) fn map_text(map: &BTreeMap<String, String>) -> String {
    let object = map.iter().map(|(key, value)| (key.clone(), value.clone().into())).collect();
    serde_json::Value::Object(object).to_string()
}

/// How what has a form of its own is written, a policy for one.
pub(super) fn json_text(value: &impl Serialize) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(|error| StoreError::Database(Box::new(error)))
}

fn parse_start_path(what: &'static str, text: &str) -> Result<StartPath, StoreError> {
    Ok(match text {
        "cold" => StartPath::Cold,
        "restore" => StartPath::Restore,
        "pool" => StartPath::Pool,
        _ => return Err(corrupt(what, format_args!("start path {text:?}"))),
    })
}

fn parse_map(what: &'static str, text: &str) -> Result<BTreeMap<String, String>, StoreError> {
    serde_json::from_str(text).map_err(|error| corrupt(what, error))
}

/// One row whose columns are taken by name.
pub(super) struct Columns<'a> {
    pub(super) what: &'static str,
    pub(super) row: &'a SqliteRow,
}

impl Columns<'_> {
    pub(super) fn text(&self, name: &'static str) -> Result<&str, StoreError> {
        self.row.try_get(name).map_err(|error| corrupt(self.what, error))
    }

    pub(super) fn maybe_text(&self, name: &'static str) -> Result<Option<&str>, StoreError> {
        self.row.try_get(name).map_err(|error| corrupt(self.what, error))
    }

    pub(super) fn parsed<T>(&self, name: &'static str) -> Result<T, StoreError>
    where
        T: FromStr,
        T::Err: Display,
    {
        parse(self.what, self.text(name)?)
    }

    pub(super) fn number(&self, name: &'static str) -> Result<u32, StoreError> {
        let value: i64 = self.row.try_get(name).map_err(|error| corrupt(self.what, error))?;
        u32::try_from(value).map_err(|error| corrupt(self.what, error))
    }

    pub(super) fn bytes(&self, name: &'static str) -> Result<u64, StoreError> {
        let value: i64 = self.row.try_get(name).map_err(|error| corrupt(self.what, error))?;
        u64::try_from(value).map_err(|error| corrupt(self.what, error))
    }

    fn blob(&self, name: &'static str) -> Result<Vec<u8>, StoreError> {
        self.row.try_get(name).map_err(|error| corrupt(self.what, error))
    }

    fn flag(&self, name: &'static str) -> Result<bool, StoreError> {
        self.row.try_get(name).map_err(|error| corrupt(self.what, error))
    }

    pub(super) fn time(&self, name: &'static str) -> Result<Timestamp, StoreError> {
        let value: i64 = self.row.try_get(name).map_err(|error| corrupt(self.what, error))?;
        Ok(Timestamp::from_millis(value))
    }

    pub(super) fn maybe_time(&self, name: &'static str) -> Result<Option<Timestamp>, StoreError> {
        let value: Option<i64> = self.row.try_get(name).map_err(|error| corrupt(self.what, error))?;
        Ok(value.map(Timestamp::from_millis))
    }

    fn span(&self, name: &'static str) -> Result<Duration, StoreError> {
        let value: i64 = self.row.try_get(name).map_err(|error| corrupt(self.what, error))?;
        u64::try_from(value).map(Duration::from_millis).map_err(|error| corrupt(self.what, error))
    }

    fn maybe_span(&self, name: &'static str) -> Result<Option<Duration>, StoreError> {
        let value: Option<i64> = self.row.try_get(name).map_err(|error| corrupt(self.what, error))?;
        value.map(|_| self.span(name)).transpose()
    }

    /// What [`json_text`] wrote, if there is something.
    pub(super) fn maybe_json<T: DeserializeOwned>(
        &self,
        name: &'static str,
    ) -> Result<Option<T>, StoreError> {
        let text = self.maybe_text(name)?;
        text.map(|text| serde_json::from_str(text).map_err(|error| corrupt(self.what, error))).transpose()
    }

    fn limits(&self) -> Result<Limits, StoreError> {
        let limits = Unchecked {
            cpus: self.number("cpus")?,
            memory_mib: self.number("memory_mib")?,
            disk_mib: self.number("disk_mib")?,
            processes: self.number("processes")?,
        };
        Limits::try_from(limits).map_err(|error| corrupt(self.what, error))
    }

    fn made_from(&self) -> Result<MadeFrom, StoreError> {
        match (self.text("origin")?, self.maybe_text("made_from")?) {
            ("template", None) => Ok(MadeFrom::Template),
            ("snapshot", Some(id)) => Ok(MadeFrom::Snapshot(parse(self.what, id)?)),
            ("fork", Some(id)) => Ok(MadeFrom::Fork(parse(self.what, id)?)),
            (origin, from) => Err(corrupt(self.what, format_args!("origin {origin:?} from {from:?}"))),
        }
    }

    fn models(&self) -> Result<Option<ModelGrant>, StoreError> {
        match (self.maybe_text("models_budget")?, self.maybe_text("models_origin")?) {
            (None, None) => Ok(None),
            (Some(budget), Some(origin)) => {
                Ok(Some(ModelGrant { budget: parse(self.what, budget)?, origin: parse(self.what, origin)? }))
            }
            (budget, origin) => Err(corrupt(self.what, format_args!("budget {budget:?} from {origin:?}"))),
        }
    }

    /// A sum, which may be that of nothing.
    fn sum(&self, name: &'static str) -> Result<u64, StoreError> {
        let value: i64 = self.row.try_get(name).map_err(|error| corrupt(self.what, error))?;
        u64::try_from(value).map_err(|error| corrupt(self.what, error))
    }

    fn state(&self) -> Result<SandboxState, StoreError> {
        parse_state(self.what, self.text("state")?)
    }

    fn reason(&self) -> Result<Option<EndReason>, StoreError> {
        self.maybe_text("end_reason")?.map(|text| parse_reason(self.what, text)).transpose()
    }
}

pub(super) fn team(row: &SqliteRow) -> Result<Team, StoreError> {
    let columns = Columns { what: "team", row };
    Ok(Team {
        id: columns.parsed("id")?,
        name: columns.text("name")?.to_owned(),
        created_at: columns.time("created_at")?,
        revoked_at: columns.maybe_time("revoked_at")?,
    })
}

pub(super) fn api_key(row: &SqliteRow) -> Result<ApiKey, StoreError> {
    let columns = Columns { what: "key", row };
    Ok(ApiKey {
        id: columns.parsed("id")?,
        team: columns.parsed("team")?,
        name: columns.text("name")?.to_owned(),
        digest: columns.parsed("digest")?,
        suffix: columns.text("suffix")?.to_owned(),
        operator: columns.flag("operator")?,
        created_at: columns.time("created_at")?,
        last_used_at: columns.maybe_time("last_used_at")?,
        revoked_at: columns.maybe_time("revoked_at")?,
        made_by: columns.maybe_text("made_by")?.map(|text| parse("key", text)).transpose()?,
    })
}

/// Reads a row of [`super::keys::OWNER_OF_KEY`].
pub(super) fn identity(row: &SqliteRow) -> Result<Identity, StoreError> {
    let columns = Columns { what: "key", row };
    Ok(Identity {
        team: columns.parsed("team")?,
        key: columns.parsed("id")?,
        operator: columns.flag("operator")?,
    })
}

pub(super) fn audit(row: &SqliteRow) -> Result<AuditEntry, StoreError> {
    let what = "row of the audit";
    let columns = Columns { what, row };
    Ok(AuditEntry {
        at: columns.time("at")?,
        team: columns.maybe_text("team")?.map(|text| parse(what, text)).transpose()?,
        key: columns.maybe_text("key")?.map(|text| parse(what, text)).transpose()?,
        request: columns.text("request")?.to_owned(),
        action: columns.text("action")?.to_owned(),
        target: columns.maybe_text("target")?.map(str::to_owned),
        status: u16::try_from(columns.number("status")?).map_err(|error| corrupt(what, error))?,
        detail: columns.maybe_text("detail")?.map(str::to_owned),
    })
}

pub(super) fn sample(row: &SqliteRow) -> Result<Sample, StoreError> {
    let what = "sample";
    let columns = Columns { what, row };
    let per_mille = columns.number("cpu_per_mille")?;
    Ok(Sample {
        sandbox: parse(what, columns.text("sandbox")?)?,
        at: columns.time("at")?,
        cpu_per_mille: u16::try_from(per_mille).map_err(|error| corrupt(what, error))?,
        memory_bytes: columns.bytes("memory")?,
        disk_bytes: columns.bytes("disk")?,
    })
}

/// Reads the limits of a sandbox alone.
pub(super) fn limits(row: &SqliteRow) -> Result<Limits, StoreError> {
    Columns { what: "sandbox", row }.limits()
}

pub(super) fn team_sample(row: &SqliteRow) -> Result<TeamSample, StoreError> {
    let what = "sample of a team";
    let columns = Columns { what, row };
    Ok(TeamSample {
        at: columns.time("at")?,
        concurrent: columns.number("concurrent")?,
        made: columns.number("made")?,
        span: Duration::from_millis(columns.bytes("span")?),
    })
}

pub(super) fn event(row: &SqliteRow) -> Result<Event, StoreError> {
    let columns = Columns { what: "event", row };
    Ok(Event {
        seq: columns.number("seq")?,
        at: columns.time("at")?,
        state: columns.state()?,
        end_reason: columns.reason()?,
        detail: columns.text("detail")?.to_owned(),
    })
}

/// What sandboxes in one state were promised together.
pub(super) fn promised(row: &SqliteRow) -> Result<(SandboxState, Amount), StoreError> {
    let columns = Columns { what: "sum over sandboxes", row };
    let amount = Amount {
        sandboxes: columns.sum("sandboxes")?,
        cpus: columns.sum("cpus")?,
        memory_mib: columns.sum("memory_mib")?,
        disk_mib: columns.sum("disk_mib")?,
    };
    Ok((columns.state()?, amount))
}

/// What sandboxes were promised together whose images are being removed, or are not.
pub(super) fn of_images(row: &SqliteRow) -> Result<(bool, Amount), StoreError> {
    let columns = Columns { what: "sum over images", row };
    let (memory_mib, disk_mib) = (columns.sum("memory_mib")?, columns.sum("disk_mib")?);
    Ok((columns.flag("going")?, Amount { memory_mib, disk_mib, ..Amount::default() }))
}

/// Reads what `snapshots` selects.
pub(super) fn snapshot(row: &SqliteRow) -> Result<SnapshotRow, StoreError> {
    let what = "snapshot";
    let columns = Columns { what, row };
    let name = match (columns.maybe_text("name")?, columns.maybe_text("tag")?) {
        (Some(name), Some(tag)) => Some(SnapshotName { name: name.to_owned(), tag: tag.to_owned() }),
        (None, None) => None,
        _ => return Err(corrupt(what, "half a name")),
    };
    Ok(SnapshotRow {
        id: columns.parsed("id")?,
        node: columns.parsed("node")?,
        team: columns.parsed("team")?,
        namespace: namespace_of(columns.text("team_name")?),
        purpose: match (columns.text("purpose")?, columns.maybe_json("spec")?) {
            ("snapshot", None) => Purpose::Snapshot,
            ("fork", None) => Purpose::Fork,
            ("template", Some(spec)) => Purpose::Template(Box::new(spec)),
            (other, _) => return Err(corrupt(what, format_args!("purpose {other:?}"))),
        },
        name,
        template: columns.text("template")?.to_owned(),
        defaults: columns.maybe_json("defaults")?,
        volumes: columns.maybe_json("volumes")?.unwrap_or_default(),
        rootfs: columns.parsed("rootfs")?,
        limits: columns.limits()?,
        source: columns.parsed("source")?,
        generation: Generation(columns.number("generation")?),
        state: match columns.text("state")? {
            "writing" => ImageState::Writing,
            "ready" => ImageState::Ready,
            "deleting" => ImageState::Deleting,
            other => return Err(corrupt(what, format_args!("state {other:?}"))),
        },
        created_at: columns.time("created_at")?,
    })
}

/// Reads what `volumes` selects.
pub(super) fn volume(row: &SqliteRow) -> Result<VolumeRow, StoreError> {
    let what = "volume";
    let columns = Columns { what, row };
    Ok(VolumeRow {
        id: columns.parsed("id")?,
        node: columns.parsed("node")?,
        team: columns.parsed("team")?,
        name: columns.parsed("name")?,
        size_mib: columns.number("size_mib")?,
        token: columns.text("token")?.to_owned(),
        state: match columns.text("state")? {
            "making" => VolumeState::Making,
            "ready" => VolumeState::Ready,
            "deleting" => VolumeState::Deleting,
            other => return Err(corrupt(what, format_args!("state {other:?}"))),
        },
        created_at: columns.time("created_at")?,
    })
}

/// Reads what `secrets` selects.
pub(super) fn secret(row: &SqliteRow) -> Result<SecretRow, StoreError> {
    let columns = Columns { what: "secret", row };
    Ok(SecretRow {
        id: columns.parsed("id")?,
        team: columns.parsed("team")?,
        name: columns.parsed("name")?,
        version: columns.number("version")?,
        sealed: columns.blob("sealed")?,
        metadata: parse_map("secret", columns.text("metadata")?)?,
        created_at: columns.time("created_at")?,
        updated_at: columns.time("updated_at")?,
    })
}

/// Reads what `connections` selects.
pub(super) fn connection(row: &SqliteRow) -> Result<ConnectionRow, StoreError> {
    let columns = Columns { what: "connection", row };
    Ok(ConnectionRow {
        team: columns.parsed("team")?,
        name: columns.parsed("name")?,
        written: serde_json::from_str(columns.text("written")?)
            .map_err(|error| corrupt("connection", error))?,
        sealed: columns.blob("sealed")?,
        created_at: columns.time("created_at")?,
        updated_at: columns.time("updated_at")?,
    })
}

/// How the connections of a sandbox are written.
pub(super) fn names_text(names: &[ConnectionName]) -> Result<Option<String>, StoreError> {
    if names.is_empty() { Ok(None) } else { json_text(&names).map(Some) }
}

/// How the volumes of a sandbox or an image are written.
pub(super) fn mounts_text(volumes: &[VolumeMount]) -> Result<Option<String>, StoreError> {
    if volumes.is_empty() { Ok(None) } else { json_text(&volumes).map(Some) }
}

/// What lets a sandbox call models.
pub(super) fn models(row: &SqliteRow) -> Result<Option<ModelGrant>, StoreError> {
    Columns { what: "sandbox", row }.models()
}

/// Reads [`sandbox_columns`].
pub(super) fn sandbox(row: &SqliteRow) -> Result<SandboxRow, StoreError> {
    let columns = Columns { what: "sandbox", row };
    Ok(SandboxRow {
        id: columns.parsed("id")?,
        node: columns.parsed("node")?,
        team: columns.parsed("team")?,
        template: columns.text("template")?.to_owned(),
        rootfs: columns.parsed("rootfs")?,
        limits: columns.limits()?,
        access_token: columns.maybe_text("access_token")?.map(str::to_owned),
        metadata: parse_map("sandbox", columns.text("metadata")?)?,
        env: parse_map("sandbox", columns.text("env")?)?,
        allow_internet_access: row
            .try_get("allow_internet_access")
            .map_err(|error| corrupt("sandbox", error))?,
        policy: serde_json::from_str(columns.text("policy")?).map_err(|error| corrupt("sandbox", error))?,
        traffic_token: columns.maybe_text("traffic_token")?.map(str::to_owned),
        request_host: columns
            .maybe_text("request_host")?
            .map(|text| RequestHost::try_from(text.to_owned()).map_err(|error| corrupt("sandbox", error)))
            .transpose()?,
        lifetime: Lifetime {
            timeout: columns.span("timeout")?,
            on_timeout: parse_on_timeout("sandbox", columns.text("on_timeout")?)?,
            idle: columns.maybe_span("idle_timeout")?,
        },
        pause_mode: parse_pause_mode("sandbox", columns.text("pause_mode")?)?,
        made_from: columns.made_from()?,
        start_path: parse_start_path("sandbox", columns.text("start_path")?)?,
        defaults: columns.maybe_json("defaults")?,
        volumes: columns.maybe_json("volumes")?.unwrap_or_default(),
        models: columns.models()?,
        connections: columns.maybe_json("connections")?.unwrap_or_default(),
        state: columns.state()?,
        generation: Generation(columns.number("generation")?),
        created_at: columns.time("created_at")?,
        end_at: columns.time("end_at")?,
        max_end_at: columns.time("max_end_at")?,
        ended_at: columns.maybe_time("ended_at")?,
        end_reason: columns.reason()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts are a format on disk: they equal what the APIs write.
    #[test]
    fn texts_equal_the_serialised_names() {
        use EndReason as R;
        use SandboxState as S;
        for state in [S::Creating, S::Running, S::Ending, S::Ended] {
            assert_eq!(serde_json::to_value(state).unwrap(), state_text(state));
            assert_eq!(parse_state("test", state_text(state)).unwrap(), state);
        }
        for reason in
            [R::Killed, R::Timeout, R::CreateFailed, R::OutOfMemory, R::Processes, R::Crashed, R::Lost]
        {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason_text(reason));
            assert_eq!(parse_reason("test", reason_text(reason)).unwrap(), reason);
        }
        for auto_resume in [false, true] {
            let pause = OnTimeout::Pause { auto_resume };
            assert_eq!(parse_on_timeout("test", on_timeout_text(pause)).unwrap(), pause);
        }
        for mode in [PauseMode::Full, PauseMode::Filesystem] {
            assert_eq!(serde_json::to_value(mode).unwrap(), pause_mode_text(mode));
            assert_eq!(parse_pause_mode("test", pause_mode_text(mode)).unwrap(), mode);
        }
        assert!(parse_on_timeout("test", "Kill").is_err() && parse_pause_mode("test", "").is_err());
        assert!(parse_state("test", "Running").is_err());
        assert!(parse_reason("test", "").is_err());
    }
}
