//! The ledger against the kernel of this machine, as root: a data folder as a server would leave it, things made by
//! hand.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use sandglass_linux::lock::FolderLock;
use sandglass_linux::loopdev::LoopDevice;
use sandglass_linux::namespace::{Netns, PinFolder};
use sandglass_types::{SandboxId, SandboxState};
use serde_json::Value;
use tempfile::TempDir;

use super::*;

/// A data folder with one sandbox in it.
struct Instance {
    folder: TempDir,
    id: InstanceId,
    sandbox: SandboxId,
}

impl Instance {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let sandbox = SandboxId::random();
        let instance = Self { folder, id: InstanceId::random(), sandbox };
        std::fs::create_dir_all(instance.dir().join("bundle")).unwrap();
        std::fs::create_dir_all(instance.path().join("host/runsc")).unwrap();
        instance
    }

    fn path(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap()
    }

    fn dir(&self) -> PathBuf {
        self.path().join("host/sandboxes").join(self.sandbox.as_str())
    }

    fn owner(&self, state: SandboxState) -> Vec<Owner> {
        vec![Owner { id: self.sandbox.clone(), state }]
    }

    /// What there is now.
    fn ledger(&self, owners: &[Owner]) -> Value {
        self.look(owners, None)
    }

    /// Nothing is left over, at the latest once programs that other tests are just starting have closed their copies
    /// of this process's descriptors.
    fn clean(&self, owners: &[Owner]) -> Value {
        let document = self.look(owners, Some(Duration::from_secs(20)));
        assert_eq!(document["clean"], true, "{document}");
        document
    }

    /// The document, after checking that it agrees with the answer.
    fn look(&self, owners: &[Owner], wait: Option<Duration>) -> Value {
        let options = Options {
            data_dir: self.path(),
            instance: self.id.clone(),
            engine: Engine::Gvisor,
            json: true,
            wait,
        };
        let mut out = Vec::new();
        let clean = run(&options, &mut || Ok(owners.to_vec()), &mut out).unwrap();
        let document: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(document["clean"], clean, "{document}");
        document
    }
}

/// Kinds and names of what is left over, those of other kinds than `kind` left out.
fn left_over(document: &Value, kind: &str) -> Vec<String> {
    let all = document["left_over"].as_array().unwrap();
    let names =
        all.iter().filter(|one| one["kind"] == kind).map(|one| one["name"].as_str().unwrap().to_owned());
    names.collect()
}

/// A process that waits until it is killed.
struct Waiter(Child);

impl Waiter {
    fn new(name: &str, folder: &Path, stdin: Stdio) -> Self {
        let mut command = Command::new("sleep");
        command.arg0(name).arg("1000").current_dir(folder).stdin(stdin).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_empty_instance_is_clean() {
    let instance = Instance::new();
    std::fs::remove_dir_all(instance.dir()).unwrap();
    assert_eq!(instance.clean(&[])["server"], "stopped");
}

#[test]
fn files_are_owned_by_live_sandboxes_only() {
    let instance = Instance::new();
    let state = format!("{0}_sandbox:{0}.state", instance.sandbox);
    std::fs::write(instance.path().join("host/runsc").join(state), "").unwrap();
    std::fs::write(instance.path().join("host/.half"), "").unwrap();
    let document = instance.ledger(&instance.owner(SandboxState::Creating));
    assert_eq!(document["counts"]["file"]["owned"], 2);
    assert_eq!(left_over(&document, "file").len(), 1);
    let document = instance.ledger(&[]);
    assert_eq!(left_over(&document, "file").len(), 3);
    let document = instance.ledger(&instance.owner(SandboxState::Running));
    assert_eq!(document["missing"].as_array().unwrap().len(), 4, "{document}");
}

#[test]
fn loop_devices_and_their_mounts_are_found_also_of_deleted_files() {
    let instance = Instance::new();
    let (disk, target) = (instance.dir().join("disk.img"), instance.path().join("elsewhere"));
    std::fs::create_dir(&target).unwrap();
    let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&disk).arg("2M").status().unwrap();
    assert!(made.success());
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&disk).unwrap();
    let device = LoopDevice::attach(&file).unwrap();
    drop(file);
    let path = device.path();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount(&path, &target, "ext4", flags, None::<&std::ffi::CStr>).unwrap();
    std::fs::remove_dir_all(instance.dir()).unwrap();
    drop(device);
    let alive = instance.clean(&instance.owner(SandboxState::Ending));
    let dead = instance.ledger(&[]);
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(
        (&alive["counts"]["loop_device"]["owned"], &alive["counts"]["mount"]["owned"]),
        (&1.into(), &1.into())
    );
    assert_eq!(left_over(&dead, "loop_device").len(), 1, "{dead}");
    let mounts = left_over(&dead, "mount");
    assert!(mounts.iter().any(|name| name.starts_with(target.to_str().unwrap())), "{dead}");
}

