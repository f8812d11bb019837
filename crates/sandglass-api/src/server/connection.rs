//! One client's connection, from its first byte to its end.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio_util::task::TaskTracker;

use super::linger::Lingering;
use super::watch::{Answering, Socket, Verdict, Watch};
use super::{Peer, Shared, Slot};

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

/// Reads until it is clear whether the client speaks HTTP/2. Returns what was read.
async fn sniff(stream: &mut TcpStream) -> io::Result<(bool, Bytes)> {
    let mut first = [0_u8; PREFACE.len()];
    let mut len = 0;
    while len < first.len() && first[..len] == PREFACE[..len] {
        match stream.read(&mut first[len..]).await? {
            0 => break,
            read => len += read,
        }
    }
    Ok((first == *PREFACE, Bytes::copy_from_slice(&first[..len])))
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
pub(super) async fn serve(shared: Arc<Shared>, mut stream: TcpStream, peer: Peer, slot: Slot) {
    let sniffed = tokio::select! {
        () = shared.shutdown.cancelled() => return,
        sniffed = tokio::time::timeout(shared.settings.head_timeout, sniff(&mut stream)) => sniffed,
    };
    let Ok(Ok((is_http2, first))) = sniffed else { return };
    if first.is_empty() {
        return;
    }
    let watch = Arc::new(Watch::new(is_http2));
    let io = TokioIo::new(Socket::new(stream, first, watch.clone(), slot));
    let service = {
        let (shared, watch) = (shared.clone(), watch.clone());
        service_fn(move |request: Request<Incoming>| {
            let (shared, peer, open) = (shared.clone(), peer.clone(), Arc::new(watch.begin()));
            let request = request.map(|body| Lingering::new(body, open.clone(), shared.tasks.clone()));
            async move {
                let answer = shared.dispatch(request, peer).await;
                answer.map(|answer| answer.map(|body| Answering::new(body, open)))
            }
        })
    };
    if is_http2 {
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
