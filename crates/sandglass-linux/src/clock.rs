//! The machine's clock.

use std::io;

/// Whether something keeps the clock set: `adjtimex(2)` without changing anything.
///
/// # Errors
/// The kernel does not answer, as a filter of system calls may have it.
pub fn is_synchronised() -> io::Result<bool> {
    // SAFETY: all-zero is a valid `timex`, and says that nothing is to be changed.
    let mut clock: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `timex` during the call; it lives until then.
    let state = unsafe { libc::adjtimex(&raw mut clock) };
    if state < 0 { Err(io::Error::last_os_error()) } else { Ok(clock.status & libc::STA_UNSYNC == 0) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_answers() {
        super::is_synchronised().unwrap();
    }
}
