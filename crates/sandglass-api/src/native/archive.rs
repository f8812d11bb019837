//! Files of a sandbox as one archive, read from outside: its agent need not answer for it, nor its programs run.

mod tar;

use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse as _, Response};
use http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use sandglass_control::{CollectFiles, Collection, Found};
use sandglass_engine::collect::{Bounds, Globs, Place};
use sandglass_types::error::Chain;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::auth::Caller;
use crate::e2b::routes::Named;
use crate::error::{ApiError, ErrorBody};
use crate::query::Query;
use crate::router::ApiState;

pub(super) fn router() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(archive))
}

fn wanted(query: &Query) -> Result<CollectFiles, ApiError> {
    let path = query.one("path").ok_or_else(|| ApiError::invalid("path is missing"))?;
    let place: Place = path.parse().map_err(|error| ApiError::invalid(format!("path {error}")))?;
    let globs: Vec<_> = query.each("glob").map(str::to_owned).collect();
    let globs = Globs::try_from(globs).map_err(|error| ApiError::invalid(format!("glob: {error}")))?;
    Ok(CollectFiles { place, globs, bounds: Bounds::WIDEST })
}

#[utoipa::path(get, path = "/v1/sandboxes/{id}/archive", tag = "native", params(("id" = String, Path),
    ("path" = String, Query, description = "absolute path of a folder, without . and .."),
    ("glob" = Option<Vec<String>>, Query, description = "patterns from that folder on, of which a file, or a folder that it is in, \
     matches one: * and ? stand for all but /, ** for any folders. All files if there is none")), responses(
    (status = 200, description = "A tar of the regular files in the folder and below it, as they are on the sandbox's disk, whether it runs \
     or is paused, and whether its agent answers: names, permissions without set-id bits, and content. No link, pipe, socket or \
     device, and nothing of a volume or of a file system in memory. At most 100,000 files and 4 GiB. Its last \
     file is .sandglass-left-out.json, which is none of the sandbox's: an object that counts what was left out, by why. An archive \
     without it broke off", content_type = "application/x-tar"),
    (status = "4XX", description = "Refused", body = ErrorBody),
    (status = "5XX", description = "Failed", body = ErrorBody)))]
async fn archive(
    State(state): State<ApiState>,
    caller: Caller,
    Named(id): Named,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let wanted = wanted(&Query::parse(query.as_deref())?)?;
    let collection = state.backend.collect(caller.0, &id, &wanted).await?;
    let parts = futures_util::stream::try_unfold(Some(Writing::new(collection)), async |writing| {
        let Some(mut writing) = writing else { return Ok(None) };
        let part = writing.next().await?;
        Ok::<_, std::io::Error>(Some((Bytes::from(part), (!writing.over).then_some(writing))))
    });
    let headers = [
        (CONTENT_TYPE, "application/x-tar".to_owned()),
        (CONTENT_DISPOSITION, format!("attachment; filename=\"{id}.tar\"")),
    ];
    Ok((headers, Body::from_stream(parts)).into_response())
}

/// The last file of each archive.
const LEFT_OUT: &str = ".sandglass-left-out.json";

/// Most zeros that are made at one time.
const ZEROS: u64 = 64 << 10;

/// An archive that is being written.
struct Writing {
    collection: Collection,
    /// Bytes of the file that its header promised, and that were not written yet.
    owed: u64,
    /// Zeros that are to be written before anything else.
    zeros: u64,
    /// The size of the file.
    size: u64,
    /// Files that did not stay as they were.
    changed: u64,
    over: bool,
}

impl Writing {
    const fn new(collection: Collection) -> Self {
        Self { collection, owed: 0, zeros: 0, size: 0, changed: 0, over: false }
    }

    /// The next part, which is not empty.
    async fn next(&mut self) -> std::io::Result<Vec<u8>> {
        loop {
            if self.zeros > 0 {
                let now = self.zeros.min(ZEROS);
                self.zeros -= now;
                return Ok(vec![0; usize::try_from(now).map_err(std::io::Error::other)?]);
            }
            let found = self.collection.next().await.map_err(|error| {
                tracing::warn!(error = %Chain(&error), "an archive of files broke off");
                std::io::Error::other(error)
            });
            match found? {
                Found::File(file) => {
                    (self.owed, self.size) = (file.size, file.size);
                    return Ok(tar::header(&file));
                }
                Found::Piece(piece) => {
                    let written = u64::try_from(piece.len()).map_err(std::io::Error::other)?;
                    self.owed = self.owed.saturating_sub(written);
                    return Ok(piece);
                }
                Found::End { whole, .. } => {
                    self.changed += u64::from(!whole);
                    // One that got shorter is filled up, as every tar does it.
                    self.zeros = self.owed + tar::padding(self.size);
                }
                Found::Done(mut left_out) => {
                    left_out.changed = left_out.changed.saturating_add(self.changed);
                    self.over = true;
                    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
                    return Ok(tar::end(LEFT_OUT, &serde_json::to_string(&left_out)?, now));
                }
            }
        }
    }
}
