//! What is executed for a turn, by who does the work. Pure.

use std::collections::BTreeMap;

use sandglass_models::Dialect;
use sandglass_types::run::{Agent, PROJECT, RunSpec};
use sandglass_types::{RunId, StopReason};
use serde_json::json;

use super::lines::Speaks;
use crate::control::GrantedModels;

/// The worker that is part of every sandbox.
const WORKER: &str = "/usr/lib/sandglass/guest";

/// What the worker keeps for the next turn. It is beside the outputs, and ends with the sandbox.
pub(super) const WORKER_FOLDER: &str = "/workspace/.worker";

/// Runs what its second argument and those behind it say, with the file that is the first one as its standard input.
const FED: &str = r#"exec "${@:2}" <"$1""#;

/// Codex without all that looks for somebody else: updates, telemetry, its own web search, plugins, apps.
const CODEX: &str = r#"
mkdir -p "$HOME/.codex" && printf '%s' "$SANDGLASS_CODEX_CONFIG" >"$HOME/.codex/config.toml" || exit 1
exec codex exec --json --ephemeral --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox - <"$1"
"#;

/// Claude Code in its quiet form, with the model in `$ANTHROPIC_MODEL`.
const CLAUDE: &str = r#"
exec claude --bare -p --dangerously-skip-permissions --model "$ANTHROPIC_MODEL" --output-format stream-json --verbose <"$1"
"#;

/// One turn, as what is executed needs it.
#[derive(Debug, Clone)]
pub(super) struct TurnOf<'a> {
    /// Of which run.
    pub(super) run: &'a RunId,
    /// What it is called: `build`, `repair-1`, `turn-2`.
    pub(super) name: &'a str,
    /// Its number in the run, from 1 on.
    pub(super) number: u32,
    /// What shall be done.
    pub(super) prompt: &'a str,
    /// How long it may take, in seconds.
    pub(super) seconds: u64,
    /// What the agent calls models with, and in which protocol.
    pub(super) models: Option<(&'a GrantedModels, Dialect)>,
}

/// What is executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Execution {
    /// The program and its arguments. One of them is [`Self::file`].
    pub(super) words: Vec<String>,
    /// Its environment.
    pub(super) env: BTreeMap<String, String>,
    /// Where its standard input is written before it begins.
    pub(super) file: String,
    /// That.
    pub(super) input: String,
    /// How its output is read.
    pub(super) speaks: Speaks,
}

/// What is executed for a turn.
pub(super) fn execution(spec: &RunSpec, turn: &TurnOf<'_>) -> Execution {
    let file = format!("/workspace/.turn-{}", turn.number);
    let shell = |script: &str| ["/bin/bash", "-l", "-c", script, "bash", &file].map(str::to_owned).to_vec();
    let mut env = BTreeMap::from([
        ("SANDGLASS_RUN".to_owned(), turn.run.to_string()),
        ("SANDGLASS_TURN".to_owned(), turn.number.to_string()),
        ("SANDGLASS_PROMPT_FILE".to_owned(), file.clone()),
    ]);
    if let Some((models, _)) = turn.models {
        env.extend(access(models));
    }
    let model = spec.model.as_ref().map_or("", |model| model.as_str());
    let (words, input, speaks) = match &spec.agent {
        Agent::Builtin => {
            let mut words = shell(FED);
            words.extend([WORKER, "worker"].map(str::to_owned));
            (words, job(spec, turn), Speaks::Events)
        }
        Agent::Codex => {
            env.insert(
                "SANDGLASS_CODEX_CONFIG".to_owned(),
                codex_config(model, turn.models.map(|(models, _)| models)),
            );
            (shell(CODEX), turn.prompt.to_owned(), Speaks::Text)
        }
        Agent::ClaudeCode => {
            let quiet = [
                ("IS_SANDBOX", "1"),
                ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
                ("CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS", "1"),
                ("ANTHROPIC_MODEL", model),
                ("ANTHROPIC_DEFAULT_OPUS_MODEL", model),
                ("ANTHROPIC_DEFAULT_SONNET_MODEL", model),
                ("ANTHROPIC_DEFAULT_HAIKU_MODEL", model),
            ];
            env.extend(quiet.map(|(key, value)| (key.to_owned(), value.to_owned())));
            (shell(CLAUDE), turn.prompt.to_owned(), Speaks::Text)
        }
        Agent::Command(command) => {
            let mut words = shell(FED);
            words.extend(command.as_words().iter().cloned());
            (words, turn.prompt.to_owned(), Speaks::Text)
        }
    };
    Execution { words, env, file, input, speaks }
}

/// Where models are, and what to send as the key: by our own names, and by those that known programs read.
fn access(models: &GrantedModels) -> [(String, String); 6] {
    let GrantedModels { base_url, token, .. } = models;
    [
        ("SANDGLASS_MODEL_URL", base_url.clone()),
        ("SANDGLASS_MODEL_TOKEN", token.clone()),
        ("ANTHROPIC_BASE_URL", base_url.clone()),
        ("ANTHROPIC_API_KEY", token.clone()),
        ("OPENAI_BASE_URL", format!("{base_url}/v1")),
        ("OPENAI_API_KEY", token.clone()),
    ]
    .map(|(key, value)| (key.to_owned(), value))
}

