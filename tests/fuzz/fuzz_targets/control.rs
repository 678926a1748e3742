//! Messages of the blocks' unix sockets, which any process of the host may send: they are understood or not, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| starverbs_backend::read_messages(bytes));
