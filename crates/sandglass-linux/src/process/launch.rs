//! Starting a program after kernel set-up that only the child itself can do.
//!
//! Between `clone3` and `execve` the child is a copy of one thread of a many-threaded process: any lock may be
//! held for ever by a thread that it does not have. So everything it needs is prepared before as C strings and
//! plain numbers, and it does nothing but system calls.

use std::ffi::{CString, NulError, OsStr};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::{Cpus, PidFd};
use crate::mount::MountNamespace;

/// One thing that the child does before it becomes the program, in the order given.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Step {
    /// Moves into a mount namespace that was made for it.
    EnterMounts(Arc<MountNamespace>),
    /// Writes `0` to a `cgroup.procs` file: the child moves into that cgroup.
    JoinCgroup(CString),
    /// Opens `/dev/null` at this number, without close-on-exec, so that the program inherits a descriptor table
    /// that is large already.
    ReserveDescriptor(RawFd),
    /// Makes `membarrier(2)` answer ENOSYS for the program and all its descendants.
    DenyMembarrier,
    /// Lets it run on these processors only.
    RunOn(Cpus),
    /// Sets `RLIMIT_NOFILE`, soft and hard, or raises the soft limit to the hard one where more is not allowed.
    OpenFiles(u64),
    /// Changes the working directory, which is `/` otherwise.
    WorkingDirectory(CString),
    /// Makes the program the parent of every descendant of its own whose parent ends, as PID 1 is of all.
    AdoptOrphans,
}

impl Step {
    /// What a person calls it, for errors.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::EnterMounts(_) => "enter the mount namespace",
            Self::JoinCgroup(_) => "join a cgroup",
            Self::ReserveDescriptor(_) => "reserve a descriptor",
            Self::DenyMembarrier => "install the membarrier filter",
            Self::RunOn(_) => "choose processors",
            Self::OpenFiles(_) => "raise the limit on open files",
            Self::WorkingDirectory(_) => "change the working directory",
            Self::AdoptOrphans => "become a reaper",
        }
    }
}

