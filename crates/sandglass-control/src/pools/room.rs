//! What the rows of this machine are promised together.

use sandglass_types::budget::Amount;
use sandglass_types::{Error, SandboxState};

use crate::shared::Shared;

/// All that sandboxes and images with rows are promised, entries of pools apart.
///
/// # Errors
/// The store failed.
pub(crate) async fn in_use(shared: &Shared) -> Result<Amount, Error> {
    let rows = shared.store.on_node(shared.node, &SandboxState::NOT_ENDED).await.map_err(crate::stored)?;
    let images = shared.store.snapshots_on_node(shared.node).await.map_err(crate::stored)?;
    let of_rows = rows.iter().map(|row| Amount::of(&row.limits).of_machine(row.state));
    let of_images = images.iter().map(|row| Amount::of(&row.limits).as_image());
    Ok(of_rows.chain(of_images).fold(Amount::default(), Amount::and))
}
