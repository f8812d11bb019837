//! The REST faces and the edge that routes traffic into sandboxes, on one listener.
//!
//! A request whose host or headers name a sandbox goes to the edge, every other one to the REST faces:
//! E2B's own paths, and the native ones under `/v1`.
#![forbid(unsafe_code)]

mod audit;
mod auth;
mod backend;
mod body;
mod e2b;
mod edge;
mod error;
#[cfg(test)]
mod fake;
mod metrics;
mod native;
mod openapi;
mod page;
mod query;
mod router;
mod server;

pub use openapi::{endpoints, openapi_json};
pub use server::{Certificate, CertificateError, Plain, Tls, serve};
