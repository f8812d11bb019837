//! A server that runs already, attacked as it is.

use std::process::ExitCode;

use super::ground::{GUEST, Ground, Grounds, Kind};
use super::server::Endpoint;
use super::{probes, report};
use crate::cli::verify::Verify;

/// Attacks it. There are no controls, and nothing of its machine is at hand: probes whose witness would be there are not
/// carried out.
pub(super) fn run(url: &str, key: &str, args: &Verify) -> anyhow::Result<ExitCode> {
    let endpoint = Endpoint { url: url.trim_end_matches('/').to_owned(), key: key.to_owned() };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let results = runtime.block_on(async {
        let grounds = Grounds { strict: Ground::new(Kind::Strict, endpoint, GUEST, None), weak: None };
        let results = probes::run(&grounds, &args.only).await;
        grounds.strict.close().await?;
        anyhow::Ok(results)
    })?;
    report::print(&results, args.json, false, &mut std::io::stdout().lock())?;
    Ok(report::code(&results))
}
