//! What an operator watches, in the text of OpenMetrics. No label names a sandbox, a team or a key: there are too many of
//! them, and who may read this need not know them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode_registry;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use sandglass_egress::receipt::{Kind, Outcome};
use sandglass_egress::totals::{KINDS, OUTCOMES, Totals};
use sandglass_engine::Footprint;
use sandglass_store::StartPath;
use sandglass_types::error::Chain;
use sandglass_types::{EndReason, Error, ErrorKind, SandboxState};
use serde::Serialize;

use crate::control::ImageKind;

mod models;

/// What every name begins with.
pub const PREFIX: &str = "sandglass";

/// Bounds of the buckets for what takes long, in seconds.
const SECONDS: [f64; 11] = [0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];

/// Verbs of the store that failed. They become errors of the product in plain functions, which have nothing at hand.
pub(crate) static STORE_FAILURES: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PathLabel {
    path: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VerdictLabels {
    kind: String,
    outcome: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabel {
    direction: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProcessLabel {
    process: &'static str,
}

/// What is counted as it happens.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    creations: Family<OutcomeLabel, Counter>,
    creation_seconds: Histogram,
    ends: Family<ReasonLabel, Counter>,
    removal_seconds: Histogram,
    starts: Family<PathLabel, Counter>,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let (creations, ends, starts) = (Family::default(), Family::default(), Family::default());
        let [creation_seconds, removal_seconds] = [(); 2].map(|()| Histogram::new(SECONDS));
        registry.register("sandbox_creations", "Create requests, by how they ended", creations.clone());
        registry.register_with_unit(
            "sandbox_creation",
            "From the create request to a sandbox that answers",
            Unit::Seconds,
            creation_seconds.clone(),
        );
        registry.register(
            "sandbox_starts",
            "Sandboxes that were made, by the way they came to run",
            starts.clone(),
        );
        registry.register("sandbox_ends", "Sandboxes whose end began, by reason", ends.clone());
        registry.register_with_unit(
            "sandbox_removal",
            "From the end of a sandbox until nothing of it is left",
            Unit::Seconds,
            removal_seconds.clone(),
        );
        Self { registry, creations, creation_seconds, ends, removal_seconds, starts }
    }

    /// A create request was answered.
    pub(crate) fn created<T>(&self, outcome: &Result<T, Error>, took: Duration) {
        let name = match outcome {
            Ok(_) => "created",
            Err(error) => kind_name(error.kind()),
        };
        self.creations.get_or_create(&OutcomeLabel { outcome: name }).inc();
        if outcome.is_ok() {
            self.creation_seconds.observe(took.as_secs_f64());
        }
    }

    /// A sandbox was made, in this way.
    pub(crate) fn started(&self, path: StartPath) {
        self.starts.get_or_create(&PathLabel { path: path.as_str() }).inc();
    }

    /// The end of a sandbox began.
    pub(crate) fn ended(&self, reason: EndReason) {
        self.ends.get_or_create(&ReasonLabel { reason: serialized(&reason) }).inc();
    }

    /// Nothing is left of a sandbox.
    pub(crate) fn removed(&self, took: Duration) {
        self.removal_seconds.observe(took.as_secs_f64());
    }

    /// Writes all that was counted, and what is so at this moment.
    ///
    /// # Errors
    /// None of these can't be written as text.
    pub(crate) fn write(&self, now: &Now<'_>, text: &mut String) -> fmt::Result {
        encode_registry(text, &self.registry)?;
        encode_registry(text, &now.registry())
    }
}

/// What all images of one kind take.
#[derive(Debug, Clone, Copy, Default)]
struct OfKind {
    images: u64,
    bytes: u64,
    unique_bytes: u64,
}

/// What all images take on the disk.
#[derive(Debug, Clone)]
pub(crate) struct ImageTotals {
    kinds: BTreeMap<ImageKind, OfKind>,
    /// All of them, blocks that they share counted once, in bytes.
    together: u64,
}

impl ImageTotals {
    /// Of none yet, but for what all of them take together.
    pub(crate) const fn new(together: u64) -> Self {
        Self { kinds: BTreeMap::new(), together }
    }

    /// Counts one that is wanted; it takes nothing while it is not there.
    pub(crate) fn add(&mut self, kind: ImageKind, footprint: Option<&Footprint>) {
        let sum = self.kinds.entry(kind).or_default();
        sum.images += 1;
        sum.bytes += footprint.map_or(0, |footprint| footprint.bytes);
        sum.unique_bytes += footprint.map_or(0, |footprint| footprint.unique_bytes);
    }

    fn register(&self, registry: &mut Registry) {
        let [count, bytes, unique] = [(); 3].map(|()| Family::<KindLabel, Gauge>::default());
        for kind in ImageKind::ALL {
            let sum = self.kinds.get(&kind).copied().unwrap_or_default();
            let label = KindLabel { kind: kind.as_str() };
            count.get_or_create(&label).set(gauge(sum.images));
            bytes.get_or_create(&label).set(gauge(sum.bytes));
            unique.get_or_create(&label).set(gauge(sum.unique_bytes));
        }
        registry.register("images", "Images, by what they are for", count);
        registry.register_with_unit(
            "image",
            "Blocks of images, those that they share counted for each",
            Unit::Bytes,
            bytes,
        );
        registry.register_with_unit(
            "image_unique",
            "Blocks of images that nobody shares",
            Unit::Bytes,
            unique,
        );
        let together = Gauge::<i64>::default();
        together.set(gauge(self.together));
        registry.register_with_unit(
            "images_together",
            "Blocks of all images, those that they share counted once",
            Unit::Bytes,
            together,
        );
    }
}

/// What is so when somebody looks.
#[derive(Debug)]
pub(crate) struct Now<'a> {
    /// Sandboxes that have not ended.
    pub(crate) sandboxes: &'a [(SandboxState, u64)],
    /// What images take on the disk, if that could be measured.
    pub(crate) images: Option<&'a ImageTotals>,
    /// Sandboxes in pools, which nobody has used.
    pub(crate) unused: usize,
    /// What left sandboxes, and what did not.
    pub(crate) egress: &'a Totals,
    /// What calls of models came to, if there are any models.
    pub(crate) models: Option<&'a sandglass_models::totals::Totals>,
    /// Where the memory is read.
    pub(crate) probes: Option<&'a Probes>,
}

