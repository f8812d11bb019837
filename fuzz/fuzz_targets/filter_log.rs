#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sandglass_egress::properties::filter_log(bytes));
