//! The product: the life of sandboxes, templates, and the reconcilers.
#![forbid(unsafe_code)]
