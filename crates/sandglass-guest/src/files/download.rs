//! Sends a file without holding it in memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, StreamExt as _};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::buffer::spare_capacity;
use rustix::fs::{FileType as Kind, Mode, OFlags, Stat};

use super::range::{self, Wanted};
use super::{Access, CHUNK, Refusal};
use crate::agent::Agent;
use crate::http::date::{http_date, parse_http_date};
use crate::path::{Walk, borrow, file_type, resolve};

/// What RFC 8187 leaves as it is in a file name.
const EXTENDED: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'.').remove(b'-').remove(b'_').remove(b'~').remove(b'!').remove(b'+');

/// How some kinds of files begin, as the WHATWG's standard on sniffing has it.
const MAGIC: [(&[u8], &str); 7] = [
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"PK\x03\x04", "application/zip"),
    (b"\x1f\x8b\x08", "application/x-gzip"),
];

/// Pieces of a file that are read at one time: while one is sent, the next is fetched.
const READ_AHEAD: usize = 2;

/// A file that is about to be sent.
pub(super) struct Open {
    pub(super) file: OwnedFd,
    stat: Stat,
    name: String,
    head: Bytes,
}

/// Opens the file at a path.
pub(super) fn open(access: &Access, path: &str) -> Result<Open, Refusal> {
    let path = access.clean(path)?;
    let root = access.root()?;
    let place = resolve(borrow(&root), &path, Walk::FOLLOW)?;
    check(place.existing()?, &path)?;
    let refused = |errno| Refusal::io(&format!("opening '{path}' failed"), errno);
    let file = place.open(OFlags::RDONLY, Mode::empty()).map_err(refused)?;
    // Again: something else may have taken its place.
    let stat = rustix::fs::fstat(&file).map_err(refused)?;
    check(&stat, &path)?;
    let mut head = vec![0; 512];
    let filled = rustix::io::pread(&file, &mut head, 0).map_err(refused)?;
    head.truncate(filled);
    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
    Ok(Open { file, stat, name, head: head.into() })
}

fn check(stat: &Stat, path: &str) -> Result<(), Refusal> {
    match file_type(stat) {
        Kind::RegularFile => Ok(()),
        Kind::Directory => {
            Err(Refusal::new(StatusCode::BAD_REQUEST, format!("path '{path}' is a directory")))
        }
        _ => Err(Refusal::new(StatusCode::BAD_REQUEST, format!("path '{path}' is not a regular file"))),
    }
}

/// A media type from the name, or else from the first bytes.
fn media_type(name: &str, head: &[u8]) -> &'static str {
    let extension = name.rsplit_once('.').map(|(_, extension)| extension.to_ascii_lowercase());
    match extension.as_deref() {
        Some("html" | "htm") => return "text/html; charset=utf-8",
        Some("css") => return "text/css; charset=utf-8",
        Some("js" | "mjs") => return "text/javascript; charset=utf-8",
        Some("json") => return "application/json",
        Some("txt" | "log" | "md" | "csv" | "py" | "sh" | "rs" | "toml" | "yaml" | "yml") => {
            return "text/plain; charset=utf-8";
        }
        Some("xml") => return "text/xml; charset=utf-8",
        Some("svg") => return "image/svg+xml",
        Some("png") => return "image/png",
        Some("jpg" | "jpeg") => return "image/jpeg",
        Some("gif") => return "image/gif",
        Some("webp") => return "image/webp",
        Some("pdf") => return "application/pdf",
        Some("wasm") => return "application/wasm",
        _ => {}
    }
    if let Some((_, kind)) = MAGIC.iter().find(|(magic, _)| head.starts_with(magic)) {
        return kind;
    }
    if head.starts_with(b"RIFF") && head.get(8..12) == Some(b"WEBP") {
        return "image/webp";
    }
    let first = head.trim_ascii_start();
    if [&b"<!DOCTYPE HTML"[..], b"<HTML"].iter().any(|tag| {
        first.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag))
            && first.get(tag.len()).is_some_and(|end| matches!(end, b' ' | b'>'))
    }) {
        return "text/html; charset=utf-8";
    }
    let control = |byte: &u8| matches!(byte, 0..=8 | 11 | 14..=26 | 28..=31);
    let text = match std::str::from_utf8(head) {
        Ok(_) => true,
        // The last character may be cut.
        Err(error) => error.error_len().is_none(),
    };
    if text && !head.iter().any(control) { "text/plain; charset=utf-8" } else { "application/octet-stream" }
}

