//! Anthropic's Messages.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{Answer, Hearing, Question, Stop, Tokens, add, index, number, text};
use crate::worker::talk::{Entry, Use};

/// What makes a provider keep all that comes before, so that the next call need not pay for it again.
fn cached(mut block: Value) -> Value {
    block["cache_control"] = json!({"type": "ephemeral"});
    block
}

pub(super) fn ask(question: &Question<'_>) -> Value {
    let mut said: Vec<Value> = question.talk.entries().iter().map(turn).collect();
    let last = said.last_mut().and_then(|turn| turn["content"].as_array_mut()?.last_mut());
    if let Some(last) = last {
        *last = cached(last.take());
    }
    let tools = question.tools.iter();
    let tools: Vec<Value> = tools
        .map(|tool| json!({"name": tool.name, "description": tool.description, "input_schema": tool.input}))
        .collect();
    let mut body = json!({
        "model": question.model,
        "max_tokens": question.max_output,
        "system": question.system,
        "messages": said,
        "stream": true,
    });
    if !tools.is_empty() {
        body["tools"] = tools.into();
    }
    if question.plain {
        body["temperature"] = 0.into();
    }
    body
}

fn turn(entry: &Entry) -> Value {
    match entry {
        Entry::User { text } => json!({"role": "user", "content": [{"type": "text", "text": text}]}),
        Entry::Model { text, uses, kept } => {
            let mut content = kept.clone();
            // It takes none that is empty.
            if !text.trim().is_empty() {
                content.push(json!({"type": "text", "text": text}));
            }
            content.extend(uses.iter().map(|one| {
                let input: Value = serde_json::from_str(&one.input).unwrap_or_default();
                let input = if input.is_object() { input } else { json!({}) };
                json!({"type": "tool_use", "id": one.id, "name": one.name, "input": input})
            }));
            json!({"role": "assistant", "content": content})
        }
        Entry::Tools { outcomes } => {
            let result = outcomes.iter().map(
                |one| json!({"type": "tool_result", "tool_use_id": one.id, "content": one.text, "is_error": one.failed}),
            );
            json!({"role": "user", "content": result.collect::<Vec<_>>()})
        }
    }
}

/// A part of the answer.
#[derive(Debug)]
enum Block {
    Text(String),
    Use(Use),
    /// Thoughts, which nobody else understands.
    Kept(Value),
}

/// An answer that comes.
#[derive(Debug, Default)]
pub(super) struct Heard {
    blocks: BTreeMap<usize, Block>,
    stop: Option<Stop>,
    tokens: Tokens,
    ended: bool,
}

impl Heard {
    fn start(&mut self, event: &Value) -> Option<()> {
        let (index, block) = (index(event, "/index")?, event.get("content_block")?);
        let made = match text(block, "/type") {
            "text" => Block::Text(text(block, "/text").into()),
            "tool_use" => {
                let (id, name) = (text(block, "/id").into(), text(block, "/name").into());
                Block::Use(Use { id, name, input: String::new() })
            }
            "thinking" | "redacted_thinking" => Block::Kept(block.clone()),
            _ => return None,
        };
        self.blocks.insert(index, made);
        Some(())
    }

    fn go_on(&mut self, event: &Value) -> Option<()> {
        let delta = event.get("delta")?;
        match self.blocks.get_mut(&index(event, "/index")?)? {
            Block::Text(said) => add(said, text(delta, "/text")),
            Block::Use(one) => add(&mut one.input, text(delta, "/partial_json")),
            Block::Kept(block) => {
                for name in ["thinking", "signature"] {
                    if let Some(more) = delta.get(name).and_then(Value::as_str) {
                        let mut whole = block[name].as_str().unwrap_or_default().to_owned();
                        add(&mut whole, more);
                        block[name] = whole.into();
                    }
                }
            }
        }
        Some(())
    }

    /// Each tells the sum of all that came before it.
    fn count(&mut self, usage: &Value) {
        let cached = number(usage, "/cache_read_input_tokens");
        let read = number(usage, "/input_tokens") + cached + number(usage, "/cache_creation_input_tokens");
        let most = &mut self.tokens;
        (most.read, most.cached) = (most.read.max(read), most.cached.max(cached));
        most.written = most.written.max(number(usage, "/output_tokens"));
    }
}

impl Hearing for Heard {
    fn hear(&mut self, event: &Value) {
        match text(event, "/type") {
            "message_start" => self.count(&event["message"]["usage"]),
            "content_block_start" => _ = self.start(event),
            "content_block_delta" => _ = self.go_on(event),
            "message_delta" => {
                self.count(&event["usage"]);
                self.stop = match text(event, "/delta/stop_reason") {
                    "" => self.stop,
                    "max_tokens" | "model_context_window_exceeded" => Some(Stop::Length),
                    "refusal" => Some(Stop::Refusal),
                    _ => Some(Stop::Said),
                };
            }
            "message_stop" => self.ended = true,
            _ => {}
        }
    }

    fn end(self: Box<Self>) -> Option<Answer> {
        let mut answer = Answer { stop: self.stop?, tokens: self.tokens, ..Answer::default() };
        for block in self.blocks.into_values() {
            match block {
                Block::Text(said) => answer.text.push_str(&said),
                Block::Use(one) => answer.uses.push(one),
                Block::Kept(block) => answer.kept.push(block),
            }
        }
        self.ended.then_some(answer)
    }
}
