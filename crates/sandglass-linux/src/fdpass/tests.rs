use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};

use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::SendFlags;

use super::*;

fn violation(error: &io::Error) -> Violation {
    *error.get_ref().unwrap().downcast_ref::<Violation>().unwrap()
}

fn memfd(text: &str) -> OwnedFd {
    let fd = rustix::fs::memfd_create("fdpass-test", rustix::fs::MemfdFlags::empty()).unwrap();
    File::from(fd.try_clone().unwrap()).write_all(text.as_bytes()).unwrap();
    fd
}

/// Sends without any of the checks of [`send`], as a hostile peer would.
fn send_raw(socket: &OwnedFd, message: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = vec![MaybeUninit::uninit(); 4096];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// A pipe whose read end says when the last copy of its write end is closed.
fn canary() -> (File, OwnedFd) {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    (File::from(read), write)
}

#[test]
fn descriptors_arrive_in_order_and_close_on_exec() {
    let (a, b) = pair().unwrap();
    let (first, second) = (memfd("first"), memfd("second"));
    send(&a, b"two", &[first.as_fd(), second.as_fd()]).unwrap();
    send(&a, b"none", &[]).unwrap();

    let received = recv(&b).unwrap().unwrap();
    assert_eq!(received.message, b"two");
    let texts: Vec<String> = received
        .fds
        .into_iter()
        .map(|fd| {
            assert!(fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
            let mut file = File::from(fd);
            file.rewind().unwrap();
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            text
        })
        .collect();
    assert_eq!(texts, ["first", "second"]);

    let received = recv(&b).unwrap().unwrap();
    assert_eq!((received.message.as_slice(), received.fds.len()), (b"none".as_slice(), 0));
}

#[test]
fn the_largest_message_with_the_most_descriptors_passes() {
    let (a, b) = pair().unwrap();
    let file = memfd("x");
    let message: Vec<u8> = (0..MAX_MESSAGE_LEN).map(|n| u8::try_from(n % 251).unwrap()).collect();
    send(&a, &message, &[file.as_fd(); MAX_FDS]).unwrap();
    let received = recv(&b).unwrap().unwrap();
    assert!(received.message == message);
    assert_eq!(received.fds.len(), MAX_FDS);
}

#[test]
fn nothing_out_of_bounds_is_sent() {
    let (a, b) = pair().unwrap();
    let file = memfd("x");
    let fds = vec![file.as_fd(); MAX_FDS + 1];
    assert_eq!(violation(&send(&a, b"", &[]).unwrap_err()), Violation::Empty);
    assert_eq!(violation(&send(&a, &vec![0; MAX_MESSAGE_LEN + 1], &[]).unwrap_err()), Violation::TooLong);
    assert_eq!(violation(&send(&a, b"x", &fds).unwrap_err()), Violation::TooManyFds);
    assert_eq!(try_recv(&b).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_hostile_peer_is_refused_and_leaks_no_descriptor() {
    let cases = [
        (vec![0; MAX_MESSAGE_LEN + 1], 1, Violation::TooLong),
        (vec![0; 1], MAX_FDS + 1, Violation::TooManyFds),
        (vec![0; 1], 253, Violation::TooManyFds),
        (vec![], 1, Violation::Empty),
    ];
    for (message, count, expected) in cases {
        let (a, b) = pair().unwrap();
        let (mut watch, held) = canary();
        send_raw(&a, &message, &vec![held.as_fd(); count]);
        drop(held);
        let error = recv(&b).unwrap_err();
        assert_eq!((error.kind(), violation(&error)), (io::ErrorKind::InvalidData, expected));
        // End of file, and not a hang: no copy is left in this process or in the socket.
        assert_eq!(watch.read(&mut [0]).unwrap(), 0, "{expected:?}");
    }
}

#[test]
fn credentials_beside_the_bytes_are_refused() {
    let (a, b) = pair().unwrap();
    rustix::net::sockopt::set_socket_passcred(&b, true).unwrap();
    send(&a, b"x", &[]).unwrap();
    let refused = violation(&recv(&b).unwrap_err());
    // Rights and credentials together may not fit the buffer: either way it is refused.
    assert!(matches!(refused, Violation::UnexpectedControl | Violation::TooManyFds), "{refused:?}");
}

#[test]
fn the_end_of_the_stream_is_seen_on_both_sides() {
    let (a, b) = pair().unwrap();
    send(&a, b"last", &[]).unwrap();
    drop(a);
    assert_eq!(recv(&b).unwrap().unwrap().message, b"last");
    assert!(recv(&b).unwrap().is_none());
    assert_eq!(send(&b, b"x", &[]).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn the_forms_that_do_not_wait_say_so() {
    let (a, b) = pair().unwrap();
    let mut sent = 0;
    let full = loop {
        match try_send(&a, &[7; 32 * 1024], &[]) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 10_000, "the socket never fills");
    };
    assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
    for _ in 0..sent {
        assert_eq!(try_recv(&b).unwrap().unwrap().message.len(), 32 * 1024);
    }
    assert_eq!(try_recv(&b).unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn nothing_is_left_of_an_unread_message() {
    let (a, b) = pair().unwrap();
    let (mut watch, held) = canary();
    send(&a, b"x", &[held.as_fd()]).unwrap();
    drop((held, a, b));
    assert_eq!(watch.read(&mut [0]).unwrap(), 0);
    // Guards the guard: with a copy alive the read would have found nothing to end on.
    let (watch, held) = canary();
    rustix::io::ioctl_fionbio(&watch, true).unwrap();
    assert_eq!((&watch).read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    drop(held);
}