impl Now<'_> {
    fn registry(&self) -> Registry {
        let mut registry = Registry::with_prefix(PREFIX);
        let states = Family::<StateLabel, Gauge>::default();
        for state in SandboxState::NOT_ENDED {
            let count = self.sandboxes.iter().find(|(of, _)| *of == state).map_or(0, |(_, count)| *count);
            states.get_or_create(&StateLabel { state: serialized(&state) }).set(gauge(count));
        }
        registry.register("sandboxes", "Sandboxes of this server that have not ended", states);
        if let Some(images) = self.images {
            images.register(&mut registry);
        }
        let unused = Gauge::<i64>::default();
        unused.set(i64::try_from(self.unused).unwrap_or(i64::MAX));
        registry.register("pool_sandboxes", "Unused sandboxes that are ready in pools", unused);
        let verdicts = Family::<VerdictLabels, Counter>::default();
        for (kind, outcome) in KINDS.into_iter().flat_map(|kind| OUTCOMES.map(|outcome| (kind, outcome))) {
            let labels = verdict_labels(kind, outcome);
            verdicts.get_or_create(&labels).inc_by(self.egress.verdicts(kind, outcome));
        }
        registry.register(
            "egress_verdicts",
            "Answers of DNS, connections that ended, and requests, by verdict",
            verdicts,
        );
        let bytes = Family::<DirectionLabel, Counter>::default();
        for (direction, count) in [("out", self.egress.sent()), ("in", self.egress.received())] {
            bytes.get_or_create(&DirectionLabel { direction }).inc_by(count);
        }
        registry.register_with_unit("egress", "Bytes of sandboxes' connections", Unit::Bytes, bytes);
        registry.register(
            "egress_receipts_left_out",
            "Receipts that were counted and not written",
            ConstCounter::new(self.egress.receipts_left_out()),
        );
        registry.register(
            "store_failures",
            "Verbs of the store that failed",
            ConstCounter::new(STORE_FAILURES.load(Ordering::Relaxed)),
        );
        if let Some(models) = self.models {
            models::register(models, &mut registry);
        }
        if let Some(probes) = self.probes {
            probes.register(&mut registry);
        }
        registry
    }
}

fn verdict_labels(kind: Kind, outcome: Outcome) -> VerdictLabels {
    VerdictLabels { kind: serialized(&kind), outcome: serialized(&outcome) }
}

/// The name that the APIs have for a value.
fn serialized(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    value.as_str().unwrap_or_default().to_owned()
}

fn gauge(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

const fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Invalid => "invalid",
        ErrorKind::Unauthenticated => "unauthenticated",
        ErrorKind::Forbidden => "forbidden",
        ErrorKind::NotFound => "not_found",
        ErrorKind::Conflict => "conflict",
        ErrorKind::IdempotencyMismatch => "idempotency_mismatch",
        ErrorKind::IdempotencyInProgress => "idempotency_in_progress",
        ErrorKind::Quota => "quota",
        ErrorKind::Capacity => "capacity",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::Timeout => "timeout",
        ErrorKind::Internal => "internal",
    }
}

/// Files of the kernel about memory. They are opened before this half gives up its view of the machine.
#[derive(Debug)]
pub struct Probes {
    machine: File,
    /// Of each process of this server.
    processes: Vec<(&'static str, File)>,
}

impl Probes {
    /// Opens the files of the machine, of this process, and of the privileged half.
    ///
    /// # Errors
    /// One of them is not there.
    pub fn open(host: u32) -> io::Result<Self> {
        let of = |pid: &str| File::open(format!("/proc/{pid}/status"));
        let processes = vec![("serve", of("self")?), ("host", of(&host.to_string())?)];
        Ok(Self { machine: File::open("/proc/meminfo")?, processes })
    }

