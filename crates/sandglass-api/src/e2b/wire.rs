//! Answers, field by field as the clients read them: a missing required field breaks their parsers.

use std::collections::BTreeMap;

use sandglass_egress::policy::lists_of;
use sandglass_store::SandboxRow;
use sandglass_types::{
    MountPath, OnTimeout, PauseMode, SandboxId, SandboxState, Timestamp, VolumeMount, VolumeName,
};
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

/// The version of the guest API that every sandbox speaks: the newest public one. Clients switch features off
/// below certain versions.
pub(crate) const ENVD_VERSION: &str = "0.6.13";

/// Clients show it and otherwise ignore it; it must be there.
pub(crate) const CLIENT_ID: &str = "sandglass";

pub(super) fn rfc3339<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(time)
}

/// A sandbox that can be talked to now: the answer of create and connect.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Sandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    #[schema(value_type = String)]
    sandbox_id: SandboxId,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    envd_version: &'static str,
    alias: String,
    /// What the guest API wants as `X-Access-Token`; absent if it is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    /// What the sandbox's other ports want as `e2b-traffic-access-token`; absent if they are open to everybody.
    #[serde(skip_serializing_if = "Option::is_none")]
    traffic_access_token: Option<String>,
    /// Under which the sandbox's ports have host names.
    #[serde(skip_serializing_if = "Option::is_none")]
    domain: Option<String>,
}

impl Sandbox {
    pub(crate) fn new(row: SandboxRow, domain: Option<&str>) -> Self {
        Self {
            alias: row.template.clone(),
            template_id: row.template,
            sandbox_id: row.id,
            client_id: CLIENT_ID,
            envd_version: ENVD_VERSION,
            envd_access_token: row.access_token,
            traffic_access_token: row.traffic_token,
            domain: domain.map(str::to_owned),
        }
    }
}

/// One line of a list.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ListedSandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    #[schema(value_type = String)]
    sandbox_id: SandboxId,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    started_at: Timestamp,
    #[serde(serialize_with = "rfc3339")]
    #[schema(value_type = String, format = DateTime)]
    end_at: Timestamp,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_size_mb: u32,
    /// `running` or `paused`: what is being made or ended is not shown, and what is between the two is what it was.
    state: &'static str,
    envd_version: &'static str,
    alias: String,
    metadata: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    volume_mounts: Vec<VolumeMounted>,
}

/// A volume that a sandbox has.
#[derive(Debug, Serialize, ToSchema)]
struct VolumeMounted {
    #[schema(value_type = String)]
    name: VolumeName,
    #[schema(value_type = String)]
    path: MountPath,
}

impl From<SandboxRow> for ListedSandbox {
    fn from(row: SandboxRow) -> Self {
        Self {
            alias: row.template.clone(),
            template_id: row.template,
            sandbox_id: row.id,
            client_id: CLIENT_ID,
            started_at: row.created_at,
            end_at: row.end_at,
            cpu_count: row.limits.cpus(),
            memory_mb: row.limits.memory_mib(),
            disk_size_mb: row.limits.disk_mib(),
            state: match row.state {
                SandboxState::Paused | SandboxState::Resuming => "paused",
                _ => "running",
            },
            envd_version: ENVD_VERSION,
            metadata: row.metadata,
            volume_mounts: row
                .volumes
                .into_iter()
                .map(|VolumeMount { name, path, .. }| VolumeMounted { name, path })
                .collect(),
        }
    }
}

/// What happens when the time is up.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Lifecycle {
    auto_resume: bool,
    on_timeout: &'static str,
}

impl Lifecycle {
    const fn new(on_timeout: OnTimeout) -> Self {
        let action = match on_timeout {
            OnTimeout::Kill => "kill",
            OnTimeout::Pause { .. } | OnTimeout::PauseFilesystem => "pause",
        };
        Self { auto_resume: on_timeout.auto_resumes(), on_timeout: action }
    }
}

/// What a paused sandbox has.
pub(crate) const fn pause_mode(row: &SandboxRow) -> Option<PauseMode> {
    match row.state {
        SandboxState::Paused | SandboxState::Resuming => Some(row.pause_mode),
        _ => None,
    }
}

