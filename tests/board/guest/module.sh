#!/usr/bin/env bash
# Builds the kernel module for the kernel RELEASE in FOLDER, as DKMS would: from a copy of its sources beside
# the headers of the contract. Installs that kernel's headers if they are missing; or, if it is the kernel of
# the root folder ROOT, builds inside that. GOAL is the makefile's: modules, or sparse.
# usage: module.sh RELEASE FOLDER [ROOT [GOAL]]
set -euo pipefail
usage='usage: module.sh RELEASE FOLDER [ROOT [GOAL]]'
release=${1:?$usage} folder=$(realpath -m "${2:?$usage}") root=${3:-} goal=${4:-modules}
cd "$(dirname "$0")/../../.."
headers=/usr/src/linux-headers-$release
if [[ ! -e $root$headers/Makefile && -z $root ]]; then
    apt-get install -y -qq --no-install-recommends "linux-headers-$release" </dev/null >/dev/null
fi
mkdir -p "$folder"
cp -u kernel-shim/{Kbuild,Makefile,*.c,*.h} "$folder/"
mkdir -p "$folder/include"
cp -ru include/starverbs "$folder/include/"
if [[ -z $root ]]; then
    make -s -C "$folder" KDIR="$headers" "$goal" >&2
else
    # shellcheck disable=SC2016
    unshare --mount --propagation private bash -euc '
        mount --bind "$2" "$1/mnt"
        mount --rbind /proc "$1/proc"
        exec chroot "$1" make -s -C /mnt KDIR="$3" "$4"' bash "$root" "$folder" "$headers" "$goal" >&2
fi
