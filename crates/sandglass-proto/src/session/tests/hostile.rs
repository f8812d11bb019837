//! A twin of the agent that has turned hostile: it knows the epoch and says what it likes.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use proptest::collection::vec;
use proptest::prelude::*;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::*;
use crate::session::frame::{FLAG_MORE, Frame, HEADER_LEN, Kind, MAX_PAYLOAD};
use crate::session::state::{Shared, State};

const EPOCH: u64 = 0xE90C;
/// Flows that the server opens, and so the ids that exist: 1 to this.
const FLOWS: u32 = 4;

/// One move of the twin, or of those who use the server's flows.
#[derive(Debug, Clone)]
enum Move {
    /// A whole frame of the right epoch.
    Frame {
        kind: u8,
        flags: u8,
        flow: u32,
        payload: Vec<u8>,
    },
    /// A frame with one bit turned over.
    Damaged {
        kind: u8,
        flow: u32,
        at: usize,
        bit: u8,
    },
    Bytes(Vec<u8>),
    Read(usize),
    Write(usize, usize),
    Shutdown(usize),
    Replace(usize),
    TakeControl,
    Ping,
    Hold(bool),
    /// The driver writes a batch.
    Send,
}

fn payload() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => vec(any::<u8>(), 0..12),
        1 => Just(vec![]),
        1 => Just(vec![0xFF; 8]),
        1 => Just(br#"{"type":"frozen"}"#.to_vec()),
        1 => (0..=MAX_PAYLOAD).prop_map(|length| vec![b'x'; length]),
        2 => Just(vec![0; MAX_PAYLOAD]),
    ]
}

fn any_move() -> impl Strategy<Value = Move> {
    let kind = prop_oneof![9 => 0..12u8, 4 => Just(Kind::Data as u8), 1 => any::<u8>()];
    let flow = prop_oneof![9 => 0..FLOWS + 2, 1 => any::<u32>()];
    let flags = prop_oneof![3 => Just(0), 1 => Just(FLAG_MORE), 1 => any::<u8>()];
    let index = 0..FLOWS as usize - 1;
    prop_oneof![
        20 => (kind.clone(), flags, flow.clone(), payload())
            .prop_map(|(kind, flags, flow, payload)| Move::Frame { kind, flags, flow, payload }),
        2 => (kind, flow, 0..HEADER_LEN + 4, 0..8u8)
            .prop_map(|(kind, flow, at, bit)| Move::Damaged { kind, flow, at, bit }),
        1 => vec(any::<u8>(), 0..200).prop_map(Move::Bytes),
        3 => index.clone().prop_map(Move::Read),
        3 => (index.clone(), 1..200_000usize).prop_map(|(flow, length)| Move::Write(flow, length)),
        1 => index.clone().prop_map(Move::Shutdown),
        1 => index.prop_map(Move::Replace),
        1 => Just(Move::TakeControl),
        1 => Just(Move::Ping),
        1 => any::<bool>().prop_map(Move::Hold),
        3 => Just(Move::Send),
    ]
}

/// A server without a driver.
struct Server {
    shared: Arc<Shared>,
    link: Link,
    flows: Vec<Flow>,
}

impl Server {
    fn new() -> Self {
        let shared = Arc::new(Shared::new(State::server(Epoch::from_random(EPOCH))));
        let link = Link::new(&shared, Some(Epoch::from_random(EPOCH)));
        let flows = (0..FLOWS).map(|_| open_flow(&shared)).collect();
        let mut server = Self { shared, link, flows };
        while server.link.outbound.try_next().is_some() {}
        server
    }

    fn frame(&mut self, kind: u8, flags: u8, flow: u32, payload: &[u8]) {
        let mut bytes = Vec::new();
        Frame { epoch: Epoch::from_random(EPOCH), kind, flags, flow, payload }.encode(&mut bytes);
        self.link.inbound.on_bytes(&bytes);
    }

    fn data(&mut self, flow: u32, payload: &[u8]) {
        self.frame(Kind::Data as u8, 0, flow, payload);
    }

    fn footprint(&self) -> usize {
        self.shared.with(|state| state.footprint())
    }

    fn stats(&self) -> Stats {
        self.shared.with(|state| state.stats())
    }

