//! The create request: what is understood, what is refused by name, and its digest for idempotency.

use std::collections::BTreeMap;
use std::time::Duration;

use sandglass_broker::ConnectionName;
use sandglass_broker::rules::Rules;
use sandglass_control::{AskedVolume, CreateSandbox};
use sandglass_egress::policy::{Ingress, Network, Policy, from_e2b, ingress_from_e2b};
use sandglass_store::IdempotencyKey;
use sandglass_types::volume::{InvalidMountPath, InvalidVolumeName};
use sandglass_types::{Digest, Lifetime, OnTimeout};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use utoipa::ToSchema;

use crate::body::{Object, Seconds};
use crate::error::ApiError;

/// How long a sandbox of `POST /v2/sandboxes` lives if the client does not say, in seconds.
const DEFAULT_TIMEOUT_V2: Seconds = Seconds(300);

/// How long a sandbox of `POST /sandboxes` lives if the client does not say, in seconds.
const DEFAULT_TIMEOUT_V1: Seconds = Seconds(15);

/// Which create endpoint a request came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Face {
    /// `POST /sandboxes`: the client says whether the guest API wants a token.
    V1,
    /// `POST /v2/sandboxes`: it always does.
    V2,
}

/// The body of `POST /sandboxes` and `POST /v2/sandboxes`. Unknown fields are ignored and `null` is the same as
/// absent, as clients expect.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NewSandbox {
    #[serde(rename = "templateID")]
    template_id: String,
    /// Lifetime in seconds.
    #[schema(value_type = Option<i64>)]
    timeout: Option<Seconds>,
    /// v1 only: whether the guest API wants an access token.
    secure: Option<bool>,
    metadata: Option<BTreeMap<String, String>>,
    /// Environment of every process.
    env_vars: Option<BTreeMap<String, String>>,
    /// `true` unless given; either way a sandbox reaches no more than the operator's ceiling.
    #[serde(rename = "allow_internet_access")]
    allow_internet_access: Option<bool>,
    /// Whether it is paused when its time is up, and not ended.
    auto_pause: Option<bool>,
    /// Whether its memory is kept then, which is so if absent. Only with `autoPause`.
    auto_pause_memory: Option<bool>,
    /// The same as at its timeout happens when nobody has used it for so long, in seconds: no connection was open, and no
    /// command ran. The operator's default if absent; 0 is never. E2B has no such field.
    #[schema(value_type = Option<i64>)]
    idle_timeout: Option<Seconds>,
    /// Whether a request to one of its ports makes it run again. Only with `autoPause` and its memory.
    #[schema(value_type = Option<AutoResume>)]
    auto_resume: Option<Object<AutoResume>>,
    /// `allowOut`, `denyOut`, `allowPublicTraffic` and `maskRequestHost`; of the other options only what is so anyway.
    #[schema(value_type = Option<Object>)]
    network: Option<Object<Network>>,
    /// Only `null`.
    #[schema(value_type = Option<Object>)]
    mcp: Option<Value>,
    /// Only without `tokens`.
    #[schema(value_type = Option<Object>)]
    iam: Option<Object<Iam>>,
    /// Volumes of the team by their names, each at a path of its own; at most 8.
    #[schema(value_type = Option<Vec<Mount>>)]
    volume_mounts: Option<Vec<Object<Mount>>>,
    /// Connections that it may use, by their names, each at `http://NAME.broker.internal`; none if absent, and at most 16. E2B has no
    /// such field.
    connections: Option<Vec<String>>,
}

/// The body field `autoResume`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct AutoResume {
    enabled: Option<bool>,
}

/// An entry of the body field `volumeMounts`.
#[derive(Debug, Deserialize, ToSchema)]
struct Mount {
    name: String,
    /// Absolute, and none that the computer itself needs.
    path: String,
}

/// The body field `iam`.
#[derive(Debug, Default, Deserialize)]
struct Iam {
    tokens: Option<serde_json::Map<String, Value>>,
}

/// A create request that this version can fulfil.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Accepted {
    pub(crate) template: String,
    pub(crate) timeout: Duration,
    /// Not in the digest of a request that asks for what was always so.
    #[serde(skip_serializing_if = "ends")]
    pub(crate) on_timeout: OnTimeout,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) idle_timeout: Option<Duration>,
    pub(crate) secured: bool,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) allow_internet_access: Option<bool>,
    pub(crate) policy: Policy,
    pub(crate) ingress: Ingress,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) volumes: Vec<AskedVolume>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) connections: Vec<ConnectionName>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes it like that")]
fn ends(on_timeout: &OnTimeout) -> bool {
    *on_timeout == OnTimeout::Kill
}

/// What a client wants to happen when the time of its sandbox is up.
///
/// # Errors
/// 400 for what makes no sense together.
fn on_timeout(pause: bool, memory: bool, auto_resume: bool) -> Result<OnTimeout, ApiError> {
    match (pause, memory, auto_resume) {
        (false, true, false) => Ok(OnTimeout::Kill),
        (true, true, auto_resume) => Ok(OnTimeout::Pause { auto_resume }),
        (true, false, false) => Ok(OnTimeout::PauseFilesystem),
        (false, false, _) => Err(ApiError::invalid("autoPauseMemory: false needs autoPause: true")),
        (false, true, true) => Err(ApiError::invalid("autoResume needs autoPause: true")),
        (true, false, true) => {
            let message = "autoResume needs memory: leave autoPauseMemory: false or autoResume out";
            Err(ApiError::invalid(message))
        }
    }
}

fn unsupported(field: &str) -> ApiError {
    ApiError::invalid(format!("{field} is not supported by this version of sandglass: leave it out"))
}

