//! The verdict on a probe, from what was witnessed where it must fail and where it must succeed.

use serde::Serialize;

/// What a witness saw of one attack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Sight {
    /// The attack got what it was after.
    Reached(String),
    /// It did not.
    Held(String),
}

/// An attack that was carried out, or the reason why it was not.
pub(super) type Attempt = Result<Sight, Failure>;

/// Why an attack was not carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// Nobody could witness what it does.
    NoWitness,
    /// It failed otherwise.
    Other(String),
}

/// The verdict on a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// The attack fails where it must fail, and succeeds where it must succeed.
    Held,
    /// It succeeds where it must fail.
    BrokenOut,
    /// It proves nothing: it could not be carried out, or fails where it must succeed.
    ControlFailed,
    /// It was not carried out.
    Skipped,
}

impl Verdict {
    /// As the JSON has it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::BrokenOut => "broken_out",
            Self::ControlFailed => "control_failed",
            Self::Skipped => "skipped",
        }
    }
}

/// Judges. Without a control, an attack that fails counts as held.
pub(super) fn judge(attack: &Attempt, control: Option<&Attempt>) -> (Verdict, String) {
    match (attack, control) {
        // A break is a break, whatever the control says.
        (Ok(Sight::Reached(what)), _) => (Verdict::BrokenOut, what.clone()),
        (Err(Failure::NoWitness), _) => {
            (Verdict::Skipped, "its witness would be on the machine of the server".to_owned())
        }
        (Err(Failure::Other(why)), _) => {
            (Verdict::ControlFailed, format!("the attack could not be carried out: {why}"))
        }
        (Ok(Sight::Held(what)), None | Some(Ok(Sight::Reached(_)))) => (Verdict::Held, what.clone()),
        (Ok(Sight::Held(_)), Some(Ok(Sight::Held(what)))) => {
            (Verdict::ControlFailed, format!("the attack fails where nothing stands in its way: {what}"))
        }
        (Ok(Sight::Held(_)), Some(Err(failure))) => {
            let why = match failure {
                Failure::NoWitness => "nobody witnesses it",
                Failure::Other(why) => why,
            };
            (Verdict::ControlFailed, format!("the control could not be carried out: {why}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_holds_only_if_it_fails_here_and_succeeds_there() {
        let reached = Ok(Sight::Reached("r".into()));
        let held = Ok(Sight::Held("h".into()));
        let failed = Err(Failure::Other("f".into()));
        let verdict = |attack: &Attempt, control| judge(attack, control).0;
        assert_eq!(verdict(&held, Some(&reached)), Verdict::Held);
        assert_eq!(verdict(&held, None), Verdict::Held);
        for control in [None, Some(&reached), Some(&held), Some(&failed)] {
            assert_eq!(verdict(&reached, control), Verdict::BrokenOut);
            assert_eq!(verdict(&failed, control), Verdict::ControlFailed);
        }
        assert_eq!(verdict(&held, Some(&held)), Verdict::ControlFailed);
        assert_eq!(verdict(&held, Some(&failed)), Verdict::ControlFailed);
        assert_eq!(verdict(&held, Some(&Err(Failure::NoWitness))), Verdict::ControlFailed);
        assert_eq!(verdict(&Err(Failure::NoWitness), None), Verdict::Skipped);
    }

    #[test]
    fn names_are_those_of_the_json() {
        for verdict in [Verdict::Held, Verdict::BrokenOut, Verdict::ControlFailed, Verdict::Skipped] {
            assert_eq!(serde_json::to_value(verdict).unwrap(), verdict.name());
        }
    }
}
