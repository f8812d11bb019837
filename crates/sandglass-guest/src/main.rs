//! The agent in every sandbox.
fn main() {}
