#!/usr/bin/env bash
# Real programs on the card: those of this host, then those of a newer Debian, in the folder ROOT or in one
# that is made under target/. Writes what came of both to TABLE. What cannot be had is skipped, and said so.
# Needs root.
# usage: all.sh [--table TABLE] [--root ROOT] [--filter RE] DIST
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target}
table='' root='' filter=()
while [[ ${1:-} == --* ]]; do
    case $1 in
    --table) table=$2 ;;
    --root) root=$2 ;;
    --filter) filter=(--filter "$2") ;;
    *) echo "all.sh: unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done
dist=${1:?usage: all.sh [--table TABLE] [--root ROOT] [--filter RE] DIST}
suite=forky
packages=ucx-utils,openmpi-bin,libopenmpi-dev,mpich,libmpich-dev,gcc,libc6-dev
packages+=,libfabric-bin,perftest,qperf,fio,rdma-core,ibverbs-utils,rdmacm-utils,mount,iproute2
results=("$target/apps-here.json")
failed=0
# With --filter, what is known of the other cases stays.
((${#filter[@]})) || rm -f "$target"/apps-{here,newer}.json

echo "=== the programs of this host"
tests/apps/run.py "${filter[@]}" --json "$target/apps-here.json" "$dist" || failed=1

if [[ -z $root ]]; then
    root=$target/apps-root
    tools/scripts/root.sh "$root" "$suite" "$packages" || root=''
fi
if [[ -n $root ]]; then
    echo "=== the programs of $suite"
    tests/apps/run.py "${filter[@]}" --root "$root" --json "$target/apps-newer.json" "$dist" || failed=1
    results+=("$target/apps-newer.json")
else
    echo "all.sh: a newer Debian's programs are skipped: no root folder" >&2
fi

[[ -z $table ]] || tests/apps/page.py "$table" "${results[@]}"
exit "$failed"