    fn register(&self, registry: &mut Registry) {
        match read(&self.machine) {
            Ok(text) => {
                for (field, name, help) in [
                    ("MemTotal:", "machine_memory", "Memory of the machine"),
                    ("MemAvailable:", "machine_memory_available", "Memory of the machine that can be had"),
                ] {
                    if let Some(bytes) = kib_of(&text, field) {
                        let value = Gauge::<i64>::default();
                        value.set(gauge(bytes));
                        registry.register_with_unit(name, help, Unit::Bytes, value);
                    }
                }
            }
            Err(error) => tracing::debug!(error = %Chain(&error), "the machine's memory can't be read"),
        }
        let resident = Family::<ProcessLabel, Gauge>::default();
        for (process, file) in &self.processes {
            // Of a process that has ended there is none.
            if let Some(bytes) = read(file).ok().and_then(|text| kib_of(&text, "VmRSS:")) {
                resident.get_or_create(&ProcessLabel { process }).set(gauge(bytes));
            }
        }
        registry.register_with_unit(
            "resident_memory",
            "Resident memory of the server's processes",
            Unit::Bytes,
            resident,
        );
    }
}

/// The beginning of a file of `/proc`, as it is now.
fn read(file: &File) -> io::Result<String> {
    let mut bytes = [0; 4096];
    let len = file.read_at(&mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes[..len]).into_owned())
}

/// The bytes of a line such as `MemTotal:  16384 kB`.
fn kib_of(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(metrics: &Metrics, now: &Now<'_>) -> String {
        let mut text = String::new();
        metrics.write(now, &mut text).unwrap();
        text
    }

    #[test]
    fn what_happened_and_what_is_so_are_told_without_ids() {
        let (metrics, egress) = (Metrics::new(), Totals::default());
        metrics.created(&Ok(()), Duration::from_millis(120));
        metrics.created::<()>(&Err(Error::new(ErrorKind::Quota, "x")), Duration::from_secs(9));
        metrics.ended(EndReason::OutOfMemory);
        metrics.removed(Duration::from_secs(1));
        let probes = Probes::open(std::process::id()).unwrap();
        let sandboxes = [(SandboxState::Running, 7)];
        let mut images = ImageTotals::new(5);
        let footprint = Footprint { bytes: 4, unique_bytes: 1, exact: true, compressed: false };
        for found in [Some(&footprint), Some(&footprint), None] {
            images.add(ImageKind::Snapshot, found);
        }
        let images = Some(&images);
        let models = sandglass_models::totals::Totals::default();
        models.refused(sandglass_models::refusal::Why::Budget);
        let (models, probes) = (Some(&models), Some(&probes));
        let now = Now { images, sandboxes: &sandboxes, unused: 3, egress: &egress, models, probes };
        let text = text(&metrics, &now);
        for line in [
            "sandglass_sandbox_creations_total{outcome=\"created\"} 1",
            "sandglass_sandbox_creations_total{outcome=\"quota\"} 1",
            "sandglass_sandbox_creation_seconds_bucket{le=\"0.1\"} 0",
            "sandglass_sandbox_creation_seconds_bucket{le=\"0.15\"} 1",
            "sandglass_sandbox_creation_seconds_count 1",
            "sandglass_sandbox_ends_total{reason=\"out_of_memory\"} 1",
            "sandglass_sandbox_removal_seconds_count 1",
            "sandglass_sandboxes{state=\"running\"} 7",
            "sandglass_sandboxes{state=\"creating\"} 0",
            "sandglass_images{kind=\"snapshot\"} 3",
            "sandglass_images{kind=\"paused\"} 0",
            "sandglass_image_bytes{kind=\"snapshot\"} 8",
            "sandglass_image_unique_bytes{kind=\"snapshot\"} 2",
            "sandglass_images_together_bytes 5",
            "sandglass_egress_verdicts_total{kind=\"dns\",outcome=\"denied\"} 0",
            "sandglass_egress_bytes_total{direction=\"out\"} 0",
            "sandglass_egress_receipts_left_out_total 0",
            "sandglass_model_calls_total{outcome=\"charged\"} 0",
            "sandglass_model_refusals_total{reason=\"budget\"} 1",
            "sandglass_model_tokens_total{kind=\"written\"} 0",
            "sandglass_model_overrun_micros_total 0",
        ] {
            assert!(text.lines().any(|got| got == line), "{line} is not in\n{text}");
        }
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_else(|| panic!("{name} is not in\n{text}")).trim().parse::<u64>().unwrap()
        };
        assert!(
            value("sandglass_machine_memory_bytes ") > value("sandglass_machine_memory_available_bytes ")
        );
        assert!(value("sandglass_resident_memory_bytes{process=\"serve\"} ") > 0);
        assert!(value("sandglass_resident_memory_bytes{process=\"host\"} ") > 0);
    }

    #[test]
    fn lines_of_the_kernel() {
        assert_eq!(kib_of("A: 1 kB\nMemTotal:       16 kB\n", "MemTotal:"), Some(16_384));
        assert_eq!(kib_of("MemTotal: many kB\n", "MemTotal:"), None);
        assert_eq!(kib_of("", "MemTotal:"), None);
    }
}