    fn play(&mut self, step: Move) {
        let mut cx = Context::from_waker(Waker::noop());
        match step {
            Move::Frame { kind, flags, flow, payload } => self.frame(kind, flags, flow, &payload),
            Move::Damaged { kind, flow, at, bit } => {
                let mut bytes = Vec::new();
                Frame { epoch: Epoch::from_random(EPOCH), kind, flags: 0, flow, payload: b"1234" }
                    .encode(&mut bytes);
                bytes[at] ^= 1 << bit;
                self.link.inbound.on_bytes(&bytes);
            }
            Move::Bytes(bytes) => self.link.inbound.on_bytes(&bytes),
            Move::Read(flow) => drop(read_now(&mut self.flows[flow])),
            Move::Write(flow, length) => {
                let bytes = vec![0; length];
                drop(Pin::new(&mut self.flows[flow]).poll_write(&mut cx, &bytes));
            }
            Move::Shutdown(flow) => {
                drop(Pin::new(&mut self.flows[flow]).poll_shutdown(&mut cx));
            }
            Move::Replace(flow) => {
                if self.stats().flows < 100 {
                    self.flows[flow] = open_flow(&self.shared);
                }
            }
            Move::TakeControl => drop(self.shared.with(State::take_event)),
            Move::Ping => drop(self.shared.with(State::send_ping)),
            Move::Hold(held) => self.shared.with(|state| state.set_held(held)),
            Move::Send => drop(self.link.outbound.try_next().map(Batch::to_vec)),
        }
    }
}

fn open_flow(shared: &Arc<Shared>) -> Flow {
    Flow::new(Arc::clone(shared), shared.with(|state| state.open(Target::GuestApi)).unwrap())
}

fn read_now(flow: &mut Flow) -> Poll<io::Result<Vec<u8>>> {
    let mut bytes = vec![0; 100_000];
    let mut buf = ReadBuf::new(&mut bytes);
    Pin::new(flow)
        .poll_read(&mut Context::from_waker(Waker::noop()), &mut buf)
        .map_ok(|()| buf.filled().to_vec())
}

/// What the flows of these tests may hold, the queues of control messages, and some room for the rest.
const BOUND: usize = 100 * (WINDOW as usize + MAX_PAYLOAD) + 5 * MAX_CONTROL_LEN + 256 * 1024;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn the_server_survives_any_play(moves in vec(any_move(), 0..200)) {
        let mut server = Server::new();
        for step in moves {
            server.play(step);
            prop_assert!(server.footprint() <= BOUND);
            for flow in &mut server.flows {
                let unread = server.shared.with(|state| state.unread(flow.key()));
                prop_assert!(unread <= WINDOW as usize);
            }
        }
        // It still works: the last flow is read and written unless the twin itself ended it.
        server.shared.with(|state| state.set_held(false));
        while server.link.outbound.try_next().is_some() {}
        server.flows.clear();
        while server.link.outbound.try_next().is_some() {}
        prop_assert_eq!(server.stats().flows, 0);
        let mut flow = open_flow(&server.shared);
        let id = flow.key().id();
        while server.link.outbound.try_next().is_some() {}
        server.frame(0, 0, 0, &[]);
        server.data(id, b"still here");
        let Poll::Ready(Ok(bytes)) = read_now(&mut flow) else { panic!("no data") };
        prop_assert_eq!(bytes, b"still here");
    }

    #[test]
    fn whatever_happens_to_other_flows_does_not_concern_one(moves in vec(any_move(), 0..100)) {
        let mut server = Server::new();
        let mut sent = Vec::new();
        let mut received = Vec::new();
        for (byte, step) in (0..=u8::MAX).cycle().zip(moves) {
            // The twin is honest about the last flow, which is also out of reach of the other moves.
            match step {
                Move::Frame { flow: FLOWS, .. } | Move::Damaged { .. } | Move::Bytes(_) => continue,
                step => server.play(step),
            }
            // All of them fit into the first window.
            let chunk = [byte; 500];
            sent.extend_from_slice(&chunk);
            server.data(FLOWS, &chunk);
            while let Poll::Ready(result) = read_now(&mut server.flows[FLOWS as usize - 1]) {
                received.extend(result.unwrap());
            }
        }
        prop_assert!(received == sent);
    }
}

#[test]
fn more_than_the_window_costs_the_flow_and_only_it() {
    let mut server = Server::new();
    server.data(1, &[0; INITIAL_WINDOW as usize]);
    assert_eq!(server.stats().violations, 0);
    server.data(1, b"x");
    assert_eq!(server.stats().violations, 1);
    server.data(1, b"ignored");
    assert_eq!(server.stats().ignored_frames, 1);
    let Poll::Ready(Err(error)) = read_now(&mut server.flows[0]) else { panic!("still alive") };
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    server.data(2, b"fine");
    assert!(matches!(read_now(&mut server.flows[1]), Poll::Ready(Ok(bytes)) if bytes == b"fine"));
}

