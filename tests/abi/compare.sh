#!/bin/sh
# Every symbol that a released libibverbs.so.1 or librdmacm.so.1 exports must be in ours, at the same version
# and of the same kind (T function, D data), and nothing else may be, but for what a further list names. The
# lists are of Debian's packages libibverbs1 and librdmacm1, 44.0 (Debian 12) and 65.0; symbols.sh makes one.
# All private nodes have the names of both: see docs/architecture.md. stardv.symbols has those of our own,
# include/infiniband/stardv.h's.
# usage: compare.sh LIBRARY [LIST]
set -eu
lib=${1:?usage: compare.sh LIBRARY [LIST]}
more=${2:-/dev/null}
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
lists="$here/libibverbs1-44.symbols $here/libibverbs1-65.symbols
    $here/librdmacm1-44.symbols $here/librdmacm1-65.symbols $here/stardv.symbols"
private=@IBVERBS_PRIVATE_

# Nobody links to a private symbol but by its node: which node is the default is no matter.
"$here/symbols.sh" "$lib" | sed "s/@$private/$private/" >"$tmp/ours"
{
    grep -hv "$private" $lists "$more" || true
    for node in 34 57 59 64 65; do
        grep -h "$private" $lists |
            sed "s/@${private}.*/$private$node/; s/\(register_driver_\)[0-9]*/\1$node/"
    done
} >"$tmp/theirs"
LC_ALL=C sort -uk2 "$tmp/ours" >"$tmp/ours.sorted"
LC_ALL=C sort -uk2 "$tmp/theirs" >"$tmp/theirs.sorted"
LC_ALL=C comm -3 --nocheck-order "$tmp/theirs.sorted" "$tmp/ours.sorted" >"$tmp/odd" || true

soname=$(readelf -d "$lib" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
[ "$soname" = libibverbs.so.1 ] || { echo "soname is '$soname', not libibverbs.so.1"; exit 1; }
if [ -s "$tmp/odd" ]; then
    echo "missing (left) or beyond the lists (right):"
    cat "$tmp/odd"
    exit 1
fi
echo "$(wc -l <"$tmp/ours") symbols, all as in libibverbs1 and librdmacm1 44 and 65 and stardv.h${2:+ and $2}"
