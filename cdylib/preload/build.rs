//! Gives the library the soname and version nodes of the libibverbs that it carries; the names of libc stay without
//! version, so that they answer for every version that a program asks for.

fn main() {
    let root = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| ".".into());
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={root}/../abi/libibverbs.map");
    // As in the library without picture: threads of the card run this code, so it is never unmapped.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=../abi/libibverbs.map");
    println!("cargo::rerun-if-changed=build.rs");
}
