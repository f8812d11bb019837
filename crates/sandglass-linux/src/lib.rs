//! Safe wrappers over the kernel facilities that isolate a sandbox.
