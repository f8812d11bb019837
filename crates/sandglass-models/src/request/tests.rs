use serde_json::{Value, json};

use super::*;

fn call(dialect: Dialect, body: &Value) -> Call {
    Call::parse(dialect, body.to_string().as_bytes()).unwrap()
}

fn refused(dialect: Dialect, body: &Value) -> String {
    Call::parse(dialect, body.to_string().as_bytes()).unwrap_err().to_string()
}

fn upstream(call: Call) -> Value {
    capped(call, Cap::default())
}

fn capped(call: Call, cap: Cap) -> Value {
    serde_json::from_slice(&call.into_upstream("theirs", cap, 500).unwrap()).unwrap()
}

#[test]
fn what_is_not_known_goes_on_as_it_came() {
    let body = r#"{"z_new":{"b":1,"a":[2.5]},"model":"m","max_tokens":128000,"messages":[{"role":"user","content":"hi"}]}"#;
    let sent = Call::parse(Dialect::Messages, body.as_bytes())
        .unwrap()
        .into_upstream("theirs", Cap::default(), 500)
        .unwrap();
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
    // Whatever the client says, it goes on as its provider heeds it.
    let names = ["max_tokens", "max_completion_tokens"];
    for (cap, expected) in [
        (Cap::Both, [Some(500), Some(500)]),
        (Cap::MaxTokens, [Some(500), None]),
        (Cap::MaxCompletionTokens, [None, Some(500)]),
    ] {
        for said in [
            json!({"model": "m", "max_tokens": 7}),
            json!({"model": "m", "max_completion_tokens": 7}),
            json!({"model": "m"}),
        ] {
            let sent = capped(call(Dialect::Chat, &said), cap);
            assert_eq!(names.map(|name| sent.get(name).and_then(Value::as_u64)), expected, "{said}");
        }
    }
    let both = call(Dialect::Chat, &json!({"model": "m", "max_tokens": 7, "max_completion_tokens": 9}));
    assert_eq!(both.facts().output, Some(7));
    let others = json!({"model": "m", "max_tokens": 7, "n_predict": 9999, "max_new_tokens": 9999, "max_output_tokens": 9999});
    let sent = upstream(call(Dialect::Messages, &others));
    assert_eq!(sent, json!({"model": "theirs", "max_tokens": 500}));
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
    let body = json!({"max_tokens": 9, "messages": [], "model": "m", "stream": true, "temperature": 1});
    let sent = call(Dialect::Messages, &body).into_count("theirs").unwrap();
    assert_eq!(String::from_utf8(sent).unwrap(), r#"{"messages":[],"model":"theirs"}"#);
}

#[test]
fn thoughts_fit_into_what_may_be_written() {
    let with = |budget: u64, output: u64| {
        let thinking = json!({"type": "enabled", "budget_tokens": budget});
        let body = json!({"model": "m", "max_tokens": 64000, "thinking": thinking});
        let sent = call(Dialect::Messages, &body).into_upstream("m", Cap::default(), output).unwrap();
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
        &json!({"model": "m", "tools": [{"type": "web_search_preview"}], "tool_choice": "required", "parallel_tool_calls": true}),
    ));
    let left = ["tools", "tool_choice", "parallel_tool_calls"].map(|name| alone.get(name));
    assert_eq!(left, [None, None, None]);
}

#[test]
fn no_tool_of_the_provider_hides_in_a_conversation() {
    let evil = json!({"type": "mcp", "server_url": "https://x"});
    let own = json!({"type": "function", "name": "f"});
    let input = json!([
        {"type": "tool_search_call", "arguments": {"tools": [{"type": "web_search"}]}},
        {"type": "tool_search_output", "execution": "client", "tools": [evil, own]},
        {"type": "invented_tomorrow", "inner": [{"deeper": {"tools": [evil]}}]},
    ]);
    let said = call(Dialect::Responses, &json!({"model": "m", "input": input, "tool_choice": "required"}));
    assert_eq!(said.stripped(), ["mcp", "mcp"]);
    let sent = upstream(said);
    assert_eq!(sent["input"][0], input[0], "what a tool was called with is data");
    assert_eq!(sent["input"][1]["tools"], json!([own]));
    assert_eq!(sent["input"][2]["inner"][0]["deeper"]["tools"], json!([]));
    // The tools that are left there can still be chosen.
    assert_eq!(sent["tool_choice"], "required");
    // A tool says of what kind it is, but for Anthropic's.
    for untold in [json!({"name": "x"}), json!({"type": 7}), json!({"type": null})] {
        let body = json!({"model": "m", "max_tokens": 1, "tools": [untold]});
        assert_eq!(call(Dialect::Chat, &body).stripped(), [""], "{untold}");
        let taken = call(Dialect::Messages, &body).stripped().len();
        assert_eq!(taken, usize::from(untold["type"].is_number()), "{untold}");
    }
}

