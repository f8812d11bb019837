//! DNS as the guest sees it: every query that it sends anywhere is answered here.
//!
//! No name that is refused is ever given to a resolver, so a name can't carry data out.

use std::io;
use std::time::Duration;

use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::RecordType;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::policy::{Effective, Question, Record, decide};
use sandglass_types::net::Hostname;

/// The longest query that is read, in bytes. One question with the longest name and an OPT record needs 300.
const MAX_QUERY: usize = 1232;

/// Connections for DNS over TCP that one sandbox may hold; one more is closed at once.
const MAX_CONNECTIONS: usize = 8;

/// How long a connection may take to send a query, or to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The answer to the bytes of one query, or `None` if they deserve none: a response, or too short to have an id.
#[must_use]
pub fn answer(query: &[u8]) -> Option<Vec<u8>> {
    let id = u16::from_be_bytes(query.first_chunk().copied()?);
    let response = match Message::from_vec(query) {
        Ok(message) if message.metadata.message_type == MessageType::Response => return None,
        Ok(message) => respond(&message),
        Err(_malformed) => Message::error_msg(id, OpCode::Query, ResponseCode::FormErr),
    };
    response.to_vec().ok()
}

fn respond(query: &Message) -> Message {
    let metadata = query.metadata;
    let code = match (metadata.op_code, query.queries.as_slice()) {
        (OpCode::Query, [question]) => decide_question(question),
        (OpCode::Query, _) => ResponseCode::FormErr,
        _ => ResponseCode::NotImp,
    };
    let mut response = Message::error_msg(metadata.id, metadata.op_code, code);
    response.metadata.recursion_desired = metadata.recursion_desired;
    response.metadata.recursion_available = true;
    response.queries.clone_from(&query.queries);
    response
}

fn decide_question(question: &Query) -> ResponseCode {
    let record = match question.query_type() {
        RecordType::A => Record::A,
        RecordType::AAAA => Record::Aaaa,
        RecordType::HTTPS | RecordType::SVCB => Record::Service,
        other => Record::Other(other.into()),
    };
    match Hostname::from_labels(question.name().iter()) {
        Ok(name) if decide(&Effective::sealed(), Question::Dns { name: &name, record }).is_allowed() => {
            // There is no resolver to ask yet.
            ResponseCode::ServFail
        }
        _ => ResponseCode::Refused,
    }
}

/// Answers what arrives on a socket of the airlock, until the socket fails. Dropping the future closes it.
///
/// # Errors
/// The socket failed.
pub async fn serve_udp(socket: UdpSocket) -> io::Result<()> {
    let mut buffer = [0; MAX_QUERY];
    loop {
        let (len, from) = match socket.recv_from(&mut buffer).await {
            // The guest can make the kernel report its own unreachable ports here.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
            received => received?,
        };
        if let Some(response) = answer(&buffer[..len]) {
            // One lost answer is what UDP is like; the guest asks again.
            let _sent = socket.try_send_to(&response, from);
        }
    }
}

/// Answers the connections that arrive on a listener of the airlock, until it fails. Dropping the future closes
/// the listener and all connections.
///
/// # Errors
/// The listener failed.
pub async fn serve_tcp(listener: TcpListener) -> io::Result<()> {
    let mut connections = JoinSet::new();
    loop {
        let (connection, _) = listener.accept().await?;
        while connections.try_join_next().is_some() {}
        if connections.len() < MAX_CONNECTIONS {
            connections.spawn(async move {
                if let Err(error) = serve_connection(connection).await {
                    tracing::trace!(%error, "a DNS connection ended");
                }
            });
        }
    }
}

async fn serve_connection(mut connection: TcpStream) -> io::Result<()> {
    let mut buffer = [0; MAX_QUERY];
    loop {
        let len = usize::from(timeout(PATIENCE, connection.read_u16()).await??);
        let Some(query) = buffer.get_mut(..len) else { return Ok(()) };
        timeout(PATIENCE, connection.read_exact(query)).await??;
        let Some(response) = answer(query) else { return Ok(()) };
        let Ok(len) = u16::try_from(response.len()) else { return Ok(()) };
        let framed = [&len.to_be_bytes()[..], &response].concat();
        timeout(PATIENCE, connection.write_all(&framed)).await??;
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use hickory_proto::rr::Name;
    use proptest::prelude::*;

    use super::*;

    fn query(name: &str, record: RecordType) -> Vec<u8> {
        let mut message = Message::query();
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), record));
        message.to_vec().unwrap()
    }

    #[test]
    fn every_name_is_refused_with_the_question_repeated() {
        for record in [RecordType::A, RecordType::AAAA, RecordType::TXT, RecordType::ANY, RecordType::HTTPS] {
            let bytes = query("example.com.", record);
            let response = Message::from_vec(&answer(&bytes).unwrap()).unwrap();
            assert_eq!(response.metadata.response_code, ResponseCode::Refused);
            assert_eq!(response.metadata.id, Message::from_vec(&bytes).unwrap().metadata.id);
            assert_eq!(response.queries[0].name().to_ascii(), "example.com.");
            assert!(response.answers.is_empty());
        }
    }

    #[test]
    fn malformed_queries_get_an_error_and_responses_get_silence() {
        let mut cut = query("example.com.", RecordType::A);
        cut.truncate(20);
        let response = Message::from_vec(&answer(&cut).unwrap()).unwrap();
        assert_eq!(response.metadata.response_code, ResponseCode::FormErr);
        assert_eq!(answer(&[7]), None);
        let response = Message::error_msg(1, OpCode::Query, ResponseCode::NoError).to_vec().unwrap();
        assert_eq!(answer(&response), None, "answering responses would let two servers talk for ever");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_amplify(bytes in proptest::collection::vec(any::<u8>(), 0..MAX_QUERY)) {
            if let Some(response) = answer(&bytes) {
                prop_assert!(response.len() <= bytes.len().max(12));
                prop_assert_eq!(&response[..2], &bytes[..2]);
            }
        }
    }

    #[tokio::test]
    async fn tcp_answers_and_bounds_connections() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut server = JoinSet::new();
        server.spawn(serve_tcp(listener));
        let bytes = query("example.com.", RecordType::A);
        let framed = [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], &bytes].concat();
        let mut held = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            let mut connection = TcpStream::connect(address).await.unwrap();
            connection.write_all(&framed).await.unwrap();
            let len = connection.read_u16().await.unwrap();
            let mut response = vec![0; usize::from(len)];
            connection.read_exact(&mut response).await.unwrap();
            held.push(connection);
        }
        let mut refused = TcpStream::connect(address).await.unwrap();
        assert!(matches!(refused.read(&mut [0]).await, Ok(0) | Err(_)));
    }
}
