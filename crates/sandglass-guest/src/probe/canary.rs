//! What attacks are after, held by a process of the machine that `sandglass verify` makes for itself: `guest canary
//! SECRET`. It is told the other secrets on standard input, and holds them until it is killed.

use std::io::{self, BufRead as _, Write as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::ExitCode;

use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::thread::UnshareFlags;
use serde::{Deserialize, Serialize};

use super::isolation::Handle;

/// Where the file is that only this process's mount namespace has.
pub(super) const HIDDEN: &str = "/tmp/hidden";

/// The name of the abstract socket.
pub(super) const ABSTRACT: &str = "sandglass-canary";

#[derive(Deserialize)]
struct Told {
    key: i32,
    memory: String,
    mounts: String,
    shared_memory: String,
    queue: String,
    abstract_socket: String,
    socket: String,
    socket_path: String,
    /// A file whose handle is to be told.
    file: String,
}

/// What it says once it holds them: the handle of the file.
#[derive(Serialize)]
struct Ready {
    kind: i32,
    handle: String,
}

/// Holds them.
pub(crate) fn main() -> ExitCode {
    match hold() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn hold() -> io::Result<()> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    let told: Told = serde_json::from_str(&line)?;
    // SAFETY: this process has one thread, and no descriptor changes its meaning.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
    rustix::mount::mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    rustix::mount::mount("tmpfs", "/tmp", "tmpfs", MountFlags::empty(), None::<&std::ffi::CStr>)?;
    std::fs::write(HIDDEN, &told.mounts)?;
    shared_memory(told.key, &told.shared_memory)?;
    queue(told.key, &told.queue)?;
    let named = UnixListener::bind(&told.socket_path)?;
    let abstract_one = UnixListener::bind_addr(&SocketAddr::from_abstract_name(ABSTRACT)?)?;
    for (listener, secret) in [(named, told.socket), (abstract_one, told.abstract_socket)] {
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let _gone = stream.write_all(secret.as_bytes());
            }
        });
    }
    let memory = told.memory.into_bytes();
    // Only here, so that whoever made this process knows when all is there.
    println!("{}", serde_json::to_string(&handle_of(&told.file)?)?);
    // Until whoever made this process is gone or has no need of it.
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    std::hint::black_box(&memory);
    remove(told.key);
    Ok(())
}

fn handle_of(path: &str) -> io::Result<Ready> {
    let path = std::ffi::CString::new(path)?;
    let mut handle = Handle { len: 128, kind: 0, bytes: [0; 128] };
    let mut mount = 0;
    // SAFETY: the path is NUL-terminated, the handle has the room that it says, and all live across the call.
    let told = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            libc::AT_FDCWD,
            path.as_ptr(),
            &raw mut handle,
            &raw mut mount,
            0,
        )
    };
    if told < 0 {
        return Err(io::Error::last_os_error());
    }
    let len = usize::try_from(handle.len).map_err(io::Error::other)?;
    let bytes = handle.bytes.get(..len).ok_or(io::ErrorKind::InvalidData)?;
    Ok(Ready { kind: handle.kind, handle: bytes.iter().map(|byte| format!("{byte:02x}")).collect() })
}

fn shared_memory(key: i32, secret: &str) -> io::Result<()> {
    // SAFETY: takes no pointer.
    let id = unsafe { libc::shmget(key, secret.len(), libc::IPC_CREAT | libc::IPC_EXCL | 0o666) };
    if id < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel chooses the address, where nothing else is.
    let at = unsafe { libc::shmat(id, std::ptr::null(), 0) };
    if at.addr() == usize::MAX {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the segment is as long as the secret, was just attached for writing, and stays so until this process ends.
    unsafe { std::ptr::copy_nonoverlapping(secret.as_ptr(), at.cast(), secret.len()) };
    Ok(())
}

/// Removes what would outlive this process.
fn remove(key: i32) {
    let nothing = std::ptr::null_mut();
    // SAFETY: this command takes no buffer.
    unsafe { libc::shmctl(libc::shmget(key, 0, 0), libc::IPC_RMID, nothing) };
    // SAFETY: as above.
    unsafe { libc::msgctl(libc::msgget(key, 0), libc::IPC_RMID, std::ptr::null_mut()) };
}

/// The longest text that is put into a queue, in bytes.
pub(super) const MESSAGE: usize = 64;

/// As `msgsnd` and `msgrcv` have it.
#[repr(C)]
pub(super) struct Message {
    pub(super) kind: libc::c_long,
    pub(super) text: [u8; MESSAGE],
}

fn queue(key: i32, secret: &str) -> io::Result<()> {
    // SAFETY: takes no pointer.
    let id = unsafe { libc::msgget(key, libc::IPC_CREAT | libc::IPC_EXCL | 0o666) };
    if id < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut message = Message { kind: 1, text: [0; MESSAGE] };
    let len = secret.len().min(MESSAGE);
    message.text[..len].copy_from_slice(&secret.as_bytes()[..len]);
    // SAFETY: the message lives across the call, and its text is at least so long.
    if unsafe { libc::msgsnd(id, (&raw const message).cast(), len, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
