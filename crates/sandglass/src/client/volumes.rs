//! `sandglass volume …`.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::{Value, json};

use super::rest::Api;
use super::{block_on, print_json};
use crate::cli;

pub(crate) fn volumes(verb: cli::Volumes) -> anyhow::Result<ExitCode> {
    match verb {
        cli::Volumes::Create { remote, name, size } => block_on(create(&remote, &name, size)),
        cli::Volumes::List { remote } => block_on(list(&remote)),
        cli::Volumes::Delete { remote, volumes } => block_on(delete(&remote, &volumes)),
    }
}

/// Prints no token: it is worth the content, and a terminal keeps what it showed. In JSON is all that the server says.
async fn create(remote: &cli::Remote, name: &str, size: Option<u32>) -> anyhow::Result<ExitCode> {
    let made = Api::new(remote)?.create_volume(name, size).await?;
    if remote.json {
        print_json(&made)?;
    } else {
        let id = made["volumeID"].as_str().context("the server's answer names no volume")?;
        writeln!(std::io::stdout(), "{id}")?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(remote: &cli::Remote) -> anyhow::Result<ExitCode> {
    let volumes = Api::new(remote)?.volumes().await?;
    if remote.json {
        print_json(&Value::Array(volumes))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["VOLUME", "NAME", "MIB"]);
    for volume in &volumes {
        let [id, name] = ["volumeID", "name"].map(|field| volume[field].as_str().unwrap_or("").to_owned());
        let size = volume["sizeMB"].as_u64().map_or_else(|| "-".into(), |mib| mib.to_string());
        table.add_row([id, name, size]);
    }
    writeln!(std::io::stdout(), "{table}")?;
    Ok(ExitCode::SUCCESS)
}

/// Deletes none unless all are there.
async fn delete(remote: &cli::Remote, wanted: &[String]) -> anyhow::Result<ExitCode> {
    let api = Api::new(remote)?;
    let volumes = api.volumes().await?;
    let ids: Vec<_> = wanted.iter().map(|wanted| id_of(&volumes, wanted)).collect::<Result<_, _>>()?;
    for id in &ids {
        api.delete_volume(id).await?;
    }
    if remote.json {
        print_json(&json!({ "deleted": ids }))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The id of the volume that is called so. An id comes before a name that another volume has.
fn id_of<'a>(volumes: &'a [Value], wanted: &str) -> anyhow::Result<&'a str> {
    let by = |field: &str| volumes.iter().find(|volume| volume[field] == wanted);
    let found = by("volumeID").or_else(|| by("name"));
    found
        .and_then(|volume| volume["volumeID"].as_str())
        .with_context(|| format!("there is no volume {wanted:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_comes_before_a_name() {
        let volumes = [json!({ "volumeID": "a", "name": "b" }), json!({ "volumeID": "b", "name": "c" })];
        let found = |wanted| id_of(&volumes, wanted).unwrap();
        assert_eq!((found("a"), found("b"), found("c")), ("a", "b", "b"));
        assert!(id_of(&volumes, "d").is_err());
    }
}
