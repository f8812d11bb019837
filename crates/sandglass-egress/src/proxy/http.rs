//! One HTTP request, and the answer to it.
//!
//! Both sides are told that the connection ends with the answer, and nothing of what a guest sends behind its request
//! is carried: so each request has a connection of its own, and was decided on. The answer is carried as it comes.

use std::future::pending;
use std::io;
use std::sync::Arc;

use tokio::io::AsyncWriteExt as _;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::watch;
use tokio::time::timeout;

use super::answer::{self, Explained, LINGER};
use super::body::Rest;
use super::caps::Way;
use super::flow::{Allowed, Flow, Refused, Server, Unread};
use super::socket::Socket;
use super::splice::{Broken, Lane, drain, read};
use crate::http::{BadHead, Body, Peek, RequestHead, peek};
use crate::policy::{Denial, Effective, Verdict};

/// Headers about the connection between a client and whom it speaks to: here, there are two.
const HOP: [&[u8]; 3] = [b"connection", b"keep-alive", b"proxy-connection"];

/// How an answer begins that changes to the protocol that was asked for (RFC 9110, 15.2.2).
const SWITCHING: &[u8] = b"HTTP/1.1 101 ";

/// Reads a request, decides, and carries it or says why not.
pub(super) async fn run(
    flow: &Flow,
    policy: &mut watch::Receiver<Arc<Effective>>,
    guest: Socket,
    unseen: Denial,
) {
    let peek = |bytes: &[u8]| {
        peek(bytes).map(|peek| match peek {
            Peek::More => None,
            Peek::Head(head) => Some(head),
        })
    };
    let (bytes, head) = match flow.read_first(&guest, peek).await {
        Ok(found) => found,
        Err(Unread::TooFew | Unread::Bad(BadHead::NotHttp | BadHead::Http2)) => return flow.refuse(unseen),
        Err(Unread::Bad(bad)) => {
            let (rule, reason) = (Verdict::Deny(unseen.clone()).rule(), bad.to_string());
            let why = denied(&rule, &reason, &unseen.remedy);
            flow.refuse(unseen.clone());
            return answer::forbid(guest, &why).await;
        }
    };
    flow.show_host(&head);
    if head.method.as_str() == "CONNECT" {
        let rule = "always/connect";
        flow.refuse_by(rule);
        let reason = "inside a tunnel it could not be seen what is asked of whom";
        let remedy = "connect to the host itself, without a proxy";
        return answer::forbid(guest, &denied(rule, reason, remedy)).await;
    }
    match flow.admit(head.seen()) {
        Ok((allowed, server)) => {
            let work = carry(flow, &allowed, server, guest, bytes, &head);
            flow.while_allowed(policy, head.seen(), &allowed, work).await;
        }
        Err(Refused::Denied(denial)) => {
            flow.refuse(denial.clone());
            answer::forbid(guest, &denial).await;
        }
        Err(Refused::Limit(rule)) => flow.refuse_by(rule),
    }
}

/// As the policy's own denials are told.
const fn denied<'a>(rule: &'a str, reason: &'a str, remedy: &'a str) -> Explained<'a> {
    Explained { error: "egress_denied", rule, reason, remedy }
}

/// The two ends of a flow, each with its two directions.
struct Ends<'a> {
    from_guest: ReadHalf<'a>,
    to_guest: WriteHalf<'a>,
    from_server: ReadHalf<'a>,
    to_server: WriteHalf<'a>,
    out: Lane<'a>,
    into: Lane<'a>,
}

