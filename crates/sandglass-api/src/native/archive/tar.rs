//! The interchange format of `pax(1)` in POSIX.1-2017: blocks of 512 bytes, headers of fixed fields, and extended headers for
//! what does not fit into those.

use sandglass_control::FoundFile;

const BLOCK: usize = 512;

/// Longest name in a header, in bytes.
const MAX_NAME: usize = 100;

/// Largest size in a header: 11 octal digits.
const MAX_NUMBER: u64 = 0o777_7777_7777;

/// Header, and before it an extended one for a path that does not fit into it.
pub(super) fn header(file: &FoundFile) -> Vec<u8> {
    let fits = file.path.is_ascii() && file.path.len() <= MAX_NAME;
    let mut out = if fits { Vec::new() } else { extended("path", &file.path) };
    // Who can't read the extended header has at least some name.
    let name: String = file.path.chars().map(|c| if c.is_ascii() { c } else { '_' }).take(MAX_NAME).collect();
    out.extend(block(&name, file.mode, file.size, file.mtime, b'0'));
    out
}

/// Zeros that come after a file of this size.
pub(super) fn padding(size: u64) -> u64 {
    size.next_multiple_of(BLOCK as u64) - size
}

/// One more file, and the end of an archive.
pub(super) fn end(name: &str, content: &str, mtime: u64) -> Vec<u8> {
    let mut out = with_content(block(name, 0o644, content.len() as u64, mtime, b'0'), content);
    out.resize(out.len() + 2 * BLOCK, 0);
    out
}

/// An extended header of one record, for the file after it.
fn extended(keyword: &str, value: &str) -> Vec<u8> {
    let record = record(keyword, value);
    with_content(block("pax_header", 0o644, record.len() as u64, 0, b'x'), &record)
}

fn with_content(header: [u8; BLOCK], content: &str) -> Vec<u8> {
    let mut out = header.to_vec();
    out.extend(content.as_bytes());
    out.resize(out.len().next_multiple_of(BLOCK), 0);
    out
}

/// `LENGTH KEYWORD=VALUE\n`, where the length counts its own digits.
fn record(keyword: &str, value: &str) -> String {
    let rest = format!(" {keyword}={value}\n");
    let mut len = rest.len();
    loop {
        let whole = len.to_string().len() + rest.len();
        if whole == len {
            return format!("{len}{rest}");
        }
        len = whole;
    }
}

fn block(name: &str, mode: u32, size: u64, mtime: u64, kind: u8) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(field) = block.get_mut(at..at + bytes.len()) {
            field.copy_from_slice(bytes);
        }
    };
    let octal = |number: u64, digits: usize| format!("{number:0digits$o}");
    put(0, name.as_bytes());
    put(100, octal(mode.into(), 7).as_bytes());
    // Whose it is inside means nothing outside.
    put(108, octal(0, 7).as_bytes());
    put(116, octal(0, 7).as_bytes());
    put(124, octal(size.min(MAX_NUMBER), 11).as_bytes());
    put(136, octal(mtime.min(MAX_NUMBER), 11).as_bytes());
    // The sum is taken with spaces in its place.
    put(148, b"        ");
    put(156, &[kind]);
    put(257, b"ustar\x0000");
    let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
    let sum = format!("{}\0 ", octal(sum, 6));
    if let Some(field) = block.get_mut(148..148 + sum.len()) {
        field.copy_from_slice(sum.as_bytes());
    }
    block
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_record_counts_itself() {
        for len in 0..300 {
            let record = record("path", &"x".repeat(len));
            let (count, _) = record.split_once(' ').unwrap();
            assert_eq!(count.parse::<usize>().unwrap(), record.len());
        }
    }

    #[test]
    fn an_archive_is_read_by_others() {
        let file =
            |path: &str, size| FoundFile { path: path.into(), mode: 0o640, size, mtime: 1_000_000_000 };
        let long = format!("{}/ü\n", "d/".repeat(100));
        let mut archive = header(&file("plain", 600));
        archive.extend([b'a'; 600]);
        archive.resize(archive.len() + usize::try_from(padding(600)).unwrap(), 0);
        archive.extend(header(&file(&long, 0)));
        archive.extend(end(".last", "text", 1_000_000_000));
        assert_eq!(archive.len() % BLOCK, 0);
        let mut list = Command::new("tar");
        list.args(["-tvf", "-"]).env("LC_ALL", "C.UTF-8").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut list = list.stderr(Stdio::piped()).spawn().unwrap();
        std::io::Write::write_all(&mut list.stdin.take().unwrap(), &archive).unwrap();
        let list = list.wait_with_output().unwrap();
        assert!(list.status.success(), "{}", String::from_utf8_lossy(&list.stderr));
        let text = String::from_utf8(list.stdout).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("-rw-r----- 0/0") && lines[0].ends_with(" plain"), "{text}");
        assert!(lines[0].contains(" 600 2001-09-09"), "{text}");
        assert!(lines[1].ends_with("/ü\\n") && lines.len() == 3, "{text}");
        assert!(lines[2].contains(" 4 2001-09-09") && lines[2].ends_with(" .last"), "{text}");
    }
}
