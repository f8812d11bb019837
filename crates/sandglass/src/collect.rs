//! `sandglass collect-files`: tells the files of one sandbox, for one question, and ends.
//!
//! They are a guest's, which may be changing them at this moment. So this is a process of its own, in which they are the whole
//! file system, which can't be written, and which keeps of root's rights the one to read files of others.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::Context as _;
use rustix::fs::{Mode, OFlags};
use sandglass_engine::collect::answer;
use sandglass_linux::privilege::enter_reading;

use crate::cli;

/// Answers what is asked on standard input, which is a socket.
pub(crate) fn run(args: &cli::Worker) -> anyhow::Result<()> {
    let mut line = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    enter_reading(&args.root).context("the process can't be confined")?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top: OwnedFd = rustix::fs::open("/", flags, Mode::empty())?;
    // Who asked may be gone, and then there is nobody to tell.
    answer(&mut line, &top).context("the question was not answered")
}
