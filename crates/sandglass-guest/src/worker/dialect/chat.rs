//! OpenAI's Chat Completions.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{Answer, Hearing, Question, Stop, Tokens, add, index, number, text};
use crate::worker::talk::{Entry, Use};

pub(super) fn ask(question: &Question<'_>) -> Value {
    let mut said = vec![json!({"role": "system", "content": question.system})];
    said.extend(question.talk.entries().iter().flat_map(turns));
    let tools = question.tools.iter();
    let tools: Vec<Value> = tools
        .map(|tool| {
            let function =
                json!({"name": tool.name, "description": tool.description, "parameters": tool.input});
            json!({"type": "function", "function": function})
        })
        .collect();
    let mut body = json!({
        "model": question.model,
        "max_completion_tokens": question.max_output,
        "messages": said,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    if !tools.is_empty() {
        body["tools"] = tools.into();
    }
    if question.plain {
        body["temperature"] = 0.into();
    }
    body
}

fn turns(entry: &Entry) -> Vec<Value> {
    match entry {
        Entry::User { text } => vec![json!({"role": "user", "content": text})],
        Entry::Model { text, uses, .. } => {
            let mut turn = json!({"role": "assistant", "content": text});
            let calls = uses.iter().map(|one| {
                let function = json!({"name": one.name, "arguments": one.input});
                json!({"id": one.id, "type": "function", "function": function})
            });
            let calls: Vec<_> = calls.collect();
            if !calls.is_empty() {
                turn["tool_calls"] = calls.into();
            }
            vec![turn]
        }
        Entry::Tools { outcomes } => outcomes
            .iter()
            .map(|one| json!({"role": "tool", "tool_call_id": one.id, "content": one.text}))
            .collect(),
    }
}

/// An answer that comes.
#[derive(Debug, Default)]
pub(super) struct Heard {
    text: String,
    uses: BTreeMap<usize, Use>,
    stop: Option<Stop>,
    tokens: Tokens,
}

impl Hearing for Heard {
    fn hear(&mut self, event: &Value) {
        if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
            self.tokens = Tokens {
                read: number(usage, "/prompt_tokens"),
                cached: number(usage, "/prompt_tokens_details/cached_tokens"),
                written: number(usage, "/completion_tokens"),
            };
        }
        let Some(choice) = event.pointer("/choices/0") else { return };
        add(&mut self.text, text(choice, "/delta/content"));
        let calls = choice.pointer("/delta/tool_calls").and_then(Value::as_array);
        for (place, call) in calls.into_iter().flatten().enumerate() {
            // Some leave it out, and tell each call at once.
            let at = index(call, "/index").unwrap_or(place);
            let one = self.uses.entry(at).or_insert_with(|| Use {
                id: String::new(),
                name: String::new(),
                input: String::new(),
            });
            if one.id.is_empty() {
                one.id = text(call, "/id").into();
            }
            add(&mut one.name, text(call, "/function/name"));
            add(&mut one.input, text(call, "/function/arguments"));
        }
        self.stop = match text(choice, "/finish_reason") {
            "" => self.stop,
            "length" => Some(Stop::Length),
            "content_filter" => Some(Stop::Refusal),
            _ => Some(Stop::Said),
        };
    }

    fn end(self: Box<Self>) -> Option<Answer> {
        let uses = self.uses.into_values().collect();
        Some(Answer { text: self.text, uses, kept: Vec::new(), stop: self.stop?, tokens: self.tokens })
    }
}
