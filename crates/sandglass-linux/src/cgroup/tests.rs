use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::os::fd::OwnedFd;

use super::*;
use crate::process::{Child, Launch, Step, spawn};

const PATIENCE: Duration = Duration::from_secs(5);

/// A folder that looks like a mounted version 2, as far as files in a plain folder can.
fn version_2(controllers: &str) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("cgroup.controllers"), controllers).unwrap();
    fs::write(root.path().join("cgroup.subtree_control"), "").unwrap();
    root
}

/// A folder that looks like version 1 in the layout of a distribution: joined controllers, links, hybrid.
fn version_1() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for name in ["cpu,cpuacct", "memory", "pids", "devices", "systemd", "unified"] {
        fs::create_dir(root.path().join(name)).unwrap();
        fs::write(root.path().join(name).join("cgroup.procs"), "").unwrap();
    }
    for link in ["cpu", "cpuacct"] {
        std::os::unix::fs::symlink("cpu,cpuacct", root.path().join(link)).unwrap();
    }
    fs::write(root.path().join("unified/cgroup.controllers"), "").unwrap();
    fs::create_dir(root.path().join("unrelated")).unwrap();
    root
}

fn fill(folder: &Path, files: &[(&str, &str)]) {
    fs::create_dir_all(folder).unwrap();
    for (name, text) in files {
        fs::write(folder.join(name), text).unwrap();
    }
}

#[test]
fn version_2_enables_controllers_at_both_levels() {
    let root = version_2("cpuset cpu io memory hugetlb pids rdma\n");
    let cgroups = Cgroups::detect(root.path(), "inst0001").unwrap();
    assert_eq!(cgroups.version(), Version::V2);
    let parent = root.path().join("sandglass-inst0001");
    // The kernel makes these files with the folder.
    fill(&parent, &[("cgroup.controllers", "cpu memory pids\n"), ("cgroup.subtree_control", "")]);
    cgroups.make_parent().unwrap();
    let enabled = |folder: &Path| fs::read_to_string(folder.join("cgroup.subtree_control")).unwrap();
    assert_eq!(enabled(root.path()), "+cpu +memory +pids +cpuset +io");
    assert_eq!(enabled(&parent), "+cpu +memory +pids");

    fs::write(parent.join("cgroup.controllers"), "cpu pids\n").unwrap();
    assert!(matches!(cgroups.make_parent(), Err(CgroupError::NoController("memory"))));
}

#[test]
fn one_hierarchy_that_refuses_keeps_nobody_in_the_others() {
    let root = version_1();
    // The first in any order by name.
    let refusing = root.path().join("cpu,cpuacct/cgroup.procs");
    fs::remove_file(&refusing).unwrap();
    fs::create_dir(&refusing).unwrap();
    let error = Cgroups::detect(root.path(), "inst0001").unwrap().leave().unwrap_err();
    assert!(error.to_string().contains("cpuacct"), "{error}");
    for left in ["memory", "pids", "systemd", "unified"] {
        assert_eq!(fs::read_to_string(root.path().join(left).join("cgroup.procs")).unwrap(), "0");
    }
}

#[test]
fn version_2_counters_are_read() {
    let root = version_2("cpu memory pids\n");
    let cgroups = Cgroups::detect(root.path(), "inst0001").unwrap();
    let leaf = cgroups.leaf("box").unwrap();
    let folder = root.path().join("sandglass-inst0001/box");
    assert_eq!(leaf.oci_path(), "/sandglass-inst0001/box");
    assert!(!leaf.exists());
    let missing = leaf.usage().unwrap_err();
    assert!(matches!(missing, CgroupError::Io(error) if error.kind() == io::ErrorKind::NotFound));
    assert_eq!(leaf.processes().unwrap(), [0; 0]);

    fill(
        &folder,
        &[
            ("cpu.stat", "usage_usec 2500\nuser_usec 2000\nsystem_usec 500\n"),
            ("memory.current", "4096\n"),
            ("pids.current", "3\n"),
            ("pids.events", "max 4\n"),
            ("memory.events", "low 0\nhigh 0\nmax 9\noom 1\noom_kill 5\n"),
            ("cgroup.procs", "12\n7\n"),
        ],
    );
    let without_peak = Usage { cpu_micros: 2500, memory_bytes: 4096, memory_peak_bytes: 4096, processes: 3 };
    assert_eq!(leaf.usage().unwrap(), without_peak);
    fs::write(folder.join("memory.peak"), "8192\n").unwrap();
    assert_eq!(leaf.usage().unwrap(), Usage { memory_peak_bytes: 8192, ..without_peak });
    assert_eq!((leaf.oom_kills().unwrap(), leaf.process_limit_hits().unwrap()), (5, 4));
    assert_eq!(leaf.processes().unwrap(), [7, 12]);
    assert_eq!(cgroups.children().unwrap(), ["box"]);

    fs::write(folder.join("memory.current"), "max\n").unwrap();
    assert!(matches!(leaf.usage(), Err(CgroupError::Malformed(_))));
}