#[test]
fn a_conversation_is_not_summed_up_at_the_provider() {
    let edits = json!([{"type": "clear_thinking_20251015"}, {"type": "compact_20260112", "trigger": {}}]);
    let body = json!({"model": "m", "max_tokens": 1, "context_management": {"edits": edits}});
    let said = call(Dialect::Messages, &body);
    assert_eq!(said.stripped(), ["compact_20260112"]);
    assert_eq!(upstream(said)["context_management"], json!({"edits": [edits[0]]}));
    let alone = json!({"model": "m", "max_tokens": 1, "context_management": {"edits": [edits[1]]}});
    assert_eq!(upstream(call(Dialect::Messages, &alone)).get("context_management"), None);
    let responses =
        json!({"model": "m", "context_management": [{"type": "compaction", "compact_threshold": 1000}]});
    assert_eq!(upstream(call(Dialect::Responses, &responses)).get("context_management"), None);
}

#[test]
fn no_member_is_spelled_in_another_way() {
    for (name, value) in [
        ("Model", json!("dear")),
        ("N", json!(8)),
        ("Max_tokens", json!(9)),
        ("\u{17f}tore", json!(true)),
        ("Bac\u{212a}ground", json!(true)),
        ("TOOLS", json!([])),
        ("messages", json!([{"role": "user", "Content": "x"}])),
        ("messages", json!([{"role": "user", "content": [{"type": "text", "Type": "document"}]}])),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,", "URL": "https://x"}}]}]),
        ),
        ("tools", json!([{"type": "function", "Type": "web_search"}])),
    ] {
        let error = refused(Dialect::Chat, &json!({"model": "m", name: value}));
        assert!(error.contains("not spelled"), "{name}: {error}");
    }
    // Data of the client's is spelled as it likes.
    let schema = json!({"type": "object", "properties": {"Type": {}, "type": {}, "URL": {"type": "string"}, "Model": {}}});
    let call_of_it = json!({"type": "tool_use", "id": "t", "name": "f", "input": {"Type": 1, "url": "https://x", "file_id": "y"}});
    call(
        Dialect::Messages,
        &json!({"model": "m", "max_tokens": 1, "tools": [{"name": "f", "input_schema": schema}],
            "messages": [{"role": "assistant", "content": [call_of_it]}], "metadata": {"User_Id": "Model", "Model": "x"}}),
    );
    call(
        Dialect::Chat,
        &json!({"model": "m", "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}),
    );
}

#[test]
fn what_is_fetched_or_stored_is_refused_wherever_it_is() {
    let pdf = json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}});
    let result = |content: Value| json!([{"role": "user", "content": [{"type": "web_fetch_tool_result", "content": content}]}]);
    let chat = |part: Value| json!([{"role": "user", "content": [part]}]);
    let screen = |output: Value| json!([{"type": "computer_call_output", "call_id": "c", "output": output}]);
    for (dialect, name, turns) in [
        (Dialect::Messages, "messages", result(pdf.clone())),
        (Dialect::Messages, "messages", result(json!({"type": "web_fetch_result", "content": pdf}))),
        (
            Dialect::Messages,
            "messages",
            chat(
                json!({"type": "image", "source": {"type": "base64", "media_type": "application/pdf", "data": "A"}}),
            ),
        ),
        (
            Dialect::Messages,
            "messages",
            chat(json!({"type": "new", "source": {"type": "file", "file_id": "f"}})),
        ),
        (Dialect::Chat, "messages", chat(json!({"type": "video_url", "video_url": {"url": "https://x"}}))),
        (Dialect::Chat, "messages", chat(json!({"type": "new", "new_url": "https://x"}))),
        (Dialect::Chat, "messages", chat(json!({"type": "new", "new": {"url": "http://169.254.169.254/"}}))),
        (
            Dialect::Chat,
            "messages",
            chat(json!({"type": "image_url", "image_url": {"url": "data:application/pdf;base64,AAAA"}})),
        ),
        (Dialect::Chat, "messages", json!([{"role": "assistant", "audio": {"id": "a"}}])),
        (
            Dialect::Responses,
            "input",
            screen(json!({"type": "computer_screenshot", "image_url": "https://x"})),
        ),
        (Dialect::Responses, "input", screen(json!({"type": "computer_screenshot", "file_id": "f"}))),
        (Dialect::Responses, "input", json!([{"type": "item_reference", "id": "msg_1"}])),
        (
            Dialect::Responses,
            "input",
            json!([{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,A", "file_id": "f"}]}]),
        ),
    ] {
        refused(dialect, &json!({"model": "m", "max_tokens": 1, name: turns}));
    }
    // One that is there as a whole is an image.
    let whole = json!({"type": "computer_screenshot", "image_url": "data:image/png;base64,AAAA"});
    assert_eq!(call(Dialect::Responses, &json!({"model": "m", "input": screen(whole)})).facts().pictures, 1);
    // Where a quote comes from is only told.
    let quote = json!({"type": "url_citation", "url": "https://x", "start_index": 0});
    call(
        Dialect::Responses,
        &json!({"model": "m", "input": [{"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": [quote]}]}]}),
    );
}

