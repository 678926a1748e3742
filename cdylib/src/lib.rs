//! The drop-in libibverbs: C ABI in, errno out
