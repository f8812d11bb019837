//! Files and interfaces through which clients reach in.

use std::time::Duration;

use anyhow::Context as _;
use fs_err as fs;
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use hyper::body::Bytes;
use sandglass_linux::process::{Launch, run as run_program};
use serde_json::{Value, json};

use super::{Aim, Attack, Control, Group, Probe};
use crate::verify::checklist::Point;
use crate::verify::ground::Scene;
use crate::verify::judge::Sight;
use crate::verify::sandbox::{Sandbox, send};
use crate::verify::secrets::{Place, fresh, holds};

/// How long the command line may take to make a key.
const COMMAND: Duration = Duration::from_secs(30);

const fn outside(id: &'static str, what: &'static str, attack: Attack) -> Probe {
    let (group, control) = (Group::FilesAndApi, Control::Bare);
    Probe { id, group, what, points: &[Point::Boundary], control, attack }
}

const fn between(id: &'static str, what: &'static str, attack: Attack) -> Probe {
    let (group, control) = (Group::FilesAndApi, Control::Asked);
    Probe { id, group, what, points: &[Point::Peers], control, attack }
}

/// All of them.
pub(super) const PROBES: &[Probe] = &[
    outside("files_and_api.read", "download a file of the machine by its path", |aim| {
        Box::pin(read(aim, Way::Path))
    }),
    outside("files_and_api.read-up", "download one by steps up from the home folder", |aim| {
        Box::pin(read(aim, Way::Up))
    }),
    outside("files_and_api.read-link", "download one through a link", |aim| Box::pin(read(aim, Way::Link))),
    outside("files_and_api.read-folder-link", "download one through a link to its folder", |aim| {
        Box::pin(read(aim, Way::FolderLink))
    }),
    outside("files_and_api.write", "upload over a file of the machine", |aim| {
        Box::pin(write(aim, Way::Path))
    }),
    outside("files_and_api.write-link", "upload over one through a link", |aim| {
        Box::pin(write(aim, Way::Link))
    }),
    outside("files_and_api.list", "list a folder of the machine", |aim| Box::pin(list(aim))),
    outside("files_and_api.move", "move a file of the machine away", |aim| Box::pin(take(aim, "Move"))),
    outside("files_and_api.remove", "remove a file of the machine", |aim| Box::pin(take(aim, "Remove"))),
    outside("files_and_api.working-folder", "start a command in a folder of the machine", |aim| {
        Box::pin(start(aim))
    }),
    between("files_and_api.no-token", "use a sandbox without its token", |aim| {
        Box::pin(token(aim, Token::None))
    }),
    between("files_and_api.peer-token", "use a sandbox with the token of another", |aim| {
        Box::pin(token(aim, Token::Peer))
    }),
    between("files_and_api.other-team", "look at the sandbox of another team", |aim| {
        Box::pin(team(aim, Method::GET))
    }),
    between("files_and_api.other-team-kill", "end the sandbox of another team", |aim| {
        Box::pin(team(aim, Method::DELETE))
    }),
    between("files_and_api.revoked-key", "use a key that was revoked", |aim| Box::pin(revoked(aim))),
    Probe {
        points: &[Point::Keys],
        ..outside(
            "files_and_api.agent-memory",
            "find its own token in the agent's memory, as a user",
            |aim| Box::pin(memory(aim)),
        )
    },
];

/// How a path outside is meant.
#[derive(Clone, Copy)]
enum Way {
    Path,
    Up,
    Link,
    FolderLink,
}

