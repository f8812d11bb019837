//! What gets out of a sandbox over its network, and where it must not: the *egress* group.
//!
//! Each way that a probe tries carries a word of its own, and a witness in the network around the server says which words
//! arrived. A probe holds if no word of it did. Its control is a sandbox whose airlock was taken over from outside, so
//! that whatever leaves the sandbox gets to the witness: there, *every* word must arrive. All probes share these sandboxes
//! and are carried out side by side.
//!
//! The two sandboxes that are attacked from show that the way is open for what is allowed, or nothing counts.

mod addresses;
mod aim;
mod frame;
mod names;
mod over_time;
mod packets;
mod scene;
mod streams;
mod wire;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use serde_json::json;
use tokio::sync::{OnceCell, Semaphore};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::checklist::Point;
use super::ground::NoStage;
use super::judge::{Attempt, Failure, Sight};
use super::probes::{self, Control, Group, Probe};
use super::server::Setup;
use super::stage::Plan;
use super::yard::{self, Nonce, Yard};
use crate::cli::Engine;
use aim::{Aim, Step};
use scene::{Place, Scene};

/// How long all probes together may take. A machine that is not busy needs a quarter of a minute.
const PATIENCE: Duration = Duration::from_secs(120);

/// How many probes attack from one sandbox at a time.
const WIDTH: usize = 6;

/// How long a word may take after the attack to arrive where nothing stands in its way.
const ARRIVAL: Duration = Duration::from_secs(5);

/// How long after the last attack nothing may have arrived.
const SILENCE: Duration = Duration::from_millis(1500);

/// A server in front of a network in which everything answers, and the sandboxes of it. It is there once it is needed.
#[derive(Debug)]
pub(super) struct Fence {
    setup: Setup,
    /// What came of all probes, or why they were not carried out.
    outcomes: OnceCell<Result<Vec<Outcome>, String>>,
}

/// How a probe went where it must fail, and where it must succeed.
type Outcome = (Attempt, Attempt);

/// What is tried under a name.
#[derive(Debug)]
struct Attack {
    id: &'static str,
    /// What it tries, for people.
    what: &'static str,
    points: &'static [Point],
    how: How,
}

