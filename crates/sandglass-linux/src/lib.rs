//! Safe wrappers over the kernel facilities that isolate a sandbox.

pub mod cgroup;
pub mod clock;
pub mod extents;
pub mod fdpass;
pub mod lock;
pub mod loopdev;
pub mod memory;
pub mod mount;
pub mod namespace;
pub mod netlink;
pub mod nft;
pub mod packet;
pub mod privilege;
pub mod process;
pub mod redirect;
mod thread;