/// The name by which a file of the machine is asked for, prepared inside where that needs something.
async fn name(way: Way, path: &std::path::Path, sandbox: &Sandbox) -> anyhow::Result<String> {
    let text = path.to_string_lossy().into_owned();
    let link = format!("/tmp/link-{}", fresh());
    let link_to = async |target: &str| {
        // Where the machine's own folder is read-only, another one does.
        let link = sandbox.run(&["ln", "-s", target, &link]).await?.code.map(|code| (code, link.clone()));
        match link {
            Some((0, link)) => anyhow::Ok(link),
            _ => {
                let link = format!("/dev/shm/link-{}", fresh());
                sandbox.run(&["ln", "-s", target, &link]).await?;
                Ok(link)
            }
        }
    };
    Ok(match way {
        Way::Path => text,
        Way::Up => format!("{}{text}", "../".repeat(20)),
        Way::Link => link_to(&text).await?,
        Way::FolderLink => {
            let folder = path.parent().context("a file is in a folder")?;
            let name = path.file_name().context("a file has a name")?.to_string_lossy();
            format!("{}/{name}", link_to(&folder.to_string_lossy()).await?)
        }
    })
}

async fn read(aim: Aim<'_>, way: Way) -> anyhow::Result<Sight> {
    let scene = aim.ground.around()?;
    let sandbox = aim.ground.sandbox().await?;
    let name = name(way, &scene.canaries.file(), &sandbox).await?;
    let (status, body) = sandbox.download(&name).await?;
    Ok(if holds(&body, scene.secrets.at(Place::File)) {
        Sight::Reached("the file was delivered".into())
    } else {
        Sight::Held(format!("the answer was {status}"))
    })
}

async fn write(aim: Aim<'_>, way: Way) -> anyhow::Result<Sight> {
    let (path, before) = aim.ground.around()?.canaries.fresh_file()?;
    let sandbox = aim.ground.sandbox().await?;
    let name = name(way, &path, &sandbox).await?;
    let (status, _) = sandbox.upload(&name, fresh().into()).await?;
    let now = fs::read_to_string(&path)?;
    fs::remove_file(&path)?;
    Ok(if now == before {
        Sight::Held(format!("the file is as it was; the answer was {status}"))
    } else {
        Sight::Reached("the file was changed".into())
    })
}

async fn list(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let (path, _) = aim.ground.around()?.canaries.fresh_file()?;
    let folder = path.parent().context("a file is in a folder")?.to_string_lossy().into_owned();
    let name = path.file_name().context("a file has a name")?.to_string_lossy().into_owned();
    let request = json!({"path": folder, "depth": 1});
    let (status, body) = aim.ground.sandbox().await?.call("filesystem.Filesystem/ListDir", &request).await?;
    fs::remove_file(&path)?;
    Ok(if holds(&body, &name) {
        Sight::Reached("the folder was listed".into())
    } else {
        Sight::Held(format!("the answer was {status}"))
    })
}

async fn take(aim: Aim<'_>, verb: &str) -> anyhow::Result<Sight> {
    let (path, _) = aim.ground.around()?.canaries.fresh_file()?;
    let text = path.to_string_lossy();
    let moved = path.with_extension("moved");
    let request = match verb {
        "Move" => json!({"source": text, "destination": moved.to_string_lossy()}),
        _ => json!({"path": text}),
    };
    let called = aim.ground.sandbox().await?.call(&format!("filesystem.Filesystem/{verb}"), &request).await;
    let there = path.exists();
    if there {
        fs::remove_file(&path)?;
    }
    let (status, _) = called?;
    Ok(if there {
        Sight::Held(format!("the file is where it was; the answer was {status}"))
    } else {
        Sight::Reached("the file is gone".into())
    })
}

async fn start(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let scene = aim.ground.around()?;
    let file = scene.canaries.file();
    let folder = file.parent().context("a file is in a folder")?.to_string_lossy().into_owned();
    let said = aim.ground.sandbox().await?.run_in(&["cat", "file"], &folder).await;
    Ok(match said {
        Ok(said) if said.tells(scene.secrets.at(Place::File)) => Sight::Reached("the file was read".into()),
        Ok(said) => Sight::Held(format!("the secret was not told ({})", said.words())),
        Err(error) => Sight::Held(format!("the command did not start: {error:#}")),
    })
}

#[derive(Clone, Copy)]
enum Token {
    None,
    Peer,
}