#[test]
fn an_image_is_looked_at_no_closer_than_its_price_is_for() {
    let of = |detail: Value| {
        let url = "data:image/png;base64,AAAA";
        let chat = json!({"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, "detail": detail}}]}]});
        let responses = json!({"model": "m", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": detail}]}]});
        let chat = upstream(call(Dialect::Chat, &chat));
        let responses = upstream(call(Dialect::Responses, &responses));
        let details = [
            &chat["messages"][0]["content"][0]["image_url"]["detail"],
            &responses["input"][0]["content"][0]["detail"],
        ];
        assert_eq!(details[0], details[1]);
        details[0].as_str().unwrap().to_owned()
    };
    assert_eq!(
        [json!("original"), json!("auto"), json!(null), json!("low")].map(of),
        ["high", "high", "high", "low"]
    );
}

#[test]
fn what_costs_or_keeps_or_reaches_more_is_refused() {
    for (name, value) in [
        ("background", json!(true)),
        ("previous_response_id", json!("resp_1")),
        ("mcp_servers", json!([{"url": "https://x"}])),
        ("container", json!({"id": "c"})),
        ("speed", json!("fast")),
        ("prompt", json!({"id": "pmpt_1"})),
        ("search_parameters", json!({"mode": "on"})),
        ("enable_search", json!(true)),
        ("models", json!(["dear"])),
        ("plugins", json!([{"id": "web"}])),
        ("provider", json!({"order": ["x"]})),
        ("data_sources", json!([{}])),
        ("api_base", json!("https://x")),
        ("use_beam_search", json!(true)),
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
    let kept = upstream(call(Dialect::Responses, &json!({"model": "m", "prompt_cache_retention": "24h"})));
    assert_eq!(kept.get("prompt_cache_retention"), None);
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
    let facts = |body: &Value| *call(Dialect::Messages, body).facts();
    let one = facts(&turns(json!([image])));
    assert!(one.pictures == 1 && one.text.likely < 200 && one.text.most < 300, "{one:?}");
    let of_a_tool = facts(&turns(json!([{"type": "tool_result", "content": [image, image]}])));
    assert!(of_a_tool.pictures == 2 && of_a_tool.text.most < 600, "{of_a_tool:?}");
    // What only looks like one is as long as it is.
    let text = facts(&turns(json!([{"type": "tool_use", "input": image}])));
    assert!(text.pictures == 0 && text.text.likely > 100_000, "{text:?}");
    let elsewhere = facts(&turns(json!([{"type": "new", "content": [image]}])));
    assert!(elsewhere.pictures == 1 && elsewhere.text.likely > 100_000, "{elsewhere:?}");
    let foreign = json!({"model": "m", "messages": [{"role": "user", "content": [image]}]});
    assert!(call(Dialect::Chat, &foreign).facts().text.likely > 100_000);
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
fn tools_are_told_of_since_the_provider_adds_to_them() {
    let facts = |tools: Value| {
        *call(Dialect::Messages, &json!({"model": "m", "max_tokens": 1, "tools": tools})).facts()
    };
    let none = facts(json!([{"type": "web_search_20250305", "name": "web_search"}]));
    assert_eq!((none.tools, none.explained), (false, 0));
    let some = facts(json!([{"name": "f"}, {"type": "bash_20250124", "name": "bash"}]));
    assert_eq!((some.tools, some.explained), (true, 1));
}

#[test]
fn images_are_made_one_at_a_time_and_from_text() {
    let one = call(Dialect::Images, &json!({"model": "m", "prompt": "a cat", "n": 1}));
    assert_eq!(one.facts().images, 1);
    let clear = upstream(call(
        Dialect::Images,
        &json!({"model": "m", "prompt": "a cat", "background": "transparent"}),
    ));
    assert_eq!(clear["background"], "transparent");
    assert!(refused(Dialect::Images, &json!({"model": "m", "stream": true})).contains("as a whole"));
    assert!(refused(Dialect::Images, &json!({"model": "m", "image": "data:"})).contains("text alone"));
}

#[test]
fn what_may_be_cached_costs_more_where_it_is_asked_for() {
    let plain = json!({"model": "m", "max_tokens": 1, "messages": []});
    assert!(!call(Dialect::Messages, &plain).facts().caches);
    let cached = json!({"model": "m", "max_tokens": 1, "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]});
    assert!(call(Dialect::Messages, &cached).facts().caches);
    let hidden = cached.to_string().replace("cache_control", "cache_\\u0063ontrol");
    assert!(Call::parse(Dialect::Messages, hidden.as_bytes()).unwrap().facts().caches);
    assert!(call(Dialect::Chat, &json!({"model": "m"})).facts().caches);
}
