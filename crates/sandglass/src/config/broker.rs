//! The table `[broker]`, and the connections of the operator's.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use sandglass_broker::Secret;
use sandglass_broker::connection::{Limits, Written, WrittenAttach};
use sandglass_control::OwnConnection;
use serde::Deserialize;

use crate::certificate;

/// The most connections of the operator's.
const MAX_OWN: usize = 100;

/// The table `[broker]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) master_key_file: Option<PathBuf>,
}

/// A table `[[connections]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConnectionFile {
    name: String,
    target: String,
    methods: Vec<String>,
    paths: Vec<String>,
    credential: WrittenAttach,
    credential_file: PathBuf,
    #[serde(default)]
    second_resource: bool,
    #[serde(default)]
    limits: Limits,
}

impl ConnectionFile {
    fn resolve(self) -> anyhow::Result<OwnConnection> {
        let Self { name, target, methods, paths, credential, credential_file, second_resource, limits } =
            self;
        let written = Written { name, target, methods, paths, credential, second_resource, limits };
        let connection = written.clone().try_into()?;
        Ok(OwnConnection { written, connection, credential: secret(&credential_file)? })
    }
}

/// Reads a credential. A line end behind it is none of it.
fn secret(path: &Path) -> anyhow::Result<Secret> {
    let text = String::from_utf8(certificate::contents(path)?).ok();
    let secret = text.as_deref().and_then(|text| text.trim_end_matches(['\r', '\n']).parse().ok());
    secret.with_context(|| {
        format!("{} holds no credential: {}", path.display(), sandglass_broker::secret::InvalidSecret)
    })
}

/// Reads the connections of the operator's, each with another name.
pub(super) fn resolve(files: Vec<ConnectionFile>) -> anyhow::Result<Vec<OwnConnection>> {
    if files.len() > MAX_OWN {
        bail!("there may be at most {MAX_OWN} [[connections]]");
    }
    let mut own = Vec::<OwnConnection>::new();
    for file in files {
        let name = file.name.clone();
        if own.iter().any(|own| own.written.name == name) {
            bail!("there are two connections {name:?}");
        }
        own.push(file.resolve().with_context(|| format!("the connection {name:?}"))?);
    }
    Ok(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_read_with_their_credentials() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credential");
        let read = |change: (&str, &str)| {
            let text = format!(
                "name = \"github\"\ntarget = \"https://api.test\"\nmethods = [\"GET\"]\npaths = [\"/\"]\n\
                 credential = \"bearer\"\ncredential_file = \"{}\"\n",
                path.display()
            );
            let text = text.replace(change.0, change.1);
            resolve(vec![toml::from_str(&text)?]).map_err(|error| anyhow::anyhow!("{error:#}"))
        };
        let failure = |change| read(change).unwrap_err().to_string();
        assert!(failure(("", "")).contains("credential"), "there is no file");
        for wrong in ["", "short\n", "two\nlines of it\n"] {
            std::fs::write(&path, wrong).unwrap();
            let error = failure(("", ""));
            assert!(error.contains("holds no credential") && !error.contains("lines of it"), "{error}");
        }
        std::fs::write(&path, "a credential\n").unwrap();
        let own = read(("", "")).unwrap();
        assert_eq!(own[0].credential.expose(), "a credential");
        // The operator alone may have it sent in clear.
        assert!(read(("https", "http")).is_ok());
        assert!(failure(("\"/\"", "\"x\"")).contains("the connection \"github\": paths"));
        assert!(failure(("methods", "method")).contains("method"));
        assert!(failure(("bearer", "carrier")).contains("carrier"));
    }

    #[test]
    fn a_name_is_one_connection_s() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credential");
        std::fs::write(&path, "a credential").unwrap();
        let file = || ConnectionFile {
            name: "a".into(),
            target: "https://api.test".into(),
            methods: vec!["GET".into()],
            paths: vec!["/".into()],
            credential: WrittenAttach::Bearer,
            credential_file: path.clone(),
            second_resource: false,
            limits: Limits::default(),
        };
        assert_eq!(resolve(vec![file()]).unwrap().len(), 1);
        assert!(resolve(vec![file(), file()]).unwrap_err().to_string().contains("two connections"));
    }
}
