//! Money. One conditional statement decides whether something is set aside; nothing in memory has a say.
//!
//! What is set aside and settled survives the death of the server, but not a loss of power: a call takes longer than one. What a
//! budget came to in the end survives that as well.

use sandglass_types::{BudgetId, CallId, Micros, TeamId, Timestamp};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteConnection};

use super::{SqliteStore, database, exists_or_database, rows, teams};
use crate::{BudgetRow, CallRow, Charge, MAX_CALLS, NewBudget, Reservation, Reserved, StoreError};

/// Milliseconds of a day.
const DAY: i64 = 24 * 3600 * 1000;

/// The days of a team that count for a cap: today, and this month. `?4` is the day.
macro_rules! spent {
    ($days:literal) => {
        concat!(
            "(SELECT coalesce(sum(s.reserved + s.charged), 0) FROM spending s WHERE s.team = budgets.team AND ",
            $days,
            ") + ?2"
        )
    };
}

/// Sets `?2` aside in budget `?1`, within the caps `?3` of a day and `?5` of a month, of which `?6` is the first day. What was overrun is
/// not charged to a budget, but it can't be spent once more either: or what is billed above an estimate could be had again and again.
const RESERVE: &str = concat!(
    "UPDATE budgets SET reserved = reserved + ?2 \
     WHERE id = ?1 AND closed_at IS NULL AND reserved + charged + overrun + ?2 <= most \
     AND EXISTS (SELECT 1 FROM teams t WHERE t.id = budgets.team AND t.revoked_at IS NULL) \
     AND (?3 IS NULL OR ",
    spent!("s.day = ?4"),
    " <= ?3) AND (?5 IS NULL OR ",
    spent!("s.day BETWEEN ?6 AND ?4"),
    " <= ?5)"
);

/// The last `?2` calls of budget `?1`, oldest first.
const CALLS: &str = "SELECT * FROM (SELECT id, model, reserved, charged, overrun, estimated, usage, asked_at, settled_at \
     FROM calls WHERE budget = ?1 ORDER BY asked_at DESC, id DESC LIMIT ?2) ORDER BY asked_at, id";

impl SqliteStore {
    pub(super) async fn insert_budget(&self, new: &NewBudget) -> Result<(), StoreError> {
        let mut change = self.write_durably().await?;
        teams::require_team(&mut change, new.team).await?;
        insert_new(&mut change, new).await?;
        change.commit().await.map_err(database)
    }

    pub(super) async fn budget_of(&self, id: &BudgetId) -> Result<Option<BudgetRow>, StoreError> {
        let mut reader = self.readers.acquire().await.map_err(database)?;
        budget(&mut reader, id).await
    }

