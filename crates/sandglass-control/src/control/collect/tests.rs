//! What a process might say that a guest has taken over, each beside an answer that is taken.

use sandglass_engine::collect::{receive, send};

use super::*;

fn wanted(globs: &[&str], bounds: Bounds) -> CollectFiles {
    let globs = globs.iter().map(|&glob| glob.to_owned()).collect::<Vec<_>>().try_into().unwrap();
    CollectFiles { place: "/workspace/project".parse().unwrap(), globs, bounds }
}

fn said(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    send(&mut bytes, text.as_bytes()).unwrap();
    bytes
}

fn file(path: &str, size: u64) -> Vec<u8> {
    let said = Said::File { path: path.into(), mode: 0o644, size, mtime: 7 };
    self::said(&serde_json::to_string(&said).unwrap())
}

fn pieces(pieces: &[&str]) -> Vec<u8> {
    pieces.iter().flat_map(|piece| said(piece)).collect()
}

fn read(whole: bool) -> Vec<u8> {
    said(&serde_json::to_string(&Said::Read { whole }).unwrap())
}

fn done() -> Vec<u8> {
    said(&serde_json::to_string(&Said::Done(LeftOut::default())).unwrap())
}

/// What is made of an answer: all that is found until it ends, well or not.
async fn found(wanted: &CollectFiles, answer: Vec<Vec<u8>>) -> Result<Vec<Found>, (Vec<Found>, Error)> {
    let (ours, mut theirs) = StdStream::pair().unwrap();
    let answering = std::thread::spawn(move || {
        receive(&mut theirs, MAX_ASK).unwrap();
        // Who is refused early hears nothing more of it.
        let _heard = std::io::Write::write_all(&mut theirs, &answer.concat());
    });
    let mut all = Vec::new();
    let mut collection = match Collection::ask(ours.into(), wanted).await {
        Ok(collection) => collection,
        Err(error) => return Err((all, error)),
    };
    loop {
        match collection.next().await {
            Ok(Found::Done(left_out)) => {
                all.push(Found::Done(left_out));
                answering.join().unwrap();
                assert!(collection.next().await.is_err(), "there is nothing after the end");
                return Ok(all);
            }
            Ok(found) => all.push(found),
            Err(error) => {
                assert!(collection.next().await.is_err(), "there is nothing after a failure");
                return Err((all, error));
            }
        }
    }
}

#[tokio::test]
async fn files_come_with_their_pieces_and_digest() {
    let answer = vec![
        file("a/b", 5),
        pieces(&["he", "llo", ""]),
        read(true),
        file("empty", 0),
        pieces(&[""]),
        read(true),
        // It got shorter, and another was changed.
        file("short", 5),
        pieces(&["he", ""]),
        read(true),
        file("changed", 2),
        pieces(&["he", ""]),
        read(false),
        done(),
    ];
    let all = found(&wanted(&[], Bounds::WIDEST), answer).await.unwrap();
    let digest = |text: &str| Digest::from_bytes(Sha256::digest(text).into());
    let head = |path: &str, size| Found::File(FoundFile { path: path.into(), mode: 0o644, size, mtime: 7 });
    let piece = |text: &str| Found::Piece(text.into());
    let wanted = [
        head("a/b", 5),
        piece("he"),
        piece("llo"),
        Found::End { sha256: digest("hello"), whole: true },
        head("empty", 0),
        Found::End { sha256: digest(""), whole: true },
        head("short", 5),
        piece("he"),
        Found::End { sha256: digest("he"), whole: false },
        head("changed", 2),
        piece("he"),
        Found::End { sha256: digest("he"), whole: false },
        Found::Done(LeftOut::default()),
    ];
    assert_eq!(all, wanted);
}

