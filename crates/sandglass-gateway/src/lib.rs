//! Calls of models out of sandboxes.
#![forbid(unsafe_code)]