/// A program that could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A path or argument holds a NUL byte.
    #[error("an argument holds a NUL byte")]
    Nul(#[from] NulError),
    /// The kernel gave no descriptor or no process.
    #[error("could not start a process")]
    Start(#[source] io::Error),
    /// A step in the child failed; nothing was executed.
    #[error("could not {step}")]
    Step {
        /// Which one.
        step: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The program could not be executed.
    #[error("could not execute {program}")]
    Exec {
        /// Its path.
        program: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A program to start: path, arguments, environment, its three standard descriptors, and the steps before it.
#[derive(Debug)]
pub struct Launch {
    program: CString,
    argv: Vec<CString>,
    env: Vec<CString>,
    steps: Vec<Step>,
    stdio: [Option<OwnedFd>; 3],
}

impl Launch {
    /// Starts with no environment, `/dev/null` as all three standard descriptors, and `program` as `argv[0]`.
    ///
    /// # Errors
    /// [`LaunchError::Nul`].
    pub fn new(program: impl AsRef<Path>) -> Result<Self, LaunchError> {
        let program = CString::new(program.as_ref().as_os_str().as_bytes())?;
        Ok(Self {
            argv: vec![program.clone()],
            program,
            env: Vec::new(),
            steps: Vec::new(),
            stdio: [None, None, None],
        })
    }

    /// Adds an argument.
    ///
    /// # Errors
    /// [`LaunchError::Nul`].
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Result<Self, LaunchError> {
        self.argv.push(CString::new(arg.as_ref().as_bytes())?);
        Ok(self)
    }

    /// Adds arguments.
    ///
    /// # Errors
    /// [`LaunchError::Nul`].
    pub fn args<A: AsRef<OsStr>>(self, args: impl IntoIterator<Item = A>) -> Result<Self, LaunchError> {
        args.into_iter().try_fold(self, Self::arg)
    }

    /// Adds a variable to the environment, which is otherwise empty.
    ///
    /// # Errors
    /// [`LaunchError::Nul`].
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Result<Self, LaunchError> {
        let variable = [name.as_bytes(), b"=", value.as_ref().as_bytes()].concat();
        self.env.push(CString::new(variable)?);
        Ok(self)
    }

    /// Adds a step.
    #[must_use]
    pub fn step(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }

    /// Adds steps.
    #[must_use]
    pub fn steps(mut self, steps: impl IntoIterator<Item = Step>) -> Self {
        self.steps.extend(steps);
        self
    }

    /// Gives it a copy of `fd` as standard input.
    ///
    /// # Errors
    /// [`LaunchError::Start`]: no descriptor was left.
    pub fn stdin(self, fd: impl AsFd) -> Result<Self, LaunchError> {
        self.stdio(0, fd)
    }

    /// Gives it a copy of `fd` as standard output.
    ///
    /// # Errors
    /// As [`Launch::stdin`].
    pub fn stdout(self, fd: impl AsFd) -> Result<Self, LaunchError> {
        self.stdio(1, fd)
    }

    /// Gives it a copy of `fd` as standard error.
    ///
    /// # Errors
    /// As [`Launch::stdin`].
    pub fn stderr(self, fd: impl AsFd) -> Result<Self, LaunchError> {
        self.stdio(2, fd)
    }

    fn stdio(mut self, index: usize, fd: impl AsFd) -> Result<Self, LaunchError> {
        // Above the three targets, so that none of the child's dup2 calls overwrites a source of a later one.
        let copy = above_standard(fd).map_err(LaunchError::Start)?;
        self.stdio[index] = Some(copy);
        Ok(self)
    }

    /// The program's path, for errors.
    pub(super) fn program(&self) -> String {
        self.program.to_string_lossy().into_owned()
    }

    /// Clones the child. The answer comes at once; whether it reached its program is read from [`Started`].
    pub(super) fn clone_child(&self) -> Result<Started, LaunchError> {
        let start = LaunchError::Start;
        let null = rustix::fs::open(
            c"/dev/null",
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )
        .map_err(|errno| start(errno.into()))?;
        let null = above_standard(&null).map_err(start)?;
        let (report_read, report_write) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|errno| start(errno.into()))?;
        let report_write = above_standard(&report_write).map_err(start)?;

        let argv = pointers(&self.argv);
        let env = pointers(&self.env);
        let prepared = Prepared {
            program: &self.program,
            argv: &argv,
            env: &env,
            steps: &self.steps,
            stdio: [0, 1, 2]
                .map(|index: usize| self.stdio[index].as_ref().map_or(null.as_raw_fd(), AsRawFd::as_raw_fd)),
            report: report_write.as_raw_fd(),
        };

        let mut pidfd: RawFd = -1;
        // SAFETY: all-zero is a valid `clone_args`, and means "nothing asked".
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        args.flags = (libc::CLONE_PIDFD as u64) | CLONE_CLEAR_SIGHAND;
        args.pidfd = (&raw mut pidfd) as u64;
        args.exit_signal = libc::SIGCHLD as u64;
        // SAFETY: without CLONE_VM the child has its own copy of all memory, stack included, like after `fork`;
        // `args` outlives the call. The child runs `in_child` only, which makes system calls and never returns.
        let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
        match pid {
            -1 => Err(start(io::Error::last_os_error())),
            0 => in_child(&prepared),
            _ => {
                // SAFETY: CLONE_PIDFD made the kernel put a new descriptor there, which nobody else owns.
                let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
                let pid = i32::try_from(pid).map_err(|_| start(io::Error::other("pid out of range")))?;
                Ok(Started { pid, pidfd: PidFd::from_fd(pidfd), report: report_read })
            }
        }
    }

    /// Turns what the child reported into an error; nothing reported means that the program runs.
    pub(super) fn explain(&self, report: [u8; 8]) -> LaunchError {
        let [a, b, c, d, e, f, g, h] = report;
        let step = u32::from_ne_bytes([a, b, c, d]);
        let source = io::Error::from_raw_os_error(i32::from_ne_bytes([e, f, g, h]));
        match usize::try_from(step).ok().and_then(|step| self.steps.get(step)) {
            Some(step) => LaunchError::Step { step: step.name(), source },
            None if step == FAILED_STDIO => LaunchError::Step { step: "set up its descriptors", source },
            None => LaunchError::Exec { program: self.program(), source },
        }
    }
}

/// A copy that none of the three standard numbers collides with.
fn above_standard(fd: impl AsFd) -> io::Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, 10).map_err(|errno| match errno {
        // So fcntl(2) calls a number that is beyond the limit.
        rustix::io::Errno::INVAL => rustix::io::Errno::MFILE.into(),
        errno => errno.into(),
    })
}

/// A child that was cloned.
pub(super) struct Started {
    pub(super) pid: i32,
    pub(super) pidfd: PidFd,
    /// Ends without a byte when the program was executed; otherwise holds eight bytes for [`Launch::explain`].
    pub(super) report: OwnedFd,
}

const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const FAILED_STDIO: u32 = u32::MAX;
const FAILED_EXEC: u32 = u32::MAX - 1;

/// Everything the child touches, by reference into memory that its parent prepared.
struct Prepared<'a> {
    program: &'a CString,
    argv: &'a [*const libc::c_char],
    env: &'a [*const libc::c_char],
    steps: &'a [Step],
    stdio: [RawFd; 3],
    report: RawFd,
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain(std::iter::once(std::ptr::null())).collect()
}

