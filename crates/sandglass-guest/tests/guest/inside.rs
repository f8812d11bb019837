//! What only a real sandbox can show.

use connectrpc::ErrorCode;
use sandglass_proto::control::{FromAgent, ToAgent};
use sandglass_proto::services::process::{PTY, Signal, pty::Size};
use sandglass_proto::session::{OpenError, Target};

use crate::api::{bash, client, connect, http, run, run_with, signal, start_detached, user_header};
use crate::sandbox::{MAX_PROCESSES, Sandbox, configure};

/// A call that blocks, beside the tasks that carry it.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(call).await.unwrap()
}

#[tokio::test]
async fn nothing_is_served_before_the_configuration_and_older_ones_are_refused() {
    let sandbox = Sandbox::start();
    let (server, generation) = sandbox.attach().await;
    assert_eq!(generation, 0);
    let bridge = server.bridge().await;
    let api = bridge.api;
    assert_eq!(blocking(move || http(api, "GET", "/health", "", b"")).await.status, 503);
    let configured = server.ask(&ToAgent::Configure(Box::new(configure(2, Some("token"))))).await;
    assert_eq!(configured, FromAgent::Configured { generation: 2 });
    let stale = server.ask(&ToAgent::Configure(Box::new(configure(1, None)))).await;
    assert!(matches!(stale, FromAgent::ConfigureFailed { .. }), "{stale:?}");
    assert_eq!(blocking(move || http(api, "GET", "/health", "", b"")).await.status, 204);
    assert_eq!(blocking(move || http(api, "GET", "/envs", "", b"")).await.status, 401);
    let token = [("x-access-token", "token".to_owned())];
    let line = "hostname 2>/dev/null || cat /etc/hostname; cat /run/e2b/.E2B_SANDBOX_ID; echo; cat /etc/hosts; \
                echo $FROM_SERVER; env | grep -c SECRET";
    let outcome = run_with(api, bash(line), &token).await.unwrap();
    let wanted = "sandbox2\nsandbox2\n127.0.0.1 localhost\n127.0.1.1 sandbox2 # sandglass\nyes\n0\n";
    assert_eq!(outcome.stdout, wanted, "{outcome:?}");
}

#[tokio::test]
async fn commands_run_as_the_user_in_groups_that_nothing_leaves() {
    let sandbox = Sandbox::start();
    let (server, _) = sandbox.attach().await;
    server.configure(1).await;
    let api = server.bridge().await;
    let api = api.api;
    let outcome = run(api, "id -un; pwd; ulimit -u; grep CapEff /proc/self/status").await;
    assert_eq!(outcome.stdout, format!("user\n/home/user\n{MAX_PROCESSES}\nCapEff:\t0000000000000000\n"));

    // Twice away from everything that a shell knows.
    let line = "(setsid bash -c '(setsid sleep 8888 &) ; setsid sleep 8888' >/dev/null 2>&1 &) ; sleep 8888";
    let error = run_with(api, bash(line), &[("connect-timeout-ms", "1000".into())]).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::DeadlineExceeded);
    let left = run(api, "ps ax -o args | grep -c '^sleep 8888'").await;
    assert_eq!(left.stdout, "0\n");
    let pid = start_detached(api, line).await;
    run(api, "until [ $(ps ax -o args | grep -c '^sleep 8888') = 3 ]; do sleep 0.05; done").await;
    signal(api, pid, Signal::SIGNAL_SIGKILL).await.unwrap();
    let left = run(api, "ps ax -o args | grep -c '^sleep 8888'").await;
    assert_eq!(left.stdout, "0\n");

    let pid =
        start_detached(api, "for i in $(echo {1..200}); do sleep 8889 & done 2>/dev/null; sleep 8889").await;
    let request = crate::api::bash("ps ax -o args | grep -c '^sleep 8889'");
    let count: u32 =
        run_with(api, request, &[user_header("root")]).await.unwrap().stdout.trim().parse().unwrap();
    assert!(count <= MAX_PROCESSES, "{count}");
    signal(api, pid, Signal::SIGNAL_SIGKILL).await.unwrap();
}

