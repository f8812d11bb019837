//! Who may call models, and with whose money.
//!
//! A sandbox that was granted a budget finds the models under a name of its own, and has a token in place of a key. The money is in
//! one row of the store, which is the only word on what is left; the calls themselves are the gateway's.

use std::sync::Arc;

use sandglass_egress::policy::Service;
use sandglass_models::Dialect;
use sandglass_models::price::Prices;
use sandglass_models::token::{Claims, Signer};
use sandglass_models::totals::Totals;
use sandglass_store::{BudgetRow, CallRow, Granted, Money, NewBudget};
use sandglass_types::error::Chain;
use sandglass_types::{BudgetId, Digest, Error, ErrorKind, Micros, SandboxId, TeamId, Timestamp};

use super::{Control, not_found, stored};

/// What an operator decides of models.
#[derive(Debug, Clone)]
pub struct Models {
    /// Those that there are, and what they cost.
    pub prices: Arc<Prices>,
    /// Makes the tokens.
    pub signer: Signer,
    /// The most that one budget can be.
    pub most: Micros,
    /// What all calls came to.
    pub totals: Arc<Totals>,
}

/// Whose money a sandbox may spend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Purse {
    /// So much, of a budget that is opened for it, and closed when it and all that was forked from it are gone.
    New(Micros),
    /// That of a budget of its team that is open. Who opened it closes it.
    Open(BudgetId),
}

/// What a sandbox is to be granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantRequest {
    /// With whose money.
    pub purse: Purse,
    /// Which models, by whatever they are called here; all if there is none.
    pub models: Vec<String>,
    /// In which protocols; in all if there is none.
    pub dialects: Vec<Dialect>,
    /// Until when.
    pub expires: Timestamp,
}

/// What a program needs to call models.
#[derive(Clone, PartialEq, Eq)]
pub struct GrantedModels {
    /// Who pays.
    pub budget: BudgetId,
    /// Where, from inside of the sandbox; Anthropic's clients want it so, and OpenAI's with `/v1` behind it.
    pub base_url: String,
    /// What to send as the key.
    pub token: String,
    /// Until when that is good.
    pub expires: Timestamp,
}

impl std::fmt::Debug for GrantedModels {
    /// Leaves out the token, which logs must not show.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrantedModels").field("budget", &self.budget).finish_non_exhaustive()
    }
}

