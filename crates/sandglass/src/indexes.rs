//! Where this machine gets packages from, by the settings of its own pip, npm, cargo and apt: for the feature `packages` of
//! a config that says `from = "host"`. Each parser is a pure function from a file's text to the URLs in it.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use fs_err as fs;
use http::Uri;
use sandglass_types::net::Hostname;
use serde_json::{Value, json};

/// The largest file that is read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Settings of pip, by variable (<https://pip.pypa.io/en/stable/topics/configuration/>).
const PIP_VARIABLES: [&str; 2] = ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"];

/// A server of packages.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Index {
    host: String,
    port: u16,
}

impl Index {
    /// `None` for what is no URL of a server, as a path is none.
    fn of_url(url: &str) -> Option<Self> {
        let url = url.strip_prefix("sparse+").unwrap_or(url);
        let uri: Uri = url.parse().ok()?;
        let default = match uri.scheme_str()? {
            "https" => 443,
            "http" => 80,
            _ => return None,
        };
        let host = uri.host()?.trim_matches(['[', ']']).to_ascii_lowercase();
        let named = host.parse::<Hostname>().is_ok() || host.parse::<IpAddr>().is_ok();
        named.then(|| Self { host, port: uri.port_u16().unwrap_or(default) })
    }
}

/// The rules of a feature that allows these, as a config has them.
pub(crate) fn feature(indexes: &BTreeSet<Index>) -> Value {
    let rule = |Index { host, port }: &Index| json!({ "allow": host, "ports": [port] });
    json!({ "rules": indexes.iter().map(rule).collect::<Vec<_>>() })
}

/// What the settings of this machine, and of the user with this home, name.
pub(crate) fn of_this_machine(home: Option<&Path>) -> BTreeSet<Index> {
    let in_home = |path: &str| home.map(|home| home.join(path));
    let all = |fixed: &[&str], below: &[&str]| -> Vec<PathBuf> {
        let fixed = fixed.iter().map(PathBuf::from);
        fixed.chain(below.iter().filter_map(|path| in_home(path))).collect()
    };
    let mut sources = all(&["/etc/apt/sources.list"], &[]);
    let parts = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    sources.extend(parts.map(|part| part.path()));
    let named = |paths: Vec<PathBuf>, parse: fn(&str) -> Vec<String>| {
        let texts = paths.iter().filter_map(|path| read(path));
        texts.flat_map(|text| parse(&text)).collect::<Vec<_>>()
    };
    let mut urls = [
        named(all(&["/etc/pip.conf"], &[".config/pip/pip.conf", ".pip/pip.conf"]), pip),
        named(all(&["/etc/npmrc"], &[".npmrc"]), npm),
        named(all(&[], &[".cargo/config.toml", ".cargo/config"]), cargo),
        named(sources, apt),
    ]
    .concat();
    let variables = PIP_VARIABLES.iter().filter_map(|name| std::env::var(name).ok());
    urls.extend(variables.flat_map(|value| words(&value)));
    urls.iter().filter_map(|url| Index::of_url(url)).collect()
}

/// The text of a settings file; one that can't be read sets nothing.
fn read(path: &Path) -> Option<String> {
    let small = fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() <= MAX_FILE);
    small.then(|| fs::read_to_string(path).ok()).flatten()
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// `pip.conf`: an INI file in which indented lines go on with the value above.
fn pip(text: &str) -> Vec<String> {
    let (mut urls, mut inside) = (Vec::new(), false);
    for line in text.lines().filter(|line| !line.trim_start().starts_with(['#', ';'])) {
        if line.starts_with([' ', '\t']) {
            if inside {
                urls.extend(words(line));
            }
            continue;
        }
        let (key, value) = line.split_once('=').unwrap_or((line, ""));
        inside = ["index-url", "extra-index-url"].contains(&key.trim().replace('_', "-").as_str());
        if inside {
            urls.extend(words(value));
        }
    }
    urls
}

/// `.npmrc`: `registry` for all packages, `@scope:registry` for some.
fn npm(text: &str) -> Vec<String> {
    let lines = text.lines().filter_map(|line| line.split_once('='));
    let registries = lines.filter(|(key, _)| {
        let key = key.trim();
        key == "registry" || key.starts_with('@') && key.ends_with(":registry")
    });
    registries.map(|(_, value)| value.trim().trim_matches('"').to_owned()).collect()
}

