use serde_json::json;

use super::*;

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
        json!({"type": "message_delta", "usage": {"input_tokens": 12, "output_tokens": 30}}),
        json!({"type": "message_stop"}),
    ]);
    for piece in [1, 7, 100_000] {
        let (told, on) = streamed(Dialect::Messages, true, &text, piece);
        assert_eq!(on, text);
        let usage = Usage { input: 12, cache_read: 5, output: 30, ..Usage::default() };
        assert_eq!(told, Told { usage: Some(usage), complete: true, length: text.len() as u64 });
    }
    let cut = &text[..text.len() / 2];
    assert!(!streamed(Dialect::Messages, true, cut, 50).0.complete);
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
    call: 0,
    long: None,
    max_input: 1_000_000,
    max_output: 1000,
};
const FACTS: Facts = Facts { input: 100, caches: false, output: None, images: 0 };
const PLAN: Plan = Plan { output: 1000, reserved: Micros(10_100) };

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
    let unsaid = |complete, length| Told { usage: None, complete, length }.settle(&FACTS, &PLAN, &PRICE);
    assert_eq!(
        unsaid(true, 300),
        Settlement { charged: Micros(1100), overrun: Micros::ZERO, estimated: true }
    );
    // It may have thought before it was cut off.
    assert_eq!(unsaid(false, 3).charged, Micros(10_100));
    assert_eq!(unsaid(true, u64::MAX).charged, Micros(10_100));
    assert_eq!(Told::of(Dialect::Chat, b"<html>"), Told { usage: None, complete: false, length: 6 });
}
