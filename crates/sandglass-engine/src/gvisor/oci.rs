//! The OCI runtime spec of a sandbox.

use std::path::{Path, PathBuf};

use sandglass_types::{Limits, MountPath};
use serde_json::{Value, json};

/// The agent, as the guest sees it.
pub(super) const GUEST_PATH: &str = "/usr/lib/sandglass/guest";

/// Descriptors that one process in the guest may have.
const GUEST_OPEN_FILES: u64 = 65_536;

/// What a root shell expects to be allowed to do. It is allowed by gVisor's kernel and ends there: the host's
/// kernel sees none of it. `CAP_NET_RAW` is left out.
const CAPABILITIES: [&str; 37] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
];

/// What goes into a spec.
#[derive(Debug)]
pub(super) struct Input<'a> {
    pub(super) hostname: &'a str,
    pub(super) args: &'a [String],
    pub(super) root: &'a Path,
    /// The folder on the sandbox's disk that becomes `/tmp`.
    pub(super) tmp: &'a Path,
    /// Folders that become the guest's at these paths, and that other sandboxes may have as well.
    pub(super) volumes: &'a [(PathBuf, &'a MountPath)],
    /// The network namespace to join; a new, empty one if `None`.
    pub(super) netns: Option<&'a Path>,
    pub(super) limits: Limits,
}

/// Builds the spec. It holds no limits: `runsc` leaves alone a control group that exists already.
///
/// `/tmp` is a mount of its own because gVisor puts a tmpfs without any limit over an empty one otherwise. Every
/// tmpfs has a size, since what is in it is the sandbox's memory; gVisor makes `/dev` itself, with half of the memory
/// that it believes the machine to have.
pub(super) fn spec(input: &Input<'_>) -> Value {
    let memory_mib = u64::from(input.limits.memory_mib());
    let tmpfs = |destination: &str, mode: &str, mib: u64| {
        json!({
            "destination": destination,
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "nodev", format!("mode={mode}"), format!("size={}", mib << 20)],
        })
    };
    let bind = |destination: &str, source: &Path| json!({"destination": destination, "type": "bind", "source": source, "options": ["rw", "nosuid", "nodev"]});
    let mut network = json!({"type": "network"});
    if let Some(path) = input.netns {
        network["path"] = json!(path);
    }
    let mut mounts = vec![
        json!({"destination": "/proc", "type": "proc", "source": "proc"}),
        json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}),
        json!({
            "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"],
        }),
        bind("/tmp", input.tmp),
        tmpfs("/dev/shm", "1777", memory_mib / 4),
        tmpfs("/run", "0755", (memory_mib / 8).min(64)),
    ];
    mounts.extend(input.volumes.iter().map(|(source, path)| bind(path.as_str(), source)));
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": input.args,
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {
                "bounding": &CAPABILITIES[..],
                "effective": &CAPABILITIES[..],
                "permitted": &CAPABILITIES[..],
            },
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": GUEST_OPEN_FILES, "soft": GUEST_OPEN_FILES}],
        },
        "root": {"path": input.root, "readonly": false},
        "hostname": input.hostname,
        "mounts": mounts,
        "linux": {
            "namespaces": [
                {"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}, network,
            ],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(netns: Option<&Path>) -> Value {
        spec(&Input {
            hostname: "host",
            args: &[GUEST_PATH.to_owned()],
            root: Path::new("/r"),
            tmp: Path::new("/d/tmp"),
            volumes: &[("/v/files".into(), &"/mnt/data".parse().unwrap())],
            netns,
            limits: Limits::default(),
        })
    }

    #[test]
    fn every_tmpfs_but_dev_has_a_size_and_tmp_is_on_the_disk() {
        let spec = built(None);
        for mount in spec["mounts"].as_array().unwrap() {
            if mount["type"] == "tmpfs" && mount["destination"] != "/dev" {
                let options = mount["options"].as_array().unwrap();
                assert!(options.iter().any(|o| o.as_str().unwrap().starts_with("size=")), "{mount}");
            }
            if mount["destination"] == "/tmp" {
                assert_eq!((&mount["type"], &mount["source"]), (&json!("bind"), &json!("/d/tmp")));
            }
        }
    }

    #[test]
    fn volumes_are_mounted_last() {
        let spec = built(None);
        let last = spec["mounts"].as_array().unwrap().last().unwrap();
        assert_eq!((&last["destination"], &last["source"]), (&json!("/mnt/data"), &json!("/v/files")));
    }

    #[test]
    fn the_guest_gets_no_namespace_of_the_host() {
        let types = |spec: &Value| -> Vec<String> {
            let all = spec["linux"]["namespaces"].as_array().unwrap();
            all.iter().map(|ns| ns["type"].as_str().unwrap().to_owned()).collect()
        };
        let joined = built(Some(Path::new("/run/ns")));
        assert_eq!(types(&joined), ["pid", "mount", "ipc", "uts", "network"]);
        assert_eq!(joined["linux"]["namespaces"][4]["path"], "/run/ns");
        assert_eq!(types(&built(None)), types(&joined));
        assert!(!CAPABILITIES.contains(&"CAP_NET_RAW"));
    }
}
