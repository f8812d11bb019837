//! What a client says of a run, and what it is told.

use std::collections::BTreeMap;
use std::time::Duration;

use data_encoding::BASE64;
use sandglass_control::{CreateRun as Asked, RunDetail};
use sandglass_store::{Artifact, CallRow, IdempotencyKey, RunEventRow, RunRow};
use sandglass_types::run::{
    Agent, Check, Command, FileMode, InputFile, Pattern, ProjectPath, Prompt, Retention, RunSpec, Turn, Web,
};
use sandglass_types::{Digest, Micros, RunSandbox, RunStatus, StopReason};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::error::ApiError;

/// How long a run may take if its client does not say, in seconds.
const DEFAULT_TIMEOUT: u64 = 300;

/// The same of a check.
const DEFAULT_CHECK_TIMEOUT: u64 = 60;

/// For how many days content is kept if its client does not say.
const DEFAULT_RETENTION_DAYS: u32 = 30;

/// How many turns of repair there are if its client does not say.
const DEFAULT_REPAIRS: u32 = 2;

fn refused(error: impl std::fmt::Display) -> ApiError {
    ApiError::invalid(error.to_string())
}

/// A file that is put into the folder of the project.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct FileIn {
    /// Where, relative to the folder.
    path: String,
    /// Text that is in it.
    content: Option<String>,
    /// Bytes that are in it, in base64, instead.
    content_base64: Option<String>,
    /// Its permission bits; 420, which is 0o644, if absent.
    mode: Option<u32>,
    /// Whether it is root's, and nobody's to write.
    #[serde(default)]
    read_only: bool,
}

impl FileIn {
    fn accept(self) -> Result<InputFile, ApiError> {
        let path: ProjectPath =
            self.path.parse().map_err(|error| refused(format!("files.path {error}: {:?}", self.path)))?;
        let content = match (self.content, self.content_base64) {
            (Some(text), None) => text.into_bytes(),
            (None, Some(text)) => {
                BASE64.decode(text.as_bytes()).map_err(|_| refused("files.content_base64 is not base64"))?
            }
            _ => return Err(refused("each of files needs content or content_base64")),
        };
        let mode = self.mode.map_or(Ok(FileMode::DEFAULT), FileMode::try_from).map_err(refused)?;
        Ok(InputFile { path, content, mode, read_only: self.read_only })
    }
}

/// A program: a text for a shell, or its words.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(super) enum CommandIn {
    /// For a login shell.
    Text(String),
    /// The program and its arguments.
    Words(Vec<String>),
}

impl CommandIn {
    fn accept(self) -> Result<Command, ApiError> {
        match self {
            Self::Text(text) => Command::shell(text),
            Self::Words(words) => Command::words(words),
        }
        .map_err(refused)
    }
}

/// Who does the work.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(super) enum AgentIn {
    /// `builtin`, `codex` or `claude-code`.
    Known(String),
    /// A program, whose standard input is the prompt.
    Program(ProgramIn),
}

/// A program that does the work.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ProgramIn {
    command: CommandIn,
}

/// What may leave the sandbox: `true` for all that the operator's ceiling allows, or these domains, addresses and ranges of that.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(super) enum WebIn {
    Whether(bool),
    Only(Vec<String>),
}

/// What must end with code 0 after each turn.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CheckIn {
    command: CommandIn,
    /// 60 if absent.
    timeout_seconds: Option<u64>,
}

/// The body of `POST /v1/runs`. What is absent is off.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CreateRun {
    /// What shall be done.
    prompt: String,
    /// `base` if absent.
    template: Option<String>,
    /// Files that are there when the agent begins, at most 256.
    #[serde(default)]
    files: Vec<FileIn>,
    /// Which files are kept at the end: patterns relative to `/workspace/project`; all of it if there is none.
    #[serde(default)]
    outputs: Vec<String>,
    web: Option<WebIn>,
    /// Whether the worker may run commands.
    #[serde(default)]
    shell: bool,
    /// `builtin` if absent.
    agent: Option<AgentIn>,
    /// Which model the agent uses.
    model: Option<String>,
    /// From when the agent begins, waiting for turns included; 300 if absent.
    timeout_seconds: Option<u64>,
    /// The most that it may cost, in millionths of a dollar.
    #[serde(default)]
    max_cost_micros: u64,
    /// What is kept of it: `full`, the default, `metadata` or `none`.
    retention: Option<String>,
    /// For how many days; 30 if absent.
    retention_days: Option<u32>,
    /// Labels.
    #[serde(default)]
    metadata: BTreeMap<String, String>,
    /// At most 16.
    #[serde(default)]
    checks: Vec<CheckIn>,
    /// How many turns of repair follow one whose checks fail; 2 if absent.
    max_repairs: Option<u32>,
    /// Whether the sandbox is kept after the turn until the next one comes, or the time is up.
    #[serde(default)]
    hold: bool,
}

