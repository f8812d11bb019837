//! One client's connection, from its first byte to its end.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse as _;
use bytes::Bytes;
use http::{Method, Request, Response};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::AsyncReadExt as _;
use tokio_util::task::TaskTracker;

use super::linger::Lingering;
use super::rewound::Rewound;
use super::tls::Tls;
use super::watch::{Answering, Socket, Verdict, Watch};
use super::{Line, Peer, Shared, Slot};
use crate::backend::Stream;

/// What every HTTP/2 client sends first (RFC 9113, 3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Largest head of a request, in bytes.
const MAX_HEAD_LEN: usize = 64 * 1024;

/// What of a body is read at one time, and may wait to be written, in bytes.
const MAX_BUF: usize = 256 * 1024;

/// Most headers of a request.
const MAX_HEADERS: usize = 128;

/// Requests at one time on one HTTP/2 connection. Clients want at least 100.
const MAX_STREAMS: u32 = 256;

/// How often a silent HTTP/2 client is asked whether it is still there, and how long it may take to answer.
const PING: Duration = Duration::from_secs(30);

/// What a client's first bytes say that it speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opening {
    /// A handshake of TLS (RFC 8446, 5.1); no method of HTTP begins so.
    Tls,
    Http1,
    Http2,
}

/// The first byte of a handshake.
const HANDSHAKE: u8 = 22;

/// Reads until it is clear what the client speaks. Returns what was read.
async fn sniff(stream: &mut (impl Stream + ?Sized)) -> io::Result<(Opening, Bytes)> {
    let mut first = [0_u8; PREFACE.len()];
    let mut len = 0;
    while len < first.len() && first[..len] == PREFACE[..len] {
        match stream.read(&mut first[len..]).await? {
            0 => break,
            read => len += read,
        }
    }
    let opening = if first == *PREFACE {
        Opening::Http2
    } else if first[..len].first() == Some(&HANDSHAKE) {
        Opening::Tls
    } else {
        Opening::Http1
    };
    Ok((opening, Bytes::copy_from_slice(&first[..len])))
}

/// A connection on which requests come.
struct Opened {
    stream: Box<dyn Stream>,
    http2: bool,
    secure: bool,
}

/// Finds out what a client speaks, and shakes hands with it if that is TLS. `None` if it said nothing.
async fn open(mut stream: Box<dyn Stream>, tls: Option<&Tls>) -> io::Result<Option<Opened>> {
    let (opening, first) = sniff(&mut stream).await?;
    if first.is_empty() {
        return Ok(None);
    }
    let stream = Rewound::new(first, stream);
    let Some(tls) = tls.filter(|_| opening == Opening::Tls) else {
        let http2 = opening == Opening::Http2;
        return Ok(Some(Opened { stream: Box::new(stream), http2, secure: false }));
    };
    let certificate = tls.certificate.borrow().clone();
    let mut stream = certificate.accept(stream).await?;
    let (opening, first) = sniff(&mut stream).await?;
    if first.is_empty() {
        return Ok(None);
    }
    // TLS within TLS is nobody's; the parser of HTTP refuses it.
    let http2 = opening == Opening::Http2;
    Ok(Some(Opened { stream: Box::new(Rewound::new(first, stream)), http2, secure: true }))
}

/// Runs what a connection spawns as tasks of the server.
#[derive(Clone)]
struct Tasks(TaskTracker);

impl<F> Executor<F> for Tasks
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn(task);
    }
}