fn disposition(name: &str) -> HeaderValue {
    let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\');
    let text = if plain {
        format!("inline; filename=\"{name}\"")
    } else {
        format!("inline; filename*=utf-8''{}", utf8_percent_encode(name, EXTENDED))
    };
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("inline"))
}

/// Whether an `Accept-Encoding` lets a file be sent as it is (RFC 9110, 12.5.3): unless it gives `identity` the weight 0, or
/// `*` and does not speak of `identity`. What can't be understood forbids nothing.
fn takes_plain(accepted: &str) -> bool {
    let weighed = |name: &str| {
        accepted.split(',').find_map(|item| {
            let mut parts = item.split(';').map(str::trim);
            let is_it = parts.next().is_some_and(|coding| coding.eq_ignore_ascii_case(name));
            let weight = parts.find_map(|part| {
                let (key, weight) = part.split_once('=')?;
                if key.trim().eq_ignore_ascii_case("q") { weight.trim().parse::<f32>().ok() } else { None }
            });
            is_it.then(|| weight.unwrap_or(1.0))
        })
    };
    weighed("identity").or_else(|| weighed("*")).is_none_or(|weight| weight > 0.0 || weight.is_nan())
}

/// Answers `GET` and `HEAD`.
pub(super) async fn serve(
    access: Access,
    path: String,
    method: Method,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let agent = Arc::clone(&access.agent);
    let Open { file, stat, name, head } = agent.blocking.run(move || open(&access, &path)).await?;
    let refuses = |value: &HeaderValue| value.to_str().is_ok_and(|accepted| !takes_plain(accepted));
    if headers.get_all(header::ACCEPT_ENCODING).iter().any(refuses) {
        return Err(Refusal::new(
            StatusCode::NOT_ACCEPTABLE,
            "files are sent as they are: accept 'identity'",
        ));
    }
    let len = u64::try_from(stat.st_size).unwrap_or(0);
    let modified = http_date(stat.st_mtime);
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());

    let mut response = Response::new(Body::empty());
    let out = response.headers_mut();
    out.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type(&name, &head)));
    out.insert(header::CONTENT_DISPOSITION, disposition(&name));
    out.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Ok(value) = HeaderValue::from_str(&modified) {
        out.insert(header::LAST_MODIFIED, value);
    }
    // What is no date does not count (RFC 9110, 13.1.3 and 13.1.4).
    let date = |name| text(name).and_then(parse_http_date);
    if date(header::IF_UNMODIFIED_SINCE).is_some_and(|date| stat.st_mtime > date) {
        return Err(Refusal::new(
            StatusCode::PRECONDITION_FAILED,
            format!("the file was modified on {modified}"),
        ));
    }
    if date(header::IF_MODIFIED_SINCE).is_some_and(|date| stat.st_mtime <= date) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        return Ok(response);
    }
    let range_holds = text(header::IF_RANGE).is_none_or(|date| date == modified);
    let wanted = range::parse(text(header::RANGE).filter(|_| range_holds), len);
    let (start, count) = match wanted {
        Wanted::Unsatisfiable => {
            return Err(Refusal::new(StatusCode::RANGE_NOT_SATISFIABLE, format!("the file has {len} bytes")));
        }
        Wanted::Part(range) => {
            let value = format!("bytes {}-{}/{len}", range.start(), range.end());
            if let Ok(value) = HeaderValue::from_str(&value) {
                out.insert(header::CONTENT_RANGE, value);
            }
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            (*range.start(), range.end() - range.start() + 1)
        }
        // Files of /proc say that they are empty and are not: those are read to their end.
        Wanted::All if len == 0 && !head.is_empty() => (0, u64::MAX),
        Wanted::All => (0, len),
    };
    if count != u64::MAX {
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(count));
    }
    if method != Method::HEAD && count > 0 {
        *response.body_mut() = Body::from_stream(contents(agent, file, start, count));
    }
    Ok(response)
}