#[test]
fn processes_and_their_descriptors_are_found() {
    let instance = Instance::new();
    let disk = instance.dir().join("disk.img");
    std::fs::write(&disk, "").unwrap();
    let open = std::fs::File::open(&disk).unwrap();
    let root = format!("--root={}/host/runsc", instance.path().display());
    let named = Waiter::new(&root, Path::new("/"), Stdio::null());
    let inside = Waiter::new("x", &instance.dir(), Stdio::null());
    let holder = Waiter::new("x", Path::new("/"), open.into());
    let document = instance.ledger(&[]);
    let mut processes = left_over(&document, "process");
    processes.sort();
    let mut expected = [&named, &inside].map(|waiter| format!("{} (sleep)", waiter.0.id()));
    expected.sort();
    assert_eq!(processes, expected, "{document}");
    let descriptors = left_over(&document, "descriptor");
    assert!(
        descriptors.len() == 1 && descriptors[0].starts_with(&format!("0 of process {} ", holder.0.id())),
        "{document}"
    );
    let document = instance.ledger(&instance.owner(SandboxState::Ending));
    assert_eq!(left_over(&document, "process").len(), 1, "the one that names no sandbox");
    drop((named, inside, holder));
    instance.clean(&instance.owner(SandboxState::Ending));
}

#[test]
fn pinned_namespaces_are_spare_while_a_server_runs() {
    let instance = Instance::new();
    let pins = PinFolder::open(&instance.path().join("host/ns")).unwrap();
    let names = ["in", "air"].map(|end| format!("{}-abcde-{end}", instance.id));
    for name in &names {
        pins.pin(&Netns::create().unwrap(), name).unwrap();
    }
    let config = format!(
        r#"{{"linux":{{"namespaces":[{{"type":"network","path":"{}"}}]}}}}"#,
        pins.path(&names[0]).unwrap().display()
    );
    let stopped = instance.ledger(&instance.owner(SandboxState::Ending));
    let lock = FolderLock::acquire(&instance.path()).unwrap();
    let copy = rustix::io::dup(&lock).unwrap();
    let server = Waiter::new("server", Path::new("/"), copy.into());
    let running = instance.clean(&instance.owner(SandboxState::Ending));
    std::fs::write(instance.dir().join("bundle/config.json"), config).unwrap();
    let used = instance.clean(&instance.owner(SandboxState::Ending));
    std::fs::remove_dir_all(instance.dir()).unwrap();
    let slots = instance.path().join("host/slots");
    std::fs::create_dir(&slots).unwrap();
    std::fs::write(slots.join(instance.sandbox.as_str()), format!("{}-abcde", instance.id)).unwrap();
    let remembered = instance.clean(&instance.owner(SandboxState::Ending));
    let ended = instance.ledger(&[]);
    drop((server, lock));
    for name in &names {
        pins.unpin(name).unwrap();
    }
    let unpinned = instance.ledger(&instance.owner(SandboxState::Ending));
    pins.close().unwrap();

    assert_eq!(stopped["server"], "stopped");
    assert_eq!(left_over(&stopped, "namespace").len(), 2, "{stopped}");
    assert_eq!(running["server"], "running", "{running}");
    assert_eq!(running["counts"]["namespace"], serde_json::json!({"owned": 0, "spare": 2, "left_over": 0}));
    assert_eq!(used["counts"]["namespace"]["owned"], 2, "{used}");
    assert_eq!(remembered["counts"]["namespace"]["owned"], 2, "{remembered}");
    assert_eq!(left_over(&ended, "namespace").len(), 2, "{ended}");
    assert_eq!(unpinned["counts"]["namespace"], Value::Null, "{unpinned}");
}

