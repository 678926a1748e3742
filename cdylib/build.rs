//! Gives the library its soname and the version nodes of `abi/libibverbs.map`.

fn main() {
    let root = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| ".".into());
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={root}/abi/libibverbs.map");
    // Threads of the card run this code: a program that closes the library must not unmap it under them.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=abi/libibverbs.map");
    println!("cargo::rerun-if-changed=build.rs");
}
