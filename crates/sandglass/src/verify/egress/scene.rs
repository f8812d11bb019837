//! The sandboxes of the group, and how their attacks are carried out.

use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fs_err as fs;
use sandglass_engine::network::SlotName;
use sandglass_linux::namespace::Netns;
use sandglass_linux::packet;
use sandglass_proto::leak::Leak;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::super::ground::GUEST;
use super::super::sandbox::Sandbox;
use super::super::server::Endpoint;
use super::super::yard::{
    ALIAS, ALLOWED, Nonce, Post, REBOUND, SECOND, STRANGER, Sighting, UPSTREAM, Witness, Yard,
};
use super::aim::{Aim, Step, resolve, tcp};
use super::wire::{get, hello};

/// Between two looks at what the witness saw.
const INTERVAL: Duration = Duration::from_millis(20);

/// How long what is allowed may take to arrive.
const ARRIVAL: Duration = Duration::from_secs(10);

/// A buffer for the few frames that are put on a link, in bytes.
const LINK_BUFFER: u32 = 1 << 20;

/// Length of the `virtio_net_hdr` before each frame of a packet socket. Zeros ask for nothing.
const FRAME_HEADER: [u8; 10] = [0; 10];

/// The guest's end of a sandbox's link.
const GUEST_LINK: &str = "eth0";

/// Where an attack is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// A sandbox that is allowed everything which can be allowed.
    Wide,
    /// One that is allowed a few names.
    Narrow,
    /// One whose airlock was taken over.
    Weak,
}

/// The sandboxes, in a network of which a witness sees everything.
pub(super) struct Scene {
    yard: Yard,
    server: Vec<IpAddr>,
    wide: Fenced,
    narrow: Fenced,
    weak: Fenced,
    /// Attacks nobody, so whatever is on its link is from others.
    peer: Fenced,
    _posts: Vec<Post>,
}

/// A sandbox and its network.
struct Fenced {
    sandbox: Sandbox,
    inner: Netns,
    airlock: Netns,
    /// The airlock's end of its link.
    link: String,
}

impl Scene {
    /// Makes them on a server that runs in the yard, whose data folder this is.
    pub(super) async fn open(yard: Yard, endpoint: &Endpoint, data: &Path) -> anyhow::Result<Self> {
        let everything = json!({"network": {"allowOut": ["0.0.0.0/0"]}});
        let few =
            json!({"network": {"allowOut": [ALLOWED, SECOND, REBOUND, ALIAS], "denyOut": ["0.0.0.0/0"]}});
        let make = |policy| Fenced::make(endpoint, data, policy);
        let (wide, narrow) = tokio::try_join!(make(&everything), make(&few))?;
        let (weak, peer) = tokio::try_join!(make(&few), make(&everything))?;
        let witness = yard.witness();
        let posts = vec![
            witness.overhear(&wide.airlock)?,
            witness.overhear(&narrow.airlock)?,
            witness.watch(&peer.inner, GUEST_LINK)?,
            witness.take_all(&weak.airlock, &weak.link)?,
        ];
        let server = Yard::server_addresses()?;
        Ok(Self { server, wide, narrow, weak, peer, yard, _posts: posts })
    }

    /// Ends the sandboxes.
    pub(super) async fn close(&self) -> anyhow::Result<()> {
        for fenced in [&self.wide, &self.narrow, &self.weak, &self.peer] {
            fenced.sandbox.kill().await?;
        }
        Ok(())
    }

    pub(super) const fn witness(&self) -> &Witness {
        self.yard.witness()
    }

    pub(super) fn sandbox(&self, place: Place) -> &Sandbox {
        &self.fenced(place).sandbox
    }

    const fn fenced(&self, place: Place) -> &Fenced {
        match place {
            Place::Wide => &self.wide,
            Place::Narrow => &self.narrow,
            Place::Weak => &self.weak,
        }
    }

