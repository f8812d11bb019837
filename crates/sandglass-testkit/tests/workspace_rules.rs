//! The rules that hold for the workspace as a whole, each as a test.

#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;

/// A crate may depend on crates of lower layers only. The guest shares with the server nothing but the vocabulary and
/// the protocol, so that what the server needs can never grow the binary that lives with the enemy.
const LAYERS: [(&str, u32); 16] = [
    ("sandglass-failpoint", 0),
    ("sandglass-types", 0),
    ("sandglass-proto", 0),
    ("sandglass-linux", 1),
    ("sandglass-egress", 1),
    ("sandglass-broker", 1),
    ("sandglass-models", 1),
    ("sandglass-connections", 2),
    ("sandglass-store", 2),
    ("sandglass-engine", 2),
    ("sandglass-control", 3),
    ("sandglass-gateway", 3),
    ("sandglass-api", 4),
    ("sandglass", 5),
    ("sandglass-guest", 1),
    ("sandglass-testkit", 6),
];

/// Crates that may hold `unsafe`: the wrappers over the kernel, and the guest.
const MAY_BE_UNSAFE: [&str; 2] = ["sandglass-linux", "sandglass-guest"];

/// Longest source file, in lines.
const MAX_LINES: usize = 800;

/// Crates that must not come in: a second TLS provider, C libraries of the system, another allocator of trust.
const BANNED: [&str; 4] = ["aws-lc-sys", "openssl-sys", "native-tls", "libseccomp-sys"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

fn manifests() -> BTreeMap<String, toml::Table> {
    fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| {
            let text = fs::read_to_string(entry.unwrap().path().join("Cargo.toml")).unwrap();
            let manifest: toml::Table = text.parse().unwrap();
            (manifest["package"]["name"].as_str().unwrap().to_owned(), manifest)
        })
        .collect()
}

/// The files that git tracks, or would if they were added now.
fn tracked() -> Vec<PathBuf> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(listed.status.success(), "git: {}", String::from_utf8_lossy(&listed.stderr));
    let names = String::from_utf8(listed.stdout).unwrap();
    let files: Vec<_> = names.split_terminator('\0').map(PathBuf::from).collect();
    assert!(files.len() > 50, "git lists only {} files", files.len());
    files.into_iter().filter(|file| root().join(file).is_file()).collect()
}

fn sources() -> impl Iterator<Item = (PathBuf, String)> {
    let rust = tracked().into_iter().filter(|file| file.extension().is_some_and(|kind| kind == "rs"));
    rust.map(|file| (file.clone(), fs::read_to_string(root().join(file)).unwrap()))
}

#[test]
fn dependencies_point_down() {
    let layers = BTreeMap::from(LAYERS);
    let manifests = manifests();
    let known: BTreeSet<_> = layers.keys().map(ToString::to_string).collect();
    assert_eq!(manifests.keys().cloned().collect::<BTreeSet<_>>(), known, "a crate has no layer");
    for (name, manifest) in &manifests {
        let Some(dependencies) = manifest.get("dependencies").and_then(toml::Value::as_table) else {
            continue;
        };
        for dependency in dependencies.keys().filter(|name| name.starts_with("sandglass")) {
            let (upper, lower) = (layers[name.as_str()], layers[dependency.as_str()]);
            assert!(lower < upper, "{name} (layer {upper}) depends on {dependency} (layer {lower})");
            let shared = ["sandglass-types", "sandglass-proto"].contains(&dependency.as_str());
            assert!(name != "sandglass-guest" || shared, "the guest depends on {dependency}");
            assert_ne!(dependency, "sandglass-guest", "{name} depends on the guest");
            assert_ne!(dependency, "sandglass-testkit", "{name} depends on the testkit outside its tests");
        }
    }
}

#[test]
fn every_crate_obeys_the_lints_and_takes_versions_from_the_workspace() {
    for (name, manifest) in manifests() {
        assert_eq!(
            manifest["lints"]["workspace"].as_bool(),
            Some(true),
            "{name} has no `[lints] workspace = true`"
        );
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let Some(dependencies) = manifest.get(section).and_then(toml::Value::as_table) else { continue };
            for (dependency, spec) in dependencies {
                let shared = spec.get("workspace").and_then(toml::Value::as_bool) == Some(true);
                assert!(shared, "{name}: {dependency} must be `workspace = true`");
            }
        }
    }
}

#[test]
fn unsafe_code_is_where_it_may_be() {
    for name in manifests().keys().filter(|name| !MAY_BE_UNSAFE.contains(&name.as_str())) {
        let source = root().join("crates").join(name).join("src");
        let roots: Vec<_> =
            ["lib.rs", "main.rs"].map(|file| source.join(file)).into_iter().filter(|f| f.exists()).collect();
        assert!(!roots.is_empty(), "{name} has neither lib.rs nor main.rs");
        for file in roots {
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.contains("#![forbid(unsafe_code)]"), "{} lacks forbid(unsafe_code)", file.display());
        }
    }
}

#[test]
fn files_are_small_and_modules_are_named() {
    for (file, text) in sources() {
        assert!(!file.ends_with("mod.rs"), "{}: name the module's file after it", file.display());
        let lines = text.lines().count();
        assert!(lines <= MAX_LINES, "{} has {lines} lines", file.display());
    }
}

