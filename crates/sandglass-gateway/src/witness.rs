//! Whoever tells of calls as they happen.

use std::fmt;

use async_trait::async_trait;
use sandglass_types::{BudgetId, CallId, Micros};

/// Hears of calls that money was set aside for, and of those that there was none for.
#[async_trait]
pub trait Witness: fmt::Debug + Send + Sync {
    /// A call goes out.
    async fn asked(&self, budget: &BudgetId, asked: &Asked<'_>);

    /// A call is settled.
    async fn answered(&self, budget: &BudgetId, answered: &Answered<'_>);

    /// A call was refused for good, for want of money.
    fn spent(&self, budget: &BudgetId);
}

/// A call that goes out.
#[derive(Debug)]
pub struct Asked<'a> {
    /// Which one.
    pub call: CallId,
    /// The model, by its own name.
    pub model: &'a str,
    /// What is set aside for it.
    pub reserved: Micros,
}

/// A call that is settled.
#[derive(Debug)]
pub struct Answered<'a> {
    /// Which one.
    pub call: CallId,
    /// What its budget paid; nothing, if the provider refused it or was not reached.
    pub charged: Micros,
    /// Whether that was estimated.
    pub estimated: bool,
    /// What was used, as JSON, if the provider said so.
    pub usage: Option<&'a str>,
}

/// Nobody.
#[derive(Debug, Clone, Copy)]
pub struct Nobody;

#[async_trait]
impl Witness for Nobody {
    async fn asked(&self, _: &BudgetId, _: &Asked<'_>) {}

    async fn answered(&self, _: &BudgetId, _: &Answered<'_>) {}

    fn spent(&self, _: &BudgetId) {}
}
