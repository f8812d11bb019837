//! Arming what the environment of a server says that shall fail. See [`sandglass_failpoint`].

use anyhow::{Context as _, bail};
use sandglass_failpoint::{Failpoints, VARIABLE};

/// Arms the points that this process was started with; both halves of a server inherit them.
pub(crate) fn arm() -> anyhow::Result<()> {
    let Some(text) = std::env::var_os(VARIABLE) else { return Ok(()) };
    let Some(text) = text.to_str() else { bail!("{VARIABLE} is not text") };
    let points: Failpoints = text.parse().with_context(|| format!("{VARIABLE} is not valid"))?;
    tracing::warn!(%points, "{VARIABLE} is set: THIS SERVER HANGS, FAILS OR PANICS ON PURPOSE; never for real work");
    points.arm();
    Ok(())
}
