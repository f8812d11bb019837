//! Attacks on the machine below the sandbox.

use std::io;
use std::path::Path;

use rustix::process::{Pid, Signal};

use super::{Attack, argument, hold, number, tell};

/// By name.
pub(super) const ATTACKS: &[(&str, Attack)] =
    &[("proc-root", proc_root), ("kill", kill), ("hostname", hostname), ("open", open)];

/// The processes that can be seen.
fn processes() -> io::Result<impl Iterator<Item = String>> {
    let names = std::fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())))
}

/// A file of the machine, through the root folder of any process.
fn proc_root(args: &[String]) -> io::Result<()> {
    let path = argument(args, 0)?.trim_start_matches('/');
    let mut last = None;
    for process in processes()?.chain(["self".to_owned(), "thread-self".to_owned()]) {
        for way in ["root", "cwd/../../../../../../../..", "root/proc/1/root"] {
            match std::fs::read(Path::new("/proc").join(&process).join(way).join(path)) {
                Ok(content) => tell(&content)?,
                Err(error) => last = Some(error),
            }
        }
    }
    last.map_or(Ok(()), Err)
}

/// A process of the machine, by its number there.
fn kill(args: &[String]) -> io::Result<()> {
    let pid = Pid::from_raw(number(args, 0)?).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::kill_process(pid, Signal::KILL)?)
}

/// The name of the machine, by the system call and by its file.
fn hostname(args: &[String]) -> io::Result<()> {
    let name = argument(args, 0)?;
    let by_call = rustix::system::sethostname(name.as_bytes());
    let by_file = std::fs::write("/proc/sys/kernel/hostname", name);
    by_file.or(by_call.map_err(Into::into))
}

/// A file of the machine, held open for writing. Nothing is written.
fn open(args: &[String]) -> io::Result<()> {
    hold(std::fs::OpenOptions::new().write(true).open(argument(args, 0)?)?)
}
