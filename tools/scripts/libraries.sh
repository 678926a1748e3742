#!/usr/bin/env bash
# Makes the folder of libraries from the archives that cargo built:
#   libibverbs.so.1           for programs that link or open it in this folder, with the other names as links
#   libstarverbs.so           for LD_PRELOAD
#   libstarverbs-share.so     for LD_PRELOAD before that, where large allocations are to be shared memory
#   preload/                  all names once more, as links to that: a program that opens one of them later
#                             gets the library that it has already, not a second card
# usage: libraries.sh ARCHIVE_DIRECTORY LIBRARY_DIRECTORY
set -euo pipefail
usage='usage: libraries.sh ARCHIVE_DIRECTORY LIBRARY_DIRECTORY'
archives=${1:?$usage} lib=${2:?$usage}
here=$(dirname "$0")

"$here/link.sh" "$archives/libstarverbs.a" "$lib/libibverbs.so.1"
"$here/link.sh" "$archives/libstarverbs_preload.a" "$lib/libstarverbs.so"
"$here/link.sh" "$archives/libstarverbs_share.a" "$lib/libstarverbs-share.so"
mkdir -p "$lib/preload"
for name in libibverbs.so librdmacm.so.1 librdmacm.so; do ln -sf libibverbs.so.1 "$lib/$name"; done
for name in libibverbs.so.1 libibverbs.so librdmacm.so.1 librdmacm.so; do
    ln -sf ../libstarverbs.so "$lib/preload/$name"
done