/// What a client's network options ask for.
///
/// # Errors
/// 400, in the words of E2B's server where it has some.
pub(crate) fn policy(network: &Network, internet: Option<bool>) -> Result<Policy, ApiError> {
    if let Some(rules) = &network.rules {
        let rules = Rules::read(rules).map_err(|error| ApiError::invalid(error.to_string()))?;
        if rules.change_anything() {
            let message = "network.rules with headers is not supported by this version of sandglass: leave it out, and make a \
                           connection for the host (PUT /v1/connections/{name}), which sandboxes reach by another name";
            return Err(ApiError::invalid(message));
        }
    }
    from_e2b(network, internet).map_err(|error| ApiError::invalid(error.to_string()))
}

/// How a client's network options want ports to be reached.
///
/// # Errors
/// 400.
pub(crate) fn ingress(network: &Network) -> Result<Ingress, ApiError> {
    ingress_from_e2b(network).map_err(|error| ApiError::invalid(error.to_string()))
}

impl NewSandbox {
    /// Checks the request and fills in the defaults of its endpoint.
    ///
    /// # Errors
    /// 400 that names the first field that can't be fulfilled.
    pub(crate) fn accept(self, face: Face) -> Result<Accepted, ApiError> {
        let auto_resume = self.auto_resume.is_some_and(|Object(resume)| resume.enabled == Some(true));
        let on_timeout =
            on_timeout(self.auto_pause == Some(true), self.auto_pause_memory != Some(false), auto_resume)?;
        let asked = [
            ("mcp", self.mcp.is_some()),
            ("iam", self.iam.and_then(|Object(iam)| iam.tokens).is_some_and(|tokens| !tokens.is_empty())),
        ];
        if let Some((field, _)) = asked.into_iter().find(|(_, asked)| *asked) {
            return Err(unsupported(field));
        }
        let volumes = self.volume_mounts.unwrap_or_default();
        let volumes =
            volumes.into_iter().map(|Object(mount)| asked_volume(&mount)).collect::<Result<_, _>>()?;
        let connections = self.connections.unwrap_or_default();
        let connections = connections.iter().map(|name| connection(name)).collect::<Result<_, _>>()?;
        let network = self.network.map(|Object(network)| network).unwrap_or_default();
        let policy = policy(&network, self.allow_internet_access)?;
        let ingress = ingress(&network)?;
        let default_timeout = match face {
            Face::V1 => DEFAULT_TIMEOUT_V1,
            Face::V2 => DEFAULT_TIMEOUT_V2,
        };
        Ok(Accepted {
            template: self.template_id,
            timeout: positive_seconds(self.timeout.unwrap_or(default_timeout))?,
            on_timeout,
            idle_timeout: self.idle_timeout.map(idle_seconds).transpose()?,
            secured: face == Face::V2 || self.secure == Some(true),
            metadata: self.metadata.unwrap_or_default(),
            env: self.env_vars.unwrap_or_default(),
            allow_internet_access: self.allow_internet_access,
            policy,
            ingress,
            volumes,
            connections,
        })
    }
}

/// A connection that a client asks for.
///
/// # Errors
/// 400: there can't be one of that name.
fn connection(name: &str) -> Result<ConnectionName, ApiError> {
    name.parse().map_err(|error| ApiError::invalid(format!("connections: {name:?}: {error}")))
}

/// A volume that a client asks for.
///
/// # Errors
/// 400 that says what is wrong with it.
fn asked_volume(mount: &Mount) -> Result<AskedVolume, ApiError> {
    let Mount { name, path } = mount;
    let invalid = |field: &str, text: &str, error: &dyn std::fmt::Display| {
        ApiError::invalid(format!("volumeMounts: the {field} {text:?}: {error}"))
    };
    Ok(AskedVolume {
        name: name.parse().map_err(|error: InvalidVolumeName| invalid("name", name, &error))?,
        path: path.parse().map_err(|error: InvalidMountPath| invalid("path", path, &error))?,
    })
}

/// An idle window, or none if it has no length.
///
/// # Errors
/// 400 for less than zero.
fn idle_seconds(Seconds(seconds): Seconds) -> Result<Duration, ApiError> {
    let seconds =
        u64::try_from(seconds).map_err(|_| ApiError::invalid("idleTimeout must not be negative"))?;
    Ok(Duration::from_secs(seconds))
}

/// A lifetime that is not over before it begins.
///
/// # Errors
/// 400 for zero and less.
pub(crate) fn positive_seconds(Seconds(seconds): Seconds) -> Result<Duration, ApiError> {
    match u64::try_from(seconds) {
        Ok(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
        _ => Err(ApiError::invalid("timeout must be greater than 0 seconds")),
    }
}

impl Accepted {
    /// The request as the product takes it.
    pub(crate) fn into_request(self, idempotency: Option<(IdempotencyKey, Digest)>) -> CreateSandbox {
        let Self {
            template,
            timeout,
            on_timeout,
            idle_timeout,
            secured,
            metadata,
            env,
            allow_internet_access,
            policy,
            ingress,
            volumes,
            connections,
        } = self;
        CreateSandbox {
            template,
            lifetime: Lifetime { timeout, on_timeout, idle: idle_timeout },
            secured,
            metadata,
            env,
            allow_internet_access,
            policy,
            ingress,
            volumes,
            connections,
            idempotency,
        }
    }

    /// The same for two requests that ask for the same, however they are written.
    pub(crate) fn digest(&self) -> Digest {
        // Fields in the order of the struct and maps sorted by key: this form is canonical. Serialising strings,
        // numbers and maps with string keys can't fail.
        let canonical = serde_json::to_vec(self).unwrap_or_default();
        Digest::from_bytes(Sha256::digest(canonical).into())
    }
}

#[cfg(test)]
mod tests;
