//! Tools that the provider would run: searches, browsers, interpreters, servers of others. They reach networks that no policy of
//! the sandbox speaks of, and are charged by the call.

use crate::dialect::Dialect;
use crate::json::{Json, Object};

/// Kinds that the client runs itself, whatever follows a name that ends with `_`: all others are taken out, those that are not known yet
/// included.
const ANTHROPIC: [&str; 5] = ["custom", "bash_", "text_editor_", "computer_", "memory_"];
const OPENAI: [&str; 5] = ["function", "custom", "namespace", "local_shell", "apply_patch"];

/// How deep a tool may hold others.
const MAX_DEPTH: u32 = 8;

/// Takes them out, and tells their kinds.
pub(super) fn strip(dialect: Dialect, body: &mut Object) -> Vec<String> {
    let mut stripped = Vec::new();
    strip_list(dialect, body, MAX_DEPTH, &mut stripped);
    // Codex of 2026 tells its tools in the conversation.
    if dialect == Dialect::Responses
        && let Some(Json::Array(items)) = body.get_mut("input")
    {
        for item in items {
            if let Json::Object(item) = item
                && item.get("type").and_then(Json::text) == Some("additional_tools")
            {
                strip_list(dialect, item, MAX_DEPTH, &mut stripped);
            }
        }
    }
    if !stripped.is_empty() {
        unchoose(dialect, body);
    }
    stripped
}

fn strip_list(dialect: Dialect, holder: &mut Object, depth: u32, stripped: &mut Vec<String>) {
    let Some(Json::Array(tools)) = holder.get_mut("tools") else { return };
    let all = std::mem::take(tools);
    for mut tool in all {
        let kind = kind(&tool).to_owned();
        if depth == 0 || !is_own(dialect, &kind) {
            stripped.push(kind);
            continue;
        }
        if let Json::Object(tool) = &mut tool {
            strip_list(dialect, tool, depth - 1, stripped);
        }
        tools.push(tool);
    }
}

fn kind(tool: &Json) -> &str {
    // Anthropic's clients leave it out.
    tool.object().map_or("", |tool| tool.get("type").and_then(Json::text).unwrap_or("custom"))
}

fn is_own(dialect: Dialect, kind: &str) -> bool {
    let own = if dialect == Dialect::Messages { &ANTHROPIC } else { &OPENAI };
    own.iter().any(|own| if own.ends_with('_') { kind.starts_with(own) } else { kind == *own })
}

/// A choice of a tool that is gone is none, and without tools there is nothing to choose.
fn unchoose(dialect: Dialect, body: &mut Object) {
    let empty = body.get("tools").is_none_or(Json::is_void);
    if empty {
        body.remove("tools");
    }
    let chosen = body
        .get("tool_choice")
        .and_then(Json::object)
        .and_then(|choice| choice.get("type"))
        .and_then(Json::text);
    let own = |kind: &str| {
        is_own(dialect, kind) || ["auto", "any", "none", "tool", "allowed_tools"].contains(&kind)
    };
    if empty || chosen.is_some_and(|kind| !own(kind)) {
        body.remove("tool_choice");
    }
}
