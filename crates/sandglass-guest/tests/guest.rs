//! Tests with the real binary: natively on its development listener, and as process 1 of a real gVisor sandbox.
//!
//! They need root, control groups and `runsc`, and fail without.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs, reason = "test code")]

#[path = "guest/api.rs"]
mod api;
#[path = "guest/files.rs"]
mod files;
#[path = "guest/inside.rs"]
mod inside;
#[path = "guest/many.rs"]
mod many;
#[path = "guest/names.rs"]
mod names;
#[path = "guest/native.rs"]
mod native;
#[path = "guest/process.rs"]
mod process;
#[path = "guest/sandbox.rs"]
mod sandbox;
#[path = "guest/unsealed.rs"]
mod unsealed;
#[path = "guest/watch.rs"]
mod watch;
#[path = "guest/worker.rs"]
mod worker;