/// The network options of a sandbox.
#[derive(Debug, Serialize, ToSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
struct NetworkView {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    allow_out: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    deny_out: Vec<String>,
    allow_public_traffic: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    mask_request_host: Option<String>,
}

impl NetworkView {
    fn new(row: &SandboxRow) -> Option<Self> {
        let (allow_out, deny_out) = lists_of(&row.policy);
        let mask_request_host = row.request_host.as_ref().map(|host| host.as_str().to_owned());
        let allow_public_traffic = row.traffic_token.is_none();
        let nothing = allow_out.is_empty()
            && deny_out.is_empty()
            && allow_public_traffic
            && mask_request_host.is_none();
        (!nothing).then_some(Self { allow_out, deny_out, allow_public_traffic, mask_request_host })
    }
}

/// One sandbox in full.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxDetail {
    #[serde(flatten)]
    listed: ListedSandbox,
    /// What the guest API wants as `X-Access-Token`; absent if it is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    envd_access_token: Option<String>,
    /// As the client asked. Whatever it says, a sandbox reaches no more than the operator's ceiling.
    allow_internet_access: Option<bool>,
    /// Under which the sandbox's ports have host names.
    #[serde(skip_serializing_if = "Option::is_none")]
    domain: Option<String>,
    /// As the client asked; absent if it asked for nothing of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<NetworkView>,
    lifecycle: Lifecycle,
    /// `full` if a paused sandbox has its memory, `filesystem` if it has its files alone; absent if it is not paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pause_mode: Option<PauseMode>,
}

