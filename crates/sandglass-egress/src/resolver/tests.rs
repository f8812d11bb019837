use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use hickory_proto::op::{Message, OpCode, ResponseCode};
use hickory_proto::rr::Record;
use hickory_proto::rr::rdata::{A, CNAME};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

use super::*;

/// A name server on loopback, and the names that it was asked for.
struct Server {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
    _tasks: JoinSet<()>,
}

/// What it says about a name; `None` is silence.
fn say(query: &Message, over_tcp: bool) -> Option<Message> {
    let question = query.queries[0].clone();
    let mut answer = Message::response(query.metadata.id, OpCode::Query);
    answer.add_query(question.clone());
    let name = question.name().clone();
    let address = |name: &Name, last, ttl| {
        Record::from_rdata(name.clone(), ttl, RData::A(A(Ipv4Addr::new(93, 184, 216, last))))
    };
    match name.to_ascii().to_ascii_lowercase().as_str() {
        "two.example." => _ = answer.add_answers([address(&name, 1, 100), address(&name, 2, 50)]),
        "many.example." => _ = answer.add_answers((0..40).map(|last| address(&name, last, 100))),
        "alias.example." => {
            let end = Name::from_ascii("end.other.").unwrap();
            let chain = RData::CNAME(CNAME(end.clone()));
            answer.add_answers([Record::from_rdata(name, 20, chain), address(&end, 3, 100)]);
        }
        "long.example." if !over_tcp => answer.metadata.truncation = true,
        "long.example." => _ = answer.add_answer(address(&name, 4, 100)),
        "empty.example." => {}
        "broken.example." => answer.metadata.response_code = ResponseCode::ServFail,
        "silent.example." => return None,
        _ => answer.metadata.response_code = ResponseCode::NXDomain,
    }
    Some(answer)
}

impl Server {
    async fn start() -> Self {
        let (udp, tcp) = loop {
            let udp = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            match TcpListener::bind(udp.local_addr().unwrap()).await {
                // A connection of some other test has that port.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                tcp => break (udp, tcp.unwrap()),
            }
        };
        let address = udp.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = JoinSet::new();
        let names = Arc::clone(&asked);
        tasks.spawn(async move {
            let mut buffer = [0; 4096];
            loop {
                let (len, from) = udp.recv_from(&mut buffer).await.unwrap();
                let query = Message::from_vec(&buffer[..len]).unwrap();
                names.lock().unwrap().push(query.queries[0].name().to_ascii().to_ascii_lowercase());
                if let Some(answer) = say(&query, false) {
                    udp.send_to(&answer.to_vec().unwrap(), from).await.unwrap();
                }
            }
        });
        tasks.spawn(async move {
            loop {
                let (mut connection, _) = tcp.accept().await.unwrap();
                let len = connection.read_u16().await.unwrap();
                let mut query = vec![0; usize::from(len)];
                connection.read_exact(&mut query).await.unwrap();
                let answer = say(&Message::from_vec(&query).unwrap(), true).unwrap().to_vec().unwrap();
                connection.write_u16(u16::try_from(answer.len()).unwrap()).await.unwrap();
                connection.write_all(&answer).await.unwrap();
            }
        });
        Self { address, asked, _tasks: tasks }
    }

    fn resolver(&self, hosts: &[u8]) -> HostResolver {
        let mut server = NameServerConfig::udp_and_tcp(self.address.ip());
        for connection in &mut server.connections {
            connection.port = self.address.port();
        }
        HostResolver::with(vec![server], &ResolverOpts::default(), hosts).unwrap()
    }
}

async fn resolve(resolver: &HostResolver, name: &str) -> Result<Resolved, ResolveError> {
    resolver.resolve(&name.parse().unwrap()).await
}

fn addresses(resolved: &Resolved) -> Vec<u8> {
    let mut last: Vec<_> = resolved.addresses.iter().map(|address| address.octets()[3]).collect();
    last.sort_unstable();
    last
}

#[tokio::test]
async fn names_have_the_addresses_at_the_end_of_their_chain() {
    let server = Server::start().await;
    let resolver = server.resolver(b"");
    let two = resolve(&resolver, "two.example").await.unwrap();
    assert_eq!(addresses(&two), [1, 2]);
    assert!(two.ttl <= Duration::from_secs(50) && two.ttl > Duration::from_secs(20), "{:?}", two.ttl);
    let alias = resolve(&resolver, "alias.example").await.unwrap();
    assert_eq!(addresses(&alias), [3]);
    assert!(alias.ttl <= Duration::from_secs(20), "the chain holds as long as its weakest link");
    assert_eq!(resolve(&resolver, "many.example").await.unwrap().addresses.len(), MAX_ADDRESSES);
    assert_eq!(addresses(&resolve(&resolver, "long.example").await.unwrap()), [4], "over TCP");
    let asked = server.asked.lock().unwrap().len();
    resolve(&resolver, "two.example").await.unwrap();
    assert_eq!(server.asked.lock().unwrap().len(), asked, "an answer is kept");
}

#[tokio::test]
async fn what_is_not_there_is_told_from_what_nobody_knows() {
    let server = Server::start().await;
    let resolver = server.resolver(b"");
    assert_eq!(resolve(&resolver, "missing.example").await, Err(ResolveError::NoSuchName));
    assert_eq!(resolve(&resolver, "empty.example").await.unwrap().addresses, [] as [Ipv4Addr; 0]);
    assert!(matches!(resolve(&resolver, "broken.example").await, Err(ResolveError::Failed(_))));
    assert!(matches!(resolve(&resolver, "silent.example").await, Err(ResolveError::Failed(_))));
}

#[tokio::test]
async fn the_hosts_file_comes_first_and_names_are_absolute() {
    let server = Server::start().await;
    let hosts = b"# comment\n10.1.2.3 db db.internal\n2001:db8::1 six.example\n10.1.2.4 two.example\n";
    let resolver = server.resolver(hosts);
    for (name, address) in [("db", 3), ("db.internal", 3), ("two.example", 4)] {
        assert_eq!(addresses(&resolve(&resolver, name).await.unwrap()), [address], "{name}");
    }
    assert_eq!(server.asked.lock().unwrap().len(), 0);
    assert_eq!(resolve(&resolver, "single").await, Err(ResolveError::NoSuchName));
    let asked = server.asked.lock().unwrap().clone();
    assert!(!asked.is_empty() && asked.iter().all(|name| name == "single."), "{asked:?}");
}

#[test]
fn search_domains_are_left_out_and_servers_are_needed() {
    let conf = b"search corp.example\noptions ndots:5 timeout:30 attempts:9\nnameserver 127.0.0.53\n";
    let resolver = HostResolver::new(conf, b"").unwrap();
    let options = resolver.resolver.options();
    assert_eq!((options.timeout, options.attempts), (Duration::from_millis(1500), 2));
    assert!(HostResolver::new(b"search corp.example\n", b"").is_err());
    assert!(HostResolver::new(b"", b"").is_err());
    assert!(HostResolver::new(conf, b"\xff\xfe 10.0.0.1 x").is_err());
}

#[tokio::test]
async fn fixed_names_are_all_there_is() {
    let found = Resolved { addresses: vec![Ipv4Addr::new(198, 51, 100, 1)], ttl: Duration::from_secs(1) };
    let names = FixedNames([("a.example".parse().unwrap(), found.clone())].into());
    assert_eq!(names.resolve(&"a.example".parse().unwrap()).await, Ok(found));
    assert_eq!(names.resolve(&"b.example".parse().unwrap()).await, Err(ResolveError::NoSuchName));
}
