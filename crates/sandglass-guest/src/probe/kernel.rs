//! Attacks on the kernel of the machine: its devices, its file systems, its objects, its System V objects.

use std::ffi::CString;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::MountFlags;

use super::canary::{ABSTRACT, MESSAGE, Message};
use super::isolation::{clear_up, mounted, own_folder};
use super::{Attack, Last, argument, hold, number, secrets_in, tell};

/// By name.
pub(super) const ATTACKS: &[(&str, Attack)] = &[
    ("disks", disks),
    ("devtmpfs", devtmpfs),
    ("made-disk", made_disk),
    ("write-disk", write_disk),
    ("mount-disk", mount_disk),
    ("mount", mount),
    ("sysfs", sysfs),
    ("device", device),
    ("bpf", bpf),
    ("perf", perf),
    ("io-uring", io_uring),
    ("userfaultfd", userfaultfd),
    ("fanotify", fanotify),
    ("key", key),
    ("shared-memory", shared_memory),
    ("queue", queue),
    ("abstract-socket", abstract_socket),
    ("socket", socket),
    ("address", address),
];

/// How much of a disk is looked at, in bytes.
const LOOK: usize = 64 << 10;

/// How long a socket may take to tell what it knows.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the beginning of a disk tells.
fn look(disk: &Path) -> io::Result<()> {
    let mut begin = vec![0; LOOK];
    let len = fs::File::open(disk)?.read(&mut begin)?;
    tell(&secrets_in(begin.get(..len).unwrap_or_default()))
}

/// All disks that have a node in a folder.
fn disks_in(folder: &Path) -> io::Result<()> {
    let mut last = Last::default();
    last.see(Err(io::Error::new(io::ErrorKind::NotFound, "there is no disk")));
    for entry in fs::read_dir(folder)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_block_device()) {
            last.see(look(&entry.path()));
        }
    }
    last.into_result()
}

/// What is on the disks that have a node.
fn disks(_: &[String]) -> io::Result<()> {
    disks_in(Path::new("/dev"))
}

/// The same, with the nodes that the kernel makes by itself.
fn devtmpfs(_: &[String]) -> io::Result<()> {
    disks_in(&mounted("devtmpfs", "devtmpfs", MountFlags::empty())?)
}

/// A node for a device, made in a folder of this process's own.
fn node(kind: FileType, major: u32, minor: u32) -> io::Result<PathBuf> {
    let folder = own_folder("node")?;
    let mut last = Last::default();
    // Where nodes are not to be used, a file system of its own may let them be.
    for folder in [Ok(folder), mounted("tmpfs", "tmpfs", MountFlags::empty())] {
        let made = folder.and_then(|folder| {
            let path = folder.join("node");
            mknodat(CWD, &path, kind, Mode::RUSR | Mode::WUSR, makedev(major, minor))?;
            fs::File::open(&path)?;
            Ok(path)
        });
        match made {
            Ok(path) => return Ok(path),
            Err(error) => last.see(Err(error)),
        }
    }
    last.into_result()?;
    Err(io::ErrorKind::NotFound.into())
}

fn made(args: &[String]) -> io::Result<PathBuf> {
    node(FileType::BlockDevice, number(args, 0)?, number(args, 1)?)
}

/// A disk by its number.
fn made_disk(args: &[String]) -> io::Result<()> {
    look(&made(args)?)
}

/// The same, written to, at a place.
fn write_disk(args: &[String]) -> io::Result<()> {
    let (disk, text) = (made(args)?, argument(args, 2)?);
    let file = fs::OpenOptions::new().write(true).open(disk)?;
    file.write_all_at(text.as_bytes(), number(args, 3)?)?;
    file.sync_all()
}

/// The same, mounted.
fn mount_disk(args: &[String]) -> io::Result<()> {
    let disk = made(args)?;
    let folder = own_folder("disk")?;
    rustix::mount::mount(&disk, &folder, "ext4", MountFlags::RDONLY, None::<&std::ffi::CStr>)?;
    let content = fs::read(folder.join("file"));
    rustix::mount::unmount(&folder, rustix::mount::UnmountFlags::DETACH)?;
    tell(&content?)
}

/// A file system on a folder of the machine, which everybody there would see; and held.
fn mount(args: &[String]) -> io::Result<()> {
    let folder = argument(args, 0)?;
    // A path of the machine means nothing here, so make it mean something.
    fs::create_dir_all(folder)?;
    rustix::mount::mount("tmpfs", folder, "tmpfs", MountFlags::empty(), None::<&std::ffi::CStr>)?;
    hold(())
}

/// What the machine tells of its disks, in a view that was mounted anew.
fn sysfs(_: &[String]) -> io::Result<()> {
    let folder = mounted("sysfs", "sysfs", MountFlags::empty())?;
    for disk in fs::read_dir(folder.join("block"))?.flatten() {
        if let Ok(text) = fs::read(disk.path().join("loop/backing_file")) {
            tell(&text)?;
        }
    }
    Ok(())
}

/// A device of the machine by its number, held open.
fn device(args: &[String]) -> io::Result<()> {
    let node = node(FileType::CharacterDevice, number(args, 0)?, number(args, 1)?)?;
    let device = fs::File::open(node)?;
    // Who is ended can't do it later.
    clear_up();
    hold(device)
}

/// A descriptor that a system call of this number answered, held.
fn hold_descriptor(answer: libc::c_long) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { hold(()) }
}

