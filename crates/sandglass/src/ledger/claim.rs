//! Whose a path or a text is: what an instance makes carries its id or the path of its data folder.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use sandglass_types::id::SANDBOX_ID_LEN;
use sandglass_types::{InstanceId, SandboxId};

/// To whom a thing that carries the instance belongs, as far as the thing itself says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Claim {
    /// One sandbox.
    Sandbox(SandboxId),
    /// A network slot that no sandbox uses: the reserve of a running server.
    Slot(String),
    /// The instance as a whole: there while its server or any of its sandboxes is.
    Instance,
    /// Nothing that is known.
    Nobody,
}

/// The instance whose things are looked for.
#[derive(Debug)]
pub(super) struct Scope {
    /// The data folder.
    pub(super) data_dir: PathBuf,
    /// What belongs to the privileged half.
    pub(super) host: PathBuf,
    /// The id in names.
    pub(super) instance: InstanceId,
}

impl Scope {
    pub(super) fn new(data_dir: &Path, instance: &InstanceId) -> Self {
        Self { data_dir: data_dir.to_owned(), host: data_dir.join("host"), instance: instance.clone() }
    }

    /// Where namespaces are pinned; itself a mount.
    pub(super) fn pins(&self) -> PathBuf {
        self.host.join("ns")
    }

    /// The control group above those of all sandboxes.
    pub(super) fn cgroup(&self) -> String {
        format!("sandglass-{}", self.instance)
    }

    /// The owner of a path in the privileged half's folder; `None` for one that is elsewhere.
    pub(super) fn of_path(&self, path: &Path) -> Option<Claim> {
        let below = path.strip_prefix(&self.host).ok()?;
        let mut parts = below.components().map(|part| part.as_os_str().as_bytes());
        let (folder, name) = (parts.next(), parts.next());
        folder?;
        Some(match (folder, name) {
            // A paused sandbox has an image of its own name; a snapshot has nothing but one.
            (Some(b"sandboxes" | b"slots" | b"images"), Some(name)) => sandbox_named(without_suffix(name)),
            (Some(b"runsc"), Some(name)) => sandbox_within(name),
            (Some(b"sandboxes" | b"runsc" | b"ns" | b"slots" | b"images"), None) => Claim::Instance,
            (Some(b"ns"), Some(name)) => self.of_pin(without_suffix(name)),
            _ => Claim::Nobody,
        })
    }

    /// The owner of a pin by its name.
    pub(super) fn of_pin(&self, name: &[u8]) -> Claim {
        let slot = std::str::from_utf8(name).ok().and_then(|name| {
            let slot = name.strip_suffix("-in").or_else(|| name.strip_suffix("-air"))?;
            slot.strip_prefix(self.instance.as_str())?.strip_prefix('-')?;
            Some(slot.to_owned())
        });
        slot.map_or(Claim::Nobody, Claim::Slot)
    }

    /// The owner of the first path of the privileged half's folder that a text mentions.
    pub(super) fn of_text(&self, text: &[u8]) -> Option<Claim> {
        let prefix = self.host.as_os_str().as_bytes();
        let mut from = 0;
        while let Some(at) = find(&text[from..], prefix).map(|at| from + at) {
            let end = at + prefix.len();
            let starts = at == 0 || b"\0\n \t=:,;\"'(".contains(&text[at - 1]);
            let goes_on = text.get(end) == Some(&b'/');
            if starts && goes_on {
                let len = text[at..].iter().position(|byte| b"\0\n \t:,;\"'()".contains(byte));
                let path = len.map_or(&text[at..], |len| &text[at..at + len]);
                return self.of_path(Path::new(std::ffi::OsStr::from_bytes(path)));
            }
            from = at + 1;
        }
        None
    }

    /// The owner of a process by its arguments or environment, each ended by NUL: the sandbox in whose folder one of
    /// them lies, else the one that is an argument of its own.
    pub(super) fn of_arguments(&self, arguments: &[u8]) -> Option<Claim> {
        let all: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
        let mentioned: Vec<Claim> = all.iter().filter_map(|argument| self.of_text(argument)).collect();
        let best = mentioned.iter().find(|claim| matches!(claim, Claim::Sandbox(_))).cloned();
        let named =
            || all.iter().map(|argument| sandbox_named(argument)).find(|claim| *claim != Claim::Nobody);
        best.or_else(|| mentioned.first().map(|first| named().unwrap_or_else(|| first.clone())))
    }

    /// The owner of a process by one control group of it.
    pub(super) fn of_cgroup(&self, path: &str) -> Option<Claim> {
        let parent = self.cgroup();
        let mut parts = path.split('/').skip_while(|part| *part != parent).skip(1);
        let is_ours = path.split('/').any(|part| part == parent);
        is_ours.then(|| parts.next().map_or(Claim::Nobody, |leaf| sandbox_named(leaf.as_bytes())))
    }
}

/// The kernel appends this to the path of a file that was unlinked.
fn without_suffix(name: &[u8]) -> &[u8] {
    name.strip_suffix(b" (deleted)").unwrap_or(name)
}

/// The sandbox of exactly that name.
pub(super) fn sandbox_named(name: &[u8]) -> Claim {
    let id = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok());
    id.map_or(Claim::Nobody, Claim::Sandbox)
}

/// The sandbox whose id is a word of the name: `runsc` decorates it.
fn sandbox_within(name: &[u8]) -> Claim {
    let word = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    name.chunk_by(|a, b| word(a) == word(b))
        .filter(|chunk| chunk.len() == SANDBOX_ID_LEN)
        .map(sandbox_named)
        .find(|claim| *claim != Claim::Nobody)
        .unwrap_or(Claim::Nobody)
}

