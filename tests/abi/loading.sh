#!/bin/sh
# Opens every installed library that needs libibverbs.so.1 (drivers, libmlx5, libefa, librdmacm, UCX's,
# libfabric's ...) on the library under test. Those that do not open on the system's own libibverbs either
# are not the library's to judge.
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
    done >"$tmp/installed"
# One of them: it takes a symbol from a library that it does not name.
echo 'int of_another(void), ibv_fork_init(void);
int orphan(void) { return of_another() + ibv_fork_init(); }' >"$tmp/orphan.c"
cc -shared -fPIC -o "$tmp/orphan.so" "$tmp/orphan.c" "$lib/libibverbs.so.1"
echo "$tmp/orphan.so" >>"$tmp/installed"
env -u LD_LIBRARY_PATH xargs -a "$tmp/installed" "$tmp/loading" --which >"$tmp/libraries"
cat "$tmp/libraries"
sed -n 's/^. \([^@]*\)@@*\(IBVERBS_PRIVATE_.*\)/\1 \2/p' "$here"/libibverbs1-*.symbols >"$tmp/names"
LD_LIBRARY_PATH=$lib xargs -a "$tmp/libraries" "$tmp/loading" "$tmp/names"
