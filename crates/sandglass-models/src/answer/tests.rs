use serde_json::{Value, json};

use super::*;
use crate::text::Tokens;

fn streamed(dialect: Dialect, wants_usage: bool, text: &str, piece: usize) -> (Told, String) {
    let mut stream = Stream::new(dialect, wants_usage);
    let mut on: Vec<u8> = text.as_bytes().chunks(piece).flat_map(|piece| stream.feed(piece)).collect();
    let (told, rest) = stream.end();
    on.extend(rest);
    (told, String::from_utf8(on).unwrap())
}

fn events(events: &[Value]) -> String {
    events
        .iter()
        .map(|event| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or("x")))
        .collect()
}

#[test]
fn the_last_word_of_what_was_used_counts_and_is_not_added() {
    let text = events(&[
        json!({"type": "message_start", "message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 1}}}),
        json!({"type": "content_block_delta", "delta": {"text": "usage"}}),
        json!({"type": "message_delta", "usage": {"output_tokens": 20}}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"input_tokens": 12, "output_tokens": 30}}),
        json!({"type": "message_stop"}),
    ]);
    for piece in [1, 7, 100_000] {
        let (told, on) = streamed(Dialect::Messages, true, &text, piece);
        assert_eq!(on, text);
        let usage = Usage { input: 12, cache_read: 5, output: 30, ..Usage::default() };
        let length = text.len() as u64;
        assert_eq!(told, Told { usage: Some(usage), last: true, complete: true, length, beyond: false });
    }
    let cut = &text[..text.len() / 2];
    assert!(!streamed(Dialect::Messages, true, cut, 50).0.complete);
}

#[test]
fn an_answer_that_is_cut_off_costs_all_that_it_may_have_written() {
    let messages = [
        json!({"type": "message_start", "message": {"usage": {"input_tokens": 50, "output_tokens": 1}}}),
        json!({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi", "stop_reason": null}}),
        json!({"type": "message_delta", "delta": {"stop_reason": null}, "usage": {"output_tokens": 2}}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}),
        json!({"type": "message_stop"}),
    ];
    let words = || json!({"choices": [{"delta": {"content": "x"}, "finish_reason": null}], "usage": {"prompt_tokens": 50, "completion_tokens": 1}});
    let end = json!({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 50, "completion_tokens": 3}});
    let chat = [words(), words(), end];
    let responses = [
        json!({"type": "response.in_progress", "response": {"usage": {"input_tokens": 50, "output_tokens": 1}}}),
        json!({"type": "response.output_text.delta", "delta": "x"}),
        json!({"type": "response.completed", "response": {"usage": {"input_tokens": 50, "output_tokens": 3}}}),
    ];
    for (dialect, all, whole) in [
        (Dialect::Messages, &messages[..], 4),
        (Dialect::Chat, &chat, 3),
        (Dialect::Responses, &responses, 3),
    ] {
        for heard in 1..=all.len() {
            let (told, _) = streamed(dialect, true, &events(&all[..heard]), 64);
            let settled = told.settle(&FACTS, &PLAN, &PRICE);
            let (charged, estimated) = if heard < whole { (50 + 10_000, true) } else { (50 + 30, false) };
            assert_eq!(
                (settled.charged, settled.estimated),
                (Micros(charged), estimated),
                "{dialect:?} {heard}"
            );
        }
    }
    // Where the provider says that it can't go on, it wrote what came.
    let error = json!({"type": "error", "error": {"type": "overloaded_error"}});
    let text = events(&[messages[0].clone(), error]);
    let settled = streamed(Dialect::Messages, true, &text, 64).0.settle(&FACTS, &PLAN, &PRICE);
    let written = (text.len() as u64).div_ceil(3);
    assert_eq!((settled.charged, settled.estimated), (Micros(50 + 10 * written), true));
}

#[test]
fn no_number_becomes_smaller_by_what_is_said_later() {
    let start = json!({"type": "message_start", "message": {"usage": {
        "input_tokens": 10, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 9,
        "cache_creation": {"ephemeral_1h_input_tokens": 4}, "output_tokens": 1,
    }}});
    for later in [
        json!({"input_tokens": 0, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0, "output_tokens": 20}),
        json!({"input_tokens": null, "cache_read_input_tokens": null, "cache_creation": null, "output_tokens": 20}),
        json!({"output_tokens": 20}),
    ] {
        let end = json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": later});
        let (told, _) = streamed(Dialect::Messages, true, &events(&[start.clone(), end]), 1000);
        let usage = Usage {
            input: 10,
            cache_read: 5,
            cache_write: 5,
            cache_write_long: 4,
            output: 20,
            ..Usage::default()
        };
        assert_eq!((told.usage, told.last), (Some(usage), true), "{later}");
    }
}