/// What the child does. Only system calls from here on: no allocation, no lock, no panic.
fn in_child(prepared: &Prepared<'_>) -> ! {
    // A Ctrl-C at the terminal of the parent must not reach what it started.
    // SAFETY: these calls take no pointers, or ones to live locals, and touch only this process.
    unsafe {
        libc::setsid();
        libc::umask(0o022);
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::chdir(c"/".as_ptr());
    }
    // Whatever the parent has open stays with the parent, also what some library opened without the flag.
    // SAFETY: takes no pointers.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    for (target, source) in (0..).zip(prepared.stdio) {
        // SAFETY: takes no pointers. The sources are 10 or above, so no target is one.
        if unsafe { libc::dup2(source, target) } < 0 {
            fail(prepared.report, FAILED_STDIO);
        }
    }
    for (index, step) in (0..).zip(prepared.steps) {
        if perform(step) < 0 {
            fail(prepared.report, index);
        }
    }
    // SAFETY: the path and both arrays are NUL-terminated and live in this process's copy of the memory.
    unsafe { libc::execve(prepared.program.as_ptr(), prepared.argv.as_ptr(), prepared.env.as_ptr()) };
    fail(prepared.report, FAILED_EXEC)
}

fn fail(report: RawFd, step: u32) -> ! {
    // SAFETY: errno is this thread's own; the buffer is a live local; `_exit` runs no handlers of the parent's.
    unsafe {
        let errno = *libc::__errno_location();
        let mut bytes = [0_u8; 8];
        bytes[..4].copy_from_slice(&step.to_ne_bytes());
        bytes[4..].copy_from_slice(&errno.to_ne_bytes());
        libc::write(report, bytes.as_ptr().cast(), bytes.len());
        libc::_exit(127)
    }
}

/// Performs one step; negative on failure, with errno set.
fn perform(step: &Step) -> libc::c_int {
    // SAFETY: every pointer is a NUL-terminated string or a live local, prepared by the parent.
    unsafe {
        match step {
            Step::EnterMounts(namespace) => namespace.enter(),
            Step::JoinCgroup(path) => {
                let fd = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
                if fd < 0 {
                    return fd;
                }
                let written = libc::write(fd, c"0".as_ptr().cast(), 1);
                if written == 1 { libc::close(fd) } else { -1 }
            }
            Step::ReserveDescriptor(number) => {
                let fd = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
                if fd < 0 { fd } else { libc::dup2(fd, *number) }
            }
            Step::DenyMembarrier => deny_membarrier(),
            Step::RunOn(cpus) => {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                for cpu in cpus.numbers() {
                    libc::CPU_SET(cpu, &mut set);
                }
                libc::sched_setaffinity(0, size_of_val(&set), &raw const set)
            }
            Step::OpenFiles(limit) => {
                let wanted = libc::rlimit { rlim_cur: *limit, rlim_max: *limit };
                if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const wanted) == 0 {
                    return 0;
                }
                // Root in a container may not raise the hard limit, but may always use it up.
                let mut limit = wanted;
                if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) < 0 {
                    return -1;
                }
                limit.rlim_cur = limit.rlim_max;
                libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit)
            }
            Step::WorkingDirectory(path) => libc::chdir(path.as_ptr()),
            Step::AdoptOrphans => libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1),
        }
    }
}

/// Not a barrier: it only spares the Go runtime an RCU grace period at each start. A system call of another
/// architecture just passes.
#[allow(clippy::cast_possible_truncation, reason = "constants of the kernel's headers, all small")]
fn deny_membarrier() -> libc::c_int {
    const LOAD_WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut filter = [
        // Offset 0 of `seccomp_data` is the number of the system call.
        libc::sock_filter { code: LOAD_WORD, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: JUMP_EQUAL, jt: 0, jf: 1, k: libc::SYS_membarrier as u32 },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32 },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: the kernel copies the program during the call; both locals live until it returns.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    if result < 0 { -1 } else { 0 }
}
