//! One thing that was looked at, and what came of it.

use std::borrow::Cow;

use serde::Serialize;

use crate::startup::{Reason, StartupError};

/// What it means for sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// As it should be.
    Good,
    /// Sandboxes can be made, but an operator should know.
    Note,
    /// Sandboxes can't be made.
    Bad,
}

impl Verdict {
    /// How a person sees it.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Note => "note",
            Self::Bad => "BAD",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Check {
    name: &'static str,
    verdict: Verdict,
    /// What was found.
    finding: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<Cow<'static, str>>,
    /// Why `serve` would not start.
    #[serde(skip)]
    reason: Option<Reason>,
}

impl Check {
    pub(crate) fn good(name: &'static str, finding: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Good, finding: finding.into(), remedy: None, reason: None }
    }

    pub(crate) fn note(name: &'static str, finding: impl Into<String>) -> Self {
        Self { verdict: Verdict::Note, ..Self::good(name, finding) }
    }

    /// With the usual remedy of its reason.
    pub(crate) fn bad(name: &'static str, reason: Reason, finding: impl Into<String>) -> Self {
        let remedy = Some(reason.remedy().into());
        Self { verdict: Verdict::Bad, remedy, reason: Some(reason), ..Self::good(name, finding) }
    }

    /// What only root can look at.
    pub(crate) fn only_for_root(name: &'static str) -> Self {
        Self::note(name, "not looked at: that takes root")
    }

    pub(crate) fn with_remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    pub(crate) const fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) const fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Finding and remedy.
    pub(crate) fn text(&self) -> String {
        match &self.remedy {
            Some(remedy) => format!("{}: {remedy}", self.finding),
            None => self.finding.clone(),
        }
    }

    /// What a start fails with for it, if it does.
    pub(crate) fn into_failure(self) -> Option<StartupError> {
        let what = format!("{}: {}", self.name, self.finding);
        Some(StartupError::with_remedy(self.reason?, what, self.remedy.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_bad_stops_a_start() {
        assert!(Check::good("x", "y").into_failure().is_none());
        assert!(Check::note("x", "y").into_failure().is_none());
        let failure = Check::bad("x", Reason::NoCgroups, "y").with_remedy("z").into_failure().unwrap();
        assert_eq!((failure.reason(), failure.to_string().as_str()), (Reason::NoCgroups, "x: y: z"));
    }
}
