//! That an engine really does not do what it says it does not. Where a verb is for it, the verb says so; where none is,
//! a sandbox is seen to get what the limit or the boundary would have kept from it.

use sandglass_engine::engine::{AirlockSocket, EngineError, Feature, Keep, SandboxSpec};
use sandglass_types::{SandboxId, VolumeId, VolumeMount};

use super::network::reached;
use super::{Fixture, limits};

pub(super) fn check(fixture: &mut Fixture<'_>, feature: Feature) {
    let engine = fixture.engine();
    let (spec, mut agent) = fixture.run_with(limits(1, 128, 64, 16));
    match feature {
        Feature::Checkpoint => {
            engine.pause(&spec.id).unwrap();
            let image = SandboxId::random();
            for result in [
                engine.checkpoint(&spec.id, &image, Keep::Flushed).map(drop),
                engine.restore(&fixture.spec(), &image),
                engine.keep_disk(&spec.id, &image),
                engine.boot(&fixture.spec(), &image),
                engine.compress_image(&image).map(drop),
                engine.expand_image(&image),
            ] {
                assert!(matches!(result, Err(EngineError::Unsupported { .. })), "{result:?}");
            }
        }
        Feature::PrepareRestore => {
            let result = engine.prepare_restore(&fixture.spec(), &SandboxId::random());
            assert!(matches!(result, Err(EngineError::Unsupported { .. })), "{result:?}");
        }
        Feature::Volumes => {
            let id = VolumeId::random();
            let (name, path) = ("v".parse().unwrap(), "/mnt/v".parse().unwrap());
            let volumes = vec![VolumeMount { id: id.clone(), name, path }];
            for result in [
                engine.create_volume(&id, 16),
                engine.remove_volume(&id),
                engine.create(&SandboxSpec { volumes, ..fixture.spec() }),
            ] {
                assert!(matches!(result, Err(EngineError::Unsupported { .. })), "{result:?}");
            }
        }
        Feature::Airlock => {
            for socket in [
                AirlockSocket::DnsUdp,
                AirlockSocket::DnsTcp,
                AirlockSocket::TcpEgress,
                AirlockSocket::FilterLog,
                AirlockSocket::TcpToGuest,
            ] {
                let result = engine.airlock_sockets(&spec.id, &[socket]);
                assert!(matches!(result, Err(EngineError::Unsupported { .. })), "{result:?}");
            }
        }
        _ => {}
    }
    if !fixture.subject.starts_processes() {
        return;
    }
    match feature {
        Feature::Checkpoint | Feature::PrepareRestore | Feature::Volumes => {}
        // Which also shows that what the other engines are asked would be noticed.
        Feature::Airlock => assert!(!reached(&mut agent).is_empty(), "its network is sealed"),
        Feature::CpuLimit => {
            // In which its CPU time would be limited.
            let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap();
            let said = agent.sh("busybox cat /proc/self/cgroup");
            assert_eq!(said, format!("{groups}<0>"), "it has a control group of its own");
        }
        Feature::MemoryLimit => {
            let said = agent.sh("busybox dd if=/dev/zero of=/dev/null bs=300M count=1 2>/dev/null");
            assert_eq!(said, "<0>", "its memory is limited");
        }
        Feature::DiskLimit => {
            let said = agent.sh("busybox dd if=/dev/zero of=big bs=1M count=65 2>/dev/null");
            assert_eq!(said, "<0>", "its disk is limited");
        }
        Feature::ProcessLimit => {
            agent.sh("i=0; while [ $i -lt 64 ]; do busybox sleep 1000 & i=$((i+1)); done");
            let stats = engine.stats(&spec.id).unwrap();
            assert!(stats.processes > 64, "its processes are limited: {stats:?}");
        }
        Feature::OwnFiles => {
            let file = fixture.path().join("file-of-the-machine");
            std::fs::write(&file, "of the machine\n").unwrap();
            let said = agent.sh(&format!("busybox cat {}", file.display()));
            assert_eq!(said, "of the machine\n<0>", "it has files of its own");
        }
    }
}
