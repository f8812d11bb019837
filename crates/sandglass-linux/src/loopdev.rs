//! Loop devices: a file as a block device.
//!
//! They are set to detach by themselves when their last user is gone, so that a crash leaves none behind.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// How often another process may take the device that the kernel called free, before this gives up.
const MAX_RACES: usize = 128;

const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
const LOOP_GET_STATUS64: libc::Ioctl = 0x4C05;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// `Documentation/admin-guide/devices.txt`.
const LOOP_MAJOR: u32 = 7;

/// `_IOR('X', 125, __u32)` of `uapi/linux/ext4.h`.
const EXT4_IOC_SHUTDOWN: libc::Ioctl = 0x8004_587D_u32 as libc::Ioctl;
const EXT4_GOING_FLAGS_NOLOGFLUSH: u32 = 2;

/// `struct loop_info64` of `linux/loop.h`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo64 {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config` of `linux/loop.h`, since Linux 5.8.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

/// An attached loop device. It stays attached while this, a mount, or another open descriptor holds it.
#[derive(Debug)]
pub struct LoopDevice {
    index: u32,
    _device: OwnedFd,
}

impl LoopDevice {
    /// Attaches a file, opened for reading and writing, to a free device.
    ///
    /// # Errors
    /// The kernel has no loop devices, or none was left.
    pub fn attach(backing: &File) -> io::Result<Self> {
        let control = open_device(Path::new("/dev/loop-control"))?;
        for _ in 0..MAX_RACES {
            // SAFETY: takes no pointer.
            let index = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            let index = u32::try_from(index).map_err(|_| io::Error::last_os_error())?;
            let device = open_device(&device_path(index))?;
            let config = LoopConfig {
                fd: u32::try_from(backing.as_raw_fd()).map_err(io::Error::other)?,
                block_size: 0,
                info: LoopInfo64 {
                    device: 0,
                    inode: 0,
                    rdevice: 0,
                    offset: 0,
                    sizelimit: 0,
                    number: 0,
                    encrypt_type: 0,
                    encrypt_key_size: 0,
                    flags: LO_FLAGS_AUTOCLEAR,
                    file_name: [0; 64],
                    crypt_name: [0; 64],
                    encrypt_key: [0; 32],
                    init: [0; 2],
                },
                reserved: [0; 8],
            };
            // SAFETY: the kernel reads one `loop_config` from the pointer during the call; it lives until then.
            if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } == 0 {
                return Ok(Self { index, _device: device });
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EBUSY) {
                return Err(error);
            }
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "no loop device stayed free long enough"))
    }

    /// The device that has this file already, else a free one that it is attached to. The kernel would attach a file twice,
    /// and two file systems on it would know nothing of each other: so whoever may attach this file must hold one lock from
    /// before this call until it returns. `name` is the last part of its path, which no other file of this machine may have that is
    /// not meant to be looked at: the rest of the path depends on who asks.
    ///
    /// # Errors
    /// As [`LoopDevice::attach`], and whenever it can't be told what a device has: never is it attached then.
    pub fn attach_once(backing: &File, name: &OsStr) -> io::Result<Self> {
        let metadata = backing.metadata()?;
        for (index, found) in attached()? {
            if found.file_name() != Some(name) {
                continue;
            }
            let device = match open_device(&device_path(index)) {
                Ok(device) => device,
                // It was detached since.
                Err(error) if is_detached(&error) => continue,
                Err(error) => return Err(error),
            };
            if file_of(&device)? == Some((metadata.dev(), metadata.ino())) {
                return Ok(Self { index, _device: device });
            }
        }
        Self::attach(backing)
    }

    /// Its number.
    #[must_use]
    pub const fn index(&self) -> u32 {
        self.index
    }

    /// Its path under `/dev`.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        device_path(self.index)
    }
}

/// The attached loop devices of this machine and the files behind them, as the kernel names them (` (deleted)` is
/// appended to a file that was unlinked).
///
/// # Errors
/// `/sys` is not mounted.
pub fn attached() -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir("/sys/block")? {
        let name = entry?.file_name();
        let index = name.to_str().and_then(|name| name.strip_prefix("loop")).and_then(|n| n.parse().ok());
        if let Some(index) = index
            && let Some(path) = backing_file(index)?
        {
            found.push((index, path));
        }
    }
    Ok(found)
}

/// The file behind one loop device; `None` if it is not attached.
///
/// # Errors
/// `/sys` could not be read.
pub fn backing_file(index: u32) -> io::Result<Option<PathBuf>> {
    read_backing(&format!("/sys/block/loop{index}/loop/backing_file"))
}

