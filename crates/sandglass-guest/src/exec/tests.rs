use std::io::Read as _;
use std::sync::atomic::Ordering;

use rustix::process::{Pid, WaitOptions};

use super::*;

fn own() -> Identity {
    Identity {
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        groups: Vec::new(),
    }
}

fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

/// Runs a program to its end; its output and exit code.
fn run(args: &[&str], identity: &Identity, cwd: &str) -> Result<(String, Option<i32>), SpawnError> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let request = Spawn {
        program: c(args[0]),
        args: args.iter().map(|arg| c(arg)).collect(),
        env: vec![c("A=1")],
        cwd: c(cwd),
        identity: Some(identity),
        stdio: [null.as_fd(), write.as_fd(), write.as_fd()],
        terminal: None,
        join: None,
        max_processes: 100,
    };
    let pid = AtomicI32::new(0);
    let result = spawn(&request, &pid);
    drop(write);
    let mut output = String::new();
    std::fs::File::from(read).read_to_string(&mut output).unwrap();
    let pid = Pid::from_raw(pid.load(Ordering::Acquire)).unwrap();
    let (_, status) = rustix::process::waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap();
    result.map(|()| (output, status.exit_status()))
}

fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

#[test]
fn runs_with_what_it_was_given_and_nothing_else() {
    let script = "echo \"$A|$(env | wc -l)|$PWD\"; ls /proc/self/fd | wc -l; exit 7";
    let (output, code) = run(&["/bin/sh", "-c", script], &own(), "/tmp").unwrap();
    let lines: Vec<_> = output.lines().collect();
    // `env` sees A, PWD and perhaps what the shell adds; `ls` has the standard three and the directory.
    assert!(lines[0].starts_with("1|") && lines[0].ends_with("|/tmp"), "{output}");
    assert_eq!(lines[1], "4", "{output}");
    assert_eq!(code, Some(7));
}

#[test]
fn says_which_step_failed() {
    let error = run(&["/nonexistent"], &own(), "/").unwrap_err();
    assert_eq!((error.step, error.errno), (Step::Exec, Errno::NOENT));
    let error = run(&["/bin/true"], &own(), "/nonexistent").unwrap_err();
    assert_eq!((error.step, error.errno), (Step::Directory, Errno::NOENT));
}

#[test]
fn is_the_leader_of_a_new_session_with_default_signals() {
    let script = "read -r _ _ _ _ _ session _ < /proc/self/stat; grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status; \
                  echo $$ $(cut -d' ' -f6 /proc/$$/stat)";
    let (output, _) = run(&["/bin/sh", "-c", script], &own(), "/").unwrap();
    let ids: Vec<_> = output.lines().last().unwrap().split(' ').collect();
    assert_eq!(ids[0], ids[1], "{output}");
    for line in output.lines().filter(|line| line.starts_with("SigBlk") || line.starts_with("SigIgn")) {
        assert!(line.ends_with("0000000000000000"), "{output}");
    }
}

#[test]
fn becomes_the_user_completely() {
    if !is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let identity = Identity { uid: 65534, gid: 65533, groups: vec![65533, 65532] };
    let script =
        "id -u; id -g; id -G; grep -E '^Cap(Prm|Eff|Bnd)' /proc/self/status; ulimit -c; ulimit -u; umask";
    let (output, _) = run(&["/bin/bash", "-c", script], &identity, "/").unwrap();
    let lines: Vec<_> = output.lines().collect();
    assert_eq!(lines[..3], ["65534", "65533", "65533 65532"], "{output}");
    assert!(lines[3].ends_with("0000000000000000") && lines[4].ends_with("0000000000000000"), "{output}");
    assert_eq!(lines[6..], ["0", "100", "0022"], "{output}");
}

#[test]
fn root_keeps_few_capabilities() {
    if !is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let (output, _) = run(&["/bin/grep", "CapEff", "/proc/self/status"], &own(), "/").unwrap();
    let mask = u64::from_str_radix(output.split_whitespace().nth(1).unwrap(), 16).unwrap();
    assert_eq!(mask & (1 << 21), 0, "no CAP_SYS_ADMIN: {output}");
    assert_eq!(mask & !0xa804_25fb, 0, "{output}");
}

#[test]
fn the_agent_keeps_its_own_identity_and_directory() {
    let before = (rustix::process::getuid(), std::env::current_dir().unwrap());
    let _ = run(&["/bin/true"], &own(), "/proc");
    assert_eq!((rustix::process::getuid(), std::env::current_dir().unwrap()), before);
}
