//! What a client may ask of a new sandbox.

use std::collections::BTreeMap;
use std::time::Duration;

use sandglass_broker::ConnectionName;
use sandglass_egress::policy::{Ingress, Policy};
use sandglass_store::IdempotencyKey;
use sandglass_types::volume::MAX_VOLUMES;
use sandglass_types::{Digest, Error, ErrorKind, Lifetime, MountPath, VolumeName};
use serde::Serialize;

use crate::runs::RUN_LABEL;

/// The most environment variables, and the most labels, that a create request may carry.
const MAX_PAIRS: usize = 256;

/// The most bytes that all names and values of one such map may have together: it travels in one control message.
const MAX_PAIR_BYTES: usize = 64 * 1024;

/// The most bytes that the environments of a template and of a client may have together. The rest of the message is small.
const MAX_ENV_BYTES: usize = sandglass_proto::control::MAX_CONTROL_LEN - 16 * 1024;

/// The label of a sandbox in which a template is built. Only the server gives it.
pub(crate) const BUILD_LABEL: &str = "sandglass.template";

/// A volume that a sandbox is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AskedVolume {
    /// What its team calls it.
    pub name: VolumeName,
    /// Where it is to be.
    pub path: MountPath,
}

/// A create request, parsed but not yet checked against what this server allows.
#[derive(Clone)]
pub struct CreateSandbox {
    /// The template's name.
    pub template: String,
    /// How long it lives, from now, and what happens then. Without an idle window it has the operator's; one of no length is
    /// none.
    pub lifetime: Lifetime,
    /// Whether the guest API wants a token.
    pub secured: bool,
    /// Labels, to find it by.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process in it.
    pub env: BTreeMap<String, String>,
    /// As the client asked; `None` if it did not say.
    pub allow_internet_access: Option<bool>,
    /// What it asks to reach, `allow_internet_access` included.
    pub policy: Policy,
    /// How its ports are to be reached.
    pub ingress: Ingress,
    /// The volumes that it is to have: [`MAX_VOLUMES`] at most, each once, and at paths of which none is below another.
    pub volumes: Vec<AskedVolume>,
    /// The connections that it may use.
    pub connections: Vec<ConnectionName>,
    /// The client's key for this request, and a digest of the request.
    pub idempotency: Option<(IdempotencyKey, Digest)>,
}

/// The idle window of a sandbox, of what its client asks for and what is so by default.
pub(crate) fn idle_window(asked: Option<Duration>, default: Option<Duration>) -> Option<Duration> {
    asked.or(default).filter(|window| !window.is_zero())
}

/// Checks that a timeout is in range.
///
/// # Errors
/// [`ErrorKind::Invalid`] with the range.
pub fn check_timeout(timeout: Duration, max: Duration) -> Result<(), Error> {
    if timeout > max {
        let hours = max.as_secs() / 3600;
        return Err(Error::new(ErrorKind::Invalid, format!("Timeout cannot be greater than {hours} hours")));
    }
    Ok(())
}

