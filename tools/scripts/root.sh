#!/usr/bin/env bash
# Makes a root folder with a Debian suite, for programs that are newer, or of another
# architecture, than this host's.
# ARCHS is dpkg's name (`arm64`), or several (`amd64,arm64`: the first runs, packages of the others are
# `NAME:arm64`). A folder that has what is asked for is kept. The packages' files are cached in
# target/root-cache. The mirror is that of this host's apt, or MIRROR=. Then: chroot FOLDER COMMAND. Needs
# root; where it cannot be had, it exits with 2.
# usage: root.sh FOLDER SUITE [PACKAGE,PACKAGE...] [ARCHS]
set -euo pipefail
usage='usage: root.sh FOLDER SUITE [PACKAGE,PACKAGE...] [ARCHS]'
root=$(realpath -m "${1:?$usage}") suite=${2:?$usage} packages=${3:-}
host=$(dpkg --print-architecture 2>/dev/null) || host=unknown
archs=${4:-$host}
cd "$(dirname "$0")/../.."
cache=$(realpath -m "${CARGO_TARGET_DIR:-target}/root-cache")
wanted="$suite $archs $(tr ',' '\n' <<<"$packages" | sort -u | paste -sd,)"

unavailable() {
    echo "root.sh: $*" >&2
    exit 2
}

# Installs what is missing here, where that may be done.
install_here() {
    command -v apt-get >/dev/null || unavailable "please install $* (names of Debian's packages)"
    apt-get update -qq || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
        --no-install-recommends "$@" </dev/null >/dev/null ||
        unavailable "$* cannot be installed"
}

# Foreign programs run by binfmt_misc.
emulate() {
    command -v arch-test >/dev/null || install_here arch-test
    arch-test "$1" >/dev/null 2>&1 && return
    install_here qemu-user-static binfmt-support
    [[ -e /proc/sys/fs/binfmt_misc/register ]] ||
        mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc ||
            unavailable "the kernel has no binfmt_misc"
    update-binfmts --enable
    arch-test "$1" >/dev/null 2>&1 ||
        unavailable "programs of $1 do not run here, in spite of qemu-user-static"
}

# The first mirror of apt's sources, in either of their formats.
mirror() {
    { cat /etc/apt/sources.list.d/debian*.sources /etc/apt/sources.list /etc/apt/sources.list.d/* \
        2>/dev/null || true; } |
        sed -nE 's/^URIs: *([^ ]+).*/\1/p; s/^deb +(\[[^]]*\] +)?([^ ]+) .*/\2/p' | head -n 1
}

if [[ -e $root/.root && $(<"$root/.root") == "$wanted" ]]; then
    exit 0
fi
((EUID == 0)) || unavailable "a root folder needs root"
command -v mmdebstrap >/dev/null || install_here mmdebstrap
first=${archs%%,*}
[[ $first == "$host" ]] || emulate "$first"
mirror=${MIRROR:-$(mirror)}
[[ -n $mirror ]] || unavailable "apt's sources name no mirror; set MIRROR="

# A half-made folder never stands under its name. What is mounted while it is made goes with the namespace.
rm -rf --one-file-system "$root.new"
mkdir -p "$cache/archives" "$(dirname "$root")"
exec 9>"$cache/lock"
flock 9
# shellcheck disable=SC2016 # the hooks' own variables
# A mirror's copy of a suite may be some weeks old, so its date is not looked at.
unshare --mount --propagation private mmdebstrap --quiet --variant=apt --arch="$archs" \
    ${packages:+--include="$packages"} \
    --aptopt='APT::Install-Recommends "false"' --aptopt='Acquire::Check-Valid-Until "false"' \
    --skip=download/empty --skip=essential/unlink \
    --setup-hook='mkdir -p "$1/var/cache/apt/archives"' \
    --setup-hook="sync-in '$cache/archives' /var/cache/apt/archives" \
    --customize-hook="sync-out /var/cache/apt/archives '$cache/archives'" \
    --customize-hook='rm -f "$1"/var/cache/apt/archives/*.deb' \
    "$suite" "$root.new" "$mirror" || {
    rm -rf --one-file-system "$root.new"
    unavailable "the root folder of $suite cannot be made"
}
echo "$wanted" >"$root.new/.root"
rm -rf --one-file-system "$root"
mv "$root.new" "$root"
