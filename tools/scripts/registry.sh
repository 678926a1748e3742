#!/usr/bin/env bash
# Counts the instructions of a packet through StaR's security registry, by its number of rules: one line each.
# usage: registry.sh; needs valgrind
set -euo pipefail
cd "$(dirname "$0")/../.."
cargo build --release --quiet --package starverbs-sim --example registry
program=${CARGO_TARGET_DIR:-target}/release/examples/registry
count() {
    valgrind --tool=cachegrind --cache-sim=no --cachegrind-out-file=/dev/null "$program" "$1" "$2" 2>&1 |
        awk '/I *refs/ { gsub(",", "", $NF); print $NF }'
}
each() {
    local few many
    few=$(count "$1" 1000)
    many=$(count "$1" 11000)
    echo $(((many - few) / 10000))
}
none=$(each 0)
echo "| rules | instructions of a request and its packet, beside the $none of one that asks for no memory |"
echo "|---|---|"
for rules in 1 16 256 1024 4096 16384 65536; do
    echo "| $rules | $(($(each "$rules") - none)) |"
done
