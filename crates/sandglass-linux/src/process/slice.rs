//! How long a thread may run before another one that has waited gets its turn.

use std::io;
use std::time::Duration;

/// The shortest that kernels take: `__setparam_fair` in `kernel/sched/fair.c` (6.12).
pub const SHORTEST_SLICE: Duration = Duration::from_micros(100);

/// Lets the calling thread, and all that it starts from now on, run for so long at a time instead of the kernel's 3 ms.
/// Its share of the processors stays as it was: it gets its turns earlier, and others get theirs earlier in its place.
///
/// Kernels before 6.12 take it and do nothing (`sched_runtime` in sched_setattr(2) was for other policies alone).
///
/// # Errors
/// The kernel refused, as in a sandbox that forbids the call.
pub fn set_slice(slice: Duration) -> io::Result<()> {
    let mut attributes = get()?;
    attributes.sched_runtime = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: the kernel reads as many bytes as `size` says, which is that of the struct, and keeps no pointer.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How the calling thread is scheduled now.
fn get() -> io::Result<libc::sched_attr> {
    const SIZE: usize = size_of::<libc::sched_attr>();
    // SAFETY: a struct of integers, for which all zero is a value.
    let mut attributes: libc::sched_attr = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes at most `SIZE` bytes to a struct of that size.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, SIZE, 0) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // What is not set on purpose must be as the kernel had it, but flags are told for the thread and taken for the call.
    attributes.sched_flags = 0;
    Ok(attributes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_and_what_it_starts_have_the_slice_and_their_policy() {
        std::thread::spawn(|| {
            let before = get().unwrap();
            set_slice(SHORTEST_SLICE).unwrap();
            let after = std::thread::spawn(|| get().unwrap()).join().unwrap();
            assert_eq!((after.sched_policy, after.sched_nice), (before.sched_policy, before.sched_nice));
            // 0 on kernels that know it for other policies alone.
            assert!([0, 100_000].contains(&after.sched_runtime), "{}", after.sched_runtime);
        })
        .join()
        .unwrap();
    }
}
