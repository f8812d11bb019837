//! Threads that run whenever they want to.

use std::io;

/// Lets the calling thread run before all that is not of the kernel's real-time kind, however busy the machine is. What it
/// starts is not urgent. It must do little, and sleep in between.
///
/// # Errors
/// The kernel refused: `EPERM` without `CAP_SYS_NICE`, and in a control group that may have no such thread.
pub fn become_urgent() -> io::Result<()> {
    // The lowest of its kind: it need not go before anybody else's.
    let parameters = libc::sched_param { sched_priority: 1 };
    // SAFETY: the kernel reads the struct and keeps no pointer.
    let result = unsafe {
        libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const parameters)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_urgent_and_what_it_starts_is_not() {
        // SAFETY: no pointer is passed.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        std::thread::spawn(move || {
            match become_urgent() {
                Ok(()) => assert_eq!(policy(), libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK),
                // As in a container.
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::PermissionDenied),
            }
            assert_eq!(std::thread::spawn(policy).join().unwrap(), libc::SCHED_OTHER);
        })
        .join()
        .unwrap();
    }
}