fn no_budget(id: &BudgetId) -> Error {
    Error::new(ErrorKind::NotFound, format!("budget '{id}' not found"))
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

impl Control {
    fn models(&self) -> Result<&Models, Error> {
        let none = || {
            let message = "this server has no models: the operator can configure some in [models]";
            Error::new(ErrorKind::Unsupported, message)
        };
        self.0.config.models.as_ref().ok_or_else(none)
    }

    /// Takes up the money: what a server that died had under way is charged as it was set aside.
    pub(super) async fn take_up_money(&self) -> Result<(), Error> {
        let now = self.0.clock.now();
        let forfeited = self.0.store.forfeit_calls(now).await.map_err(stored)?;
        if forfeited > 0 {
            tracing::warn!(
                calls = forfeited,
                "calls of models that nobody answers for are charged as they were set aside"
            );
        }
        if let Some(Models { prices, .. }) = &self.0.config.models {
            self.0.store.keep_prices(prices.snapshot(), prices.text()).await.map_err(stored)?;
        }
        self.close_unheld_budgets().await;
        Ok(())
    }

    /// Closes budgets that nobody can spend any more. What fails is done the next time.
    pub(super) async fn close_unheld_budgets(&self) {
        match self.0.store.close_unheld_budgets(self.0.clock.now()).await {
            Ok(0) => {}
            Ok(closed) => tracing::info!(closed, "budgets of sandboxes that are gone are closed"),
            Err(error) => tracing::error!(error = %Chain(&error), "budgets could not be closed"),
        }
    }

    /// Opens a budget of a team, by the prices of today. It is there until [`Control::close_budget`].
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if this server has no models; [`ErrorKind::Invalid`] for more than one budget can be.
    pub async fn open_budget(&self, team: TeamId, most: Micros) -> Result<BudgetId, Error> {
        let new = self.new_budget(team, most, false)?;
        self.0.store.open_budget(&new).await.map_err(stored)?;
        Ok(new.id)
    }

    fn new_budget(&self, team: TeamId, most: Micros, with_sandboxes: bool) -> Result<NewBudget, Error> {
        let models = self.models()?;
        if most == Micros::ZERO || most > models.most {
            return Err(invalid(format!(
                "a budget must be between 1 and {} micro-dollars, not {}",
                models.most.0, most.0
            )));
        }
        Ok(NewBudget {
            id: BudgetId::random(),
            team,
            most,
            prices: models.prices.snapshot(),
            with_sandboxes,
            created_at: self.0.clock.now(),
        })
    }

    /// A budget of this team, and the last calls that it paid for, oldest first.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn budget(&self, team: TeamId, id: &BudgetId) -> Result<(BudgetRow, Vec<CallRow>), Error> {
        let row = self.own_budget(team, id).await?;
        let calls = self.0.store.calls(id).await.map_err(stored)?;
        Ok((row, calls))
    }

    async fn own_budget(&self, team: TeamId, id: &BudgetId) -> Result<BudgetRow, Error> {
        let row = self.0.store.budget(id).await.map_err(stored)?;
        row.filter(|row| row.team == team).ok_or_else(|| no_budget(id))
    }

    /// Closes a budget of this team: its tokens pay for nothing more, and calls that are under way are charged as they were set aside.
    /// Returns what it came to. It may be called again.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`].
    pub async fn close_budget(&self, team: TeamId, id: &BudgetId) -> Result<BudgetRow, Error> {
        self.own_budget(team, id).await?;
        let closed = self.0.store.close_budget(id, self.0.clock.now()).await.map_err(stored)?;
        closed.ok_or_else(|| no_budget(id))
    }

    /// Lets a running sandbox of this team call models. In force when this returns.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] for the sandbox, the budget, or a model; [`ErrorKind::Invalid`]; [`ErrorKind::Conflict`] if it may spend
    /// another budget, which is open; [`ErrorKind::Unsupported`] if this server has no models.
    pub async fn grant_models(
        &self,
        team: TeamId,
        id: &SandboxId,
        request: GrantRequest,
    ) -> Result<GrantedModels, Error> {
        let GrantRequest { purse, models, dialects, expires } = request;
        // First of all: what there is not is told to nobody else.
        self.sandbox(team, id).await?;
        let signer = self.models()?.signer.clone();
        let now = self.0.clock.now();
        if expires <= now || expires > now.plus(self.0.config.max_lifetime) {
            let most = self.0.config.max_lifetime.as_secs();
            return Err(invalid(format!("a grant must end within {most} seconds from now")));
        }
        let (money, prices) = match purse {
            Purse::New(most) => {
                let new = self.new_budget(team, most, true)?;
                (Money::New(new), self.models()?.prices.snapshot())
            }
            Purse::Open(budget) => {
                let row = self.own_budget(team, &budget).await?;
                (Money::Of(budget), row.prices)
            }
        };
        let prices = self.prices(prices).await?;
        let models = if models.is_empty() {
            prices.models().map(|(name, _)| name.to_owned()).collect()
        } else {
            let known = |called: &String| {
                let known = prices.model(called).map(|(name, _)| name.to_owned());
                known.ok_or_else(|| {
                    Error::new(
                        ErrorKind::NotFound,
                        format!("no model is called '{called}' here, or it has no price"),
                    )
                })
            };
            models.iter().map(known).collect::<Result<Vec<_>, _>>()?
        };
        let dialects = if dialects.is_empty() { Dialect::ALL.into() } else { dialects };
        let grant = self.owner(team, id).await?.grant_models(id, money).await?;
        let claims = Claims { budget: grant.budget, sandbox: grant.origin, dialects, models, expires };
        let token = signer.mint(&claims);
        let token = token
            .map_err(|_| invalid("so many models are too many for one token: name those that it is for"))?;
        let base_url = format!("http://{}", Service::Models.name());
        Ok(GrantedModels { budget: claims.budget, base_url, token, expires })
    }

    /// The table of prices that a budget began with.
    async fn prices(&self, digest: Digest) -> Result<Arc<Prices>, Error> {
        let now = &self.models()?.prices;
        if now.snapshot() == digest {
            return Ok(Arc::clone(now));
        }
        let lost = |error| Error::internal("the prices of this budget are not kept any more", error);
        let text = self.0.store.prices(digest).await.map_err(stored)?.unwrap_or_default();
        Ok(Arc::new(Prices::kept(&text).map_err(lost)?))
    }
}

/// What came of a grant, as its owner tells it.
pub(crate) fn outcome(id: &SandboxId, granted: Granted) -> Result<sandglass_store::ModelGrant, Error> {
    match granted {
        Granted::Done(grant) => Ok(grant),
        Granted::NotRunning => Err(not_found(id)),
        Granted::Has(budget) => {
            let message = format!("the sandbox has the budget '{budget}', which is open: close that first");
            Err(Error::new(ErrorKind::Conflict, message))
        }
        Granted::NoBudget => Err(Error::new(ErrorKind::Conflict, "the budget is closed")),
    }
}