#[test]
fn version_2_leaves_are_made_and_removed() {
    let root = version_2("cpu memory pids\n");
    let cgroups = Cgroups::detect(root.path(), "inst0001").unwrap();
    fs::create_dir(root.path().join("sandglass-inst0001")).unwrap();
    let leaf = cgroups.leaf("box").unwrap();
    leaf.make().unwrap();
    leaf.make().unwrap();
    fs::create_dir_all(root.path().join("sandglass-inst0001/box/inner/innermost")).unwrap();
    leaf.remove(Duration::ZERO).unwrap();
    assert!(!leaf.exists());
    leaf.remove(Duration::ZERO).unwrap();
    cgroups.remove_parent().unwrap();
    cgroups.remove_parent().unwrap();
}

#[test]
fn version_1_joins_links_and_takes_what_limits_counts_or_tracks() {
    let root = version_1();
    let cgroups = Cgroups::detect(root.path(), "inst0001").unwrap();
    assert_eq!(cgroups.version(), Version::V1);
    let folders: BTreeMap<PathBuf, ()> = cgroups.parent_folders().map(|folder| (folder, ())).collect();
    let names: Vec<_> = folders
        .keys()
        .map(|folder| folder.parent().unwrap().file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, ["cpu,cpuacct", "memory", "pids", "systemd", "unified"]);
    assert_eq!(cgroups.parent_folders().count(), 5);
}

#[test]
fn the_group_of_a_process_is_found_where_it_is_mounted() {
    let (one, two) = (version_1(), version_2("cpu memory pids"));
    let one = Cgroups::detect(one.path(), "i").unwrap();
    let two = Cgroups::detect(two.path(), "i").unwrap();
    let ends = |group: Option<PathBuf>| group.map(|group| group.display().to_string());
    let text = "9:name=systemd:/x\n8:cpu,pids:/a/b\n4:memory:/c\n0::/u\n";
    assert!(ends(one.group_of(text)).unwrap().ends_with("/pids/a/b"), "{:?}", one.group_of(text));
    assert!(ends(two.group_of(text)).unwrap().ends_with("/u"));
    for text in ["", "0:", "8:pids", "8:pids:/../out\n0::/../out\n", "8:cpu:/a\n"] {
        assert_eq!((one.group_of(text), two.group_of(text)), (None, None), "{text}");
    }
}

#[test]
fn a_move_to_where_it_is_changes_nothing() {
    let before = fs_err::read_to_string("/proc/self/cgroup").unwrap();
    Cgroups::detect(Path::new(ROOT), "expected").unwrap().expect_move().unwrap();
    assert_eq!(fs_err::read_to_string("/proc/self/cgroup").unwrap(), before);
}

#[test]
fn missing_controllers_and_mounts_are_refused() {
    let root = version_2("cpu memory\n");
    assert!(matches!(Cgroups::detect(root.path(), "i"), Err(CgroupError::NoController("pids"))));
    let root = version_1();
    fs::remove_dir_all(root.path().join("memory")).unwrap();
    assert!(matches!(Cgroups::detect(root.path(), "i"), Err(CgroupError::NoController("memory"))));
    let root = tempfile::tempdir().unwrap();
    assert!(matches!(Cgroups::detect(root.path(), "i"), Err(CgroupError::NotMounted(_))));
    assert!(matches!(Cgroups::detect(&root.path().join("absent"), "i"), Err(CgroupError::NotMounted(_))));
}

#[test]
fn names_stay_inside_the_parent() {
    let root = version_2("cpu memory pids\n");
    for name in ["", ".", "..", "a/b", "../x", "A", "a\n", "ä", &"a".repeat(65)] {
        assert!(matches!(Cgroups::detect(root.path(), name), Err(CgroupError::Name(_))), "{name:?}");
        let cgroups = Cgroups::detect(root.path(), "inst0001").unwrap();
        assert!(matches!(cgroups.leaf(name), Err(CgroupError::Name(_))), "{name:?}");
    }
}

/// Groups of this machine, removed with all that is in them however the test ends.
struct Real {
    cgroups: Cgroups,
    child: Option<Child>,
}

