//! The suite that holds for every engine, by both ways of driving this one. It refuses nothing.

use std::collections::BTreeSet;

use sandglass_engine::engine::{Engine as _, Isolation};
use sandglass_engine::gvisor::Driver;

use crate::fixture::{Fixture, Gvisor};

mod over_the_control_socket {
    use super::*;

    sandglass_testkit::conformance_tests!(Gvisor { network: true, driver: Driver::Fastest });
}

mod by_the_command_line {
    use super::*;

    sandglass_testkit::conformance_tests!(Gvisor { network: true, driver: Driver::CommandLine });
}

#[test]
fn it_claims_everything() {
    let info = Fixture::new().engine().info();
    assert_eq!((info.isolation, info.refuses), (Isolation::UserspaceKernel, BTreeSet::new()));
}
