//! The crate as a shared library: [`KernelEngine`], in C's types.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use starverbs_kernels::engine::{KernelEngine, loaded, method};
use starverbs_kernels::module::{Method, Module};

use crate::{LoadError, WasmModule};

static ENGINE: KernelEngine = KernelEngine { load, memory, call, free };

/// The symbol that programs' libraries look for.
#[unsafe(no_mangle)]
pub extern "C" fn starverbs_kernel_engine_v1() -> *const KernelEngine {
    &raw const ENGINE
}

/// Writes a text, cut to its room, and a 0 behind it.
///
/// # Safety
/// [to, to + len) is memory of the caller's.
unsafe fn write_text(text: &str, to: *mut c_char, len: usize) {
    let Some(most) = len.checked_sub(1) else { return };
    let bytes = &text.as_bytes()[..text.len().min(most)];
    // SAFETY: so many bytes and one more are the caller's.
    unsafe {
        to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        to.add(bytes.len()).write(0);
    }
}

unsafe extern "C" fn load(
    module: *const u8,
    len: usize,
    kernel: *mut *mut c_void,
    mailbox: *mut u32,
    why: *mut c_char,
    why_len: usize,
) -> c_int {
    // SAFETY: the terms of `KernelEngine::load`.
    let bytes = unsafe { std::slice::from_raw_parts(module, len) };
    let (text, result) = match catch_unwind(|| WasmModule::load(bytes)) {
        Ok(Ok((made, at))) => {
            // SAFETY: as above: places of the caller's.
            unsafe {
                kernel.write(Box::into_raw(Box::new(made)).cast());
                mailbox.write(at);
            }
            return loaded::OK;
        }
        Ok(Err(error @ LoadError::NoMemory(_))) => (error.to_string(), loaded::NO_MEMORY),
        Ok(Err(error)) => (error.to_string(), loaded::INVALID),
        Err(_) => ("the compiler failed".into(), loaded::INVALID),
    };
    // SAFETY: as above.
    unsafe { write_text(&text, why, why_len) };
    result
}

/// The kernel that [`load`] made.
///
/// # Safety
/// It was made there, is not freed, and nobody else has it.
unsafe fn module<'a>(kernel: *mut c_void) -> &'a mut WasmModule {
    // SAFETY: the caller's terms.
    unsafe { &mut *kernel.cast() }
}

unsafe extern "C" fn memory(kernel: *mut c_void, len: *mut usize) -> *mut u8 {
    // SAFETY: the terms of `KernelEngine`.
    let memory = unsafe { module(kernel) }.memory();
    // SAFETY: as above: a place of the caller's.
    unsafe { len.write(memory.len()) };
    memory.as_mut_ptr()
}

unsafe extern "C" fn call(
    kernel: *mut c_void,
    which: c_int,
    result: *mut c_int,
    why: *mut c_char,
    why_len: usize,
) -> bool {
    // SAFETY: the terms of `KernelEngine`.
    let module = unsafe { module(kernel) };
    let which = if which == method::START { Method::Start } else { Method::Step };
    let called = catch_unwind(AssertUnwindSafe(|| module.call(which))).ok().flatten();
    // SAFETY: as above: places of the caller's.
    unsafe {
        match called {
            Some(number) => result.write(number),
            None => write_text(module.why(), why, why_len),
        }
    }
    called.is_some()
}

unsafe extern "C" fn free(kernel: *mut c_void) {
    // SAFETY: the terms of `KernelEngine`: made by `load`, and never used again.
    drop(unsafe { Box::from_raw(kernel.cast::<WasmModule>()) });
}