#[test]
fn few_flows_may_hold_back_more_than_a_frame() {
    let mut server = Server::new();
    let mut flows: Vec<_> = (0..100).map(|_| open_flow(&server.shared)).collect();
    while server.link.outbound.try_next().is_some() {}
    let held: Vec<usize> = flows
        .iter_mut()
        .map(|flow| {
            server.frame(Kind::Window as u8, 0, flow.key().id(), &(1_u32 << 24).to_le_bytes());
            let mut held = 0;
            while let Poll::Ready(count) =
                Pin::new(&mut *flow).poll_write(&mut Context::from_waker(Waker::noop()), &[0; 100_000])
            {
                held += count.unwrap();
            }
            held
        })
        .collect();
    assert!(held.iter().all(|held| *held > 0));
    assert_eq!(held.iter().filter(|held| **held > MAX_PAYLOAD).count(), 16);
}

#[test]
fn tiny_frames_cost_no_more_than_their_bytes() {
    let mut server = Server::new();
    let before = server.footprint();
    for _ in 0..INITIAL_WINDOW {
        server.data(1, b"x");
    }
    assert_eq!(server.stats().violations, 0);
    assert!(server.footprint() - before <= INITIAL_WINDOW as usize);
}

#[test]
fn a_flood_of_control_messages_is_dropped_and_counted() {
    let mut server = Server::new();
    for _ in 0..1000 {
        server.frame(Kind::Control as u8, 0, 0, &[b' '; MAX_PAYLOAD]);
    }
    assert!(server.stats().dropped_messages > 900);
    let flooded = server.footprint();
    for _ in 0..1000 {
        server.frame(Kind::Control as u8, FLAG_MORE, 0, &[b' '; MAX_PAYLOAD]);
    }
    server.frame(Kind::Control as u8, 0, 0, b"");
    assert!(server.footprint() <= flooded);
    assert!(flooded < 5 * MAX_CONTROL_LEN);
}

#[test]
fn pings_without_end_get_one_answer() {
    let mut server = Server::new();
    for number in 0..10_000_u64 {
        server.frame(Kind::Ping as u8, 0, 0, &number.to_le_bytes());
    }
    assert_eq!(server.link.outbound.try_next().unwrap().to_vec().len(), HEADER_LEN + 8);
}

#[test]
fn a_peer_that_reads_nothing_gets_bounded_memory() {
    let server = Server::new();
    // Nothing is ever taken by the driver, whatever the clients do.
    for _ in 0..20 * MAX_FLOWS {
        let key = server.shared.with(|state| state.open(Target::GuestApi)).unwrap();
        let mut flow = Flow::new(Arc::clone(&server.shared), key);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut flow).poll_write(&mut cx, &[0; 1000]).is_ready());
    }
    assert_eq!(server.stats().flows, FLOWS as usize);
    assert!(server.footprint() < 256 * 1024);
}

#[test]
fn an_agent_cannot_open_flows() {
    let mut server = Server::new();
    server.frame(Kind::Open as u8, 0, 999, &[1]);
    assert_eq!(server.stats().flows, FLOWS as usize);
    assert_eq!(server.stats().ignored_frames, 1);
}

#[test]
fn flows_take_turns_however_eager_one_is() {
    let mut server = Server::new();
    let mut cx = Context::from_waker(Waker::noop());
    let mut order = Vec::new();
    // Five of them are within the window.
    let chunk = [0; 13_000];
    let write = |flow: &mut Flow, cx: &mut Context<'_>| {
        assert!(matches!(Pin::new(flow).poll_write(cx, &chunk), Poll::Ready(Ok(13_000))));
    };
    for flow in &mut server.flows {
        write(flow, &mut cx);
        write(flow, &mut cx);
    }
    for _ in 0..3 {
        let batch = server.link.outbound.try_next().unwrap().to_vec();
        let mut decoder = frame::Decoder::new(None);
        let mut rest = &batch[..];
        while !rest.is_empty() {
            rest = &rest[decoder.feed(rest)..];
            while let Some(frame) = decoder.next_frame() {
                order.push(frame.flow);
            }
        }
        // The first flow always has more to say.
        write(&mut server.flows[0], &mut cx);
    }
    assert_eq!(order, [1, 2, 3, 4, 1, 1]);
}
