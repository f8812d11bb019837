//! The engine that isolates nothing: with processes, and with scripts in their place.
#![allow(clippy::unwrap_used)]

mod claims;
mod processes;
mod scripts;
mod subjects;
mod unprivileged;

mod real {
    sandglass_testkit::conformance_tests!(crate::subjects::Real);
}

mod scripted {
    sandglass_testkit::conformance_tests!(crate::subjects::Scripted);
}