/// The weaker sandbox is one that was asked for without a token.
async fn token(aim: Aim<'_>, which: Token) -> anyhow::Result<Sight> {
    let secret = fresh();
    let peer = aim.ground.sandbox().await?;
    let victim =
        if aim.control { aim.ground.fresh_open().await? } else { aim.ground.fresh(&json!({})).await? };
    let path = "/home/user/secret";
    victim.upload(path, secret.clone().into()).await?;
    let token = match which {
        Token::None => None,
        Token::Peer => peer.reach.token.clone(),
    };
    let (status, body) = victim.with_token(token).download(path).await?;
    victim.kill().await?;
    Ok(if holds(&body, &secret) {
        Sight::Reached("the file was delivered".into())
    } else {
        Sight::Held(format!("the answer was {status}"))
    })
}

/// Runs the program's own command line on the server's data folder.
fn command(scene: &Scene, words: &[&str]) -> anyhow::Result<Value> {
    let program = std::env::current_exe()?;
    let launch =
        Launch::new(program)?.args(words)?.arg("--data-dir")?.arg(scene.setup.data())?.arg("--json")?;
    let output = run_program(launch, b"", COMMAND, 1 << 16)?;
    if !output.status.success() {
        anyhow::bail!("{words:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// A new key of a team.
fn key(scene: &Scene, team: &str) -> anyhow::Result<(String, String)> {
    let key = command(scene, &["key", "create", "--team", team])?;
    let text = |field: &str| key[field].as_str().map(str::to_owned).context("a key lacks something");
    Ok((text("id")?, text("secret")?))
}

/// The weaker sandbox is one of the key's own team.
async fn team(aim: Aim<'_>, method: Method) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    let team = if aim.control {
        "default".to_owned()
    } else {
        let name = format!("team-{}", fresh());
        command(scene, &["team", "create", &name])?;
        name
    };
    let (_, key) = key(scene, &team)?;
    let sandbox = aim.ground.fresh(&json!({})).await?;
    let request = Request::builder()
        .method(method.clone())
        .uri(format!("{}/sandboxes/{}", aim.ground.endpoint.url, sandbox.id()))
        .header("x-api-key", key)
        .body(Full::from(Bytes::new()))?;
    let (status, body) = send(request).await?;
    // Its owner still has it.
    let alive = sandbox.run(&["true"]).await.is_ok();
    let reached =
        if method == Method::DELETE { !alive } else { holds(&body, sandbox.id()) && status.is_success() };
    if alive {
        sandbox.kill().await?;
    }
    Ok(if reached {
        Sight::Reached(format!("the answer was {status}"))
    } else {
        Sight::Held(format!("the answer was {status}, and the sandbox lives"))
    })
}

/// The weaker key is one that was not revoked.
async fn revoked(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let scene = aim.ground.scene()?;
    let (id, secret) = key(scene, "default")?;
    if !aim.control {
        command(scene, &["key", "revoke", &id])?;
    }
    let request = Request::builder()
        .uri(format!("{}/v2/sandboxes", aim.ground.endpoint.url))
        .header("x-api-key", secret)
        .body(Full::from(Bytes::new()))?;
    let (status, _) = send(request).await?;
    Ok(if status == StatusCode::OK {
        Sight::Reached("the sandboxes were listed".into())
    } else {
        Sight::Held(format!("the answer was {status}"))
    })
}

/// The agent is process 1 inside; where nothing isolates, it is the parent of what it starts.
async fn memory(aim: Aim<'_>) -> anyhow::Result<Sight> {
    let sandbox = aim.ground.sandbox().await?;
    let said = sandbox.run(&["sh", "-c", "echo $PPID"]).await?;
    let agent = String::from_utf8_lossy(&said.stdout).trim().to_owned();
    let token = sandbox.reach.token.clone().context("the sandbox has no token")?;
    let said = sandbox.probe_as("memory", &[&agent], "user").await?;
    Ok(if said.tells(&token) {
        Sight::Reached("the token was told".into())
    } else {
        Sight::Held(format!("the token was not told ({})", said.words()))
    })
}
