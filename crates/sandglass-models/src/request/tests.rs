use serde_json::{Value, json};

use super::*;

fn call(dialect: Dialect, body: &Value) -> Call {
    Call::parse(dialect, body.to_string().as_bytes()).unwrap()
}

fn refused(dialect: Dialect, body: &Value) -> String {
    Call::parse(dialect, body.to_string().as_bytes()).unwrap_err().to_string()
}

fn upstream(call: Call) -> Value {
    serde_json::from_slice(&call.into_upstream("theirs", 500).unwrap()).unwrap()
}

#[test]
fn what_is_not_known_goes_on_as_it_came() {
    let body = r#"{"z_new":{"b":1,"a":[2.5]},"model":"m","max_tokens":128000,"messages":[{"role":"user","content":"hi"}]}"#;
    let sent = Call::parse(Dialect::Messages, body.as_bytes()).unwrap().into_upstream("theirs", 500).unwrap();
    let expected = body.replace("\"m\"", "\"theirs\"").replace("128000", "500");
    assert_eq!(String::from_utf8(sent).unwrap(), expected);
}

#[test]
fn every_dialect_gets_its_cap() {
    let messages = call(Dialect::Messages, &json!({"model": "m", "max_tokens": 9000, "messages": []}));
    assert_eq!(messages.facts().output, Some(9000));
    assert_eq!(upstream(messages)["max_tokens"], 500);
    let chat = call(Dialect::Chat, &json!({"model": "m", "messages": []}));
    assert_eq!(chat.facts().output, None);
    let sent = upstream(chat);
    assert_eq!((&sent["max_completion_tokens"], &sent["store"]), (&json!(500), &json!(false)));
    // An old client's upstream may know the old name alone.
    let old = upstream(call(Dialect::Chat, &json!({"model": "m", "max_tokens": 7})));
    assert_eq!((&old["max_tokens"], old.get("max_completion_tokens")), (&json!(500), None));
    let both = call(Dialect::Chat, &json!({"model": "m", "max_tokens": 7, "max_completion_tokens": 9}));
    assert_eq!(both.facts().output, Some(7));
    assert_eq!(upstream(both).get("max_tokens"), None);
    let responses = upstream(call(Dialect::Responses, &json!({"model": "m", "input": "x", "store": true})));
    assert_eq!((&responses["max_output_tokens"], &responses["store"]), (&json!(500), &json!(false)));
    for wrong in [json!(0), json!(-1), json!("9"), json!(1.5)] {
        assert!(
            refused(Dialect::Messages, &json!({"model": "m", "max_tokens": wrong})).contains("at least 1")
        );
    }
}

