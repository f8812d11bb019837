//! The Sandglass binary.
fn main() {}
