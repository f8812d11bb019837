//! Whole turns with a model that says what was written down.

use std::io::{BufRead as _, BufReader, Read as _, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::event::Events;
use super::gateway::Gateway;
use super::job::Job;
use super::work;

/// Events that were told.
#[derive(Debug, Clone, Default)]
pub(super) struct Heard(Arc<Mutex<Vec<u8>>>);

impl Write for Heard {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Heard {
    fn lines(&self) -> Vec<Value> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The data of those of a type.
    pub(super) fn of(&self, kind: &str) -> Vec<Value> {
        self.lines()
            .into_iter()
            .filter(|line| line["type"] == kind)
            .map(|line| line["data"].clone())
            .collect()
    }

    fn kinds(&self) -> Vec<String> {
        self.lines().iter().map(|line| line["type"].as_str().unwrap().to_owned()).collect()
    }

    /// Bytes of the longest line.
    pub(super) fn longest(&self) -> usize {
        self.0.lock().unwrap().split(|byte| *byte == b'\n').map(<[u8]>::len).max().unwrap_or(0)
    }
}

/// What a model answers once.
#[derive(Debug, Clone)]
struct Reply(String);

fn stream(events: &[Value]) -> Reply {
    let events: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    Reply(format!("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n{events}"))
}

fn refusal(status: u16, headers: &str, body: &Value) -> Reply {
    let body = body.to_string();
    Reply(format!(
        "HTTP/1.1 {status} No\r\nContent-Length: {}\r\n{headers}Connection: close\r\n\r\n{body}",
        body.len()
    ))
}

/// One that says something, or wants a tool, in the words of Chat Completions.
fn says(text: &str) -> Reply {
    stream(&[json!({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}), usage()])
}

fn wants(name: &str, input: &Value) -> Reply {
    let function = json!({"name": name, "arguments": input.to_string()});
    let calls = json!([{"index": 0, "id": "c1", "function": function}]);
    stream(&[json!({"choices": [{"delta": {"tool_calls": calls}, "finish_reason": "tool_calls"}]}), usage()])
}

fn usage() -> Value {
    json!({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 2}})
}

/// A gateway that answers what was written down, and closes each connection.
struct Model {
    url: String,
    asked: Arc<Mutex<Vec<(String, Value)>>>,
}

fn model(replies: Vec<Reply>) -> Model {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let to = Arc::clone(&asked);
    std::thread::spawn(move || {
        for reply in replies {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                assert!(reader.read_line(&mut head).unwrap() > 0);
            }
            let head = head.to_ascii_lowercase();
            let length = head.split("content-length: ").nth(1).unwrap().lines().next().unwrap();
            let mut body = vec![0; length.parse().unwrap()];
            reader.read_exact(&mut body).unwrap();
            to.lock().unwrap().push((head, serde_json::from_slice(&body).unwrap()));
            let _ = stream.write_all(reply.0.as_bytes());
        }
    });
    Model { url, asked }
}

impl Model {
    fn asked(&self) -> Vec<(String, Value)> {
        self.asked.lock().unwrap().clone()
    }
}

fn job(dir: &TempDir, more: &Value) -> Value {
    let mut job = json!({
        "prompt": "make a file", "model": "m", "dialect": "chat", "folder": dir.path().join("project"),
        "tools": {"shell": true}, "turn": {"name": "build", "number": 1}, "seconds": 60,
    });
    for (name, value) in more.as_object().unwrap() {
        job[name] = value.clone();
    }
    job
}

async fn done(model: &Model, job: &Value) -> (u8, Heard) {
    let heard = Heard::default();
    let events = Events::to(Box::new(heard.clone()));
    let gateway = Gateway::new(&model.url, "sgm_token".into()).unwrap();
    let code = work(&Job::parse(job.to_string().as_bytes()).unwrap(), &gateway, &events).await;
    (code, heard)
}

fn read(dir: &TempDir, name: &str) -> String {
    std::fs::read_to_string(dir.path().join("project").join(name)).unwrap()
}

