//! The process service, natively.

use std::time::{Duration, Instant};

use connectrpc::ErrorCode;
use connectrpc::client::CallOptions;
use rustix::process::Pid;
use sandglass_proto::services::process::process_event::Event;
use sandglass_proto::services::process::process_input::Input;
use sandglass_proto::services::process::pty::Size;
use sandglass_proto::services::process::{
    CloseStdinRequest, ConnectRequest, ListRequest, PTY, ProcessInput, SendInputRequest, Signal,
    UpdateRequest,
};

use crate::api::{
    Outcome, PATIENCE, bash, by_pid, client, connect, eventually, http, run, run_with, signal,
    start_detached, start_until, user_header,
};
use crate::native::Native;

fn is_alive(pid: i32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

/// The processes whose command line holds `mark`.
fn marked(mark: &str) -> Vec<i32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(mark) && is_alive(*pid)
        })
        .collect()
}

#[tokio::test]
async fn output_exit_code_and_environment() {
    let agent = Native::start(&["--env", "FROM_SANDBOX=1"]);
    let outcome = run(agent.api, "echo $FROM_SANDBOX $E2B_SANDBOX $HOME; echo error >&2; exit 3").await;
    assert_eq!(
        (outcome.stdout.as_str(), outcome.stderr.as_str(), outcome.code()),
        ("1 true /root\n", "error\n", 3)
    );
    let end = run(agent.api, "kill -9 $$").await.end.unwrap();
    assert_eq!((end.exit_code, end.exited, end.status.as_str()), (-1, false, "signal: killed"));
    assert_eq!(end.error.as_deref(), Some("signal: killed"));
}

#[tokio::test]
async fn what_can_t_be_started_is_refused_in_known_words() {
    let agent = Native::start(&[]);
    let mut missing = bash("true");
    missing.process.get_or_insert_default().cmd = "/none".into();
    let error = run_with(agent.api, missing, &[]).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument, "{error:?}");
    let mut elsewhere = bash("true");
    elsewhere.process.get_or_insert_default().cwd = Some("/none".into());
    let error = run_with(agent.api, elsewhere, &[]).await.unwrap_err();
    assert_eq!(error.message.as_deref(), Some("cwd '/none' does not exist"));
    let error = run_with(agent.api, bash("true"), &[user_header("stranger")]).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unauthenticated);
    assert_eq!(error.message.as_deref(), Some("invalid username: 'stranger'"));
}

#[tokio::test]
async fn a_time_limit_ends_everything_that_was_started() {
    let agent = Native::start(&[]);
    let mark = format!("86400.{}", std::process::id());
    let line = format!("setsid bash -c 'setsid sleep {mark} & sleep {mark}' >/dev/null 2>&1 & sleep {mark}");
    let began = Instant::now();
    let error = run_with(agent.api, bash(&line), &[("connect-timeout-ms", "700".into())]).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::DeadlineExceeded, "{error:?}");
    assert!(began.elapsed() >= Duration::from_millis(700));
    eventually("everything has ended", || marked(&mark).is_empty().then_some(()));
}

#[tokio::test]
async fn kill_ends_what_left_its_session_and_term_only_asks() {
    let agent = Native::start(&[]);
    let mark = format!("86401.{}", std::process::id());
    let line = format!(
        "trap 'echo asked' TERM; (setsid setsid sleep {mark} >/dev/null 2>&1 &) ; echo up; \
                        while :; do sleep 0.05; done"
    );
    let mut stream = client(agent.api).start(bash(&line)).await.unwrap();
    let mut outcome = Outcome::default();
    let mut next = async |until: &str| {
        while !outcome.stdout.contains(until) && outcome.end.is_none() {
            let message = tokio::time::timeout(PATIENCE, stream.message()).await.unwrap().unwrap().unwrap();
            outcome.add(message.to_owned_message().event.into_option().unwrap());
        }
        outcome.pid
    };
    let pid = next("up").await;
    eventually("it has left", || (marked(&format!("sleep\0{mark}")).len() == 1).then_some(()));
    signal(agent.api, pid, Signal::SIGNAL_SIGTERM).await.unwrap();
    next("asked").await;
    signal(agent.api, pid, Signal::SIGNAL_SIGKILL).await.unwrap();
    assert_eq!(marked(&mark), Vec::<i32>::new(), "all of it has ended when the call returns");
    next("never").await;
    assert_eq!(outcome.end.unwrap().status, "signal: killed");
    let gone = signal(agent.api, pid, Signal::SIGNAL_SIGKILL).await.unwrap_err();
    assert_eq!(gone.code, ErrorCode::NotFound);
}

