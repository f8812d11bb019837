//! Templates whose images do not fit what the server is now, and when they may be made anew.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sandglass_types::SnapshotId;
use tokio::time::Instant;

/// The wait between two tries for one template: a failure costs a whole start, and mostly comes again.
const TRY_EVERY: Duration = Duration::from_secs(600);

/// What is known of one template.
#[derive(Debug, Default)]
struct Known {
    /// The image that could not be used; another one is not meant.
    image: Option<SnapshotId>,
    tried: Option<Instant>,
}

/// Templates by name. There are as many as operators made.
#[derive(Debug, Default)]
pub(crate) struct Stale(Mutex<BTreeMap<String, Known>>);

impl Stale {
    /// This image of it could not be used.
    pub(crate) fn note(&self, template: &str, image: &SnapshotId) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(template.to_owned()).or_default().image = Some(image.clone());
    }

    /// Those whose turn it is, with that image. Each is tried by whoever asks.
    pub(crate) fn due(&self, now: Instant) -> Vec<(String, SnapshotId)> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let long_ago = |known: &Known| known.tried.is_none_or(|tried| now.duration_since(tried) >= TRY_EVERY);
        let due = all.iter_mut().filter(|(_, known)| long_ago(known));
        due.filter_map(|(name, known)| {
            let image = known.image.take()?;
            known.tried = Some(now);
            Some((name.clone(), image))
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
        let [first, second] = [(); 2].map(|()| SnapshotId::random());
        assert_eq!(stale.due(now), []);
        stale.note("web", &first);
        stale.note("web", &first);
        assert_eq!(stale.due(now), [("web".into(), first.clone())]);
        assert_eq!(stale.due(now + TRY_EVERY), [], "it was done");
        stale.note("web", &second);
        stale.note("api", &first);
        assert_eq!(stale.due(now + Duration::from_secs(1)), [("api".into(), first)]);
        assert_eq!(stale.due(now + TRY_EVERY), [("web".into(), second)]);
    }
}