#[tokio::test]
async fn sudo() {
    let sandbox = Sandbox::start();
    let (server, _) = sandbox.attach().await;
    server.configure(1).await;
    let bridge = server.bridge().await;
    let api = bridge.api;
    for (line, stdout, code) in [
        ("sudo id -u; pwd; sudo pwd", "0\n/home/user\n/home/user\n", 0),
        (
            "echo words | sudo tee /etc/written >/dev/null; ls -l /etc/written | cut -d' ' -f3; cat /etc/written",
            "root\nwords\n",
            0,
        ),
        ("sudo bash -c 'exit 7'", "", 7),
        ("sudo bash -c 'kill -TERM $$'", "", 143),
        ("LEAK=1 sudo A=2 bash -c 'echo $LEAK $A $HOME $SUDO_USER $SUDO_UID'", "2 /root user 1000\n", 0),
        ("sudo -u other id -un", "other\n", 0),
        ("sudo -i pwd", "/root\n", 0),
        ("sudo grep job /proc/self/cgroup >/tmp/a; grep job /proc/self/cgroup | grep -c -f /tmp/a", "1\n", 0),
        ("sudo sleep 7777 & sleep 0.3; kill -TERM $!; wait $!", "", 143),
        ("sudo nonexistent", "", 1),
        ("sudo -u nonexistent id", "", 1),
    ] {
        let outcome = run(api, line).await;
        assert_eq!((outcome.stdout.as_str(), outcome.code()), (stdout, code), "{line}: {outcome:?}");
    }
    let other = run_with(api, bash("sudo id"), &[user_header("other")]).await.unwrap();
    assert_eq!((other.stderr.as_str(), other.code()), ("sudo: other is not allowed to use sudo here\n", 1));

    // Its command ends with the caller's.
    let error =
        run_with(api, bash("sudo sleep 7778"), &[("connect-timeout-ms", "800".into())]).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::DeadlineExceeded);
    assert_eq!(run(api, "ps ax -o args | grep -c '^sleep 7778'").await.stdout, "0\n");

    // On a terminal it gets another one, of the same size.
    let mut request = bash(
        "tty; sudo bash -c 'tty; stty size; [ -t 0 ] && echo interactive'; stty -a | grep -o ' .\\?icanon'",
    );
    request.pty =
        PTY { size: Size { cols: 91, rows: 17, ..Default::default() }.into(), ..Default::default() }.into();
    let outcome = run_with(api, request, &[]).await.unwrap();
    let lines: Vec<_> = outcome.stdout.lines().collect();
    assert!(lines[0].starts_with("/dev/pts/") && lines[1].starts_with("/dev/pts/"), "{lines:?}");
    assert_ne!(lines[0], lines[1]);
    assert_eq!(lines[2..], ["17 91", "interactive", " icanon"]);
}

#[tokio::test]
async fn a_server_that_comes_back_gets_output_and_exit_code() {
    let sandbox = Sandbox::start();
    let (server, _) = sandbox.attach().await;
    server.configure(1).await;
    let bridge = server.bridge().await;
    let line = "echo before; until [ -e /tmp/go ]; do sleep 0.05; done; echo after; exit 9";
    let pid = start_detached(bridge.api, line).await;
    drop((bridge, server));
    std::fs::write(sandbox.path("/tmp/unrelated"), "").unwrap();

    let (server, generation) = sandbox.attach().await;
    assert_eq!(generation, 1, "it is still configured");
    let bridge = server.bridge().await;
    run(bridge.api, "touch /tmp/go; while [ -d /proc/$PPID ] && ps ax -o args | grep -q '^/bin/bash -c echo before'; do sleep 0.05; done").await;
    let outcome = connect(bridge.api, pid).await.unwrap();
    assert_eq!((outcome.stdout.as_str(), outcome.code()), ("before\nafter\n", 9));
    // Once is enough.
    let outcome = connect(bridge.api, pid).await.unwrap();
    assert_eq!((outcome.stdout.as_str(), outcome.code()), ("", 9));
}

#[tokio::test]
async fn freezing_keeps_connections_and_loopback_ports_are_reached() {
    let sandbox = Sandbox::start();
    let (server, _) = sandbox.attach().await;
    server.configure(1).await;
    let bridge = server.bridge().await;
    let api = bridge.api;
    let running = tokio::spawn(async move { run(api, "sleep 0.5; echo thawed").await });
    run(api, "true").await;
    for freeze in [ToAgent::Freeze, ToAgent::FreezeDisk] {
        server.session.hold().await.unwrap();
        assert_eq!(server.ask(&freeze).await, FromAgent::Frozen);
        assert_eq!(server.ask(&ToAgent::Thaw).await, FromAgent::Thawed);
        server.session.release();
    }
    assert_eq!(running.await.unwrap().stdout, "thawed\n");

    // The agent's own port is one of the guest's; programs inside use it.
    let port = |port: u16| Target::Tcp(sandglass_proto::session::Loopback::v4(port.try_into().unwrap()));
    let mut flow = server.session.open(port(49983)).await.unwrap();
    let request = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    tokio::io::AsyncWriteExt::write_all(&mut flow, request).await.unwrap();
    let mut answer = String::new();
    tokio::io::AsyncReadExt::read_to_string(&mut flow, &mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    let closed = server.session.open(port(1)).await;
    assert!(matches!(closed, Err(OpenError::Refused(_))), "{closed:?}");
    drop(client(api));
}

#[tokio::test]
async fn a_fork_bomb_does_not_silence_the_sandbox() {
    let sandbox = Sandbox::start();
    let (server, _) = sandbox.attach().await;
    let mut large = configure(1, None);
    large.max_processes = 150;
    let answer = server.ask(&ToAgent::Configure(Box::new(large))).await;
    assert_eq!(answer, FromAgent::Configured { generation: 1 });
    let bridge = server.bridge().await;
    let api = bridge.api;
    let pid = start_detached(api, "exec 2>/dev/null; bomb() { bomb | bomb & }; bomb; sleep 9000").await;
    for _ in 0..4 {
        start_detached(api, "while :; do :; done").await;
    }
    // Either it never does, or the storm is ended: then it answers quickly, many times in a row.
    let mut quick = 0;
    tokio::time::timeout(crate::api::PATIENCE, async {
        while quick < 20 {
            let asked = std::time::Instant::now();
            assert_eq!(blocking(move || http(api, "GET", "/health", "", b"")).await.status, 204);
            quick = if asked.elapsed().as_millis() < 250 { quick + 1 } else { 0 };
        }
    })
    .await
    .expect("the sandbox stays slow");
    let _ = signal(api, pid, Signal::SIGNAL_SIGKILL).await;
}
