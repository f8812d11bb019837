//! What every engine must do, case by case, whatever it isolates with.
//!
//! An engine says what it does not do ([`EngineInfo::refuses`]), and is held to that in both directions: a case that
//! needs a feature passes, or, where the engine refuses the feature, the suite sees to it that it really does. So an
//! engine can neither leave something out in silence nor claim what it does not do.
//!
//! The agent of the suite is a *line agent*: it evaluates one line of shell at a time from its standard input. An
//! engine whose agent starts no processes says so too, and is spared the cases that are about them.

mod agent;
mod checkpoint;
mod collect;
mod files;
mod fixture;
mod lifecycle;
mod limits;
mod line_script;
mod network;
mod processes;
mod refusals;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sandglass_engine::engine::{Engine, EngineInfo, Feature};
use sandglass_types::{Digest, InstanceId};
use serde::{Deserialize, Serialize};

pub use self::agent::{LINE_AGENT, LineAgent};
pub use self::fixture::{Fixture, limits, spec};
pub use self::line_script::LineScript;

/// An engine to run the suite against.
pub trait Subject: Sync {
    /// Puts into a new folder what the engine needs there, and names the root file system of all sandboxes: one with
    /// `/bin/busybox` as its `sh`, and the file `/etc/template`, "of the template\n", if the engine has files of its
    /// own.
    fn prepare(&self, dir: &Path) -> Digest;

    /// Opens the engine, as a host does that is started, or started again. It keeps each sandbox in
    /// `data/sandboxes/ID` and its record there in `state.json`.
    fn open(&self, dir: &Path, instance: &InstanceId) -> Box<dyn Engine>;

    /// Where the root file system of all sandboxes is on this machine.
    fn template(&self, dir: &Path) -> PathBuf {
        dir.join("template")
    }

    /// All that the machine still holds of this instance beside files and processes.
    fn leftovers(&self, dir: &Path, instance: &InstanceId) -> Vec<String>;

    /// Whether the agent is a shell that starts processes.
    fn starts_processes(&self) -> bool {
        true
    }
}

/// What became of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The engine does it.
    Passed,
    /// The engine said that it does not, and it does not.
    Refused {
        /// What it refuses.
        feature: Feature,
    },
    /// It is about processes, and the agent starts none.
    NoProcesses,
}

/// What became of all cases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// What the engine says about itself.
    pub engine: EngineInfo,
    /// By the name of the case.
    pub cases: BTreeMap<String, Outcome>,
}

impl Report {
    /// All features that were seen to be refused.
    #[must_use]
    pub fn refused(&self) -> BTreeSet<Feature> {
        let feature = |outcome: &Outcome| match outcome {
            Outcome::Refused { feature } => Some(*feature),
            Outcome::Passed | Outcome::NoProcesses => None,
        };
        self.cases.values().filter_map(feature).collect()
    }
}

/// Runs all cases, one after the other.
///
/// # Panics
/// A case failed.
#[must_use]
pub fn run(subject: &dyn Subject) -> Report {
    let cases = CASES.iter().map(|case| {
        eprintln!("case: {}", case.name);
        (case.name.to_owned(), run_case(subject, case))
    });
    let cases = cases.collect();
    Report { engine: Fixture::new(subject).engine().info(), cases }
}

/// Runs one case.
///
/// # Panics
/// It failed, or there is no case with that name.
pub fn check(subject: &dyn Subject, name: &str) -> Outcome {
    let case = CASES.iter().find(|case| case.name == name).expect("a case of this name");
    let outcome = run_case(subject, case);
    eprintln!("{name}: {outcome:?}");
    outcome
}

fn run_case(subject: &dyn Subject, case: &Case) -> Outcome {
    let mut fixture = Fixture::new(subject);
    if let Some(feature) = case.needs.feature.filter(|feature| fixture.engine().info().refuses(*feature)) {
        refusals::check(&mut fixture, feature);
        return Outcome::Refused { feature };
    }
    if case.needs.processes && !subject.starts_processes() {
        return Outcome::NoProcesses;
    }
    (case.run)(&mut fixture);
    Outcome::Passed
}

