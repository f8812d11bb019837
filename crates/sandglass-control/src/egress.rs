//! What sandboxes may reach: the operator's side of it, put behind what each asks for.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fs_err as fs;
use sandglass_egress::enforcer::{Enforcer, Ledger, NoRoom, Settings};
use sandglass_egress::ledger::{self, FileLedger};
use sandglass_egress::policy::{Edge, Effective, Operator, Policy, Service, Services, Surroundings, Warning};
use sandglass_egress::proxy::{Caps, Dial};
use sandglass_egress::receipt::Head;
use sandglass_egress::remembered::Remembered;
use sandglass_egress::resolver::Resolve;
use sandglass_egress::retention::{self, Retention};
use sandglass_egress::totals::Totals;
use sandglass_engine::network::{AIRLOCK_ADDRESS, AIRLOCK_NETWORK, PREFIX_LEN};
use sandglass_linux::netlink::Rtnetlink;
use sandglass_store::SandboxRow;
use sandglass_types::error::Chain;
use sandglass_types::net::{Cidr, Hostname};
use sandglass_types::{Error, ErrorKind, SandboxId};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::shared::Shared;

/// The operator's side.
#[derive(Debug, Clone)]
pub struct Egress {
    /// What any sandbox may be allowed.
    pub operator: Operator,
    /// Who is asked about names.
    pub resolver: Arc<dyn Resolve>,
    /// The folder of the receipts, made when first needed.
    pub receipts: PathBuf,
    /// How long receipts of sandboxes that ended are kept.
    pub retention: Retention,
    /// What the connections of one sandbox may take.
    pub caps: Caps,
    /// Who makes those that are allowed.
    pub dial: Arc<dyn Dial>,
    /// The server's own domain, if it has one: names below it are answered by the server itself.
    pub domain: Option<Hostname>,
    /// What all sandboxes did together.
    pub totals: Arc<Totals>,
}

/// How long to wait after something was learned, for more to come.
const SETTLE: Duration = Duration::from_secs(1);

/// How often the file of a sandbox is written at most, and its counts if nothing was learned.
const REMEMBER_EVERY: Duration = Duration::from_secs(30);

/// What the server does itself for a sandbox.
pub(crate) fn services(row: &SandboxRow) -> BTreeSet<Service> {
    let models = row.models.is_some().then_some(Service::Models);
    let connections = (!row.connections.is_empty()).then_some(Service::Connections);
    models.into_iter().chain(connections).collect()
}

/// The enforcers of the sandboxes that run here, for what else is written down among their receipts.
#[derive(Debug, Default)]
pub(crate) struct Enforcers(Mutex<HashMap<SandboxId, Arc<Enforcer>>>);

impl Enforcers {
    fn all(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Enforcer>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn insert(&self, enforcer: &Arc<Enforcer>) {
        self.all().insert(enforcer.sandbox().clone(), Arc::clone(enforcer));
    }

    pub(crate) fn remove(&self, sandbox: &SandboxId) {
        self.all().remove(sandbox);
    }

    pub(crate) fn get(&self, sandbox: &SandboxId) -> Option<Arc<Enforcer>> {
        self.all().get(sandbox).cloned()
    }
}

impl Egress {
    /// What a request comes to now, with what the sandbox was granted, and what its author should know about it.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if it names what this server does not have, or the addresses of this machine can't be read.
    pub(crate) fn effective(
        &self,
        request: &Policy,
        granted: BTreeSet<Service>,
    ) -> Result<(Effective, Vec<Warning>), Error> {
        let surroundings = surroundings(self.domain.clone())?;
        let (effective, warnings) = Effective::new(request, &self.operator, surroundings)
            .map_err(|unknown| Error::new(ErrorKind::Invalid, unknown.to_string()))?;
        Ok((effective.granting(Services { address: AIRLOCK_ADDRESS, granted }), warnings))
    }

    async fn take_up(
        &self,
        row: &SandboxRow,
        tasks: &TaskTracker,
    ) -> Result<(Effective, FileLedger, Option<Head>, Remembered), Error> {
        let (policy, _) = self.effective(&row.policy, services(row))?;
        let unusable = |error: io::Error| Error::internal("the receipts can't be kept", error);
        let folder = self.receipts.join(row.id.as_str());
        fs::create_dir_all(&folder).map_err(unusable)?;
        let remembered = Remembered::read(&folder).unwrap_or_else(|error| {
            tracing::warn!(sandbox = %row.id, %error, "what it resolved is forgotten");
            None
        });
        let (ledger, head) = FileLedger::open(folder, row.id.clone(), tasks).await.map_err(unusable)?;
        Ok((policy, ledger, head, remembered.unwrap_or_default()))
    }

