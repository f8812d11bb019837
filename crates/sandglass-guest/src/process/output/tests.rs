use super::*;

fn chunk(bytes: &[u8]) -> Chunk {
    Chunk { channel: Channel::Stdout, bytes: Bytes::copy_from_slice(bytes) }
}

fn text(backlog: &VecDeque<Chunk>) -> Vec<u8> {
    backlog.iter().flat_map(|chunk| chunk.bytes.to_vec()).collect()
}

fn end(epoch: u32) -> End {
    End { status: Status::Exited(0), cause: Cause::Itself, at: Instant::now(), epoch }
}

#[test]
fn the_ring_keeps_exactly_the_last_bytes() {
    let mut ring = Ring::default();
    let all: Vec<u8> = (0..3 * KEPT).map(|i| u8::try_from(i % 251).unwrap()).collect();
    for part in all.chunks(1000) {
        ring.push(&chunk(part));
        assert!(ring.bytes.len() <= KEPT);
    }
    assert_eq!(text(&ring.chunks()), all[all.len() - KEPT..]);
}

#[test]
fn what_comes_byte_by_byte_takes_no_more_room_and_keeps_its_order() {
    let mut ring = Ring::default();
    for i in 0..2 * KEPT {
        let channel = if i % 1000 < 500 { Channel::Stdout } else { Channel::Stderr };
        ring.push(&Chunk { channel, ..chunk(&[u8::try_from(i % 251).unwrap()]) });
    }
    assert!(ring.bytes.capacity() <= 2 * KEPT && ring.runs.len() <= KEPT / 500 + 2);
    let chunks = ring.chunks();
    let mut expected = KEPT..2 * KEPT;
    for chunk in &chunks {
        for byte in &chunk.bytes {
            let i = expected.next().unwrap();
            assert_eq!(usize::from(*byte), i % 251);
            assert_eq!(chunk.channel == Channel::Stdout, i % 1000 < 500);
        }
    }
    assert!(expected.is_empty());
}

#[tokio::test]
async fn output_without_a_subscriber_is_not_replayed_in_the_same_life() {
    let (output, child) = (Output::default(), Child::for_test(None));
    drop(output.attach(Origin::Session(1)).unwrap());
    output.publish(chunk(b"missed"), &child).await;
    let mut late = output.attach(Origin::Session(1)).unwrap();
    assert!(late.backlog.is_empty());
    output.publish(chunk(b"seen"), &child).await;
    assert_eq!(late.live.recv().await, Some(chunk(b"seen")));
}

#[tokio::test]
async fn the_first_subscriber_of_a_later_life_gets_what_was_kept() {
    let (output, child) = (Output::default(), Child::for_test(None));
    let _first = output.attach(Origin::Session(1)).unwrap();
    output.publish(chunk(b"lost on the way"), &child).await;
    output.forget_before(2);
    output.publish(chunk(b", nobody there"), &child).await;
    assert!(output.attach(Origin::Local).unwrap().backlog.is_empty());
    let again = output.attach(Origin::Session(2)).unwrap();
    assert_eq!(text(&again.backlog), b"lost on the way, nobody there");
    assert!(output.attach(Origin::Session(2)).unwrap().backlog.is_empty());
    output.finish(end(2));
    assert_eq!(text(&output.attach(Origin::Session(3)).unwrap().backlog), b"lost on the way, nobody there");
}

#[tokio::test]
async fn a_subscriber_that_does_not_read_holds_the_writer_up_until_it_leaves() {
    let (output, child) = (Output::default(), Child::for_test(None));
    let slow = output.attach(Origin::Local).unwrap();
    for _ in 0..QUEUE {
        output.publish(chunk(b"x"), &child).await;
    }
    let mut blocked = Box::pin(output.publish(chunk(b"y"), &child));
    assert!(futures_util::poll!(&mut blocked).is_pending());
    drop(slow);
    blocked.await;
}

#[tokio::test(start_paused = true)]
async fn a_dead_process_is_not_held_up_for_ever() {
    let (output, child) = (Output::default(), Child::for_test(Some(Status::Signaled(9))));
    let mut slow = output.attach(Origin::Local).unwrap();
    let start = Instant::now();
    for _ in 0..=QUEUE {
        output.publish(chunk(b"x"), &child).await;
    }
    assert_eq!(start.elapsed(), LAST_WORDS);
    output.finish(end(0));
    for _ in 0..QUEUE {
        assert_eq!(slow.live.recv().await, Some(chunk(b"x")));
    }
    assert_eq!(slow.live.recv().await, None);
}

#[test]
fn subscribers_are_bounded() {
    let output = Output::default();
    let all: Vec<_> = (0..MAX_SUBSCRIBERS).map(|_| output.attach(Origin::Local).unwrap()).collect();
    assert!(output.attach(Origin::Local).is_none());
    drop(all);
    assert!(output.attach(Origin::Local).is_some());
}
