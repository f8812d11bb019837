//! Flows between well-behaved ends.

use std::io;

use super::*;

#[tokio::test]
async fn control_messages_go_both_ways() {
    let (session, agent, _tasks) = pair().await;
    agent.send_control(&hello()).await.unwrap();
    assert_eq!(soon(session.recv_control()).await, Ok(hello()));
    let configure = ToAgent::Configure(Box::new(Configure {
        generation: 1,
        sandbox_id: "s".into(),
        template_id: "t".into(),
        access_token: None,
        default_user: "user".into(),
        default_workdir: None,
        // Longer than one frame.
        env: [("KEY".to_owned(), "v".repeat(100_000))].into(),
        max_processes: 1,
    }));
    session.send_control(&configure).await.unwrap();
    assert_eq!(soon(agent.next_event()).await, Ok(AgentEvent::Control(configure)));
    soon(session.ping()).await.unwrap();
}

#[tokio::test]
async fn a_message_that_is_too_long_is_not_sent() {
    let (_session, agent, _tasks) = pair().await;
    let message = FromAgent::Notice { message: "x".repeat(MAX_CONTROL_LEN) };
    assert!(matches!(agent.send_control(&message).await, Err(SendError::TooLong(_))));
}

#[tokio::test]
async fn an_agent_without_a_server_sends_nothing() {
    let (agent, _link) = AgentSession::new();
    assert!(matches!(agent.send_control(&hello()).await, Err(SendError::Detached)));
}

#[tokio::test]
async fn both_halves_of_a_flow_end_on_their_own() {
    let (session, agent, _tasks) = pair().await;
    let (mut near, mut far) = open(&session, &agent).await;
    near.write_all(b"question").await.unwrap();
    near.shutdown().await.unwrap();
    let mut text = String::new();
    soon(far.read_to_string(&mut text)).await.unwrap();
    assert_eq!(text, "question");
    far.write_all(b"answer").await.unwrap();
    far.shutdown().await.unwrap();
    drop(far);
    text.clear();
    soon(near.read_to_string(&mut text)).await.unwrap();
    assert_eq!(text, "answer");
    assert_eq!(
        near.write(b"more").await.unwrap_err().kind(),
        io::ErrorKind::BrokenPipe,
        "nothing can be written after a shutdown"
    );
    drop(near);
    assert_eq!(session.stats().flows, 0);
    assert_eq!(agent.stats().flows, 0);
}

