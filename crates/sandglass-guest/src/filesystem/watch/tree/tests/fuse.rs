//! A file system of another program, which tells no changes that others make.

use std::io::{Read as _, Write as _};

use connectrpc::ConnectError;

use super::*;

/// A file system that is nothing but an empty folder, and answers as its programs do (`linux/fuse.h`, version 7.31).
fn serve_fuse(device: &fs::File) {
    const FORGET: u32 = 2;
    const GETATTR: u32 = 3;
    const STATFS: u32 = 17;
    const INIT: u32 = 26;
    const OPENDIR: u32 = 27;
    const READDIR: u32 = 28;
    const RELEASEDIR: u32 = 29;
    let mut request = vec![0; 256 << 10];
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    // It ends when it is not mounted any more.
    while let Ok(length) = (&mut &*device).read(&mut request) {
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        assert!(length >= 40);
        let (error, body) = match word(4) {
            FORGET => continue,
            INIT => (0, words(&[&[7, 31, 0, 0, 0, 4096, 1], &[0; 9][..]].concat())),
            STATFS => (0, vec![0; 80]),
            // For a second, of inode 1: a folder of everybody's.
            GETATTR => (0, words(&[&[1, 0, 0, 0, 1], &[0; 14][..], &[0o40777, 2], &[0; 5]].concat())),
            OPENDIR => (0, vec![0; 16]),
            READDIR | RELEASEDIR => (0, Vec::new()),
            _ => (38, Vec::new()),
        };
        let head = [16 + u32::try_from(body.len()).unwrap(), 0_u32.wrapping_sub(error), word(8), word(12)];
        let _ = (&mut &*device).write([words(&head), body].concat().as_slice());
    }
}

#[test]
fn file_systems_of_others_are_watched_only_if_that_is_wanted() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("mounted")).unwrap();
    // What is mounted here ends with this thread.
    unshare_mounts();
    let device = fs::File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    let options = std::ffi::CString::new(options).unwrap();
    let at = dir.path().join("mounted");
    rustix::mount::mount("test", &at, "fuse", rustix::mount::MountFlags::empty(), &*options).unwrap();
    let served = std::thread::spawn(move || serve_fuse(&device));
    let inode = fs::metadata(&at).unwrap();
    let folders = Arc::new(Quota::new(10));
    let open = |path: &str, networks| {
        let wish = Wish { root: dir.path().into(), path: path.into(), recursive: true, networks };
        Tree::open(wish, &folders)
    };
    assert!(inode.is_dir());
    let refused = open("/mounted", false).unwrap_err();
    assert!(matches!(&refused, Refusal::Network(path) if path == "/mounted"), "{refused:?}");
    assert_eq!(ConnectError::from(refused).code, connectrpc::ErrorCode::InvalidArgument);
    assert_eq!(watched_inodes(&open("/mounted", true).unwrap()).len(), 1);
    // Below a folder that may be watched it is left out, or not.
    assert_eq!(watched_inodes(&open("/", false).unwrap()).len(), 1);
    assert_eq!(watched_inodes(&open("/", true).unwrap()).len(), 2);
    assert!(folders.take(10));
    rustix::mount::unmount(&at, rustix::mount::UnmountFlags::DETACH).unwrap();
    served.join().unwrap();
}

/// Gives this thread mounts of its own, which nobody else sees.
fn unshare_mounts() {
    use rustix::mount::{MountPropagationFlags, mount_change};
    // SAFETY: nothing but this thread's root, working folder and mounts changes.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.unwrap();
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
}