impl CreateSandbox {
    /// Checks all that can be checked without looking anything up.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`], naming the field.
    pub fn check(&self, max_timeout: Duration) -> Result<(), Error> {
        if self.lifetime.timeout.is_zero() {
            return Err(Error::new(ErrorKind::Invalid, "timeout must be greater than 0 seconds"));
        }
        check_timeout(self.lifetime.timeout, max_timeout)?;
        if let Some(idle) = self.lifetime.idle {
            check_timeout(idle, max_timeout)?;
        }
        check_pairs("metadata", &self.metadata)?;
        if let Some(label) =
            [BUILD_LABEL, RUN_LABEL].into_iter().find(|label| self.metadata.contains_key(*label))
        {
            let message = format!("metadata must not have the key {label:?}: the server gives it");
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        check_env("envVars", &self.env)?;
        check_volumes(&self.volumes)?;
        if !self.ingress.public && !self.secured {
            let message = "network.allowPublicTraffic: false needs secure: true";
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        Ok(())
    }
}

/// Checks that no volume is in the way of another.
fn check_volumes(volumes: &[AskedVolume]) -> Result<(), Error> {
    let invalid = |message: String| Err(Error::new(ErrorKind::Invalid, message));
    if volumes.len() > MAX_VOLUMES {
        return invalid(format!("volumeMounts may have at most {MAX_VOLUMES} entries"));
    }
    for (at, volume) in volumes.iter().enumerate() {
        for other in &volumes[..at] {
            if volume.name == other.name {
                return invalid(format!("volumeMounts has the volume '{}' twice", volume.name));
            }
            if volume.path.overlaps(&other.path) {
                let (a, b) = (&other.path, &volume.path);
                return invalid(format!("volumeMounts has paths that overlap: '{a}' and '{b}'"));
            }
        }
    }
    Ok(())
}

/// Checks that processes can have this environment.
///
/// # Errors
/// [`ErrorKind::Invalid`], naming the variable.
pub(crate) fn check_env(field: &str, env: &BTreeMap<String, String>) -> Result<(), Error> {
    check_pairs(field, env)?;
    let unusable = |name: &String| name.is_empty() || name.contains(['=', '\0']);
    if let Some(name) = env.keys().find(|name| unusable(name)) {
        let message = format!("{field} has a name that no process can have: {name:?}");
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    if let Some((name, _)) = env.iter().find(|(_, value)| value.contains('\0')) {
        return Err(Error::new(ErrorKind::Invalid, format!("{field}.{name} contains a NUL character")));
    }
    Ok(())
}

/// Checks that a map of a client's is not too much to keep.
///
/// # Errors
/// [`ErrorKind::Invalid`], naming the field.
pub(crate) fn check_pairs(field: &str, pairs: &BTreeMap<String, String>) -> Result<(), Error> {
    if pairs.len() > MAX_PAIRS {
        return Err(Error::new(ErrorKind::Invalid, format!("{field} may have at most {MAX_PAIRS} entries")));
    }
    let bytes = encoded(pairs);
    if bytes > MAX_PAIR_BYTES {
        let message = format!("{field} may have at most {MAX_PAIR_BYTES} bytes as JSON, not {bytes}");
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    Ok(())
}

/// Checks that what a template and a client say of the environment fits in the one message that tells the agent.
///
/// # Errors
/// [`ErrorKind::Invalid`], naming the field.
pub(crate) fn check_env_together(
    template: &BTreeMap<String, String>,
    env: &BTreeMap<String, String>,
) -> Result<(), Error> {
    let bytes = encoded(template) + encoded(env);
    if bytes > MAX_ENV_BYTES {
        let message = format!(
            "envVars and the environment of the template may have at most {MAX_ENV_BYTES} bytes together as JSON, not {bytes}"
        );
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    Ok(())
}

/// How many bytes they have in a message.
fn encoded(pairs: &BTreeMap<String, String>) -> usize {
    serde_json::to_string(pairs).map_or(usize::MAX, |text| text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn request() -> CreateSandbox {
        CreateSandbox {
            template: "base".into(),
            lifetime: Lifetime::of(Duration::from_secs(60)),
            secured: true,
            metadata: BTreeMap::new(),
            env: BTreeMap::new(),
            allow_internet_access: None,
            policy: Policy::default(),
            ingress: Ingress::default(),
            volumes: Vec::new(),
            connections: Vec::new(),
            idempotency: None,
        }
    }

    #[test]
    fn a_client_has_the_last_word_on_its_idle_window() {
        let [short, long] = [1, 2].map(Duration::from_secs);
        for (asked, default, window) in [
            (None, None, None),
            (None, Some(long), Some(long)),
            (Some(short), Some(long), Some(short)),
            (Some(short), None, Some(short)),
            (Some(Duration::ZERO), Some(long), None),
        ] {
            assert_eq!(idle_window(asked, default), window);
        }
    }

    #[test]
    fn each_field_has_its_bounds() {
        assert!(request().check(DAY).is_ok());
        let refused = |change: fn(&mut CreateSandbox)| {
            let mut request = request();
            change(&mut request);
            request.check(DAY).unwrap_err().to_string()
        };
        assert_eq!(
            refused(|r| r.lifetime.timeout = Duration::ZERO),
            "timeout must be greater than 0 seconds"
        );
        assert_eq!(refused(|r| r.lifetime.timeout = DAY * 2), "Timeout cannot be greater than 24 hours");
        let mounts = |paths: &[(&str, &str)]| {
            let asked = |(name, path): &(&str, &str)| AskedVolume {
                name: name.parse().unwrap(),
                path: path.parse().unwrap(),
            };
            check_volumes(&paths.iter().map(asked).collect::<Vec<_>>()).map_err(|error| error.to_string())
        };
        assert_eq!(mounts(&[("a", "/mnt/a"), ("b", "/mnt/b")]), Ok(()));
        assert!(mounts(&[("a", "/mnt/a"), ("a", "/mnt/b")]).unwrap_err().contains("'a' twice"));
        assert!(mounts(&[("a", "/mnt/a"), ("b", "/mnt/a")]).unwrap_err().contains("overlap"));
        assert!(mounts(&[("a", "/mnt/a/b"), ("b", "/mnt/a")]).unwrap_err().contains("overlap"));
        assert!(mounts(&[("a", "/mnt"); 9]).unwrap_err().contains("at most 8"));
        let private = |r: &mut CreateSandbox| (r.ingress.public, r.secured) = (false, false);
        assert!(refused(private).contains("allowPublicTraffic"));
        assert!(refused(|r| drop(r.env.insert("A=B".into(), String::new()))).contains("\"A=B\""));
        assert!(refused(|r| drop(r.env.insert("A".into(), "\0".into()))).contains("envVars.A"));
        assert!(refused(|r| drop(r.metadata.insert("k".into(), "v".repeat(70_000)))).contains("metadata"));
        assert!(
            refused(|r| r.env = (0..300).map(|n| (n.to_string(), String::new())).collect()).contains("256")
        );
    }
}
