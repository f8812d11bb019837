//! What was found, for people and for programs.

use std::io::{self, Write};
use std::process::ExitCode;

use comfy_table::{Table, presets};
use serde_json::json;

use super::checklist::Point;
use super::judge::Verdict;
use super::probes::{self, Outcome};
use super::{BROKEN, SKIPPED};

/// Prints all. `controls` says whether there were any.
pub(super) fn print(
    outcomes: &[Outcome],
    json: bool,
    controls: bool,
    out: &mut impl Write,
) -> io::Result<()> {
    if json { as_json(outcomes, out) } else { as_text(outcomes, controls, out) }
}

/// What to exit with: 0 only if every probe held.
pub(super) fn code(outcomes: &[Outcome]) -> ExitCode {
    let any = |verdict| outcomes.iter().any(|outcome| outcome.verdict == verdict);
    if any(Verdict::BrokenOut) || any(Verdict::ControlFailed) || outcomes.is_empty() {
        ExitCode::from(BROKEN)
    } else if any(Verdict::Skipped) {
        ExitCode::from(SKIPPED)
    } else {
        ExitCode::SUCCESS
    }
}

/// Lists the probes.
pub(super) fn list(out: &mut impl Write) -> io::Result<()> {
    let mut table = table(["PROBE", "TRIES TO"]);
    for probe in probes::all() {
        table.add_row([probe.id, probe.what]);
    }
    writeln!(out, "{table}")
}

fn as_json(outcomes: &[Outcome], out: &mut impl Write) -> io::Result<()> {
    let probes: Vec<_> = outcomes
        .iter()
        .map(|Outcome { probe, verdict, why }| {
            json!({"id": probe.id, "group": probe.group, "verdict": verdict, "why": why})
        })
        .collect();
    writeln!(out, "{:#}", json!({ "probes": probes }))
}

fn as_text(outcomes: &[Outcome], controls: bool, out: &mut impl Write) -> io::Result<()> {
    let mut probes = table(["PROBE", "VERDICT", "TRIES TO", "WHY"]);
    for Outcome { probe, verdict, why } in outcomes {
        probes.add_row([probe.id, verdict.name(), probe.what, why]);
    }
    writeln!(out, "{probes}\n")?;
    if !controls {
        writeln!(out, "Without controls: an attack that could not succeed anywhere counts as held.\n")?;
    }
    let mut points = table(["", "CHECKLIST", "PROBES BEHIND IT"]);
    for point in Point::ALL {
        let behind: Vec<&Outcome> = outcomes
            .iter()
            .filter(|outcome| point == Point::Tested || outcome.probe.points.contains(&point))
            .collect();
        let held = !behind.is_empty() && behind.iter().all(|outcome| outcome.verdict == Verdict::Held);
        let names = if point == Point::Tested {
            format!("all {}", behind.len())
        } else {
            behind.iter().map(|outcome| outcome.probe.id).collect::<Vec<_>>().join(" ")
        };
        points.add_row([if held { "✓" } else { "✗" }, point.text(), &names]);
    }
    writeln!(out, "{points}\n")?;
    let count = |verdict| outcomes.iter().filter(|outcome| outcome.verdict == verdict).count();
    let (held, all) = (count(Verdict::Held), outcomes.len());
    let (broken, failed) = (count(Verdict::BrokenOut), count(Verdict::ControlFailed));
    writeln!(
        out,
        "{held} of {all} probes held; {broken} broke out, {failed} controls failed, {} were skipped",
        count(Verdict::Skipped)
    )
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_content_arrangement(comfy_table::ContentArrangement::Dynamic);
    table.set_header(header);
    table
}
