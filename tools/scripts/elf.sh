#!/usr/bin/env bash
# What packages have to know of programs and libraries, of any machine: which it is, and which glibc they
# need.
#   machine FILE      x86_64, aarch64
#   glibc FILE...     the newest version of glibc that one of them imports a symbol of, as 2.34
#   strip FILE...     removes what only debuggers need, by STRIP or by what is installed for that machine
# usage: elf.sh machine|glibc|strip FILE...
set -euo pipefail
usage='usage: elf.sh machine|glibc|strip FILE...'
what=${1:?$usage} file=${2:?$usage}

fail() { echo "elf.sh: $*" >&2; exit 1; }

machine() {
    case $(LC_ALL=C readelf -h "$1") in
    *X86-64*) echo x86_64 ;;
    *AArch64*) echo aarch64 ;;
    *) fail "$1 is of no machine that starverbs knows" ;;
    esac
}

strip_of() {
    local strip
    if [[ -n ${STRIP:-} ]]; then echo "$STRIP"; return; fi
    [[ $1 != "$(uname -m)" ]] || { echo strip; return; }
    for strip in "$1-linux-gnu-strip" llvm-strip; do
        command -v "$strip" && return
    done
    fail "no strip for $1: install binutils-${1/_/-}-linux-gnu, or name one by STRIP="
}

case $what in
machine) machine "$file" ;;
glibc)
    LC_ALL=C readelf -VW "${@:2}" |
        grep -oE 'Name: GLIBC_[0-9.]+' | sed 's/.*_//' | sort -uV | tail -n 1
    ;;
strip)
    strip=$(strip_of "$(machine "$file")")
    "$strip" --strip-unneeded --remove-section=.comment --remove-section=.note "${@:2}"
    ;;
*) echo "$usage" >&2; exit 2 ;;
esac
