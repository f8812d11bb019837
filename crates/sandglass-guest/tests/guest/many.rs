//! More files than anybody lists: the agent stays small, and says so in time.

use std::fs;
use std::path::{Path, PathBuf};

use connectrpc::client::{ClientConfig, HttpClient};
use connectrpc::{ConnectError, ErrorCode};
use sandglass_proto::services::filesystem::{
    CreateWatcherRequest, FilesystemClient, GetWatcherEventsRequest, RemoveRequest, StatRequest,
};

use crate::api::http;
use crate::native::Native;

/// Files in all, unless `SANDGLASS_FILES` says otherwise.
const FILES: usize = 200_000;

/// Files in one folder: fewer than a listing may have.
const WIDTH: usize = 40_000;

/// What the agent may take for what it refuses or does, in KiB.
const SMALL: u64 = 6 << 10;

/// What it may take for a listing within its bound, in KiB.
const LISTED: u64 = 24 << 10;

fn client(agent: &Native) -> FilesystemClient<HttpClient> {
    let uri = format!("http://{}", agent.api).parse().unwrap();
    FilesystemClient::new(HttpClient::plaintext(), ClientConfig::new(uri).json())
}

fn count() -> usize {
    std::env::var("SANDGLASS_FILES").map_or(FILES, |text| text.parse().unwrap())
}

/// Folders below one another, each with many files behind the next one: who walks it has all of them before it at once.
fn deep(top: &Path) -> PathBuf {
    let mut at = top.to_owned();
    for level in 0..count() / WIDTH {
        at = at.join(format!("{level}"));
        fs::create_dir(&at).unwrap();
        for n in 0..WIDTH {
            fs::write(at.join(format!("f{n}")), "").unwrap();
        }
    }
    at
}

struct Asker {
    agent: Native,
    before: u64,
}

impl Asker {
    fn new() -> Self {
        let agent = Native::start(&[]);
        // What every answer needs is not what this is about.
        assert_eq!(http(agent.api, "GET", "/health", "", b"").status, 204);
        let before = agent.rss_kib();
        Self { agent, before }
    }

    /// How many entries there are, or what the refusal says. Not by the client, which takes less than the agent gives.
    fn list(&self, path: &Path, depth: u32) -> Result<usize, String> {
        let request = format!(r#"{{"path":"{}","depth":{depth}}}"#, path.display());
        let kind = "Content-Type: application/json\r\n";
        let reply = http(self.agent.api, "POST", "/filesystem.Filesystem/ListDir", kind, request.as_bytes());
        match reply.status {
            200 => Ok(reply.text().matches("\"permissions\":").count()),
            _ => Err(reply.text().to_owned()),
        }
    }

    async fn remove(&self, path: &Path) -> Result<(), ConnectError> {
        let request = RemoveRequest { path: path.to_str().unwrap().into(), ..Default::default() };
        client(&self.agent).remove(request).await.map(|_| ())
    }

    async fn watch(&self, path: &Path) -> Result<String, ConnectError> {
        let request = CreateWatcherRequest {
            path: path.to_str().unwrap().into(),
            recursive: true,
            ..Default::default()
        };
        Ok(client(&self.agent).create_watcher(request).await?.into_owned().watcher_id)
    }

    fn takes_less_than(&self, bound: u64) {
        let now = self.agent.rss_kib();
        assert!(now.saturating_sub(self.before) < bound, "{now} KiB, {} KiB before", self.before);
    }
}

#[tokio::test]
async fn files_without_number_are_listed_watched_and_removed_within_bounds() {
    let asker = Asker::new();
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let top = dir.path().join("top");
    fs::create_dir(&top).unwrap();
    let last = deep(&top);
    for depth in [3, 100] {
        let refusal = asker.list(&top, depth).unwrap_err();
        assert!(refusal.contains("resource_exhausted") && refusal.contains("too much to list"), "{refusal}");
    }
    asker.takes_less_than(SMALL);
    // What is there is not told, whatever there is of it; what comes is.
    let watcher = asker.watch(&top).await.unwrap();
    fs::write(last.join("new"), "").unwrap();
    let request = GetWatcherEventsRequest { watcher_id: watcher, ..Default::default() };
    let events = client(&asker.agent).get_watcher_events(request).await.unwrap().into_owned().events;
    assert!(events.len() == 1 && events[0].name.ends_with("/new"), "{events:?}");
    let file = last.join("f7").to_str().unwrap().to_owned();
    let entry = client(&asker.agent).stat(StatRequest { path: file, ..Default::default() }).await.unwrap();
    assert_eq!(entry.into_owned().entry.into_option().unwrap().name, "f7");
    asker.takes_less_than(SMALL);
    // One level of it is an answer.
    fs::remove_file(last.join("new")).unwrap();
    assert_eq!(asker.list(&last, 9), Ok(WIDTH));
    asker.takes_less_than(LISTED);
    asker.remove(&top).await.unwrap();
    assert!(!top.exists());
    asker.takes_less_than(LISTED);
}

#[tokio::test]
async fn folders_without_number_are_refused_to_watch_and_removed() {
    let asker = Asker::new();
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let top = dir.path().join("top");
    for n in 0..count() {
        let folder = top.join(format!("{n}"));
        fs::create_dir_all(&folder).unwrap();
    }
    assert_eq!(asker.watch(&top).await.unwrap_err().code, ErrorCode::ResourceExhausted);
    assert!(asker.list(&top, 1).unwrap_err().contains("too much to list"));
    asker.takes_less_than(SMALL);
    asker.remove(&top).await.unwrap();
    assert!(!top.exists());
    asker.takes_less_than(SMALL);
}
