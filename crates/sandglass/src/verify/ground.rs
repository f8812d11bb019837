//! Where attacks are carried out: servers, and the sandboxes in them.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use fs_err as fs;
use sandglass_types::InstanceId;
use serde_json::{Value, json};
use tokio::sync::{Mutex, OnceCell};

use super::canary::Canaries;
use super::egress::Fence;
use super::probes::lifecycle::Cycled;
use super::probes::limits;
use super::sandbox::{LIFETIME, Sandbox};
use super::secrets::{Place, Secrets};
use super::server::{self, Endpoint, Server, Setup};
use super::stage::{DISK, Plan};
use crate::cli::Engine;
use crate::guest_binary;

/// The guest's binary in a sandbox of gVisor.
pub(super) const GUEST: &str = "/usr/lib/sandglass/guest";

/// A server, as attacks use it.
#[derive(Debug)]
pub(super) struct Ground {
    pub(super) endpoint: Endpoint,
    /// What attacks are after, if it is on this machine.
    around: Option<Arc<Surroundings>>,
    /// What all grounds of a stage share. There is none if the server is not on a stage.
    stage: Option<Arc<Scene>>,
    /// The guest's binary inside.
    guest: String,
    /// The sandbox of probes that do it no harm.
    shared: Mutex<Option<Arc<Sandbox>>>,
}

/// What is around the sandboxes of servers of this machine.
#[derive(Debug)]
pub(super) struct Surroundings {
    pub(super) secrets: Secrets,
    pub(super) canaries: Canaries,
}

/// What is on the stage besides servers.
#[derive(Debug)]
pub(super) struct Scene {
    pub(super) around: Arc<Surroundings>,
    /// The cache folders of all servers.
    pub(super) caches: Vec<PathBuf>,
    /// The strict server, to be killed and started again.
    pub(super) setup: Setup,
    pub(super) server: Mutex<Server>,
    /// Where it is tried to get something out.
    pub(super) fence: Fence,
    pub(super) instance: InstanceId,
    /// What many sandboxes left, once that was looked at.
    pub(super) cycled: OnceCell<Cycled>,
    /// How many sandboxes make a proof that nothing is left.
    pub(super) cycles: u32,
}

/// A probe's witness would be on a stage, and there is none.
#[derive(Debug, thiserror::Error)]
#[error("there is no stage")]
pub(super) struct NoStage;

/// All of them.
#[derive(Debug)]
pub(super) struct Grounds {
    pub(super) strict: Arc<Ground>,
    /// None where there are no controls.
    pub(super) weak: Option<Weak>,
}

/// Those where attacks must succeed.
#[derive(Debug)]
pub(super) struct Weak {
    pub(super) bare: Arc<Ground>,
}

impl Ground {
    /// Where a server is that is not on a stage.
    pub(super) fn there(endpoint: Endpoint, guest: String, around: Option<Arc<Surroundings>>) -> Arc<Self> {
        Arc::new(Self { endpoint, around, stage: None, guest, shared: Mutex::default() })
    }

    fn on_stage(scene: &Arc<Scene>, endpoint: Endpoint, guest: &str) -> Arc<Self> {
        let (around, stage) = (Some(Arc::clone(&scene.around)), Some(Arc::clone(scene)));
        Arc::new(Self { endpoint, around, stage, guest: guest.to_owned(), shared: Mutex::default() })
    }

    /// What attacks are after, for probes whose witness looks at that.
    pub(super) fn around(&self) -> Result<&Surroundings, NoStage> {
        self.around.as_deref().ok_or(NoStage)
    }

    /// A sandbox that other probes use, too. One that an attack ended is replaced.
    pub(super) async fn sandbox(&self) -> anyhow::Result<Arc<Sandbox>> {
        let mut shared = self.shared.lock().await;
        if let Some(sandbox) = &*shared
            && sandbox.run(&["true"]).await.is_ok_and(|said| said.code == Some(0))
        {
            return Ok(Arc::clone(sandbox));
        }
        let sandbox = Arc::new(self.fresh(&json!({})).await?);
        *shared = Some(Arc::clone(&sandbox));
        Ok(sandbox)
    }

    /// A sandbox for this probe alone. `more` is put over the usual request.
    pub(super) async fn fresh(&self, more: &Value) -> anyhow::Result<Sandbox> {
        Sandbox::create(&self.endpoint, &self.guest, more).await
    }

    /// A sandbox for this probe alone, whose guest API wants no token.
    pub(super) async fn fresh_open(&self) -> anyhow::Result<Sandbox> {
        Sandbox::create_open(&self.endpoint, &self.guest).await
    }

    /// The stage, for probes whose witness is there.
    pub(super) fn scene(&self) -> Result<&Scene, NoStage> {
        self.stage.as_deref().ok_or(NoStage)
    }

    /// Ends the sandbox that probes shared.
    pub(super) async fn close(&self) -> anyhow::Result<()> {
        match self.shared.lock().await.take() {
            Some(sandbox) => sandbox.kill().await,
            None => Ok(()),
        }
    }
}

impl Grounds {
    /// Starts the servers of a stage.
    pub(super) async fn open(plan: &Plan) -> anyhow::Result<Self> {
        let secrets = Secrets::new();
        // The name of the folder is one, so that a path of the stage that is seen inside tells it.
        let home = PathBuf::from(DISK).join(secrets.at(Place::Folder));
        let folder = |name: &str| home.join(name);
        let bare_cache = folder("cache");
        fs::create_dir_all(&bare_cache)?;
        server::name(&folder("strict"), &plan.strict, Engine::Gvisor)?;
        server::name(&folder("bare"), &plan.bare, Engine::Fake)?;
        server::name(&folder("fence"), &plan.fence, Engine::Gvisor)?;
        let setup = Setup {
            folder: folder("strict"),
            cache: plan.cache.clone(),
            engine: Engine::Gvisor,
            config: toml::to_string(&json!({"runsc": plan.runsc}))? + limits::CONFIG,
            env: vec![("PROVIDER_API_KEY", secrets.at(Place::ServerEnvironment).to_owned())],
        };
        let bare_setup = Setup {
            folder: folder("bare"),
            cache: bare_cache.clone(),
            engine: Engine::Fake,
            config: String::new(),
            env: Vec::new(),
        };
        // An own copy, because an attack on it succeeds in the sandboxes that nothing isolates.
        let bare_guest = guest_binary::install(&bare_cache, None)?;
        let bare_guest = bare_guest.to_str().context("a path is no text")?.to_owned();
        let canaries = Canaries::place(&home, &secrets, &plan.guest)?;
        let (server, bare) =
            tokio::try_join!(setup.start("127.0.0.1:0", None), bare_setup.start("127.0.0.1:0", None))?;
        let fence = Fence::new(folder("fence"), plan)?;
        let strict = server.endpoint.clone();
        // Its environment is stored, for attacks that are after that.
        let told = json!({"envVars": {"SECRET": secrets.at(Place::Store)}, "timeout": LIFETIME});
        Sandbox::create(&strict, GUEST, &told).await?;
        let around = Arc::new(Surroundings { secrets, canaries });
        let scene = Arc::new(Scene {
            around,
            caches: vec![plan.cache.clone(), bare_cache],
            setup,
            server: Mutex::new(server),
            fence,
            instance: plan.strict.clone(),
            cycled: OnceCell::new(),
            cycles: plan.cycles,
        });
        Ok(Self {
            strict: Ground::on_stage(&scene, strict, GUEST),
            weak: Some(Weak { bare: Ground::on_stage(&scene, bare.endpoint, &bare_guest) }),
        })
    }
}