/// An example in Rust would want a run of its own to be checked; a test beside the code says the same.
#[test]
fn documentation_has_no_examples_that_nothing_runs() {
    for (file, text) in sources() {
        let mut inside = false;
        let fences = text.lines().filter_map(|line| {
            let line = line.trim_start();
            line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?.trim().strip_prefix("```")
        });
        for language in fences {
            inside = !inside;
            assert!(
                !inside || ["text", "json", "sh", "toml"].contains(&language),
                "{}: an example in {language:?}",
                file.display()
            );
        }
    }
}

#[test]
fn banned_crates_stay_out() {
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    for banned in BANNED {
        assert!(!lock.contains(&format!("name = \"{banned}\"")), "{banned} is in Cargo.lock");
    }
}

#[test]
fn no_file_names_a_registry_or_a_folder_of_one_machine() {
    // Put together here, so that this file does not name them either.
    let registries = [["deb", "debian", "org"], ["pypi", "python", "org"], ["registry", "npmjs", "org"]]
        .map(|parts| parts.join("."));
    let others = [["static", "crates", "io"].join("."), ["", "work", "main"].join("/")];
    for file in tracked().into_iter().filter(|file| !file.ends_with("Cargo.lock")) {
        let bytes = fs::read(root().join(&file)).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        for name in registries.iter().chain(&others) {
            assert!(!text.contains(name.as_str()), "{} contains {name}", file.display());
        }
    }
}

/// Fields of a policy are private to its module, so nobody outside can decide by them; and within it, names and ranges of
/// rules are compared with something in one file alone.
#[test]
fn the_rules_of_a_policy_are_read_by_the_decision_alone() {
    let module = Path::new("crates/sandglass-egress/src/policy");
    let within = |file: &Path| file.starts_with(module) || file == module.with_extension("rs");
    let mut structs = BTreeSet::new();
    for (file, text) in sources().filter(|(file, _)| within(file)) {
        for name in
            ["Policy", "Operator", "Feature", "Features", "Effective", "Layer", "Rule", "Rules", "Http"]
        {
            for open in [" {", "("] {
                let Some((_, rest)) = text.split_once(&format!("struct {name}{open}")) else { continue };
                let body = rest.split_once(if open == "(" { ");" } else { "\n}" }).unwrap().0;
                let open = body.split(['\n', ',']).map(str::trim).find(|field| {
                    field.starts_with("pub ") || field.starts_with("pub(") && !field.starts_with("pub(super)")
                });
                assert_eq!(open, None, "{}: a field of {name} is open", file.display());
                structs.insert(name);
            }
        }
        let is_test = file.components().any(|part| part.as_os_str() == "tests.rs");
        let matches = ["pattern.matches(", "fn fit_target(", "rule.ports.contains(port)"];
        for found in matches.into_iter().filter(|found| !is_test && text.contains(found)) {
            assert!(file.ends_with("policy/decide.rs"), "{}: {found} is the decision's", file.display());
        }
    }
    assert_eq!(structs.len(), 9, "{structs:?}");
}

#[test]
fn every_barrier_of_the_threat_model_names_tests_that_exist() {
    let model = fs::read_to_string(root().join("docs/threat-model.md")).unwrap();
    let named: BTreeSet<_> =
        model.split('`').skip(1).step_by(2).filter_map(|code| code.strip_prefix("test:")).collect();
    assert!(named.len() >= 20, "the threat model names only {} tests", named.len());
    let tests: String = sources()
        .map(|(_, text)| text)
        .chain(
            tracked()
                .iter()
                .filter(|file| file.extension().is_some_and(|kind| kind == "py"))
                .map(|file| fs::read_to_string(root().join(file)).unwrap()),
        )
        .collect();
    let missing: Vec<_> = named
        .into_iter()
        .filter(|name| !tests.contains(&format!("fn {name}(")) && !tests.contains(&format!("def {name}(")))
        .collect();
    assert_eq!(missing, [""; 0], "the threat model names tests that do not exist");
    let probes = model.split('`').skip(1).step_by(2).filter_map(|code| code.strip_prefix("probe:"));
    let missing: Vec<_> = probes.filter(|id| !tests.contains(&format!("\"{id}\","))).collect();
    assert_eq!(missing, [""; 0], "the threat model names probes that do not exist");
}

#[test]
fn every_failpoint_is_in_the_code_once_and_no_other_is() {
    let (hit, list) = (["failpoint::hit(\"", "failpoint::hit_async(\""], "crates/sandglass-failpoint/");
    let code: Vec<_> =
        sources().filter(|(file, _)| !file.starts_with(list) && !file.ends_with(file!())).collect();
    for name in sandglass_failpoint::NAMES {
        let quoted = format!("\"{name}\"");
        let places: usize = code.iter().map(|(_, text)| text.matches(&quoted).count()).sum();
        assert_eq!(places, 1, "the failpoint {name} is in the code {places} times");
    }
    for (file, text) in &code {
        for call in hit.iter().flat_map(|call| text.split(call).skip(1)) {
            let name = call.split('"').next().unwrap_or_default();
            assert!(sandglass_failpoint::NAMES.contains(&name), "{}: {name} is not listed", file.display());
        }
    }
}
