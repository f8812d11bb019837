//! Sandboxes that a request to one of their ports makes run again.
//!
//! Whoever may use a port of one may wake it, and nobody else: a request is judged by the tokens that it would need if the
//! sandbox ran, before anything is done for it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sandglass_store::SandboxRow;
use sandglass_types::{Error, ErrorKind, PauseMode, ResumeMode, SandboxId, SandboxState, TeamId};
use subtle::ConstantTimeEq as _;

use crate::control::{CONNECT_ATTEMPTS, Control};
use crate::live::Live;
use crate::{TrafficToken, not_found, stored};

/// What its history says of one that was woken.
const WHY: &str = "a request to one of its ports";

/// A sandbox that can't be reached, and that a request makes run again.
#[derive(Clone)]
pub struct Sleeper {
    id: SandboxId,
    team: TeamId,
    traffic_token: Option<TrafficToken>,
    access_token: Option<String>,
    timeout: Duration,
}

impl fmt::Debug for Sleeper {
    /// Leaves out the tokens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sleeper").field("id", &self.id).field("team", &self.team).finish_non_exhaustive()
    }
}

impl Sleeper {
    /// The sandbox of this row, if a request makes it run again.
    #[must_use]
    pub fn of(row: &SandboxRow) -> Option<Self> {
        use SandboxState::{Creating, Ended, Ending, Paused, Pausing, Resuming, Running};
        let has_memory = match row.state {
            Pausing | Paused | Resuming => row.pause_mode == PauseMode::Full,
            // A server that has just started does not reach it yet.
            Running => true,
            Creating | Ending | Ended => false,
        };
        (has_memory && row.lifetime.on_timeout.auto_resumes()).then(|| Self {
            id: row.id.clone(),
            team: row.team,
            traffic_token: row.traffic_token.clone().map(TrafficToken::new),
            access_token: row.access_token.clone(),
            timeout: row.lifetime.timeout,
        })
    }

    /// Its id.
    #[must_use]
    pub const fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Whose it is.
    #[must_use]
    pub const fn team(&self) -> TeamId {
        self.team
    }

    /// What opens its ports, the guest API's aside; `None` leaves them open.
    #[must_use]
    pub const fn traffic_token(&self) -> Option<&TrafficToken> {
        self.traffic_token.as_ref()
    }

    /// Whether what a client sent opens its guest API. The time that this takes says nothing about the token.
    #[must_use]
    pub fn opens_guest_api(&self, sent: Option<&[u8]>) -> bool {
        let Some(token) = &self.access_token else { return true };
        sent.is_some_and(|sent| !sent.is_empty() && token.as_bytes().ct_eq(sent).into())
    }
}

impl Control {
    /// A sandbox that can't be reached now, if a request makes it run again. Whoever asks: the request is judged by the
    /// sandbox's own tokens.
    ///
    /// # Errors
    /// The store failed.
    pub async fn sleeper(&self, id: &SandboxId) -> Result<Option<Sleeper>, Error> {
        let row = self.shared().store.sandbox(id).await.map_err(stored)?;
        Ok(row.as_ref().and_then(Sleeper::of))
    }

    /// Makes it run again for the time that it was given at its creation, and waits until it can be reached. However many
    /// ask at once, it is resumed once.
    ///
    /// # Errors
    /// As [`Control::resume`]: it is paused as before.
    pub async fn wake(&self, sleeper: &Sleeper) -> Result<Arc<Live>, Error> {
        let shared = self.shared();
        let timeout = sleeper.timeout.min(shared.config.max_lifetime);
        for _ in 0..CONNECT_ATTEMPTS {
            let owner = shared.owner(&sleeper.id).ok_or_else(|| not_found(&sleeper.id))?;
            owner.resume(&sleeper.id, timeout, ResumeMode::Restore, WHY).await?;
            // Or somebody has paused it again.
            if let Some(live) = shared.live.get(&sleeper.id) {
                return Ok(live);
            }
        }
        Err(Error::new(ErrorKind::Conflict, "the sandbox is paused again and again: try again"))
    }
}

#[cfg(test)]
mod tests {
    use sandglass_types::OnTimeout;

    use super::*;
    use crate::reconcile::tests::row;

    #[test]
    fn only_what_has_its_memory_and_asked_for_it_is_woken() {
        use SandboxState::{Creating, Ended, Ending, Paused, Pausing, Resuming, Running};
        let states = [Creating, Running, Pausing, Paused, Resuming, Ending, Ended];
        let woken = |on_timeout, pause_mode| {
            states.map(|state| {
                let mut row = row(&SandboxId::random(), state);
                (row.lifetime.on_timeout, row.pause_mode) = (on_timeout, pause_mode);
                Sleeper::of(&row).is_some()
            })
        };
        let [full, files] = [PauseMode::Full, PauseMode::Filesystem];
        let asked = OnTimeout::Pause { auto_resume: true };
        assert_eq!(woken(asked, full), [false, true, true, true, true, false, false]);
        assert_eq!(woken(asked, files), [false, true, false, false, false, false, false]);
        for other in [OnTimeout::Kill, OnTimeout::Pause { auto_resume: false }, OnTimeout::PauseFilesystem] {
            assert_eq!(woken(other, full), [false; 7]);
        }
    }

    #[test]
    fn the_guest_api_opens_for_its_token_alone() {
        let mut row = row(&SandboxId::random(), SandboxState::Paused);
        row.lifetime.on_timeout = OnTimeout::Pause { auto_resume: true };
        assert!(Sleeper::of(&row).unwrap().opens_guest_api(None), "it wants none");
        for token in ["secret", ""] {
            row.access_token = Some(token.into());
            let sleeper = Sleeper::of(&row).unwrap();
            for sent in [None, Some(&b""[..]), Some(b"secre"), Some(b"Secret"), Some(b"secrets")] {
                assert!(!sleeper.opens_guest_api(sent), "{sent:?}");
            }
            assert_eq!(sleeper.opens_guest_api(Some(b"secret")), token == "secret");
            assert!(!format!("{sleeper:?}").contains("secret"));
        }
    }
}
