//! The REST face that E2B's SDKs and command line speak, unchanged.

pub(crate) mod content;
pub(crate) mod create;
pub(crate) mod keys;
pub(crate) mod list;
pub(crate) mod logs;
pub(crate) mod metrics;
pub(crate) mod routes;
pub(crate) mod secrets;
pub(crate) mod snapshots;
pub(crate) mod teams;
pub(crate) mod templates;
pub(crate) mod unbuilt;
pub(crate) mod volumes;
pub(crate) mod wire;