/// How a probe attacks.
#[derive(Debug, Clone, Copy)]
enum How {
    /// From a sandbox that is allowed everything which can be allowed.
    Wide(fn(&mut Aim<'_>) -> Vec<Step>),
    /// From one that is allowed a few names.
    Narrow(fn(&mut Aim<'_>) -> Vec<Step>),
    /// Refusals leave receipts.
    Receipts,
    /// Connections are bounded.
    Flood,
    /// A policy that tightens cuts connections.
    Tighten,
    /// Nothing passes a server that died. Both sides have the same one.
    Death,
}

const fn wide(
    id: &'static str,
    what: &'static str,
    points: &'static [Point],
    steps: fn(&mut Aim<'_>) -> Vec<Step>,
) -> Attack {
    Attack { id, what, points, how: How::Wide(steps) }
}

const fn narrow(id: &'static str, what: &'static str, steps: fn(&mut Aim<'_>) -> Vec<Step>) -> Attack {
    Attack { id, what, points: EGRESS, how: How::Narrow(steps) }
}

const fn special(id: &'static str, what: &'static str, how: How) -> Attack {
    Attack { id, what, points: EGRESS, how }
}

const EGRESS: &[Point] = &[Point::Egress];
const METADATA: &[Point] = &[Point::Egress, Point::Metadata];
const PEERS: &[Point] = &[Point::Egress, Point::Peers];

/// All of them. Those at the end are carried out one after the other.
const ATTACKS: &[Attack] = &[
    wide(
        "egress.metadata-address",
        "reach the metadata service, in every notation of its address",
        METADATA,
        addresses::metadata_address,
    ),
    wide(
        "egress.metadata-name",
        "reach the metadata service, by names that lead to it",
        METADATA,
        addresses::metadata_name,
    ),
    wide(
        "egress.metadata-others",
        "reach the metadata services of other clouds",
        METADATA,
        addresses::metadata_others,
    ),
    wide("egress.private-ranges", "reach addresses of private networks", EGRESS, addresses::private_ranges),
    wide(
        "egress.loopback",
        "reach the server's loopback, by names and by packets",
        EGRESS,
        addresses::loopback,
    ),
    wide(
        "egress.host-services",
        "reach services of the host, on each of its addresses",
        EGRESS,
        addresses::host_services,
    ),
    wide(
        "egress.peer-address",
        "reach other sandboxes, by every address that they could have",
        PEERS,
        addresses::peers,
    ),
    wide(
        "egress.broadcast",
        "reach everybody at once, by broadcast and multicast",
        PEERS,
        addresses::broadcast,
    ),
    wide(
        "egress.neighbour-names",
        "ask neighbours for names: mDNS, LLMNR, NetBIOS",
        PEERS,
        addresses::neighbour_names,
    ),
    wide("egress.spoofed-source", "send packets in the name of others", PEERS, addresses::spoofed_source),
    wide(
        "egress.odd-frames",
        "send from another Ethernet address, with tags of VLANs and IP options, in fragments",
        EGRESS,
        addresses::odd_frames,
    ),
    wide("egress.quic", "send by QUIC", EGRESS, packets::quic),
    wide("egress.udp", "send by UDP, to allowed hosts as well", EGRESS, packets::udp),
    wide("egress.icmp", "send a message in pings", EGRESS, packets::icmp),
    wide(
        "egress.protocols",
        "send by other protocols of IP: IPIP, GRE, ESP, SCTP, UDP-Lite",
        EGRESS,
        packets::protocols,
    ),
    wide("egress.ipv6", "send by IPv6, to the metadata services there as well", METADATA, packets::ipv6),
    narrow("egress.name-unlisted", "reach a host that is not allowed, by name", names::unlisted_name),
    narrow(
        "egress.address-unlisted",
        "reach a host that is not allowed, by address, and other ports of one that is",
        streams::unlisted_address,
    ),
    narrow("egress.dns-tunnel", "carry data in questions of DNS, of every type", names::tunnel),
    narrow("egress.dns-elsewhere", "ask other resolvers", names::other_resolvers),
    narrow("egress.dns-encrypted", "ask by DNS over TLS, QUIC and HTTPS", names::encrypted_dns),
    narrow(
        "egress.dns-rebinding",
        "let an allowed name change its address to private ones",
        names::rebinding,
    ),
    narrow("egress.dns-alias", "reach a name that is not allowed by its allowed alias", names::alias),
    narrow(
        "egress.name-bytes",
        "ask for names with NUL, CR LF, percent signs and foreign scripts",
        names::odd_bytes,
    ),
    narrow("egress.sni-other", "use TLS to an allowed address for another name", streams::other_name),
    narrow("egress.sni-none", "use TLS without a name, and what is no TLS", streams::no_name),
    narrow("egress.sni-encrypted", "use TLS with an encrypted name", streams::encrypted_name),
    narrow("egress.sni-split", "send a name in pieces, or two of them", streams::split_name),
    narrow("egress.http-host", "name two hosts in a request, and ask for tunnels", streams::http_host),
    narrow("egress.http-smuggling", "hide a request behind another one", streams::smuggling),
    narrow("egress.http-upgrade", "upgrade to HTTP/2 and other protocols", streams::upgrades),
    narrow("egress.port-url", "reach ports of other sandboxes, by the edge's own headers", streams::port_url),
    special("egress.receipts", "do what is refused without a receipt of it", How::Receipts),
    special("egress.flood", "hold more connections than one sandbox may have", How::Flood),
    special("egress.tighten", "go on with a connection that is not allowed any more", How::Tighten),
    special("egress.dead-server", "send while the server that decides is dead", How::Death),
];

/// All probes of the group.
pub(super) fn probes() -> impl Iterator<Item = Probe> {
    ATTACKS.iter().map(|attack| Probe {
        id: attack.id,
        group: Group::Egress,
        what: attack.what,
        points: attack.points,
        control: Control::Asked,
        attack: |aim| Box::pin(sight(aim)),
    })
}

/// What came of a probe. The first one that is asked about has all of them carried out.
async fn sight(at: probes::Aim<'_>) -> anyhow::Result<Sight> {
    let fence = &at.ground.scene()?.fence;
    let outcomes =
        fence.outcomes.get_or_init(|| fence.attack()).await.as_ref().map_err(|why| anyhow!("{why}"))?;
    let found = ATTACKS.iter().zip(outcomes).find(|(attack, _)| attack.id == at.id);
    let (_, (attack, control)) = found.context("there is no such probe")?;
    let attempt = if at.control { control } else { attack };
    attempt.clone().map_err(|failure| match failure {
        Failure::NoWitness => NoStage.into(),
        Failure::Other(why) => anyhow!(why),
    })
}

impl Fence {
    pub(super) fn new(folder: PathBuf, plan: &Plan) -> anyhow::Result<Self> {
        let config = format!("{}{}", toml::to_string(&json!({ "runsc": plan.runsc }))?, yard::CONFIG);
        let setup =
            Setup { folder, cache: plan.cache.clone(), engine: Engine::Gvisor, config, env: Vec::new() };
        Ok(Self { setup, outcomes: OnceCell::new() })
    }

    async fn attack(&self) -> Result<Vec<Outcome>, String> {
        let carried_out = timeout(PATIENCE, self.carry_out()).await;
        let late = || format!("not all of it was carried out within {} s", PATIENCE.as_secs());
        carried_out.map_err(|_| late())?.map_err(|error| format!("{error:#}"))
    }

    /// Builds the network, starts the server, and carries everything out.
    async fn carry_out(&self) -> anyhow::Result<Vec<Outcome>> {
        let yard = Yard::build(&self.setup.folder).context("no network could be built around the server")?;
        let server = self.setup.start("127.0.0.1:0", None).await?;
        let scene = Arc::new(Scene::open(yard, &server.endpoint, &self.setup.data()).await?);
        let way = scene.is_open().await;
        let (attacks, controls) = tokio::join!(on(&scene, false), on(&scene, true));
        let dead = over_time::death(&scene, &server).await.map_err(|error| failed(&error));
        let address = server.endpoint.url.trim_start_matches("http://");
        let _again = self.setup.start(address, Some(&server.endpoint.key)).await?;
        scene.close().await?;
        let outcomes = ATTACKS.iter().zip(attacks.into_iter().zip(controls)).map(|(attack, both)| {
            let (attack, control) = match (attack.how, &dead) {
                (How::Death, Ok((attack, control))) => (Ok(attack.clone()), Ok(control.clone())),
                (How::Death, Err(failure)) => (Err(failure.clone()), Err(failure.clone())),
                _ => both,
            };
            match &way {
                // A break is one, all the same.
                Err(error) if !matches!(attack, Ok(Sight::Reached(_))) => (Err(failed(error)), control),
                _ => (attack, control),
            }
        });
        Ok(outcomes.collect())
    }
}

fn failed(error: &anyhow::Error) -> Failure {
    Failure::Other(format!("{error:#}"))
}

/// Carries out all probes on one side, in the order of the table, but those that need both sides.
async fn on(scene: &Arc<Scene>, control: bool) -> Vec<Attempt> {
    let turns = Arc::new(Semaphore::new(WIDTH));
    let mut tasks = JoinSet::new();
    for (index, probe) in ATTACKS.iter().enumerate() {
        let (place, steps) = match probe.how {
            How::Wide(steps) => (Place::Wide, steps),
            How::Narrow(steps) => (Place::Narrow, steps),
            How::Receipts | How::Flood | How::Tighten | How::Death => continue,
        };
        let place = if control { Place::Weak } else { place };
        let (scene, turns) = (Arc::clone(scene), Arc::clone(&turns));
        tasks.spawn(async move {
            let _turn = turns.acquire().await;
            (index, attack(&scene, place, steps).await)
        });
    }
    let mut words: Vec<Result<Vec<(String, Nonce)>, String>> =
        ATTACKS.iter().map(|_| Err("its attack ended early".to_owned())).collect();
    while let Some(done) = tasks.join_next().await {
        if let Ok((index, outcome)) = done {
            words[index] = outcome.map_err(|error| format!("{error:#}"));
        }
    }
    if !control {
        tokio::time::sleep(SILENCE).await;
    }
    let mut attempts = Vec::new();
    for (probe, words) in ATTACKS.iter().zip(words) {
        let place = if control { Place::Weak } else { Place::Narrow };
        let attempt = match probe.how {
            How::Receipts => over_time::receipts(scene, place).await,
            How::Flood => over_time::flood(scene, place).await,
            How::Tighten => over_time::tighten(scene, place).await,
            How::Death => Err(anyhow!("the server did not die")),
            How::Wide(_) | How::Narrow(_) => match words {
                Err(why) => Err(anyhow::anyhow!(why)),
                Ok(words) if control => Ok(all_arrived(scene, &words).await),
                Ok(words) => Ok(none_arrived(scene, &words)),
            },
        };
        attempts.push(attempt.map_err(|error| failed(&error)));
    }
    attempts
}

async fn attack(
    scene: &Scene,
    place: Place,
    steps: fn(&mut Aim<'_>) -> Vec<Step>,
) -> anyhow::Result<Vec<(String, Nonce)>> {
    let mut aim = scene.aim();
    for step in steps(&mut aim) {
        scene.take(place, step).await?;
    }
    Ok(aim.into_words())
}

/// Where the attack must fail.
fn none_arrived(scene: &Scene, words: &[(String, Nonce)]) -> Sight {
    let mut arrived = words.iter().filter_map(|(way, nonce)| Some((way, scene.witness().saw(nonce)?)));
    match arrived.next() {
        Some((way, seen)) => Sight::Reached(format!("{way}: arrived as {}", seen.place)),
        None => Sight::Held(format!("nothing arrived in {} ways", words.len())),
    }
}

/// Where it must succeed: in every way, or some of them prove nothing.
async fn all_arrived(scene: &Scene, words: &[(String, Nonce)]) -> Sight {
    for (way, nonce) in words {
        if scene.arrival(nonce, ARRIVAL).await.is_none() {
            return Sight::Held(format!("{way}: did not arrive"));
        }
    }
    Sight::Reached(format!("it arrived in all {} ways", words.len()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::yard::Witness;
    use super::*;

    #[test]
    fn ids_are_unique_and_of_the_group() {
        let ids: BTreeSet<_> = ATTACKS.iter().map(|probe| probe.id).collect();
        assert_eq!(ids.len(), ATTACKS.len());
        assert!(ids.iter().all(|id| id.starts_with("egress.")));
    }

    #[test]
    fn every_way_has_a_word_that_is_sent() {
        let (witness, server) = (Witness::default(), ["203.0.113.1".parse().unwrap()]);
        for probe in ATTACKS {
            let (How::Wide(steps) | How::Narrow(steps)) = probe.how else { continue };
            let mut aim = Aim::new(&witness, &server, "peer");
            let sent = format!("{:?}", bytes(&steps(&mut aim)));
            let words = aim.into_words();
            assert!(!words.is_empty(), "{}", probe.id);
            for (way, nonce) in words {
                // What is cut into pieces holds it as well, but not in one.
                let cut = way.contains("fragments") || way.contains("records");
                assert!(cut || sent.contains(&nonce.to_string()), "{}: {way}", probe.id);
            }
        }
    }

    fn bytes(steps: &[Step]) -> String {
        use sandglass_proto::leak::Leak;
        let mut all = String::new();
        for step in steps {
            let sent: Vec<&[u8]> = match step {
                Step::OnLink(frames) => frames.iter().map(Vec::as_slice).collect(),
                Step::Inside(attacks) => attacks
                    .iter()
                    .map(|attack| match attack {
                        Leak::Tcp { send, .. }
                        | Leak::Udp { send, .. }
                        | Leak::Ping { send, .. }
                        | Leak::Raw { send, .. }
                        | Leak::Stream { send, .. }
                        | Leak::Flood { send, .. } => send.as_slice(),
                    })
                    .collect(),
            };
            all.extend(sent.iter().map(|sent| sent.escape_ascii().to_string()));
        }
        all
    }
}
