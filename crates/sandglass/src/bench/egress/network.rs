//! Two network namespaces of the bench's own, so that nothing of it leaves the machine or is seen by others:
//!
//! ```text
//! the server and the bench                 the upstream
//! 198.51.100.1/24 ──────────────────────── 198.51.100.2/24
//! ```

use std::ffi::CString;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::unix::ffi::OsStrExt as _;

use anyhow::Context as _;
use sandglass_linux::mount::{Mount, MountNamespace, Propagation};
use sandglass_linux::namespace::Netns;
use tempfile::NamedTempFile;

use crate::link::{End, join};

/// What the upstream is called (RFC 2606, 2), and where it is (RFC 5737, 3); the server's settings have both.
pub(super) const NAME: &str = "upstream.example";
pub(super) const ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);

const NEAR_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const PREFIX_LEN: u8 = 24;

const MS_BIND: u64 = 4096;

/// Both, and the file by which the server finds the upstream.
pub(crate) struct Network {
    near: Netns,
    far: Netns,
    names: MountNamespace,
    _hosts: NamedTempFile,
}

impl Network {
    pub(crate) fn make() -> anyhow::Result<Self> {
        let (near, far) = (Netns::create()?, Netns::create()?);
        let here = End { netns: &near, name: "far", address: NEAR_ADDRESS };
        let there = End { netns: &far, name: "near", address: ADDRESS };
        join(&here, &there, PREFIX_LEN).context("the bench's network could not be set up")?;
        let mut hosts = NamedTempFile::new()?;
        writeln!(hosts, "127.0.0.1 localhost\n{ADDRESS} {NAME}")?;
        let mount = Mount {
            source: CString::new(hosts.path().as_os_str().as_bytes())?,
            target: c"/etc/hosts".into(),
            fstype: c"".into(),
            flags: MS_BIND,
            data: c"".into(),
        };
        let names = MountNamespace::furnish(Propagation::Private, &[mount])?;
        Ok(Self { near, far, names, _hosts: hosts })
    }

    /// Runs `work` where the server belongs.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        Ok(self.near.run(|| self.names.run(work))??)
    }

    /// Where the upstream belongs.
    pub(super) const fn far(&self) -> &Netns {
        &self.far
    }
}
