//! A file system of its own, over a template that nobody writes to.

use sandglass_engine::engine::EngineError;
use sandglass_types::Digest;

use super::Fixture;

pub(super) fn the_files_of_the_machine_are_not_there(fixture: &mut Fixture<'_>) {
    let file = fixture.path().join("file-of-the-machine");
    std::fs::write(&file, "of the machine\n").unwrap();
    let (spec, mut agent) = fixture.run();
    let said = agent.sh(&format!("busybox cat {}", file.display()));
    assert!(said.contains("No such file") && said.ends_with("<1>"), "{said}");
    // Nor by way of a process of the machine, its own folder, or the devices of its disks.
    for path in
        [format!("/proc/1/root{}", file.display()), fixture.sandbox_dir(&spec.id).display().to_string()]
    {
        assert_ne!(agent.sh(&format!("busybox ls {path} >/dev/null 2>&1")), "<0>", "{path}");
    }
    assert_eq!(agent.sh("busybox ls /dev | busybox grep -E '^(sd|vd|nvme|loop|mem|kmsg)'"), "<1>");
}

pub(super) fn a_template_is_read_and_never_written(fixture: &mut Fixture<'_>) {
    let (_spec, mut agent) = fixture.run();
    assert_eq!(agent.sh("busybox cat /etc/template"), "of the template\n<0>");
    let said = agent.sh("echo changed > /etc/template; busybox rm /bin/sh; busybox cat /etc/template");
    assert_eq!(said, "changed\n<0>");
    let template = fixture.subject.template(fixture.path());
    assert_eq!(std::fs::read_to_string(template.join("etc/template")).unwrap(), "of the template\n");
    let (_spec, mut other) = fixture.run();
    assert_eq!(other.sh("busybox cat /etc/template"), "of the template\n<0>");
}

pub(super) fn a_template_that_is_absent_fails_and_leaves_nothing(fixture: &mut Fixture<'_>) {
    let mut spec = fixture.spec();
    spec.rootfs = Digest::from_bytes([9; 32]);
    let created = fixture.engine().create(&spec);
    assert!(
        matches!(created, Err(EngineError::Step { step: "find the root file system", .. })),
        "{created:?}"
    );
    fixture.assert_nothing_left();
}

pub(super) fn every_sandbox_has_files_of_its_own(fixture: &mut Fixture<'_>) {
    let mut agents = [(); 2].map(|()| fixture.run().1);
    for (n, agent) in agents.iter_mut().enumerate() {
        for folder in ["/tmp", "/root", "/dev/shm", "/run"] {
            let said = agent.sh(&format!(
                "busybox mkdir -p {folder}; busybox ls -A {folder}; echo {n} > {folder}/n; busybox cat {folder}/n"
            ));
            assert_eq!(said, format!("{n}\n<0>"), "{folder}");
        }
    }
    assert_eq!(agents[0].sh("busybox cat /tmp/n /root/n /dev/shm/n /run/n"), "0\n0\n0\n0\n<0>");
}

pub(super) fn memory_file_systems_have_a_size(fixture: &mut Fixture<'_>) {
    let (_spec, mut agent) = fixture.run();
    for target in ["/dev/shm/big", "/run/big", "/dev/big"] {
        let said =
            agent.sh(&format!("busybox dd if=/dev/zero of={target} bs=1M count=1000; busybox rm {target}"));
        assert!(said.contains("No space left on device"), "{said}");
    }
}
