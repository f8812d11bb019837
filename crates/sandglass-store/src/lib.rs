//! Durable state as verbs behind one trait, kept in SQLite.
#![forbid(unsafe_code)]
