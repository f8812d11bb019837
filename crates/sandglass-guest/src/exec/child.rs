//! What runs between `clone` and `execve`, in memory that is the agent's. See the rules in the parent module.

use std::ffi::{c_char, c_int, c_long, c_void};
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr;

use rustix::io::Errno;

use super::{Step, last_errno};

/// Capabilities that programs of the guest's root keep: the set that container engines give by default. The
/// agent's own, such as mounting, end with the agent.
const KEPT_CAPABILITIES: [c_long; 14] = [
    0,  // CHOWN
    1,  // DAC_OVERRIDE
    3,  // FOWNER
    4,  // FSETID
    5,  // KILL
    6,  // SETGID
    7,  // SETUID
    8,  // SETPCAP
    10, // NET_BIND_SERVICE
    13, // NET_RAW
    18, // SYS_CHROOT
    27, // MKNOD
    29, // AUDIT_WRITE
    31, // SETFCAP
];

/// Numbers of capabilities end below this; the kernel says where exactly.
const CAPABILITY_END: c_long = 64;

/// All that the child needs, prepared by the parent.
pub(super) struct Plan {
    pub(super) program: *const c_char,
    pub(super) args: *const *const c_char,
    pub(super) env: *const *const c_char,
    pub(super) cwd: *const c_char,
    pub(super) identity: Option<Become>,
    pub(super) stdio: [RawFd; 3],
    pub(super) join: RawFd,
    pub(super) terminal: RawFd,
    pub(super) max_processes: u64,
    pub(super) failed_step: i32,
    pub(super) failed_errno: i32,
}

/// Another user than the agent's own.
pub(super) struct Become {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: *const u32,
    pub(super) group_count: usize,
}

