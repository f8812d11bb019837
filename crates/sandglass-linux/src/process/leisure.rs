//! Work that nobody waits for.

use std::io;

use crate::thread::on_fresh_thread;

/// The lowest that a thread can go: setpriority(2).
const NICEST: libc::c_int = 19;

/// `IOPRIO_WHO_PROCESS` and `IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0)` of `linux/ioprio.h`.
const ONE_THREAD: libc::c_int = 1;
const WHEN_THE_DISK_IS_IDLE: libc::c_int = 3 << 13;

/// Does `work` on a thread of its own, which gets what others leave of the processors and of the disks. How much that is
/// decides the kernel: a machine that has nothing else to do loses no time with it. A panic goes on in the caller.
///
/// # Errors
/// There is no thread for it.
pub fn at_leisure<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    on_fresh_thread("at leisure", || {
        step_back();
        work()
    })
}

/// What the kernel does not do is left: then the work is only less polite.
fn step_back() {
    // SAFETY: no pointer is passed. On Linux both are for the calling thread alone, if that is named as 0.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, NICEST);
        libc::syscall(libc::SYS_ioprio_set, ONE_THREAD, 0, WHEN_THE_DISK_IS_IDLE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn priorities() -> (libc::c_int, libc::c_long) {
        // SAFETY: no pointer is passed.
        unsafe {
            (libc::getpriority(libc::PRIO_PROCESS, 0), libc::syscall(libc::SYS_ioprio_get, ONE_THREAD, 0))
        }
    }

    #[test]
    fn who_waits_for_it_is_as_hurried_as_before() {
        let before = priorities();
        assert_eq!(at_leisure(priorities).unwrap(), (NICEST, WHEN_THE_DISK_IS_IDLE.into()));
        assert_eq!(priorities(), before);
        assert_ne!(before.0, NICEST);
    }
}