    pub(super) fn aim(&self) -> Aim<'_> {
        Aim::new(self.witness(), &self.server, self.peer.sandbox.id())
    }

    /// Carries out one step. What those inside say of it is for people.
    pub(super) async fn take(&self, place: Place, step: Step) -> anyhow::Result<()> {
        let fenced = self.fenced(place);
        match step {
            Step::Inside(attacks) => {
                let said = self.inside(place, &attacks).await?;
                tracing::debug!(?place, said, "attacks were carried out");
                Ok(())
            }
            Step::OnLink(frames) => {
                fenced.inner.run(|| put(&frames))?.context("no frame could be put on the link")
            }
        }
    }

    /// Makes attempts from inside, as root.
    pub(super) async fn inside(&self, place: Place, attacks: &[Leak]) -> anyhow::Result<String> {
        let words = serde_json::to_string(attacks)?;
        let said = self.sandbox(place).probe("egress", &[&words]).await?;
        if said.code != Some(0) {
            bail!("the attack was not carried out: {}", said.words());
        }
        Ok(String::from_utf8_lossy(&said.stdout).into_owned())
    }

    /// Waits until a word arrives.
    pub(super) async fn arrival(&self, nonce: &Nonce, patience: Duration) -> Option<Sighting> {
        let deadline = Instant::now() + patience;
        loop {
            match self.witness().saw(nonce) {
                None if Instant::now() < deadline => tokio::time::sleep(INTERVAL).await,
                seen => return seen,
            }
        }
    }

    /// Whether what is allowed arrives, from both sandboxes that are attacked from, and whether the witness would see what
    /// the server itself sent to where nothing may go.
    pub(super) async fn is_open(&self) -> anyhow::Result<()> {
        let mut aim = self.aim();
        let (web, tls) = (aim.word("allowed HTTP"), aim.word("allowed TLS"));
        let by_name = vec![
            tcp(&format!("{UPSTREAM}:80"), get(ALLOWED, &web)),
            tcp(&format!("{UPSTREAM}:443"), hello(ALLOWED, &tls)),
        ];
        let by_address = vec![aim.bytes(&format!("{STRANGER}:8080"))];
        self.take(Place::Narrow, resolve(&[ALLOWED])).await?;
        self.take(Place::Narrow, Step::Inside(by_name)).await?;
        self.take(Place::Wide, Step::Inside(by_address)).await?;
        let mut own = Vec::new();
        for to in
            ["169.254.169.254:80", "10.0.0.1:443", "203.0.113.5:80", "127.0.0.1:2375", "203.0.113.66:8443"]
        {
            own.push((to, aim.word(format!("the server's own connection to {to}"))));
        }
        for (to, word) in own {
            let mut connection =
                TcpStream::connect(to).await.with_context(|| format!("nothing answers at {to}"))?;
            connection.write_all(word.as_bytes()).await?;
        }
        for (way, nonce) in aim.into_words() {
            if self.arrival(&nonce, ARRIVAL).await.is_none() {
                bail!("{way} did not arrive");
            }
        }
        Ok(())
    }
}

impl Fenced {
    async fn make(endpoint: &Endpoint, data: &Path, policy: &serde_json::Value) -> anyhow::Result<Self> {
        let sandbox = Sandbox::create(endpoint, GUEST, policy).await?;
        let host = data.join("host");
        let slot: SlotName = fs::read_to_string(host.join("slots").join(sandbox.id()))?
            .trim()
            .parse()
            .context("the network of a sandbox has no name")?;
        let open = |pin: String| Netns::open(&host.join("ns").join(pin));
        Ok(Self {
            sandbox,
            inner: open(slot.inner_pin())?,
            airlock: open(slot.airlock_pin())?,
            link: slot.airlock_link(),
        })
    }
}

/// Puts frames on the link of the calling thread's namespace.
fn put(frames: &[Vec<u8>]) -> io::Result<()> {
    let socket = packet::open(GUEST_LINK, LINK_BUFFER)?;
    for frame in frames {
        rustix::io::write(&socket, &[&FRAME_HEADER[..], frame].concat())?;
    }
    Ok(())
}
