#!/usr/bin/env bash
# The module's sources under sparse and checkpatch, neither of which may say anything, and added, built and
# installed by DKMS, as kernel-shim/README.md says, all for Debian 12's newest kernel. With ROOT, a root
# folder of a newer Debian, sparse and checkpatch are that folder's, for its kernel. checkpatch is of the
# package of the kernel's sources; that compat.h compares versions of kernels is passed over. Installs what is
# missing (root).
# usage: lint.sh [CACHE [ROOT]]
set -euo pipefail
cd "$(dirname "$0")/../../.."
cache=$(realpath -m "${1:-${CARGO_TARGET_DIR:-target}/board-guest}") root=${2:-}
[[ -z $root ]] || root=$(realpath "$root")
failed=0

say() { printf '%s: %s\n' "$1" "$2"; }

# Its output is a file's name, and what is wrong there.
checked() {
    local name=$1 said
    shift
    said=$("$@" 2>&1 | grep -vE '^Skipping BTF|^total: 0 errors, 0 warnings, 0 checks') || true
    if [[ -z $said ]]; then
        say "$name" clean
    else
        failed=1
        say "$name" "$said"
    fi
}

# Fetches the scripts of a kernel's sources, of ROOT's suite or this host's, into $scripts.
fetch_checkpatch() {
    local get=(env) package
    if [[ -n $root ]]; then
        get=(chroot "$root")
        "${get[@]}" apt-get update -qq -o Acquire::Check-Valid-Until=false
    fi
    rm -rf "$scripts.new" && mkdir -p "$scripts.new"
    package=$("${get[@]}" apt-cache depends linux-source | sed -n 's/^ *Depends: //p' | head -n 1)
    if [[ -z $root ]]; then
        (cd "$scripts.new" && apt-get download -qq "$package" 2>/dev/null)
    else
        chroot "$root" sh -c 'cd /tmp && apt-get download -qq "$1" 2>/dev/null' sh "$package"
        mv "$root/tmp/$package"_*.deb "$scripts.new/"
    fi
    dpkg-deb --fsys-tarfile "$scripts.new"/*.deb |
        tar -xO --wildcards './usr/src/linux-source-*.tar.xz' | xz -dc |
        tar -x -C "$scripts.new" --strip-components=2 --wildcards '*/scripts/checkpatch.pl' \
            '*/scripts/spelling.txt' '*/scripts/const_structs.checkpatch'
    rm "$scripts.new"/*.deb
    mv "$scripts.new" "$scripts"
}

# By the steps of kernel-shim/README.md, in folders below $tree.
try_dkms() {
    local version source dkms
    version=$(sed -n 's/^PACKAGE_VERSION="\(.*\)"/\1/p' kernel-shim/dkms.conf)
    [[ $version == "$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)" ]] || {
        failed=1
        say dkms.conf "version $version is not the project's"
    }
    tree=$cache/dkms source=$cache/dkms/source/starverbs-$version
    rm -rf "$tree"
    mkdir -p "$tree"/{tree,"modules/$release"} "$source/include"
    cp kernel-shim/{Kbuild,Makefile,dkms.conf,*.c,*.h} "$source/"
    cp -r include/starverbs "$source/include/"
    dkms=(dkms --dkmstree "$tree/tree" --sourcetree "$tree/source" --installtree "$tree/modules" --no-depmod)
    for step in add build install; do
        "${dkms[@]}" "$step" -m starverbs -v "$version" -k "$release" || return 1
    done >"$tree/log" 2>&1
    [[ -n $(find "$tree/modules/$release/updates" -name 'starverbs.ko*') ]]
}

missing=()
for command in sparse dkms; do command -v $command >/dev/null || missing+=("$command"); done
if [[ -z $root ]] && ((${#missing[@]})); then
    echo "installing: ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
        </dev/null >/dev/null
fi
if [[ -z $root ]]; then
    release=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: linux-image-//p')
else
    release=$(basename "$(find "$root/boot" -name 'vmlinuz-*' | head -n 1)")
    release=${release#vmlinuz-}
fi

# Kbuild asks this script of the kernel's sources whether sparse is as new as it should be; Debian's headers
# of 7.2 have lost it.
valid=$root/usr/src/linux-headers-${release%-*}-common/scripts/checker-valid.sh
if [[ -n $root && ! -e $valid ]]; then
    printf '#!/bin/sh\necho 1\n' >"$valid"
    chmod +x "$valid"
fi

sources=$cache/module-sparse${root:+-newest}
rm -rf "$sources"
tests/board/guest/module.sh "$release" "$sources" "$root" 2>&1 | { grep -v '^Skipping BTF' || true; }
tests/board/guest/module.sh "$release" "$sources" "$root" clean
checked "sparse ($release)" tests/board/guest/module.sh "$release" "$sources" "$root" sparse

scripts=$cache/checkpatch${root:+-newest}
[[ -e $scripts/checkpatch.pl ]] || fetch_checkpatch
# What newer kernels' checkpatch wants in kzalloc's place, 6.1 has not.
ignore=LINUX_VERSION_CODE,CONSTANT_COMPARISON${root:+,ALLOC_WITH_SIZEOF}
checked "checkpatch ($release)" "$scripts/checkpatch.pl" --no-tree --strict --terse --quiet \
    --max-line-length=110 --ignore "$ignore" -f kernel-shim/*.c kernel-shim/*.h
rm -f .checkpatch-camelcase.* kernel-shim/.checkpatch-camelcase.*

if [[ -z $root ]]; then
    if try_dkms; then
        say "DKMS ($release)" installed
    else
        failed=1
        say "DKMS ($release)" "$(tail -n 20 "$tree/log")"
    fi
fi
exit "$failed"
