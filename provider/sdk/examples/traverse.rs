//! The card's own kernel [`Traverse`](starverbs_kernels::Traverse), as a module: what WebAssembly costs is
//! measured with it.

starverbs_sdk::export!(starverbs_kernels::Traverse);
