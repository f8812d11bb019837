//! What calls of models came to.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use sandglass_models::totals::Totals;

use super::{KindLabel, OutcomeLabel, ReasonLabel, gauge};

fn counted<L>(counts: impl IntoIterator<Item = (L, u64)>) -> Family<L, Counter>
where
    L: Clone + std::hash::Hash + Eq + EncodeLabelSet,
{
    let family = Family::<L, Counter>::default();
    for (label, count) in counts {
        family.get_or_create(&label).inc_by(count);
    }
    family
}

pub(super) fn register(totals: &Totals, registry: &mut Registry) {
    let calls = totals.calls().map(|(outcome, count)| (OutcomeLabel { outcome }, count));
    registry.register("model_calls", "Calls of models, by how they were paid", counted(calls));
    let refusals =
        totals.refusals().map(|(reason, count)| (ReasonLabel { reason: reason.to_owned() }, count));
    registry.register("model_refusals", "Calls of models that were refused, by why", counted(refusals));
    let tokens = totals.tokens().map(|(kind, count)| (KindLabel { kind }, count));
    registry.register("model_tokens", "Tokens of calls of models, as far as providers said", counted(tokens));
    registry.register(
        "model_charged_micros",
        "Micro-dollars that budgets paid for calls of models",
        ConstCounter::new(totals.charged().0),
    );
    registry.register(
        "model_overrun_micros",
        "Micro-dollars that the operator pays because providers billed more than was set aside",
        ConstCounter::new(totals.overrun().0),
    );
    registry.register(
        "model_calls_under_way",
        "Calls of models that are under way",
        ConstGauge::new(gauge(totals.under_way())),
    );
}
