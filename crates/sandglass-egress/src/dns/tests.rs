use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use async_trait::async_trait;
use hickory_proto::op::{Message, OpCode, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, RecordType};
use proptest::prelude::*;
use tokio::sync::Semaphore;

use super::message::tests::{message, query};
use super::*;
use crate::fixture::{Fixture, Memory, TTL, fixture, host, policy, sandbox};
use crate::policy::Effective;
use crate::receipt::Outcome;
use crate::resolver::{Resolve, Resolved};

const SITE: &str = "93.184.216.34";

async fn ask(fixture: &Fixture, name: &str, record: RecordType) -> Message {
    Message::from_vec(&answer(&fixture.enforcer, &query(name, record)).await.unwrap()).unwrap()
}

fn code(message: &Message) -> ResponseCode {
    message.metadata.response_code
}

fn told(message: &Message) -> Vec<String> {
    let address = |data: &RData| match data {
        RData::A(address) => address.to_string(),
        other => panic!("{other:?}"),
    };
    message.answers.iter().map(|record| address(&record.data)).collect()
}

fn bound(fixture: &Fixture, address: &str) -> Vec<Hostname> {
    fixture.enforcer.names_of(address.parse().unwrap())
}

#[tokio::test]
async fn a_refused_name_never_reaches_a_resolver() {
    let fixture = fixture(r#"[{"allow":"example.com"}]"#, &[("evil.example", &[SITE])]);
    let tunnel = format!("{}.evil.example.", "a".repeat(63));
    for name in
        ["evil.example.", "a.example.com.", "com.", ".", "localhost.", "9.9.9.9.", "xn--.example.", &tunnel]
    {
        for record in [RecordType::A, RecordType::AAAA, RecordType::TXT, RecordType::ANY, RecordType::HTTPS] {
            let message = ask(&fixture, name, record).await;
            assert_eq!(code(&message), ResponseCode::Refused, "{name} {record}");
            assert!(message.answers.is_empty());
            assert_eq!(message.queries[0].name().to_ascii(), name);
        }
    }
    assert_eq!(fixture.asked(), 0);
    assert!(fixture.receipts().iter().all(|receipt| receipt.outcome == Outcome::Denied));
    ask(&fixture, "example.com.", RecordType::A).await;
    assert_eq!(fixture.asked(), 1, "the control");
}

#[tokio::test]
async fn an_allowed_name_has_its_addresses_and_they_are_bound() {
    let fixture = fixture(r#"[{"allow":"*.example.com"}]"#, &[("www.example.com", &[SITE, "93.184.216.35"])]);
    let message = ask(&fixture, "WWW.example.com.", RecordType::A).await;
    assert_eq!(code(&message), ResponseCode::NoError);
    assert_eq!(told(&message), [SITE, "93.184.216.35"]);
    assert_eq!(bound(&fixture, SITE), [host("www.example.com")]);
    fixture.clock.advance(TTL - Duration::from_millis(1));
    assert_eq!(bound(&fixture, "93.184.216.35"), [host("www.example.com")]);
    fixture.clock.advance(Duration::from_millis(1));
    assert_eq!(bound(&fixture, SITE), []);
    let [receipt] = &fixture.receipts()[..] else { panic!("one receipt") };
    assert_eq!((receipt.kind, receipt.outcome), (Kind::Dns, Outcome::Allowed));
    assert_eq!(receipt.name.as_ref().unwrap().to_string(), "WWW.example.com");
    assert_eq!(receipt.record.as_ref().unwrap().to_string(), "A");
    assert_eq!(receipt.rule.to_string(), "request/rule-1 within ceiling/rule-1");
    assert_eq!(receipt.answer, [SITE, "93.184.216.35"].map(|address| address.parse::<IpAddr>().unwrap()));
}

#[tokio::test]
async fn of_an_allowed_name_other_records_are_none_or_refused() {
    let fixture = fixture(r#"[{"allow":"example.com"}]"#, &[("example.com", &[SITE])]);
    for record in [RecordType::AAAA, RecordType::HTTPS, RecordType::SVCB] {
        let message = ask(&fixture, "example.com.", record).await;
        assert_eq!(code(&message), ResponseCode::NoError, "{record}");
        assert!(
            message.answers.is_empty() && message.authorities.is_empty() && message.additionals.is_empty()
        );
    }
    for record in [
        RecordType::TXT,
        RecordType::NULL,
        RecordType::ANY,
        RecordType::MX,
        RecordType::CNAME,
        RecordType::PTR,
        RecordType::SRV,
        RecordType::NS,
        RecordType::SOA,
        RecordType::AXFR,
        RecordType::Unknown(65399),
    ] {
        assert_eq!(code(&ask(&fixture, "example.com.", record).await), ResponseCode::Refused, "{record}");
    }
    let mut chaos = message("example.com.", RecordType::A);
    chaos.queries[0].set_query_class(DNSClass::CH);
    let answered = answer(&fixture.enforcer, &chaos.to_vec().unwrap()).await.unwrap();
    assert_eq!(code(&Message::from_vec(&answered).unwrap()), ResponseCode::Refused);
    assert_eq!(fixture.asked(), 0);
    assert_eq!(fixture.receipts().last().unwrap().rule.to_string(), "always/class");
}

#[tokio::test]
async fn addresses_are_checked_after_resolution() {
    let fixture = fixture(
        r#"[{"deny":"93.184.216.35"},{"allow":"*"}]"#,
        &[
            ("mixed.example", &["10.0.0.1", SITE, "169.254.169.254", "127.0.0.1", "93.184.216.35"]),
            ("rebound.example", &["169.254.169.254", "127.0.0.1", "0.0.0.0"]),
            ("denied.example", &["93.184.216.35"]),
        ],
    );
    assert_eq!(told(&ask(&fixture, "mixed.example.", RecordType::A).await), [SITE]);
    assert_eq!(bound(&fixture, "10.0.0.1"), []);
    assert_eq!(bound(&fixture, SITE), [host("mixed.example")]);
    for (name, rule) in [("rebound.example.", "always/unspecified"), ("denied.example.", "request/rule-1")] {
        let message = ask(&fixture, name, RecordType::A).await;
        assert_eq!(code(&message), ResponseCode::Refused);
        assert!(message.answers.is_empty());
        let receipt = fixture.receipts().pop().unwrap();
        assert_eq!((receipt.outcome, receipt.rule.to_string()), (Outcome::Denied, rule.to_owned()));
        assert!(!receipt.answer.is_empty(), "it says what was withheld");
    }
    assert_eq!(bound(&fixture, "169.254.169.254"), []);
    assert_eq!(fixture.receipts()[0].answer, [SITE.parse::<IpAddr>().unwrap()]);
}

#[tokio::test]
async fn what_the_resolver_does_not_know_is_said() {
    #[derive(Debug)]
    struct Down;
    #[async_trait]
    impl Resolve for Down {
        async fn resolve(&self, _: &Hostname) -> Result<Resolved, ResolveError> {
            Err(ResolveError::Failed("nobody is there".to_owned()))
        }
    }
    let fixture = fixture(r#"[{"allow":"*"}]"#, &[("empty.example", &[])]);
    let message = ask(&fixture, "empty.example.", RecordType::A).await;
    assert_eq!((code(&message), message.answers.len()), (ResponseCode::NoError, 0));
    assert_eq!(code(&ask(&fixture, "missing.example.", RecordType::A).await), ResponseCode::NXDomain);
    let down = with(policy(r#"[{"allow":"*"}]"#), Arc::new(Down));
    let answered = answer(&down, &query("a.example.", RecordType::A)).await.unwrap();
    assert_eq!(code(&Message::from_vec(&answered).unwrap()), ResponseCode::ServFail);
}

#[tokio::test]
async fn what_is_malformed_leaves_a_receipt_and_silence_leaves_none() {
    let fixture = fixture("[]", &[]);
    let response = Message::error_msg(1, OpCode::Query, ResponseCode::NoError).to_vec().unwrap();
    assert_eq!(answer(&fixture.enforcer, &response).await, None);
    assert_eq!(fixture.receipts().len(), 0);
    assert!(answer(&fixture.enforcer, &[1, 2, 3]).await.is_some());
    assert_eq!(fixture.receipts()[0].rule.to_string(), "always/malformed");
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_refusals_is_counted_and_pushes_nothing_out() {
    let fixture = fixture(r#"[{"allow":"example.com"}]"#, &[("example.com", &[SITE])]);
    for _ in 0..REFUSALS.1 + 50 {
        assert_eq!(code(&ask(&fixture, "evil.example.", RecordType::A).await), ResponseCode::Refused);
    }
    ask(&fixture, "example.com.", RecordType::A).await;
    let receipts = fixture.receipts();
    assert_eq!(receipts.len(), usize::try_from(REFUSALS.1).unwrap() + 1);
    assert_eq!(receipts.last().map(|receipt| (receipt.outcome, receipt.lost)), Some((Outcome::Allowed, 50)));
}

fn with(policy: Effective, resolver: Arc<dyn Resolve>) -> Arc<Enforcer> {
    Enforcer::new(crate::enforcer::Settings {
        sandbox: sandbox(),
        generation: sandglass_types::Generation::FIRST,
        policy,
        remembered: crate::remembered::Remembered::default(),
        head: None,
        ledger: Arc::new(Memory::default()),
        resolver,
        clock: Arc::new(sandglass_types::SystemClock),
        totals: Arc::default(),
    })
}

/// Gives every name one address, once there are permits; and knows which it was asked.
#[derive(Debug)]
struct Gate {
    asked: std::sync::Mutex<BTreeSet<String>>,
    permits: Semaphore,
}

#[async_trait]
impl Resolve for Gate {
    async fn resolve(&self, name: &Hostname) -> Result<Resolved, ResolveError> {
        self.asked.lock().unwrap().insert(name.to_string());
        self.permits.acquire().await.unwrap().forget();
        Ok(Resolved { addresses: vec![SITE.parse().unwrap()], ttl: TTL })
    }
}

fn gate() -> Arc<Gate> {
    Arc::new(Gate { asked: std::sync::Mutex::default(), permits: Semaphore::new(0) })
}

impl Gate {
    async fn asked(&self, count: usize) {
        while self.asked.lock().unwrap().len() < count {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn a_policy_that_tightens_meanwhile_counts() {
    let gate = gate();
    let enforcer = with(policy(r#"[{"allow":"*"}]"#), Arc::<Gate>::clone(&gate));
    let mut task = JoinSet::new();
    let asks = Arc::clone(&enforcer);
    task.spawn(async move { answer(&asks, &query("a.example.", RecordType::A)).await });
    gate.asked(1).await;
    enforcer.set_policy(policy(r#"[{"allow":"b.example"}]"#));
    gate.permits.add_permits(1);
    let answered = task.join_next().await.unwrap().unwrap().unwrap();
    assert_eq!(code(&Message::from_vec(&answered).unwrap()), ResponseCode::Refused);
    assert_eq!(enforcer.names_of(SITE.parse().unwrap()), []);
}

/// Sockets of loopback that are served, and where they are.
async fn serve(
    enforcer: &Arc<Enforcer>,
) -> (JoinSet<io::Result<Infallible>>, std::net::SocketAddr, std::net::SocketAddr) {
    let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let (over_udp, over_tcp) = (udp.local_addr().unwrap(), tcp.local_addr().unwrap());
    let mut server = JoinSet::new();
    server.spawn(Arc::clone(enforcer).serve_dns(udp, tcp));
    (server, over_udp, over_tcp)
}

async fn client(server: std::net::SocketAddr) -> UdpSocket {
    let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    client.connect(server).await.unwrap();
    client
}

async fn receive(client: &UdpSocket) -> Message {
    let mut buffer = [0; 4096];
    let len = timeout(Duration::from_secs(30), client.recv(&mut buffer)).await.unwrap().unwrap();
    Message::from_vec(&buffer[..len]).unwrap()
}

#[tokio::test]
async fn only_so_many_queries_are_under_way() {
    let gate = gate();
    let enforcer = with(policy(r#"[{"allow":"*"}]"#), Arc::<Gate>::clone(&gate));
    let (_server, address, _) = serve(&enforcer).await;
    let client = client(address).await;
    let total = MAX_QUERIES + 36;
    for number in 0..total {
        client.send(&query(&format!("n{number}.example."), RecordType::A)).await.unwrap();
    }
    gate.asked(MAX_QUERIES).await;
    // Nothing that is waited for could show that another one will not be asked; so much is given for it to show.
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(gate.asked.lock().unwrap().len(), MAX_QUERIES);
    gate.permits.add_permits(total);
    let mut names = BTreeSet::new();
    while names.len() < total {
        let message = receive(&client).await;
        assert_eq!(told(&message), [SITE]);
        names.insert(message.queries[0].name().to_ascii());
    }
    assert_eq!(gate.asked.lock().unwrap().len(), total);
}

#[tokio::test]
async fn queries_over_udp_are_answered_and_hostile_bytes_do_not_end_that() {
    let fixture = fixture(r#"[{"allow":"example.com"}]"#, &[("example.com", &[SITE])]);
    let (_server, address, _) = serve(&fixture.enforcer).await;
    let client = client(address).await;
    for bytes in [&b""[..], b"\0", &[0xff; 12], &[0; 12], &[0x41; 4000]] {
        client.send(bytes).await.unwrap();
    }
    client.send(&query("example.com.", RecordType::A)).await.unwrap();
    let found = loop {
        let message = receive(&client).await;
        if !message.answers.is_empty() {
            break message;
        }
    };
    assert_eq!(told(&found), [SITE]);
    assert_eq!(bound(&fixture, SITE), [host("example.com")]);
}

async fn over_tcp(connection: &mut TcpStream, query: &[u8]) -> Message {
    let framed = [&u16::try_from(query.len()).unwrap().to_be_bytes()[..], query].concat();
    connection.write_all(&framed).await.unwrap();
    let len = connection.read_u16().await.unwrap();
    let mut response = vec![0; usize::from(len)];
    connection.read_exact(&mut response).await.unwrap();
    Message::from_vec(&response).unwrap()
}

#[tokio::test]
async fn tcp_answers_and_bounds_connections() {
    let fixture = fixture(r#"[{"allow":"example.com"}]"#, &[("example.com", &[SITE])]);
    let (_server, _, address) = serve(&fixture.enforcer).await;
    let mut held = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let mut connection = TcpStream::connect(address).await.unwrap();
        assert_eq!(told(&over_tcp(&mut connection, &query("example.com.", RecordType::A)).await), [SITE]);
        let refused = over_tcp(&mut connection, &query("evil.example.", RecordType::A)).await;
        assert_eq!(code(&refused), ResponseCode::Refused);
        held.push(connection);
    }
    let mut refused = TcpStream::connect(address).await.unwrap();
    assert!(matches!(refused.read(&mut [0]).await, Ok(0) | Err(_)));
    let mut freed = held.pop().unwrap();
    freed.write_all(&[0xff, 0xff]).await.unwrap();
    assert!(matches!(freed.read(&mut [0]).await, Ok(0) | Err(_)), "too long");
}

proptest! {
    #[test]
    fn only_what_the_policy_allows_is_asked_and_told(
        name in "([a-c]|evil|\\PC{1,3})(\\.(example|local|com)){1,2}",
        rules in proptest::sample::select(vec![
            "[]", r#"[{"allow":"*.example"}]"#, r#"[{"allow":"*"}]"#, r#"[{"deny":"evil.example"},{"allow":"*"}]"#,
            r#"[{"deny":"0.0.0.0/1"},{"allow":"*"}]"#, r#"[{"allow":"0.0.0.0/0"}]"#, r#"[{"allow":"93.184.216.0/24"}]"#,
        ]),
        record in proptest::sample::select(vec![RecordType::A, RecordType::AAAA, RecordType::TXT, RecordType::HTTPS]),
        addresses in proptest::collection::vec(any::<u32>(), 0..20),
    ) {
        let Ok(asked) = Name::from_ascii(format!("{name}.")) else { return Ok(()) };
        let parsed = Hostname::from_labels(asked.iter()).ok();
        let addresses: Vec<_> = addresses.into_iter().map(|bits| Ipv4Addr::from_bits(bits).to_string()).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        let names: Vec<(&str, &[&str])> = parsed.iter().map(|name| (name.as_str(), &addresses[..])).collect();
        let fixture = fixture(rules, &names);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let message = runtime.block_on(ask(&fixture, &asked.to_ascii(), record));
        let kind = match record {
            RecordType::A => Record::A,
            RecordType::AAAA => Record::Aaaa,
            RecordType::HTTPS => Record::Service,
            _ => Record::Other(16),
        };
        let may = |question| fixture.enforcer.decide(question).is_allowed();
        let allowed = parsed.as_ref().is_some_and(|name| may(Question::Dns { name, record: kind }));
        prop_assert_eq!(fixture.asked(), usize::from(allowed && kind == Record::A));
        prop_assert!(allowed || code(&message) == ResponseCode::Refused);
        let bound: Vec<_> = addresses.iter().filter(|address| !bound(&fixture, address).is_empty()).collect();
        for address in told(&message) {
            let name = parsed.as_ref().unwrap();
            let told = Question::Answer { name, address: address.parse().unwrap() };
            prop_assert!(may(told) && bound.contains(&&address.as_str()));
        }
        prop_assert!(bound.is_empty() || !message.answers.is_empty());
        prop_assert_eq!(fixture.receipts().len(), 1);
    }
}
