//! The C ABI of libibverbs and librdmacm: the structs, unions and constants of `<infiniband/verbs.h>` and
//! `<rdma/rdma_cma.h>` (rdma-core 44), as bindgen reads them.
//!
//! Owns the layout of everything that crosses the C boundary, and asserts it at compile time. Enums are plain
//! integers with constants, since a C program may pass any value. It must not know any behaviour, and nothing
//! here links to a C library. `tools/abi/bindgen.sh` regenerates the generated files; tests/abi/layout.sh
//! compares the layouts with a C compiler's.

#[allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    unreachable_pub
)]
mod bindings;
#[cfg(target_arch = "aarch64")]
#[allow(clippy::all)]
mod layout_aarch64;
#[cfg(target_arch = "x86_64")]
#[allow(clippy::all)]
mod layout_x86_64;
pub mod newer;

pub use bindings::*;

/// The value of `ibv_context::abi_compat` that says a `verbs_context` surrounds the `ibv_context`
/// (`__VERBS_ABI_IS_EXTENDED` in verbs.h).
pub const VERBS_ABI_IS_EXTENDED: *mut core::ffi::c_void = core::ptr::without_provenance_mut(usize::MAX);