impl CreateRun {
    /// The request as the product takes it.
    ///
    /// # Errors
    /// 400 that names the first field that can't be.
    pub(super) fn accept(self, idempotency: Option<(IdempotencyKey, Digest)>) -> Result<Asked, ApiError> {
        let agent = match self.agent {
            None => Agent::Builtin,
            Some(AgentIn::Known(name)) => match name.as_str() {
                "builtin" => Agent::Builtin,
                "codex" => Agent::Codex,
                "claude-code" => Agent::ClaudeCode,
                _ => {
                    return Err(refused(
                        "agent must be builtin, codex, claude-code, or an object with a command",
                    ));
                }
            },
            Some(AgentIn::Program(ProgramIn { command })) => Agent::Command(command.accept()?),
        };
        let retention = match self.retention.as_deref() {
            None | Some("full") => Retention::Full,
            Some("metadata") => Retention::Metadata,
            Some("none") => Retention::None,
            Some(_) => return Err(refused("retention must be full, metadata or none")),
        };
        let pattern = |text: String| {
            text.parse::<Pattern>().map_err(|error| refused(format!("outputs {error}: {text:?}")))
        };
        let check = |CheckIn { command, timeout_seconds }| {
            let timeout = Duration::from_secs(timeout_seconds.unwrap_or(DEFAULT_CHECK_TIMEOUT));
            Ok(Check { command: command.accept()?, timeout })
        };
        let spec = RunSpec {
            template: self.template.unwrap_or_else(|| "base".to_owned()),
            outputs: self.outputs.into_iter().map(pattern).collect::<Result<_, _>>()?,
            web: match self.web {
                None | Some(WebIn::Whether(false)) => Web::Off,
                Some(WebIn::Whether(true)) => Web::On,
                Some(WebIn::Only(hosts)) => Web::Only(hosts),
            },
            shell: self.shell,
            agent,
            model: self.model.map(|model| model.parse()).transpose().map_err(refused)?,
            timeout: Duration::from_secs(self.timeout_seconds.unwrap_or(DEFAULT_TIMEOUT)),
            most: Micros(self.max_cost_micros),
            retention,
            retention_days: self.retention_days.unwrap_or(DEFAULT_RETENTION_DAYS),
            metadata: self.metadata,
            checks: self.checks.into_iter().map(check).collect::<Result<_, ApiError>>()?,
            max_repairs: self.max_repairs.unwrap_or(DEFAULT_REPAIRS),
        };
        let turn = turn(self.prompt, self.files, self.hold)?;
        Ok(Asked { spec, turn, idempotency })
    }
}

/// The body of `POST /v1/runs/{id}/turns`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NextTurn {
    /// What shall be done.
    prompt: String,
    /// Files that are there when the agent begins, at most 256. One that was there is replaced.
    #[serde(default)]
    files: Vec<FileIn>,
    /// Whether the sandbox is kept after this turn as well.
    #[serde(default)]
    hold: bool,
}

impl NextTurn {
    pub(super) fn accept(self) -> Result<Turn, ApiError> {
        turn(self.prompt, self.files, self.hold)
    }
}

fn turn(prompt: String, files: Vec<FileIn>, hold: bool) -> Result<Turn, ApiError> {
    let files = files.into_iter().map(FileIn::accept).collect::<Result<_, _>>()?;
    Ok(Turn { prompt: Prompt::try_from(prompt).map_err(refused)?, files, hold })
}

/// The sandbox of a run.
#[derive(Debug, Serialize, ToSchema)]
struct SandboxOfRun {
    /// `none`, `booting`, `ready`, `destroying`, `destroyed` or `destroy_failed`.
    #[schema(value_type = String)]
    state: RunSandbox,
    /// `null` before it is ready.
    id: Option<String>,
}

