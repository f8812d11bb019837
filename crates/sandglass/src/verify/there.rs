//! A server that runs already, attacked as it is.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;

use super::canary::Canaries;
use super::ground::{GUEST, Ground, Grounds, Surroundings};
use super::sandbox::Sandbox;
use super::secrets::{Place, Secrets};
use super::server::Endpoint;
use super::{probes, report};
use crate::cli::verify::Verify;
use crate::guest_binary;

/// Where the files are that attacks are after.
const PARENT: &str = "/var/tmp";

/// Attacks it. There are no controls. If it is on this machine, and root asks, attacks have something to be after;
/// otherwise nobody could witness most of them, and they are not carried out.
pub(super) fn run(url: &str, key: &str, args: &Verify) -> anyhow::Result<ExitCode> {
    let endpoint = Endpoint { url: url.trim_end_matches('/').to_owned(), key: key.to_owned() };
    let folder = tempfile::Builder::new().prefix("sandglass-verify-").tempdir_in(PARENT)?;
    let around = if rustix::process::geteuid().is_root() && is_here(&endpoint.url) {
        let secrets = Secrets::new();
        let guest = guest_binary::install(&args.cache_dir, None)?;
        let home = folder.path().join(secrets.at(Place::Folder));
        let canaries = Canaries::place(&home, &secrets, &guest)?;
        Some(Arc::new(Surroundings { secrets, canaries }))
    } else {
        None
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let results = runtime.block_on(async {
        let guest = find_guest(&endpoint).await?;
        let grounds = Grounds { strict: Ground::there(endpoint, guest, Option::clone(&around)), weak: None };
        let results = probes::run(&grounds, &args.only).await;
        grounds.strict.close().await?;
        anyhow::Ok(results)
    });
    if let Some(around) = around.and_then(Arc::into_inner) {
        around.canaries.remove()?;
    }
    let results = results?;
    report::print(&results, args.json, false, &mut std::io::stdout().lock())?;
    Ok(report::code(&results))
}

/// Whether the address is one of this machine's own.
fn is_here(url: &str) -> bool {
    let host =
        url.strip_prefix("http://").and_then(|rest| rest.rsplit_once(':')).map_or("", |(host, _)| host);
    host == "localhost"
        || host.trim_matches(['[', ']']).parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
}

/// The guest's binary inside: where nothing isolates, it is what its agent runs.
async fn find_guest(endpoint: &Endpoint) -> anyhow::Result<String> {
    let sandbox = Sandbox::create(endpoint, GUEST, &json!({"timeout": 60})).await?;
    let said = sandbox.run(&["sh", "-c", "readlink /proc/$PPID/exe"]).await;
    sandbox.kill().await?;
    let said = String::from_utf8(said?.stdout)?;
    let found = said.trim();
    Ok(if Path::new(found).is_absolute() { found.to_owned() } else { GUEST.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_here() {
        for url in ["http://127.0.0.1:3000", "http://localhost:1", "http://[::1]:3000", "http://127.9.9.9:1"]
        {
            assert!(is_here(url), "{url}");
        }
        for url in ["http://192.0.2.1:3000", "http://example.com:1", "http://127.0.0.1.example.com:1", "x"] {
            assert!(!is_here(url), "{url}");
        }
    }
}
