//! Budgets in memory.

use std::sync::Mutex;

use sandglass_control::{GrantRequest, GrantedModels, Purse};
use sandglass_store::{BudgetRow, CallRow};
use sandglass_types::{BudgetId, CallId, Digest, Error, ErrorKind, Micros, TeamId, Timestamp};

#[derive(Debug, Default)]
pub(super) struct Budgets(Mutex<Vec<BudgetRow>>);

impl Budgets {
    /// One that has paid for a call and pays for another.
    pub(super) fn grant(&self, team: TeamId, request: &GrantRequest) -> Result<GrantedModels, Error> {
        let Purse::New(most) = request.purse else { panic!("nobody asks for that here") };
        if let Some(unknown) = request.models.iter().find(|model| *model != "large") {
            return Err(Error::new(ErrorKind::NotFound, format!("no model is called '{unknown}'")));
        }
        let row = BudgetRow {
            id: BudgetId::random(),
            team,
            most,
            reserved: Micros(2),
            charged: Micros(1),
            overrun: Micros::ZERO,
            prices: Digest::from_bytes([0; 32]),
            created_at: Timestamp::from_millis(0),
            closed_at: None,
        };
        let granted = GrantedModels {
            budget: row.id.clone(),
            base_url: "http://models.internal".into(),
            token: "sgm_secret".into(),
            expires: request.expires,
        };
        self.0.lock().unwrap().push(row);
        Ok(granted)
    }

    pub(super) fn find(&self, team: TeamId, id: &BudgetId) -> Result<(BudgetRow, Vec<CallRow>), Error> {
        let rows = self.0.lock().unwrap();
        let row = rows.iter().find(|row| row.team == team && row.id == *id).cloned();
        let row = row.ok_or_else(|| Error::new(ErrorKind::NotFound, "budget not found"))?;
        let call = |charged: Option<u64>| CallRow {
            id: CallId::random(),
            model: "large".into(),
            reserved: Micros(2),
            charged: charged.map(Micros),
            overrun: Micros::ZERO,
            estimated: false,
            usage: charged.map(|_| r#"{"input":1}"#.into()),
            asked_at: Timestamp::from_millis(0),
            settled_at: charged.map(|_| Timestamp::from_millis(1)),
        };
        Ok((row, vec![call(Some(1)), call(None)]))
    }

    pub(super) fn close(&self, team: TeamId, id: &BudgetId) -> Result<BudgetRow, Error> {
        self.find(team, id)?;
        let mut rows = self.0.lock().unwrap();
        let row = rows.iter_mut().find(|row| row.id == *id).unwrap();
        (row.closed_at, row.reserved) = (Some(Timestamp::from_millis(2)), Micros::ZERO);
        Ok(row.clone())
    }
}
