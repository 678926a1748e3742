//! temporary
use std::sync::atomic::{AtomicUsize, Ordering};
static AT: AtomicUsize = AtomicUsize::new(0);
const N: usize = 1 << 21;
static mut BUF: [(u64, u32, u32); N] = [(0, 0, 0); N];
#[inline]
pub fn ev(kind: u32, arg: u32) {
    let i = AT.fetch_add(1, Ordering::Relaxed);
    if i == 0 { unsafe { libc::atexit(dump_c); } }
    if i < N {
        unsafe { BUF[i] = (core::arch::x86_64::_rdtsc(), kind, arg) };
    }
}
pub fn dump() {
    let n = AT.load(Ordering::Relaxed).min(N);
    let mut s = String::with_capacity(n * 32);
    for i in 0..n {
        let (t, k, a) = unsafe { BUF[i] };
        s.push_str(&format!("{t} {k} {a}\n"));
    }
    let _ = std::fs::write(format!("/tmp/trace.{}", std::process::id()), s);
}

extern "C" fn dump_c() { dump() }
