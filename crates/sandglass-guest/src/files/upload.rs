//! Receives files without holding them in memory.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use async_compression::tokio::bufread::GzipDecoder;
use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequest as _, Multipart, Request};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use http::{StatusCode, header};
use rustix::fs::{FileType as Kind, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use serde::Serialize;
use tokio::task::JoinHandle;
use tokio_util::io::{ReaderStream, StreamReader};

use super::paced::paced;
use super::{Access, CHUNK, Refusal};
use crate::path::{Purpose, Walk, borrow, file_type, resolve};

/// Bytes that are decompressed at once.
const UNZIPPED: usize = 64 * 1024;

/// Files in one request.
const MAX_FILES: usize = 1000;

/// A file that was written, as E2B's clients read it.
#[derive(Debug, Serialize)]
struct Written {
    path: String,
    name: String,
    r#type: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

fn bad(message: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, message)
}

/// Opens or makes the file at a clean path, empties it, and gives it to the user.
pub(super) fn create(access: &Access, path: &str) -> Result<OwnedFd, Refusal> {
    let root = access.root()?;
    let user = &access.user.identity;
    let walk = Walk { follow_last: true, purpose: Purpose::MakeParents(user) };
    let place = resolve(borrow(&root), path, walk)?;
    let check = |stat: &rustix::fs::Stat| match file_type(stat) {
        Kind::RegularFile => Ok(()),
        Kind::Directory => Err(bad(format!("path is a directory: {path}"))),
        _ => Err(bad(format!("path is not a regular file: {path}"))),
    };
    if let Some(stat) = &place.stat {
        check(stat)?;
    }
    let refused = |errno| Refusal::io(&format!("opening '{path}' failed"), errno);
    // With the agent's rights that would be more than any user of the sandbox may do.
    if place.is_kernel_interface().map_err(refused)? {
        return Err(Refusal::new(StatusCode::FORBIDDEN, format!("'{path}' is no place for files")));
    }
    // Behind a link of a user's, whether it exists decides whose permission counts, so that must stay as it was.
    let missing = place.stat.is_none();
    let make = match (place.led, missing) {
        (false, _) => OFlags::CREATE,
        (true, true) => OFlags::CREATE | OFlags::EXCL,
        (true, false) => OFlags::empty(),
    };
    if missing {
        place.check_entry(user)?;
    }
    let file = place.open(OFlags::WRONLY | make, Mode::from_raw_mode(0o644)).map_err(refused)?;
    // What was opened may not be what was there before; only now it is safe to change it.
    let stat = rustix::fs::fstat(&file).map_err(refused)?;
    check(&stat)?;
    if !missing {
        place.check_file(&stat, user)?;
    }
    // A new one is empty, and who watches it would be told of a change that is none.
    if stat.st_size != 0 {
        rustix::fs::ftruncate(&file, 0).map_err(refused)?;
    }
    // A file that a user may write to is not thereby the user's.
    if missing || !place.led {
        rustix::fs::fchown(&file, Some(Uid::from_raw(user.uid)), Some(Gid::from_raw(user.gid)))
            .map_err(refused)?;
    }
    // Before the contents: who finds some of them finds all of this.
    access.agent.labels.replace(&file, &access.metadata).map_err(|errno| match errno {
        Errno::NOSPC | Errno::DQUOT => {
            Refusal::new(StatusCode::INSUFFICIENT_STORAGE, "there is no room for more metadata")
        }
        errno => Refusal::io(&format!("attaching metadata to '{path}' failed"), errno),
    })?;
    Ok(file)
}

fn write_all(file: &OwnedFd, mut bytes: &[u8]) -> Result<(), Refusal> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Refusal::io("writing failed", errno)),
        }
    }
    Ok(())
}

/// Waits for a piece that is being written, and returns its buffer, empty.
async fn written(writing: Option<JoinHandle<Result<Vec<u8>, Refusal>>>) -> Result<Vec<u8>, Refusal> {
    match writing {
        Some(writing) => writing.await.unwrap_or_else(|_| Err(bad("the agent is ending"))),
        None => Ok(Vec::new()),
    }
}

