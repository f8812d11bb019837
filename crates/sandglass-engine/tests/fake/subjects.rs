//! The two engines as the conformance suite sees them.

use std::path::Path;
use std::sync::Arc;

use sandglass_engine::engine::Engine;
use sandglass_engine::fake::{FakeConfig, FakeEngine};
use sandglass_testkit::conformance::{LINE_AGENT, LineScript, Subject};
use sandglass_types::{Digest, InstanceId};

pub(crate) fn config(dir: &Path, instance: &InstanceId) -> FakeConfig {
    FakeConfig {
        data: dir.join("data"),
        instance: instance.clone(),
        agent: "/bin/sh".into(),
        agent_args: vec!["-c".into(), LINE_AGENT.into(), "agent".into()],
    }
}

/// With processes.
pub(crate) struct Real;

impl Subject for Real {
    fn prepare(&self, _: &Path) -> Digest {
        Digest::from_bytes([0; 32])
    }

    fn open(&self, dir: &Path, instance: &InstanceId) -> Box<dyn Engine> {
        Box::new(FakeEngine::open(config(dir, instance)).unwrap())
    }

    fn leftovers(&self, _: &Path, _: &InstanceId) -> Vec<String> {
        Vec::new()
    }
}

/// With scripts.
pub(crate) struct Scripted;

impl Subject for Scripted {
    fn prepare(&self, _: &Path) -> Digest {
        Digest::from_bytes([0; 32])
    }

    fn open(&self, dir: &Path, instance: &InstanceId) -> Box<dyn Engine> {
        Box::new(FakeEngine::scripted(config(dir, instance), Arc::new(LineScript)).unwrap())
    }

    fn leftovers(&self, _: &Path, _: &InstanceId) -> Vec<String> {
        Vec::new()
    }

    fn starts_processes(&self) -> bool {
        false
    }
}
