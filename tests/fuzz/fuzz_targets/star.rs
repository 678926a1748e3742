//! See the judge of this name in tests/strangers.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| starverbs_strangers::star::judge(bytes));
