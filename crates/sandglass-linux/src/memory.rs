//! Memory that the allocator holds and nobody uses.

/// Gives unused memory back to the kernel, if the allocator holds more than `most` bytes of it. By itself it gives back
/// what is at the end of its heaps, and of a server that was busy for a while most is in their midst (malloc_trim(3)).
pub fn give_back(most: usize) {
    // SAFETY: both only look at and change the allocator's own records, under its locks.
    unsafe {
        if libc::mallinfo2().fordblks > most {
            libc::malloc_trim(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Resident memory of this process, in bytes.
    fn resident() -> usize {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    #[test]
    fn what_is_unused_in_the_midst_of_the_heap_is_given_back() {
        let start = resident();
        // Too small to be mapped each for its own, and held apart by what stays.
        let mut pieces: Vec<(Vec<u8>, Box<[u8; 64]>)> =
            (0..2000).map(|_| (vec![1; 64 << 10], Box::new([1; 64]))).collect();
        for (large, _) in &mut pieces {
            *large = Vec::new();
        }
        give_back(1 << 40);
        assert!(
            resident() > start + 64 * MIB,
            "the allocator gives it back by itself, so this is not needed"
        );
        give_back(MIB);
        assert!(resident() < start + 32 * MIB);
        drop(pieces);
    }
}
