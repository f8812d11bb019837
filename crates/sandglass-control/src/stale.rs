//! Templates whose images do not fit what the server is now, and when they may be made anew.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The wait between two tries for one template: a failure costs a whole start, and mostly comes again.
const TRY_EVERY: Duration = Duration::from_secs(600);

/// What is known of one template.
#[derive(Debug, Default, Clone, Copy)]
struct Known {
    stale: bool,
    tried: Option<Instant>,
}

/// Templates by name. There are as many as operators made.
#[derive(Debug, Default)]
pub(crate) struct Stale(Mutex<BTreeMap<String, Known>>);

impl Stale {
    /// Its image could not be used.
    pub(crate) fn note(&self, template: &str) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(template.to_owned()).or_default().stale = true;
    }

    /// Those whose turn it is. Each is tried by whoever asks.
    pub(crate) fn due(&self, now: Instant) -> Vec<String> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let long_ago = |known: &Known| known.tried.is_none_or(|tried| now.duration_since(tried) >= TRY_EVERY);
        let due = all.iter_mut().filter(|(_, known)| known.stale && long_ago(known));
        due.map(|(name, known)| {
            *known = Known { stale: false, tried: Some(now) };
            name.clone()
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stale_is_tried_once_and_not_often() {
        let (stale, now) = (Stale::default(), Instant::now());
        assert_eq!(stale.due(now), [""; 0]);
        stale.note("web");
        stale.note("web");
        assert_eq!(stale.due(now), ["web"]);
        assert_eq!(stale.due(now + TRY_EVERY), [""; 0], "it was done");
        stale.note("web");
        stale.note("api");
        assert_eq!(stale.due(now + Duration::from_secs(1)), ["api"]);
        assert_eq!(stale.due(now + TRY_EVERY), ["web"]);
    }
}
