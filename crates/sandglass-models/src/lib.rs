//! What calls of models cost and say.
//!
//! A call is decided here, by pure functions, before anything is sent: what it is ([`request`]), what it may cost at most
//! ([`plan`]) by a price that is known beforehand ([`price`]), and what of it goes on. What comes back is read beside its way to the
//! client ([`answer`]): what it says was used is what is charged. What is refused is refused in the words of the client's own
//! protocol ([`refusal`]), so that it does not ask again. Who may call is in a [`token`].
#![forbid(unsafe_code)]

pub mod answer;
pub mod betas;
pub mod dialect;
mod json;
pub mod plan;
pub mod price;
pub mod refusal;
pub mod request;
pub mod text;
pub mod token;
pub mod totals;
pub mod usage;

pub use dialect::Dialect;
