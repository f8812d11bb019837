//! Names of every byte that a name may have, through every verb.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;

use connectrpc::ErrorCode;
use connectrpc::client::{ClientConfig, HttpClient};
use sandglass_proto::services::filesystem::{
    CreateWatcherRequest, EntryInfo, FilesystemClient, GetWatcherEventsRequest, ListDirRequest,
    MakeDirRequest, MoveRequest, RemoveRequest, StatRequest,
};

use crate::api::http;
use crate::native::Native;

const OCTETS: &str = "Content-Type: application/octet-stream\r\n";

fn client(agent: &Native) -> FilesystemClient<HttpClient> {
    let uri = format!("http://{}", agent.api).parse().unwrap();
    FilesystemClient::new(HttpClient::plaintext(), ClientConfig::new(uri).json())
}

/// A target whose path is written as bytes.
fn target(path: &str) -> String {
    use std::fmt::Write as _;
    path.bytes().fold("/files?path=".to_owned(), |mut text, byte| {
        write!(text, "%{byte:02x}").unwrap();
        text
    })
}

#[tokio::test]
async fn names_of_every_character_are_the_same_for_all_verbs() {
    let agent = Native::start(&[]);
    let client = client(&agent);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let top = dir.path().to_str().unwrap();
    let request = CreateWatcherRequest { path: top.into(), ..Default::default() };
    let watcher_id = client.create_watcher(request).await.unwrap().into_owned().watcher_id;
    // Each byte that is a character, by itself and among others; and some that take two to four.
    let characters =
        (1..0x80).map(char::from).chain(['\u{80}', '\u{2028}', '\u{202e}', '\u{fffd}', '\u{1f980}']);
    for character in characters.filter(|character| *character != '/') {
        // By itself, a dot names something else.
        let alone = Some(character.to_string()).filter(|_| character != '.');
        for name in alone.into_iter().chain([
            format!("{character}a"),
            format!("a{character}"),
            format!("a{character}b"),
        ]) {
            let path = format!("{top}/{name}");
            assert_eq!(
                http(agent.api, "POST", &target(&path), OCTETS, name.as_bytes()).status,
                200,
                "{name:?}"
            );
            assert_eq!(fs::read(&path).unwrap(), name.as_bytes(), "{name:?}");
            assert_eq!(http(agent.api, "GET", &target(&path), "", b"").body, name.as_bytes(), "{name:?}");
            let is_it = |entry: &EntryInfo| entry.name == name && entry.path == path;
            let entry = client.stat(StatRequest { path: path.clone(), ..Default::default() }).await.unwrap();
            assert!(is_it(&entry.into_owned().entry), "{name:?}");
            let listed =
                client.list_dir(ListDirRequest { path: top.into(), ..Default::default() }).await.unwrap();
            assert!(matches!(&listed.into_owned().entries[..], [entry] if is_it(entry)), "{name:?}");
            let request = GetWatcherEventsRequest { watcher_id: watcher_id.clone(), ..Default::default() };
            let events = client.get_watcher_events(request).await.unwrap().into_owned().events;
            assert!(
                !events.is_empty() && events.iter().all(|event| event.name == name),
                "{name:?} {events:?}"
            );
            // Away, and a folder in its place, and back into that.
            let aside = format!("{top}-aside");
            let moving = |source: &str, destination: &str| MoveRequest {
                source: source.into(),
                destination: destination.into(),
                ..Default::default()
            };
            client.r#move(moving(&path, &aside)).await.unwrap();
            let made =
                client.make_dir(MakeDirRequest { path: path.clone(), ..Default::default() }).await.unwrap();
            assert!(is_it(&made.into_owned().entry), "{name:?}");
            let moved = client.r#move(moving(&aside, &format!("{path}/{name}"))).await.unwrap();
            assert_eq!(moved.into_owned().entry.into_option().unwrap().name, name);
            assert_eq!(fs::read(format!("{path}/{name}")).unwrap(), name.as_bytes(), "{name:?}");
            client.remove(RemoveRequest { path: path.clone(), ..Default::default() }).await.unwrap();
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{name:?}");
            let request = GetWatcherEventsRequest { watcher_id: watcher_id.clone(), ..Default::default() };
            client.get_watcher_events(request).await.unwrap();
        }
    }
}

#[tokio::test]
async fn forms_carry_names_of_every_character_that_a_form_can() {
    let agent = Native::start(&[]);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    // A quote ends the name in the header of a part, and a line ends that.
    for character in (1..0x80).map(char::from).filter(|character| !"/\"\\\r\n".contains(*character)) {
        let path = format!("{}/a{character}b", dir.path().display());
        let form = format!(
            "--xx\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{path}\"\r\n\r\ncontents\r\n--xx--\r\n"
        );
        let kind = "Content-Type: multipart/form-data; boundary=xx\r\n";
        let reply = http(agent.api, "POST", "/files", kind, form.as_bytes());
        // Whole, or refused: never under another name.
        let found: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        if reply.status == 200 {
            assert_eq!(found, [std::path::Path::new(&path)], "{character:?}");
            fs::remove_file(&path).unwrap();
        } else {
            assert!(
                reply.status == 400 && found.is_empty() && character.is_control(),
                "{character:?} {}",
                reply.text()
            );
        }
    }
}

#[tokio::test]
async fn names_that_are_no_text_are_told_and_removed_with_their_folder() {
    let agent = Native::start(&[]);
    let client = client(&agent);
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let top = dir.path().join("top");
    fs::create_dir(&top).unwrap();
    let path = top.to_str().unwrap();
    let request = CreateWatcherRequest { path: path.into(), recursive: true, ..Default::default() };
    let watcher_id = client.create_watcher(request).await.unwrap().into_owned().watcher_id;
    let bytes: Vec<u8> = (0x80..=0xff).collect();
    for byte in &bytes {
        let folder = top.join(OsStr::from_bytes(&[b'd', *byte]));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(OsStr::from_bytes(&[*byte])), "").unwrap();
    }
    let listed =
        client.list_dir(ListDirRequest { path: path.into(), depth: 2, ..Default::default() }).await.unwrap();
    let entries = listed.into_owned().entries;
    assert_eq!(entries.len(), 2 * bytes.len());
    assert!(entries.iter().all(|entry| ["d\u{fffd}", "\u{fffd}"].contains(&entry.name.as_str())));
    // What is told is no name of anything.
    for path in [format!("{path}/d\u{fffd}"), format!("{path}/d\u{fffd}/\u{fffd}")] {
        let error = client.stat(StatRequest { path: path.clone(), ..Default::default() }).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::NotFound);
        assert_eq!(http(agent.api, "GET", &target(&path), "", b"").status, 404);
    }
    for byte in &bytes {
        let target = format!("{}%{byte:02x}", target(&format!("{path}/d")));
        assert_eq!(http(agent.api, "GET", &target, "", b"").status, 400);
        assert_eq!(http(agent.api, "POST", &target, OCTETS, b"x").status, 400);
    }
    let request = GetWatcherEventsRequest { watcher_id, ..Default::default() };
    let events = client.get_watcher_events(request).await.unwrap().into_owned().events;
    let created = events.iter().filter(|event| event.name == "d\u{fffd}/\u{fffd}").count();
    assert_eq!(created, bytes.len(), "{events:?}");
    client.remove(RemoveRequest { path: path.into(), ..Default::default() }).await.unwrap();
    assert!(!top.exists());
}
