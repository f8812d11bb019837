//! What the engines say that they do not do, and that the suite would notice if that were not so.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::Path;

use sandglass_engine::Footprints;
use sandglass_engine::collect::Tree;
use sandglass_engine::deadline::Deadline;
use sandglass_engine::engine::{
    AirlockSocket, Compression, Engine, EngineError, EngineInfo, Exit, Feature, Isolation, Keep, Presence,
    SandboxSpec, SessionEnds, Stats,
};
use sandglass_testkit::conformance::{Outcome, Report, Subject, check, run};
use sandglass_types::{Digest, InstanceId, SandboxId, VolumeId};

use crate::subjects::{Real, Scripted};

const ALL: [Feature; 9] = [
    Feature::Checkpoint,
    Feature::PrepareRestore,
    Feature::Airlock,
    Feature::CpuLimit,
    Feature::MemoryLimit,
    Feature::DiskLimit,
    Feature::ProcessLimit,
    Feature::OwnFiles,
    Feature::Volumes,
];

#[test]
fn with_processes_it_refuses_all_there_is_to_refuse() {
    let report = run(&Real);
    assert_eq!(report.engine.isolation, Isolation::None);
    assert_eq!(report.engine.refuses, BTreeSet::from(ALL));
    assert_eq!(report.refused(), report.engine.refuses);
    assert!(!report.cases.values().any(|outcome| *outcome == Outcome::NoProcesses));
    // For other programs to read.
    let text = serde_json::to_string(&report).unwrap();
    assert!(
        text.contains(r#""a_full_disk_is_a_clean_error_inside":{"refused":{"feature":"disk_limit"}}"#),
        "{text}"
    );
    assert!(text.contains(r#""it_is_destroyed_from_every_state":"passed""#), "{text}");
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
}

const WITH_SCRIPTS: [Feature; 3] = [Feature::Checkpoint, Feature::PrepareRestore, Feature::Volumes];

#[test]
fn with_scripts_it_does_checkpoints_and_starts_no_processes() {
    let report = run(&Scripted);
    let refuses = ALL.into_iter().filter(|feature| !WITH_SCRIPTS.contains(feature)).collect();
    assert_eq!(report.engine.refuses, refuses);
    assert_eq!(report.refused(), refuses);
    assert_eq!(report.cases["two_children_go_on_from_one_image"], Outcome::Passed);
    assert_eq!(report.cases["what_an_agent_leaves_ends_with_it"], Outcome::NoProcesses);
}

/// An engine that says something about itself that is not so.
struct Liar {
    inner: Box<dyn Engine>,
    refuses: BTreeSet<Feature>,
}

impl Engine for Liar {
    fn info(&self) -> EngineInfo {
        EngineInfo { refuses: self.refuses.clone(), ..self.inner.info() }
    }

    fn create(&self, spec: &SandboxSpec) -> Result<(), EngineError> {
        self.inner.create(spec)
    }

    fn start(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.inner.start(id)
    }

    fn pause(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.inner.pause(id)
    }

    fn resume(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.inner.resume(id)
    }

    fn checkpoint(&self, id: &SandboxId, image: &SandboxId, keep: Keep) -> Result<(), EngineError> {
        self.inner.checkpoint(id, image, keep)
    }

    fn flush_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        self.inner.flush_image(image)
    }

    fn compress_image(&self, image: &SandboxId) -> Result<Compression, EngineError> {
        self.inner.compress_image(image)
    }

    fn expand_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        self.inner.expand_image(image)
    }

    fn restore(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        self.inner.restore(spec, image)
    }

    fn prepare_restore(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        self.inner.prepare_restore(spec, image)
    }

    fn keep_disk(&self, id: &SandboxId, image: &SandboxId) -> Result<(), EngineError> {
        self.inner.keep_disk(id, image)
    }

    fn boot(&self, spec: &SandboxSpec, image: &SandboxId) -> Result<(), EngineError> {
        self.inner.boot(spec, image)
    }

    fn create_volume(&self, id: &VolumeId, mib: u32) -> Result<(), EngineError> {
        self.inner.create_volume(id, mib)
    }

    fn remove_volume(&self, id: &VolumeId) -> Result<(), EngineError> {
        self.inner.remove_volume(id)
    }

    fn open_volume(&self, id: &VolumeId) -> Result<OwnedFd, EngineError> {
        self.inner.open_volume(id)
    }

    fn collect(&self, id: &SandboxId, tree: Tree) -> Result<OwnedFd, EngineError> {
        self.inner.collect(id, tree)
    }

    fn volumes(&self) -> Result<Vec<VolumeId>, EngineError> {
        self.inner.volumes()
    }

    fn images(&self) -> Result<Vec<SandboxId>, EngineError> {
        self.inner.images()
    }

    fn footprints(&self, ids: &[SandboxId]) -> Result<Footprints, EngineError> {
        self.inner.footprints(ids)
    }

    fn remove_image(&self, image: &SandboxId) -> Result<(), EngineError> {
        self.inner.remove_image(image)
    }

    fn set_deadline(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<(), EngineError> {
        self.inner.set_deadline(id, deadline)
    }

    fn destroy(&self, id: &SandboxId) -> Result<(), EngineError> {
        self.inner.destroy(id)
    }

    fn stats(&self, id: &SandboxId) -> Result<Stats, EngineError> {
        self.inner.stats(id)
    }

    fn list(&self) -> Result<Vec<(SandboxId, Presence)>, EngineError> {
        self.inner.list()
    }

    fn hand_out(&self, id: &SandboxId, deadline: Option<Deadline>) -> Result<SessionEnds, EngineError> {
        self.inner.hand_out(id, deadline)
    }

    fn attach(&self, id: &SandboxId) -> Result<SessionEnds, EngineError> {
        self.inner.attach(id)
    }

    fn airlock_sockets(
        &self,
        id: &SandboxId,
        sockets: &[AirlockSocket],
    ) -> Result<Vec<OwnedFd>, EngineError> {
        self.inner.airlock_sockets(id, sockets)
    }

    fn wait(&self, id: &SandboxId) -> Result<Exit, EngineError> {
        self.inner.wait(id)
    }
}

struct Lying<'a> {
    inner: &'a dyn Subject,
    refuses: BTreeSet<Feature>,
}

impl Subject for Lying<'_> {
    fn prepare(&self, dir: &Path) -> Digest {
        self.inner.prepare(dir)
    }

    fn open(&self, dir: &Path, instance: &InstanceId) -> Box<dyn Engine> {
        Box::new(Liar { inner: self.inner.open(dir, instance), refuses: self.refuses.clone() })
    }

    fn leftovers(&self, dir: &Path, instance: &InstanceId) -> Vec<String> {
        self.inner.leftovers(dir, instance)
    }

    fn starts_processes(&self) -> bool {
        self.inner.starts_processes()
    }
}

fn is_caught(subject: &Lying<'_>, case: &str) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(subject, case))).is_err()
}

#[test]
fn an_engine_that_claims_what_it_does_not_do_is_caught() {
    let boastful = Lying { inner: &Real, refuses: BTreeSet::new() };
    for case in [
        "two_children_go_on_from_one_image",
        "nothing_of_the_machine_is_reached",
        "a_guest_has_one_interface_that_ends_at_the_server",
        "a_guest_is_reached_by_the_server_alone",
        "memory_beyond_the_limit_ends_the_sandbox_and_says_so",
        "a_full_disk_is_a_clean_error_inside",
        "too_many_processes_end_the_sandbox_and_say_so",
        "the_files_of_the_machine_are_not_there",
        "a_template_that_is_absent_fails_and_leaves_nothing",
        "every_sandbox_has_files_of_its_own",
    ] {
        assert!(is_caught(&boastful, case), "{case}");
    }
}

#[test]
fn an_engine_that_does_what_it_says_it_refuses_is_caught() {
    let modest = Lying { inner: &Scripted, refuses: BTreeSet::from(ALL) };
    assert!(is_caught(&modest, "two_children_go_on_from_one_image"));
}
