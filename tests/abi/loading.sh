#!/bin/sh
# Opens every installed library that needs libibverbs.so.1 (drivers, libmlx5, libefa, librdmacm, UCX's, libfabric's ...) on
# the library under test.
# usage: loading.sh LIBRARY_DIRECTORY
set -eu
lib=$(cd "${1:?usage: loading.sh LIBRARY_DIRECTORY}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cc -Wall -Wextra -O1 -o "$tmp/loading" "$here/loading.c" -ldl

system=${SYSTEM_LIBRARIES:-/usr/lib/$(cc -print-multiarch)}
grep -rl --include='*.so*' 'libibverbs\.so\.1' "$system" | sort |
    while read -r file; do
        if readelf -d "$file" | grep -q 'NEEDED.*libibverbs\.so\.1'; then echo "$file"; fi
    done >"$tmp/libraries"
cat "$tmp/libraries"
sed -n 's/^. \([^@]*\)@@*\(IBVERBS_PRIVATE_.*\)/\1 \2/p' "$here"/libibverbs1-*.symbols >"$tmp/names"
LD_LIBRARY_PATH=$lib xargs -a "$tmp/libraries" "$tmp/loading" "$tmp/names"