fn read_backing(attribute: &str) -> io::Result<Option<PathBuf>> {
    match std::fs::read(attribute) {
        Ok(mut path) => {
            if path.last() == Some(&b'\n') {
                path.pop();
            }
            Ok(Some(std::ffi::OsString::from_vec(path).into()))
        }
        // The attribute goes away with the file, and a device may be detached in between.
        Err(error) if error.kind() == io::ErrorKind::NotFound || is_detached(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a device has no file, as the kernel says it.
fn is_detached(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV))
}

/// Device and inode of the file behind an open device; `None` if it has none.
fn file_of(device: &OwnedFd) -> io::Result<Option<(u64, u64)>> {
    let mut info = MaybeUninit::<LoopInfo64>::zeroed();
    // SAFETY: the kernel writes one `loop_info64` to the pointer during the call; all-zero is a valid one.
    let info = unsafe {
        if libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, info.as_mut_ptr()) != 0 {
            let error = io::Error::last_os_error();
            return if is_detached(&error) { Ok(None) } else { Err(error) };
        }
        info.assume_init()
    };
    // The kernel has it as `new_encode_dev` writes it, and `st_dev` as `makedev` does.
    let encoded = info.device;
    let (major, minor) = ((encoded & 0xf_ff00) >> 8, (encoded & 0xff) | ((encoded >> 12) & 0xf_ff00));
    let number = |part| u32::try_from(part).map_err(io::Error::other);
    Ok(Some((rustix::fs::makedev(number(major)?, number(minor)?), info.inode)))
}

fn device_path(index: u32) -> PathBuf {
    format!("/dev/loop{index}").into()
}

fn open_device(path: &Path) -> io::Result<OwnedFd> {
    let file = fs_err::OpenOptions::new().read(true).write(true).open(path)?;
    Ok(file.into_file().into())
}

/// A file system that lies on a loop device, proved by the device's backing file.
#[derive(Debug)]
pub struct LoopMount(OwnedFd);

impl LoopMount {
    /// Takes a folder on a mounted file system; `None` unless that lies on a loop device over `backing`.
    ///
    /// # Errors
    /// `/sys` could not be read.
    pub fn of(folder: OwnedFd, backing: &Path) -> io::Result<Option<Self>> {
        let device = rustix::fs::fstat(&folder)?.st_dev;
        if rustix::fs::major(device) != LOOP_MAJOR {
            return Ok(None);
        }
        let minor = rustix::fs::minor(device);
        let found = read_backing(&format!("/sys/dev/block/{LOOP_MAJOR}:{minor}/loop/backing_file"))?;
        Ok((found.as_deref() == Some(backing)).then_some(Self(folder)))
    }

    /// Writes everything that is not yet on the device.
    ///
    /// # Errors
    /// The device could not be written.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(&self.0)?)
    }

    /// Makes an ext4 file system forget what it has not written and refuse everything from now on, so that its
    /// unmount has nothing to do. There is no way back but to mount it again.
    ///
    /// # Errors
    /// It is another file system, or the caller is not root.
    pub fn abandon(&self) -> io::Result<()> {
        let how = EXT4_GOING_FLAGS_NOLOGFLUSH;
        // SAFETY: the kernel reads one u32 from the pointer during the call; it lives until then.
        if unsafe { libc::ioctl(self.0.as_raw_fd(), EXT4_IOC_SHUTDOWN, &raw const how) } == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs root and loop devices; fails, never skips, without them.
    #[test]
    fn a_device_carries_its_file_and_detaches_with_its_last_user() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let (a, b) =
            (LoopDevice::attach(file.as_file()).unwrap(), LoopDevice::attach(file.as_file()).unwrap());
        assert_ne!(a.index(), b.index());
        assert_eq!(backing_file(a.index()).unwrap().as_deref(), Some(file.path()));
        assert!(attached().unwrap().contains(&(b.index(), file.path().to_owned())));
        drop((a, b));
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while attached().unwrap().iter().any(|(_, path)| path == file.path()) {
            assert!(std::time::Instant::now() < deadline, "still attached");
            std::thread::yield_now();
        }
    }
    /// Needs root and loop devices; fails, never skips, without them.
    #[test]
    fn a_file_that_is_attached_once_has_one_device() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let name = file.path().file_name().unwrap();
        let attach = || LoopDevice::attach_once(file.as_file(), name).unwrap();
        let (a, b) = (attach(), attach());
        assert_eq!(a.index(), b.index());
        // Another file of the same name is another one.
        let other = tempfile::NamedTempFile::new().unwrap();
        other.as_file().set_len(1 << 20).unwrap();
        let c = LoopDevice::attach_once(other.as_file(), name).unwrap();
        assert_ne!(a.index(), c.index());
        let index = a.index();
        drop(a);
        assert_eq!(backing_file(index).unwrap().as_deref(), Some(file.path()), "the second holds it");
    }
}
