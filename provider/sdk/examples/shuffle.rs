//! The card's own kernel [`Shuffle`](starverbs_kernels::Shuffle), as a module: what WebAssembly costs is
//! measured with it.

starverbs_sdk::export!(starverbs_kernels::Shuffle);