#[test]
fn what_is_only_counted_gets_no_cap() {
    let body = json!({"messages": [], "model": "m"});
    let sent = call(Dialect::Messages, &body).into_count("theirs").unwrap();
    assert_eq!(String::from_utf8(sent).unwrap(), r#"{"messages":[],"model":"theirs"}"#);
}

#[test]
fn thoughts_fit_into_what_may_be_written() {
    let with = |budget: u64, output: u64| {
        let thinking = json!({"type": "enabled", "budget_tokens": budget});
        let body = json!({"model": "m", "max_tokens": 64000, "thinking": thinking});
        let sent = call(Dialect::Messages, &body).into_upstream("m", output).unwrap();
        serde_json::from_slice::<Value>(&sent).unwrap()["thinking"]["budget_tokens"].as_u64()
    };
    assert_eq!(with(2000, 8000), Some(2000));
    assert_eq!(with(32_000, 8000), Some(4000));
    assert_eq!(with(32_000, 1500), None);
}

#[test]
fn what_was_used_is_told_at_the_end_of_every_stream() {
    let asked = |body: Value| {
        let call = call(Dialect::Chat, &body);
        (call.wants_usage(), upstream(call)["stream_options"].clone())
    };
    let (wanted, sent) = asked(json!({"model": "m", "stream": true}));
    assert_eq!((wanted, sent), (false, json!({"include_usage": true})));
    let options = json!({"include_usage": true, "include_obfuscation": false});
    assert_eq!(asked(json!({"model": "m", "stream": true, "stream_options": options})), (true, options));
    let no = json!({"include_usage": false});
    assert!(!asked(json!({"model": "m", "stream": true, "stream_options": no})).0);
    assert_eq!(asked(json!({"model": "m"})), (true, Value::Null));
}

#[test]
fn tools_of_the_provider_are_taken_out_wherever_they_are() {
    let responses = call(
        Dialect::Responses,
        &json!({
            "model": "m",
            "tools": [
                {"type": "function", "name": "shell"},
                {"type": "web_search", "external_web_access": true},
                {"type": "namespace", "tools": [{"type": "custom", "name": "exec"}, {"type": "code_interpreter"}]},
                {"type": "invented_tomorrow"},
                "odd",
            ],
            "tool_choice": {"type": "web_search"},
            "input": [{"type": "additional_tools", "tools": [{"type": "mcp", "server_url": "https://x"}, {"type": "function", "name": "f"}]}],
        }),
    );
    assert_eq!(responses.stripped(), ["web_search", "code_interpreter", "invented_tomorrow", "", "mcp"]);
    let sent = upstream(responses);
    let tools = json!([{"type": "function", "name": "shell"}, {"type": "namespace", "tools": [{"type": "custom", "name": "exec"}]}]);
    assert_eq!((&sent["tools"], sent.get("tool_choice")), (&tools, None));
    assert_eq!(sent["input"][0]["tools"], json!([{"type": "function", "name": "f"}]));

    let messages = call(
        Dialect::Messages,
        &json!({
            "model": "m", "max_tokens": 1,
            "tools": [{"name": "Bash", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "auto"},
            // A tool of a conversation is no tool.
            "messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"tools": [{"type": "web_search"}]}}]}],
        }),
    );
    assert_eq!(messages.stripped(), ["web_search_20250305"]);
    let sent = upstream(messages);
    assert_eq!(sent["tools"].as_array().unwrap().len(), 2);
    assert_eq!(sent["tool_choice"]["type"], "auto");
    assert_eq!(sent["messages"][0]["content"][0]["input"]["tools"][0]["type"], "web_search");

    let alone = upstream(call(
        Dialect::Chat,
        &json!({"model": "m", "tools": [{"type": "web_search_preview"}], "tool_choice": "required"}),
    ));
    assert_eq!((alone.get("tools"), alone.get("tool_choice")), (None, None));
}

#[test]
fn what_costs_or_keeps_or_reaches_more_is_refused() {
    for (name, value) in [
        ("background", json!(true)),
        ("previous_response_id", json!("resp_1")),
        ("mcp_servers", json!([{"url": "https://x"}])),
        ("container", json!({"id": "c"})),
        ("speed", json!("fast")),
        ("n", json!(2)),
        ("n", json!("1")),
        ("modalities", json!(["text", "audio"])),
        ("stream", json!("yes")),
    ] {
        let error = refused(Dialect::Responses, &json!({"model": "m", name: value}));
        assert!(error.starts_with(&format!("'{name}'")), "{error}");
    }
    for void in [json!(false), json!(null), json!([]), json!({}), json!("")] {
        call(Dialect::Responses, &json!({"model": "m", "background": void}));
    }
    call(Dialect::Chat, &json!({"model": "m", "n": 1, "modalities": ["text"]}));
    let dropped = upstream(call(Dialect::Chat, &json!({"model": "m", "service_tier": "priority"})));
    assert_eq!(dropped.get("service_tier"), None);
    for body in
        ["[]", "{}", "{\"model\":7}", "{\"model\":\"\"}", "{\"model\":\"a\",\"model\":\"b\"}", "{", "\"x\""]
    {
        assert!(Call::parse(Dialect::Chat, body.as_bytes()).is_err(), "{body}");
    }
    assert_eq!(Call::parse(Dialect::Chat, &vec![b' '; MAX_BODY + 1]).unwrap_err(), Unacceptable::TooLong);
}

#[test]
fn an_image_counts_as_one_and_nothing_is_fetched() {
    let data = "A".repeat(300_000);
    let image =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}});
    let turns = |content: Value| json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]});
    let none = call(Dialect::Messages, &turns(json!([]))).facts().input;
    let input = |body: &Value| call(Dialect::Messages, body).facts().input;
    let one = input(&turns(json!([image])));
    assert!((IMAGE_TOKENS..IMAGE_TOKENS + 200).contains(&(one - none)), "{one}");
    let of_a_tool = input(&turns(json!([{"type": "tool_result", "content": [image, image]}])));
    assert!((2 * IMAGE_TOKENS..2 * IMAGE_TOKENS + 400).contains(&(of_a_tool - none)), "{of_a_tool}");
    // What only looks like one is as long as it is.
    let text = input(&turns(json!([{"type": "tool_use", "input": image}])));
    assert!(text > 100_000, "{text}");
    let url = |url: &str| json!({"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]});
    call(Dialect::Chat, &url("data:image/png;base64,AAAA"));
    for (dialect, body) in [
        (Dialect::Chat, url("https://example.com/x.png")),
        (Dialect::Messages, turns(json!([{"type": "image", "source": {"type": "url", "url": "https://x"}}]))),
        (
            Dialect::Responses,
            json!({"model": "m", "input": [{"content": [{"type": "input_image", "file_id": "f"}]}]}),
        ),
    ] {
        assert!(refused(dialect, &body).contains("nobody fetches it"), "{body}");
    }
    assert!(
        refused(Dialect::Messages, &turns(json!([{"type": "document", "source": {}}])))
            .contains("have a price")
    );
}

#[test]
fn images_are_made_one_at_a_time_and_from_text() {
    let one = call(Dialect::Images, &json!({"model": "m", "prompt": "a cat", "n": 1}));
    assert_eq!(one.facts().images, 1);
    assert!(refused(Dialect::Images, &json!({"model": "m", "stream": true})).contains("as a whole"));
    assert!(refused(Dialect::Images, &json!({"model": "m", "image": "data:"})).contains("text alone"));
}

#[test]
fn what_may_be_cached_costs_more_where_it_is_asked_for() {
    let plain = json!({"model": "m", "max_tokens": 1, "messages": []});
    assert!(!call(Dialect::Messages, &plain).facts().caches);
    let cached = json!({"model": "m", "max_tokens": 1, "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]});
    assert!(call(Dialect::Messages, &cached).facts().caches);
    assert!(call(Dialect::Chat, &json!({"model": "m"})).facts().caches);
}