/// A program in the kernel. It is attached to nothing.
fn bpf(_: &[String]) -> io::Result<()> {
    const BPF_PROG_LOAD: libc::c_int = 5;
    const SOCKET_FILTER: u32 = 1;
    /// `r0 = 0; exit`.
    const PROGRAM: [u64; 2] = [0xb7, 0x95];
    let license = c"GPL";
    let mut attributes = [0_u64; 16];
    attributes[0] = u64::from(SOCKET_FILTER) | 2 << 32;
    attributes[1] = PROGRAM.as_ptr().addr() as u64;
    attributes[2] = license.as_ptr().addr() as u64;
    // SAFETY: the attributes, and the program and text that they point to, live across the call.
    hold_descriptor(unsafe {
        libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, attributes.as_ptr(), size_of_val(&attributes))
    })
}

/// A counter of the processor's, over all that runs.
fn perf(_: &[String]) -> io::Result<()> {
    const SOFTWARE: u32 = 1;
    const LEN: u32 = 64;
    let mut attributes = [0_u64; 16];
    attributes[0] = u64::from(SOFTWARE) | u64::from(LEN) << 32;
    // SAFETY: the attributes live across the call.
    hold_descriptor(unsafe { libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), -1, 0, -1, 0) })
}

/// A ring for asynchronous system calls.
fn io_uring(_: &[String]) -> io::Result<()> {
    let mut parameters = [0_u64; 15];
    // SAFETY: the parameters live across the call, and are as long as the kernel's.
    hold_descriptor(unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) })
}

/// A way to hold up the kernel at any page.
fn userfaultfd(_: &[String]) -> io::Result<()> {
    // SAFETY: takes no pointer.
    hold_descriptor(unsafe { libc::syscall(libc::SYS_userfaultfd, 0) })
}

/// A watch over all files.
fn fanotify(_: &[String]) -> io::Result<()> {
    // SAFETY: takes no pointer.
    hold_descriptor(unsafe { libc::syscall(libc::SYS_fanotify_init, 0, libc::O_RDONLY) })
}

/// A key in the machine's store of keys. It goes with this process.
fn key(args: &[String]) -> io::Result<()> {
    const PROCESS_KEYRING: libc::c_long = -2;
    const SET_PERMISSIONS: libc::c_long = 5;
    const EVERYBODY: libc::c_long = 0x3f3f_3f3f;
    let name = CString::new(argument(args, 0)?)?;
    let (kind, content) = (c"user", c"x");
    // SAFETY: all three are NUL-terminated and live across the call, which reads one byte of the last.
    let key = unsafe {
        libc::syscall(libc::SYS_add_key, kind.as_ptr(), name.as_ptr(), content.as_ptr(), 1, PROCESS_KEYRING)
    };
    if key < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: takes no pointer.
    hold_descriptor(unsafe { libc::syscall(libc::SYS_keyctl, SET_PERMISSIONS, key, EVERYBODY) })
}

/// A segment of shared memory, by its key.
fn shared_memory(args: &[String]) -> io::Result<()> {
    // SAFETY: takes no pointer.
    let id = unsafe { libc::shmget(number(args, 0)?, 0, 0) };
    if id < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel chooses the address, where nothing else is.
    let at = unsafe { libc::shmat(id, std::ptr::null(), libc::SHM_RDONLY) };
    if at.addr() == usize::MAX {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a segment is as long as whole pages, and stays attached until this process ends.
    let content = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), 32) };
    tell(content)
}

/// A message, by the key of its queue. It is put back.
fn queue(args: &[String]) -> io::Result<()> {
    // SAFETY: takes no pointer.
    let id = unsafe { libc::msgget(number(args, 0)?, 0) };
    if id < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut message = Message { kind: 0, text: [0; MESSAGE] };
    // SAFETY: the message lives across the call, and its text is so long.
    let len = unsafe { libc::msgrcv(id, (&raw mut message).cast(), MESSAGE, 0, libc::IPC_NOWAIT) };
    let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: as above.
    unsafe { libc::msgsnd(id, (&raw const message).cast(), len, libc::IPC_NOWAIT) };
    tell(message.text.get(..len).unwrap_or_default())
}

fn ask(stream: io::Result<UnixStream>) -> io::Result<()> {
    let stream = stream?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut told = Vec::new();
    // What came before the time was up counts.
    let _late = stream.take(4096).read_to_end(&mut told);
    tell(&told)
}

/// All abstract sockets that can be seen, and one that is known.
fn abstract_socket(_: &[String]) -> io::Result<()> {
    let text = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let seen = text.lines().filter_map(|line| line.split_whitespace().nth(7)?.strip_prefix('@'));
    let mut last = Last::default();
    for name in std::iter::once(ABSTRACT).chain(seen.take(64)) {
        let address = SocketAddr::from_abstract_name(name);
        last.see(ask(address.and_then(|address| UnixStream::connect_addr(&address))));
    }
    last.into_result()
}

/// A socket of the machine, by its path.
fn socket(args: &[String]) -> io::Result<()> {
    ask(UnixStream::connect(argument(args, 0)?))
}

/// An address for the machine's loopback interface.
fn address(args: &[String]) -> io::Result<()> {
    let address: std::net::Ipv4Addr = number(args, 0)?;
    let socket = std::net::UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: all-zero is a valid request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(c"lo:sg".to_bytes()) {
        *place = byte.cast_signed();
    }
    let inet = libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET).map_err(io::Error::other)?,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(address).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: both kinds of addresses have the same size and no invalid values.
    request.ifr_ifru.ifru_addr = unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(inet) };
    // SAFETY: the request lives across the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    io::stdout().flush()
}
