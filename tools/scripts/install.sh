#!/usr/bin/env bash
# Installs what `make build` made, or removes it. From the environment:
#   DESTDIR       a folder that stands for / (packages are staged in one)
#   PREFIX        /usr/local
#   DIST          the folder to install from: dist
#   PKGCONFIGDIR  where pkg-config looks: $PREFIX/lib/pkgconfig
#   ZSHDIR        where zsh looks: $PREFIX/share/zsh/site-functions
# The libraries' folder is private: no other program finds them in place of the system's libibverbs.
# usage: install.sh install|uninstall
set -euo pipefail
usage='usage: install.sh install|uninstall'
what=${1:?$usage}
cd "$(dirname "$0")/../.."
destdir=${DESTDIR:-} prefix=${PREFIX:-/usr/local} dist=${DIST:-dist}
bin=$prefix/bin lib=$prefix/lib/starverbs include=$prefix/include man=$prefix/share/man
pkgconfig=${PKGCONFIGDIR:-$prefix/lib/pkgconfig}
bash=$prefix/share/bash-completion/completions
zsh=${ZSHDIR:-$prefix/share/zsh/site-functions}
fish=$prefix/share/fish/vendor_completions.d
links=(libibverbs.so librdmacm.so.1 librdmacm.so)
preloaded=(libibverbs.so.1 "${links[@]}")
pages=(docs/man/*.[0-9])

fail() { echo "install.sh: $*" >&2; exit 1; }

# The completions for a shell. Those of another machine's command are those of this machine's.
completions() {
    local command
    for command in "$dist" dist; do
        "$command/bin/starverbs" completions "$1" 2>/dev/null && return
    done
    fail "$dist/bin/starverbs does not run here, to say its completions: \`make build\` makes one that does"
}

version() { sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1; }

# Writes its input to a file: put MODE FILE. A new file: programs that run keep the one that they have.
put() {
    mkdir -p "$(dirname "$destdir$2")"
    rm -f "$destdir$2"
    cat >"$destdir$2"
    chmod "$1" "$destdir$2"
}

all() {
    local file link page shell_files
    for file in bin/starverbs lib/libibverbs.so.1 lib/libstarverbs.so lib/libstarverbs-share.so; do
        [[ -e $dist/$file ]] || fail "there is no $dist/$file: \`make build\` first"
    done
    [[ $prefix == /* ]] || fail "PREFIX is '$prefix', not a path from /"
    # Before anything is written.
    shell_files=$(mktemp -d)
    # shellcheck disable=SC2064 # its value now
    trap "rm -rf '$shell_files'" EXIT
    completions bash >"$shell_files/bash"
    completions zsh >"$shell_files/zsh"
    completions fish >"$shell_files/fish"

    put 755 "$bin/starverbs" <"$dist/bin/starverbs"
    put 644 "$lib/libibverbs.so.1" <"$dist/lib/libibverbs.so.1"
    put 644 "$lib/libstarverbs.so" <"$dist/lib/libstarverbs.so"
    put 644 "$lib/libstarverbs-share.so" <"$dist/lib/libstarverbs-share.so"
    for link in "${links[@]}"; do ln -sf libibverbs.so.1 "$destdir$lib/$link"; done
    mkdir -p "$destdir$lib/preload"
    for link in "${preloaded[@]}"; do ln -sf ../libstarverbs.so "$destdir$lib/preload/$link"; done
    # What runs kernels of one's own: `make wasm`.
    if [[ -e $dist/lib/libstarverbs-wasm.so ]]; then
        put 644 "$lib/libstarverbs-wasm.so" <"$dist/lib/libstarverbs-wasm.so"
    fi
    put 644 "$include/infiniband/stardv.h" <include/infiniband/stardv.h
    put 644 "$include/starverbs/kernel.h" <include/starverbs/kernel.h
    sed "s|@PREFIX@|$prefix|; s|@VERSION@|$(version)|" tools/scripts/starverbs.pc.in |
        put 644 "$pkgconfig/starverbs.pc"
    for page in "${pages[@]}"; do put 644 "$man/man${page##*.}/${page##*/}" <"$page"; done
    put 644 "$bash/starverbs" <"$shell_files/bash"
    put 644 "$zsh/_starverbs" <"$shell_files/zsh"
    put 644 "$fish/starverbs.fish" <"$shell_files/fish"
}

none() {
    local page
    rm -f "$destdir$bin/starverbs" "$destdir$include"/{infiniband/stardv,starverbs/kernel}.h \
        "$destdir$pkgconfig/starverbs.pc" \
        "$destdir$bash/starverbs" "$destdir$zsh/_starverbs" "$destdir$fish/starverbs.fish" \
        "$destdir$lib"/{libibverbs.so.1,libstarverbs.so,libstarverbs-share.so,libstarverbs-wasm.so}
    rm -f "${links[@]/#/$destdir$lib/}" "${preloaded[@]/#/$destdir$lib/preload/}"
    for page in "${pages[@]}"; do rm -f "$destdir$man/man${page##*.}/${page##*/}"; done
    # Folders that others share stay.
    [[ ! -d $destdir$lib/preload ]] || rmdir --ignore-fail-on-non-empty "$destdir$lib/preload"
    [[ ! -d $destdir$lib ]] || rmdir --ignore-fail-on-non-empty "$destdir$lib"
    for page in infiniband starverbs; do
        [[ ! -d $destdir$include/$page ]] || rmdir --ignore-fail-on-non-empty "$destdir$include/$page"
    done
}

case $what in
install) all ;;
uninstall) none ;;
*) echo "$usage" >&2; exit 2 ;;
esac
