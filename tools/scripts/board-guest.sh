#!/usr/bin/env bash
# Tries the board's kernel module in guests, after `make library`. Where they cannot be had (no root, no QEMU
# with vfio-user, no kernel package), says so and fails only with BOARD_GUEST=require.
# usage: board-guest.sh [arguments of starverbs-board-guest]
set -uo pipefail
cd "$(dirname "$0")/../.."

unavailable() {
    echo "board-guest: skipped: $*"
    [[ ${BOARD_GUEST:-} != require ]]
    exit
}

((EUID == 0)) || unavailable "network namespaces and tap devices need root"
[[ $(uname -m) == x86_64 ]] || unavailable "guests are made of amd64's packages alone"
[[ -e /dev/net/tun ]] || unavailable "no tap devices: /dev/net/tun is missing"
tools/scripts/packages.sh board-guest || unavailable "what it needs cannot be installed"
cache=${CARGO_TARGET_DIR:-target}/board-guest
if [[ " $* " != *' --quick '* && " $* " != *' demo '* ]]; then
    mkdir -p "$cache"
    # of the root folder's kernel, which is there by now: the run before has made it
    root=
    [[ " $* " != *' --newest '* ]] || root=$(sed -n 's/.*--root \([^ ]*\).*/\1/p' <<<"$*")
    tests/board/guest/lint.sh "$cache" "$root" || exit 1
fi
cargo run --quiet --package starverbs-board-guest -- --cache "$cache" "$@"
status=$?
((status != 2)) || unavailable "the guest cannot be had here"
exit "$status"
