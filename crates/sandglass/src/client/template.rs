//! `sandglass template …`: builds templates over the same API that everybody uses.

mod folder;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use serde_json::Value;

use self::folder::Folder;
use super::exec::{self, Command};
use super::{Api, Reach, block_on, mib, print_json, warn_if_unsealed};
use crate::cli;

/// Where the files of the folder are while its script runs. It is in memory, and removed before the image is made.
const INSIDE: &str = "/run/sandglass/build";

/// `sandglass template …`.
pub(crate) fn templates(verb: cli::Template) -> anyhow::Result<ExitCode> {
    match verb {
        cli::Template::Build { remote, dir } => block_on(build(&remote, &dir)),
        cli::Template::List { remote } => block_on(list(&remote)),
        cli::Template::Show { remote, name } => block_on(show(&remote, &name)),
        cli::Template::Delete { remote, names } => block_on(delete(&remote, &names)),
    }
}

async fn build(remote: &cli::Remote, dir: &Path) -> anyhow::Result<ExitCode> {
    let folder = Folder::read(dir)?;
    let api = Api::new(remote)?;
    let interrupted = async {
        tokio::signal::ctrl_c().await?;
        anyhow::Ok(())
    };
    let mut interrupted = std::pin::pin!(interrupted);
    let mut begun = std::pin::pin!(api.begin_template(&folder.definition));
    let sandbox = tokio::select! {
        begun = &mut begun => begun?,
        _ = &mut interrupted => {
            // What there is to end is in the answer.
            api.kill(&begun.await?.id).await?;
            bail!("interrupted");
        }
    };
    warn_if_unsealed(&sandbox);
    let built = tokio::select! {
        built = build_in(&api, &sandbox, &folder) => built,
        _ = &mut interrupted => Err(anyhow::anyhow!("interrupted")),
    };
    if let Err(error) = api.kill(&sandbox.id).await {
        eprintln!(
            "sandglass: the sandbox of the build, {}, could not be ended; the next start of the server ends it, or its time, within an hour: {error:#}",
            sandbox.id
        );
    }
    let built = built.context("the template was not built, and is as it was before")?;
    if remote.json {
        print_json(&built)?;
    } else {
        let mib = mib(&built["image"]["disk"]["bytes"]);
        writeln!(std::io::stdout(), "the template '{}' is ready: {mib} MiB", folder.name())?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn build_in(api: &Api, sandbox: &Reach, folder: &Folder) -> anyhow::Result<Value> {
    if let Some(setup) = &folder.setup {
        for file in &folder.files {
            let path = format!("{INSIDE}/{}", file.name);
            api.upload(sandbox, &path, file.content.clone())
                .await
                .with_context(|| format!("sending {}", file.name))?;
        }
        let programs = folder.files.iter().filter(|file| file.is_program);
        let programs: Vec<_> = programs.map(|file| format!("{INSIDE}/{}", file.name)).collect();
        if !programs.is_empty() {
            as_root(
                api,
                sandbox,
                "making programs of files",
                [vec!["chmod".into(), "755".into()], programs].concat(),
            )
            .await?;
        }
        let words = ["/bin/bash", "-l", &format!("{INSIDE}/{setup}")].map(str::to_owned);
        as_root(api, sandbox, &format!("the setup script {setup}"), words.into()).await?;
        as_root(
            api,
            sandbox,
            "removing the files of the build",
            vec!["rm".into(), "-rf".into(), INSIDE.into()],
        )
        .await?;
    }
    api.finish_template(sandbox, &folder.definition).await
}

/// Runs it in the build folder and passes its output on.
async fn as_root(api: &Api, sandbox: &Reach, what: &str, words: Vec<String>) -> anyhow::Result<()> {
    let cwd = if words.first().is_some_and(|program| program == "rm") { "/" } else { INSIDE };
    let command = Command { words, user: Some("root".into()), cwd: Some(cwd.into()) };
    let outcome = exec::run_loud(api, sandbox, command).await?;
    match (outcome.code(), outcome.error()) {
        (0, None) => Ok(()),
        (code, None) => bail!("{what} ended with exit code {code}"),
        (_, Some(status)) => bail!("{what} ended: {status}"),
    }
}

async fn list(remote: &cli::Remote) -> anyhow::Result<ExitCode> {
    let templates = Api::new(remote)?.templates().await?;
    if remote.json {
        print_json(&templates)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["TEMPLATE", "BASE", "STARTS", "CPU", "MEMORY", "POOL", "BUILT", "MIB", "UNIQUE"]);
    for template in templates.as_array().context("the server's answer is no list")? {
        let text = |value: &Value| match value {
            Value::String(text) => text.clone(),
            Value::Null => "-".to_owned(),
            other => other.to_string(),
        };
        let starts = if template["image"].is_null() { "cold" } else { "restored" };
        let disk = &template["image"]["disk"];
        table.add_row([
            text(&template["name"]),
            text(&template["base"]),
            starts.to_owned(),
            text(&template["limits"]["cpus"]),
            text(&template["limits"]["memory_mib"]),
            text(&template["pool"]),
            text(&template["image"]["created_at"]),
            mib(&disk["bytes"]),
            mib(&disk["unique_bytes"]),
        ]);
    }
    writeln!(std::io::stdout(), "{table}")?;
    Ok(ExitCode::SUCCESS)
}

async fn show(remote: &cli::Remote, name: &str) -> anyhow::Result<ExitCode> {
    print_json(&Api::new(remote)?.template(name).await?)?;
    Ok(ExitCode::SUCCESS)
}

async fn delete(remote: &cli::Remote, names: &[String]) -> anyhow::Result<ExitCode> {
    let api = Api::new(remote)?;
    for name in names {
        api.delete_template(name).await?;
    }
    if remote.json {
        print_json(&serde_json::json!({ "deleted": names }))?;
    }
    Ok(ExitCode::SUCCESS)
}