    pub(super) async fn set_aside(&self, wanted: &Reservation) -> Result<Reserved, StoreError> {
        let mut change = self.write().await?;
        let (day, first) = days(wanted.at);
        let held = sqlx::query(RESERVE)
            .bind(wanted.budget.as_str())
            .bind(amount(wanted.amount))
            .bind(wanted.caps.day.map(amount))
            .bind(day)
            .bind(wanted.caps.month.map(amount))
            .bind(first)
            .execute(&mut *change)
            .await
            .map_err(database)?;
        if held.rows_affected() == 0 {
            return why_not(&mut change, wanted, day).await;
        }
        sqlx::query(
            "INSERT INTO calls (id, budget, model, day, reserved, asked_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )
        .bind(wanted.call.to_string())
        .bind(wanted.budget.as_str())
        .bind(&wanted.model)
        .bind(day)
        .bind(amount(wanted.amount))
        .bind(wanted.at.as_millis())
        .execute(&mut *change)
        .await
        .map_err(|error| exists_or_database(error, "call", &wanted.call.to_string()))?;
        sqlx::query(
            "INSERT INTO spending (team, day, reserved) SELECT team, ?2, ?3 FROM budgets WHERE id = ?1 \
             ON CONFLICT (team, day) DO UPDATE SET reserved = reserved + ?3",
        )
        .bind(wanted.budget.as_str())
        .bind(day)
        .bind(amount(wanted.amount))
        .execute(&mut *change)
        .await
        .map_err(database)?;
        change.commit().await.map_err(database)?;
        Ok(Reserved::Held)
    }

    pub(super) async fn charge_call(&self, charge: &Charge) -> Result<bool, StoreError> {
        let mut change = self.write().await?;
        let settled = settle(&mut change, charge).await?;
        change.commit().await.map_err(database)?;
        Ok(settled)
    }

    pub(super) async fn end_budget(
        &self,
        id: &BudgetId,
        now: Timestamp,
    ) -> Result<Option<BudgetRow>, StoreError> {
        let mut change = self.write_durably().await?;
        close(&mut change, id, now).await?;
        let row = budget(&mut change, id).await?;
        change.commit().await.map_err(database)?;
        Ok(row)
    }

    pub(super) async fn forfeit_all(&self, now: Timestamp) -> Result<u64, StoreError> {
        let mut change = self.write_durably().await?;
        let held = held(&mut change, None).await?;
        let count = u64::try_from(held.len()).unwrap_or(u64::MAX);
        forfeit(&mut change, held, now).await?;
        change.commit().await.map_err(database)?;
        Ok(count)
    }

    pub(super) async fn calls_of(&self, id: &BudgetId) -> Result<Vec<CallRow>, StoreError> {
        let found = sqlx::query(CALLS)
            .bind(id.as_str())
            .bind(MAX_CALLS)
            .fetch_all(&self.readers)
            .await
            .map_err(database)?;
        found.iter().map(call).collect()
    }
}

pub(super) async fn insert_new(connection: &mut SqliteConnection, new: &NewBudget) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO budgets (id, team, most, prices, with_sandboxes, created_at) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )
    .bind(new.id.as_str())
    .bind(new.team.to_string())
    .bind(amount(new.most))
    .bind(new.prices.to_string())
    .bind(new.with_sandboxes)
    .bind(new.created_at.as_millis())
    .execute(connection)
    .await
    .map_err(|error| exists_or_database(error, "budget", new.id.as_str()))?;
    Ok(())
}

/// Closes the budgets of a team: what they have under way is charged as it was set aside.
pub(super) async fn close_all_of(
    connection: &mut SqliteConnection,
    team: TeamId,
    now: Timestamp,
) -> Result<(), StoreError> {
    let open = "SELECT id FROM budgets WHERE team = ?1 AND closed_at IS NULL";
    let open: Vec<String> = sqlx::query_scalar(open)
        .bind(team.to_string())
        .fetch_all(&mut *connection)
        .await
        .map_err(database)?;
    for id in open {
        close(connection, &rows::parse("budget", &id)?, now).await?;
    }
    Ok(())
}

async fn close(connection: &mut SqliteConnection, id: &BudgetId, now: Timestamp) -> Result<(), StoreError> {
    let held = held(connection, Some(id)).await?;
    forfeit(connection, held, now).await?;
    sqlx::query("UPDATE budgets SET closed_at = ?2 WHERE id = ?1 AND closed_at IS NULL")
        .bind(id.as_str())
        .bind(now.as_millis())
        .execute(connection)
        .await
        .map_err(database)?;
    Ok(())
}

