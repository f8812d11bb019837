use serde_json::json;

use super::*;
use crate::worker::talk::{Entry, Outcome};

const ALL: [Dialect; 3] = [Dialect::Messages, Dialect::Chat, Dialect::Responses];

fn heard(dialect: Dialect, events: &[Value]) -> Option<Answer> {
    let mut heard = dialect.hearing();
    events.iter().for_each(|event| heard.hear(event));
    heard.end()
}

fn one_use() -> Use {
    Use { id: "c1".into(), name: "shell".into(), input: r#"{"command":"ls"}"#.into() }
}

fn asked(dialect: Dialect) -> Value {
    let mut talk = Talk::new(dialect);
    talk.say(Entry::User { text: "do it".into() });
    let kept = match dialect {
        Dialect::Messages => json!({"type": "thinking", "thinking": "hm", "signature": "s"}),
        _ => json!({"type": "reasoning", "id": "r", "encrypted_content": "e"}),
    };
    let kept = if dialect == Dialect::Chat { vec![] } else { vec![kept] };
    talk.say(Entry::Model { text: "well".into(), uses: vec![one_use()], kept });
    talk.say(Entry::Tools {
        outcomes: vec![Outcome { id: "c1".into(), text: "a.txt".into(), failed: true }],
    });
    let tools = [Tool { name: "shell", description: "runs", input: json!({"type": "object"}) }];
    let question =
        Question { model: "m", system: "be good", talk: &talk, tools: &tools, max_output: 50, plain: false };
    dialect.ask(&question)
}

#[test]
fn a_talk_is_asked_in_the_words_of_each() {
    let body = asked(Dialect::Messages);
    let cache = json!({"type": "ephemeral"});
    assert_eq!(
        body,
        json!({
            "model": "m", "max_tokens": 50, "system": "be good", "stream": true,
            "tools": [{"name": "shell", "description": "runs", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "do it"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "well"},
                    {"type": "tool_use", "id": "c1", "name": "shell", "input": {"command": "ls"}},
                ]},
                {"role": "user", "content": [{
                    "type": "tool_result", "tool_use_id": "c1", "content": "a.txt", "is_error": true, "cache_control": cache,
                }]},
            ],
        })
    );
    let body = asked(Dialect::Chat);
    let function = json!({"name": "shell", "arguments": "{\"command\":\"ls\"}"});
    assert_eq!(
        body["messages"],
        json!([
            {"role": "system", "content": "be good"},
            {"role": "user", "content": "do it"},
            {"role": "assistant", "content": "well", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        ])
    );
    assert_eq!(body["stream_options"], json!({"include_usage": true}));
    assert_eq!(body["tools"][0]["function"]["name"], "shell");
    let body = asked(Dialect::Responses);
    assert_eq!(
        body["input"],
        json!([
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do it"}]},
            {"type": "reasoning", "id": "r", "encrypted_content": "e"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
            {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{\"command\":\"ls\"}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
        ])
    );
    assert_eq!((&body["store"], &body["instructions"]), (&json!(false), &json!("be good")));
}

#[test]
fn an_answer_of_messages_is_put_together() {
    let events = [
        json!({"type": "message_start", "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 7, "output_tokens": 1}}}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}}),
        json!({"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}}),
        json!({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "we"}}),
        json!({"type": "ping"}),
        json!({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "ll"}}),
        json!({"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "c1", "name": "shell", "input": {}}}),
        json!({"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "{\"command\""}}),
        json!({"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ":\"ls\"}"}}),
        json!({"type": "content_block_delta", "index": 99, "delta": {"type": "text_delta", "text": "nowhere"}}),
        json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}}),
        json!({"type": "message_stop"}),
    ];
    let answer = heard(Dialect::Messages, &events).unwrap();
    assert_eq!((&*answer.text, &answer.uses, answer.stop), ("well", &vec![one_use()], Stop::Said));
    assert_eq!(answer.kept, [json!({"type": "thinking", "thinking": "hm", "signature": "s"})]);
    assert_eq!(answer.tokens, Tokens { read: 12, cached: 7, written: 9 });
    assert_eq!(heard(Dialect::Messages, &events[..events.len() - 1]), None);
}

#[test]
fn an_answer_of_chat_is_put_together() {
    let chunk = |delta: Value, finish: Value| json!({"choices": [{"delta": delta, "finish_reason": finish}], "usage": null});
    let call = |id: Value, name: Value, arguments: &str| {
        let function = json!({"name": name, "arguments": arguments});
        chunk(json!({"tool_calls": [{"index": 0, "id": id, "function": function}]}), Value::Null)
    };
    let events = [
        chunk(json!({"role": "assistant", "content": ""}), Value::Null),
        chunk(json!({"content": "we"}), Value::Null),
        chunk(json!({"content": "ll"}), Value::Null),
        call("c1".into(), "shell".into(), "{\"command\""),
        call(Value::Null, Value::Null, ":\"ls\"}"),
        chunk(json!({}), "tool_calls".into()),
        json!({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}}),
    ];
    let answer = heard(Dialect::Chat, &events).unwrap();
    assert_eq!((&*answer.text, &answer.uses, answer.stop), ("well", &vec![one_use()], Stop::Said));
    assert_eq!(answer.tokens, Tokens { read: 12, cached: 7, written: 9 });
    assert_eq!(heard(Dialect::Chat, &events[..5]), None);
    // Calls without positions, all of them at once.
    let calls = json!([{"id": "a", "function": {"name": "x", "arguments": "{}"}}, {"id": "b", "function": {"name": "y"}}]);
    let answer = heard(Dialect::Chat, &[chunk(json!({"tool_calls": calls}), "stop".into())]).unwrap();
    assert_eq!(answer.uses.iter().map(|one| &*one.id).collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn an_answer_of_responses_is_put_together() {
    let done = |item: Value| json!({"type": "response.output_item.done", "item": item});
    let events = [
        json!({"type": "response.created", "response": {}}),
        done(json!({"type": "reasoning", "id": "r", "encrypted_content": "e"})),
        json!({"type": "response.output_text.delta", "delta": "we"}),
        done(json!({"type": "message", "content": [{"type": "output_text", "text": "well"}]})),
        done(
            json!({"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{\"command\":\"ls\"}"}),
        ),
        json!({"type": "response.completed", "response": {"usage": {
            "input_tokens": 12, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 7},
        }}}),
    ];
    let answer = heard(Dialect::Responses, &events).unwrap();
    assert_eq!((&*answer.text, &answer.uses, answer.stop), ("well", &vec![one_use()], Stop::Said));
    assert_eq!(answer.kept, [json!({"type": "reasoning", "id": "r", "encrypted_content": "e"})]);
    assert_eq!(answer.tokens, Tokens { read: 12, cached: 7, written: 9 });
    assert_eq!(heard(Dialect::Responses, &events[..5]), None);
}

#[test]
fn why_an_answer_ended_is_told_alike() {
    let messages = |why: &str| {
        let end = json!({"type": "message_delta", "delta": {"stop_reason": why}});
        heard(Dialect::Messages, &[end, json!({"type": "message_stop"})]).unwrap().stop
    };
    let chat = |why: &str| {
        heard(Dialect::Chat, &[json!({"choices": [{"delta": {}, "finish_reason": why}]})]).unwrap().stop
    };
    let responses = |why: &str| {
        let response = json!({"incomplete_details": {"reason": why}});
        heard(Dialect::Responses, &[json!({"type": "response.incomplete", "response": response})])
            .unwrap()
            .stop
    };
    assert_eq!([messages("max_tokens"), chat("length"), responses("max_output_tokens")], [Stop::Length; 3]);
    assert_eq!(
        [messages("refusal"), chat("content_filter"), responses("content_filter")],
        [Stop::Refusal; 3]
    );
    assert_eq!([messages("end_turn"), chat("stop")], [Stop::Said; 2]);
}

#[test]
fn no_event_is_too_odd() {
    let odd = [
        json!(null),
        json!([1]),
        json!({"type": 5}),
        json!({"type": "content_block_start", "index": 1_u64 << 40, "content_block": {"type": "text"}}),
        json!({"type": "content_block_start", "index": 0, "content_block": 7}),
        json!({"type": "message_delta", "usage": 3}),
        json!({"type": "response.output_item.done", "item": {"type": "message", "content": [null, 4]}}),
        json!({"type": "response.completed"}),
        json!({"choices": [{"delta": {"tool_calls": [null, {"index": -1}, {"index": 1e30}]}}]}),
        json!({"choices": {"0": 1}}),
    ];
    for dialect in ALL {
        heard(dialect, &odd);
    }
}
