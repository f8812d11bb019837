//! What the guest is told on port 80 instead of an answer from the server that it asked.

use std::time::Duration;

use serde::Serialize;
use tokio::io::AsyncWriteExt as _;

use super::socket::Socket;
use super::splice::drain;

/// How long the rest of a request is read that nobody wants: closing a connection on which a client still sends resets
/// it, and the client loses the answer (RFC 9112, 9.6).
pub(super) const LINGER: Duration = Duration::from_secs(2);

/// The body of an answer. All of them have these fields, as those of a [`crate::policy::Denial`] do.
#[derive(Debug, Serialize)]
pub(super) struct Explained<'a> {
    pub(super) error: &'static str,
    pub(super) rule: &'a str,
    pub(super) reason: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(super) remedy: &'a str,
}

/// Answers with 403, and why: a [`crate::policy::Denial`], or an [`Explained`].
pub(super) async fn forbid(guest: Socket, why: &impl Serialize) {
    send(guest, "403 Forbidden", why).await;
}

/// Answers with 502.
pub(super) async fn no_server(guest: Socket, why: &Explained<'_>) {
    send(guest, "502 Bad Gateway", why).await;
}

async fn send(mut guest: Socket, status: &str, body: &impl Serialize) {
    let Ok(body) = serde_json::to_string(body) else { return };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    let (from, mut to) = guest.split();
    let whole = async {
        to.write_all(answer.as_bytes()).await?;
        to.shutdown().await?;
        drain(&from).await
    };
    // A guest that is gone, or does not read, gets no answer.
    let _told = tokio::time::timeout(LINGER, whole).await;
    guest.close();
}
