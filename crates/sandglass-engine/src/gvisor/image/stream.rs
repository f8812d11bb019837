//! A sparse file as one compressed stream, and back.
//!
//! Inside of one zstd frame (RFC 8878) that has a checksum: for each run of data its offset and its length, eight bytes each,
//! least significant first, and then the data; at the end the length of the file, and zero. Holes are not in it, so a disk
//! of many gigabytes with little in it stays one.
//!
//! The data are a guest's, and files rot. So of a stream it is known before what must come out of it, to the byte, and it is
//! read with bounded memory.

use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt as _;

use sandglass_types::Digest;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::super::disk;

/// zstd's own default. Of snapshots of the templates `python-data` and `node` it leaves 31 and 27 %; level 1 leaves a tenth more,
/// and level 9 a tenth less, which takes several times as long.
const LEVEL: i32 = 3;

/// How far back a stream refers to itself, as a power of two of bytes: 2 MiB, which is what the level has by itself. A frame
/// that says that it needs more to be read is refused.
const WINDOW_LOG: u32 = 21;

/// Bytes that are read at one time. Who wants something else done waits for so many of them at least, and they may be handled at
/// the lowest priority.
const BUFFER: usize = 64 << 10;

/// Bytes after which what was written is flushed, for the same reason: nobody can break off a flush of all of it.
const FLUSH_AFTER: u64 = 16 << 20;

/// Bytes before each run of data.
const HEADER: usize = 16;

/// What is in a stream, to the byte.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Content {
    /// How long the file is, with its holes, in bytes.
    pub(super) len: u64,
    /// How much of that is data, in bytes.
    pub(super) data: u64,
    /// Of all that is in the frame.
    digest: Digest,
    /// How long the stream is, in bytes.
    pub(super) compressed: u64,
}

