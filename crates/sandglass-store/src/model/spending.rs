//! Budgets of money, and the calls that they pay for.

use sandglass_types::{BudgetId, CallId, Digest, Micros, SandboxId, TeamId, Timestamp};

/// Most calls of a budget that are told: a guest makes as many as its pace lets it.
pub const MAX_CALLS: u32 = 1000;

/// A budget that is to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewBudget {
    /// Fresh id.
    pub id: BudgetId,
    /// Who pays.
    pub team: TeamId,
    /// The most that may be spent.
    pub most: Micros,
    /// The table of prices that holds for all of it.
    pub prices: Digest,
    /// Whether it is closed when no sandbox is left that may spend it.
    pub with_sandboxes: bool,
    /// When it is opened.
    pub created_at: Timestamp,
}

/// What lets a sandbox call models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelGrant {
    /// Who pays.
    pub budget: BudgetId,
    /// The sandbox that its tokens were made for: itself, or the one that it was forked from.
    pub origin: SandboxId,
}

/// Whose money a sandbox is to be granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Money {
    /// That of a budget that is opened for it.
    New(NewBudget),
    /// That of one that is open.
    Of(BudgetId),
}

/// What came of a grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Granted {
    /// The sandbox has it.
    Done(ModelGrant),
    /// It does not run.
    NotRunning,
    /// It has one already, of this budget, which is open.
    Has(BudgetId),
    /// There is no such budget of its team, or it is closed.
    NoBudget,
}

/// A budget as it is kept. What is set aside and what is charged are never more than the most together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BudgetRow {
    /// Which one.
    pub id: BudgetId,
    /// Who pays.
    pub team: TeamId,
    /// The most that may be spent.
    pub most: Micros,
    /// What is set aside for calls that are under way.
    pub reserved: Micros,
    /// What was spent.
    pub charged: Micros,
    /// What providers billed above what was set aside, which the operator pays. So much less can be set aside from then on.
    pub overrun: Micros,
    /// The table of prices that holds for all of it.
    pub prices: Digest,
    /// When it was opened.
    pub created_at: Timestamp,
    /// When it was closed: from then on it pays for nothing.
    pub closed_at: Option<Timestamp>,
}

impl BudgetRow {
    /// What can be set aside. What was overrun is not charged, and is not there to be spent once more.
    #[must_use]
    pub fn left(&self) -> Micros {
        if self.closed_at.is_some() {
            Micros::ZERO
        } else {
            self.most.without(self.reserved.and(self.charged).and(self.overrun))
        }
    }
}

/// The most that a team may spend in a time, in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpendCaps {
    /// On one day.
    pub day: Option<Micros>,
    /// In one month.
    pub month: Option<Micros>,
}

/// What is to be set aside for a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// Fresh id.
    pub call: CallId,
    /// Who pays.
    pub budget: BudgetId,
    /// Which model.
    pub model: String,
    /// How much.
    pub amount: Micros,
    /// When.
    pub at: Timestamp,
    /// The most that the team may spend, with this.
    pub caps: SpendCaps,
}

/// What came of a [`Reservation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reserved {
    /// It is set aside.
    Held,
    /// There is no such budget, or it is closed.
    Closed,
    /// So much is left, which is less.
    Budget(Micros),
    /// The team may spend no more today.
    Day,
    /// The team may spend no more this month.
    Month,
}

/// What a call came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Charge {
    /// Which one.
    pub call: CallId,
    /// What it costs: no more than was set aside is charged, and the rest is overrun.
    pub cost: Micros,
    /// Whether that was estimated.
    pub estimated: bool,
    /// What was used, as JSON.
    pub usage: Option<String>,
    /// When.
    pub at: Timestamp,
}

/// A call as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallRow {
    /// Which one.
    pub id: CallId,
    /// Which model.
    pub model: String,
    /// What was set aside.
    pub reserved: Micros,
    /// What it cost its budget; `None` while it is under way.
    pub charged: Option<Micros>,
    /// What it cost the operator.
    pub overrun: Micros,
    /// Whether it was estimated.
    pub estimated: bool,
    /// What was used, as JSON.
    pub usage: Option<String>,
    /// When it began.
    pub asked_at: Timestamp,
    /// When it was settled.
    pub settled_at: Option<Timestamp>,
}
