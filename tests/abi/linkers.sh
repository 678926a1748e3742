#!/usr/bin/env bash
# Links the libraries, from the archives that are built already, with each linker that is installed (GNU ld,
# lld, mold), and looks at each result: its symbols, its tags, and that a program starts on it.
# usage: linkers.sh ARCHIVE_DIRECTORY
set -euo pipefail
archives=$(cd "${1:?usage: linkers.sh ARCHIVE_DIRECTORY}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
link=$here/../../tools/scripts/link.sh
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
linked=0

fail() { echo "linkers.sh: $*" >&2; exit 1; }

# What of the link is not seen in the symbols.
tags() {
    local tags
    tags=$(readelf -dW "$1")
    grep -q 'FLAGS_1.*NODELETE' <<<"$tags" || fail "$1 may be unmapped while the card's threads run it"
    grep -q 'FLAGS_1.*NOW' <<<"$tags" || fail "$1 is bound lazily"
    grep -q TEXTREL <<<"$tags" && fail "$1 has relocations in its code"
    readelf -lW "$1" | grep -q GNU_RELRO || fail "$1 leaves its tables writable"
    readelf -lW "$1" | grep -q 'GNU_STACK.* RWE ' && fail "$1 wants a stack that is code"
    return 0
}

cat >"$tmp/start.c" <<'C'
#include <stdio.h>
struct ibv_device;
struct ibv_device **ibv_get_device_list(int *count);
const char *ibv_get_device_name(struct ibv_device *device);
const char *rdma_event_str(int event);
int main(void)
{
	int count = 0;
	struct ibv_device **list = ibv_get_device_list(&count);
	return !(list && count == 1 && printf("%s, %s\n", ibv_get_device_name(list[0]), rdma_event_str(0)) > 0);
}
C

for linker in bfd lld mold; do
    if ! command -v "ld.$linker" >/dev/null && ! command -v "$linker" >/dev/null; then
        echo "skipped: $linker is not installed"
        continue
    fi
    lib=$tmp/$linker
    "$link" "$archives/libstarverbs.a" "$lib/libibverbs.so.1" "-fuse-ld=$linker"
    "$link" "$archives/libstarverbs_preload.a" "$lib/libstarverbs.so" "-fuse-ld=$linker"
    "$link" "$archives/libstarverbs_share.a" "$lib/libstarverbs-share.so" "-fuse-ld=$linker"
    "$here/compare.sh" "$lib/libibverbs.so.1"
    "$here/compare.sh" "$lib/libstarverbs.so" "$here/../preload/libc.symbols"
    diff "$here/../share/symbols" <("$here/symbols.sh" "$lib/libstarverbs-share.so") ||
        fail "$linker exports something else"
    tags "$lib/libibverbs.so.1"
    tags "$lib/libstarverbs.so"
    tags "$lib/libstarverbs-share.so"
    readelf -dW "$lib/libstarverbs-share.so" | grep -q 'FLAGS_1.*INITFIRST' ||
        fail "$linker has it begin after others"
    cc -fuse-ld="$linker" -o "$lib/start" "$tmp/start.c" "$lib/libibverbs.so.1"
    LD_LIBRARY_PATH=$lib "$lib/start"
    LD_LIBRARY_PATH=$lib LD_PRELOAD=$lib/libstarverbs.so "$lib/start"
    LD_LIBRARY_PATH=$lib LD_PRELOAD=$lib/libstarverbs-share.so:$lib/libstarverbs.so "$lib/start"
    echo "$linker: $(stat -c %s "$lib/libibverbs.so.1") and $(stat -c %s "$lib/libstarverbs.so") bytes"
    linked=$((linked + 1))
done
((linked)) || fail "no linker found"
