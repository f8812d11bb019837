//! What the allocator may hold that nobody uses, for every sandbox pays for it; and what the kernel says of memory.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The largest buffers of a transfer are smaller, so they come from the heap and are used again. One that was mapped
/// for its own would be filled with page faults each time, and those are dear in a sandbox.
const MMAP_THRESHOLD: libc::c_int = 1 << 20;

/// What the end of the heap may hold unused, in bytes: the buffers of a few transfers between two uses.
const TRIM_THRESHOLD: libc::c_int = 4 << 20;

/// What may stay unused when nobody needs it soon, in bytes.
const UNUSED: usize = 1 << 20;

/// Makes the allocator give memory back. By default it keeps some for each thread that ever ran and what large
/// buffers once needed, which is more than the agent itself uses.
pub(crate) fn limit_allocator() {
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        (libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD),
        (libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD),
    ] {
        // SAFETY: called before there is a second thread, with parameters that glibc documents.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Those who may need large buffers. When the last of them is gone, what they used is given back; before, others would
/// soon want it again, and each time costs as much as there are pieces of the heap.
#[derive(Debug, Default)]
pub(crate) struct Borrowers(AtomicUsize);

impl Borrowers {
    /// One more, until the answer is dropped.
    pub(crate) fn enter(&self) -> Borrower<'_> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Borrower(self)
    }
}

/// See [`Borrowers`].
#[derive(Debug)]
pub(crate) struct Borrower<'a>(&'a Borrowers);

impl Drop for Borrower<'_> {
    fn drop(&mut self) {
        if self.0.0.fetch_sub(1, Ordering::Relaxed) == 1 {
            give_back();
        }
    }
}

/// Gives back what is unused, if it is much.
fn give_back() {
    // SAFETY: both only look at and change the allocator's own records, under its lock.
    unsafe {
        if libc::mallinfo2().fordblks > UNUSED {
            libc::malloc_trim(0);
        }
    }
}

/// A value of `/proc/meminfo` in bytes.
pub(crate) fn meminfo(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let kib = line.and_then(|rest| rest.split_whitespace().next()).and_then(|n| n.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}
