//! Volumes: one file system for several sandboxes, which outlives them.

use sandglass_engine::engine::{EngineError, Keep, SandboxSpec};
use sandglass_types::{SandboxId, VolumeId, VolumeMount};

use super::{Fixture, LineAgent};

/// Its size, in MiB.
const SIZE: u32 = 32;

/// A new volume, as a sandbox has it at `/mnt/v`.
fn volume(fixture: &Fixture<'_>) -> VolumeMount {
    let id = VolumeId::random();
    fixture.engine().create_volume(&id, SIZE).unwrap();
    VolumeMount { id, name: "v".parse().unwrap(), path: "/mnt/v".parse().unwrap() }
}

fn run(fixture: &Fixture<'_>, volumes: &[&VolumeMount]) -> (SandboxSpec, LineAgent) {
    let volumes = volumes.iter().map(|volume| (*volume).clone()).collect();
    let spec = SandboxSpec { volumes, ..fixture.spec() };
    fixture.engine().create(&spec).unwrap();
    fixture.engine().start(&spec.id).unwrap();
    let agent = fixture.attach(&spec.id);
    (spec, agent)
}

pub(super) fn what_one_sandbox_does_on_a_volume_the_others_see(fixture: &mut Fixture<'_>) {
    let volume = volume(fixture);
    let (_, mut one) = run(fixture, &[&volume]);
    let (_, mut other) = run(fixture, &[&volume]);
    // What it has looked at before must not be what it goes on to see.
    assert_eq!(other.sh("busybox ls -A /mnt/v; busybox cat /mnt/v/a 2>/dev/null"), "<1>");
    assert_eq!(one.sh("echo first > /mnt/v/a; busybox mkdir /mnt/v/d; echo below > /mnt/v/d/b"), "<0>");
    assert_eq!(other.sh("busybox cat /mnt/v/a /mnt/v/d/b"), "first\nbelow\n<0>");
    assert_eq!(other.sh("echo and more >> /mnt/v/a"), "<0>");
    assert_eq!(one.sh("busybox cat /mnt/v/a; busybox stat -c %s /mnt/v/a"), "first\nand more\n15\n<0>");
    assert_eq!(one.sh("busybox mv /mnt/v/a /mnt/v/c; busybox rm -r /mnt/v/d"), "<0>");
    assert_eq!(other.sh("busybox ls -A /mnt/v; busybox cat /mnt/v/c"), "c\nfirst\nand more\n<0>");
    // A descriptor is no worse.
    assert_eq!(one.sh("exec 7</mnt/v/c; busybox head -n 1 <&7"), "first\n<0>");
    assert_eq!(other.sh("echo changed > /mnt/v/c"), "<0>");
    assert_eq!(one.sh("busybox cat /proc/self/fd/7"), "changed\n<0>");
    // And one without the volume sees nothing of it.
    let (_, mut stranger) = run(fixture, &[]);
    assert_eq!(stranger.sh("busybox ls /mnt/v >/dev/null 2>&1"), "<1>");
}

pub(super) fn a_full_volume_is_a_clean_error_inside(fixture: &mut Fixture<'_>) {
    let volume = volume(fixture);
    let (_, mut agent) = run(fixture, &[&volume]);
    let fill = format!("busybox dd if=/dev/zero of=/mnt/v/big bs=1M count={} 2>&1", SIZE + 1);
    let said = agent.sh(&fill);
    assert!(said.contains("No space left on device") && said.ends_with("<1>"), "{said}");
    // What is deleted is room again, and the sandbox's own disk was never touched.
    assert_eq!(agent.sh("busybox rm /mnt/v/big; echo small > /mnt/v/s; busybox cat /mnt/v/s"), "small\n<0>");
    assert_eq!(agent.sh("busybox dd if=/dev/zero of=/big bs=1M count=33 2>/dev/null"), "<0>");
}

pub(super) fn a_volume_outlives_its_sandboxes_and_its_host(fixture: &mut Fixture<'_>) {
    let volume = volume(fixture);
    // Said twice, as after a crash.
    fixture.engine().create_volume(&volume.id, SIZE).unwrap();
    let (first, mut agent) = run(fixture, &[&volume]);
    assert_eq!(agent.sh("echo kept > /mnt/v/k"), "<0>");
    fixture.reopen();
    assert_eq!(fixture.engine().volumes().unwrap(), std::slice::from_ref(&volume.id));
    // The next host takes the device that the sandbox has, or there would be two file systems on one file.
    let mut agent = fixture.attach(&first.id);
    let (second, mut other) = run(fixture, &[&volume]);
    assert_eq!(other.sh("busybox cat /mnt/v/k; echo by the second > /mnt/v/s"), "kept\n<0>");
    assert_eq!(agent.sh("busybox cat /mnt/v/s"), "by the second\n<0>");
    let removed = fixture.engine().remove_volume(&volume.id);
    assert!(matches!(removed, Err(EngineError::Step { step: "remove the volume", .. })), "{removed:?}");
    for spec in [first, second] {
        fixture.destroy(&spec.id);
    }
    let (third, mut agent) = run(fixture, &[&volume]);
    assert_eq!(agent.sh("busybox cat /mnt/v/k /mnt/v/s"), "kept\nby the second\n<0>");
    fixture.destroy(&third.id);
    for _ in 0..2 {
        fixture.engine().remove_volume(&volume.id).unwrap();
    }
    assert_eq!(fixture.engine().volumes().unwrap(), []);
    let spec = SandboxSpec { volumes: vec![volume], ..fixture.spec() };
    let created = fixture.engine().create(&spec);
    assert!(matches!(created, Err(EngineError::Step { step: "find the volume", .. })), "{created:?}");
    fixture.assert_nothing_left();
}

pub(super) fn what_comes_back_from_an_image_has_its_volumes(fixture: &mut Fixture<'_>) {
    let volume = volume(fixture);
    let (parent, mut agent) = run(fixture, &[&volume]);
    assert_eq!(agent.sh("echo before > /mnt/v/f; exec 7>>/mnt/v/f; x=memory"), "<0>");
    let image = SandboxId::random();
    fixture.engine().pause(&parent.id).unwrap();
    fixture.engine().checkpoint(&parent.id, &image, Keep::Flushed).unwrap();
    fixture.engine().resume(&parent.id).unwrap();
    let child = SandboxSpec { volumes: vec![volume.clone()], ..fixture.spec() };
    fixture.engine().restore(&child, &image).unwrap();
    let mut copy = fixture.attach(&child.id);
    assert_eq!(copy.sh("echo by the copy >&7; echo $x"), "memory\n<0>");
    let mut agent = fixture.attach(&parent.id);
    assert_eq!(
        agent.sh("echo by the parent >&7; busybox cat /mnt/v/f"),
        "before\nby the copy\nby the parent\n<0>"
    );
    let booted = SandboxSpec { volumes: vec![volume], ..fixture.spec() };
    fixture.engine().boot(&booted, &image).unwrap();
    fixture.engine().start(&booted.id).unwrap();
    let said = fixture.attach(&booted.id).sh("busybox head -n 1 /mnt/v/f");
    assert_eq!(said, "before\n<0>");
}