/// What the worker reads.
fn job(spec: &RunSpec, turn: &TurnOf<'_>) -> String {
    let dialect = turn.models.map_or(Dialect::Messages, |(_, dialect)| dialect);
    json!({
        "prompt": turn.prompt,
        "model": spec.model,
        "dialect": dialect,
        "folder": PROJECT,
        "tools": { "shell": spec.shell, "web": spec.web != sandglass_types::run::Web::Off },
        "turn": { "name": turn.name, "number": turn.number },
        "history": format!("{WORKER_FOLDER}/history.json"),
        "seconds": turn.seconds,
    })
    .to_string()
}

/// The configuration of Codex in which it looks for nobody else. A model's name has no quotes.
fn codex_config(model: &str, models: Option<&GrantedModels>) -> String {
    let base_url = models.map_or("", |models| models.base_url.as_str());
    format!(
        r#"model = "{model}"
model_provider = "sandglass"
check_for_update_on_startup = false
web_search = "disabled"
[analytics]
enabled = false
[features]
plugins = false
apps = false
[model_providers.sandglass]
name = "sandglass"
base_url = "{base_url}/v1"
env_key = "SANDGLASS_MODEL_TOKEN"
wire_api = "responses"
request_max_retries = 1
stream_max_retries = 1
"#
    )
}

/// Why a run stops whose agent ended with this code; `None` if its turn has ended well.
pub(super) fn outcome(agent: &Agent, code: Option<i32>) -> Option<StopReason> {
    match (agent, code) {
        (_, Some(0)) => None,
        (Agent::Builtin, Some(2)) => Some(StopReason::BudgetExhausted),
        (Agent::Builtin, Some(3)) => Some(StopReason::ModelError),
        _ => Some(StopReason::AgentError),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sandglass_types::run::{Command, Retention, Web};
    use sandglass_types::{BudgetId, Micros, Timestamp};

    use super::*;

    fn spec(agent: Agent) -> RunSpec {
        RunSpec {
            template: "base".into(),
            outputs: Vec::new(),
            web: Web::Off,
            shell: true,
            agent,
            model: "large".parse().ok(),
            timeout: Duration::from_secs(60),
            most: Micros(1),
            retention: Retention::Full,
            retention_days: 1,
            metadata: BTreeMap::new(),
            checks: Vec::new(),
            max_repairs: 0,
        }
    }

    fn executed(agent: Agent) -> Execution {
        let models = GrantedModels {
            budget: BudgetId::random(),
            base_url: "http://models.internal".into(),
            token: "sgm_x".into(),
            expires: Timestamp::from_millis(0),
        };
        let run = RunId::random();
        let turn = TurnOf {
            run: &run,
            name: "build",
            number: 1,
            prompt: "make it",
            seconds: 9,
            models: Some((&models, Dialect::Responses)),
        };
        execution(&spec(agent), &turn)
    }

    #[test]
    fn every_agent_gets_its_prompt_and_its_way_to_models() {
        let command = Agent::Command(Command::words(vec!["work".into(), "a b".into()]).unwrap());
        for agent in [Agent::Builtin, Agent::Codex, Agent::ClaudeCode, command] {
            let execution = executed(agent.clone());
            assert!(
                execution.words.contains(&execution.file) && execution.input.contains("make it"),
                "{agent:?}"
            );
            assert_eq!(execution.env["OPENAI_BASE_URL"], "http://models.internal/v1");
            assert_eq!(execution.env["ANTHROPIC_API_KEY"], "sgm_x");
            let spelled = format!("{:?}{}", execution.words, execution.input);
            assert!(!spelled.contains("sgm_x"), "a token is in no command line and no file");
            assert_eq!(execution.speaks == Speaks::Events, agent == Agent::Builtin);
        }
        let execution = executed(Agent::Builtin);
        let job: serde_json::Value = serde_json::from_str(&execution.input).unwrap();
        assert_eq!(job["dialect"], "responses");
        assert_eq!(job["tools"], json!({"shell": true, "web": false}));
        assert_eq!(job["turn"], json!({"name": "build", "number": 1}));
        assert_eq!(job["history"], "/workspace/.worker/history.json");
    }

    #[test]
    fn only_the_worker_has_codes_of_its_own() {
        let command = Agent::Command(Command::words(vec!["x".into()]).unwrap());
        assert_eq!(outcome(&command, Some(0)), None);
        for code in [Some(2), Some(3), Some(1), None] {
            assert_eq!(outcome(&command, code), Some(StopReason::AgentError));
        }
        assert_eq!(outcome(&Agent::Builtin, Some(2)), Some(StopReason::BudgetExhausted));
        assert_eq!(outcome(&Agent::Builtin, Some(3)), Some(StopReason::ModelError));
        assert_eq!(outcome(&Agent::Builtin, None), Some(StopReason::AgentError));
    }
}
