use std::convert::Infallible;

use futures_util::{Stream as Pieces, StreamExt as _, stream};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use sandglass_broker::Secret;
use sandglass_broker::redact::Search;
use sandglass_types::TeamId;

use super::*;
use crate::answer::Body;
use crate::pool::Pool;

const KEY: &str = "sk-upstream-0123456789";

/// Carries what a provider sends within so many bytes and so much memory.
async fn carry(
    answer: impl Pieces<Item = Vec<u8>>,
    client: mpsc::Sender<Piece>,
    streamed: bool,
    (most, memory): (u64, u64),
) -> Heard {
    let search = Search::of([&KEY.parse::<Secret>().unwrap()]);
    let relay = Relay {
        waits: &Waits::default(),
        stop: &CancellationToken::new(),
        redactor: Redactor::new(&search),
        inlet: &Inlet::new(),
        room: Pool::new(memory).nothing(TeamId::random()),
        most,
    };
    let answer = StreamBody::new(answer.map(|piece| Ok::<_, Infallible>(Frame::data(Bytes::from(piece)))));
    relay.carry(answer, client, Dialect::Messages, streamed, true).await
}

fn event(n: usize) -> Vec<u8> {
    format!("data: {{\"type\":\"ping\",\"n\":{n}}}\n\n").into_bytes()
}

const PLENTY: (u64, u64) = (1 << 30, 1 << 30);

#[tokio::test(start_paused = true)]
async fn who_pauses_for_too_long_hears_that_something_is_missing() {
    let (client, pieces) = mpsc::channel(WAITING);
    let carried = carry(stream::iter(0..20).map(event), client, true, PLENTY).await;
    assert!(carried.rest.is_none(), "there is no end to be said");
    assert_eq!(
        carried.told.length,
        (0..20).map(|n| event(n).len() as u64).sum::<u64>(),
        "it was heard all the same"
    );
    assert!(Body::Pieces(pieces).collect().await.is_err(), "and the client takes it for no answer");
    // One that takes it hears all of it.
    let (client, pieces) = mpsc::channel(WAITING);
    let taking = async {
        let carried = carry(stream::iter(0..20).map(event), client, true, PLENTY).await;
        let (client, rest) = carried.rest.unwrap();
        assert!(rest.is_empty());
        client.send(Piece::End).await.unwrap();
    };
    let (read, ()) = tokio::join!(Body::Pieces(pieces).collect(), taking);
    assert_eq!(read.unwrap().to_bytes(), (0..20).flat_map(event).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn neither_steadiness_nor_silence_keeps_a_call_for_ever() {
    let ever = || {
        stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_secs(59)).await;
            Some((event(0), ()))
        })
    };
    let waits = Waits::default();
    let begin = Instant::now();
    let (client, mut pieces) = mpsc::channel(WAITING);
    let taking = async { while pieces.recv().await.is_some() {} };
    let (carried, ()) = tokio::join!(carry(ever(), client, true, PLENTY), taking);
    assert!(carried.rest.is_none() && !carried.told.complete);
    assert_eq!(begin.elapsed(), waits.call);
    let begin = Instant::now();
    let (client, pieces) = mpsc::channel(WAITING);
    drop(pieces);
    carry(ever(), client, true, PLENTY).await;
    assert_eq!(begin.elapsed(), waits.drain);
}

#[tokio::test]
async fn an_answer_is_no_longer_than_it_can_be_and_takes_no_more_than_there_is() {
    let junk = |pieces: usize| stream::iter(0..pieces).map(|_| vec![b' '; 1 << 10]);
    for streamed in [false, true] {
        let (client, mut pieces) = mpsc::channel(2000);
        let carried = carry(junk(1000), client, streamed, (100 << 10, 1 << 30)).await;
        assert!(carried.rest.is_none() && !carried.told.complete);
        let mut passed = 0;
        while let Some(Piece::Data(bytes)) = pieces.recv().await {
            passed += bytes.len();
        }
        assert_eq!(passed, 100 << 10);
    }
    // An event for which there is no memory ends a stream; an answer that came as a whole passes unheard.
    let (client, _pieces) = mpsc::channel(2000);
    let carried = carry(junk(1000), client, true, (1 << 30, 200 << 10)).await;
    assert!(carried.rest.is_none() && carried.told.length < 100 << 10);
    let (client, _pieces) = mpsc::channel(2000);
    let carried = carry(junk(1000), client, false, (1 << 30, 200 << 10)).await;
    assert!(carried.rest.is_some() && carried.told == Told::unheard(true, 1000 << 10));
    // Events that end give their memory back.
    let (client, _pieces) = mpsc::channel(20_000);
    let carried = carry(stream::iter(0..10_000).map(event), client, true, (1 << 30, 1 << 10)).await;
    assert!(carried.rest.is_some());
}

#[tokio::test]
async fn a_key_comes_in_in_no_form() {
    let escaped = KEY.replace('-', "\\u002d");
    let text = format!(
        "data: {{\"error\":\"{KEY} {escaped} {}\"}}\n\n",
        data_encoding::BASE64.encode(KEY.as_bytes())
    );
    for size in [1, 7, 1000] {
        let (client, pieces) = mpsc::channel(2000);
        let answer = stream::iter(text.as_bytes().chunks(size).map(<[u8]>::to_vec));
        let (client, rest) = carry(answer, client, true, PLENTY).await.rest.unwrap();
        client.send(Piece::Data(rest)).await.unwrap();
        client.send(Piece::End).await.unwrap();
        let read = Body::Pieces(pieces).collect().await.unwrap().to_bytes();
        let read = std::str::from_utf8(&read).unwrap();
        assert_eq!(read.len(), text.len());
        assert!(read.starts_with("data: {\"error\":\"****") && read.ends_with("\"}\n\n"), "{read}");
        assert!(
            !read.contains("0123456789") && !read.contains("002d") && !read.contains("c2stdXBz"),
            "{read}"
        );
    }
}

#[test]
fn an_answer_may_be_as_long_as_what_was_asked_for() {
    let short = most(Dialect::Messages, 1000, 1000);
    assert!(short > 8_000_000 && short < 9_000_000);
    assert!(most(Dialect::Responses, 1 << 20, 1) > 4 << 20, "the request comes back in it");
    assert_eq!(most(Dialect::Images, 1 << 20, u64::MAX), LONGEST);
    assert_eq!(most(Dialect::Chat, 1, u64::MAX), u64::MAX);
}
