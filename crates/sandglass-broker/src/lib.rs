//! What a sandbox may ask of a service with a credential that it never sees.
//!
//! An operator or a team names a *connection* ([`connection`]): a host, what may be asked of it, and how the credential is shown to it.
//! What a sandbox asks is decided here, by pure functions, before anything is sent ([`decide`]); then all that could pass for a
//! credential is taken out of it, and the one is put in ([`attach`]). What comes back is searched for the credential in the forms in which
//! services echo it ([`redact`]). At rest it is sealed ([`vault`]).
#![forbid(unsafe_code)]

pub mod attach;
pub mod connection;
pub mod decide;
pub mod placeholder;
pub mod redact;
pub mod rules;
pub mod secret;
pub mod vault;

pub use connection::{Connection, ConnectionName};
pub use secret::{Secret, SecretName};
pub use vault::Vault;
