#!/usr/bin/env bash
# Builds DIST (dist/aarch64) for aarch64, on a machine of any kind: with the Rust toolchain that
# is here, where it has the standard library for aarch64 or rustup may fetch it, else with
# Debian's in a root folder under target/.
# Needs aarch64-linux-gnu-gcc, or CC_AARCH64 (on aarch64: cc). Where it cannot be done, it exits with 2.
# usage: cross.sh [build|tests]
#   build   the command and the libraries
#   tests   the core's and the rings' unit tests, in DIST/tests
set -euo pipefail
cd "$(dirname "$0")/../.."
what=${1:-build}
dist=${DIST:-dist/aarch64}
triple=aarch64-unknown-linux-gnu
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
out=$target/cross
if [[ $(uname -m) == aarch64 ]]; then cc=${CC_AARCH64:-cc}; else cc=${CC_AARCH64:-aarch64-linux-gnu-gcc}; fi

unavailable() { echo "cross.sh: $*" >&2; exit 2; }

command -v "${cc%% *}" >/dev/null ||
    unavailable "$cc is missing: install gcc-aarch64-linux-gnu, or say CC_AARCH64="

# Whether this host's cargo can build for aarch64.
here() {
    local sysroot
    sysroot=$(rustc --print sysroot)
    [[ -d $sysroot/lib/rustlib/$triple/lib ]] && return
    command -v rustup >/dev/null && rustup target add "$triple" >/dev/null 2>&1
}

# cargo with Debian's toolchain: the sources of crates come along, as this host's cargo has fetched them.
in_root() {
    local root=$target/root-cross
    tools/scripts/root.sh "$root" forky \
        cargo,rustc,libstd-rust-dev,libstd-rust-dev:arm64,gcc-aarch64-linux-gnu,libc6-dev-arm64-cross \
            amd64,arm64
    mkdir -p "$out/home"
    cargo vendor --quiet --locked --versioned-dirs "$out/vendor"
    printf '[source.crates-io]\nreplace-with = "here"\n[source.here]\ndirectory = "%s"\n' "$out/vendor" \
        >"$out/home/config.toml"
    mkdir -p "$root$PWD" "$root$target"
    # What is mounted goes with the namespace.
    # shellcheck disable=SC2016 # the inner shell's
    unshare --mount --propagation private bash -c '
        set -e
        mount --bind "$PWD" "$0$PWD"
        mkdir -p "$0$1"
        mount --bind "$1" "$0$1"
        mount -t proc proc "$0/proc"
        mount --rbind /dev "$0/dev"
        exec chroot "$0" env -i PATH=/usr/bin:/bin HOME="$1/cross/home" LC_ALL=C.UTF-8 \
            CARGO_HOME="$1/cross/home" \
            CARGO_TARGET_DIR="$1/cross" CARGO_NET_OFFLINE=true \
            CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
            sh -c "cd \"\$0\" && exec cargo \"\$@\"" "$PWD" "${@:2}"' "$root" "$target" "$@"
}

if here; then
    cross() {
        CARGO_TARGET_DIR=$out CC_aarch64_unknown_linux_gnu=$cc \
            CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=${cc%% *} cargo "$@"
    }
else
    echo "cross.sh: no standard library for $triple in this toolchain: Debian's is taken" >&2
    cross() { in_root "$@"; }
fi

case $what in
build)
    cross build --release --locked --target "$triple" \
        --package starverbs-cdylib --package starverbs-preload --package starverbs-share --package starverbs
    built=$out/$triple/release
    CC=$cc tools/scripts/libraries.sh "$built" "$dist/lib"
    install -D -m 755 "$built/starverbs" "$dist/bin/starverbs"
    install -D -m 644 include/infiniband/stardv.h "$dist/include/infiniband/stardv.h"
    install -D -m 644 include/starverbs/kernel.h "$dist/include/starverbs/kernel.h"
    ;;
tests)
    rm -rf "$dist/tests"
    mkdir -p "$dist/tests"
    cross test --locked --target "$triple" --package starverbs-core --package starverbs-star \
        --package starverbs-rings --lib --no-run --message-format json |
        sed -nE 's/.*"executable":"([^"]+)".*/\1/p' | xargs -I{} cp {} "$dist/tests/"
    ;;
*) echo "usage: cross.sh [build|tests]" >&2; exit 2 ;;
esac
