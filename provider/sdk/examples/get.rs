//! The card's own kernel [`Get`](starverbs_kernels::Get), as a module: what WebAssembly costs is
//! measured with it.

starverbs_sdk::export!(starverbs_kernels::Get);
