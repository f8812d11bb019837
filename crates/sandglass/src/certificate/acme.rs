//! `sandglass acme`: asks an authority for a certificate (RFC 8555), without any privilege.
//!
//! The certificate is for all names below a domain, and the one proof that authorities accept for that is a record in the
//! domain's zone (RFC 8555, section 8.4). Only the operator knows how one gets there, so a program of theirs puts it there. The keeper,
//! which started this process, runs that program, and has the key: it hands in a request that is signed already.

use std::io::{BufRead as _, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use instant_acme::{
    Account, AccountBuilder, AccountCredentials, AuthorizationStatus, ChallengeType, Error, Identifier,
    NewAccount, NewOrder, Order as Placed, OrderStatus, RetryPolicy,
};
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use sandglass_linux::privilege::{Identity, drop_to};
use serde::{Deserialize, Serialize};

use super::{contents, keeper, replace};
use crate::config::tls::Acme;

/// How long an authority may take to look at a record, or to make a certificate.
const PATIENCE: Duration = Duration::from_secs(180);

/// How long the operator's program may take until the world can see a record.
const RECORD_PATIENCE: Duration = Duration::from_secs(300);

/// How long all of it may take.
const ALL: Duration = Duration::from_secs(14 * 60);

/// The longest line of that process, in bytes.
const MAX_LINE: usize = 1 << 20;

/// How often it is looked whether the operator's program has ended.
const LOOK: Duration = Duration::from_millis(50);

/// Who speaks with the authority.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct User {
    uid: u32,
    gid: u32,
}

impl From<Identity> for User {
    fn from(Identity { uid, gid }: Identity) -> Self {
        Self { uid, gid }
    }
}

/// What is ordered.
pub(super) struct Order<'a> {
    pub(super) acme: &'a Acme,
    /// The domain, without a port.
    pub(super) name: String,
    /// A signed request for it and all below it (PKCS #10), in DER.
    pub(super) request: Vec<u8>,
}

/// The first line to the process without privilege.
#[derive(Debug, Serialize, Deserialize)]
struct Wanted {
    acme: Acme,
    name: String,
    request: Vec<u8>,
    user: Option<User>,
    /// Who vouches for the authority's server, in PEM; whatever this machine trusts if `None`.
    trusted: Option<Vec<u8>>,
    /// What it said of its account before.
    account: Option<Known>,
}

/// An account, and where it is one.
#[derive(Debug, Serialize, Deserialize)]
struct Known {
    directory: String,
    credentials: serde_json::Value,
}

/// What that process says. Each line but the last is answered by one: why it could not be done, or nothing.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Says {
    /// It has a new account.
    Account(Known),
    /// A record is needed, beside others of the same name.
    Present(Value),
    /// It is not needed any more.
    Clean(Value),
    /// The certificate, and those between it and what clients trust, in PEM.
    Chain(String),
    /// There is none.
    Failed(String),
}

/// What a record proves the domain by: a SHA-256 digest in base64url (RFC 8555, section 8.4). It becomes an argument of the
/// operator's program, and who says it reads what comes over a network.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "String")]
struct Value(String);

impl TryFrom<String> for Value {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let digest = |text: &str| {
            text.len() == 43 && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
        };
        if digest(&text) { Ok(Self(text)) } else { Err("not what a record proves a domain by") }
    }
}

impl Order<'_> {
    /// Has it done by a process without privilege, which is killed once nobody listens to this one any more; then it is `None`. The
    /// account is kept in a file.
    pub(super) fn place(self, account: &Path, user: Option<User>) -> anyhow::Result<Option<String>> {
        let wanted = Wanted {
            account: known(account).filter(|known| known.directory == self.acme.directory),
            acme: self.acme.clone(),
            name: self.name,
            request: self.request,
            user,
            trusted: self.acme.authority.as_deref().map(contents).transpose()?,
        };
        let mut child = Command::new("/proc/self/exe")
            .arg("acme")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("the process that asks an authority can't be started")?;
        let outcome = serve(&mut child, &wanted, account);
        // It has nothing more to do, whatever came of it.
        let _gone = child.kill();
        child.wait()?;
        outcome
    }
}

