//! The gVisor engine on the real `runsc`, as root. Nothing here skips: a machine that can't run it fails.
#![allow(clippy::unwrap_used)]

mod cache;
mod collect;
mod conformance;
mod control;
mod crash;
mod fixture;
mod image_crash;
mod killed;
mod lifecycle;
mod network;
mod pace;
mod snapshots;
mod timing;
mod turns;
