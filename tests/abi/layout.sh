#!/usr/bin/env bash
# Sizes and offsets of every C struct that has a name, as provider/abi asserts them for a platform, against
# that platform's C compiler and headers.
# usage: layout.sh LAYOUT.rs COMPILER [ARGUMENT...]
set -euo pipefail
usage='usage: layout.sh LAYOUT.rs COMPILER [ARGUMENT...]'
layout=${1:?$usage}
shift
: "${1:?$usage}"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
here=$(cd "$(dirname "$0")" && pwd)

# A fact as bindgen writes it.
fact="\[\"(Size|Alignment|Offset)[^\"]*\"\]"
of="(size|align|offset)_of(::<|!\()([a-z0-9_]+)(>\(\)|, *([a-z0-9_]+)\))"
# Whether a name is a union's or a struct's says bindings.rs. Structs without a name in C (__bindgen_ty_1)
# have none here; their fields count in those that hold them.
{
    printf '#define _GNU_SOURCE\n#include <stddef.h>\n#include <rdma/rdma_cma.h>\n'
    tr -d '\n' <"$layout" | sed 's/\["/\n["/g' |
        sed -nE "s/^$fact *\[::std::mem::$of *- *([0-9]+)usize\].*/\2 \4 \7 \6/p" |
        grep -v bindgen |
        awk -v bindings="$here/../../provider/abi/src/bindings.rs" '
            BEGIN { while ((getline line <bindings) > 0)
                if (split(line, word, " ") > 2 && word[1] == "pub" && word[2] ~ /^(struct|union)$/)
                    { sub(/[^a-z0-9_].*/, "", word[3]); tag[word[3]] = word[2] } }
            { type = tag[$2] " " $2 }
            $1 == "size" { what = "sizeof(" type ")" }
            $1 == "align" { what = "_Alignof(" type ")" }
            $1 == "offset" { field = $4; if (field ~ /^(type|priv|ref|match|box)_$/) sub(/_$/, "", field)
                what = "offsetof(" type ", " field ")" }
            { printf "_Static_assert(%s == %d, \"%s\");\n", what, $3, what }'
} >"$tmp/layout.c"
count=$(grep -c _Static_assert "$tmp/layout.c" || true)
((count > 1000)) || { echo "layout: only $count facts were found in $layout" >&2 && exit 1; }
"$@" -std=gnu11 -c -o "$tmp/layout.o" "$tmp/layout.c"
echo "layout: $count sizes, alignments and offsets are the C compiler's"