#[tokio::test]
async fn what_was_written_before_a_shutdown_outlives_the_handle() {
    let (session, agent, _tasks) = pair().await;
    let (mut near, mut far) = open(&session, &agent).await;
    far.write_all(&[1; 60_000]).await.unwrap();
    far.shutdown().await.unwrap();
    drop(far);
    let mut bytes = Vec::new();
    soon(near.read_to_end(&mut bytes)).await.unwrap();
    assert_eq!(bytes.len(), 60_000);
    // As with TCP: nobody reads there any more.
    let error = soon(async {
        loop {
            if let Err(error) = near.write(b"x").await {
                break error;
            }
            tokio::task::yield_now().await;
        }
    });
    assert_eq!(error.await.kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_dropped_flow_is_reset_at_the_peer() {
    let (session, agent, _tasks) = pair().await;
    let (near, mut far) = open(&session, &agent).await;
    drop(near);
    let error = soon(far.read_u8()).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    assert_eq!(far.write(b"x").await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    drop(far);
    assert_eq!((session.stats().flows, agent.stats().flows), (0, 0));
}

#[tokio::test]
async fn targets_arrive_and_refusals_come_back() {
    let (session, agent, _tasks) = pair().await;
    for code in [ResetCode::Refused, ResetCode::Failed, ResetCode::Other(1234)] {
        let refuse = async {
            let incoming = agent.accept().await.unwrap();
            assert_eq!(incoming.target(), port(8080));
            incoming.refuse(code);
        };
        let (opened, ()) = soon(async { tokio::join!(session.open(port(8080)), refuse) }).await;
        assert_eq!(opened.unwrap_err(), OpenError::Refused(code));
    }
    assert_eq!((session.stats().flows, agent.stats().flows), (0, 0));
}

#[tokio::test]
async fn an_abandoned_opening_leaves_nothing() {
    let (session, agent, _tasks) = pair().await;
    let opening = tokio::time::timeout(Duration::from_millis(1), session.open(Target::GuestApi));
    assert!(opening.await.is_err());
    // The agent may see the abandoned one before it sees its end.
    let accept = async {
        loop {
            let mut flow = agent.accept().await.unwrap().accept();
            if flow.read_u8().await.is_ok() {
                break flow;
            }
        }
    };
    let near = async {
        let mut near = session.open(Target::GuestApi).await.unwrap();
        near.write_u8(1).await.unwrap();
        near
    };
    let flows = soon(async { tokio::join!(near, accept) }).await;
    assert_eq!((session.stats().flows, agent.stats().flows), (1, 1));
    drop(flows);
}

#[tokio::test]
async fn flows_are_bounded() {
    let (session, agent, _tasks) = pair().await;
    let mut flows = Vec::new();
    for _ in 0..MAX_FLOWS {
        flows.push(open(&session, &agent).await);
    }
    assert_eq!(soon(session.open(Target::GuestApi)).await.unwrap_err(), OpenError::TooManyFlows);
    drop(flows.pop());
    flows.push(open(&session, &agent).await);
    assert_eq!(session.stats().flows, MAX_FLOWS);
}

#[tokio::test]
async fn many_flows_echo_at_once() {
    let (session, agent, mut tasks) = pair().await;
    tasks.spawn(async move {
        echo(agent.clone()).await;
        agent.closed().await
    });
    let mut clients = JoinSet::new();
    for seed in 0..100_u8 {
        let session = session.clone();
        clients.spawn(async move { echo_once(&session, seed, 300_000 + usize::from(seed)).await });
    }
    while let Some(client) = soon(clients.join_next()).await {
        client.unwrap();
    }
    assert_eq!(session.stats().flows, 0);
}

#[tokio::test]
async fn a_stalled_flow_stops_its_sender_and_nobody_else() {
    let (session, agent, _tasks) = pair().await;
    let (mut stalled, mut far) = open(&session, &agent).await;
    // Nobody reads `far`.
    assert_eq!(write_until_stopped(&mut stalled).await, INITIAL_WINDOW as usize);
    // Another flow is as quick as ever.
    let (mut near, mut other) = open(&session, &agent).await;
    let transfer = async {
        near.write_all(&vec![1; 2_000_000]).await.unwrap();
        near.shutdown().await.unwrap();
    };
    let mut received = Vec::new();
    let (read, ()) = soon(async { tokio::join!(other.read_to_end(&mut received), transfer) }).await;
    assert_eq!(read.unwrap(), 2_000_000);
    // And the stalled one goes on once it is read.
    let mut bytes = vec![0; INITIAL_WINDOW as usize];
    soon(far.read_exact(&mut bytes)).await.unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
    soon(stalled.write_all(b"more")).await.unwrap();
}

#[tokio::test]
async fn flows_take_turns() {
    let (session, agent, _tasks) = pair().await;
    let (mut busy, mut busy_far) = open(&session, &agent).await;
    let (mut quiet, mut quiet_far) = open(&session, &agent).await;
    let flood = async {
        let chunk = vec![0; 64 * 1024];
        loop {
            busy.write_all(&chunk).await.unwrap();
        }
    };
    let drain = async { tokio::io::copy(&mut busy_far, &mut tokio::io::sink()).await };
    let ping_pong = async {
        for round in 0..200_u8 {
            quiet.write_u8(round).await.unwrap();
            assert_eq!(quiet_far.read_u8().await.unwrap(), round);
        }
    };
    soon(async {
        tokio::select! {
            () = flood => unreachable!(),
            _ = drain => unreachable!(),
            () = ping_pong => {}
        }
    })
    .await;
}

#[tokio::test]
async fn the_end_of_the_session_ends_everything() {
    let (session, agent, mut tasks) = pair().await;
    let (mut near, mut far) = open(&session, &agent).await;
    far.write_all(b"last words").await.unwrap();
    let mut words = [0; 10];
    soon(near.read_exact(&mut words)).await.unwrap();
    drop(session);
    assert_eq!(near.read_u8().await.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    assert_eq!(near.write(b"x").await.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    assert_eq!(soon(agent.closed()).await, Closed::Eof);
    assert_eq!(soon(far.read_u8()).await.unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
    assert!(soon(agent.accept()).await.is_err());
    assert!(soon(agent.next_event()).await.is_err());
    assert!(matches!(agent.send_control(&hello()).await, Err(SendError::Closed(Closed::Eof))));
    while soon(tasks.join_next()).await.is_some() {}
}

#[tokio::test]
async fn a_flow_that_was_read_gets_the_full_window_and_no_more() {
    let (session, agent, _tasks) = pair().await;
    let (mut near, mut far) = open(&session, &agent).await;
    let mut bytes = vec![0; INITIAL_WINDOW as usize];
    near.write_all(&bytes).await.unwrap();
    soon(far.read_exact(&mut bytes)).await.unwrap();
    let sent = write_until_stopped(&mut near).await;
    assert!(sent > WINDOW as usize * 3 / 4 && sent <= WINDOW as usize, "{sent}");
}

#[tokio::test]
async fn only_so_many_flows_get_the_full_window() {
    let (session, agent, _tasks) = pair().await;
    let mut flows = Vec::new();
    for _ in 0..=WIDE_FLOWS {
        let (mut near, mut far) = open(&session, &agent).await;
        let mut bytes = vec![0; INITIAL_WINDOW as usize / 2];
        near.write_all(&bytes).await.unwrap();
        soon(far.read_exact(&mut bytes)).await.unwrap();
        flows.push((near, far));
    }
    soon(session.ping()).await.unwrap();
    let (last, _) = flows.last_mut().unwrap();
    assert_eq!(write_until_stopped(last).await, INITIAL_WINDOW as usize);
    // Their place becomes free with the flow.
    flows.remove(0);
    let (mut near, mut far) = open(&session, &agent).await;
    let mut bytes = vec![0; INITIAL_WINDOW as usize];
    near.write_all(&bytes).await.unwrap();
    soon(far.read_exact(&mut bytes)).await.unwrap();
    let sent = write_until_stopped(&mut near).await;
    assert!(sent > WINDOW as usize * 3 / 4 && sent <= WINDOW as usize, "{sent}");
}

/// Writes to a flow that nobody reads; returns how much it took.
async fn write_until_stopped(flow: &mut Flow) -> usize {
    let mut sent = 0;
    let chunk = vec![7; 10_000];
    while let Ok(count) = tokio::time::timeout(Duration::from_millis(200), flow.write(&chunk)).await {
        sent += count.unwrap();
    }
    sent
}

#[tokio::test]
async fn a_peer_that_never_stops_talking_does_not_silence_this_side() {
    let (near, mut far) = tokio::io::duplex(128 * 1024);
    // Noise without an end, in a reader that never has to wait.
    let (session, driver) = Session::connect(tokio::io::repeat(0xF5), near, Epoch::from_random(1));
    let mut tasks = JoinSet::new();
    tasks.spawn(driver);
    session.send_control(&ToAgent::Thaw).await.unwrap();
    let expected = frame::MAX_FRAME + 2 * frame::HEADER_LEN + br#"{"type":"thaw"}"#.len();
    let mut bytes = vec![0; expected];
    soon(far.read_exact(&mut bytes)).await.unwrap();
    assert!(bytes.ends_with(br#"{"type":"thaw"}"#));
    soon(session.flush()).await.unwrap();
    drop(session);
    assert_eq!(soon(tasks.join_next()).await.unwrap().unwrap(), Closed::Local);
}

#[tokio::test]
async fn a_hold_waits_for_the_frame_in_flight() {
    let (session, mut link) = Session::new(Epoch::from_random(1));
    assert!(link.outbound.try_next().is_some());
    let hold = session.hold();
    let mut hold = std::pin::pin!(hold);
    assert!(tokio::time::timeout(Duration::from_millis(20), &mut hold).await.is_err());
    // Asking for more says that the last was written.
    assert!(link.outbound.try_next().is_none());
    soon(hold).await.unwrap();
}
