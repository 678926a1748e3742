#!/usr/bin/env bash
# Runs the card against the kernel's rdma_rxe in a guest. Where that cannot be had (no QEMU, no kernel
# package, no root), says so and fails only with INTEROP=require.
# usage: interop.sh [arguments of starverbs-interop]
set -uo pipefail
cd "$(dirname "$0")/../.."

unavailable() {
    echo "interop: $*"
    [[ ${INTEROP:-} != require ]]
    exit
}

((EUID == 0)) || unavailable "skipped: network namespaces and tap devices need root"
tools/scripts/packages.sh interop || unavailable "skipped: what it needs cannot be installed"
cargo run --quiet --package starverbs-interop -- --cache "${CARGO_TARGET_DIR:-target}/interop" "$@"
status=$?
((status != 2)) || unavailable "skipped: the guest cannot be had here"
exit "$status"