#[tokio::test]
async fn a_turn_goes_on_until_the_model_wants_nothing_more() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(vec![
        wants("shell", &json!({"command": "echo hello > hello.txt; cat hello.txt"})),
        wants("edit_file", &json!({"path": "hello.txt", "old": "hello", "new": "bye"})),
        says("It is done."),
    ]);
    let (code, heard) = done(&model, &job(&dir, &json!({}))).await;
    assert_eq!((code, &*read(&dir, "hello.txt")), (0, "bye\n"));
    let kinds = heard.kinds();
    assert_eq!(kinds[..3], ["worker.started", "turn.started", "shell.started"]);
    assert_eq!(kinds[kinds.len() - 3..], ["worker.message", "turn.ended", "worker.exited"]);
    assert_eq!(heard.of("worker.message")[0]["text"], "It is done.");
    let ended = &heard.of("turn.ended")[0];
    assert_eq!(
        (&ended["reason"], &ended["used"]["calls"], &ended["used"]["output_tokens"]),
        (&json!("end_turn"), &json!(3), &json!(6))
    );
    let asked = model.asked();
    let (head, first) = &asked[0];
    assert!(head.starts_with("post /v1/chat/completions http/1.1\r\n"), "{head}");
    assert!(head.contains("authorization: bearer sgm_token\r\n"), "{head}");
    assert_eq!(first["messages"][1], json!({"role": "user", "content": "make a file"}));
    let last = asked[2].1["messages"].as_array().unwrap();
    assert_eq!(last[3], json!({"role": "tool", "tool_call_id": "c1", "content": "hello\n[exit status: 0]"}));
}

#[tokio::test]
async fn every_dialect_is_spoken_to_its_end() {
    let messages = [
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "hi"}}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}),
        json!({"type": "message_stop"}),
    ];
    let item = json!({"type": "message", "content": [{"type": "output_text", "text": "hi"}]});
    let responses = [
        json!({"type": "response.output_item.done", "item": item}),
        json!({"type": "response.completed", "response": {}}),
    ];
    for (dialect, reply, path, key) in [
        ("messages", stream(&messages), "/v1/messages", "x-api-key: sgm_token"),
        ("responses", stream(&responses), "/v1/responses", "authorization: bearer sgm_token"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let model = model(vec![reply]);
        let (code, heard) = done(&model, &job(&dir, &json!({"dialect": dialect}))).await;
        assert_eq!((code, heard.of("worker.message")[0]["text"].as_str()), (0, Some("hi")));
        let (head, _) = &model.asked()[0];
        assert!(head.contains(path) && head.contains(key), "{head}");
    }
}

#[tokio::test]
async fn the_next_turn_knows_what_was_said() {
    let dir = tempfile::tempdir().unwrap();
    let history = dir.path().join("history.json");
    let model = model(vec![says("first"), says("second")]);
    let more = json!({"history": history});
    assert_eq!(done(&model, &job(&dir, &more)).await.0, 0);
    let next = json!({"history": history, "prompt": "go on", "turn": {"name": "repair-1", "number": 2}});
    let (code, heard) = done(&model, &job(&dir, &next)).await;
    assert_eq!((code, &heard.of("turn.started")[0]), (0, &json!({"name": "repair-1", "number": 2})));
    let said = &model.asked()[1].1["messages"];
    let said: Vec<_> = said.as_array().unwrap().iter().map(|one| one["content"].as_str().unwrap()).collect();
    assert_eq!(said[1..], ["make a file", "first", "go on"]);
    assert_eq!(
        std::fs::metadata(&history)
            .map(|meta| std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o777)
            .unwrap(),
        0o600
    );
}

#[tokio::test]
async fn without_money_it_ends_at_once_and_says_so() {
    let error =
        json!({"error": {"type": "insufficient_quota", "code": "insufficient_quota", "message": "spent"}});
    let dir = tempfile::tempdir().unwrap();
    let model = model(vec![refusal(429, "x-should-retry: false\r\n", &error), says("never")]);
    let (code, heard) = done(&model, &job(&dir, &json!({}))).await;
    let ended = &heard.of("turn.ended")[0];
    assert_eq!((code, &ended["reason"], &ended["message"]), (2, &json!("budget_exhausted"), &json!("spent")));
    assert_eq!(model.asked().len(), 1);
}

