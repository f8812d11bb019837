//! Files and interfaces through which clients reach in.

use super::{Aim, Control, Group, Probe};
use crate::verify::checklist::Point;
use crate::verify::judge::Sight;
use crate::verify::secrets::{Place, holds};

/// All of them.
pub(super) const PROBES: &[Probe] = &[Probe {
    id: "files_and_api.read-outside",
    group: Group::FilesAndApi,
    what: "download a file of the machine by its path",
    points: &[Point::Boundary],
    control: Control::Bare,
    attack: |aim| Box::pin(read_outside(aim)),
}];

async fn read_outside(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    let sandbox = aim.ground.sandbox().await?;
    let (status, body) = sandbox.download(&scene.canaries.file().to_string_lossy()).await?;
    Ok(if holds(&body, scene.secrets.at(Place::File)) {
        Sight::Reached("the file was delivered".into())
    } else {
        Sight::Held(format!("the answer was {status}"))
    })
}
