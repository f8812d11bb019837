//! Test server, fakes and bounded waits; a dev-dependency only.
#![forbid(unsafe_code)]