    /// Removes what is not kept any more of sandboxes that ended.
    pub(crate) async fn sweep(&self, shared: &Arc<Shared>) {
        let (folder, retention, shared) = (self.receipts.clone(), self.retention, Arc::clone(shared));
        let now = SystemTime::now();
        let swept = tokio::task::spawn_blocking(move || {
            retention::sweep(&folder, retention, now, || {
                let owned = shared.owned();
                Box::new(move |id| owned.contains(id))
            })
        });
        match swept.await.map_err(io::Error::other).flatten() {
            Ok(0) => {}
            Ok(sandboxes) => tracing::info!(sandboxes, "old receipts are removed"),
            Err(error) => tracing::error!(%error, "old receipts could not be removed"),
        }
    }

    /// The last receipts of a sandbox: at most `limit` lines, oldest first.
    ///
    /// # Errors
    /// They can't be read.
    pub(crate) async fn receipts(&self, id: &SandboxId, limit: usize) -> Result<Vec<String>, Error> {
        let folder = self.receipts.join(id.as_str());
        let read = tokio::task::spawn_blocking(move || ledger::newest(&folder, limit)).await;
        let unreadable = |error: io::Error| Error::internal("the receipts can't be read", error);
        read.map_err(|error| unreadable(io::Error::other(error)))?.map_err(unreadable)
    }
}

/// What is near the sandboxes of this machine.
fn surroundings(domain: Option<Hostname>) -> Result<Surroundings, Error> {
    let addresses = Rtnetlink::open().and_then(|mut netlink| netlink.addresses());
    let addresses =
        addresses.map_err(|error| Error::internal("the addresses of this machine can't be read", error))?;
    Ok(Surroundings {
        server: addresses.into_iter().map(|address| Cidr::from(address.to_canonical())).collect(),
        sandboxes: vec![Cidr::v4(AIRLOCK_NETWORK, PREFIX_LEN)],
        edge: domain.map(|domain| Edge { domain, address: AIRLOCK_ADDRESS }),
    })
}

/// Takes up the enforcement of a sandbox's policy, as it is stored. Where that can't be done now, or its receipts can't be
/// kept, it is sealed. The receipts are written by a task among `tasks`, which ends with the enforcer.
pub(crate) async fn enforcer(shared: &Shared, row: &SandboxRow, tasks: &TaskTracker) -> Arc<Enforcer> {
    let egress = &shared.config.egress;
    let (policy, ledger, head, remembered) = match egress.take_up(row, tasks).await {
        Ok((policy, ledger, head, remembered)) => {
            (policy, Arc::new(ledger) as Arc<dyn Ledger>, head, remembered)
        }
        Err(error) => {
            tracing::error!(sandbox = %row.id, error = %Chain(&error), "its policy can't be enforced, so it is sealed");
            (Effective::sealed(), Arc::new(Unkept) as Arc<dyn Ledger>, None, Remembered::default())
        }
    };
    Enforcer::new(Settings {
        sandbox: row.id.clone(),
        generation: row.generation,
        policy,
        remembered,
        head,
        ledger,
        resolver: Arc::clone(&egress.resolver),
        clock: Arc::clone(&shared.clock),
        totals: Arc::clone(&egress.totals),
    })
}

/// Keeps for the next server what that must know of a sandbox, until `gone`. Written a moment after something was learned;
/// what comes in the moments before this server dies is lost, and a program that asks again has it again.
pub(crate) async fn remember(enforcer: Arc<Enforcer>, folder: PathBuf, gone: CancellationToken) {
    let (mut kept, mut fails) = (enforcer.carried(), false);
    loop {
        let learned = tokio::select! {
            () = gone.cancelled() => true,
            () = enforcer.learned() => {
                gone.run_until_cancelled(sleep(SETTLE)).await;
                true
            }
            () = sleep(REMEMBER_EVERY) => false,
        };
        if learned || enforcer.carried() != kept {
            let (remembered, folder) = (enforcer.remembered(), folder.clone());
            kept = remembered.carried;
            let written = tokio::task::spawn_blocking(move || remembered.write(&folder)).await;
            let outcome = written.map_err(io::Error::other).flatten();
            if let Err(error) = &outcome
                && !fails
            {
                tracing::warn!(%error, "what a sandbox resolved can't be kept for the next server");
            }
            fails = outcome.is_err();
        }
        if gone.is_cancelled() {
            return;
        }
        if learned {
            gone.run_until_cancelled(sleep(REMEMBER_EVERY)).await;
        }
    }
}

/// The ledger of a sandbox whose own can't be used.
#[derive(Debug)]
struct Unkept;

impl Ledger for Unkept {
    fn append(&self, _: String) -> Result<(), NoRoom> {
        Err(NoRoom)
    }
}
