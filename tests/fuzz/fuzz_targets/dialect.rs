//! See the oracle of this name in tests/untrusted.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| starverbs_untrusted::dialect::check(bytes));