#[tokio::test]
async fn background_processes_outlive_their_command() {
    let agent = Native::start(&[]);
    let outcome = run(agent.api, "setsid sleep 86402 >/dev/null 2>&1 </dev/null & echo $!").await;
    let pid: i32 = outcome.stdout.trim().parse().unwrap();
    assert!(is_alive(pid));
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn whoever_attaches_late_gets_the_end_but_no_replay() {
    let agent = Native::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    let line = format!("echo early; until [ -e {0} ]; do sleep 0.02; done; echo late; exit 4", go.display());
    let pid = start_until(agent.api, &line, "early").await;
    let listed = client(agent.api).list(ListRequest::default()).await.unwrap().into_owned();
    assert_eq!(listed.processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [pid]);
    let attached = tokio::spawn(connect(agent.api, pid));
    // Attached twice: both see the same.
    let other = connect(agent.api, pid);
    let other = tokio::spawn(other);
    tokio::task::spawn_blocking({
        let go = go.clone();
        move || std::fs::write(go, "")
    });
    for outcome in [attached.await.unwrap().unwrap(), other.await.unwrap().unwrap()] {
        assert!(!outcome.stdout.contains("early"), "{outcome:?}");
        assert_eq!((outcome.pid, outcome.code()), (pid, 4));
    }
    let again = connect(agent.api, pid).await.unwrap();
    assert_eq!((again.stdout.as_str(), again.code()), ("", 4));
    assert_eq!(connect(agent.api, 1 << 30).await.unwrap_err().code, ErrorCode::NotFound);
}

#[tokio::test]
async fn input_arrives_and_ends() {
    let agent = Native::start(&[]);
    let api = agent.api;
    let mut stream = client(api).start(bash("cat; echo end")).await.unwrap();
    let mut outcome = Outcome::default();
    outcome.add(stream.message().await.unwrap().unwrap().to_owned_message().event.into_option().unwrap());
    let input = |bytes: Vec<u8>| SendInputRequest {
        process: by_pid(outcome.pid).into(),
        input: ProcessInput { input: Some(Input::Stdin(bytes)), ..Default::default() }.into(),
        ..Default::default()
    };
    // More than a pipe holds, so that the write has to wait for the reader.
    let text = "0123456789abcde\n".repeat(20_000);
    let sent = tokio::spawn({
        let request = input(text.clone().into_bytes());
        async move { client(api).send_input(request).await.map(|_| ()) }
    });
    let close = || CloseStdinRequest { process: by_pid(outcome.pid).into(), ..Default::default() };
    let (close, again) = (close(), close());
    let closed = tokio::spawn(async move {
        sent.await.unwrap().unwrap();
        client(api).close_stdin(close).await.unwrap();
        // May be repeated, as long as the process lives.
        client(api).close_stdin(again).await.map(|_| ())
    });
    while let Some(message) = tokio::time::timeout(PATIENCE, stream.message()).await.unwrap().unwrap() {
        outcome.add(message.to_owned_message().event.into_option().unwrap());
    }
    match closed.await.unwrap() {
        Ok(()) => {}
        Err(error) => assert_eq!(error.code, ErrorCode::NotFound),
    }
    assert_eq!(outcome.stdout, format!("{text}end\n"));
}

#[tokio::test]
async fn input_that_does_not_fit_is_refused() {
    let agent = Native::start(&[]);
    let mut request = bash("sleep 86403");
    request.stdin = Some(false);
    let mut stream = client(agent.api).start(request).await.unwrap();
    let mut outcome = Outcome::default();
    outcome.add(stream.message().await.unwrap().unwrap().to_owned_message().event.into_option().unwrap());
    for input in [Input::Stdin(b"x".to_vec()), Input::Pty(b"x".to_vec())] {
        let request = SendInputRequest {
            process: by_pid(outcome.pid).into(),
            input: ProcessInput { input: Some(input), ..Default::default() }.into(),
            ..Default::default()
        };
        let error = client(agent.api).send_input(request).await.map(|_| ()).unwrap_err();
        assert_eq!(error.code, ErrorCode::Internal);
    }
    let wrong = signal(agent.api, outcome.pid, Signal::SIGNAL_UNSPECIFIED).await.unwrap_err();
    assert_eq!(wrong.code, ErrorCode::Unimplemented);
    signal(agent.api, outcome.pid, Signal::SIGNAL_SIGKILL).await.unwrap();
}

#[tokio::test]
async fn a_terminal_has_a_size_that_changes() {
    let agent = Native::start(&[]);
    let size =
        |cols, rows| PTY { size: Size { cols, rows, ..Default::default() }.into(), ..Default::default() };
    let mut request =
        bash("trap 'stty size; exit 0' WINCH; tty >&2; stty size; while :; do sleep 0.05; done");
    request.pty = size(100, 30).into();
    let mut stream = client(agent.api).start(request).await.unwrap();
    let mut outcome = Outcome::default();
    let mut resized = false;
    while let Some(message) = tokio::time::timeout(PATIENCE, stream.message()).await.unwrap().unwrap() {
        outcome.add(message.to_owned_message().event.into_option().unwrap());
        if outcome.stdout.contains("30 100") && !resized {
            resized = true;
            let request = UpdateRequest {
                process: by_pid(outcome.pid).into(),
                pty: size(77, 22).into(),
                ..Default::default()
            };
            client(agent.api).update(request).await.unwrap();
        }
    }
    assert!(outcome.stdout.contains("/dev/pts/") && outcome.stdout.contains("22 77"), "{outcome:?}");
    assert_eq!(outcome.code(), 0);
}

#[tokio::test]
async fn a_reader_that_stops_holds_the_process_up_and_kill_still_works() {
    let agent = Native::start(&[]);
    let dir = tempfile::tempdir().unwrap();
    let count = dir.path().join("count");
    let line =
        format!("i=0; while head -c 65536 /dev/zero; do i=$((i+1)); echo $i > {}; done", count.display());
    let mut stream = client(agent.api).start(bash(&line)).await.unwrap();
    let mut outcome = Outcome::default();
    outcome.add(stream.message().await.unwrap().unwrap().to_owned_message().event.into_option().unwrap());
    // Nobody reads any more. What was written stops growing; a look every 100 ms, ten alike in a row.
    let written =
        || std::fs::read_to_string(&count).ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0);
    let mut last = (written(), 0);
    let stopped_at = eventually("the writer stops", || {
        std::thread::sleep(Duration::from_millis(100));
        let now = written();
        last = if now == last.0 { (now, last.1 + 1) } else { (now, 0) };
        (last.1 >= 10 && now > 0).then_some(now)
    });
    // This test's own sockets hold some MiB: the bound is for the agent, the rest is the kernel's.
    assert!(stopped_at * 65536 < 24 << 20, "{stopped_at}");
    assert!(agent.rss_kib() < 64 * 1024, "{} KiB", agent.rss_kib());
    signal(agent.api, outcome.pid, Signal::SIGNAL_SIGKILL).await.unwrap();
    let pid = i32::try_from(outcome.pid).unwrap();
    eventually("it has ended", || (!is_alive(pid)).then_some(()));
    drop(stream);
}