/// One run.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct RunView {
    id: String,
    /// `queued`, `provisioning`, `running`, `verifying`, `waiting`, `finalizing`, `completed`, `failed` or `cancelled`.
    #[schema(value_type = String)]
    status: RunStatus,
    sandbox: SandboxOfRun,
    /// `null` while it has not stopped. Otherwise `end_turn`, `budget_exhausted`, `timeout`, `cancelled`, `agent_error`, `model_error`,
    /// `sandbox_error`, `verification_failed`, `policy_violation` or `host_restart`.
    #[schema(value_type = Option<String>)]
    stop_reason: Option<StopReason>,
    /// The same in words.
    detail: Option<String>,
    template: String,
    /// `builtin`, `codex`, `claude-code` or `command`.
    agent: &'static str,
    model: Option<String>,
    shell: bool,
    web: bool,
    timeout_seconds: u64,
    max_cost_micros: u64,
    /// `full`, `metadata` or `none`.
    retention: &'static str,
    retention_days: u32,
    metadata: BTreeMap<String, String>,
    /// `null` if it is not kept.
    prompt: Option<String>,
    prompt_bytes: u64,
    /// How many turns began, those of repair included.
    turns: u32,
    budget: String,
    /// The number of its last event.
    last_event: u64,
    #[schema(format = DateTime)]
    created_at: String,
    /// When its agent first began.
    #[schema(format = DateTime)]
    started_at: Option<String>,
    #[schema(format = DateTime)]
    ended_at: Option<String>,
    #[schema(format = DateTime)]
    cancel_requested_at: Option<String>,
}

impl From<RunRow> for RunView {
    fn from(row: RunRow) -> Self {
        let spec = row.spec;
        Self {
            id: row.id.to_string(),
            status: row.status,
            sandbox: SandboxOfRun { state: row.sandbox, id: row.sandbox_id.map(|id| id.to_string()) },
            stop_reason: row.stop_reason,
            detail: row.detail,
            template: spec.template,
            agent: match spec.agent {
                Agent::Builtin => "builtin",
                Agent::Codex => "codex",
                Agent::ClaudeCode => "claude-code",
                Agent::Command(_) => "command",
            },
            model: spec.model.map(|model| model.as_str().to_owned()),
            shell: spec.shell,
            web: spec.web != Web::Off,
            timeout_seconds: spec.timeout.as_secs(),
            max_cost_micros: spec.most.0,
            retention: spec.retention.as_str(),
            retention_days: spec.retention_days,
            metadata: spec.metadata,
            prompt: row.prompt,
            prompt_bytes: row.prompt_bytes,
            turns: row.turns,
            budget: row.budget.to_string(),
            last_event: row.last_seq,
            created_at: row.created_at.to_string(),
            started_at: row.started_at.map(|at| at.to_string()),
            ended_at: row.ended_at.map(|at| at.to_string()),
            cancel_requested_at: row.cancelled_at.map(|at| at.to_string()),
        }
    }
}

/// The money of a run, in millionths of a dollar.
#[derive(Debug, Serialize, ToSchema)]
struct CostView {
    /// What is set aside for calls that are under way; 0 once the run has ended.
    reserved_micros: u64,
    charged_micros: u64,
    /// What can still be spent; 0 once the run has ended.
    left_micros: u64,
    /// What providers billed beyond what was set aside: the operator's, and nothing of the run.
    overrun_micros: u64,
}

/// What one model was called for.
#[derive(Debug, Default, Serialize, ToSchema)]
struct ModelView {
    model: String,
    calls: u64,
    charged_micros: u64,
    input_tokens: u64,
    output_tokens: u64,
}

/// What the sandbox came to.
#[derive(Debug, Serialize, ToSchema)]
struct ComputeView {
    cpu_millis: u64,
    /// Thousandths of a GiB of memory for a second.
    gib_millis: u64,
    charged_micros: u64,
}

/// One run in full.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct RunDetailView {
    #[serde(flatten)]
    run: RunView,
    cost: CostView,
    /// Calls of models, by model.
    models: Vec<ModelView>,
    /// `null` while it is not known.
    compute: Option<ComputeView>,
}

impl From<RunDetail> for RunDetailView {
    fn from(detail: RunDetail) -> Self {
        let RunDetail { row, budget, calls } = detail;
        let compute = row.compute.map(|compute| ComputeView {
            cpu_millis: compute.cpu_millis,
            gib_millis: compute.gib_millis,
            charged_micros: compute.charged.0,
        });
        Self {
            cost: CostView {
                reserved_micros: budget.reserved.0,
                charged_micros: budget.charged.0,
                left_micros: budget.left().0,
                overrun_micros: budget.overrun.0,
            },
            models: by_model(&calls),
            compute,
            run: row.into(),
        }
    }
}

/// Calls of each model together. What the sandbox cost is no call.
fn by_model(calls: &[CallRow]) -> Vec<ModelView> {
    let mut models = BTreeMap::<&str, ModelView>::new();
    for call in calls.iter().filter(|call| call.model != sandglass_control::COMPUTE) {
        let view = models.entry(&call.model).or_default();
        let usage: Value =
            call.usage.as_deref().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let number = |name: &str| usage.get(name).and_then(Value::as_u64).unwrap_or(0);
        let inputs = ["input", "cache_read", "cache_write", "cache_write_long", "image_input"];
        view.model.clone_from(&call.model);
        view.calls += 1;
        view.charged_micros += call.charged.unwrap_or_default().0;
        view.input_tokens += inputs.iter().map(|name| number(name)).sum::<u64>();
        view.output_tokens += number("output") + number("image_output");
    }
    models.into_values().collect()
}

