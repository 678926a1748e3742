//! proto
#[used]
static KEEP: fn() = starverbs::keep;

/// x
#[unsafe(no_mangle)]
pub unsafe extern "C" fn access(_p: *const core::ffi::c_char, _m: i32) -> i32 { 0 }
