use std::io::Write as _;
use std::os::unix::net::{UnixListener, UnixStream};

use super::*;

/// Long enough for a thread to answer on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Calls a sandbox that does as `answer` says with the connection.
fn called(
    timeout: Duration,
    files: &[BorrowedFd<'_>],
    answer: impl FnOnce(UnixStream) + Send,
) -> Result<Value, CallError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || answer(listener.accept().unwrap().0));
        call(&path, "a.B", &json!("x"), files, timeout)
    })
}

/// Reads a request of [`called`].
fn request(stream: &UnixStream) -> Value {
    Value::deserialize(&mut serde_json::Deserializer::from_reader(stream)).unwrap()
}

fn answered(text: &[u8]) -> Result<Value, CallError> {
    called(PATIENCE, &[], |mut stream| {
        request(&stream);
        stream.write_all(text).unwrap();
        // Open until the caller closes: the end of an answer is not the end of the stream.
        let _ = stream.read(&mut [0]);
    })
}

#[test]
fn the_call_and_its_result_arrive() {
    let result = called(PATIENCE, &[], |mut stream| {
        assert_eq!(request(&stream), json!({"method": "a.B", "arg": "x"}));
        stream.write_all(b"{\"success\":true,\"err\":\"\",\"result\":").unwrap();
        stream.write_all(b"[1]}\n").unwrap();
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the connection is closed");
    });
    assert_eq!(result.unwrap(), json!([1]));
}

#[test]
fn files_go_with_the_first_byte() {
    let dir = tempfile::tempfile().unwrap();
    let result = called(PATIENCE, &[dir.as_fd(), dir.as_fd()], |mut stream| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let mut first = [0];
        let into = &mut [io::IoSliceMut::new(&mut first)];
        rustix::net::recvmsg(&stream, into, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        let count: usize = control
            .drain()
            .map(|message| match message {
                rustix::net::RecvAncillaryMessage::ScmRights(files) => files.count(),
                _ => 0,
            })
            .sum();
        assert_eq!((first[0], count), (b'{', 2));
        stream.write_all(b"{\"success\":true}").unwrap();
    });
    assert_eq!(result.unwrap(), Value::Null);
    let too_many = vec![dir.as_fd(); MAX_FILES + 2];
    assert!(matches!(called(PATIENCE, &too_many, drop), Err(CallError::Io(_))));
}

#[test]
fn a_refusal_is_bounded_and_printable() {
    let long = format!("{{\"success\":false,\"err\":\"no\\u001b[31m{}\"}}", "x".repeat(10_000));
    let Err(CallError::Refused(reason)) = answered(long.as_bytes()) else { panic!() };
    assert_eq!(reason.chars().count(), MAX_REASON);
    assert!(reason.starts_with("no[31mx"));
}

#[test]
fn what_is_no_answer_is_an_error() {
    for text in [&b"{}"[..], b"[]", b"\xff", b"{\"success\":1}", b"\"success\""] {
        assert!(matches!(answered(text), Err(CallError::Form(_))), "{text:?}");
    }
    let nested = "[".repeat(100_000);
    let deep = format!("{{\"success\":true,\"result\":{nested}");
    assert!(matches!(answered(deep.as_bytes()), Err(CallError::Form(_))));
    assert!(called(PATIENCE, &[], drop).is_err());
    let absent = call(Path::new("/nowhere/socket"), "a.B", &Value::Null, &[], PATIENCE);
    assert!(matches!(absent, Err(CallError::Io(_))));
}

#[test]
fn an_answer_without_end_is_cut_off() {
    let result = called(PATIENCE, &[], |mut stream| {
        request(&stream);
        let _ = stream.write_all(b"{\"success\":true,\"err\":\"");
        while stream.write_all(&[b'x'; 4096]).is_ok() {}
    });
    assert!(matches!(result, Err(CallError::Form(_))), "{result:?}");
}

#[test]
fn silence_and_dripping_end_at_the_deadline() {
    let limit = Duration::from_millis(200);
    let timed_out = |result: Result<Value, CallError>| {
        let Err(CallError::Io(error)) = result else { panic!("{result:?}") };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    };
    timed_out(called(limit, &[], |mut stream| {
        request(&stream);
        let _ = stream.read(&mut [0]);
    }));
    timed_out(called(limit, &[], |mut stream| {
        request(&stream);
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        while stream.write_all(b" ").is_ok() {
            let _ = stream.read(&mut [0]);
        }
    }));
}
