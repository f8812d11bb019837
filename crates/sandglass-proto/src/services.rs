//! Messages and services of the guest API, generated from `proto/`: [`process`] and [`filesystem`].
//!
//! The wire form is E2B's, so that its clients work unchanged. The server side of a service is the trait of its
//! name ([`process::Process`], [`filesystem::Filesystem`]); with the feature `client` there are
//! [`process::ProcessClient`] and [`filesystem::FilesystemClient`], generic over the transport.
#![allow(
    missing_docs,
    unreachable_pub,
    rust_2018_idioms,
    clippy::all,
    clippy::pedantic,
    clippy::restriction,
    reason = "generated code"
)]

include!(concat!(env!("OUT_DIR"), "/services.rs"));
