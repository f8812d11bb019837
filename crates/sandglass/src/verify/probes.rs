//! The probes, and how they are carried out.

mod files;
mod isolation;
pub(super) mod lifecycle;
pub(super) mod limits;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use futures_util::future::join;
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::checklist::Point;
use super::egress;
use super::ground::{Ground, Grounds, NoStage, Weak};
use super::judge::{Attempt, Failure, Sight, Verdict, judge};

/// The longest that one attack may take, with all that it waits for.
const PATIENCE: Duration = Duration::from_secs(150);

/// What a probe is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(crate) enum Group {
    /// The machine below the sandbox
    Isolation,
    /// Files and interfaces through which clients reach in
    FilesAndApi,
    /// What leaves a sandbox
    Egress,
    /// What a sandbox can use up
    Limits,
    /// What is left of a sandbox
    Lifecycle,
}

/// One attack.
#[derive(Clone, Copy)]
pub(super) struct Probe {
    /// Its name, for ever: `GROUP.WHAT`.
    pub(super) id: &'static str,
    pub(super) group: Group,
    /// What it tries, as a verb phrase.
    pub(super) what: &'static str,
    /// The points of the checklist that stand on it, [`Point::Tested`] apart, which stands on all.
    pub(super) points: &'static [Point],
    /// Where it must succeed.
    pub(super) control: Control,
    pub(super) attack: Attack,
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Probe").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Where an attack must succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Control {
    /// Where sandboxes are processes of the stage, as root.
    Bare,
    /// On the strict ground itself, where the probe asks for something weaker.
    Asked,
}

/// What an attack is about to do, on some ground, and in earnest or as the control.
pub(super) type Attack = fn(Aim<'_>) -> Pin<Box<dyn Future<Output = anyhow::Result<Sight>> + Send + '_>>;

/// Where an attack is carried out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Aim<'a> {
    /// The probe's name.
    pub(super) id: &'static str,
    pub(super) ground: &'a Ground,
    /// Whether it must succeed.
    pub(super) control: bool,
}

/// What came of one.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Outcome {
    #[serde(skip)]
    pub(super) probe: Probe,
    pub(super) verdict: Verdict,
    pub(super) why: String,
}

/// All probes.
pub(super) fn all() -> impl Iterator<Item = Probe> {
    let tables = [isolation::PROBES, files::PROBES, limits::PROBES, lifecycle::PROBES];
    tables.into_iter().flatten().copied().chain(egress::probes())
}

/// Carries out all probes of these groups; an empty list means all groups.
///
/// Groups that do not get into each other's way are carried out side by side.
pub(super) async fn run(grounds: &Grounds, only: &[Group]) -> Vec<Outcome> {
    let wanted = |group: Group| only.is_empty() || only.contains(&group);
    let (first, second) = join(
        join(group(grounds, Group::Isolation, wanted), group(grounds, Group::Egress, wanted)),
        group(grounds, Group::FilesAndApi, wanted),
    )
    .await;
    let limits = group(grounds, Group::Limits, wanted).await;
    let lifecycle = group(grounds, Group::Lifecycle, wanted).await;
    [first.0, second, first.1, limits, lifecycle].concat()
}

async fn group(grounds: &Grounds, group: Group, wanted: impl Fn(Group) -> bool) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for probe in all().filter(|probe| probe.group == group) {
        let (verdict, why) = if wanted(group) {
            carry_out(grounds, probe).await
        } else {
            (Verdict::Skipped, "not asked for".to_owned())
        };
        outcomes.push(Outcome { probe, verdict, why });
    }
    outcomes
}

async fn carry_out(grounds: &Grounds, probe: Probe) -> (Verdict, String) {
    let started = Instant::now();
    let Some(weak) = &grounds.weak else {
        return judge(&attempt(probe, &grounds.strict, false).await, None);
    };
    let attack = attempt(probe, &grounds.strict, false).await;
    let (first, before) = (started.elapsed(), Instant::now());
    let control = attempt(probe, ground_of(probe, grounds, weak), true).await;
    tracing::debug!(id = probe.id, attack = ?first, control = ?before.elapsed(), ?control, "carried out");
    judge(&attack, Some(&control))
}

fn ground_of<'a>(probe: Probe, grounds: &'a Grounds, weak: &'a Weak) -> &'a Arc<Ground> {
    match probe.control {
        Control::Bare => &weak.bare,
        Control::Asked => &grounds.strict,
    }
}

async fn attempt(probe: Probe, ground: &Ground, control: bool) -> Attempt {
    match timeout(PATIENCE, (probe.attack)(Aim { id: probe.id, ground, control })).await {
        Ok(Ok(sight)) => Ok(sight),
        Ok(Err(error)) if error.is::<NoStage>() => Err(Failure::NoWitness),
        Ok(Err(error)) => Err(Failure::Other(format!("{error:#}"))),
        Err(_) => Err(Failure::Other(format!("it took more than {} s", PATIENCE.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_probe_has_a_name_of_its_group_and_points() {
        let mut seen = BTreeSet::new();
        for probe in all() {
            let (group, name) = probe.id.split_once('.').unwrap();
            assert_eq!(serde_json::to_value(probe.group).unwrap(), group, "{}", probe.id);
            let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            assert!(!name.is_empty() && name.chars().all(plain), "{}", probe.id);
            assert!(!probe.points.is_empty() && !probe.points.contains(&Point::Tested), "{}", probe.id);
            assert!(seen.insert(probe.id), "{} is there twice", probe.id);
        }
    }
}
