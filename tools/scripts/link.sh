#!/usr/bin/env bash
# Links one of the shared libraries from the archive that rustc made of it. Not rustc's own link of a
# cdylib: to that it gives a version script without nodes, beside which GNU ld takes no other
# (docs/decisions/0013-linking.md). What rustc asks of the linker stands here too. CC is the compiler of the
# machine that the library is for, with its options.
# usage: link.sh ARCHIVE LIBRARY [OPTION OF CC...]
set -euo pipefail
usage='usage: link.sh ARCHIVE LIBRARY [OPTION OF CC...]'
archive=${1:?$usage} library=${2:?$usage}
abi=$(cd "$(dirname "$0")/../.." && pwd)/cdylib/abi
case ${library##*/} in
# It begins before all others: docs/decisions/0021-shared-allocations.md.
libstarverbs-share.so) own=(-soname libstarverbs-share.so "--version-script=$abi/share.map" -z initfirst) ;;
*) own=(-soname libibverbs.so.1 "--version-script=$abi/libibverbs.map") ;;
esac

options=(
    "${own[@]}"
    # Threads of the card run this code: a program that closes the library must not unmap it under them.
    -z nodelete
    -z defs -z noexecstack -z relro -z now
    # All of the archive, then without what no exported symbol leads to.
    --whole-archive "$archive" --no-whole-archive --gc-sections
    --as-needed --eh-frame-hdr --build-id -O1
)
mkdir -p "$(dirname "$library")"
# Under its name only when it is whole, and as another file: programs that run keep the one that they have.
read -ra cc <<<"${CC:-cc}"
"${cc[@]}" -shared -o "$library.new" "${options[@]/#/-Wl,}" -lutil -lrt -lpthread -lm -ldl "${@:3}"
mv -f "$library.new" "$library"