/// Bytes of a file from `offset`: so many, or up to its end if that is not known.
fn contents(
    agent: Arc<Agent>,
    file: OwnedFd,
    offset: u64,
    count: u64,
) -> BoxStream<'static, std::io::Result<Bytes>> {
    let file = Arc::new(file);
    if count == u64::MAX {
        return stream::try_unfold(offset, move |offset| {
            let piece = read(agent.clone(), Arc::clone(&file), offset, CHUNK);
            async move {
                let piece = piece.await?;
                let next = offset + u64::try_from(piece.len()).unwrap_or(0);
                Ok((!piece.is_empty()).then_some((piece, next)))
            }
        })
        .boxed();
    }
    let end = offset.saturating_add(count);
    stream::iter((offset..end).step_by(CHUNK))
        .map(move |offset| {
            let wanted = usize::try_from(end - offset).unwrap_or(CHUNK).min(CHUNK);
            let piece = read(agent.clone(), Arc::clone(&file), offset, wanted);
            async move {
                let piece = piece.await?;
                // Shorter than announced: the connection must break, or the client would believe it is whole.
                if piece.len() == wanted { Ok(piece) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
            }
        })
        .buffered(READ_AHEAD)
        .boxed()
}

/// `wanted` bytes from `offset`; fewer at the end of the file.
async fn read(agent: Arc<Agent>, file: Arc<OwnedFd>, offset: u64, wanted: usize) -> std::io::Result<Bytes> {
    let work = move || {
        let mut buffer = Vec::with_capacity(wanted);
        while buffer.len() < wanted {
            let at = offset + u64::try_from(buffer.len()).map_err(std::io::Error::other)?;
            match rustix::io::pread(&*file, spare_capacity(&mut buffer), at) {
                Ok(0) => break,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        buffer.truncate(wanted);
        Ok(Bytes::from(buffer))
    };
    agent.blocking.run(work).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_sent_as_it_is_unless_that_is_ruled_out() {
        for takes in [
            "",
            "gzip",
            "gzip, deflate",
            "identity",
            "gzip;q=0",
            "identity;q=0.001",
            "*;q=0, identity",
            "br, *;q=0.1",
            "x;q",
        ] {
            assert!(takes_plain(takes), "{takes}");
        }
        for not in
            ["identity;q=0", "gzip, Identity ; Q = 0.000", "*;q=0", "gzip;q=1, *;q=0", "identity;q=0, *"]
        {
            assert!(!takes_plain(not), "{not}");
        }
    }

    #[test]
    fn media_types_come_from_names_then_from_bytes() {
        assert_eq!(media_type("a.JSON", b""), "application/json");
        assert_eq!(media_type("a", b"hello\n"), "text/plain; charset=utf-8");
        assert_eq!(
            media_type("a", "h\u{e4}".as_bytes().split_last().unwrap().1),
            "text/plain; charset=utf-8"
        );
        assert_eq!(media_type("a", b"\x7fELF\x02\x01\x01\0"), "application/octet-stream");
        assert_eq!(media_type("a", b"\xff\xfe"), "application/octet-stream");
        assert_eq!(media_type("a", b"\x89PNG\r\n\x1a\nrest"), "image/png");
        assert_eq!(media_type("a", b"RIFF\0\0\0\0WEBPVP8 "), "image/webp");
        assert_eq!(media_type("a", b"\n <!doctype html><p>"), "text/html; charset=utf-8");
        assert_eq!(media_type("a", b"<html"), "text/plain; charset=utf-8");
    }

    #[test]
    fn names_can_t_break_out_of_their_header() {
        assert_eq!(disposition("a.txt"), "inline; filename=\"a.txt\"");
        assert_eq!(disposition("a\"b"), "inline; filename*=utf-8''a%22b");
        assert_eq!(disposition("a\r\nb"), "inline; filename*=utf-8''a%0D%0Ab");
        assert_eq!(disposition("\u{e4}"), "inline; filename*=utf-8''%C3%A4");
    }
}