/// Serves one connection until it ends.
pub(super) async fn serve(shared: Arc<Shared>, stream: Box<dyn Stream>, line: Line, slot: Slot) {
    // A sandbox is on this machine, and has no reason to trust the certificate.
    let tls = shared.tls.as_ref().filter(|_| matches!(line.peer, Peer::Client(_)));
    let opened = tokio::select! {
        () = shared.shutdown.cancelled() => return,
        opened = tokio::time::timeout(shared.settings.head_timeout, open(stream, tls)) => opened,
    };
    let Opened { stream, http2, secure } = match opened {
        Ok(Ok(Some(opened))) => opened,
        Ok(Ok(None)) | Err(_) => return,
        Ok(Err(error)) => {
            tracing::debug!(%error, "a client could not be understood");
            return;
        }
    };
    let line = Line { secure, ..line };
    let watch = Arc::new(Watch::new(http2));
    let io = TokioIo::new(Socket::new(stream, watch.clone(), slot));
    let service = {
        let (shared, watch) = (shared.clone(), watch.clone());
        service_fn(move |mut request: Request<Incoming>| {
            let (shared, line, open) = (shared.clone(), line.clone(), Arc::new(watch.begin()));
            let tunnel = (!http2 && request.method() == Method::CONNECT)
                .then(|| shared.tunnel(request.uri(), &line).map(|()| hyper::upgrade::on(&mut request)));
            let request = request.map(|body| Lingering::new(body, open.clone(), shared.tasks.clone()));
            async move {
                let answer = match tunnel {
                    None => shared.dispatch(request, &line).await,
                    Some(Err(refused)) => Ok(shared.signed(refused.into_response())),
                    Some(Ok(upgraded)) => {
                        shared.tasks.spawn(carry(shared.clone(), upgraded, line));
                        Ok(shared.signed(Response::new(Body::empty())))
                    }
                };
                answer.map(|answer| answer.map(|body| Answering::new(body, open)))
            }
        })
    };
    if http2 {
        let connection = http2::Builder::new(Tasks(shared.tasks.clone()))
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(u32::try_from(MAX_HEAD_LEN).unwrap_or(u32::MAX))
            .keep_alive_interval(PING)
            .keep_alive_timeout(PING)
            .serve_connection(io, service);
        drive(connection, http2::Connection::graceful_shutdown, &shared, &watch).await;
    } else {
        let connection = http1::Builder::new()
            // The watch does it better.
            .header_read_timeout(None)
            .max_buf_size(MAX_BUF)
            .max_header_size(MAX_HEAD_LEN)
            .max_headers(MAX_HEADERS)
            .serve_connection(io, service)
            .with_upgrades();
        drive(connection, http1::UpgradeableConnection::graceful_shutdown, &shared, &watch).await;
    }
}

/// Serves what comes through a connection that a client asked for with CONNECT, as if it had come by itself. It has the
/// place of the one that it came through.
fn carry(shared: Arc<Shared>, upgraded: OnUpgrade, line: Line) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        match tokio::time::timeout(shared.settings.head_timeout, upgraded).await {
            Ok(Ok(stream)) => {
                let line = Line { inner: true, ..line };
                serve(shared, Box::new(TokioIo::new(stream)), line, Box::new(())).await;
            }
            Ok(Err(error)) => tracing::debug!(%error, "a client's tunnel did not come about"),
            Err(_) => {}
        }
    })
}

/// Lets a connection go on until it ends, the server does, or the client takes too long. `stop` asks the connection
/// to finish what is open and take nothing more.
async fn drive<C>(connection: C, stop: impl Fn(Pin<&mut C>), shared: &Shared, watch: &Watch)
where
    C: Future<Output = Result<(), hyper::Error>>,
{
    let mut connection = pin!(connection);
    let mut closing = false;
    let mut verdict = pin!(watch.verdict(&shared.settings));
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a connection failed");
                }
                return;
            }
            () = shared.force.cancelled() => return,
            () = shared.shutdown.cancelled(), if !closing => {
                closing = true;
                stop(connection.as_mut());
            }
            judged = verdict.as_mut() => {
                if judged == Verdict::Slow || closing {
                    tracing::debug!("a client took too long");
                    return;
                }
                closing = true;
                stop(connection.as_mut());
                verdict.set(watch.verdict(&shared.settings));
            }
        }
    }
}
