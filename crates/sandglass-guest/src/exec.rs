//! Starts a program in a new session, as a given user, by `clone(CLONE_VM | CLONE_VFORK)`.
//!
//! The standard library's way (`fork` as soon as a `pre_exec` hook or a change of user is asked for) copies the
//! agent's page tables, which costs several milliseconds in a kernel in user space. Here the child borrows the
//! agent's memory until it has executed the program, while the calling thread waits. So the child must not
//! allocate, lock or panic, and must use raw system calls: glibc's `setuid` would change every thread of the
//! agent. All that needs memory is prepared by the caller.

mod child;

use std::ffi::{CString, c_char, c_void};
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::AtomicI32;

use rustix::io::Errno;

use child::{Become, Plan};

/// Bytes of stack for the child; it needs a fraction of it.
const STACK_LEN: usize = 64 * 1024;

/// A user and the groups that a program runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary group ids.
    pub groups: Vec<u32>,
}

/// What to start and how.
#[derive(Debug)]
pub(crate) struct Spawn<'a> {
    /// Path of the program; relative ones start at `cwd`.
    pub program: CString,
    /// Its arguments, the name first.
    pub args: Vec<CString>,
    /// Its whole environment as `NAME=value`.
    pub env: Vec<CString>,
    /// Its working directory.
    pub cwd: CString,
    /// Whom it runs as; as the agent itself if that has no choice.
    pub identity: Option<&'a Identity>,
    /// Its standard input, output and error.
    pub stdio: [BorrowedFd<'a>; 3],
    /// What becomes its controlling terminal.
    pub terminal: Option<BorrowedFd<'a>>,
    /// The `cgroup.procs` file of the group to join.
    pub join: Option<BorrowedFd<'a>>,
    /// Limit on the processes of its user, unless that is root or the agent's own.
    pub max_processes: u32,
}

/// The step at which a program could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Step {
    /// Preparing memory and descriptors, or the clone itself.
    Clone = 1,
    /// A new session.
    Session,
    /// Joining the group of processes.
    Join,
    /// Standard input, output and error.
    Stdio,
    /// The controlling terminal.
    Terminal,
    /// Limits.
    Limits,
    /// Giving up capabilities.
    Capabilities,
    /// User and groups.
    Identity,
    /// The working directory.
    Directory,
    /// Executing the program.
    Exec,
}

/// A program could not be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{step} failed")]
pub(crate) struct SpawnError {
    /// Where.
    pub step: Step,
    /// Why.
    #[source]
    pub errno: Errno,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Clone => "making the process",
            Self::Session => "making the session",
            Self::Join => "joining the process group",
            Self::Stdio => "placing standard input and output",
            Self::Terminal => "taking the terminal",
            Self::Limits => "setting limits",
            Self::Capabilities => "dropping capabilities",
            Self::Identity => "changing the user",
            Self::Directory => "entering the working directory",
            Self::Exec => "executing the program",
        })
    }
}

/// A stack for the child with a guard page below it.
struct Stack {
    base: *mut c_void,
}

impl Stack {
    const GUARD: usize = 4096;

    fn new() -> Result<Self, Errno> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(ptr::null_mut(), STACK_LEN, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(last_errno());
        }
        let stack = Self { base };
        // SAFETY: the page belongs to the mapping made above, and nothing uses it yet.
        if unsafe { libc::mprotect(base, Self::GUARD, libc::PROT_NONE) } != 0 {
            return Err(last_errno());
        }
        Ok(stack)
    }

    fn top(&self) -> *mut c_void {
        // SAFETY: one past the end of the mapping, which is page-aligned and so fit for a stack's top.
        unsafe { self.base.add(STACK_LEN) }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // SAFETY: `base` is a mapping of this length that only this value owns; the child that used it has
        // executed a program or ended, because CLONE_VFORK held the caller until then.
        unsafe { libc::munmap(self.base, STACK_LEN) };
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// A null-terminated array of pointers into `strings`, valid while they live.
fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
}

/// Descriptors above the standard ones, so that placing them as 0, 1 and 2 can't overwrite one another.
fn above_stdio(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::io::fcntl_dupfd_cloexec(fd, 3)
}

/// Starts a program and blocks until it runs or could not be started. The kernel stores its process id in `pid`
/// before the new process runs its first instruction, so whoever collects exit statuses can't miss it.
///
/// # Errors
/// The step that failed. `pid` may have been set nevertheless: that child has ended and must be collected.
pub(crate) fn spawn(request: &Spawn<'_>, pid: &AtomicI32) -> Result<(), SpawnError> {
    let fail = |errno| SpawnError { step: Step::Clone, errno };
    let stdio = [
        above_stdio(request.stdio[0]).map_err(fail)?,
        above_stdio(request.stdio[1]).map_err(fail)?,
        above_stdio(request.stdio[2]).map_err(fail)?,
    ];
    let join = request.join.map(above_stdio).transpose().map_err(fail)?;
    let terminal = request.terminal.map(above_stdio).transpose().map_err(fail)?;
    let args = pointers(&request.args);
    let env = pointers(&request.env);
    let stack = Stack::new().map_err(fail)?;
    let raw: [RawFd; 3] = [stdio[0].as_raw_fd(), stdio[1].as_raw_fd(), stdio[2].as_raw_fd()];
    let mut plan = Plan {
        program: request.program.as_ptr(),
        args: args.as_ptr(),
        env: env.as_ptr(),
        cwd: request.cwd.as_ptr(),
        identity: request.identity.map(|identity| Become {
            uid: identity.uid,
            gid: identity.gid,
            groups: identity.groups.as_ptr(),
            group_count: identity.groups.len(),
        }),
        stdio: raw,
        join: join.as_ref().map_or(-1, |fd| fd.as_fd().as_raw_fd()),
        terminal: terminal.as_ref().map_or(-1, |fd| fd.as_fd().as_raw_fd()),
        max_processes: u64::from(request.max_processes),
        failed_step: 0,
        failed_errno: 0,
    };

    let signals = child::BlockedSignals::new().map_err(fail)?;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PARENT_SETTID | libc::SIGCHLD;
    // SAFETY: `child::run` obeys the rules of this module's doc. `plan`, the arrays and the stack outlive the
    // child's use of them, because CLONE_VFORK suspends this thread until the child has executed or ended. The
    // child has a stack of its own, and no signal handler of the agent can run on it: all signals are blocked.
    let cloned = unsafe {
        libc::clone(
            child::run,
            stack.top(),
            flags,
            ptr::from_mut(&mut plan).cast::<c_void>(),
            pid.as_ptr(),
            ptr::null_mut::<c_void>(),
            ptr::null_mut::<libc::pid_t>(),
        )
    };
    let errno = last_errno();
    drop(signals);
    if cloned < 0 {
        return Err(fail(errno));
    }
    // SAFETY: the child, the only other writer, no longer shares this memory.
    let (step, errno) = unsafe {
        (ptr::read_volatile(&raw const plan.failed_step), ptr::read_volatile(&raw const plan.failed_errno))
    };
    match step {
        0 => Ok(()),
        step => Err(SpawnError { step: child::step(step), errno: Errno::from_raw_os_error(errno) }),
    }
}

#[cfg(test)]
mod tests;
