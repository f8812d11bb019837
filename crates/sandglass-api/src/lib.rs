//! The REST faces and the edge that routes traffic into sandboxes.
#![forbid(unsafe_code)]
