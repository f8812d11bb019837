//! Adopting orphans changes the whole process, so this test has one of its own.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use rustix::pipe::{PipeFlags, pipe_with};
use sandglass_linux::process::{ExitStatus, Launch, ProcessIdentity, adopt_orphans, spawn, watch};

fn sh(script: &str) -> Launch {
    Launch::new("/bin/sh").unwrap().args(["-c", script]).unwrap()
}

#[test]
fn orphans_are_adopted_and_their_status_is_kept_for_who_asked() {
    adopt_orphans().unwrap();
    // The orphan runs until its standard input ends, which this test decides.
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (out_read, out_write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let launch =
        sh("exec 3<&0; (read x <&3; exit 7) & echo $!").stdin(read).unwrap().stdout(out_write).unwrap();
    let child = spawn(&launch).unwrap();
    drop(launch);
    let status = child.wait(Some(Instant::now() + Duration::from_secs(5))).unwrap();
    assert_eq!(status, Some(ExitStatus::Exited(0)));
    let mut pid = [0; 16];
    let n = rustix::io::read(&out_read, &mut pid).unwrap();
    let pid = std::str::from_utf8(&pid[..n]).unwrap().trim().parse().unwrap();
    let identity = ProcessIdentity::of(pid).unwrap();
    let orphan = watch(identity).unwrap().expect("it runs");
    assert_eq!(orphan.status(Duration::ZERO), None);
    let fd = identity.open().unwrap().unwrap();
    drop(write);
    assert!(fd.wait_end(Some(Instant::now() + Duration::from_secs(5))).unwrap());
    assert_eq!(orphan.status(Duration::from_secs(5)), Some(ExitStatus::Exited(7)));
    // Nothing of it is left, not even a zombie.
    assert!(ProcessIdentity::of(pid).is_err());
}