/// `config.toml` of cargo: registries, and sources that are used in the place of others.
fn cargo(text: &str) -> Vec<String> {
    let Ok(config) = text.parse::<toml::Table>() else { return Vec::new() };
    let tables = |name: &str, key: &'static str| {
        let table = config.get(name).and_then(toml::Value::as_table).cloned().unwrap_or_default();
        let urls = table.into_iter().filter_map(move |(_, entry)| Some(entry.get(key)?.as_str()?.to_owned()));
        urls.collect::<Vec<_>>()
    };
    [tables("registries", "index"), tables("source", "registry")].concat()
}

/// The sources of apt, in both of their forms (sources.list(5)).
fn apt(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let urls = lines.filter_map(|line| match line.split_once(char::is_whitespace)? {
        ("URIs:", uris) => Some(words(uris)),
        ("deb", rest) => {
            let rest = rest.trim_start();
            let rest = if rest.starts_with('[') { rest.split_once(']')?.1 } else { rest };
            Some(rest.split_whitespace().take(1).map(str::to_owned).collect())
        }
        _ => None,
    });
    urls.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tool_s_settings_are_read() {
        let text = "[global]\nindex-url = https://a.example/simple\nextra_index_url =\n  https://b.example/x\n\
                    \thttp://c.example:8080/\n# index-url = https://no.example/\ntrusted-host = no.example\n  https://no.example\n";
        assert_eq!(pip(text), ["https://a.example/simple", "https://b.example/x", "http://c.example:8080/"]);
        let text = "registry=https://a.example/npm/\n@scope:registry = \"https://b.example\"\n//a.example/:_authToken=x\n";
        assert_eq!(npm(text), ["https://a.example/npm/", "https://b.example"]);
        let text = "[source.crates-io]\nreplace-with = \"own\"\n[source.own]\nregistry = \"sparse+https://a.example/index/\"\n\
                    [registries.team]\nindex = \"https://b.example/git\"\n[net]\nretry = 2\n";
        assert_eq!(cargo(text), ["https://b.example/git", "sparse+https://a.example/index/"]);
        assert_eq!(cargo("not toml ["), [""; 0]);
        let text = "# deb http://no.example/ x main\ndeb [signed-by=/k arch=amd64] http://a.example/debian stable main\n\
                    deb-src http://no.example/ x main\nTypes: deb\nURIs: https://b.example/debian http://c.example/\n";
        assert_eq!(apt(text), ["http://a.example/debian", "https://b.example/debian", "http://c.example/"]);
    }

    #[test]
    fn a_url_names_a_host_and_a_port() {
        let index = |host: &str, port| Some(Index { host: host.into(), port });
        for (url, expected) in [
            ("https://A.example/simple", index("a.example", 443)),
            ("http://user:secret@a.example:8080/x", index("a.example", 8080)),
            ("sparse+https://a.example/", index("a.example", 443)),
            ("https://[2001:db8::1]/", index("2001:db8::1", 443)),
            ("http://192.0.2.1", index("192.0.2.1", 80)),
            ("file:///srv/packages", None),
            ("cdrom:[Debian]/", None),
            ("mirror+file:/etc/mirrors", None),
            ("a.example", None),
            ("", None),
        ] {
            assert_eq!(Index::of_url(url), expected, "{url}");
        }
    }

    #[test]
    fn what_was_found_is_a_feature() {
        let urls = ["https://a.example/x", "https://a.example/y", "http://192.0.2.1:8080/"];
        let indexes = urls.iter().filter_map(|url| Index::of_url(url)).collect();
        let operator = json!({ "features": { "packages": feature(&indexes) } });
        let operator: sandglass_egress::policy::Operator = serde_json::from_value(operator).unwrap();
        let written = serde_json::to_value(&operator).unwrap();
        let rules = &written["features"]["packages"]["rules"];
        assert_eq!(rules.as_array().unwrap().len(), 2);
        assert_eq!((&rules[0]["allow"], &rules[0]["ports"]), (&json!("192.0.2.1/32"), &json!([8080])));
        assert_eq!((&rules[1]["allow"], &rules[1]["ports"]), (&json!("a.example"), &json!([443])));
    }
}