#[test]
fn a_socket_of_the_server_that_keeps_a_namespace_is_found() {
    let instance = Instance::new();
    let lock = FolderLock::acquire(&instance.path()).unwrap();
    let netns = Netns::create().unwrap();
    let inode = netns.inode().unwrap();
    let socket = netns.run(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    drop(netns);
    let mut command = Command::new("sleep");
    command.arg("1000").stdin(rustix::io::dup(&lock).unwrap()).stdout(std::os::fd::OwnedFd::from(socket));
    let server = Waiter(command.spawn().unwrap());
    // Else this copy of the socket would keep it as well.
    drop(command);
    let document = instance.ledger(&instance.owner(SandboxState::Ending));
    drop(server);
    let found = left_over(&document, "namespace");
    assert!(
        found.len() == 1 && found[0].starts_with(&format!("net:[{inode}] kept by socket 1")),
        "{document}"
    );
    drop(lock);
    instance.clean(&instance.owner(SandboxState::Ending));
}

#[test]
fn control_groups_are_found_in_every_hierarchy() {
    let instance = Instance::new();
    let cgroups = sandglass_linux::cgroup::Cgroups::detect(
        Path::new(sandglass_linux::cgroup::ROOT),
        instance.id.as_str(),
    )
    .unwrap();
    cgroups.make_parent().unwrap();
    let leaf = cgroups.leaf(instance.sandbox.as_str()).unwrap();
    leaf.make().unwrap();
    let waiter = Waiter::new("x", Path::new("/"), Stdio::null());
    leaf.add(waiter.0.id().try_into().unwrap()).unwrap();
    let alive = instance.clean(&instance.owner(SandboxState::Ending));
    let dead = instance.ledger(&[]);
    drop(waiter);
    leaf.remove(Duration::from_secs(5)).unwrap();
    cgroups.remove_parent().unwrap();
    assert_eq!(alive["counts"]["process"]["owned"], 1, "{alive}");
    assert!(left_over(&dead, "cgroup").len() >= 2, "{dead}");
    assert_eq!(left_over(&dead, "process").len(), 1, "{dead}");
    assert_eq!(instance.ledger(&instance.owner(SandboxState::Ending))["counts"]["cgroup"], Value::Null);
}

#[test]
fn waiting_ends_when_nothing_is_left() {
    let instance = Instance::new();
    let waited = |wait| Options {
        data_dir: instance.path(),
        instance: instance.id.clone(),
        engine: Engine::Gvisor,
        json: false,
        wait: Some(wait),
    };
    let mut out = Vec::new();
    assert!(!run(&waited(Duration::from_millis(1)), &mut || Ok(Vec::new()), &mut out).unwrap());

    // The sandbox goes away between two looks.
    let mut looks = 0;
    let mut owners = || {
        looks += 1;
        if looks == 5 {
            std::fs::remove_dir_all(instance.dir()).unwrap();
        }
        Ok(Vec::new())
    };
    let mut out = Vec::new();
    assert!(run(&waited(Duration::from_secs(60)), &mut owners, &mut out).unwrap());
    assert!(String::from_utf8(out).unwrap().ends_with("nothing is left over\n"));
    assert_eq!(looks, 6);
}
