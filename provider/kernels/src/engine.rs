//! The face of what runs modules: a shared library of its own, `libstarverbs-wasm.so`, so that the verbs'
//! library stays small, and has none of it until a program hands in a module.
//!
//! One symbol, [`SYMBOL`], gives a [`KernelEngine`]. The types are C's: the two libraries may be of
//! different compilers.

use core::ffi::{CStr, c_char, c_int, c_void};

/// An [`EngineOf`]. The number is the version of all of this.
pub const SYMBOL: &CStr = c"starverbs_kernel_engine_v1";

/// The symbol's type: one for the process, or null: modules cannot run here.
pub type EngineOf = unsafe extern "C" fn() -> *const KernelEngine;

/// What [`KernelEngine::load`] gives.
pub mod loaded {
    /// A kernel
    pub const OK: i32 = 0;
    /// It is no module, or no kernel
    pub const INVALID: i32 = 1;
    /// There is no memory for it, or it wants more than it may
    pub const NO_MEMORY: i32 = 2;
}

/// What [`KernelEngine::call`] calls.
pub mod method {
    /// [`START`](crate::mailbox::START)
    pub const START: i32 = 0;
    /// [`STEP`](crate::mailbox::STEP)
    pub const STEP: i32 = 1;
}

/// The engine. A kernel of it is called by one thread at a time.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelEngine {
    /// Makes a kernel, `kernel`, of the module [`module`, `module` + `len`), whose mailbox lies at `mailbox`:
    /// [`loaded`]. Otherwise `why` says why: room for `why_len` bytes, of which the last is 0.
    pub load: unsafe extern "C" fn(
        module: *const u8,
        len: usize,
        kernel: *mut *mut c_void,
        mailbox: *mut u32,
        why: *mut c_char,
        why_len: usize,
    ) -> c_int,
    /// A kernel's memory, `len` bytes, until it is called again.
    pub memory: unsafe extern "C" fn(kernel: *mut c_void, len: *mut usize) -> *mut u8,
    /// Calls a kernel's [`method`]; `result` is what it returned. False: it broke, and `why` says how. It is
    /// not called again.
    pub call: unsafe extern "C" fn(
        kernel: *mut c_void,
        method: c_int,
        result: *mut c_int,
        why: *mut c_char,
        why_len: usize,
    ) -> bool,
    /// Ends a kernel.
    pub free: unsafe extern "C" fn(kernel: *mut c_void),
}