#[tokio::test]
async fn only_what_may_go_away_is_asked_again() {
    let overloaded = json!({"type": "error", "error": {"type": "overloaded_error", "message": "later"}});
    let dir = tempfile::tempdir().unwrap();
    let busy = refusal(529, "retry-after: 0\r\n", &overloaded);
    let patient = model(vec![busy.clone(), busy.clone(), says("now")]);
    assert_eq!(done(&patient, &job(&dir, &json!({}))).await.0, 0);
    assert_eq!(patient.asked().len(), 3);
    let never = refusal(502, "x-should-retry: false\r\n", &overloaded);
    let refused = model(vec![never, says("never")]);
    let (code, heard) = done(&refused, &job(&dir, &json!({}))).await;
    assert_eq!((code, refused.asked().len()), (3, 1));
    assert_eq!(heard.of("turn.ended")[0]["reason"], "model_error");
    // In the middle, once.
    let cut = Reply("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ndata: {}\n\n".into());
    let broken = model(vec![cut.clone(), cut.clone(), says("never")]);
    assert_eq!(done(&broken, &job(&dir, &json!({}))).await.0, 3);
    assert_eq!(broken.asked().len(), 2);
    let healed = model(vec![cut, says("now")]);
    assert_eq!(done(&healed, &job(&dir, &json!({}))).await.0, 0);
}

#[tokio::test]
async fn a_model_that_never_ends_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let again = wants("list_files", &json!({}));
    let model_of_steps = model(vec![again; 5]);
    let (code, heard) = done(&model_of_steps, &job(&dir, &json!({"steps": 3}))).await;
    assert_eq!((code, model_of_steps.asked().len()), (5, 3));
    assert_eq!(heard.of("turn.ended")[0]["reason"], "too_many_steps");
    let slow = model(vec![wants("shell", &json!({"command": "echo $$ > pid; sleep 300"}))]);
    let started = Instant::now();
    let (code, heard) = done(&slow, &job(&dir, &json!({"seconds": 2}))).await;
    assert_eq!((code, &heard.of("turn.ended")[0]["reason"]), (5, &json!("timeout")));
    assert!(started.elapsed() < Duration::from_secs(30));
    let pid = read(&dir, "pid");
    let gone = || {
        std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()))
            .map_or(true, |stat| stat.contains(") Z "))
    };
    for _ in 0..100 {
        if gone() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the command outlives its turn");
}

#[tokio::test]
async fn an_answer_that_was_cut_off_is_gone_on_with() {
    let dir = tempfile::tempdir().unwrap();
    let half =
        json!([{"index": 0, "id": "c1", "function": {"name": "write_file", "arguments": "{\"path\": \"a"}}]);
    let model = model(vec![
        stream(&[json!({"choices": [{"delta": {"content": "so"}, "finish_reason": "length"}]})]),
        stream(&[json!({"choices": [{"delta": {"tool_calls": half}, "finish_reason": "length"}]})]),
        says("done"),
    ]);
    assert_eq!(done(&model, &job(&dir, &json!({}))).await.0, 0);
    let last = model.asked()[2].1["messages"].clone();
    assert!(last[3]["content"].as_str().unwrap().contains("cut off"), "{last}");
    assert!(last[5]["content"].as_str().unwrap().contains("smaller pieces"), "{last}");
}

#[tokio::test]
async fn a_small_model_writes_one_command() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(vec![says("```bash\necho hello > hello.txt\n```")]);
    let (code, heard) = done(&model, &job(&dir, &json!({"mode": "command"}))).await;
    assert_eq!((code, &*read(&dir, "hello.txt")), (0, "hello\n"));
    assert_eq!(heard.of("shell.started")[0]["command"], "echo hello > hello.txt");
    let (_, asked) = &model.asked()[0];
    assert_eq!((&asked["temperature"], asked.get("tools")), (&json!(0), None));
    assert!(asked["messages"].as_array().unwrap().len() > 8);
    let idle = done(&model, &job(&dir, &json!({"mode": "command", "tools": {}}))).await;
    assert_eq!((idle.0, idle.1.of("shell.started").len()), (3, 0));
}
