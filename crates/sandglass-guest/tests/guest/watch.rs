//! Watching folders, natively: what a client's behaviour costs the agent.

use std::fs;

use connectrpc::ErrorCode;
use connectrpc::client::{CallOptions, ClientConfig, HttpClient};
use sandglass_proto::services::filesystem::watch_dir_response::Event;
use sandglass_proto::services::filesystem::{
    CreateWatcherRequest, EventType, FilesystemClient, GetWatcherEventsRequest, RemoveWatcherRequest,
    WatchDirRequest,
};

use crate::api::{PATIENCE, eventually};
use crate::native::Native;

fn client(agent: &Native) -> FilesystemClient<HttpClient> {
    let uri = format!("http://{}", agent.api).parse().unwrap();
    FilesystemClient::new(HttpClient::plaintext(), ClientConfig::new(uri).json())
}

fn request(path: &std::path::Path) -> WatchDirRequest {
    WatchDirRequest { path: path.to_str().unwrap().into(), recursive: true, ..Default::default() }
}

/// In memory, where files take little time to make.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

#[tokio::test]
async fn a_client_that_stops_reading_costs_little_and_hears_what_it_missed() {
    let agent = Native::start(&[]);
    let dir = folder();
    let mut stream = client(&agent).watch_dir(request(dir.path())).await.unwrap();
    let first = stream.message().await.unwrap().unwrap().to_owned_message();
    assert!(matches!(first.event, Some(Event::Start(_))), "{first:?}");
    let before = agent.rss_kib();
    let path = dir.path().to_owned();
    let made = 200_000;
    tokio::task::spawn_blocking(move || {
        fs::create_dir(path.join("sub")).unwrap();
        for n in 0..made {
            fs::write(path.join(format!("sub/{n}")), "").unwrap();
        }
    })
    .await
    .unwrap();
    eventually("the agent is at rest", || {
        let one = agent.rss_kib();
        std::thread::sleep(std::time::Duration::from_millis(100));
        (agent.rss_kib() == one).then_some(())
    });
    assert!(agent.rss_kib() - before < 16 << 10, "{} KiB, {before} KiB before", agent.rss_kib());
    let mut told = 0;
    let read = async {
        loop {
            match stream.message().await {
                Ok(Some(message)) => {
                    assert!(matches!(message.to_owned_message().event, Some(Event::Filesystem(_))));
                    told += 1;
                }
                Ok(None) => panic!("nothing was lost"),
                Err(error) => return error.code,
            }
        }
    };
    assert_eq!(tokio::time::timeout(PATIENCE, read).await.unwrap(), ErrorCode::DataLoss);
    assert!((1000..made).contains(&told), "{told}");
}

#[tokio::test]
async fn an_idle_stream_says_that_it_lives_and_ends_in_time() {
    let agent = Native::start(&[]);
    let dir = folder();
    let options = CallOptions::default().with_header("keepalive-ping-interval", "1");
    let options = options.with_header("connect-timeout-ms", "1500");
    let mut stream = client(&agent).watch_dir_with_options(request(dir.path()), options).await.unwrap();
    let mut kinds = Vec::new();
    let end = loop {
        match stream.message().await {
            Ok(Some(message)) => kinds.push(match message.to_owned_message().event {
                Some(Event::Start(_)) => 's',
                Some(Event::Keepalive(_)) => 'k',
                _ => '?',
            }),
            Ok(None) => panic!("it ended without a reason"),
            Err(error) => break error.code,
        }
    };
    assert_eq!((kinds.as_slice(), end), (&['s', 'k'][..], ErrorCode::DeadlineExceeded));
}

#[tokio::test]
async fn a_watcher_is_known_by_its_id_alone() {
    let agent = Native::start(&[]);
    let dir = folder();
    let create = || CreateWatcherRequest { path: dir.path().to_str().unwrap().into(), ..Default::default() };
    let id = client(&agent).create_watcher(create()).await.unwrap().into_owned().watcher_id;
    let other = client(&agent).create_watcher(create()).await.unwrap().into_owned().watcher_id;
    fs::write(dir.path().join("f"), "").unwrap();
    let get = |id: &str| GetWatcherEventsRequest { watcher_id: id.into(), ..Default::default() };
    // Whichever connection asks.
    let events = client(&agent).get_watcher_events(get(&id)).await.unwrap().into_owned().events;
    let events: Vec<_> = events.iter().map(|event| (event.name.as_str(), event.r#type.as_known())).collect();
    assert_eq!(events, [("f", Some(EventType::EVENT_TYPE_CREATE))]);
    for unknown in ["", "w1", &id[..id.len() - 1], &format!("{id}0")] {
        let error = client(&agent).get_watcher_events(get(unknown)).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::NotFound, "{unknown}");
    }
    let remove = || RemoveWatcherRequest { watcher_id: id.clone(), ..Default::default() };
    client(&agent).remove_watcher(remove()).await.unwrap();
    assert_eq!(client(&agent).remove_watcher(remove()).await.unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(client(&agent).get_watcher_events(get(&id)).await.unwrap_err().code, ErrorCode::NotFound);
    assert!(client(&agent).get_watcher_events(get(&other)).await.is_ok());
}

#[tokio::test]
async fn a_stream_that_its_client_left_makes_room() {
    let agent = Native::start(&[]);
    let dir = folder();
    let mut streams = Vec::new();
    let refused = loop {
        let mut stream = client(&agent).watch_dir(request(dir.path())).await.unwrap();
        match stream.message().await {
            Ok(_) => streams.push(stream),
            Err(error) => break error.code,
        }
    };
    // The machine's own bound is the same, and others may have some of it.
    assert!(refused == ErrorCode::ResourceExhausted && (64..=128).contains(&streams.len()), "{refused:?}");
    drop(streams);
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let mut stream = client(&agent).watch_dir(request(dir.path())).await.unwrap();
        if stream.message().await.is_ok() {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}
