#!/usr/bin/env bash
# Runs the tests of a newer rdma-core than this host's: run.py inside ROOT, a folder with a newer Debian that
# has python3-pyverbs, rdma-core (with its documentation) and iproute2, for instance of
#   mmdebstrap --variant=apt --include=python3-pyverbs,rdma-core,iproute2 forky ROOT
# What it mounts there is gone when it ends. Needs root.
# usage: newer.sh ROOT LIBRARY_DIRECTORY [TABLE]
set -euo pipefail
root=$(cd "${1:?usage: newer.sh ROOT LIBRARY_DIRECTORY [TABLE]}" && pwd)
lib=$(cd "${2:?usage: newer.sh ROOT LIBRARY_DIRECTORY [TABLE]}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
table=${3:-}
written=$(mktemp -d)
trap 'rm -rf "$written"' EXIT

# shellcheck disable=SC2016
unshare --mount --propagation private bash -euc '
    root=$1 here=$2 lib=$3 written=$4
    for folder in dev proc sys; do mount --rbind "/$folder" "$root/$folder"; done
    mount -t tmpfs tmpfs "$root/tmp"
    mkdir "$root"/tmp/{pyverbs,lib,written}
    mount --bind "$here" "$root/tmp/pyverbs"
    mount --bind "$lib" "$root/tmp/lib"
    mount --bind "$written" "$root/tmp/written"
    exec chroot "$root" /usr/bin/python3 /tmp/pyverbs/run.py --table /tmp/written/table.md /tmp/lib
' bash "$root" "$here" "$lib" "$written" || failed=$?
[[ -z $table || ! -e $written/table.md ]] || cp "$written/table.md" "$table"
exit "${failed:-0}"
