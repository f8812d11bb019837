//! What tests of several crates share. A dev-dependency only.
#![forbid(unsafe_code)]
