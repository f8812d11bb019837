//! What sandboxes may reach: the operator's side of it, put behind what each asks for.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use fs_err as fs;
use sandglass_egress::bindings::SavedBindings;
use sandglass_egress::enforcer::{Enforcer, Ledger, NoRoom, Settings};
use sandglass_egress::ledger::{self, FileLedger};
use sandglass_egress::policy::{Effective, Operator, Policy, Surroundings, Warning};
use sandglass_egress::receipt::Head;
use sandglass_egress::resolver::Resolve;
use sandglass_engine::network::{AIRLOCK_NETWORK, PREFIX_LEN};
use sandglass_linux::netlink::Rtnetlink;
use sandglass_store::SandboxRow;
use sandglass_types::error::Chain;
use sandglass_types::net::Cidr;
use sandglass_types::{Error, ErrorKind, SandboxId};
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
}

impl Egress {
    /// What a request comes to now, and what its author should know about it.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if it names what this server does not have, or the addresses of this machine can't be read.
    pub(crate) fn effective(&self, request: &Policy) -> Result<(Effective, Vec<Warning>), Error> {
        let surroundings = surroundings()?;
        Effective::new(request, &self.operator, surroundings)
            .map_err(|unknown| Error::new(ErrorKind::Invalid, unknown.to_string()))
    }

    async fn take_up(
        &self,
        row: &SandboxRow,
        tasks: &TaskTracker,
    ) -> Result<(Effective, FileLedger, Option<Head>), Error> {
        let (policy, _) = self.effective(&row.policy)?;
        let unusable = |error: io::Error| Error::internal("the receipts can't be kept", error);
        let folder = self.receipts.join(row.id.as_str());
        fs::create_dir_all(&folder).map_err(unusable)?;
        let (ledger, head) = FileLedger::open(folder, row.id.clone(), tasks).await.map_err(unusable)?;
        Ok((policy, ledger, head))
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
fn surroundings() -> Result<Surroundings, Error> {
    let addresses = Rtnetlink::open().and_then(|mut netlink| netlink.addresses());
    let addresses =
        addresses.map_err(|error| Error::internal("the addresses of this machine can't be read", error))?;
    Ok(Surroundings {
        server: addresses.into_iter().map(|address| Cidr::from(address.to_canonical())).collect(),
        sandboxes: vec![Cidr::v4(AIRLOCK_NETWORK, PREFIX_LEN)],
    })
}

/// Takes up the enforcement of a sandbox's policy, as it is stored. Where that can't be done now, or its receipts can't be
/// kept, it is sealed.
pub(crate) async fn enforcer(shared: &Shared, row: &SandboxRow) -> Arc<Enforcer> {
    let egress = &shared.config.egress;
    let (policy, ledger, head) = match egress.take_up(row, &shared.tasks).await {
        Ok((policy, ledger, head)) => (policy, Arc::new(ledger) as Arc<dyn Ledger>, head),
        Err(error) => {
            tracing::error!(sandbox = %row.id, error = %Chain(&error), "its policy can't be enforced, so it is sealed");
            (Effective::sealed(), Arc::new(Unkept) as Arc<dyn Ledger>, None)
        }
    };
    Enforcer::new(Settings {
        sandbox: row.id.clone(),
        generation: row.generation,
        policy,
        // What a server before this one knew of names is lost with it; a program that asks again has it again.
        bindings: SavedBindings::default(),
        head,
        ledger,
        resolver: Arc::clone(&egress.resolver),
        clock: Arc::clone(&shared.clock),
    })
}

/// The ledger of a sandbox whose own can't be used.
#[derive(Debug)]
struct Unkept;

impl Ledger for Unkept {
    fn append(&self, _: String) -> Result<(), NoRoom> {
        Err(NoRoom)
    }
}