#[tokio::test]
async fn what_nobody_asked_for_is_the_end() {
    let few = Bounds { files: 2, bytes: 10, file_bytes: 6, seconds: 10 };
    let whole = |path: &str| [file(path, 2), pieces(&["he", ""]), read(true)].concat();
    let taken = found(&wanted(&["*.txt"], few), vec![whole("a.txt"), whole("b.txt"), done()]).await;
    assert_eq!(taken.unwrap().len(), 7, "the control");
    for answer in [
        // Another path than was asked for, or none at all.
        vec![whole("a.md"), done()],
        vec![whole("../a.txt"), done()],
        vec![whole("/a.txt"), done()],
        vec![whole(""), done()],
        vec![whole("x/../a.txt"), done()],
        vec![whole("a\0.txt"), done()],
        // More than was asked for.
        vec![whole("a.txt"), whole("b.txt"), whole("c.txt"), done()],
        vec![file("a.txt", 7), pieces(&["1234567", ""]), read(true), done()],
        vec![
            file("a.txt", 6),
            pieces(&["123456", ""]),
            read(true),
            file("b.txt", 5),
            pieces(&["12345", ""]),
            read(true),
            done(),
        ],
        // Another size than was said.
        vec![file("a.txt", 2), pieces(&["123", ""]), read(true), done()],
        vec![file("a.txt", 2), pieces(&["12", "3", ""]), read(true), done()],
        // Out of order, or cut off.
        vec![read(true), done()],
        vec![file("a.txt", 2), pieces(&["12", ""]), done()],
        vec![file("a.txt", 2), pieces(&["12", ""]), file("b.txt", 2), done()],
        vec![whole("a.txt")],
        vec![file("a.txt", 2), pieces(&["1"])],
        vec![whole("a.txt"), said(r#"{"refused":{"why":"failed","message":"x"}}"#)],
        // No message at all.
        vec![said("{}"), done()],
        vec![said(r#"{"file":{"path":"a.txt","mode":511,"size":0,"mtime":0,"more":1}}"#), done()],
        vec![
            said(r#"{"file":{"path":"a.txt","mode":2541,"size":0,"mtime":0}}"#),
            pieces(&[""]),
            read(true),
            done(),
        ],
        vec![u32::MAX.to_le_bytes().to_vec()],
        vec![],
    ] {
        let shown =
            format!("{:?}", answer.iter().map(|part| String::from_utf8_lossy(part)).collect::<Vec<_>>());
        let (all, error) = found(&wanted(&["*.txt"], few), answer).await.expect_err(&shown);
        assert_eq!(error.kind(), ErrorKind::Internal, "{shown}");
        assert!(!all.iter().any(|found| matches!(found, Found::Done(_))), "{shown}");
    }
}

#[tokio::test]
async fn a_path_that_is_told_twice_is_told_once() {
    let whole = |text: &str| [file("a", 2), pieces(&[text, ""]), read(true)].concat();
    let all = found(&wanted(&[], Bounds::WIDEST), vec![whole("he"), whole("ho"), done()]).await.unwrap();
    assert_eq!(all.len(), 4);
    assert_eq!(all[1], Found::Piece(b"he".to_vec()));
    assert_eq!(all[3], Found::Done(LeftOut { changed: 1, ..LeftOut::default() }));
}

#[tokio::test]
async fn a_refusal_says_why() {
    for (why, kind) in
        [("not_found", ErrorKind::NotFound), ("invalid", ErrorKind::Invalid), ("failed", ErrorKind::Internal)]
    {
        let answer = said(&format!(r#"{{"refused":{{"why":"{why}","message":"because"}}}}"#));
        let (_, error) = found(&wanted(&[], Bounds::WIDEST), vec![answer]).await.unwrap_err();
        assert_eq!(error.kind(), kind);
    }
}

#[tokio::test]
async fn a_team_has_so_many_at_one_time() {
    let collecting = Arc::new(Collecting::default());
    let team = TeamId::random();
    let mut taken = Vec::new();
    for _ in 0..MAX_FOR_TEAM {
        taken.push(collecting.for_client(team).await.unwrap());
    }
    assert_eq!(collecting.for_client(team).await.unwrap_err().kind(), ErrorKind::Capacity);
    let other = collecting.for_client(TeamId::random()).await.unwrap();
    taken.clear();
    drop(other);
    collecting.for_client(team).await.unwrap();
    assert!(lock(&collecting.teams).is_empty());
}
