use std::fs;
use std::time::{Duration, Instant};

use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};

use super::*;
use crate::netlink::{Mac, Rtnetlink, VethPeer};

fn require_root() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
}

/// A pin folder that is unmounted with its pins however the test ends.
struct Pins {
    folder: Option<PinFolder>,
    directory: tempfile::TempDir,
}

impl Pins {
    fn new() -> Self {
        require_root();
        let directory = tempfile::tempdir().unwrap();
        let folder = PinFolder::open(directory.path()).unwrap();
        Self { folder: Some(folder), directory }
    }

    fn get(&self) -> &PinFolder {
        self.folder.as_ref().unwrap()
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        let folder = self.folder.take().unwrap();
        for name in folder.names().unwrap() {
            folder.unpin(&name).unwrap();
        }
        folder.close().unwrap();
        assert!(
            !fs::read_to_string("/proc/self/mountinfo")
                .unwrap()
                .contains(self.directory.path().to_str().unwrap())
        );
    }
}

/// Says when a namespace ends: the far end of a link that is inside it.
struct Canary {
    home: Netns,
}

impl Canary {
    fn in_netns(watched: &Netns) -> Self {
        let home = Netns::create().unwrap();
        home.run(|| {
            let peer = VethPeer { name: "canary", mac: Mac([2, 0, 0, 0, 0, 2]), netns: watched.as_fd() };
            Rtnetlink::open().unwrap().add_veth("canary", Mac([2, 0, 0, 0, 0, 1]), &peer).unwrap();
        })
        .unwrap();
        Self { home }
    }

    fn alive(&self) -> bool {
        self.home.run(|| Rtnetlink::open().unwrap().index("canary").is_ok()).unwrap()
    }

    fn ends(&self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.alive() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

#[test]
fn work_runs_inside_and_the_caller_stays_outside() {
    require_root();
    let before = Netns::current().unwrap().inode().unwrap();
    let netns = Netns::create().unwrap();
    let inside = netns.run(|| Netns::current().unwrap().inode().unwrap()).unwrap();
    assert_eq!(inside, netns.inode().unwrap());
    assert_ne!(inside, before);
    assert_eq!(Netns::current().unwrap().inode().unwrap(), before);
}

#[test]
fn a_socket_stays_where_it_was_made() {
    require_root();
    let netns = Netns::create().unwrap();
    let inode = netns.inode().unwrap();
    let socket = netns.run(|| std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
    assert_eq!(Netns::of_socket(&socket).unwrap().inode().unwrap(), inode);
    let canary = Canary::in_netns(&netns);
    drop(netns);
    assert!(canary.alive(), "the socket keeps it");
    drop(socket);
    assert!(canary.ends());
    assert!(Netns::of_socket(fs::File::open("/dev/null").unwrap()).is_err());
}

#[test]
fn a_panic_inside_goes_on_outside() {
    require_root();
    let netns = Netns::create().unwrap();
    let result = std::panic::catch_unwind(|| netns.run(|| panic!("inside")));
    assert_eq!(*result.unwrap_err().downcast_ref::<&str>().unwrap(), "inside");
}

#[test]
fn a_pin_keeps_a_namespace_until_it_is_taken_off() {
    let pins = Pins::new();
    let netns = Netns::create().unwrap();
    let inode = netns.inode().unwrap();
    let canary = Canary::in_netns(&netns);
    pins.get().pin(&netns, "one").unwrap();
    assert_eq!(pins.get().pin(&netns, "one").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    drop(netns);
    assert!(canary.alive());
    assert_eq!(pins.get().netns("one").unwrap().inode().unwrap(), inode);
    assert_eq!(pins.get().names().unwrap(), ["one"]);

    pins.get().unpin("one").unwrap();
    assert!(canary.ends());
    pins.get().unpin("one").unwrap();
    assert_eq!(pins.get().netns("one").unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn a_private_copy_of_the_mounts_keeps_no_pin() {
    let pins = Pins::new();
    let netns = Netns::create().unwrap();
    let canary = Canary::in_netns(&netns);
    pins.get().pin(&netns, "one").unwrap();
    drop(netns);
    let path = pins.get().path("one").unwrap();
    let (copied, wait) = std::sync::mpsc::channel();
    let (unpinned, go_on) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // What the launcher of an engine does.
            // SAFETY: the file system context is split off with it, so no other thread is affected.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS).unwrap() };
            mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC).unwrap();
            copied.send(Netns::open(&path).is_ok()).unwrap();
            go_on.recv().unwrap();
        });
        assert!(wait.recv().unwrap(), "the copy holds the pin first");
        pins.get().unpin("one").unwrap();
        assert!(canary.ends(), "the copy must not keep it");
        unpinned.send(()).unwrap();
    });
}

#[test]
fn only_namespaces_open_and_only_names_are_pinned() {
    let pins = Pins::new();
    let netns = Netns::create().unwrap();
    fs::write(pins.directory.path().join("plain"), "").unwrap();
    assert_eq!(pins.get().netns("plain").unwrap_err().kind(), io::ErrorKind::InvalidData);
    std::os::unix::fs::symlink("/proc/self/ns/net", pins.directory.path().join("link")).unwrap();
    assert!(pins.get().netns("link").is_err());
    for name in ["", "..", "a/b", "A", "a b", &"a".repeat(65)] {
        assert_eq!(pins.get().pin(&netns, name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name:?}");
    }
}

#[test]
fn opening_a_folder_twice_mounts_it_once() {
    let pins = Pins::new();
    let again = PinFolder::open(pins.directory.path()).unwrap();
    let netns = Netns::create().unwrap();
    again.pin(&netns, "one").unwrap();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let path = pins.directory.path().to_str().unwrap();
    assert_eq!(mounts.lines().filter(|line| line.split(' ').nth(4) == Some(path)).count(), 1);
    assert_eq!(unmount(path, UnmountFlags::NOFOLLOW), Err(rustix::io::Errno::BUSY));
}