/// Something that happened to a run.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct RunEventView {
    run_id: String,
    /// From 1 on, without gaps.
    pub(super) seq: u64,
    #[schema(format = DateTime)]
    at: String,
    /// `host`, `gateway` or `verifier`, which are the server's own word; or `worker`, which is a program's in the sandbox.
    source: &'static str,
    /// What, such as `sandbox.ready`.
    r#type: String,
    #[schema(value_type = Object)]
    data: Value,
}

impl RunEventView {
    pub(super) fn new(run: &sandglass_types::RunId, row: RunEventRow) -> Self {
        let RunEventRow { seq, event } = row;
        Self {
            run_id: run.to_string(),
            seq,
            at: event.at.to_string(),
            source: event.source.as_str(),
            r#type: event.kind,
            data: event.data,
        }
    }
}

/// Something that a run left.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ArtifactView {
    /// Relative to the folder of the project; `null` if it is not kept.
    path: Option<String>,
    /// Its permission bits.
    mode: u32,
    bytes: u64,
    /// `null` if it is not kept.
    sha256: Option<String>,
}

impl From<Artifact> for ArtifactView {
    fn from(artifact: Artifact) -> Self {
        let Artifact { path, mode, size, sha256, .. } = artifact;
        Self { path, mode, bytes: size, sha256: sha256.map(|sha256| sha256.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn accepted(body: Value) -> Result<Asked, String> {
        let body: CreateRun = serde_json::from_value(body).map_err(|error| error.to_string())?;
        body.accept(None).map_err(|error| error.into_body().message().to_owned())
    }

    #[test]
    fn what_is_absent_is_off() {
        let Asked { spec, turn, idempotency } = accepted(json!({"prompt": "make it"})).unwrap();
        assert_eq!((spec.agent, spec.web, spec.shell, spec.model), (Agent::Builtin, Web::Off, false, None));
        assert_eq!(
            (spec.most, spec.timeout, spec.retention_days),
            (Micros::ZERO, Duration::from_secs(300), 30)
        );
        assert!(spec.outputs.is_empty() && spec.checks.is_empty() && !turn.hold && turn.files.is_empty());
        assert!(idempotency.is_none() && spec.template == "base" && spec.retention == Retention::Full);
    }

    #[test]
    fn every_field_is_understood() {
        let asked = accepted(json!({
            "prompt": "p", "template": "t", "web": ["example.com"], "shell": true, "agent": {"command": ["a", "b"]}, "model": "m",
            "files": [{"path": "a/b", "content": "x", "mode": 493}, {"path": "c", "content_base64": "AAE=", "read_only": true}],
            "outputs": ["*.js"], "timeout_seconds": 9, "max_cost_micros": 40_000, "retention": "none", "retention_days": 1,
            "metadata": {"k": "v"}, "checks": [{"command": "true", "timeout_seconds": 5}], "max_repairs": 0, "hold": true,
        }));
        let Asked { spec, turn, .. } = asked.unwrap();
        assert_eq!(spec.web, Web::Only(vec!["example.com".into()]));
        assert_eq!(turn.files[0].mode.bits(), 0o755);
        assert_eq!((turn.files[1].content.as_slice(), turn.files[1].read_only), (&[0, 1][..], true));
        assert_eq!((spec.checks[0].timeout.as_secs(), spec.max_repairs, turn.hold), (5, 0, true));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (body, word) in [
            (json!({}), "prompt"),
            (json!({"prompt": ""}), "prompt"),
            (json!({"prompt": "p", "children": 2}), "children"),
            (json!({"prompt": "p", "webhook": "https://example.com"}), "webhook"),
            (json!({"prompt": "p", "agent": "gemini"}), "agent"),
            (json!({"prompt": "p", "agent": {"command": []}}), "command"),
            (json!({"prompt": "p", "retention": "some"}), "retention"),
            (json!({"prompt": "p", "outputs": ["../x"]}), "outputs"),
            (json!({"prompt": "p", "files": [{"path": "/etc/passwd", "content": ""}]}), "files.path"),
            (json!({"prompt": "p", "files": [{"path": "a"}]}), "content"),
            (json!({"prompt": "p", "files": [{"path": "a", "content": "", "mode": 2048}]}), "files.mode"),
            (json!({"prompt": "p", "files": [{"path": "a", "content_base64": "?"}]}), "base64"),
            (json!({"prompt": "p", "model": "a b"}), "model"),
        ] {
            let message = accepted(body.clone()).unwrap_err();
            assert!(message.contains(word), "{body}: {message}");
        }
    }
}
