//! One sandbox for each of an application's users, however often and from wherever it is asked for.

use std::time::Duration;

use sandglass_store::{Assignment, SandboxRow};
use sandglass_types::{Error, ErrorKind, ResumeMode, SandboxState, TeamId, UserName};
use tokio::time::{Instant, sleep};

use super::{Control, stored};
use crate::request::CreateSandbox;

/// How long it is waited for a sandbox that another request is making, or that ends.
const PATIENCE: Duration = Duration::from_secs(60);

/// The wait between two looks at it.
const LOOK: Duration = Duration::from_millis(50);

/// How a user's sandbox was come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CameBy {
    /// It was running.
    Found,
    /// It was paused.
    Resumed,
    /// There was none.
    Created,
}

impl CameBy {
    /// As answers have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Found => "found",
            Self::Resumed => "resumed",
            Self::Created => "created",
        }
    }
}

impl Control {
    /// Makes sure that a user's sandbox runs, for at least the request's timeout from now. One that they have is kept as it
    /// is, and resumed if it is paused; only if they have none it is made as the request says.
    ///
    /// # Errors
    /// As [`Control::create`] and [`Control::connect`]. A sandbox that can't be resumed stays the user's.
    pub async fn assign(
        &self,
        team: TeamId,
        user: &UserName,
        request: CreateSandbox,
    ) -> Result<(SandboxRow, CameBy), Error> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let theirs = self.assignments(team, user).await?.into_iter().find(|one| one.until.is_none());
            let row = match theirs {
                Some(one) => Some(self.record(team, &one.sandbox).await?),
                None => None,
            };
            match row {
                Some(row) if row.state == SandboxState::Creating => {}
                Some(row) if !matches!(row.state, SandboxState::Ending | SandboxState::Ended) => {
                    match self.connect(team, &row.id, request.lifetime.timeout, ResumeMode::Restore).await {
                        // Its end has begun in between.
                        Err(error) if error.kind() == ErrorKind::NotFound => {}
                        connected => {
                            let (row, resumed) = connected?;
                            return Ok((row, if resumed { CameBy::Resumed } else { CameBy::Found }));
                        }
                    }
                }
                _ => {
                    if let Some(row) = self.create_for(team, user, request.clone()).await? {
                        return Ok((row, CameBy::Created));
                    }
                }
            }
            if Instant::now() >= deadline {
                let message = "the user's sandbox is still being made: try again";
                return Err(Error::new(ErrorKind::Conflict, message));
            }
            sleep(LOOK).await;
        }
    }

    /// A user's present sandbox, first and without an end if there is one, and those before.
    ///
    /// # Errors
    /// The store failed.
    pub async fn assignments(&self, team: TeamId, user: &UserName) -> Result<Vec<Assignment>, Error> {
        self.0.store.assignments(team, user).await.map_err(stored)
    }

    /// Takes a user's sandbox from them: the next [`Control::assign`] makes another. It runs on until somebody ends it, or
    /// its time is up.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if they have none.
    pub async fn release(&self, team: TeamId, user: &UserName) -> Result<(), Error> {
        let released = self.0.store.release(team, user, self.0.clock.now()).await.map_err(stored)?;
        if released { Ok(()) } else { Err(Error::new(ErrorKind::NotFound, "this user has no sandbox")) }
    }
}
