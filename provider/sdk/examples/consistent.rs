//! The card's own kernel [`Consistent`](starverbs_kernels::Consistent), as a module: what WebAssembly
//! costs is measured with it.

starverbs_sdk::export!(starverbs_kernels::Consistent);
