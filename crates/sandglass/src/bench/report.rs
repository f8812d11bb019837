//! What a bench found, for people and for programs.

use std::io::Write;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use serde::Serialize;
use serde_json::Value;

use super::stats::Summary;

/// Most failures whose text is kept; all are counted.
const MAX_TEXTS: usize = 50;

/// Whether a target bounds from above or from below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bound {
    AtMost,
    AtLeast,
}

/// One thing that was measured many times.
#[derive(Debug, Serialize)]
pub(crate) struct Series {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) summary: Option<Summary>,
    pub(crate) samples: Vec<f64>,
}

/// What was wanted, and what is.
#[derive(Debug, Serialize)]
pub(crate) struct Target {
    pub(crate) name: &'static str,
    pub(crate) bound: Bound,
    pub(crate) limit: f64,
    pub(crate) unit: &'static str,
    /// `None` if it was not measured in this run.
    pub(crate) value: Option<f64>,
    pub(crate) met: Option<bool>,
}

/// All of one run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) bench: &'static str,
    pub(crate) series: Vec<Series>,
    pub(crate) targets: Vec<Target>,
    pub(crate) failed: usize,
    pub(crate) failures: Vec<String>,
    pub(crate) notes: Vec<String>,
    /// What the ledger said at the end; `None` about a server that somebody else runs.
    pub(crate) ledger: Option<Value>,
}

impl Report {
    pub(crate) const fn new(bench: &'static str) -> Self {
        Self {
            bench,
            series: Vec::new(),
            targets: Vec::new(),
            failed: 0,
            failures: Vec::new(),
            notes: Vec::new(),
            ledger: None,
        }
    }

    /// Adds samples, and answers what they say.
    pub(crate) fn series(
        &mut self,
        name: &'static str,
        unit: &'static str,
        samples: Vec<f64>,
    ) -> Option<Summary> {
        let summary = Summary::of(&samples);
        self.series.push(Series { name, unit, summary, samples });
        summary
    }

    pub(crate) fn target(
        &mut self,
        name: &'static str,
        bound: Bound,
        limit: f64,
        unit: &'static str,
        value: Option<f64>,
    ) {
        let met = value.map(|value| match bound {
            Bound::AtMost => value <= limit,
            Bound::AtLeast => value >= limit,
        });
        self.targets.push(Target { name, bound, limit, unit, value, met });
    }

    pub(crate) fn fail(&mut self, text: impl Into<String>) {
        self.failed += 1;
        if self.failures.len() < MAX_TEXTS {
            self.failures.push(text.into());
        }
    }

    /// Counts a failure instead of a result.
    pub(crate) fn keep<T>(&mut self, result: anyhow::Result<T>) -> Option<T> {
        result.map_err(|error| self.fail(format!("{error:#}"))).ok()
    }

    pub(crate) fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// Whether something was wanted, measured, and is not so.
    pub(crate) fn missed(&self) -> bool {
        self.targets.iter().any(|target| target.met == Some(false))
    }

    pub(crate) fn text(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let mut series = Table::new();
        series.load_style(NOTHING).set_header([self.bench, "n", "p50", "p95", "p99", "max", "mean", ""]);
        for one in &self.series {
            let numbers = one.summary.map_or([const { String::new() }; 5], |summary| {
                let Summary { p50, p95, p99, max, mean, .. } = summary;
                [p50, p95, p99, max, mean].map(shown)
            });
            let n = one.samples.len().to_string();
            let [p50, p95, p99, max, mean] = numbers;
            series.add_row([one.name.to_owned(), n, p50, p95, p99, max, mean, one.unit.to_owned()]);
        }
        writeln!(out, "{}", series.trim_fmt())?;
        if !self.targets.is_empty() {
            let mut targets = Table::new();
            targets.load_style(NOTHING).set_header(["target", "", "limit", "measured", "", ""]);
            for target in &self.targets {
                let bound = match target.bound {
                    Bound::AtMost => "at most",
                    Bound::AtLeast => "at least",
                };
                let met = match target.met {
                    Some(true) => "met",
                    Some(false) => "MISSED",
                    None => "not measured",
                };
                let value = target.value.map(shown).unwrap_or_default();
                targets.add_row([target.name, bound, &shown(target.limit), &value, target.unit, met]);
            }
            writeln!(out, "\n{}", targets.trim_fmt())?;
        }
        writeln!(out, "\nfailures: {}", self.failed)?;
        for text in &self.failures {
            writeln!(out, "  {text}")?;
        }
        for note in &self.notes {
            writeln!(out, "note: {note}")?;
        }
        Ok(())
    }

    /// Scripts rely on it: fields are added, never renamed.
    pub(crate) fn json(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        serde_json::to_writer_pretty(&mut *out, self)?;
        Ok(out.write_all(b"\n")?)
    }
}

/// Three digits that mean something.
fn shown(value: f64) -> String {
    let places = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.places$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("example");
        report.series("request", "ms", vec![3.0, 1.0, 2.0]);
        report.series("nothing", "ms", vec![]);
        report.target("at most, met", Bound::AtMost, 2.0, "ms", Some(2.0));
        report.target("at least, missed", Bound::AtLeast, 200.0, "MB/s", Some(123.4));
        report.target("not run", Bound::AtMost, 1.0, "", None);
        report.keep::<()>(Err(anyhow::anyhow!("no answer").context("request 7")));
        report
    }

    #[test]
    fn people_read_what_was_met() {
        let mut out = Vec::new();
        report().text(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let line = |start: &str| text.lines().find(|line| line.trim().starts_with(start)).unwrap().to_owned();
        assert!(line("at most, met").ends_with("met"), "{text}");
        assert!(line("at least, missed").ends_with("MISSED"), "{text}");
        assert!(line("not run").ends_with("not measured"), "{text}");
        assert!(line("request 7").contains("no answer"), "{text}");
        assert!(
            line("request ")
                .split_whitespace()
                .eq(["request", "3", "2.00", "3.00", "3.00", "3.00", "2.00", "ms"])
        );
    }

    #[test]
    fn programs_read_every_sample() {
        let mut out = Vec::new();
        let report = report();
        report.json(&mut out).unwrap();
        let value: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["series"][0]["samples"], serde_json::json!([3.0, 1.0, 2.0]));
        assert_eq!(value["series"][1]["summary"], Value::Null);
        assert_eq!(value["targets"][1]["met"], false);
        assert_eq!(value["targets"][1]["bound"], "at_least");
        assert_eq!((&value["failed"], &value["ledger"]), (&serde_json::json!(1), &Value::Null));
        assert!(report.missed());
    }

    #[test]
    fn failures_without_end_are_counted_and_not_kept() {
        let mut report = Report::new("example");
        (0..1000).for_each(|n| report.fail(n.to_string()));
        assert_eq!((report.failed, report.failures.len()), (1000, MAX_TEXTS));
    }
}