#[test]
fn what_no_price_is_for_is_noticed() {
    let searched = json!({"usage": {"input_tokens": 1, "output_tokens": 1, "server_tool_use": {"web_search_requests": 1}}});
    assert!(Told::of(Dialect::Messages, searched.to_string().as_bytes()).beyond);
    let dear = json!({"service_tier": "priority", "usage": {"prompt_tokens": 1, "completion_tokens": 1}});
    assert!(Told::of(Dialect::Chat, dear.to_string().as_bytes()).beyond);
    let streamed = |event: Value| streamed(Dialect::Responses, true, &events(&[event]), 99).0.beyond;
    assert!(streamed(json!({"type": "response.created", "response": {"service_tier": "priority"}})));
    assert!(!streamed(json!({"type": "response.created", "response": {"service_tier": "default"}})));
}

#[test]
fn a_client_sees_what_it_asked_for_and_no_more() {
    let chunk = |value: Value| format!("data: {value}\n\n");
    let usage = chunk(json!({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}));
    let words = [
        chunk(json!({"choices": [{"delta": {"content": "hi"}}], "usage": null})),
        chunk(json!({"choices": [{"finish_reason": "stop"}]})),
    ];
    let done = "data: [DONE]\n\n";
    let text = format!("{}{}{usage}{done}", words[0], words[1]);
    for piece in [1, 33, 100_000] {
        let (told, all) = streamed(Dialect::Chat, true, &text, piece);
        assert_eq!(all, text);
        let (hidden, on) = streamed(Dialect::Chat, false, &text, piece);
        assert_eq!(on, format!("{}{}{done}", words[0], words[1]));
        assert_eq!(told, hidden);
        assert_eq!(told.usage, Some(Usage { input: 3, output: 4, ..Usage::default() }));
        assert!(told.complete);
    }
    // An upstream that tells it with the last words.
    let both = chunk(
        json!({"choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}),
    );
    let (told, on) = streamed(Dialect::Chat, false, &both, 9);
    assert_eq!((on, told.usage.is_some()), (both, true));
}

#[test]
fn responses_tell_it_however_they_end() {
    for end in ["response.completed", "response.incomplete", "response.failed"] {
        let text = events(&[
            json!({"type": "response.created", "response": {"usage": null}}),
            json!({"type": end, "response": {"usage": {"input_tokens": 2, "output_tokens": 3}}}),
        ]);
        let (told, _) = streamed(Dialect::Responses, true, &text, 11);
        assert_eq!(told.usage, Some(Usage { input: 2, output: 3, ..Usage::default() }));
        assert!(told.complete);
    }
    let none = events(&[json!({"type": "response.failed", "response": {"usage": null}})]);
    assert_eq!(streamed(Dialect::Responses, true, &none, 11).0.usage, None);
}

const PRICE: Price = Price {
    input: 1_000_000,
    output: 10_000_000,
    cache_read: None,
    cache_write: None,
    cache_write_long: None,
    image_input: None,
    image_output: None,
    image_tokens: None,
    overhead: 0,
    call: 0,
    long: None,
    max_input: 1_000_000,
    max_output: 1000,
};
const FACTS: Facts = Facts {
    text: Tokens { likely: 100, most: 100 },
    pictures: 0,
    tools: false,
    explained: 0,
    caches: false,
    output: None,
    images: 0,
};
const PLAN: Plan = Plan { input: 100, output: 1000, reserved: Micros(10_100) };

#[test]
fn what_was_used_is_charged_and_no_more_than_was_set_aside() {
    let body = json!({"usage": {"input_tokens": 50, "output_tokens": 10}}).to_string();
    let told = Told::of(Dialect::Messages, body.as_bytes());
    let settled = told.settle(&FACTS, &PLAN, &PRICE);
    assert_eq!(settled, Settlement { charged: Micros(150), overrun: Micros::ZERO, estimated: false });
    let usage = Some(Usage { input: 300, output: 1000, ..Usage::default() });
    let above = Told { usage, ..told }.settle(&FACTS, &PLAN, &PRICE);
    assert_eq!(above, Settlement { charged: Micros(10_100), overrun: Micros(200), estimated: false });
}

#[test]
fn who_does_not_say_what_was_used_is_estimated() {
    let unsaid = |complete, length| Told::unheard(complete, length).settle(&FACTS, &PLAN, &PRICE);
    assert_eq!(
        unsaid(true, 300),
        Settlement { charged: Micros(1100), overrun: Micros::ZERO, estimated: true }
    );
    // It may have thought before it was cut off.
    assert_eq!(unsaid(false, 3).charged, Micros(10_100));
    assert_eq!(unsaid(true, u64::MAX).charged, Micros(10_100));
    assert_eq!(Told::of(Dialect::Chat, b"<html>"), Told::unheard(false, 6));
}