#[tokio::test]
async fn a_silent_process_says_that_it_lives_to_all_who_listen() {
    let agent = Native::start(&[]);
    let options = || CallOptions::default().with_header("keepalive-ping-interval", "1");
    // Each word comes before a second of silence is over, and then there is one.
    let line = "for n in 1 2 3; do sleep 0.6; echo $n; done; sleep 1.5; echo end";
    let mut stream = client(agent.api).start_with_options(bash(line), options()).await.unwrap();
    let mut kinds = Vec::new();
    let mut connected = None;
    let kind = |event: Option<Event>| match event {
        Some(Event::Start(_)) => 's',
        Some(Event::Data(_)) => 'd',
        Some(Event::Keepalive(_)) => 'k',
        Some(Event::End(_)) => 'e',
        None => '?',
    };
    while let Some(message) = stream.message().await.unwrap() {
        let event = message.to_owned_message().event.into_option().unwrap().event;
        if let Some(Event::Start(start)) = &event {
            let request = ConnectRequest { process: by_pid(start.pid).into(), ..Default::default() };
            connected = Some(client(agent.api).connect_with_options(request, options()).await.unwrap());
        }
        kinds.push(kind(event));
    }
    assert_eq!(kinds, ['s', 'd', 'd', 'd', 'k', 'd', 'e']);
    let mut stream = connected.unwrap();
    let mut kinds = Vec::new();
    while let Some(message) = stream.message().await.unwrap() {
        kinds.push(kind(message.to_owned_message().event.into_option().unwrap().event));
    }
    assert_eq!(kinds, ['s', 'd', 'd', 'd', 'k', 'd', 'e']);
}

