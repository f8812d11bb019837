//! What the allocator may hold that nobody uses: every sandbox pays for it.

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

/// Gives back what is unused, if it is much: to be called when something that needs large buffers has ended.
pub(crate) fn give_back() {
    // SAFETY: both only look at and change the allocator's own records, under its lock.
    unsafe {
        if libc::mallinfo2().fordblks > UNUSED {
            libc::malloc_trim(0);
        }
    }
}