/// Why nothing was set aside, in the transaction in which it was not.
async fn why_not(
    connection: &mut SqliteConnection,
    wanted: &Reservation,
    day: i64,
) -> Result<Reserved, StoreError> {
    let Some(row) = budget(connection, &wanted.budget).await?.filter(|row| row.closed_at.is_none()) else {
        return Ok(Reserved::Closed);
    };
    let revoked: bool = sqlx::query_scalar("SELECT revoked_at IS NOT NULL FROM teams WHERE id = ?1")
        .bind(row.team.to_string())
        .fetch_one(&mut *connection)
        .await
        .map_err(database)?;
    if revoked {
        return Ok(Reserved::Closed);
    }
    if row.left() < wanted.amount {
        return Ok(Reserved::Budget(row.left()));
    }
    let Some(cap) = wanted.caps.day else { return Ok(Reserved::Month) };
    let today: i64 = sqlx::query_scalar(
        "SELECT coalesce(sum(reserved + charged), 0) FROM spending WHERE team = ?1 AND day = ?2",
    )
    .bind(row.team.to_string())
    .bind(day)
    .fetch_one(connection)
    .await
    .map_err(database)?;
    Ok(if money(today)?.and(wanted.amount) > cap { Reserved::Day } else { Reserved::Month })
}

/// Settles a call that is under way. `false` if it was settled before.
async fn settle(connection: &mut SqliteConnection, charge: &Charge) -> Result<bool, StoreError> {
    let found = sqlx::query(
        "UPDATE calls SET charged = min(reserved, ?2), overrun = max(0, ?2 - reserved), estimated = ?3, usage = ?4, \
         settled_at = ?5 WHERE id = ?1 AND settled_at IS NULL RETURNING budget, day, reserved, charged, overrun",
    )
    .bind(charge.call.to_string())
    .bind(amount(charge.cost))
    .bind(charge.estimated)
    .bind(&charge.usage)
    .bind(charge.at.as_millis())
    .fetch_optional(&mut *connection)
    .await
    .map_err(database)?;
    let Some(settled) = found else { return Ok(false) };
    let number = |name| settled.try_get::<i64, _>(name).map_err(|error| rows::corrupt("call", error));
    let budget: String = settled.try_get("budget").map_err(|error| rows::corrupt("call", error))?;
    let (reserved, charged, overrun) = (number("reserved")?, number("charged")?, number("overrun")?);
    sqlx::query(
        "UPDATE budgets SET reserved = reserved - ?2, charged = charged + ?3, overrun = min(overrun + ?4, ?5) WHERE id = ?1",
    )
    .bind(&budget)
    .bind(reserved)
    .bind(charged)
    .bind(overrun)
    .bind(MOST)
    .execute(&mut *connection)
    .await
    .map_err(database)?;
    // A team's caps are the operator's, and so is what was overrun.
    sqlx::query(
        "UPDATE spending SET reserved = reserved - ?3, charged = min(charged + ?4, ?5) \
         WHERE team = (SELECT team FROM budgets WHERE id = ?1) AND day = ?2",
    )
    .bind(&budget)
    .bind(number("day")?)
    .bind(reserved)
    .bind(charged + overrun)
    .bind(MOST)
    .execute(connection)
    .await
    .map_err(database)?;
    Ok(true)
}

/// Calls that are under way, of one budget or of all, with what is set aside for them.
async fn held(
    connection: &mut SqliteConnection,
    of: Option<&BudgetId>,
) -> Result<Vec<(CallId, Micros)>, StoreError> {
    let found = sqlx::query(
        "SELECT id, reserved FROM calls WHERE settled_at IS NULL AND (?1 IS NULL OR budget = ?1)",
    )
    .bind(of.map(BudgetId::as_str))
    .fetch_all(connection)
    .await
    .map_err(database)?;
    found.iter().map(|row| Ok((id(row)?, micros(row, "reserved")?))).collect()
}

/// Charges all that was set aside: nobody will say any more what was used.
async fn forfeit(
    connection: &mut SqliteConnection,
    calls: Vec<(CallId, Micros)>,
    at: Timestamp,
) -> Result<(), StoreError> {
    for (call, cost) in calls {
        settle(connection, &Charge { call, cost, estimated: true, usage: None, at }).await?;
    }
    Ok(())
}