/// The OCI runtime names the namespace of a sandbox in its configuration; this is that path.
pub(super) fn network_of_config(config: &[u8]) -> Option<PathBuf> {
    let config: serde_json::Value = serde_json::from_slice(config).ok()?;
    let namespaces = config.get("linux")?.get("namespaces")?.as_array()?;
    let network = namespaces.iter().find(|one| one.get("type").is_some_and(|kind| kind == "network"))?;
    Some(network.get("path")?.as_str()?.into())
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbb0";

    fn scope() -> Scope {
        Scope::new(Path::new("/srv/sg"), &"inst0001".parse().unwrap())
    }

    fn sandbox(id: &str) -> Claim {
        Claim::Sandbox(id.parse().unwrap())
    }

    #[test]
    fn paths_say_whose_they_are() {
        let cases = [
            (format!("/srv/sg/host/sandboxes/{A}"), Some(sandbox(A))),
            (format!("/srv/sg/host/sandboxes/{A}/disk.img"), Some(sandbox(A))),
            (format!("/srv/sg/host/sandboxes/{A} (deleted)"), Some(sandbox(A))),
            (format!("/srv/sg/host/slots/{A}"), Some(sandbox(A))),
            (format!("/srv/sg/host/slots/.{A}"), Some(Claim::Nobody)),
            ("/srv/sg/host/sandboxes/tmp".into(), Some(Claim::Nobody)),
            (format!("/srv/sg/host/runsc/{A}_sandbox:{A}.state"), Some(sandbox(A))),
            (format!("/srv/sg/host/runsc/runsc-{A}.sock"), Some(sandbox(A))),
            (format!("/srv/sg/host/runsc/{A}{B}"), Some(Claim::Nobody)),
            ("/srv/sg/host/ns".into(), Some(Claim::Instance)),
            ("/srv/sg/host/ns/inst0001-abcde-in".into(), Some(Claim::Slot("inst0001-abcde".into()))),
            ("/srv/sg/host/ns/inst0001-abcde-air".into(), Some(Claim::Slot("inst0001-abcde".into()))),
            ("/srv/sg/host/ns/inst0002-abcde-in".into(), Some(Claim::Nobody)),
            ("/srv/sg/host/ns/inst0001".into(), Some(Claim::Nobody)),
            ("/srv/sg/host/sandboxes".into(), Some(Claim::Instance)),
            ("/srv/sg/host/else".into(), Some(Claim::Nobody)),
            ("/srv/sg/host".into(), None),
            ("/srv/sg/serve/store.db".into(), None),
            (format!("/srv/sg/host2/sandboxes/{A}"), None),
            (format!("/srv/sg2/host/sandboxes/{A}"), None),
            ("/".into(), None),
        ];
        for (path, expected) in cases {
            assert_eq!(scope().of_path(Path::new(&path)), expected, "{path}");
        }
    }

    #[test]
    fn texts_mention_whole_paths_only() {
        let cases = [
            (format!("rw,lowerdir=/a:/b,upperdir=/srv/sg/host/sandboxes/{A}/disk/upper"), Some(sandbox(A))),
            (format!("rw,lowerdir=/srv/sg/host/sandboxes/{A}:/b"), Some(sandbox(A))),
            (format!("/mnt/srv/sg/host/sandboxes/{A}"), None),
            (format!("/srv/sg/hostage/{A}, \"/srv/sg/host/sandboxes/{B}\""), Some(sandbox(B))),
            ("/srv/sg/host".into(), None),
            (String::new(), None),
        ];
        for (text, expected) in cases {
            assert_eq!(scope().of_text(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn arguments_name_the_sandbox_beside_the_folder() {
        let cases = [
            (
                format!(
                    "runsc\0--root=/srv/sg/host/runsc\0boot\0--bundle=/srv/sg/host/sandboxes/{A}/bundle\0{A}\0"
                ),
                Some(sandbox(A)),
            ),
            (format!("runsc\0--root=/srv/sg/host/runsc\0delete\0{B}\0"), Some(sandbox(B))),
            ("runsc\0--root=/srv/sg/host/runsc\0list\0".into(), Some(Claim::Instance)),
            (format!("runsc\0--root=/run/runsc\0delete\0{B}\0"), None),
            (format!("sandglass\0ledger\0--data-dir\0/srv/sg\0{B}\0"), None),
            (String::new(), None),
        ];
        for (arguments, expected) in cases {
            assert_eq!(scope().of_arguments(arguments.as_bytes()), expected, "{arguments:?}");
        }
    }

    #[test]
    fn control_groups_name_the_sandbox() {
        let cases = [
            (format!("/sandglass-inst0001/{A}"), Some(sandbox(A))),
            (format!("/docker/x/sandglass-inst0001/{A}/inner"), Some(sandbox(A))),
            ("/sandglass-inst0001".into(), Some(Claim::Nobody)),
            ("/sandglass-inst0001/other".into(), Some(Claim::Nobody)),
            (format!("/sandglass-inst0002/{A}"), None),
            ("/".into(), None),
        ];
        for (path, expected) in cases {
            assert_eq!(scope().of_cgroup(&path), expected, "{path}");
        }
    }

    #[test]
    fn the_configuration_names_the_network() {
        let config =
            br#"{"linux":{"namespaces":[{"type":"pid"},{"type":"network","path":"/srv/sg/host/ns/x"}]}}"#;
        assert_eq!(network_of_config(config), Some("/srv/sg/host/ns/x".into()));
        for config in [&b"{}"[..], b"", b"[]", br#"{"linux":{"namespaces":[{"type":"network"}]}}"#] {
            assert_eq!(network_of_config(config), None);
        }
    }
}