impl Real {
    fn new(test: &str) -> Self {
        assert!(rustix::process::geteuid().is_root(), "this test needs root");
        let cgroups =
            Cgroups::detect(Path::new(ROOT), &format!("test-{test}-{}", std::process::id())).unwrap();
        cgroups.make_parent().unwrap();
        Self { cgroups, child: None }
    }

    /// A shell that runs `script` in the leaf; the descriptor reads what it writes.
    fn run(&mut self, leaf: &Leaf, script: &str) -> (&Child, OwnedFd) {
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let join = leaf.folders().map(|folder| {
            Step::JoinCgroup(
                CString::new(folder.join("cgroup.procs").into_os_string().into_encoded_bytes()).unwrap(),
            )
        });
        let launch = Launch::new("/bin/sh")
            .unwrap()
            .args(["-c", script])
            .unwrap()
            .env("PATH", "/usr/bin:/bin")
            .unwrap()
            .stdout(write)
            .unwrap()
            .steps(join);
        (self.child.insert(spawn(&launch).unwrap()), read)
    }

    fn end(&mut self) {
        if let Some(child) = self.child.take() {
            // It may have ended, and its status may have been taken, before.
            let _ = child.pidfd().kill();
            let _ = child.wait(Some(Instant::now() + PATIENCE));
        }
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        self.end();
        for name in self.cgroups.children().unwrap() {
            self.cgroups.leaf(&name).unwrap().remove(PATIENCE).unwrap();
        }
        self.cgroups.remove_parent().unwrap();
        assert!(self.cgroups.parent_folders().all(|folder| !folder.exists()));
    }
}

#[test]
fn a_real_leaf_counts_and_is_removed_once_empty() {
    let mut real = Real::new("count");
    real.cgroups.make_parent().unwrap();
    let leaf = real.cgroups.leaf("box").unwrap();
    leaf.make().unwrap();
    assert!(leaf.folders().all(|folder| folder.exists()));
    assert_eq!(real.cgroups.children().unwrap(), ["box"]);
    assert_eq!(leaf.usage().unwrap().processes, 0);
    assert_eq!((leaf.oom_kills().unwrap(), leaf.process_limit_hits().unwrap()), (0, 0));

    let (child, output) =
        real.run(&leaf, "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo done; kill -STOP $$");
    let pid = child.pid();
    rustix::io::read(&output, &mut [0; 5]).unwrap();
    let usage = leaf.usage().unwrap();
    assert!(usage.cpu_micros > 1_000 && usage.cpu_micros < 60_000_000, "{usage:?}");
    assert!(usage.memory_peak_bytes >= usage.memory_bytes, "{usage:?}");
    assert!(usage.memory_peak_bytes > 0, "{usage:?}");
    assert_eq!((usage.processes, leaf.processes().unwrap()), (1, vec![pid]));

    let busy = leaf.remove(Duration::from_millis(5)).unwrap_err();
    assert!(matches!(busy, CgroupError::Busy { .. }), "{busy}");
    real.end();
    leaf.remove(PATIENCE).unwrap();
    assert!(!leaf.exists());
    assert_eq!(real.cgroups.children().unwrap(), [""; 0]);
}

#[test]
fn real_limits_leave_their_marks() {
    let mut real = Real::new("limits");
    let leaf = real.cgroups.leaf("box").unwrap();
    leaf.make().unwrap();
    let limit = |controller: &'static str, v1: &str, v2: &str, value: &str| {
        let file = if real.cgroups.version() == Version::V1 { v1 } else { v2 };
        let folder = leaf.folders().find(|folder| folder.join(file).exists());
        fs::write(folder.expect(controller).join(file), value).unwrap();
    };
    limit("memory", "memory.limit_in_bytes", "memory.max", "16777216");
    limit("pids", "pids.max", "pids.max", "2");

    // Two processes are the limit: the shell and the first `sleep`; the second fork fails and the shell ends.
    let (child, _output) = real.run(&leaf, "sleep 100 & sleep 100 & wait");
    child.wait(Some(Instant::now() + PATIENCE)).unwrap().expect("it ends by itself");
    assert!(leaf.process_limit_hits().unwrap() >= 1);
    for pid in leaf.processes().unwrap() {
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(pid).unwrap(),
            rustix::process::Signal::KILL,
        )
        .unwrap();
    }
    assert_eq!(leaf.oom_kills().unwrap(), 0);
    // A string that doubles until it is larger than the limit.
    let (child, _output) = real.run(&leaf, "a=aaaaaaaaaaaaaaaa; while :; do a=$a$a; done");
    child.wait(Some(Instant::now() + PATIENCE)).unwrap().expect("the kernel kills it");
    assert!(leaf.oom_kills().unwrap() >= 1);
}
