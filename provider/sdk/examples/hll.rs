//! The card's own kernel [`Hll`](starverbs_kernels::Hll), as a module: what WebAssembly costs is
//! measured with it.

starverbs_sdk::export!(starverbs_kernels::Hll);
