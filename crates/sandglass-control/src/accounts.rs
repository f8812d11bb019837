//! Teams and their keys, as far as a key has to do with them.

use sandglass_store::{ApiKey, Identity, StoreError, Team, TeamSample};
use sandglass_types::{Error, ErrorKind, KeyId, Name, TeamId, Timestamp};

use crate::control::{Control, stored};
use crate::secret::NewKey;

/// What is wrong with a change of a key that was not made. Pure: `keys` are those of the team, by now.
fn why_not(keys: &[ApiKey], by: &Identity, id: KeyId) -> Error {
    let works = |id: KeyId| keys.iter().find(|key| key.id == id && key.revoked_at.is_none());
    if works(by.key).is_none() {
        return Error::new(ErrorKind::Unauthenticated, "this key was revoked");
    }
    match works(id) {
        None => Error::new(ErrorKind::NotFound, format!("the team has no key {id}")),
        Some(key) if key.operator && !by.operator => {
            Error::new(ErrorKind::Forbidden, "this key is an operator's: only another operator's changes it")
        }
        Some(_) => Error::new(
            ErrorKind::Conflict,
            "this is the last key of the team: make another one first, or end it on the server's machine with \
             `sandglass key revoke`",
        ),
    }
}

impl Control {
    /// The team of a key that works.
    ///
    /// # Errors
    /// [`ErrorKind::Unauthenticated`] if it was revoked meanwhile, or the store failed.
    pub async fn team(&self, team: TeamId) -> Result<Team, Error> {
        let teams = self.shared().store.teams().await.map_err(stored)?;
        let found = teams.into_iter().find(|one| one.id == team && one.revoked_at.is_none());
        found.ok_or_else(|| Error::new(ErrorKind::Unauthenticated, "the team of this key was revoked"))
    }

    /// The keys of a team that work, oldest first.
    ///
    /// # Errors
    /// The store failed.
    pub async fn keys(&self, team: TeamId) -> Result<Vec<ApiKey>, Error> {
        let mut keys = self.shared().store.keys(Some(team)).await.map_err(stored)?;
        keys.retain(|key| key.revoked_at.is_none());
        Ok(keys)
    }

    /// Makes a key for the team of another one, that can do what all keys of teams can. No key makes an operator's.
    ///
    /// # Errors
    /// [`ErrorKind::Quota`] if the team has [`sandglass_store::MAX_KEYS`], or what went wrong.
    pub async fn create_key(&self, by: &Identity, name: Name) -> Result<NewKey, Error> {
        let shared = self.shared();
        let new = NewKey::random(by.team, name, false, Some(by.key), shared.clock.now())?;
        match shared.store.create_key(&new.key).await {
            Ok(()) => Ok(new),
            Err(error @ StoreError::TooMany { .. }) => Err(Error::new(ErrorKind::Quota, error.to_string())),
            // Since the request was let in.
            Err(StoreError::Missing { .. }) => {
                Err(Error::new(ErrorKind::Unauthenticated, "this key was revoked"))
            }
            Err(error) => Err(stored(error)),
        }
    }

    /// Calls a key of a key's own team otherwise.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::Forbidden`] for an operator's if `by` is none.
    pub async fn rename_key(&self, by: &Identity, id: KeyId, name: &Name) -> Result<ApiKey, Error> {
        let renamed = self.shared().store.rename_key(by, id, name).await.map_err(stored)?;
        let keys = self.keys(by.team).await?;
        let refused = why_not(&keys, by, id);
        keys.into_iter().find(|key| renamed && key.id == id).ok_or(refused)
    }

    /// Ends a key of a key's own team, be it itself: the next request with it is refused.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::Forbidden`] for an operator's if `by` is none; [`ErrorKind::Conflict`] for the
    /// last key of the team.
    pub async fn end_key(&self, by: &Identity, id: KeyId) -> Result<(), Error> {
        let shared = self.shared();
        if shared.store.retire_key(by, id, shared.clock.now()).await.map_err(stored)? {
            return Ok(());
        }
        Err(why_not(&self.keys(by.team).await?, by, id))
    }

    /// What a team had from `from` to `to`, both included: every minute in the last day, oldest first. Minutes in which it had
    /// nothing may be missing.
    ///
    /// # Errors
    /// The store failed.
    pub async fn team_samples(
        &self,
        team: TeamId,
        from: Option<Timestamp>,
        to: Option<Timestamp>,
    ) -> Result<Vec<TeamSample>, Error> {
        self.shared().store.team_samples(team, from, to).await.map_err(stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(operator: bool, revoked: bool) -> ApiKey {
        let at = Timestamp::from_millis(0);
        let name = "a".parse().unwrap();
        let NewKey { key, .. } = NewKey::random(TeamId::random(), name, operator, None, at).unwrap();
        ApiKey { revoked_at: revoked.then_some(at), ..key }
    }

    #[test]
    fn what_is_not_done_to_a_key_has_its_reason() {
        let keys = [key(false, false), key(true, false), key(false, true)];
        for (operator, target, kind) in [
            (false, keys[0].id, ErrorKind::Conflict),
            (false, keys[1].id, ErrorKind::Forbidden),
            (true, keys[1].id, ErrorKind::Conflict),
            (true, keys[2].id, ErrorKind::NotFound),
            (true, KeyId::random(), ErrorKind::NotFound),
        ] {
            let by = Identity { team: keys[0].team, key: keys[0].id, operator };
            assert_eq!(why_not(&keys, &by, target).kind(), kind, "{operator} {target}");
        }
    }
}
