#!/usr/bin/env bash
# Kernels of one's own: built as a user builds them, of C and of Rust, and loaded through the C ABI.
# Needs clang that makes WebAssembly; Rust's part needs its target wasm32-unknown-unknown.
# usage: run.sh LIBRARY_DIRECTORY
set -euo pipefail
lib=$(cd "${1:?usage: run.sh LIBRARY_DIRECTORY}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

cc -Wall -Wextra -Wpedantic -std=c11 -D_GNU_SOURCE -O1 -I"$root/include" -o "$tmp/module" \
    "$root/tests/kernels/module.c" -L"$lib" -libverbs
mkdir "$tmp/lib" "$tmp/bin"
cp -d "$lib"/lib*.so* "$tmp/lib"
rm -f "$tmp/lib/libstarverbs-wasm.so"
LD_LIBRARY_PATH=$tmp/lib STARVERBS_LOG=off "$tmp/module" none

# The library that `make wasm` made, or else one as its unit tests use, which compiles slowly.
engine=$lib/libstarverbs-wasm.so
if [[ ! -e $engine ]]; then
    cargo build --quiet --manifest-path "$root/Cargo.toml" --package starverbs-wasm
    engine=$target/debug/libstarverbs_wasm.so
fi
cp "$engine" "$tmp/lib/libstarverbs-wasm.so"
install -D "$lib/../bin/starverbs" "$tmp/bin/starverbs"
install -D -m 644 "$root/include/starverbs/kernel.h" "$tmp/include/starverbs/kernel.h"
build() { "$tmp/bin/starverbs" kernel build -o "$@"; }

if ! command -v wasm-ld >/dev/null ||
    ! echo 'int x;' | clang --target=wasm32 -c -o /dev/null -xc - 2>/dev/null; then
    echo "kernels: skipped: clang or lld is not installed, or makes no WebAssembly"
    exit 0
fi
build "$tmp/filter-c.wasm" "$root/examples/kernels/filter.c"
build "$tmp/hostile.wasm" "$root/tests/kernels/hostile.c"
build "$tmp/sender.wasm" "$root/tests/kernels/sender.c"
modules=("$tmp/hostile.wasm" "$tmp/sender.wasm" "$tmp/filter-c.wasm")
if [[ -d $(rustc --print sysroot)/lib/rustlib/wasm32-unknown-unknown ]]; then
    build "$tmp/filter-rust.wasm" "$root/examples/kernels/filter"
    modules+=("$tmp/filter-rust.wasm")
else
    echo "kernels: of Rust: skipped: rustup target add wasm32-unknown-unknown"
fi
LD_LIBRARY_PATH=$tmp/lib STARVERBS_LOG=off "$tmp/module" "${modules[@]}"

# A running program's are changed from outside, while it calls them.
kernel() { STARVERBS_LOG=off "$tmp/bin/starverbs" kernel "$@"; }
fail() { echo "kernels: $*" >&2; exit 1; }
mkfifo "$tmp/said.fifo"
LD_LIBRARY_PATH=$tmp/lib STARVERBS_LOG=off "$tmp/module" serve >"$tmp/said.fifo" &
pid=$!
trap 'kill "$pid" 2>/dev/null || true; rm -rf "$tmp"' EXIT
exec {said}<"$tmp/said.fifo"
says() {
    local line
    read -r -t 60 -u "$said" line && [[ $line == "$1" ]] || fail "the program said '$line', not '$1'"
}
says ready
kernel load "$pid" 0x77 "$tmp/filter-c.wasm"
says answers
for module in "${modules[@]:2}"; do kernel load "$pid" 119 "$module"; done
kernel list "$pid" | grep -qE '^ +[0-9]+ +0x77 +module$' || fail "not listed: $(kernel list "$pid")"
refused() {
    ! kernel "${@:2}" 2>"$tmp/why" || fail "not refused: ${*:2}"
    grep -q "$1" "$tmp/why" || fail "refused, but: $(cat "$tmp/why")"
}
refused 'no such object' load "$pid" 0x77 "$tmp/filter-c.wasm" --pd 77
refused 'no such object' unload "$pid" any
kernel unload "$pid" 0x77
says 'no kernel'
wait "$pid"
trap 'rm -rf "$tmp"' EXIT

# What is no kernel, and what a compiler refuses.
echo 'int x;' >"$tmp/none.c"
if build "$tmp/none.wasm" "$tmp/none.c" 2>"$tmp/said" || ! grep -q 'does not export' "$tmp/said"; then
    echo "kernels: took a module that is no kernel: $(cat "$tmp/said")" >&2
    exit 1
fi