struct Case {
    name: &'static str,
    needs: Needs,
    run: fn(&mut Fixture<'_>),
}

/// What a case can't do without.
#[derive(Debug, Clone, Copy)]
struct Needs {
    feature: Option<Feature>,
    processes: bool,
}

const NOTHING: Needs = Needs { feature: None, processes: false };
const PROCESSES: Needs = Needs { processes: true, ..NOTHING };
const CHECKPOINT: Needs = Needs { feature: Some(Feature::Checkpoint), ..NOTHING };
const CHECKPOINT_OF_PROCESSES: Needs = Needs { feature: Some(Feature::Checkpoint), ..PROCESSES };
const PREPARE_RESTORE: Needs = Needs { feature: Some(Feature::PrepareRestore), ..NOTHING };
const AIRLOCK: Needs = Needs { feature: Some(Feature::Airlock), ..PROCESSES };
const CPU_LIMIT: Needs = Needs { feature: Some(Feature::CpuLimit), ..PROCESSES };
const MEMORY_LIMIT: Needs = Needs { feature: Some(Feature::MemoryLimit), ..PROCESSES };
const DISK_LIMIT: Needs = Needs { feature: Some(Feature::DiskLimit), ..PROCESSES };
const PROCESS_LIMIT: Needs = Needs { feature: Some(Feature::ProcessLimit), ..PROCESSES };
const VOLUMES: Needs = Needs { feature: Some(Feature::Volumes), ..PROCESSES };
const OWN_FILES: Needs = Needs { feature: Some(Feature::OwnFiles), ..PROCESSES };

/// Hands the list of all cases to another macro of this crate.
#[doc(hidden)]
#[macro_export]
macro_rules! with_conformance_cases {
    ($then:ident $(, $subject:expr)?) => {
        $crate::$then! { [$($subject)?]
            lifecycle::a_sandbox_runs_its_agent_and_leaves_nothing: NOTHING,
            lifecycle::verbs_are_refused_in_states_where_they_make_no_sense: NOTHING,
            lifecycle::a_pause_stops_it_and_a_resume_lets_it_run_on: NOTHING,
            lifecycle::it_is_destroyed_from_every_state: NOTHING,
            lifecycle::whoever_waits_for_its_end_learns_of_it: NOTHING,
            lifecycle::the_end_of_the_agent_is_the_end_of_the_sandbox: NOTHING,
            lifecycle::a_sandbox_outlives_its_host_and_is_found_again: NOTHING,
            lifecycle::a_deadline_is_kept_beside_the_sandbox: NOTHING,
            lifecycle::a_damaged_record_costs_the_sandbox_but_leaves_nothing: NOTHING,
            lifecycle::half_made_sandboxes_of_every_kind_are_removed: NOTHING,
            lifecycle::many_at_once_do_not_touch_each_other: NOTHING,
            lifecycle::two_instances_on_one_machine_see_only_their_own: NOTHING,
            processes::a_killed_agent_is_the_end_of_the_sandbox: PROCESSES,
            processes::what_an_agent_leaves_ends_with_it: PROCESSES,
            processes::what_wants_to_stay_is_destroyed: PROCESSES,
            processes::what_it_uses_is_counted: PROCESSES,
            limits::it_gets_no_more_cores_than_it_was_given: CPU_LIMIT,
            limits::memory_beyond_the_limit_ends_the_sandbox_and_says_so: MEMORY_LIMIT,
            limits::a_full_disk_is_a_clean_error_inside: DISK_LIMIT,
            limits::too_many_processes_end_the_sandbox_and_say_so: PROCESS_LIMIT,
            files::the_files_of_the_machine_are_not_there: OWN_FILES,
            files::a_template_is_read_and_never_written: OWN_FILES,
            files::a_template_that_is_absent_fails_and_leaves_nothing: OWN_FILES,
            files::every_sandbox_has_files_of_its_own: OWN_FILES,
            files::memory_file_systems_have_a_size: OWN_FILES,
            collect::what_a_sandbox_wrote_is_told_in_every_state: PROCESSES,
            collect::what_a_guest_sees_is_told_and_nothing_else: OWN_FILES,
            collect::names_and_kinds_of_all_sorts_are_told_or_counted: PROCESSES,
            collect::a_volume_is_not_entered: VOLUMES,
            collect::a_paused_one_is_told_from_its_image: CHECKPOINT_OF_PROCESSES,
            network::nothing_of_the_machine_is_reached: AIRLOCK,
            network::a_guest_has_one_interface_that_ends_at_the_server: AIRLOCK,
            network::a_guest_is_reached_by_the_server_alone: AIRLOCK,
            volumes::what_one_sandbox_does_on_a_volume_the_others_see: VOLUMES,
            volumes::a_full_volume_is_a_clean_error_inside: VOLUMES,
            volumes::a_volume_outlives_its_sandboxes_and_its_host: VOLUMES,
            volumes::what_comes_back_from_an_image_has_its_volumes: VOLUMES,
            checkpoint::two_children_go_on_from_one_image: CHECKPOINT,
            checkpoint::it_may_be_flushed_after_its_source_runs_again: CHECKPOINT,
            checkpoint::an_image_outlives_its_parent_and_its_host: CHECKPOINT,
            checkpoint::an_image_that_does_not_fit_is_refused_and_leaves_nothing: CHECKPOINT,
            checkpoint::it_starts_anew_from_its_disk: CHECKPOINT,
            checkpoint::one_that_was_compressed_is_what_it_was: CHECKPOINT,
            checkpoint::it_can_be_looked_at_while_it_comes_back: PREPARE_RESTORE,
            checkpoint::one_that_was_prepared_is_taken: PREPARE_RESTORE,
            checkpoint::one_that_was_prepared_stands_still_and_outlives_its_host: PREPARE_RESTORE,
            checkpoint::what_can_not_be_prepared_is_refused_and_leaves_nothing: PREPARE_RESTORE,
        }
    };
}

/// A test for each case: `conformance_tests!(SUBJECT)` in a module of its own.
#[macro_export]
macro_rules! conformance_tests {
    ($subject:expr) => {
        $crate::with_conformance_cases!(conformance_test_each, $subject);
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! conformance_test_each {
    ([$subject:expr] $($group:ident :: $case:ident : $needs:ident,)*) => {
        $(
            #[test]
            fn $case() {
                $crate::conformance::check(&$subject, stringify!($case));
            }
        )*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! conformance_table {
    ([] $($group:ident :: $case:ident : $needs:ident,)*) => {
        const CASES: &[Case] =
            &[$(Case { name: stringify!($case), needs: $needs, run: $group::$case },)*];
    };
}

with_conformance_cases!(conformance_table);
