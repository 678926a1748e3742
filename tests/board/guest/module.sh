#!/usr/bin/env bash
# Builds the kernel module for the kernel RELEASE in FOLDER, as DKMS would: from a copy of its sources beside
# the headers of the contract. Installs that kernel's headers if they are missing.
# usage: module.sh RELEASE FOLDER
set -euo pipefail
usage='usage: module.sh RELEASE FOLDER'
release=${1:?$usage} folder=$(realpath -m "${2:?$usage}")
cd "$(dirname "$0")/../../.."
headers=/usr/src/linux-headers-$release
if [[ ! -e $headers/Makefile ]]; then
    apt-get install -y -qq --no-install-recommends "linux-headers-$release" </dev/null >/dev/null
fi
mkdir -p "$folder"
cp -u kernel-shim/{Kbuild,Makefile,*.c,*.h} "$folder/"
mkdir -p "$folder/include"
cp -ru include/starverbs "$folder/include/"
make -s -C "$folder" KDIR="$headers" modules >&2
