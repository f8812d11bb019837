//! The machine below the sandbox.

use super::{Aim, Control, Group, Probe};
use crate::verify::canary::bury;
use crate::verify::checklist::Point;
use crate::verify::judge::Sight;
use crate::verify::secrets::Place;
use crate::verify::witness::{Held, holder_of};

const fn probe(id: &'static str, what: &'static str, attack: super::Attack) -> Probe {
    Probe { id, group: Group::Isolation, what, points: &[Point::Boundary], control: Control::Bare, attack }
}

/// All of them.
pub(super) const PROBES: &[Probe] = &[
    probe("isolation.proc-root", "read a file of the machine through the root folder of a process", |aim| {
        Box::pin(secret(aim, "proc-root", Place::File))
    }),
    probe("isolation.kill", "end a process of the machine", |aim| Box::pin(kill(aim))),
    probe("isolation.core-pattern", "choose the program that the machine runs at a crash", |aim| {
        Box::pin(writable(aim, "/proc/sys/kernel/core_pattern"))
    }),
    probe("isolation.hostname", "rename the machine", |aim| Box::pin(hostname(aim))),
];

/// An attack that wants to know a secret. Who says it was there.
async fn secret(aim: Aim<'_>, name: &str, place: Place) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    let canaries = &scene.canaries;
    let file = canaries.file();
    let args = [file.to_string_lossy()];
    let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
    let said = aim.ground.sandbox().await?.probe(name, &args).await?;
    Ok(if said.tells(scene.secrets.at(place)) {
        Sight::Reached("it told the secret".into())
    } else {
        Sight::Held(format!("the secret was not told ({})", said.words()))
    })
}

async fn kill(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let victim = aim.ground.scene()?.canaries.victim()?;
    let said = aim.ground.sandbox().await?.probe("kill", &[&victim.pid().to_string()]).await;
    let alive = bury(&victim)?;
    let words = said?.words();
    Ok(if alive {
        Sight::Held(format!("the canary lives ({words})"))
    } else {
        Sight::Reached("the canary is dead".into())
    })
}

/// An attack that opens a file of the machine for writing. Who holds it open there has it.
async fn writable(aim: Aim<'_>, path: &str) -> anyhow::Result<Sight> {
    aim.ground.scene()?;
    let sandbox = aim.ground.sandbox().await?;
    let holding = sandbox.hold("open", &[path]).await?;
    let holder = holder_of(Held::Writable(path.as_ref()));
    let words = holding.end(&sandbox).await?.words();
    Ok(match holder? {
        Some(pid) => Sight::Reached(format!("process {pid} of the machine has it open for writing")),
        None => Sight::Held(format!("no process of the machine has it open ({words})")),
    })
}

async fn hostname(aim: Aim<'_>) -> anyhow::Result<Sight> {
    aim.ground.scene()?;
    let name = format!("taken-{}", rand::random::<u32>());
    let said = aim.ground.sandbox().await?.probe("hostname", &[&name]).await?;
    let now = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(if now == name {
        Sight::Reached(format!("the machine is called {now} now"))
    } else {
        Sight::Held(format!("the machine is still called {now} ({})", said.words()))
    })
}
