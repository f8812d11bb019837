//! `sandglass connection …`.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use fs_err as fs;
use sandglass_broker::secret::MAX_SECRET;
use serde_json::{Value, json};

use super::rest::Api;
use super::{block_on, print_json};
use crate::cli;

pub(crate) fn connections(verb: cli::Connections) -> anyhow::Result<ExitCode> {
    match verb {
        cli::Connections::List { remote } => block_on(list(&remote)),
        cli::Connections::Delete { remote, names } => block_on(delete(&remote, &names)),
        cli::Connections::Set {
            remote,
            name,
            target,
            methods,
            paths,
            basic,
            header,
            prefix,
            query,
            second_resource,
            credential_file,
        } => {
            let credential = match (basic, header, query) {
                (Some(user), _, _) => json!({"basic": {"user": user}}),
                (_, Some(name), _) => json!({"header": {"name": name, "prefix": prefix.unwrap_or_default()}}),
                (_, _, Some(name)) => json!({"query": {"name": name}}),
                (None, None, None) => json!("bearer"),
            };
            let value = credential_file.as_deref().map(read).transpose()?;
            let body = json!({"target": target, "methods": methods, "paths": paths, "credential": credential,
                "second_resource": second_resource, "value": value});
            block_on(set(&remote, &name, &body))
        }
    }
}

/// Reads a credential from a file, or from standard input. A line end behind it is none of it.
fn read(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let most = MAX_SECRET as u64 + 3;
    let read = if path.as_os_str() == "-" {
        std::io::stdin().lock().take(most).read_to_string(&mut text)
    } else {
        fs::File::open(path)?.take(most).read_to_string(&mut text)
    };
    // What is said of it must not have it in it.
    read.map_err(|error| anyhow::anyhow!("no credential in {}: {}", path.display(), error.kind()))?;
    let credential = text.trim_end_matches(['\r', '\n']);
    if credential.len() > MAX_SECRET {
        bail!("the credential in {} is longer than {MAX_SECRET} bytes", path.display());
    }
    Ok(credential.to_owned())
}

async fn set(remote: &cli::Remote, name: &str, body: &Value) -> anyhow::Result<ExitCode> {
    let kept = Api::new(remote)?.put_connection(name, body).await?;
    if remote.json {
        print_json(&kept)?;
    } else {
        let name = kept["name"].as_str().context("the server's answer names no connection")?;
        writeln!(std::io::stdout(), "http://{name}.broker.internal")?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(remote: &cli::Remote) -> anyhow::Result<ExitCode> {
    let connections = Api::new(remote)?.connections().await?;
    if remote.json {
        print_json(&Value::Array(connections))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["CONNECTION", "TARGET", "METHODS", "PATHS", "BY"]);
    for connection in &connections {
        let text = |field: &str| connection[field].as_str().unwrap_or_default().to_owned();
        let terms = |field: &str| {
            let terms = connection[field].as_array().map_or(&[][..], Vec::as_slice);
            terms.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" ")
        };
        table.add_row([text("name"), text("target"), terms("methods"), terms("paths"), text("by")]);
    }
    writeln!(std::io::stdout(), "{table}")?;
    Ok(ExitCode::SUCCESS)
}

async fn delete(remote: &cli::Remote, names: &[String]) -> anyhow::Result<ExitCode> {
    let api = Api::new(remote)?;
    for name in names {
        api.delete_connection(name).await?;
    }
    if remote.json {
        print_json(&json!({ "deleted": names }))?;
    }
    Ok(ExitCode::SUCCESS)
}