/// Writes a stream to a file, a large piece at a time.
async fn store<E: std::fmt::Display>(
    access: &Arc<Access>,
    path: String,
    contents: impl Stream<Item = Result<Bytes, E>>,
) -> Result<Written, Refusal> {
    let blocking = &access.agent.blocking;
    let opener = Arc::clone(access);
    let target = path.clone();
    let file = Arc::new(blocking.run(move || create(&opener, &target)).await?);
    let mut contents = std::pin::pin!(contents);
    // One piece is written while the next one arrives, each in a buffer that is used again and again.
    let mut buffer = Vec::new();
    let mut writing = None;
    loop {
        let piece = contents.next().await;
        let ended = piece.is_none();
        if let Some(piece) = piece {
            buffer.extend_from_slice(
                &piece.map_err(|error| bad(format!("reading the request failed: {error}")))?,
            );
        }
        if buffer.len() >= CHUNK || (ended && !buffer.is_empty()) {
            let spare = written(writing.take()).await?;
            let mut piece = std::mem::replace(&mut buffer, spare);
            let (blocking, file) = (blocking.clone(), Arc::clone(&file));
            let write = move || {
                write_all(&file, &piece)?;
                piece.clear();
                Ok(piece)
            };
            writing = Some(access.agent.tasks.spawn(async move { blocking.run(write).await }));
        }
        if ended {
            break;
        }
    }
    written(writing).await?;
    // On some file systems only closing tells that the disk is full.
    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
    Ok(Written { path, name, r#type: "file", metadata: access.metadata.clone().into_map() })
}

fn header_text(request: &Request<Body>, name: header::HeaderName) -> &str {
    request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("")
}

/// The body as it was before it was compressed. A small piece at a time, whatever size it claims to unfold to: what
/// bounds it is the disk, as for every file.
fn unzip(body: Body) -> Body {
    let zipped = StreamReader::new(body.into_data_stream().map_err(io::Error::other));
    Body::from_stream(ReaderStream::with_capacity(GzipDecoder::new(zipped), UNZIPPED))
}

/// Answers `POST`. `seen` collects the destinations of this request.
pub(super) async fn receive(
    access: Access,
    path: Option<String>,
    request: Request<Body>,
    seen: &mut HashSet<String>,
) -> Result<Response, Refusal> {
    let request = match header_text(&request, header::CONTENT_ENCODING) {
        "" | "identity" => request,
        "gzip" => request.map(unzip),
        other => return Err(bad(format!("unsupported content encoding: {other}"))),
    };
    let kind = header_text(&request, header::CONTENT_TYPE).split(';').next().unwrap_or("");
    let kind = kind.trim().to_ascii_lowercase();
    let access = Arc::new(access);
    let written = match kind.as_str() {
        "application/octet-stream" => {
            let path = path
                .filter(|path| !path.is_empty())
                .ok_or_else(|| bad("path is required for octet-stream uploads"))?;
            let path = access.clean(&path)?;
            vec![store(&access, path, request.into_body().into_data_stream()).await?]
        }
        "multipart/form-data" => receive_form(&access, path, request, seen).await?,
        other => return Err(bad(format!("unsupported content type: {other:?}"))),
    };
    Ok(Json(written).into_response())
}

async fn receive_form(
    access: &Arc<Access>,
    path: Option<String>,
    request: Request<Body>,
    seen: &mut HashSet<String>,
) -> Result<Vec<Written>, Refusal> {
    let unreadable = |error: &dyn std::fmt::Display| bad(format!("error parsing multipart form: {error}"));
    let (request, unparsed) = paced(request);
    let mut form = Multipart::from_request(request, &()).await.map_err(|error| unreadable(&error))?;
    let mut written = Vec::new();
    while let Some(mut field) = form.next_field().await.map_err(|error| unreadable(&error))? {
        unparsed.clear();
        if field.name() != Some("file") {
            while field.chunk().await.map_err(|error| unreadable(&error))?.is_some() {
                unparsed.clear();
            }
            continue;
        }
        let destination = match &path {
            Some(path) if !written.is_empty() => {
                return Err(bad(format!("more than one file for the path '{path}'")));
            }
            Some(path) => path.clone(),
            // The client puts the whole path here, so it must not be cut to its last part.
            None => field
                .file_name()
                .filter(|name| !name.is_empty())
                .ok_or_else(|| bad("a file has no name"))?
                .into(),
        };
        let destination = access.clean(&destination)?;
        if !seen.insert(destination.clone()) {
            return Err(bad(format!("you cannot upload multiple files to the same path '{destination}'")));
        }
        if seen.len() > MAX_FILES {
            return Err(bad("too many files in one request"));
        }
        written.push(store(access, destination, field.inspect(|_| unparsed.clear())).await?);
    }
    Ok(written)
}