#[tokio::test]
async fn a_client_that_goes_away_ends_nothing() {
    let agent = Native::start(&[]);
    let pid = start_detached(agent.api, "sleep 86404").await;
    assert!(is_alive(pid.try_into().unwrap()));
    signal(agent.api, pid, Signal::SIGNAL_SIGKILL).await.unwrap();
    assert_eq!(connect(agent.api, pid).await.unwrap().end.unwrap().status, "signal: killed");
}

#[tokio::test]
async fn both_forms_of_messages_are_understood_and_others_are_told_which() {
    let agent = Native::start(&[]);
    let list = |kind: &str, body: &[u8]| {
        http(agent.api, "POST", "/process.Process/List", &format!("Content-Type: {kind}\r\n"), body)
    };
    for (kind, body) in [("application/json", &b"{}"[..]), ("application/proto", b"")] {
        let reply = list(kind, body);
        assert_eq!(reply.status, 200, "{kind}");
        assert!(reply.head.contains(&format!("content-type: {kind}")), "{}", reply.head);
    }
    let refused = list("text/plain", b"{}");
    assert_eq!(refused.status, 415);
    assert!(refused.head.contains("accept-post: "), "{}", refused.head);
    for kind in ["application/json", "application/proto"] {
        assert!(refused.head.contains(kind), "{}", refused.head);
    }
}

#[tokio::test]
async fn what_e2b_s_client_sends_is_understood_byte_by_byte() {
    let agent = Native::start(&[]);
    let message = br#"{"process":{"cmd":"/bin/echo","args":["hi"],"envs":{"A":"1"},"cwd":"/tmp","unknown":1},"stdin":false}"#;
    let mut body = vec![0];
    body.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    body.extend(message);
    let headers = "Content-Type: application/connect+json\r\nConnect-Protocol-Version: 1\r\n\
                   Connect-Accept-Encoding: identity\r\nKeepalive-Ping-Interval: 50\r\n";
    let start = |more: &str| {
        let reply = http(agent.api, "POST", "/process.Process/Start", &format!("{headers}{more}"), &body);
        assert_eq!(reply.status, 200);
        assert!(reply.head.contains("content-type: application/connect+json"), "{}", reply.head);
        let mut rest = reply.body.as_slice();
        let mut events = Vec::new();
        while let Some((head, after)) = rest.split_at_checked(5) {
            let len = usize::try_from(u32::from_be_bytes(head[1..].try_into().unwrap())).unwrap();
            events.push((head[0], String::from_utf8(after[..len].to_vec()).unwrap()));
            rest = &after[len..];
        }
        events
    };
    let events = start("");
    assert!(events[0].1.starts_with(r#"{"event":{"start":{"pid":"#), "{events:?}");
    assert_eq!(events[1], (0, r#"{"event":{"data":{"stdout":"aGkK"}}}"#.into()));
    assert_eq!(events[2], (0, r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#.into()));
    assert_eq!(events[3], (2, "{}".into()));
    // Base64 of "stranger:". A refusal is the end of a stream, too: the JavaScript client reads no other.
    let refusal = r#"{"error":{"code":"unauthenticated","message":"invalid username: 'stranger'"}}"#;
    assert_eq!(start("Authorization: Basic c3RyYW5nZXI6\r\n"), [(2, refusal.into())]);
}
