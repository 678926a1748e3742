#!/usr/bin/env bash
# Installs in each way that there is, runs programs on what was installed, removes it again, and looks what
# is left.
#   quick    below a folder, without root: `make install DESTDIR=`
#   install  the same in a bare root folder of Debian 12
#   deb      there, the package of `make deb`, at which lintian looks first
#   wheel    there, the wheel of `make wheel` in a virtual environment
#   ci       there, examples/ci/setup.sh, with both
# The root folder is cached in the build folder, each trial has a copy of it, without a network but its own
# loopback; ARCH=arm64 makes it one of that machine, which needs qemu-user-static elsewhere. What needs root
# is skipped without it, and said.
# usage: run.sh DIST [quick|install|deb|wheel|ci]...
set -euo pipefail
dist=$(cd "${1:?usage: run.sh DIST [quick|install|deb|wheel|ci]...}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
declare -A machines=([amd64]=x86_64 [arm64]=aarch64) archs=([x86_64]=amd64 [aarch64]=arm64)
arch=${ARCH:-${archs[$(uname -m)]:-}}
target=$(realpath -m "${CARGO_TARGET_DIR:-$root/target}")
tmp=$(mktemp -d)
trap 'rm -rf --one-file-system "$tmp"' EXIT
# mktemp's folder is its maker's alone; programs in the root folder run as others, too.
chmod 755 "$tmp"

fail() { echo "run.sh: $*" >&2; exit 1; }

# All files below a folder, but for what package managers note of their work.
files() {
    (
        cd "$1"
        find . -xdev \( -path ./var/lib/dpkg -o -path ./var/log -o -path ./var/cache -o -path ./tmp \) \
            -prune -o -print | LC_ALL=C sort
    )
}

# Fails if a folder's files are others than before: nothing_left FOLDER WHAT.
nothing_left() { files "$1" | diff "$tmp/before" - >"$tmp/left" || fail "$2 leaves: $(cat "$tmp/left")"; }

quick() {
    local stage=$tmp/stage prefix=/opt/card installed completed left
    installed=$stage$prefix
    mkdir -p "$installed"/{bin,lib/pkgconfig,include,share}
    DESTDIR=$stage PREFIX=$prefix DIST=$dist "$root/tools/scripts/install.sh" install
    "$here/inside.sh" "$installed/bin/starverbs"
    completed=$(bash -c ". $installed/share/bash-completion/completions/starverbs
        COMP_WORDS=(starverbs inf) COMP_CWORD=1
        _starverbs starverbs inf starverbs
        echo \${COMPREPLY[*]}")
    [[ $completed == info ]] || fail "bash completes 'starverbs inf' as '$completed'"
    if command -v zsh >/dev/null; then zsh -n "$installed/share/zsh/site-functions/_starverbs"; fi
    if command -v fish >/dev/null; then
        fish --no-execute "$installed/share/fish/vendor_completions.d/starverbs.fish"
    fi
    # A direct-verbs program, by pkg-config where that is.
    if command -v pkg-config >/dev/null && [[ -e /usr/include/infiniband/verbs.h ]]; then
        printf '%s\n' '#include <infiniband/stardv.h>' \
            'int main(void) { return stardv_is_supported(0); }' >"$tmp/dv.c"
        # shellcheck disable=SC2046
        cc -o "$tmp/dv" "$tmp/dv.c" $(PKG_CONFIG_PATH=$installed/lib/pkgconfig pkg-config \
            --define-variable=prefix="$installed" --cflags --libs starverbs)
        "$installed/bin/starverbs" run -- "$tmp/dv"
    else
        echo "skipped: a program by pkg-config (pkg-config or libibverbs-dev is not installed)"
    fi
    DESTDIR=$stage PREFIX=$prefix DIST=$dist "$root/tools/scripts/install.sh" uninstall
    left=$(cd "$installed" && find . ! -type d -o -name starverbs -o -name infiniband)
    [[ -z $left ]] || fail "uninstall leaves: $left"
}

# A copy of the root folder, and what its files are.
fresh() {
    "$root/tools/scripts/root.sh" "$target/root-install-$arch" bookworm ibverbs-utils,python3-venv "$arch"
    rm -rf --one-file-system "$tmp/root"
    cp -a "$target/root-install-$arch" "$tmp/root"
    mkdir "$tmp/root/tmp/install"
    cp "$here/inside.sh" "$root/examples/ci/setup.sh" "$tmp/root/tmp/install/"
    files "$tmp/root" >"$tmp/before"
}

# Runs a command in the root folder, with namespaces of its own: what it mounts and starts goes with it.
inside() {
    # shellcheck disable=SC2016 # the inner shell's
    unshare --mount --net --pid --fork --kill-child bash -c '
        set -e
        ip link set lo up
        mount -t proc proc "$0/proc"
        mount --rbind /dev "$0/dev"
        mount --rbind /sys "$0/sys"
        exec env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root LC_ALL=C.UTF-8 \
            PYTHONDONTWRITEBYTECODE=1 chroot "$0" "$@"' "$tmp/root" "$@"
}

install_tree() {
    fresh
    DESTDIR=$tmp/root DIST=$dist PREFIX=/usr/local "$root/tools/scripts/install.sh" install
    inside /tmp/install/inside.sh starverbs
    DESTDIR=$tmp/root DIST=$dist PREFIX=/usr/local "$root/tools/scripts/install.sh" uninstall
    # Folders that others share stay.
    find "$tmp/root/usr/local" -type d -empty -delete
    (cd "$target/root-install-$arch" && find usr/local -type d) | (cd "$tmp/root" && xargs mkdir -p)
    nothing_left "$tmp/root" "make uninstall"
}

# The one package of a kind that there is: package PATTERN.
package() {
    local found
    found=$(compgen -G "$dist/$1") || fail "there is no $dist/$1: \`make deb wheel\` first"
    [[ $(wc -l <<<"$found") == 1 ]] || fail "which is to be tried? Remove others: $found"
    echo "$found"
}

deb() {
    local file
    file=$(package "starverbs_*_$arch.deb")
    if command -v lintian >/dev/null; then
        # Of what the compiler of C does when it is told to, a Rust program has nothing.
        lintian --allow-root --fail-on error,warning,info \
            --suppress-tags hardening-no-fortify-functions "$file"
    else
        echo "skipped: lintian is not installed"
    fi
    fresh
    cp "$file" "$tmp/root/tmp/install/starverbs.deb"
    inside dpkg -i /tmp/install/starverbs.deb
    inside /tmp/install/inside.sh starverbs
    inside dpkg --verify starverbs
    inside dpkg -P starverbs
    nothing_left "$tmp/root" "dpkg -P starverbs"
}

wheel() {
    local file
    file=$(package "starverbs-*_${machines[$arch]}.whl")
    fresh
    cp "$file" "$tmp/root/tmp/install/"
    inside python3 -m venv /tmp/install/venv
    cp "$tmp/before" "$tmp/before.root"
    files "$tmp/root/tmp/install/venv" >"$tmp/before"
    inside /tmp/install/venv/bin/pip install --no-index "/tmp/install/${file##*/}"
    inside /tmp/install/inside.sh /tmp/install/venv/bin/starverbs
    # In an environment that is active, by the command's name.
    inside bash -c '. /tmp/install/venv/bin/activate && starverbs run -- python -c "
import ctypes, os
count = ctypes.c_int()
assert ctypes.CDLL(\"libibverbs.so.1\").ibv_get_device_list(ctypes.byref(count)) and count.value == 1
assert os.listdir(\"/sys/class/infiniband\") == [\"star0\"]"'
    inside /tmp/install/venv/bin/pip uninstall -y starverbs
    find "$tmp/root/tmp/install/venv" -depth -type d -empty -delete
    (cd "$tmp/root/tmp/install/venv" && find . ! -type d | LC_ALL=C sort) >"$tmp/after"
    LC_ALL=C comm -13 "$tmp/before" "$tmp/after" >"$tmp/left"
    [[ ! -s $tmp/left ]] || fail "pip uninstall leaves: $(cat "$tmp/left")"
    cp "$tmp/before.root" "$tmp/before"
    nothing_left "$tmp/root" "the wheel"
}

# What the examples for CI do, with a package that is at hand.
ci() {
    local deb wheel file
    deb=$(package "starverbs_*_$arch.deb")
    wheel=$(package "starverbs-*_${machines[$arch]}.whl")
    fresh
    for file in "$deb" "$wheel"; do
        cp "$file" "$tmp/root/tmp/install/"
        inside /tmp/install/setup.sh "/tmp/install/${file##*/}"
    done
}

for part in "${@:2}"; do
    case $part in
    quick) echo "--- $part"; quick ;;
    install | deb | wheel | ci)
        if ((EUID != 0)); then echo "skipped: $part (a root folder needs root)"; continue; fi
        echo "--- $part"
        case $part in
        install) install_tree ;;
        *) "$part" ;;
        esac
        ;;
    *) echo "unknown part $part" >&2; exit 2 ;;
    esac
done