impl SandboxDetail {
    pub(crate) fn new(mut row: SandboxRow, domain: Option<&str>) -> Self {
        Self {
            envd_access_token: row.access_token.take(),
            allow_internet_access: row.allow_internet_access,
            domain: domain.map(str::to_owned),
            network: NetworkView::new(&row),
            lifecycle: Lifecycle::new(row.lifetime.on_timeout),
            pause_mode: pause_mode(&row),
            listed: row.into(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use sandglass_egress::policy::Policy;
    use sandglass_types::{Digest, Generation, Lifetime, Limits, NodeId, SandboxState, TeamId};
    use std::time::Duration;

    /// A running sandbox with every field set.
    pub(crate) fn row() -> SandboxRow {
        SandboxRow {
            id: "abcdefghij0123456789".parse().unwrap(),
            node: NodeId::random(),
            team: TeamId::random(),
            template: "base".into(),
            rootfs: Digest::from_bytes([7; 32]),
            limits: Limits::default(),
            access_token: Some("token".into()),
            metadata: BTreeMap::from([("a".into(), "b c".into())]),
            env: BTreeMap::from([("SECRET".into(), "hunter2".into())]),
            allow_internet_access: Some(false),
            policy: Policy::default(),
            traffic_token: None,
            request_host: None,
            lifetime: Lifetime::of(Duration::from_secs(300)),
            pause_mode: PauseMode::Full,
            made_from: Default::default(),
            start_path: Default::default(),
            defaults: None,
            volumes: Vec::new(),
            models: None,
            connections: Vec::new(),
            state: SandboxState::Running,
            generation: Generation::FIRST,
            created_at: Timestamp::from_millis(1_764_424_800_123),
            end_at: Timestamp::from_millis(1_764_425_100_123),
            max_end_at: Timestamp::from_millis(1_764_511_200_123),
            ended_at: None,
            end_reason: None,
        }
    }

    #[test]
    fn create_and_connect_answer() {
        assert_eq!(
            serde_json::to_string(&Sandbox::new(row(), Some("sbx.test"))).unwrap(),
            concat!(
                r#"{"templateID":"base","sandboxID":"abcdefghij0123456789","clientID":"sandglass","#,
                r#""envdVersion":"0.6.13","alias":"base","envdAccessToken":"token","domain":"sbx.test"}"#
            )
        );
        let private = SandboxRow { traffic_token: Some("traffic".into()), ..row() };
        let json = serde_json::to_string(&Sandbox::new(private, None)).unwrap();
        assert!(json.contains(r#""trafficAccessToken":"traffic""#), "{json}");
        let open = SandboxRow { access_token: None, ..row() };
        let json = serde_json::to_string(&Sandbox::new(open, None)).unwrap();
        assert!(!json.contains("envdAccessToken") && !json.contains("domain"), "{json}");
    }

    #[test]
    fn listed() {
        assert_eq!(
            serde_json::to_string(&ListedSandbox::from(row())).unwrap(),
            concat!(
                r#"{"templateID":"base","sandboxID":"abcdefghij0123456789","clientID":"sandglass","#,
                r#""startedAt":"2025-11-29T14:00:00.123Z","endAt":"2025-11-29T14:05:00.123Z","#,
                r#""cpuCount":2,"memoryMB":1024,"diskSizeMB":4096,"state":"running","#,
                r#""envdVersion":"0.6.13","alias":"base","metadata":{"a":"b c"}}"#
            )
        );
    }

    #[test]
    fn the_network_is_echoed_as_it_was_asked_for() {
        let asked = r#"{"allowOut":["1.1.1.1","10.0.0.0/8","*.example.com"],"denyOut":["0.0.0.0/0"],
            "allowPublicTraffic":false,"maskRequestHost":"localhost:${PORT}"}"#;
        let network = serde_json::from_str(asked).unwrap();
        let row = SandboxRow {
            policy: sandglass_egress::policy::from_e2b(&network, None).unwrap(),
            traffic_token: Some("traffic".into()),
            request_host: Some("localhost:${PORT}".to_owned().try_into().unwrap()),
            ..row()
        };
        let json = serde_json::to_value(SandboxDetail::new(row, None)).unwrap();
        assert_eq!(json["network"], serde_json::from_str::<serde_json::Value>(asked).unwrap());
        assert!(
            !json.to_string().contains("\"traffic\""),
            "the token is told to who makes it or connects: {json}"
        );
    }

    #[test]
    fn what_happens_at_its_timeout() {
        let tells = |on_timeout, state, pause_mode| {
            let lifetime = Lifetime { on_timeout, ..row().lifetime };
            let row = SandboxRow { lifetime, state, pause_mode, ..row() };
            let json = serde_json::to_value(SandboxDetail::new(row, None)).unwrap();
            let lifecycle = &json["lifecycle"];
            let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
            (
                text(&lifecycle["onTimeout"]).unwrap(),
                lifecycle["autoResume"] == true,
                text(&json["pauseMode"]),
            )
        };
        use PauseMode::{Filesystem, Full};
        use SandboxState::{Paused, Running};
        let pause = |auto_resume| OnTimeout::Pause { auto_resume };
        let said = |action: &str, resumes, mode: Option<&str>| (action.into(), resumes, mode.map(Into::into));
        assert_eq!(tells(OnTimeout::Kill, Running, Full), said("kill", false, None));
        assert_eq!(tells(OnTimeout::Kill, Paused, Filesystem), said("kill", false, Some("filesystem")));
        assert_eq!(tells(pause(false), Running, Filesystem), said("pause", false, None));
        assert_eq!(tells(pause(true), Paused, Full), said("pause", true, Some("full")));
        assert_eq!(tells(OnTimeout::PauseFilesystem, Running, Full), said("pause", false, None));
    }

    #[test]
    fn detail() {
        assert_eq!(
            serde_json::to_string(&SandboxDetail::new(row(), None)).unwrap(),
            concat!(
                r#"{"templateID":"base","sandboxID":"abcdefghij0123456789","clientID":"sandglass","#,
                r#""startedAt":"2025-11-29T14:00:00.123Z","endAt":"2025-11-29T14:05:00.123Z","#,
                r#""cpuCount":2,"memoryMB":1024,"diskSizeMB":4096,"state":"running","#,
                r#""envdVersion":"0.6.13","alias":"base","metadata":{"a":"b c"},"#,
                r#""envdAccessToken":"token","allowInternetAccess":false,"#,
                r#""lifecycle":{"autoResume":false,"onTimeout":"kill"}}"#
            )
        );
    }
}
