#!/usr/bin/env bash
# Makes a Debian package of what `make build` made, in DIST (dist), for the machine that it was built for.
# DEBFULLNAME and DEBEMAIL say who maintains it, as for Debian's own tools; otherwise it is the last
# commit's author.
# usage: deb.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
dist=${DIST:-dist}
scripts=tools/scripts

fail() { echo "deb.sh: $*" >&2; exit 1; }

[[ -x $dist/bin/starverbs ]] || fail "$dist is not whole: \`make build\` first"
command -v dpkg-deb >/dev/null || fail "dpkg-deb is missing: install dpkg"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
machine=$("$scripts/elf.sh" machine "$dist/bin/starverbs")
case $machine in
x86_64) arch=amd64 ;;
aarch64) arch=arm64 ;;
esac
name=${DEBFULLNAME:-the starverbs authors}
email=${DEBEMAIL:-$(git log -1 --format=%ae 2>/dev/null || true)}
[[ -n $email ]] || fail "say who maintains the package: DEBEMAIL="
# The same commit gives the same package.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
chmod 755 "$tree"
umask 022
DESTDIR=$tree PREFIX=/usr DIST=$dist PKGCONFIGDIR=/usr/lib/$machine-linux-gnu/pkgconfig \
    ZSHDIR=/usr/share/zsh/vendor-completions "$scripts/install.sh" install
files=("$tree"/usr/bin/starverbs
    "$tree"/usr/lib/starverbs/{libibverbs.so.1,libstarverbs.so,libstarverbs-share.so})
"$scripts/elf.sh" strip "${files[@]}"
glibc=$("$scripts/elf.sh" glibc "${files[@]}")

doc=$tree/usr/share/doc/starverbs
mkdir -p "$doc"
gzip -9n "$tree"/usr/share/man/man*/*
"$scripts/notices.py" | gzip -9n >"$doc/crates.txt.gz"
gzip -9nc <<CHANGES >"$doc/changelog.gz"
starverbs ($version) unstable; urgency=medium

  * Release $version. What is in it: CHANGES.md.gz.

 -- $name <$email>  $(LC_ALL=C date -Rud "@$SOURCE_DATE_EPOCH")
CHANGES
gzip -9nc CHANGELOG.md >"$doc/CHANGES.md.gz"
{
    cat <<COPYRIGHT
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: starverbs
Comment: The crates that the command and the libraries carry have licences of their own, all of them
 permissive: crates.txt.gz beside this file.

Files: *
Copyright: 2026 the starverbs authors
License: Apache-2.0 or Expat

License: Apache-2.0
 On Debian systems the full text is in /usr/share/common-licenses/Apache-2.0.

License: Expat
COPYRIGHT
    sed '1,/^Permission/{/^Permission/!d}; s/^$/./; s/^/ /' LICENSE-MIT
} >"$doc/copyright"

mkdir "$tree/DEBIAN"
cat >"$tree/DEBIAN/control" <<CONTROL
Package: starverbs
Version: $version
Section: net
Priority: optional
Architecture: $arch
Maintainer: $name <$email>
Installed-Size: $(du -k --apparent-size -s "$tree" | cut -f 1)
Depends: libc6 (>= $glibc), libgcc-s1 (>= 4.2)
Suggests: ibverbs-utils, libibverbs-dev, perftest, rdmacm-utils
Description: RDMA verbs without RDMA hardware
 The command starverbs runs existing RDMA programs on a network card in
 software: a library that they load instead of libibverbs and librdmacm. It
 needs no RDMA hardware, no kernel module and no root, and the programs are
 not changed. The wire is RoCEv2 over UDP.
 .
 The libraries lie in a folder of their own; programs that are not started by
 the command see the system's.
CONTROL
(cd "$tree" && find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum >DEBIAN/md5sums)
find "$tree" -newermt "@$SOURCE_DATE_EPOCH" -exec touch -hd "@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group -Zxz --build "$tree" "$dist/starverbs_${version}_$arch.deb" >/dev/null
echo "$dist/starverbs_${version}_$arch.deb"
