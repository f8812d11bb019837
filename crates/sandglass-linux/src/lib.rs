//! Safe wrappers over the kernel facilities that isolate a sandbox.

pub mod cgroup;
pub mod fdpass;
pub mod lock;
pub mod privilege;
