//! What may leave a sandbox: decisions over policy, and the DNS answers and connections that follow from them.
#![forbid(unsafe_code)]
