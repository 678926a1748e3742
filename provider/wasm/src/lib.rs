//! Runs kernels that are WebAssembly modules, with wasmtime: its machine code, and nothing of the host in
//! reach. docs/strom.md has the rules, `provider/kernels/src/mailbox.rs` what module and card say to
//! each other.
//!
//! A module imports nothing. Its memory is bounded, and so is each call, by *fuel*: about the
//! instructions that it executes. Memory accesses are checked by code and not by page faults, so that no
//! signal handler is needed, which would be the program's. A shared library of its own ([`plugin`]), because
//! it is many times as large as all the rest. Must not know queue pairs or memory regions.

pub mod plugin;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

use starverbs_kernels::mailbox;
use starverbs_kernels::module::{Method, Module};
use wasmtime::{
    Config, Engine, Instance, Memory, Store, StoreLimits, StoreLimitsBuilder, TypedFunc, WasmParams,
    WasmResults,
};

/// Longest module, bytes.
pub const MODULE_BYTES: usize = 1 << 20;
/// Most memory of a module, bytes.
pub const MEMORY_BYTES: usize = 16 << 20;
/// What a call may use up. A kernel moves at most 64 times 4 KiB in a step.
pub const CALL_FUEL: u64 = 4_000_000;
/// What a module may use up to begin.
pub const BEGIN_FUEL: u64 = 4 * CALL_FUEL;
/// Of the caller's stack, bytes: programs have threads with small ones.
const STACK_BYTES: usize = 64 << 10;
/// Entries of a module's tables.
const TABLE_ENTRIES: usize = 1 << 16;

/// Why a module is no kernel here.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Longer than [`MODULE_BYTES`]
    #[error("a module of {0} bytes; {MODULE_BYTES} at most")]
    TooLong(usize),
    /// No WebAssembly, or of a kind that is not offered
    #[error("no module: {0}")]
    Malformed(String),
    /// A kernel has nothing outside itself
    #[error("it imports {0}: a kernel imports nothing")]
    Imports(String),
    /// It has no export of this name and type
    #[error("it does not export {0}")]
    Missing(&'static str),
    /// Its memory or tables are larger than they may be, or there is no memory
    #[error("its memory or tables: {0}")]
    NoMemory(String),
    /// What it does at its beginning broke
    #[error("it broke when it began: {0}")]
    Broke(String),
    /// This machine runs no modules
    #[error("no machine code for this processor: {0}")]
    Unsupported(String),
}

/// A module that runs.
pub struct WasmModule {
    store: Store<StoreLimits>,
    memory: Memory,
    start: TypedFunc<(), i32>,
    step: TypedFunc<(), i32>,
    why: String,
}

/// The compiler and its settings: one for the process.
fn engine() -> Result<&'static Engine, LoadError> {
    static ENGINE: OnceLock<Result<Engine, String>> = OnceLock::new();
    let made = ENGINE.get_or_init(|| {
        let mut config = Config::new();
        config
            .signals_based_traps(false)
            .memory_reservation(0)
            .memory_reservation_for_growth(0)
            .memory_guard_size(0)
            .memory_init_cow(false)
            .max_wasm_stack(STACK_BYTES)
            .consume_fuel(true)
            .wasm_backtrace(false);
        Engine::new(&config).map_err(|error| format!("{error:#}"))
    });
    made.as_ref().map_err(|why| LoadError::Unsupported(why.clone()))
}

impl WasmModule {
    /// Compiles a module and begins it; gives where its mailbox lies, too.
    pub fn load(bytes: &[u8]) -> Result<(WasmModule, u32), LoadError> {
        if bytes.len() > MODULE_BYTES {
            return Err(LoadError::TooLong(bytes.len()));
        }
        let engine = engine()?;
        let module = wasmtime::Module::from_binary(engine, bytes);
        let module = module.map_err(|error| LoadError::Malformed(format!("{error:#}")))?;
        if let Some(import) = module.imports().next() {
            return Err(LoadError::Imports(format!("{}.{}", import.module(), import.name())));
        }
        let limits = StoreLimitsBuilder::new()
            .memory_size(MEMORY_BYTES)
            .table_elements(TABLE_ENTRIES)
            .memories(1)
            .instances(1)
            .build();
        let mut store = Store::new(engine, limits);
        store.limiter(|limits| limits);
        let broke = |error: wasmtime::Error| LoadError::Broke(format!("{error:#}"));
        store.set_fuel(BEGIN_FUEL).map_err(broke)?;
        let instance =
            Instance::new(&mut store, &module, &[]).map_err(|error| match error.is::<wasmtime::Trap>() {
                true => broke(error),
                false => LoadError::NoMemory(format!("{error:#}")),
            })?;
        let memory = instance.get_memory(&mut store, "memory").ok_or(LoadError::Missing("memory"))?;
        let mailbox_of = export::<(), u32>(&instance, &mut store, mailbox::MAILBOX)?;
        let start = export(&instance, &mut store, mailbox::START)?;
        let step = export(&instance, &mut store, mailbox::STEP)?;
        let mailbox = mailbox_of.call(&mut store, ()).map_err(broke)?;
        Ok((WasmModule { store, memory, start, step, why: String::new() }, mailbox))
    }

    /// How it broke.
    pub fn why(&self) -> &str {
        &self.why
    }
}

fn export<P: WasmParams, R: WasmResults>(
    instance: &Instance,
    store: &mut Store<StoreLimits>,
    name: &'static str,
) -> Result<TypedFunc<P, R>, LoadError> {
    instance.get_typed_func(store, name).map_err(|_| LoadError::Missing(name))
}

impl Module for WasmModule {
    fn memory(&mut self) -> &mut [u8] {
        self.memory.data_mut(&mut self.store)
    }

    fn call(&mut self, method: Method) -> Option<i32> {
        let function = match method {
            Method::Start => &self.start,
            Method::Step => &self.step,
        };
        let called = self.store.set_fuel(CALL_FUEL).and_then(|()| function.call(&mut self.store, ()));
        called.map_err(|error| self.why = format!("{error:#}")).ok()
    }
}
