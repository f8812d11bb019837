#![allow(clippy::unwrap_used)]

use std::sync::Mutex;

use super::*;
use crate::template::recipe::Meta;

/// A recipe that builds in a moment what no package mirror is needed for.
fn tiny(script: &'static str) -> Recipe {
    Recipe {
        name: "tiny",
        files: vec![("build.sh", script)],
        meta: Meta {
            user: "root".into(),
            workdir: "/".into(),
            env: BTreeMap::from([("A".into(), "b".into())]),
        },
    }
}

const GOOD: &str = r#"
set -eu
echo "I: making it..."
mkdir "$TMPDIR/root" && echo hello > "$TMPDIR/root/greeting"
chmod 755 "$TMPDIR/root"
tar -C "$TMPDIR/root" --sort=name --mtime=@0 --owner=0 --group=0 -cf "$1" .
"#;

fn scratch_names(cache: &Path) -> Vec<String> {
    fs::read_dir(cache.join("build"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn the_base_recipe_is_embedded_and_its_key_depends_on_the_release() {
    let base = recipe::find("base").unwrap();
    assert_eq!(base.meta.user, "user");
    assert_eq!(base.meta.workdir, "/home/user");
    assert_ne!(base.key("bookworm"), base.key("trixie"));
    let mut changed = base.clone();
    changed.files[0].1 = "other";
    assert_ne!(changed.key("bookworm"), base.key("bookworm"));
}

#[test]
fn the_release_is_read_with_and_without_quotes() {
    assert_eq!(recipe::release("ID=debian\nVERSION_CODENAME=bookworm\n"), "bookworm");
    assert_eq!(recipe::release("VERSION_CODENAME=\"trixie\""), "trixie");
    assert_eq!(recipe::release("ID=arch\n"), "");
}

#[test]
fn a_damaged_record_is_an_error_with_its_path() {
    let cache = tempfile::tempdir().unwrap();
    fs::create_dir(cache.path().join("templates")).unwrap();
    let key = tiny(GOOD).key("r1");
    fs::write(record_path(cache.path(), "tiny", key), "{").unwrap();
    let error = read_record(cache.path(), "tiny", key).unwrap_err().to_string();
    assert!(error.contains(&format!("templates/tiny.{key}.json")), "{error}");
}

#[test]
fn mounts_in_a_folder_are_seen() {
    let table =
        "42 27 0:39 / /c/build/base.x/dev/pts rw - devpts none rw\n44 27 0:22 / /sys ro - sysfs sys rw\n";
    assert!(has_mount(table, Path::new("/c/build/base.x")));
    assert!(has_mount(table, Path::new("/sys")));
    assert!(!has_mount(table, Path::new("/c/build/base")));
}

#[test]
fn only_steps_are_reported() {
    assert_eq!(build::step_of("I: extracting archives..."), Some("extracting archives"));
    assert_eq!(build::step_of("I: removing tempdir /tmp/mmdebstrap.x..."), None);
    assert_eq!(build::step_of("Get:1 something..."), None);
}

#[test]
fn an_unknown_template_is_refused() {
    let cache = tempfile::tempdir().unwrap();
    let error = prepare(cache.path(), "nope", |_| ()).unwrap_err();
    assert!(matches!(error, TemplateError::Unknown(name) if name == "nope"));
}

// Building needs root, as the whole product does.
#[test]
fn a_template_is_built_once_and_kept_by_content() {
    let cache = tempfile::tempdir().unwrap();
    let mut lines = Vec::new();
    let mut progress = |line: &str| lines.push(line.to_owned());
    let first = prepare_recipe(cache.path(), &tiny(GOOD), "r1", &mut progress).unwrap();
    assert!(lines.iter().any(|line| line == "making it"), "{lines:?}");
    let rootfs = rootfs_dir(cache.path(), first.rootfs);
    assert_eq!(fs::read_to_string(rootfs.join("greeting")).unwrap(), "hello\n");
    assert_eq!(fs::metadata(&rootfs).unwrap().permissions().mode() & 0o7777, 0o755);
    assert_eq!(read_record(cache.path(), "tiny", first.recipe).unwrap(), Some(first.clone()));

    // The same recipe is not built again, and what is left of a build that was cut off is removed once nobody builds.
    fs::create_dir_all(cache.path().join("build/tiny.crashed/x")).unwrap();
    let building = lock(cache.path(), "tiny", &mut |_| ()).unwrap();
    let mut silent = |line: &str| panic!("built again: {line}");
    assert_eq!(prepare_recipe(cache.path(), &tiny(GOOD), "r1", &mut silent).unwrap(), first);
    assert_eq!(scratch_names(cache.path()), ["tiny.crashed"]);
    drop(building);
    assert_eq!(prepare_recipe(cache.path(), &tiny(GOOD), "r1", &mut silent).unwrap(), first);
    assert_eq!(scratch_names(cache.path()), Vec::<String>::new());

    // A changed release is built, and equal bytes are kept once.
    let second = prepare_recipe(cache.path(), &tiny(GOOD), "r2", &mut |_| ()).unwrap();
    assert_ne!(second.recipe, first.recipe);
    assert_eq!(second.rootfs, first.rootfs);
    assert_eq!(scratch_names(cache.path()), Vec::<String>::new());
    // What an older program uses is still there for it.
    assert_eq!(prepare_recipe(cache.path(), &tiny(GOOD), "r1", &mut silent).unwrap(), first);

    // A root file system that somebody removed is built again.
    fs::remove_dir_all(&rootfs).unwrap();
    prepare_recipe(cache.path(), &tiny(GOOD), "r2", &mut |_| ()).unwrap();
    assert!(rootfs.is_dir());
}

#[test]
fn a_failed_build_shows_its_end_and_leaves_nothing() {
    let cache = tempfile::tempdir().unwrap();
    fs::create_dir_all(cache.path().join("build/tiny.crashed/x")).unwrap();
    fs::create_dir_all(cache.path().join("build/tiny-two.other")).unwrap();
    let script = "echo first; echo 'E: Failed to fetch http://mirror.invalid/x' >&2; exit 100";
    let error = prepare_recipe(cache.path(), &tiny(script), "r1", &mut |_| ()).unwrap_err();
    let TemplateError::Build { failure, tail, .. } = &error else { panic!("{error}") };
    assert_eq!(*failure, BuildFailure::Mirror);
    assert!(error.to_string().contains("mirror could not be reached"), "{error}");
    assert_eq!(tail, "first\nE: Failed to fetch http://mirror.invalid/x");
    assert_eq!(scratch_names(cache.path()), ["tiny-two.other"]);
    assert_eq!(read_record(cache.path(), "tiny", tiny(script).key("r1")).unwrap(), None);
    assert_eq!(load(cache.path(), "tiny").unwrap(), None);
}

#[test]
fn one_of_two_servers_builds() {
    let cache = tempfile::tempdir().unwrap();
    let lines = Mutex::new(Vec::new());
    let prepare = || {
        let mut progress = |line: &str| lines.lock().unwrap().push(line.to_owned());
        prepare_recipe(cache.path(), &tiny(GOOD), "r1", &mut progress).unwrap()
    };
    let (one, two) = std::thread::scope(|scope| {
        let (one, two) = (scope.spawn(prepare), scope.spawn(prepare));
        (one.join().unwrap(), two.join().unwrap())
    });
    assert_eq!(one, two);
    let lines = lines.into_inner().unwrap();
    assert_eq!(lines.iter().filter(|line| *line == "making it").count(), 1, "{lines:?}");
}
