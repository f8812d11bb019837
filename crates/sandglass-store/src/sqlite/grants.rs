//! Who may spend which budget, and the tables of prices.

use sandglass_types::{Digest, SandboxId, TeamId, Timestamp};
use sqlx::Row as _;

use super::{SqliteStore, database, rows, spending};
use crate::{BudgetRow, Granted, ModelGrant, Money, StoreError};

/// Most budgets that are closed at one time; the rest follows.
const AT_ONE_TIME: i64 = 256;

/// Which budgets nobody can spend any more.
macro_rules! unheld {
    () => {
        "with_sandboxes AND closed_at IS NULL AND reserved = 0 AND NOT EXISTS \
         (SELECT 1 FROM sandboxes s WHERE s.models_budget = budgets.id AND s.state <> 'ended')"
    };
}

const ANY_UNHELD: &str = concat!("SELECT EXISTS (SELECT 1 FROM budgets WHERE ", unheld!(), ")");

const CLOSE_UNHELD: &str = concat!(
    "UPDATE budgets SET closed_at = ?1 WHERE id IN (SELECT id FROM budgets WHERE ",
    unheld!(),
    " LIMIT ?2)"
);

impl SqliteStore {
    pub(super) async fn grant_money(&self, id: &SandboxId, money: &Money) -> Result<Granted, StoreError> {
        let mut change = self.write_durably().await?;
        let found = sqlx::query(
            "SELECT team, models_budget, models_origin FROM sandboxes WHERE id = ?1 AND state = 'running'",
        )
        .bind(id.as_str())
        .fetch_optional(&mut *change)
        .await
        .map_err(database)?;
        let Some(found) = found else { return Ok(Granted::NotRunning) };
        let corrupt = |error| rows::corrupt("sandbox", error);
        let team: TeamId = rows::parse("team", found.try_get("team").map_err(corrupt)?)?;
        let had = rows::models(&found)?;
        let wanted = match money {
            Money::New(new) => {
                spending::insert_new(&mut change, new).await?;
                &new.id
            }
            Money::Of(budget) => budget,
        };
        let row = spending::budget(&mut change, wanted).await?;
        if row.is_none_or(|row| row.team != team || row.closed_at.is_some()) {
            return Ok(Granted::NoBudget);
        }
        match had {
            // Tokens that were made for what it was forked from are good on.
            Some(had) if had.budget == *wanted => return Ok(Granted::Done(had)),
            Some(had) => {
                let row = spending::budget(&mut change, &had.budget).await?;
                if row.is_some_and(|row| row.closed_at.is_none()) {
                    return Ok(Granted::Has(had.budget));
                }
            }
            None => {}
        }
        sqlx::query("UPDATE sandboxes SET models_budget = ?2, models_origin = ?1 WHERE id = ?1")
            .bind(id.as_str())
            .bind(wanted.as_str())
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(Granted::Done(ModelGrant { budget: wanted.clone(), origin: id.clone() }))
    }

    pub(super) async fn money_of(
        &self,
        id: &SandboxId,
    ) -> Result<Option<(ModelGrant, BudgetRow)>, StoreError> {
        let mut reader = self.readers.acquire().await.map_err(database)?;
        let found = sqlx::query(
            "SELECT models_budget, models_origin FROM sandboxes \
             WHERE id = ?1 AND models_budget IS NOT NULL AND state NOT IN ('ending', 'ended')",
        )
        .bind(id.as_str())
        .fetch_optional(&mut *reader)
        .await
        .map_err(database)?;
        let Some(found) = found else { return Ok(None) };
        let Some(grant) = rows::models(&found)? else { return Ok(None) };
        let row = spending::budget(&mut reader, &grant.budget).await?;
        Ok(row.map(|row| (grant, row)))
    }

    pub(super) async fn end_unheld_budgets(&self, now: Timestamp) -> Result<u64, StoreError> {
        // Mostly there is none, and nobody waits for a disk to hear that.
        let any: bool = sqlx::query_scalar(ANY_UNHELD).fetch_one(&self.readers).await.map_err(database)?;
        if !any {
            return Ok(0);
        }
        let mut change = self.write_durably().await?;
        let done = sqlx::query(CLOSE_UNHELD)
            .bind(now.as_millis())
            .bind(AT_ONE_TIME)
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(done.rows_affected())
    }

    pub(super) async fn insert_prices(&self, digest: Digest, models: &str) -> Result<(), StoreError> {
        let mut change = self.write_durably().await?;
        sqlx::query("INSERT INTO prices (digest, models) VALUES (?1, ?2) ON CONFLICT (digest) DO NOTHING")
            .bind(digest.to_string())
            .bind(models)
            .execute(&mut *change)
            .await
            .map_err(database)?;
        change.commit().await.map_err(database)
    }

    pub(super) async fn prices_of(&self, digest: Digest) -> Result<Option<String>, StoreError> {
        sqlx::query_scalar("SELECT models FROM prices WHERE digest = ?1")
            .bind(digest.to_string())
            .fetch_optional(&self.readers)
            .await
            .map_err(database)
    }
}