async fn carry(
    flow: &Flow,
    allowed: &Allowed<'_>,
    server: Server,
    mut guest: Socket,
    mut bytes: Vec<u8>,
    head: &RequestHead,
) -> Result<(), Broken> {
    let mut server = match flow.dial(server).await {
        Ok(server) => server,
        Err(error) => {
            let (rule, reason) = (allowed.rule(), format!("the server can't be reached: {error}"));
            let why = Explained { error: "egress_failed", rule: &rule, reason: &reason, remedy: "" };
            answer::no_server(guest, &why).await;
            return Ok(());
        }
    };
    let behind = bytes.split_off(head.length);
    let (from_guest, to_guest) = guest.split();
    let (from_server, to_server) = server.split();
    let (out, into) = (allowed.lane(Way::Out), allowed.lane(Way::In));
    let mut ends = Ends { from_guest, to_guest, from_server, to_server, out, into };
    // Of tunnels, only WebSocket is left.
    let connection = if head.tunnel { "Upgrade" } else { "close" };
    out.write(&mut ends.to_server, &for_server(&bytes, connection)).await?;
    drop(bytes);
    if head.tunnel {
        ends.switch(behind).await?;
    } else {
        ends.exchange(behind, head.body).await?;
    }
    guest.close();
    server.close();
    Ok(())
}

impl Ends<'_> {
    /// Carries the body of a request and the answer, which ends it.
    async fn exchange(&mut self, first: Vec<u8>, body: Body) -> Result<(), Broken> {
        let request = async {
            send_body(self.out, &self.from_guest, &mut self.to_server, first, body).await?;
            drain(&self.from_guest).await?;
            self.to_server.shutdown().await?;
            pending().await
        };
        tokio::select! {
            ended = request => ended,
            ended = self.into.carry(&self.from_server, &mut self.to_guest, |_| {}) => ended,
        }?;
        // The answer would be lost if the guest was still sending.
        let _gone = timeout(LINGER, drain(&self.from_guest)).await;
        Ok(())
    }

    /// Waits for the answer to a request for WebSocket. Only if the server agreed is anything of what follows carried:
    /// otherwise it would take that for requests.
    async fn switch(&mut self, behind: Vec<u8>) -> Result<(), Broken> {
        let mut answer = Vec::new();
        while answer.len() < SWITCHING.len() {
            match read(&self.from_server).await? {
                Some(more) => answer.extend(more),
                None => break,
            }
        }
        self.into.write(&mut self.to_guest, &answer).await?;
        if !answer.starts_with(SWITCHING) {
            return self.exchange(Vec::new(), Body::None).await;
        }
        drop(answer);
        self.out.write(&mut self.to_server, &behind).await?;
        drop(behind);
        tokio::try_join!(
            self.out.carry(&self.from_guest, &mut self.to_server, |_| {}),
            self.into.carry(&self.from_server, &mut self.to_guest, |_| {}),
        )?;
        Ok(())
    }
}

/// Carries the body of a request, of which `first` was read already, and nothing behind it.
async fn send_body(
    out: Lane<'_>,
    from: &ReadHalf<'_>,
    to: &mut WriteHalf<'_>,
    first: Vec<u8>,
    body: Body,
) -> Result<(), Broken> {
    let (mut rest, mut chunk) = (Rest::of(body), first);
    loop {
        let of_body = rest.take(&chunk)?;
        out.write(to, chunk.get(..of_body).unwrap_or_default()).await?;
        if rest.is_over() {
            return Ok(());
        }
        drop(chunk);
        chunk = read(from).await?.ok_or(io::ErrorKind::UnexpectedEof).map_err(io::Error::from)?;
    }
}

/// The head of a request as the server gets it: with another Connection, and otherwise as it came.
fn for_server(head: &[u8], connection: &str) -> Vec<u8> {
    let mut new = Vec::with_capacity(head.len() + 32);
    for (index, line) in head.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let name = line.split(|byte| *byte == b':').next().unwrap_or_default();
        if line == b"\r\n" {
            new.extend(format!("Connection: {connection}\r\n\r\n").as_bytes());
        } else if index == 0 || !HOP.iter().any(|hop| hop.eq_ignore_ascii_case(name)) {
            new.extend(line);
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_hear_that_the_connection_ends() {
        let head =
            b"GET connection: HTTP/1.1\r\nHost: a.example\r\nConnection: keep-alive, TE\r\nKEEP-ALIVE: 5\r\n\
            Proxy-Connection: x\r\nX: Connection: y\r\n\r\n";
        let new =
            b"GET connection: HTTP/1.1\r\nHost: a.example\r\nX: Connection: y\r\nConnection: close\r\n\r\n";
        assert_eq!(for_server(head, "close"), new);
    }
}