pub(super) async fn budget(
    connection: &mut SqliteConnection,
    id: &BudgetId,
) -> Result<Option<BudgetRow>, StoreError> {
    let found = sqlx::query(
        "SELECT id, team, most, reserved, charged, overrun, prices, created_at, closed_at FROM budgets WHERE id = ?1",
    )
    .bind(id.as_str())
    .fetch_optional(connection)
    .await
    .map_err(database)?;
    let Some(row) = found else { return Ok(None) };
    let corrupt = |error| rows::corrupt("budget", error);
    let text = |name| row.try_get::<String, _>(name).map_err(corrupt);
    Ok(Some(BudgetRow {
        id: rows::parse("budget", &text("id")?)?,
        team: rows::parse("team", &text("team")?)?,
        most: micros(&row, "most")?,
        reserved: micros(&row, "reserved")?,
        charged: micros(&row, "charged")?,
        overrun: micros(&row, "overrun")?,
        prices: rows::parse("digest", &text("prices")?)?,
        created_at: Timestamp::from_millis(row.try_get("created_at").map_err(corrupt)?),
        closed_at: row.try_get::<Option<i64>, _>("closed_at").map_err(corrupt)?.map(Timestamp::from_millis),
    }))
}

fn call(row: &SqliteRow) -> Result<CallRow, StoreError> {
    let corrupt = |error| rows::corrupt("call", error);
    let charged: Option<i64> = row.try_get("charged").map_err(corrupt)?;
    let settled_at: Option<i64> = row.try_get("settled_at").map_err(corrupt)?;
    Ok(CallRow {
        id: id(row)?,
        model: row.try_get("model").map_err(corrupt)?,
        reserved: micros(row, "reserved")?,
        charged: charged.map(money).transpose()?,
        overrun: micros(row, "overrun")?,
        estimated: row.try_get("estimated").map_err(corrupt)?,
        usage: row.try_get("usage").map_err(corrupt)?,
        asked_at: Timestamp::from_millis(row.try_get("asked_at").map_err(corrupt)?),
        settled_at: settled_at.map(Timestamp::from_millis),
    })
}

fn id(row: &SqliteRow) -> Result<CallId, StoreError> {
    let text: String = row.try_get("id").map_err(|error| rows::corrupt("call", error))?;
    rows::parse("call", &text)
}

fn micros(row: &SqliteRow, name: &str) -> Result<Micros, StoreError> {
    money(row.try_get(name).map_err(|error| rows::corrupt("money", error))?)
}

fn money(number: i64) -> Result<Micros, StoreError> {
    u64::try_from(number).map(Micros).map_err(|error| rows::corrupt("money", error))
}

/// The most money of any column, in micro-dollars: ten thousand million dollars are a bound that nobody minds, and no sum here, of all
/// days of a month included, goes beyond what a column holds.
const MOST: i64 = 10_000_000_000_000_000;

/// Money as SQLite has it.
fn amount(money: Micros) -> i64 {
    i64::try_from(money.0).unwrap_or(MOST).min(MOST)
}

/// The day of a moment since 1970, and the first one of its month, both in UTC.
fn days(at: Timestamp) -> (i64, i64) {
    let day = at.as_millis().div_euclid(DAY);
    let of_month = jiff::Timestamp::from_millisecond(at.as_millis())
        .map_or(1, |at| jiff::tz::Offset::UTC.to_datetime(at).day());
    (day, day - i64::from(of_month) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_month_begins_with_its_first_day() {
        for (text, expected) in [
            ("1970-01-01T00:00:00Z", (0, 0)),
            ("1970-01-31T23:59:59Z", (30, 0)),
            ("1970-02-01T00:00:00Z", (31, 31)),
            ("2024-02-29T12:00:00Z", (19_782, 19_754)),
        ] {
            let at: jiff::Timestamp = text.parse().unwrap();
            assert_eq!(days(Timestamp::from_millis(at.as_millisecond())), expected, "{text}");
        }
    }
}
