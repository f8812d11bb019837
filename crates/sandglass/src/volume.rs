//! `sandglass volume-content`: works on the content of one volume, for one question, and ends.
//!
//! What is on a volume is a guest's: links, pipes, names of any bytes, and all of it changes at any moment. So this is a
//! process of its own, in which the volume is the whole file system, and which keeps of root's rights those over files
//! alone. It follows no link, and waits for nothing but the one who asked.

mod listing;
mod paths;
mod remove;
mod work;

use std::io::{BufWriter, Read as _, Write};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

use anyhow::{Context as _, ensure};
use sandglass_engine::volume::{Ask, MAX_ASK, MAX_PIECE, MAX_SAID, Said, Why};
use sandglass_linux::privilege::enter_files;
use serde::Serialize;

use crate::cli;
use paths::Refusal;

/// Answers what is asked on standard input, which is a socket.
pub(crate) fn run(args: &cli::Worker) -> anyhow::Result<()> {
    let mut line = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    enter_files(&args.root).context("the process can't be confined")?;
    // Who asked may be gone, and then there is nobody to tell.
    let answered = answer(&mut line);
    answered.context("the question was not answered")
}

fn answer(line: &mut UnixStream) -> anyhow::Result<()> {
    let ask: Ask = serde_json::from_slice(&receive(line, MAX_ASK)?)?;
    let top = paths::Top::open()?;
    let said = match ask {
        Ask::Stat { path } => work::stat(&top, &path).map(Said::Entry),
        Ask::List { path, depth } => listing::list(&top, &path, depth).map(Said::Entries),
        Ask::MakeDir { path, access, force } => work::make_dir(&top, &path, access, force).map(Said::Entry),
        Ask::Change { path, access } => work::change(&top, &path, access).map(Said::Entry),
        Ask::Remove { path } => remove::remove(&top, &path, line).map(|()| Said::Removed),
        Ask::Marks { paths } => work::marks(&top, &paths).map(Said::Marks),
        Ask::Read { path } => match work::open(&top, &path) {
            Ok((file, size)) => {
                tell(line, &Said::File { size })?;
                std::io::copy(&mut file.take(size), line)?;
                return Ok(());
            }
            Err(refusal) => Err(refusal),
        },
        Ask::Write { path, access, force } => match work::begin(&top, &path, access, force) {
            Ok(upload) => {
                tell(line, &Said::GoOn)?;
                write(line, upload)?
            }
            Err(refusal) => Err(refusal),
        },
    };
    tell(line, &said.unwrap_or_else(|Refusal { why, message }| Said::Refused { why, message }))
}

/// Takes the pieces of a file. What is not whole is not kept.
fn write(line: &mut UnixStream, mut upload: work::Upload<'_>) -> anyhow::Result<Result<Said, Refusal>> {
    loop {
        let piece = receive(line, MAX_PIECE)?;
        if piece.is_empty() {
            return Ok(upload.finish().map(Said::Entry));
        }
        if let Err(error) = upload.file.write_all(&piece) {
            return Ok(Err(error.into()));
        }
    }
}

fn receive(line: &mut UnixStream, max: u32) -> anyhow::Result<Vec<u8>> {
    let mut len = [0; 4];
    line.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len);
    ensure!(len <= max, "a message of {len} bytes");
    let mut message = vec![0; usize::try_from(len)?];
    line.read_exact(&mut message)?;
    Ok(message)
}

fn tell(line: &mut UnixStream, said: &Said) -> anyhow::Result<()> {
    let len = json_len(said)?;
    if len > MAX_SAID {
        let message = "there is too much to tell: ask for less at one time".into();
        return tell(line, &Said::Refused { why: Why::Invalid, message });
    }
    line.write_all(&len.to_le_bytes())?;
    // Not made as a whole first, because it may be long.
    let mut line = BufWriter::new(line);
    serde_json::to_writer(&mut line, said)?;
    Ok(line.flush()?)
}

/// How long something is as JSON, in bytes. What is longer than can be counted is an error.
fn json_len(value: &impl Serialize) -> std::io::Result<u32> {
    struct Count(usize);
    impl Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.saturating_add(bytes.len());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    serde_json::to_writer(&mut count, value)?;
    u32::try_from(count.0).map_err(std::io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_as_long_as_it_says_and_not_too_long() {
        let told = |said: &Said| {
            let (mut ours, mut theirs) = UnixStream::pair().unwrap();
            tell(&mut ours, said).unwrap();
            drop(ours);
            let text = receive(&mut theirs, MAX_SAID).unwrap();
            assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "nothing follows");
            serde_json::from_slice::<Said>(&text).unwrap()
        };
        let refused = |message: String| Said::Refused { why: Why::Failed, message };
        let said = refused("\u{1}\"\\\u{fffd}ä\u{7f}".repeat(100));
        assert_eq!(told(&said), said);
        let long = usize::try_from(MAX_SAID).unwrap() / 6 + 1;
        assert!(matches!(told(&refused("\u{1}".repeat(long))), Said::Refused { why: Why::Invalid, .. }));
    }
}
