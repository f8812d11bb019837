//! None of it needs root.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use sandglass_linux::process::{Launch, run};

/// Who runs the tests again below.
const NOBODY: u32 = 65534;

#[test]
fn every_case_passes_for_a_user_without_privilege() {
    if rustix::process::geteuid().as_raw() == NOBODY {
        // It is the run below that came back here.
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for folder in [dir.path().to_owned(), dir.path().join("tmp")] {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o1777)).unwrap();
    }
    // Where it was built may be closed to others.
    let program = dir.path().join("tests");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let identity = format!("--reuid={NOBODY}");
    let group = format!("--regid={NOBODY}");
    let launch = Launch::new("/usr/bin/setpriv")
        .and_then(|launch| launch.args([&*identity, &*group, "--clear-groups", "--no-new-privs"]))
        .and_then(|launch| launch.arg(&program)?.args(["claims::with", "processes::"]))
        .and_then(|launch| launch.env("TMPDIR", dir.path().join("tmp"))?.env("PATH", "/usr/bin:/bin"))
        .unwrap();
    let output = run(launch, b"", Duration::from_secs(150), 64 * 1024).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("test claims::with_processes_it_refuses_all_there_is_to_refuse ... ok"), "{said}");
}
