//! What the server and the guest agent say to each other.
//!
//! Two layers share one byte stream, the *session*: frames (`session`) carry many flows, and each flow is one
//! connection. On most flows HTTP/1.1 travels, with the Connect services of `proto/`; the `control` messages have
//! a lane of their own.
//!
//! # Rules for change
//!
//! A running or frozen sandbox keeps the agent it was started with, so the server speaks to older agents and
//! never the other way round. Fields are only added, always optional; a number, a name or a meaning is never
//! used again for something else.
#![forbid(unsafe_code)]

pub mod control;
pub mod leak;
pub mod services;
pub mod session;
