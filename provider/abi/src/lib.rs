//! The C ABI of libibverbs: committed bindgen output and layout asserts
