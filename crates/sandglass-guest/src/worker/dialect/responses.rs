//! OpenAI's Responses.

use serde_json::{Value, json};

use super::{Answer, Hearing, MAX_PARTS, Question, Stop, Tokens, add, number, text};
use crate::worker::talk::{Entry, Use};

pub(super) fn ask(question: &Question<'_>) -> Value {
    let tools = question.tools.iter();
    let tools: Vec<Value> = tools
        .map(|tool| {
            json!({"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.input})
        })
        .collect();
    let mut body = json!({
        "model": question.model,
        "max_output_tokens": question.max_output,
        "instructions": question.system,
        "input": question.talk.entries().iter().flat_map(items).collect::<Vec<_>>(),
        "stream": true,
        // Nothing is kept there, so thoughts come along, in a form that only the provider can read.
        "store": false,
        "include": ["reasoning.encrypted_content"],
    });
    if !tools.is_empty() {
        body["tools"] = tools.into();
    }
    if question.plain {
        body["temperature"] = 0.into();
    }
    body
}

fn items(entry: &Entry) -> Vec<Value> {
    match entry {
        Entry::User { text } => {
            vec![message("user", "input_text", text)]
        }
        Entry::Model { text, uses, kept } => {
            let mut items = kept.clone();
            if !text.is_empty() {
                items.push(message("assistant", "output_text", text));
            }
            items.extend(uses.iter().map(
                |one| json!({"type": "function_call", "call_id": one.id, "name": one.name, "arguments": one.input}),
            ));
            items
        }
        Entry::Tools { outcomes } => outcomes
            .iter()
            .map(|one| json!({"type": "function_call_output", "call_id": one.id, "output": one.text}))
            .collect(),
    }
}

/// Its type may be left out, but other servers that speak this want it.
fn message(role: &str, kind: &str, text: &str) -> Value {
    json!({"type": "message", "role": role, "content": [{"type": kind, "text": text}]})
}

/// An answer that comes. Each item is told once more when it is whole, so the pieces are left alone.
#[derive(Debug, Default)]
pub(super) struct Heard {
    answer: Answer,
    ended: bool,
}

impl Heard {
    fn take(&mut self, item: &Value) {
        let answer = &mut self.answer;
        if answer.uses.len() + answer.kept.len() >= MAX_PARTS {
            return;
        }
        match text(item, "/type") {
            "message" => {
                for part in item.get("content").and_then(Value::as_array).into_iter().flatten() {
                    if part.get("refusal").is_some() {
                        answer.stop = Stop::Refusal;
                    }
                    add(&mut answer.text, text(part, "/text"));
                    add(&mut answer.text, text(part, "/refusal"));
                }
            }
            "function_call" => {
                let mut input = String::new();
                add(&mut input, text(item, "/arguments"));
                answer.uses.push(Use {
                    id: text(item, "/call_id").into(),
                    name: text(item, "/name").into(),
                    input,
                });
            }
            "reasoning" if item.get("encrypted_content").is_some_and(Value::is_string) => {
                answer.kept.push(item.clone());
            }
            _ => {}
        }
    }
}

impl Hearing for Heard {
    fn hear(&mut self, event: &Value) {
        match text(event, "/type") {
            "response.output_item.done" => self.take(&event["item"]),
            kind @ ("response.completed" | "response.incomplete") => {
                self.ended = true;
                let usage = &event["response"]["usage"];
                self.answer.tokens = Tokens {
                    read: number(usage, "/input_tokens"),
                    cached: number(usage, "/input_tokens_details/cached_tokens"),
                    written: number(usage, "/output_tokens"),
                };
                if kind == "response.incomplete" {
                    let filtered = text(event, "/response/incomplete_details/reason") == "content_filter";
                    self.answer.stop = if filtered { Stop::Refusal } else { Stop::Length };
                }
            }
            _ => {}
        }
    }

    fn end(self: Box<Self>) -> Option<Answer> {
        self.ended.then_some(self.answer)
    }
}
