//! What tests of several crates share. A dev-dependency only.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

pub mod conformance;
