//! Kernels that programs hand in as WebAssembly modules: finds the library that runs them, with the first.
//!
//! Owns what is said across that library's face ([`KernelEngine`]); what module and card say to each other is
//! [`ModuleKernel`]'s business.

use std::ffi::{CStr, CString, OsStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::OnceLock;

use starverbs_core::strom::Kernel;
use starverbs_kernels::engine::{EngineOf, KernelEngine, SYMBOL, loaded, method};
use starverbs_kernels::module::Method;
use starverbs_kernels::{Module, ModuleKernel};

use crate::error::{Result, VerbsError};
use crate::log::log;

/// The library.
const LIBRARY: &str = "libstarverbs-wasm.so";
/// Where it is looked for: from the library's folder, or from that of a tool's; then where the dynamic linker
/// looks.
const FOLDERS: [&str; 3] = [".", "../lib", "../lib/starverbs"];
/// Bytes of a reason.
const REASON: usize = 512;

const NO_ENGINE: VerbsError =
    VerbsError::Unsupported("WebAssembly: there is no libstarverbs-wasm.so beside this library (make wasm)");

/// The kernel that a module is, for RPC op-code `op`.
///
/// # Errors
/// EINVAL: it is none, and the log says why; ENOMEM; EOPNOTSUPP: nothing here runs modules.
pub(crate) fn load(module: &[u8], op: u64) -> Result<Box<dyn Kernel>> {
    make(module, op).map_err(|(error, why)| {
        log!(Error, "RPC op-code {op:#x}: a module is no kernel: {why}");
        error
    })
}

/// Whether a module is a kernel that a card would take. An error says why not, for people.
///
/// # Errors
/// It is not, or nothing here runs modules.
pub fn check_module(module: &[u8]) -> std::result::Result<(), String> {
    make(module, 0).map(drop).map_err(|(_, why)| why)
}

/// As [`load`], but the reason comes with the error.
pub(crate) fn make(module: &[u8], op: u64) -> std::result::Result<Box<dyn Kernel>, (VerbsError, String)> {
    let engine = engine().ok_or_else(|| (NO_ENGINE, NO_ENGINE.to_string()))?;
    let (mut kernel, mut mailbox) = (std::ptr::null_mut(), 0);
    let mut why = Reason::new();
    // SAFETY: the terms of `KernelEngine::load`: the module's bytes, and places of this frame's.
    let result = unsafe {
        let (text, room) = why.room();
        (engine.load)(module.as_ptr(), module.len(), &raw mut kernel, &raw mut mailbox, text, room)
    };
    let made = NonNull::new(kernel).filter(|_| result == loaded::OK);
    let Some(kernel) = made else {
        let error = match result {
            loaded::NO_MEMORY => VerbsError::NoMemory("a kernel's module"),
            _ => NO_KERNEL,
        };
        return Err((error, why.text().into_owned()));
    };
    let kernel = ModuleKernel::new(EngineModule { engine, kernel, op }, mailbox);
    let kernel = kernel.ok_or_else(|| (NO_KERNEL, "its mailbox is not in its memory".to_owned()))?;
    Ok(Box::new(kernel))
}

const NO_KERNEL: VerbsError = VerbsError::Invalid("a module that is no kernel");

/// A text that the engine writes.
struct Reason([u8; REASON]);

impl Reason {
    fn new() -> Self {
        Reason([0; REASON])
    }

    fn room(&mut self) -> (*mut c_char, usize) {
        (self.0.as_mut_ptr().cast(), self.0.len())
    }

    fn text(&self) -> std::borrow::Cow<'_, str> {
        CStr::from_bytes_until_nul(&self.0).map(CStr::to_string_lossy).unwrap_or_default()
    }
}

/// A module that the engine runs.
struct EngineModule {
    engine: &'static KernelEngine,
    kernel: NonNull<c_void>,
    op: u64,
}

// SAFETY: the engine's kernels may be called by any thread, one at a time.
unsafe impl Send for EngineModule {}

impl Module for EngineModule {
    fn memory(&mut self) -> &mut [u8] {
        let mut len = 0;
        // SAFETY: the terms of `KernelEngine::memory`: the memory stays until the next call, for which this
        // must be borrowed again.
        unsafe {
            let first = (self.engine.memory)(self.kernel.as_ptr(), &raw mut len);
            if first.is_null() { &mut [] } else { std::slice::from_raw_parts_mut(first, len) }
        }
    }

    fn call(&mut self, which: Method) -> Option<i32> {
        let (mut result, mut why) = (0, Reason::new());
        let number = if which == Method::Start { method::START } else { method::STEP };
        // SAFETY: the terms of `KernelEngine::call`: places of this frame's; `ModuleKernel` does not call a
        // kernel that broke.
        let done = unsafe {
            let (text, room) = why.room();
            (self.engine.call)(self.kernel.as_ptr(), number, &raw mut result, text, room)
        };
        if !done {
            /* once in a kernel's life, so though the card's lock is held: a line never waits */
            log!(Error, "the kernel of RPC op-code {:#x} broke: {}", self.op, why.text());
        }
        done.then_some(result)
    }
}

impl Drop for EngineModule {
    fn drop(&mut self) {
        // SAFETY: the engine made it, and nobody uses it any more.
        unsafe { (self.engine.free)(self.kernel.as_ptr()) };
    }
}

/// The engine, once it was found.
fn engine() -> Option<&'static KernelEngine> {
    static ENGINE: OnceLock<&'static KernelEngine> = OnceLock::new();
    if let Some(engine) = ENGINE.get() {
        return Some(engine);
    }
    let own = own_folder();
    let near = own.iter().flat_map(|own| FOLDERS.map(|folder| own.join(folder).join(LIBRARY)));
    let beside = near.filter(|file| file.exists()).find_map(|file| open(file.as_os_str()));
    let library = beside.or_else(|| open(OsStr::new(LIBRARY)))?;
    // SAFETY: the handle came from dlopen.
    let symbol = unsafe { libc::dlsym(library.as_ptr(), SYMBOL.as_ptr()) };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: a symbol of this name has this type; the library is never closed, and what it gives is its own
    // for ever.
    let engine = unsafe { std::mem::transmute::<*mut c_void, EngineOf>(symbol)().as_ref() }?;
    Some(ENGINE.get_or_init(|| engine))
}

fn open(name: &OsStr) -> Option<NonNull<c_void>> {
    let name = CString::new(name.as_bytes()).ok()?;
    // SAFETY: a name that ends with 0; the library's constructors are Rust's own.
    NonNull::new(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) })
}

/// Where the library lies that this code is in.
fn own_folder() -> Option<std::path::PathBuf> {
    // SAFETY: zeros are a valid value of it.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here = own_folder as fn() -> Option<std::path::PathBuf>;
    // SAFETY: any address may be asked for; the place is this frame's.
    if unsafe { libc::dladdr(here as *const c_void, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the linker's own name of the library, which ends with 0.
    let name = OsStr::from_bytes(unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes());
    Path::new(name).parent().map(Path::to_owned)
}
