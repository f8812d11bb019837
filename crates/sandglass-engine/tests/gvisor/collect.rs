//! Marks of overlayfs on the disk of a sandbox that no guest can make, and that somebody made all the same.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::XattrFlags;
use sandglass_engine::collect::{Ask, Bounds, Globs, Place, Said, receive, send};
use sandglass_engine::engine::Engine as _;
use sandglass_linux::loopdev::LoopDevice;
use sandglass_linux::mount::{Mount, MountNamespace, Propagation};

use crate::fixture::Fixture;

/// All that is told of a folder, as one text; a stream that breaks off ends it.
fn told(fixture: &Fixture, id: &sandglass_types::SandboxId, place: &str) -> String {
    let place: Place = place.parse().unwrap();
    let mut line = UnixStream::from(fixture.engine().collect(id, place.tree()).unwrap());
    let ask = Ask { folder: place.below().into(), globs: Globs::default(), bounds: Bounds::WIDEST };
    send(&mut line, &serde_json::to_vec(&ask).unwrap()).unwrap();
    let mut text = String::new();
    while let Ok(message) = receive(&mut line, 1 << 20) {
        text.push_str(&String::from_utf8_lossy(&message));
        if matches!(serde_json::from_slice(&message), Ok(Said::Done(_) | Said::Refused { .. })) {
            break;
        }
    }
    text
}

/// Does something to the disk of a sandbox that is dead.
fn on_disk(fixture: &Fixture, id: &sandglass_types::SandboxId, work: impl FnOnce(&Path) + Send) {
    let image = fixture.sandbox_dir(id).join("disk.img");
    let file = std::fs::File::options().read(true).write(true).open(&image).unwrap();
    let device = LoopDevice::attach_once(&file, image.file_name().unwrap()).unwrap();
    let target = tempfile::tempdir().unwrap();
    let string = |path: &Path| CString::new(path.as_os_str().as_bytes()).unwrap();
    let mount = Mount {
        source: string(&device.path()),
        target: string(target.path()),
        fstype: c"ext4".into(),
        flags: 0,
        data: c"".into(),
    };
    let mounts = MountNamespace::furnish(Propagation::Private, &[mount]).unwrap();
    mounts.run(|| work(target.path())).unwrap();
}

#[test]
fn marks_on_the_disk_show_nothing_that_the_sandbox_does_not_have() {
    let fixture = Fixture::new();
    let secret = "what the sandbox must never see";
    std::fs::create_dir(fixture.path().join("secrets")).unwrap();
    std::fs::write(fixture.path().join("secrets/secret"), secret).unwrap();
    let (spec, mut agent) = fixture.run();
    let id = &spec.id;
    let said = agent
        .sh("busybox mkdir -p /t/inner /t/up /t/far /t/near /t/white; echo own > /t/meta; echo own > /t/own");
    assert_eq!(said, "<0>");
    agent.send("exit 0");
    fixture.wait(id);
    assert!(told(&fixture, id, "/t").contains("own\n"), "the control");
    on_disk(&fixture, id, |disk| {
        let folder = disk.join("upper/t");
        let mark = |name: &str, key: &str, value: &str| {
            rustix::fs::setxattr(folder.join(name), key, value.as_bytes(), XattrFlags::empty()).unwrap();
        };
        let secrets = fixture.path().join("secrets");
        let secrets = secrets.to_str().unwrap();
        // A folder of the template, in another place: all that such a mark can do.
        mark("inner", "trusted.overlay.redirect", "/etc");
        mark("up", "trusted.overlay.redirect", &format!("/../../../../../../../..{secrets}"));
        mark("far", "trusted.overlay.redirect", secrets);
        mark("near", "trusted.overlay.redirect", "..");
        mark("meta", "trusted.overlay.metacopy", "");
        mark("meta", "trusted.overlay.redirect", &format!("{secrets}/secret"));
        std::os::unix::fs::symlink(secrets, folder.join("white/link")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            folder.join("white/disk"),
            rustix::fs::FileType::BlockDevice,
            rustix::fs::Mode::RUSR,
            rustix::fs::makedev(7, 0),
        )
        .unwrap();
    });
    assert!(told(&fixture, id, "/t/inner").contains("of the template"), "the marks are obeyed");
    for place in ["/t", "/", "/t/up", "/t/far", "/t/near", "/t/white"] {
        let told = told(&fixture, id, place);
        assert!(!told.contains(secret), "{place} {told}");
    }
}
