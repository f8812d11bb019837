//! Gives up privilege for real. Each case runs in a process of its own with one thread, so this file has a `main`
//! in place of the test harness.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use rustix::process::{Pid, Signal, kill_process};
use sandglass_linux::privilege::{
    Confinement, Enforcement, Identity, PrivilegeError, WithoutLandlock, confine, drop_to,
};

const IDENTITY: Identity = Identity { uid: 61_234, gid: 61_235 };

type Case = fn(&Path);

const CASES: [(&str, Case); 5] = [
    ("drops_for_good", drops_for_good),
    ("landlock_holds", landlock_holds),
    ("a_missing_path_is_refused", a_missing_path_is_refused),
    ("threads_started_later_are_confined", threads_started_later_are_confined),
    ("not_root_cannot_drop", not_root_cannot_drop),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name, folder] = arguments.as_slice()
        && flag == "--case"
    {
        let (_, case) = CASES.into_iter().find(|(known, _)| known == name).unwrap();
        case(Path::new(folder));
        return ExitCode::SUCCESS;
    }
    assert!(rustix::process::geteuid().is_root(), "these tests need root");
    if arguments.iter().any(|argument| argument == "--list") {
        return ExitCode::SUCCESS;
    }
    let mut failed = 0;
    for (name, _) in CASES {
        let folder = fixture();
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--case", name])
            .arg(folder.path())
            .status()
            .unwrap();
        println!("privilege::{name} ... {}", if status.success() { "ok" } else { "FAILED" });
        failed += i32::from(!status.success());
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A folder that everybody may walk through: `rw` and `ro` belong to [`IDENTITY`], `other` is open to all, `secret`
/// is root's.
fn fixture() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["rw", "ro", "other"] {
        let path = folder.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), name).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        chown(&path, Some(IDENTITY.uid), Some(IDENTITY.gid)).unwrap();
    }
    fs::copy("/bin/true", folder.path().join("rw/program")).unwrap();
    fs::write(folder.path().join("secret"), "x").unwrap();
    fs::set_permissions(folder.path().join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    folder
}

fn denied<T>(result: io::Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::PermissionDenied)
}

fn drops_for_good(folder: &Path) {
    // Controls: all of it works before.
    fs::read(folder.join("secret")).unwrap();
    kill_process(rustix::process::getppid().unwrap(), Signal::CONT).unwrap();

    drop_to(IDENTITY).unwrap();

    assert_eq!(rustix::process::getuid().as_raw(), IDENTITY.uid);
    assert!(rustix::process::getgroups().unwrap().is_empty());
    assert!(denied(fs::read(folder.join("secret"))));
    assert!(denied(chown(folder.join("rw"), Some(0), Some(0))));
    assert_eq!(kill_process(Pid::INIT, Signal::CONT), Err(rustix::io::Errno::PERM));
    // Neither the user nor the group comes back, and the process can't be traced by its equals.
    let root = rustix::process::Uid::ROOT;
    assert!(rustix::thread::set_thread_uid(root).is_err());
    assert!(rustix::thread::set_thread_gid(rustix::process::Gid::ROOT).is_err());
    assert!(fs::metadata("/proc/self/environ").is_ok_and(|file| {
        use std::os::unix::fs::MetadataExt as _;
        file.uid() == 0
    }));
    assert!(denied(fs::read("/proc/self/environ")));
    // A set-uid program gains nothing: `su` would be root while it asks for the password.
    let status = Command::new("/bin/su").arg("--version").output();
    assert!(status.is_ok_and(|output| output.status.success()), "executing as such still works");
    let gained =
        Command::new("/bin/sh").args(["-c", "grep -E '^(Uid|CapBnd|NoNewPrivs)' /proc/self/status"]).output();
    let text = String::from_utf8(gained.unwrap().stdout).unwrap();
    assert!(text.contains("CapBnd:\t0000000000000000") && text.contains("NoNewPrivs:\t1"), "{text}");
    assert!(text.contains(&format!("Uid:\t{0}\t{0}\t{0}\t{0}", IDENTITY.uid)), "{text}");
}

