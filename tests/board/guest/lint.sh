#!/usr/bin/env bash
# The module's sources under sparse and checkpatch, neither of which may say anything, and built by DKMS, all
# for Debian 12's newest kernel. checkpatch is of the package of the kernel's sources; that compat.h compares
# versions of kernels is passed over. Installs what is missing (root).
# usage: lint.sh [CACHE]
set -euo pipefail
cd "$(dirname "$0")/../../.."
cache=$(realpath -m "${1:-${CARGO_TARGET_DIR:-target}/board-guest}")
failed=0

missing=()
for command in sparse dkms; do command -v $command >/dev/null || missing+=("$command"); done
if ((${#missing[@]})); then
    echo "installing: ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
        </dev/null >/dev/null
fi
release=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: linux-image-//p')
headers=/usr/src/linux-headers-$release

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

sources=$cache/module-sparse
rm -rf "$sources"
tests/board/guest/module.sh "$release" "$sources" 2>&1 | { grep -v '^Skipping BTF' || true; }
make -s -C "$sources" KDIR="$headers" clean
checked "sparse ($release)" make -s -C "$sources" KDIR="$headers" sparse

scripts=$cache/checkpatch
if [[ ! -e $scripts/checkpatch.pl ]]; then
    rm -rf "$scripts.new" && mkdir -p "$scripts.new"
    package=$(apt-cache depends linux-source | sed -n 's/^ *Depends: //p')
    (cd "$scripts.new" && apt-get download -qq "$package" 2>/dev/null)
    dpkg-deb --fsys-tarfile "$scripts.new"/*.deb |
        tar -xO --wildcards './usr/src/linux-source-*.tar.xz' | xz -dc |
        tar -x -C "$scripts.new" --strip-components=2 --wildcards '*/scripts/checkpatch.pl' \
            '*/scripts/spelling.txt' '*/scripts/const_structs.checkpatch'
    rm "$scripts.new"/*.deb
    mv "$scripts.new" "$scripts"
fi
checked checkpatch "$scripts/checkpatch.pl" --no-tree --strict --terse --quiet --max-line-length=110 \
    --ignore LINUX_VERSION_CODE,CONSTANT_COMPARISON -f kernel-shim/*.c kernel-shim/*.h
rm -f .checkpatch-camelcase.* kernel-shim/.checkpatch-camelcase.*

version=$(sed -n 's/^PACKAGE_VERSION="\(.*\)"/\1/p' kernel-shim/dkms.conf)
[[ $version == "$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)" ]] || {
    failed=1
    say dkms.conf "version $version is not the project's"
}
tree=$cache/dkms
rm -rf "$tree"
mkdir -p "$tree"/{tree,"source/starverbs-$version"/include}
cp kernel-shim/{Kbuild,Makefile,dkms.conf,*.c,*.h} "$tree/source/starverbs-$version/"
cp -r include/starverbs "$tree/source/starverbs-$version/include/"
dkms=(dkms --dkmstree "$tree/tree" --sourcetree "$tree/source" -m starverbs -v "$version")
if "${dkms[@]}" add >"$tree/log" 2>&1 && "${dkms[@]}" build -k "$release" >>"$tree/log" 2>&1 &&
    [[ -n $(find "$tree/tree/starverbs/$version/$release" -name 'starverbs.ko*') ]]; then
    say "DKMS ($release)" built
else
    failed=1
    say "DKMS ($release)" "$(tail -n 20 "$tree/log")"
fi
exit "$failed"
