//! From the log to receipts.

use std::convert::Infallible;
use std::io;
use std::net::IpAddr;

use sandglass_types::net::Port;
use tokio::net::UnixDatagram;
use tokio::time::Instant;

use super::{Flows, MAX_DATAGRAM, Packet, READS, RECEIPTS, Why};
use crate::dns::Pace;
use crate::enforcer::Enforcer;
use crate::policy::{Connection, Question, Seen, Verdict};
use crate::receipt::{Kind, Outcome, Receipt};

/// `ENOBUFS` of Linux.
const ENOBUFS: i32 = 105;

/// Writes down what arrives on the socket of the log, until it fails: one receipt for each flow, as long
/// as they are not too many, and all other packets are counted.
///
/// # Errors
/// The socket failed.
pub(crate) async fn serve(enforcer: &Enforcer, log: UnixDatagram) -> io::Result<Infallible> {
    let (reads, receipts) = (Pace::new(READS.0, READS.1), Pace::new(RECEIPTS.0, RECEIPTS.1));
    let mut flows = Flows::default();
    loop {
        reads.pass().await;
        log.readable().await?;
        let mut datagram = Vec::with_capacity(MAX_DATAGRAM);
        match log.try_recv_buf(&mut datagram) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            // There was no room for some; the numbers of the next say for how many.
            Err(error) if error.raw_os_error() == Some(ENOBUFS) => continue,
            Err(error) => return Err(error),
        }
        let taken = flows.take(Instant::now(), &datagram);
        if taken.left_out > 0 {
            enforcer.leave_out(Kind::Connection, Outcome::Denied, taken.left_out);
        }
        for packet in taken.new {
            if receipts.try_pass() {
                enforcer.record(receipt(enforcer, packet));
            } else {
                enforcer.leave_out(Kind::Connection, Outcome::Denied, 1);
            }
        }
    }
}

pub(super) fn receipt(enforcer: &Enforcer, packet: Packet) -> Receipt {
    let (address, port) = (IpAddr::V4(packet.to), Port::try_from(packet.port).ok());
    let refusal = |rule| enforcer.refusal(Kind::Connection, rule);
    let receipt = match (packet.why, port) {
        (Why::Connections, _) => refusal("limit/connections"),
        (Why::Source, _) => refusal("always/source"),
        (Why::Never, None) => refusal("always/malformed"),
        (Why::Never, Some(port)) => {
            let bound = enforcer.names_of(address);
            let transport = packet.transport;
            let connection = Connection { transport, address, port, bound: &bound, seen: Seen::Nothing };
            match enforcer.decide(Question::Connect(connection)) {
                verdict @ Verdict::Deny(_) => enforcer.receipt(Kind::Connection, &verdict),
                // The operator opened the range after the rules were made, which stay what they were.
                Verdict::Allow(_) => refusal("always/filter"),
            }
        }
    };
    Receipt { address: Some(address), port, transport: Some(packet.transport), ..receipt }
}