/// Blocks all signals of the calling thread while it lives.
pub(super) struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    pub(super) fn new() -> Result<Self, Errno> {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        let mut old = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: both sets are valid places to write; sigfillset initialises the first before it is read, and a
        // successful pthread_sigmask initialises the second.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            let result = libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
            if result != 0 {
                return Err(Errno::from_raw_os_error(result));
            }
            Ok(Self(old.assume_init()))
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: restores the mask that this thread had; a null pointer asks for no old one.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// The step behind its number.
pub(super) fn step(number: i32) -> Step {
    const STEPS: [Step; 10] = [
        Step::Clone,
        Step::Session,
        Step::Join,
        Step::Stdio,
        Step::Terminal,
        Step::Limits,
        Step::Capabilities,
        Step::Identity,
        Step::Directory,
        Step::Exec,
    ];
    STEPS.into_iter().find(|step| *step as i32 == number).unwrap_or(Step::Clone)
}

/// Runs in the child. `plan` points to a [`Plan`].
pub(super) extern "C" fn run(plan: *mut c_void) -> c_int {
    let plan = plan.cast::<Plan>();
    // SAFETY: the parent passes a valid plan and is suspended while the child uses it.
    let (failed, errno) = unsafe { attempt(&*plan) };
    // SAFETY: as above; `attempt` no longer borrows the plan.
    unsafe {
        ptr::write_volatile(&raw mut (*plan).failed_step, failed as i32);
        ptr::write_volatile(&raw mut (*plan).failed_errno, errno);
        libc::syscall(libc::SYS_exit_group, 127);
    }
    127
}

fn errno() -> i32 {
    last_errno().raw_os_error()
}

/// Returns only if a step failed.
///
/// # Safety
/// Must run in the child, with a plan whose pointers are valid.
unsafe fn attempt(plan: &Plan) -> (Step, i32) {
    // SAFETY: every call below is a system call on numbers, or on memory that the plan's maker keeps valid; none
    // allocates, locks or changes memory of the agent.
    unsafe {
        if libc::syscall(libc::SYS_setsid) < 0 {
            return (Step::Session, errno());
        }
        if plan.join >= 0 {
            // "0" means the process that writes it.
            let zero = *b"0";
            if libc::syscall(libc::SYS_write, plan.join, zero.as_ptr(), 1_usize) != 1 {
                return (Step::Join, errno());
            }
        }
        for (target, source) in (0..).zip(plan.stdio) {
            if libc::syscall(libc::SYS_dup3, source, target, 0) < 0 {
                return (Step::Stdio, errno());
            }
        }
        if plan.terminal >= 0 && libc::syscall(libc::SYS_ioctl, plan.terminal, libc::TIOCSCTTY, 0) < 0 {
            return (Step::Terminal, errno());
        }
        // Descriptors are close-on-exec anyway; this closes those that someone forgot. gVisor takes the numbers as
        // signed.
        if libc::syscall(libc::SYS_close_range, 3, i32::MAX, 0) < 0 {
            return (Step::Stdio, errno());
        }
        if let Err(errno) = limits(plan) {
            return (Step::Limits, errno);
        }
        libc::syscall(libc::SYS_umask, 0o022);
        if let Some(Become { uid, gid, groups, group_count }) = &plan.identity {
            if let Err(errno) = drop_capabilities() {
                return (Step::Capabilities, errno);
            }
            if libc::syscall(libc::SYS_setgroups, *group_count, *groups) < 0
                || libc::syscall(libc::SYS_setresgid, *gid, *gid, *gid) < 0
                || libc::syscall(libc::SYS_setresuid, *uid, *uid, *uid) < 0
            {
                return (Step::Identity, errno());
            }
        }
        if libc::syscall(libc::SYS_chdir, plan.cwd) < 0 {
            return (Step::Directory, errno());
        }
        reset_signals();
        libc::syscall(libc::SYS_execve, plan.program, plan.args, plan.env);
        (Step::Exec, errno())
    }
}

unsafe fn limits(plan: &Plan) -> Result<(), i32> {
    for (resource, limit) in [(libc::RLIMIT_CORE, 0), (libc::RLIMIT_NPROC, plan.max_processes)] {
        // The agent's own user may have processes that are no business of the agent.
        if resource == libc::RLIMIT_NPROC && plan.identity.as_ref().is_none_or(|identity| identity.uid == 0) {
            continue;
        }
        let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
        // SAFETY: the limit is a valid structure, and a null pointer asks for no old value.
        let result = unsafe {
            libc::syscall(libc::SYS_prlimit64, 0, resource, &raw const limit, ptr::null_mut::<libc::rlimit>())
        };
        if result < 0 {
            return Err(errno());
        }
    }
    Ok(())
}

unsafe fn drop_capabilities() -> Result<(), i32> {
    let mut capability = 0;
    while capability < CAPABILITY_END {
        if !KEPT_CAPABILITIES.contains(&capability) {
            // SAFETY: a system call on numbers.
            let result =
                unsafe { libc::syscall(libc::SYS_prctl, libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
            if result < 0 {
                let errno = errno();
                // The first number that the kernel does not know ends the list.
                return if errno == libc::EINVAL { Ok(()) } else { Err(errno) };
            }
        }
        capability += 1;
    }
    Ok(())
}

/// Default actions for all signals, and none blocked. glibc's own functions leave out the two that it uses itself.
unsafe fn reset_signals() {
    /// Bytes of a signal set in the kernel.
    const SET_LEN: usize = 8;
    // The kernel's `struct sigaction` in words: all zero is the default action with no flag and an empty mask.
    let default = [0_u64; 4];
    let mut signal = 1;
    while signal <= 64 {
        // SAFETY: the structure is valid and outlives the call, and the child has its own table of actions because
        // CLONE_SIGHAND was not asked for. The two signals whose action is fixed fail, as they may.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), ptr::null_mut::<u64>(), SET_LEN);
        }
        signal += 1;
    }
    // SAFETY: the set, the first word of the array, is valid and outlives the call.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            default.as_ptr(),
            ptr::null_mut::<u64>(),
            SET_LEN,
        );
    }
}
