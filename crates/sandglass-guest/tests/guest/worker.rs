//! The worker as the process that it is: a job on its standard input, and the way to models in its environment.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::thread::JoinHandle;

use serde_json::{Value, json};

/// Answers so many requests with a command that the model wants, and with an end; returns what it was asked.
fn model(command: &str) -> (String, JoinHandle<Vec<Value>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://localhost:{}", listener.local_addr().unwrap().port());
    let function = json!({"name": "shell", "arguments": json!({"command": command}).to_string()});
    let calls = json!([{"index": 0, "id": "c1", "function": function}]);
    let replies = [
        json!({"choices": [{"delta": {"tool_calls": calls}, "finish_reason": "tool_calls"}]}),
        json!({"choices": [{"delta": {"content": "done"}, "finish_reason": "stop"}]}),
    ];
    let answering = std::thread::spawn(move || {
        let asked = replies.iter().map(|reply| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut length = 0;
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if line.trim().is_empty() {
                    break;
                }
                if let Some((name, value)) = line.split_once(':')
                    && name.eq_ignore_ascii_case("content-length")
                {
                    length = value.trim().parse().unwrap();
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            write!(stream, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {reply}\n\n").unwrap();
            serde_json::from_slice(&body).unwrap()
        });
        asked.collect()
    });
    (url, answering)
}

fn worker(url: Option<&str>, job: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandglass-guest"));
    command.arg("worker").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if let Some(url) = url {
        command.env("SANDGLASS_MODEL_URL", url).env("SANDGLASS_MODEL_TOKEN", "sgm_canary");
        command.env("OPENAI_API_KEY", "sgm_canary").env("ORDINARY", "as ever");
    }
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(job).unwrap();
    child.wait_with_output().unwrap()
}

fn job(folder: &str) -> Vec<u8> {
    let job = json!({
        "prompt": "p", "model": "m", "dialect": "chat", "folder": folder, "seconds": 60, "tools": {"shell": true},
    });
    job.to_string().into_bytes()
}

#[test]
fn a_job_is_done_and_commands_are_not_told_where_models_are() {
    let dir = tempfile::tempdir().unwrap();
    let (url, answering) = model("env > env.txt");
    let output = worker(Some(&url), &job(dir.path().to_str().unwrap()));
    assert!(output.status.success(), "{output:?}");
    let last = String::from_utf8(output.stdout).unwrap();
    let last: Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
    assert_eq!(last, json!({"type": "worker.exited", "data": {"code": 0}}));
    let asked = answering.join().unwrap();
    assert_eq!(asked[1]["messages"][3]["content"], "[exit status: 0]");
    let environment = std::fs::read_to_string(dir.path().join("env.txt")).unwrap();
    assert!(environment.contains("ORDINARY=as ever\n"), "{environment}");
    assert!(!environment.contains("sgm_canary") && !environment.contains("SANDGLASS_MODEL"), "{environment}");
}

#[test]
fn a_job_that_can_t_be_done_has_a_code_of_its_own() {
    for (url, job, why) in [
        (Some("http://localhost:1"), b"{}".to_vec(), "the job is none"),
        (Some("https://localhost:1"), job("/tmp"), "http://"),
        (None, job("/tmp"), "SANDGLASS_MODEL_URL"),
    ] {
        let output = worker(url, &job);
        assert_eq!(output.status.code(), Some(4), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(why), "{output:?}");
        assert!(output.stdout.is_empty());
    }
}