fn serve(child: &mut Child, wanted: &Wanted, account: &Path) -> anyhow::Result<Option<String>> {
    let mut to = child.stdin.take().context("it has no standard input")?;
    let pipe = child.stdout.take().context("it has no standard output")?;
    let mut from = Pieces { pipe, read: Vec::new() };
    tell(&mut to, wanted)?;
    let deadline = Instant::now() + ALL;
    loop {
        let Some(line) = next_line(&mut from, deadline)? else { return Ok(None) };
        let outcome = match serde_json::from_str(&line).context("it said something odd")? {
            Says::Chain(chain) => return Ok(Some(chain)),
            Says::Failed(why) => {
                bail!("the authority at {} gave no certificate: {why}", wanted.acme.directory)
            }
            Says::Account(known) => {
                replace(account, &serde_json::to_vec(&known)?, 0o600)?;
                Some(Ok(()))
            }
            Says::Present(value) => change(wanted, "present", &value)?,
            Says::Clean(value) => change(wanted, "clean", &value)?,
        };
        let Some(outcome) = outcome else { return Ok(None) };
        tell(&mut to, &outcome)?;
    }
}

fn tell(to: &mut ChildStdin, what: &impl Serialize) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *to, what)?;
    Ok(to.write_all(b"\n")?)
}

/// The next line, which may come in pieces; `None` once nobody listens to this process any more.
fn next_line(from: &mut Pieces, deadline: Instant) -> anyhow::Result<Option<String>> {
    loop {
        if let Some(end) = from.read.iter().position(|&byte| byte == b'\n') {
            let line = from.read.drain(..=end).collect();
            return Ok(Some(String::from_utf8(line)?));
        }
        if from.read.len() > MAX_LINE {
            bail!("the process that asks the authority says too much");
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("it took longer than {} minutes", ALL.as_secs() / 60);
        }
        match keeper::wait(Some(from.pipe.as_fd()), left)? {
            None => return Ok(None),
            Some(false) => continue,
            Some(true) => {}
        }
        let mut piece = [0; 4096];
        match from.pipe.read(&mut piece)? {
            0 => bail!("the process that asks the authority ended"),
            len => from.read.extend(&piece[..len]),
        }
    }
}

/// What the process without privilege has said.
struct Pieces {
    pipe: ChildStdout,
    /// What of it was not taken yet.
    read: Vec<u8>,
}

/// Whether the account that is kept in this file is one of the authority with that directory.
pub(super) fn is_of(account: &Path, directory: &str) -> bool {
    known(account).is_some_and(|known| known.directory == directory)
}

fn known(account: &Path) -> Option<Known> {
    serde_json::from_slice(&contents(account).ok()?).ok()
}

/// Has the operator's program do something with a record. `None` once nobody listens to this process any more.
fn change(wanted: &Wanted, verb: &str, value: &Value) -> anyhow::Result<Option<Result<(), String>>> {
    let (program, name) = (&wanted.acme.dns, format!("_acme-challenge.{}", wanted.name));
    tracing::info!(verb, name, "asking for a record in the domain's zone");
    let started = Command::new(program)
        .args([verb, &name, &value.0])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    let mut running = match started {
        Ok(running) => running,
        Err(error) => return Ok(Some(Err(format!("{} can't be started: {error}", program.display())))),
    };
    let deadline = Instant::now() + RECORD_PATIENCE;
    loop {
        if let Some(status) = running.try_wait()? {
            let failed = || format!("{} {verb} {name} ended with {status}", program.display());
            return Ok(Some(if status.success() { Ok(()) } else { Err(failed()) }));
        }
        let listened_to = keeper::wait(None, LOOK)?.is_some();
        let late = Instant::now() >= deadline;
        if late || !listened_to {
            running.kill()?;
            running.wait()?;
        }
        if !listened_to {
            return Ok(None);
        }
        if late {
            let seconds = RECORD_PATIENCE.as_secs();
            return Ok(Some(Err(format!("{} {verb} took longer than {seconds} s", program.display()))));
        }
    }
}

/// Is the process without privilege.
pub(crate) fn run() -> anyhow::Result<()> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let wanted: Wanted = serde_json::from_str(&line)?;
    if let Some(User { uid, gid }) = wanted.user {
        drop_to(Identity { uid, gid })?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let last = match runtime.block_on(ask(&wanted)) {
        Ok(chain) => Says::Chain(chain),
        Err(error) => Says::Failed(format!("{error:#}")),
    };
    send(&last)
}