fn landlock_holds(folder: &Path) {
    let path = |name: &str| folder.join(name);
    let abstract_address = |side: &str| {
        let name = format!("sandglass-privilege-{side}-{}", std::process::id());
        SocketAddr::from_abstract_name(&name).unwrap()
    };
    // Controls: what must fail later works now. A socket made now counts as outside.
    let outside = UnixListener::bind_addr(&abstract_address("outside")).unwrap();
    UnixStream::connect_addr(&outside.local_addr().unwrap()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let parent = rustix::process::getppid().unwrap();
    kill_process(parent, Signal::CONT).unwrap();
    fs::read(path("other/file")).unwrap();
    assert!(Command::new(path("rw/program")).status().unwrap().success());

    let confinement =
        Confinement { read_write: vec![path("rw")], read_only: vec![path("ro"), PathBuf::from("/proc")] };
    assert_eq!(confine(&confinement, WithoutLandlock::Refuse).unwrap(), Enforcement::Full);

    fs::write(path("rw/new"), "x").unwrap();
    fs::rename(path("rw/new"), path("rw/newer")).unwrap();
    fs::remove_file(path("rw/newer")).unwrap();
    assert_eq!(fs::read_to_string(path("ro/file")).unwrap(), "ro");
    assert!(denied(fs::write(path("ro/file"), "x")));
    assert!(denied(fs::write(path("ro/new"), "x")));
    assert!(denied(fs::remove_file(path("ro/file"))));
    assert!(denied(fs::read(path("other/file"))));
    assert!(denied(fs::read("/etc/passwd")));
    assert!(denied(fs::read_dir("/").map(drop)));
    assert!(
        denied(Command::new(path("rw/program")).status()),
        "nothing is executed, even where it may write"
    );
    // Linking or moving a file from elsewhere would carry it into reach.
    assert!(fs::rename(path("other/file"), path("rw/stolen")).is_err());
    assert!(fs::hard_link(path("other/file"), path("rw/stolen")).is_err());

    assert!(denied(TcpListener::bind("127.0.0.1:0").map(drop)));
    TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert_eq!(kill_process(parent, Signal::CONT), Err(rustix::io::Errno::PERM));
    assert!(denied(UnixStream::connect_addr(&outside.local_addr().unwrap()).map(drop)));
    // Within the confinement both still work.
    kill_process(rustix::process::getpid(), Signal::CONT).unwrap();
    let inside = UnixListener::bind_addr(&abstract_address("inside")).unwrap();
    UnixStream::connect_addr(&inside.local_addr().unwrap()).unwrap();
}

fn a_missing_path_is_refused(folder: &Path) {
    let confinement = Confinement { read_write: vec![folder.join("absent")], read_only: vec![] };
    let result = confine(&confinement, WithoutLandlock::Allow);
    assert!(matches!(result, Err(PrivilegeError::Path { path, .. }) if path == folder.join("absent")));
    fs::read(folder.join("other/file")).unwrap();
}

fn threads_started_later_are_confined(folder: &Path) {
    let allowed = folder.join("ro/file");
    let confinement = Confinement { read_write: vec![], read_only: vec![allowed.clone(), "/proc".into()] };
    drop_to(IDENTITY).unwrap();
    confine(&confinement, WithoutLandlock::Refuse).unwrap();
    let other = folder.join("other/file");
    std::thread::spawn(move || {
        fs::read(&allowed).unwrap();
        assert!(denied(fs::read(&other)));
        assert_eq!(rustix::process::geteuid().as_raw(), IDENTITY.uid);
    })
    .join()
    .unwrap();
}

fn not_root_cannot_drop(_: &Path) {
    drop_to(IDENTITY).unwrap();
    let again = drop_to(Identity { uid: IDENTITY.uid + 1, gid: IDENTITY.gid });
    assert!(matches!(again, Err(PrivilegeError::Step { .. })), "{again:?}");
}
