//! Attacks whose witness must look more than once: at receipts, at how many connections there are, at one that goes on.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use sandglass_egress::proxy::Caps;
use sandglass_proto::leak::Leak;
use serde_json::{Value, json};

use super::super::judge::Sight;
use super::super::server::Server;
use super::super::yard::{ALLOWED, Nonce, STRANGER, UPSTREAM};
use super::aim::{Aim, dns, resolve, tcp};
use super::scene::{Place, Scene};
use super::wire::{A, get, hello, query_name};

/// How many receipts are looked at, and for how long a new one is waited for.
const RECEIPTS: u16 = 1000;
const WRITTEN: Duration = Duration::from_secs(3);

/// A port that no other probe tries.
const STRANGE_PORT: u16 = 7001;

/// How many connections are tried: far more than one sandbox may have.
const FLOOD: u32 = 700;

/// A connection of which the policy does not allow any more must be gone after so long.
const CUT: Duration = Duration::from_secs(1);

/// How long it would go on by itself, in milliseconds: longer than everything that is waited for.
const STREAM_MILLIS: u32 = 15_000;

/// How long after [`CUT`] it is looked for.
const AFTERWARDS: Duration = Duration::from_secs(1);

/// How long the first bytes of it may take.
const BEGIN: Duration = Duration::from_secs(10);

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(50);

/// What is refused must be written down: a name by DNS, a connection by its address, a request by its host.
pub(super) async fn receipts(scene: &Scene, place: Place) -> anyhow::Result<Sight> {
    let mut aim = scene.aim();
    let word = aim.word("what is refused");
    let [name, host, server] = ["name", "host", "server"].map(|what| format!("{word}.{what}.example"));
    let attacks = vec![
        dns(query_name(&name, A)),
        tcp(&format!("{STRANGER}:{STRANGE_PORT}"), b"x".to_vec()),
        tcp(&format!("{UPSTREAM}:80"), get(&host, &word)),
        tcp(&format!("{UPSTREAM}:443"), hello(&server, &word)),
    ];
    let refused = [
        ("a name", "name", json!(name)),
        ("a connection", "port", json!(STRANGE_PORT)),
        ("a request", "shown", json!(host)),
        ("a ClientHello", "shown", json!(server)),
    ];
    scene.take(place, resolve(&[ALLOWED])).await?;
    scene.inside(place, &attacks).await?;
    let sandbox = scene.sandbox(place);
    let api = sandbox.endpoint.api()?;
    let deadline = Instant::now() + WRITTEN;
    loop {
        let lines = api.receipts(sandbox.id(), RECEIPTS).await?;
        let lines: Vec<&Value> = lines.iter().map(|line| &line["receipt"]).collect();
        let written = |field: &str, value: &Value| {
            lines.iter().any(|line| line["outcome"] == "denied" && line[field] == *value)
        };
        let missing = refused.iter().find(|(_, field, value)| !written(field, value));
        match missing {
            None => return Ok(Sight::Held("each refusal has its receipt".to_owned())),
            Some((what, ..)) if Instant::now() > deadline => {
                return Ok(Sight::Reached(format!("no receipt says that {what} was refused")));
            }
            Some(_) => tokio::time::sleep(INTERVAL).await,
        }
    }
}

/// More connections to an allowed host than a sandbox may have at a time.
pub(super) async fn flood(scene: &Scene, place: Place) -> anyhow::Result<Sight> {
    let most = Caps::default().flows;
    let mut aim = scene.aim();
    let send = hello(ALLOWED, &aim.word("the flood"));
    scene.take(place, resolve(&[ALLOWED])).await?;
    let said = scene.inside(place, &[Leak::Flood { to: (UPSTREAM, 443).into(), send, count: FLOOD }]).await?;
    let nonce = only(aim)?;
    let seen = scene.witness().saw(&nonce).with_context(|| format!("no connection arrived: {said}"))?;
    let open = seen.most;
    Ok(if open > most {
        Sight::Reached(format!("{open} connections at a time, although {most} are the most"))
    } else {
        Sight::Held(format!("{open} connections at a time, of {FLOOD} that were tried"))
    })
}

/// A connection that was allowed when it was made, and others like it, go on while the policy is tightened.
pub(super) async fn tighten(scene: &Scene, place: Place) -> anyhow::Result<Sight> {
    let mut aim = scene.aim();
    let send = hello(ALLOWED, &aim.word("the stream"));
    let nonce = only(aim)?;
    scene.take(place, resolve(&[ALLOWED])).await?;
    let leaks = [Leak::Stream { to: (UPSTREAM, 443).into(), send, millis: STREAM_MILLIS }];
    let look = async {
        flows(scene, &nonce).await?;
        let sandbox = scene.sandbox(place);
        let nothing = json!({"allowOut": [], "denyOut": ["0.0.0.0/0"]});
        sandbox.endpoint.api()?.set_network(sandbox.id(), &nothing).await?;
        Ok(goes_on(scene, &nonce, Instant::now()).await)
    };
    tokio::select! {
        sight = look => sight,
        said = scene.inside(place, &leaks) => bail!("it ended too early: {}", said?),
    }
}

/// Connections go on while the server is dead: where it decides, and where nothing does.
pub(super) async fn death(scene: &Scene, server: &Server) -> anyhow::Result<(Sight, Sight)> {
    let [attack, control] = [Place::Wide, Place::Weak].map(|place| {
        let mut aim = scene.aim();
        let send = aim.word("the stream").into_bytes();
        (place, [Leak::Stream { to: (UPSTREAM, 8080).into(), send, millis: STREAM_MILLIS }], only(aim))
    });
    let (attacked, controlled) = (attack.2?, control.2?);
    let look = async {
        tokio::try_join!(flows(scene, &attacked), flows(scene, &controlled))?;
        server.kill()?;
        let end = Instant::now();
        Ok(tokio::join!(goes_on(scene, &attacked, end), goes_on(scene, &controlled, end)))
    };
    // With the server ends what it knows of its commands, but not the commands.
    let inside = async {
        let _ends = tokio::join!(scene.inside(attack.0, &attack.1), scene.inside(control.0, &control.1));
        std::future::pending().await
    };
    tokio::select! {
        sights = look => sights,
        never = inside => never,
    }
}

/// The one word that was given out.
fn only(aim: Aim<'_>) -> anyhow::Result<Nonce> {
    aim.into_words().pop().map(|(_, nonce)| nonce).context("no word was given out")
}

/// Waits until a stream arrives.
async fn flows(scene: &Scene, nonce: &Nonce) -> anyhow::Result<()> {
    scene.arrival(nonce, BEGIN).await.context("the connection was not made")?;
    if !is_open(scene, nonce) {
        bail!("the connection ended by itself");
    }
    Ok(())
}

fn is_open(scene: &Scene, nonce: &Nonce) -> bool {
    scene.witness().saw(nonce).is_some_and(|seen| seen.open > 0)
}

/// Whether a stream is there longer than it may be after this moment.
async fn goes_on(scene: &Scene, nonce: &Nonce, after: Instant) -> Sight {
    let end = after + CUT;
    tokio::time::sleep_until((end + AFTERWARDS).into()).await;
    let late = scene.witness().saw(nonce).is_some_and(|seen| seen.last > end);
    if late || is_open(scene, nonce) {
        Sight::Reached(format!("it went on for more than {} ms", CUT.as_millis()))
    } else {
        Sight::Held(format!("it ended within {} ms", CUT.as_millis()))
    }
}