/// Why a stream was not written or read to its end.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The system's error.
    Io(io::Error),
    /// It is not what was written once.
    Damaged(&'static str),
    /// It would be larger than it may be.
    TooLarge,
    /// Somebody wants something else done.
    Stopped,
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Whether to go on: asked often, and before much is done.
pub(super) type GoOn<'a> = &'a (dyn Fn() -> bool + Sync);

/// Takes what is written until that is more than it may be, and flushes it little by little.
struct Bounded {
    file: fs_err::File,
    written: u64,
    flushed: u64,
    most: u64,
}

/// That it is, as the system says it of a file that no file system could hold.
const TOO_LARGE: io::ErrorKind = io::ErrorKind::FileTooLarge;

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.written += bytes.len() as u64;
        if self.written > self.most {
            return Err(TOO_LARGE.into());
        }
        self.file.write_all(bytes)?;
        if self.written - self.flushed >= FLUSH_AFTER {
            self.file.sync_data()?;
            self.flushed = self.written;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Compresses `from` into `to`, as long as that is at most `most` bytes.
pub(super) fn write(
    from: &fs_err::File,
    to: fs_err::File,
    most: u64,
    go_on: GoOn<'_>,
) -> Result<Content, Trouble> {
    let len = from.metadata()?.len();
    let mut encoder = zstd::Encoder::new(Bounded { file: to, written: 0, flushed: 0, most }, LEVEL)?;
    encoder.include_checksum(true)?;
    encoder.window_log(WINDOW_LOG)?;
    let (mut data, mut digest, mut buffer) = (0, Sha256::new(), vec![0; BUFFER]);
    let too_large = |error: io::Error| match error.kind() {
        TOO_LARGE => Trouble::TooLarge,
        _ => Trouble::Io(error),
    };
    let mut put = |bytes: &[u8]| {
        digest.update(bytes);
        encoder.write_all(bytes).map_err(too_large)
    };
    disk::each_run(from, len, |start, end| {
        put(&header(start, end - start))?;
        data += end - start;
        let mut at = start;
        while at < end {
            if !go_on() {
                return Err(Trouble::Stopped);
            }
            let room = usize::try_from(end - at).unwrap_or(BUFFER).min(BUFFER);
            from.file().read_exact_at(&mut buffer[..room], at)?;
            put(&buffer[..room])?;
            at += room as u64;
        }
        Ok(())
    })?;
    put(&header(len, 0))?;
    let written = encoder.finish().map_err(too_large)?;
    Ok(Content {
        len,
        data,
        digest: Digest::from_bytes(digest.finalize().into()),
        compressed: written.written,
    })
}

fn header(offset: u64, len: u64) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(&offset.to_le_bytes());
    bytes[8..].copy_from_slice(&len.to_le_bytes());
    bytes
}

fn parse(bytes: [u8; HEADER]) -> (u64, u64) {
    let [offset, len] = [0, 8].map(|at| {
        let mut half = [0; 8];
        half.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(half)
    });
    (offset, len)
}

/// What comes out of a frame. The system's own failures are told from what is wrong with the frame.
struct Frame<R>(R, Sha256);

impl<R: Read> Frame<R> {
    fn take(&mut self, bytes: &mut [u8]) -> Result<(), Trouble> {
        self.0.read_exact(bytes).map_err(said)?;
        self.1.update(bytes);
        Ok(())
    }

    /// There must be nothing more, and the frame's own checksum is compared.
    fn end(mut self) -> Result<Digest, Trouble> {
        match self.0.read(&mut [0]).map_err(said)? {
            0 => Ok(Digest::from_bytes(self.1.finalize().into())),
            _ => Err(Trouble::Damaged("something is behind its end")),
        }
    }
}

fn said(error: io::Error) -> Trouble {
    if error.raw_os_error().is_some() {
        Trouble::Io(error)
    } else {
        Trouble::Damaged("it can't be decompressed")
    }
}

/// Reads a stream that must hold this, and writes the file to `to`, if that is wanted: an empty one. Nothing of that is to be
/// used unless this is `Ok`.
pub(super) fn read(
    from: fs_err::File,
    to: Option<&fs_err::File>,
    content: &Content,
    go_on: GoOn<'_>,
) -> Result<(), Trouble> {
    let differs = |what| Err(Trouble::Damaged(what));
    if from.metadata()?.len() != content.compressed {
        return differs("it has another length");
    }
    // The crate that adds paths to errors hides their numbers.
    let (from, _) = from.into_parts();
    let mut decoder = zstd::Decoder::new(from)?.single_frame();
    decoder.window_log_max(WINDOW_LOG)?;
    let mut frame = Frame(decoder, Sha256::new());
    if let Some(to) = to {
        to.set_len(content.len)?;
    }
    let (mut end, mut left, mut buffer) = (0, content.data, vec![0; BUFFER]);
    loop {
        let mut bytes = [0; HEADER];
        frame.take(&mut bytes)?;
        let (mut at, mut len) = parse(bytes);
        if len == 0 {
            if at != content.len || left != 0 {
                return differs("it ends elsewhere");
            }
            break;
        }
        if at < end || len > left || at.checked_add(len).is_none_or(|end| end > content.len) {
            return differs("its data are elsewhere");
        }
        (end, left) = (at + len, left - len);
        while len > 0 {
            if !go_on() {
                return Err(Trouble::Stopped);
            }
            let room = usize::try_from(len).unwrap_or(BUFFER).min(BUFFER);
            frame.take(&mut buffer[..room])?;
            if let Some(to) = to {
                to.file().write_all_at(&buffer[..room], at)?;
            }
            (at, len) = (at + room as u64, len - room as u64);
        }
    }
    if frame.end()? == content.digest { Ok(()) } else { differs("it holds something else") }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;
    use std::path::Path;

    use super::*;

    const EVER: GoOn<'static> = &|| true;

    fn file(path: &Path) -> fs_err::File {
        fs_err::OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap()
    }

    /// A file of a gigabyte with some data here and there, and its stream.
    fn written(dir: &Path) -> Content {
        let from = file(&dir.join("from"));
        from.file().set_len(1 << 30).unwrap();
        // Longer than the buffer, and with an end inside of it.
        let text: Vec<u8> = (0..BUFFER + 5000).map(|n| n.to_le_bytes()[1]).collect();
        for at in [0, 300 << 20, (1 << 30) - 5000 - BUFFER as u64] {
            from.file().write_all_at(&text, at).unwrap();
        }
        write(&from, file(&dir.join("stream")), 1 << 20, EVER).unwrap()
    }

    fn read_back(dir: &Path, content: &Content) -> Result<(), Trouble> {
        read(fs_err::File::open(dir.join("stream")).unwrap(), Some(&file(&dir.join("back"))), content, EVER)
    }

    #[test]
    fn what_comes_out_is_what_went_in_with_its_holes() {
        let dir = tempfile::tempdir().unwrap();
        let content = written(dir.path());
        assert!(content.len == 1 << 30 && content.data < 2 << 20, "{content:?}");
        assert!(content.compressed < 100_000, "{content:?}");
        read_back(dir.path(), &content).unwrap();
        let [from, back] = ["from", "back"].map(|name| std::fs::File::open(dir.path().join(name)).unwrap());
        let meta = back.metadata().unwrap();
        assert!(meta.len() == 1 << 30 && meta.blocks() * 512 <= content.data + (64 << 10), "{meta:?}");
        for at in [0, 200 << 20, 300 << 20, (1 << 30) - (1 << 20)] {
            let [one, other] = [&from, &back].map(|file| {
                let mut bytes = vec![0; 1 << 20];
                file.read_exact_at(&mut bytes, at).unwrap();
                bytes
            });
            assert!(one == other, "at {at}");
        }
        // Without a file to write to it is only looked at.
        read(fs_err::File::open(dir.path().join("stream")).unwrap(), None, &content, EVER).unwrap();
    }

    #[test]
    fn files_without_data_and_without_anything() {
        let dir = tempfile::tempdir().unwrap();
        for len in [0, 1 << 30] {
            let from = file(&dir.path().join("from"));
            from.file().set_len(len).unwrap();
            let content = write(&from, file(&dir.path().join("stream")), 1 << 10, EVER).unwrap();
            assert_eq!((content.len, content.data), (len, 0));
            read_back(dir.path(), &content).unwrap();
            let back = std::fs::metadata(dir.path().join("back")).unwrap();
            assert_eq!((back.len(), back.blocks()), (len, 0));
        }
    }

    #[test]
    fn every_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let content = written(dir.path());
        let stream = dir.path().join("stream");
        let sound = std::fs::read(&stream).unwrap();
        let damaged = |bytes: &[u8], content: &Content| {
            std::fs::write(&stream, bytes).unwrap();
            matches!(read_back(dir.path(), content), Err(Trouble::Damaged(_)))
        };
        for at in (0..sound.len()).step_by(sound.len() / 97) {
            let mut bytes = sound.clone();
            bytes[at] ^= 0x10;
            assert!(damaged(&bytes, &content), "at {at} of {}", sound.len());
        }
        let shorter = |len: usize| Content { compressed: len as u64, ..content.clone() };
        for len in [0, 1, sound.len() / 2, sound.len() - 4, sound.len() - 1] {
            assert!(damaged(&sound[..len], &content), "cut at {len}");
            assert!(damaged(&sound[..len], &shorter(len)), "cut at {len}, and said so");
        }
        for wrong in [
            Content { len: content.len + 1, ..content.clone() },
            Content { data: content.data - 1, ..content.clone() },
            Content { data: content.data + 1, ..content.clone() },
            Content { digest: Digest::from_bytes([1; 32]), ..content.clone() },
        ] {
            assert!(damaged(&sound, &wrong), "{wrong:?}");
        }
        assert!(!damaged(&sound, &content), "the positive control");
    }

    #[test]
    fn what_a_stream_says_is_bounded_by_what_is_known_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let stream = dir.path().join("stream");
        // Well-formed frames that want more than there was.
        let said = |runs: &[(u64, u64)], window: u32| {
            let mut plain = Vec::new();
            for (offset, len) in runs {
                plain.extend(header(*offset, *len));
                plain.extend(std::iter::repeat_n(7, usize::try_from((*len).min(8 << 20)).unwrap()));
            }
            let mut encoder = zstd::Encoder::new(file(&stream), 1).unwrap();
            encoder.window_log(window).unwrap();
            encoder.write_all(&plain).unwrap();
            drop(encoder.finish().unwrap());
            let content = Content {
                len: 8 << 20,
                data: 8 << 20,
                digest: Digest::from_bytes(Sha256::digest(&plain).into()),
                compressed: std::fs::metadata(&stream).unwrap().len(),
            };
            read_back(dir.path(), &content)
        };
        let end = (8 << 20, 0);
        said(&[(0, 8 << 20), end], WINDOW_LOG).unwrap();
        said(&[(0, 4 << 20), (4 << 20, 4 << 20), end], WINDOW_LOG).unwrap();
        for runs in [
            &[(0, 1 << 40)][..],
            &[(u64::MAX, 8)],
            &[(8 << 20, 1), end],
            &[(4 << 20, 4 << 20), (0, 4 << 20), end],
            &[(0, 4 << 20), end],
            &[(0, 8 << 20), (9 << 20, 0)],
            &[(0, 8 << 20), end, end],
            &[(0, 8 << 20)],
        ] {
            assert!(matches!(said(runs, WINDOW_LOG), Err(Trouble::Damaged(_))), "{runs:?}");
        }
        let greedy = said(&[(0, 8 << 20), end], 27);
        assert!(matches!(greedy, Err(Trouble::Damaged(_))), "{greedy:?}");
        assert!(std::fs::metadata(dir.path().join("back")).unwrap().len() <= 8 << 20);
    }

    #[test]
    fn it_stops_when_it_is_told_to_and_before_it_is_too_large() {
        let dir = tempfile::tempdir().unwrap();
        let content = written(dir.path());
        let from = fs_err::File::open(dir.path().join("from")).unwrap();
        let again = |most, go_on: GoOn<'_>| write(&from, file(&dir.path().join("again")), most, go_on);
        assert_eq!(again(content.compressed, EVER).unwrap(), content);
        assert!(matches!(again(content.compressed - 1, EVER), Err(Trouble::TooLarge)));
        assert!(matches!(again(1 << 20, &|| false), Err(Trouble::Stopped)));
        let stream = fs_err::File::open(dir.path().join("stream")).unwrap();
        assert!(matches!(read(stream, None, &content, &|| false), Err(Trouble::Stopped)));
    }
}
