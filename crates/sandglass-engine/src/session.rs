//! The two FIFOs that are an agent's standard input and output.
//!
//! The agent holds each open for reading *and* writing, so that neither ends while it lives, whoever else opens and
//! closes it: a session is opened again by path when a host has died.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use sandglass_types::SandboxId;

use crate::engine::{EngineError, SessionEnds, step};

/// Buffer of each direction of a session, in bytes: what one side writes at a time, twice, so that neither waits for
/// the other's last byte.
const BUFFER: usize = 512 * 1024;

/// The agent's own ends; its standard error goes nowhere, because it may write to it for ever.
#[derive(Debug)]
pub(crate) struct AgentStdio {
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
}

/// The FIFOs in the folder of one sandbox.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    pub(crate) folder: &'a Path,
}

impl Session<'_> {
    fn path(&self, fifo: &str) -> std::path::PathBuf {
        self.folder.join(fifo)
    }

    /// Makes both.
    pub(crate) fn make(&self) -> io::Result<()> {
        for fifo in [IN, OUT] {
            rustix::fs::mknodat(CWD, self.path(fifo), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        }
        Ok(())
    }

    /// Opens the agent's two descriptors.
    pub(crate) fn agent_stdio(&self) -> Result<AgentStdio, EngineError> {
        let open = |fifo: &str| -> io::Result<OwnedFd> {
            let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = rustix::fs::open(self.path(fifo), flags, Mode::empty())?;
            // More is only quicker, so a refusal is no failure.
            let _ = rustix::pipe::fcntl_setpipe_size(&fd, BUFFER);
            Ok(fd)
        };
        let failed = |error: io::Error| step("open the session", error);
        Ok(AgentStdio { stdin: open(IN).map_err(failed)?, stdout: open(OUT).map_err(failed)? })
    }

    /// Opens the server's two descriptors: each for its own direction only, so that both show the end of the agent.
    /// Not waiting: an open for writing that finds no reader fails, and that is a sandbox whose agent is gone.
    pub(crate) fn attach(&self, id: &SandboxId) -> Result<SessionEnds, EngineError> {
        let open = |fifo: &str, direction: OFlags| -> Result<OwnedFd, EngineError> {
            let flags = direction | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::open(self.path(fifo), flags, Mode::empty()).map_err(|errno| match errno {
                Errno::NXIO => EngineError::WrongState { id: id.clone(), state: "ended", verb: "attach" },
                errno => step("open the session", io::Error::from(errno)),
            })
        };
        Ok(SessionEnds { to_agent: open(IN, OFlags::WRONLY)?, from_agent: open(OUT, OFlags::RDONLY)? })
    }
}

const IN: &str = "session.in";
const OUT: &str = "session.out";