fn send(says: &Says) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, says)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Says it, and waits until it was done.
fn have_done(says: &Says) -> anyhow::Result<()> {
    send(says)?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    serde_json::from_str::<Result<(), String>>(&answer)?.map_err(anyhow::Error::msg)
}

async fn ask(wanted: &Wanted) -> anyhow::Result<String> {
    let names = [Identifier::Dns(wanted.name.clone()), Identifier::Dns(format!("*.{}", wanted.name))];
    let new = NewOrder::new(&names);
    let mut order = match &wanted.account {
        None => new_account(wanted).await?.new_order(&new).await?,
        Some(known) => {
            let credentials: AccountCredentials = serde_json::from_value(known.credentials.clone())?;
            let known = builder(wanted)?.from_credentials(credentials).await?;
            match known.new_order(&new).await {
                // Some authorities forget accounts.
                Err(Error::Api(problem)) if problem.r#type.as_deref() == Some(NO_ACCOUNT) => {
                    new_account(wanted).await?.new_order(&new).await?
                }
                order => order?,
            }
        }
    };
    let mut records = Vec::new();
    let outcome = prove(wanted, &mut order, &mut records).await;
    for record in records {
        // The certificate is there or not: a record that stays harms nobody.
        if let Err(error) = have_done(&Says::Clean(record)) {
            tracing::warn!("a record stays in the domain's zone: {error:#}");
        }
    }
    outcome
}

/// What speaks with the authority, and trusts its server by what the operator says.
fn builder(wanted: &Wanted) -> anyhow::Result<AccountBuilder> {
    let Some(trusted) = &wanted.trusted else { return Ok(Account::builder()?) };
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(trusted) {
        roots.add(root.context("tls.acme.authority holds no certificate in PEM")?)?;
    }
    let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_only().enable_http1().build();
    Ok(Account::builder_with_http(Box::new(Client::builder(TokioExecutor::new()).build(connector))))
}

/// What an authority says that does not know an account (RFC 8555, section 6.7).
const NO_ACCOUNT: &str = "urn:ietf:params:acme:error:accountDoesNotExist";

/// Makes an account.
async fn new_account(wanted: &Wanted) -> anyhow::Result<Account> {
    let contact: Vec<&str> = wanted.acme.contact.iter().map(String::as_str).collect();
    // The configuration says that they are agreed to.
    let new = NewAccount { contact: &contact, terms_of_service_agreed: true, only_return_existing: false };
    let directory = wanted.acme.directory.clone();
    let (account, credentials) = builder(wanted)?.create(&new, directory.clone(), None).await?;
    have_done(&Says::Account(Known { directory, credentials: serde_json::to_value(credentials)? }))?;
    Ok(account)
}

/// Proves that the domain is this server's, and gets the certificate.
async fn prove(wanted: &Wanted, order: &mut Placed, records: &mut Vec<Value>) -> anyhow::Result<String> {
    let retries = RetryPolicy::new().timeout(PATIENCE);
    // All records first: they have one name, and who looked at it for the first would remember that the second is not there.
    let mut authorizations = order.authorizations();
    while let Some(authorization) = authorizations.next().await {
        let mut authorization = authorization?;
        match authorization.status {
            AuthorizationStatus::Pending => {}
            AuthorizationStatus::Valid => continue,
            status => bail!("it may not be proved that the domain is this server's: {status:?}"),
        }
        let challenge = authorization
            .challenge(ChallengeType::Dns01)
            .context("it takes no record in the domain's zone for a proof")?;
        let value = Value::try_from(challenge.key_authorization().dns_value()).map_err(anyhow::Error::msg)?;
        records.push(value.clone());
        have_done(&Says::Present(value))?;
    }
    let mut authorizations = order.authorizations();
    while let Some(authorization) = authorizations.next().await {
        let mut authorization = authorization?;
        if authorization.status == AuthorizationStatus::Pending
            && let Some(mut challenge) = authorization.challenge(ChallengeType::Dns01)
        {
            challenge.set_ready().await?;
        }
    }
    match order.poll_ready(&retries).await? {
        OrderStatus::Ready => {}
        status => bail!("it did not find the record in the domain's zone: {status:?}"),
    }
    order.finalize_csr(&wanted.request).await?;
    Ok(order.poll_certificate(&retries).await?)
}
