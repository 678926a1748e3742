#!/bin/sh
# Every symbol that Debian 12's libibverbs.so.1 (package libibverbs1 44.0) exports must be in ours, at the same version and
# of the same kind (T function, D data), and nothing else may be, but for what a second list names.
# usage: compare.sh LIBRARY [LIST]
set -eu
lib=${1:?usage: compare.sh LIBRARY [LIST]}
more=${2:-/dev/null}
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

nm -D --with-symbol-versions --defined-only "$lib" |
    awk '$2 != "A" { print ($2 == "T" || $2 == "W" || $2 == "i" ? "T" : "D"), $3 }' | LC_ALL=C sort -k2 >"$tmp/ours"
LC_ALL=C sort -k2 "$here/libibverbs1-44.symbols" "$more" >"$tmp/theirs"
LC_ALL=C comm -3 --nocheck-order "$tmp/theirs" "$tmp/ours" >"$tmp/odd" || true

soname=$(readelf -d "$lib" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
[ "$soname" = libibverbs.so.1 ] || { echo "soname is '$soname', not libibverbs.so.1"; exit 1; }
if [ -s "$tmp/odd" ]; then
    echo "missing (left) or beyond the lists (right):"
    cat "$tmp/odd"
    exit 1
fi
echo "$(wc -l <"$tmp/ours") symbols, all as in libibverbs1 44${2:+ and $2}"
