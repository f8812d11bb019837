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

/// Takes them out of what an object calls its tools, and tells their kinds. That object is the call itself, or anything in its
/// conversation: Codex of 2026 tells its tools there, and a search for tools has some as its result.
pub(super) fn strip(dialect: Dialect, holder: &mut Object, stripped: &mut Vec<String>) {
    strip_list(dialect, holder, MAX_DEPTH, stripped);
}

fn strip_list(dialect: Dialect, holder: &mut Object, depth: u32, stripped: &mut Vec<String>) {
    let Some(Json::Array(tools)) = holder.get_mut("tools") else { return };
    let all = std::mem::take(tools);
    for mut tool in all {
        let kind = kind(dialect, &tool).to_owned();
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

/// How many tools of kinds that the provider explains to its model by itself are left.
pub(super) fn explained(dialect: Dialect, body: &Object) -> u64 {
    let tools = body.get("tools").and_then(Json::array).unwrap_or_default();
    let explained =
        tools.iter().filter(|tool| dialect == Dialect::Messages && kind(dialect, tool) != "custom");
    u64::try_from(explained.count()).unwrap_or(u64::MAX)
}

fn kind(dialect: Dialect, tool: &Json) -> &str {
    let Some(tool) = tool.object() else { return "" };
    match tool.get("type") {
        // Anthropic's clients leave it out.
        None | Some(Json::Null) if dialect == Dialect::Messages => "custom",
        kind => kind.and_then(Json::text).unwrap_or_default(),
    }
}

fn is_own(dialect: Dialect, kind: &str) -> bool {
    let own = if dialect == Dialect::Messages { &ANTHROPIC } else { &OPENAI };
    own.iter().any(|own| if own.ends_with('_') { kind.starts_with(own) } else { kind == *own })
}

/// A choice of a tool that is gone is none, and where the call itself had tools and has none left there is nothing to choose.
pub(super) fn unchoose(dialect: Dialect, body: &mut Object) {
    if body.get("tools").is_some_and(Json::is_void) {
        for name in ["tools", "tool_choice", "parallel_tool_calls"] {
            body.remove(name);
        }
    }
    let Some(choice) = body.get("tool_choice").and_then(Json::object) else { return };
    let kind = choice.get("type").and_then(Json::text);
    let plain = |kind: &str| ["auto", "any", "none", "tool", "allowed_tools"].contains(&kind);
    let own = |kind: &str| is_own(dialect, kind) || plain(kind);
    if kind.is_some_and(|kind| !own(kind)) || choice.get("tools").is_some_and(Json::is_void) {
        body.remove("tool_choice");
    }
}
