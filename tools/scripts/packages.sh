#!/usr/bin/env bash
# Installs what a purpose needs and this machine lacks.
# usage: packages.sh demo|test|stress|bench|instructions|interop|install|apps|aarch64|board-guest
set -euo pipefail

declare -A package_of=(
    [cc]=gcc [ibv_devinfo]=ibverbs-utils [ib_send_lat]=perftest [ip]=iproute2 [rdma]=iproute2
    [iptables]=iptables [tshark]=tshark [nm]=binutils [ld.lld]=lld [mold]=mold [runuser]=util-linux
    [ucx_perftest]=ucx-utils [fi_pingpong]=libfabric-bin [fi_info]=libfabric-bin
    [rping]=rdmacm-utils [valgrind]=valgrind [strace]=strace [ibstat]=infiniband-diags
    [pkg-config]=pkg-config [mmdebstrap]=mmdebstrap [make]=make [lintian]=lintian
    [mpirun.openmpi]=openmpi-bin [mpicc.openmpi]=libopenmpi-dev [mpirun.mpich]=mpich
    [mpicc.mpich]=libmpich-dev
    [aarch64-linux-gnu-gcc]=gcc-aarch64-linux-gnu [qemu-aarch64-static]=qemu-user-static
    [cmake]=cmake [qperf]=qperf [fio]=fio [python3]=python3 [taskset]=util-linux
    [redis-check-rdb]=redis-tools [openssl]=openssl [qemu-system-x86_64]=qemu-system-x86
    [busybox]=busybox-static [clang]=clang [udevadm]=udev
)
demo=(cc ibv_devinfo ib_send_lat)
headers=/usr/include/infiniband/verbs.h
cm_headers=/usr/include/rdma/rdma_cma.h
pyverbs=/usr/lib/python3/dist-packages/pyverbs
rdma_core=/usr/share/doc/rdma-core
case ${1:-} in
demo) commands=("${demo[@]}") ;;
test) commands=("${demo[@]}" rping ip rdma tshark nm ld.lld mold runuser ibstat ucx_perftest fi_info
    pkg-config python3 redis-check-rdb clang openssl) ;;
stress) commands=("${demo[@]}" ip valgrind) ;;
bench) commands=("${demo[@]}" ucx_perftest fi_pingpong ip iptables openssl) ;;
instructions) commands=("${demo[@]}" valgrind strace) ;;
install) commands=(cc nm ip mmdebstrap lintian python3) ;;
apps) commands=("${demo[@]}" ip taskset python3 cmake pkg-config ucx_perftest fi_pingpong qperf fio
    mpirun.openmpi mpicc.openmpi mpirun.mpich mpicc.mpich) ;;
aarch64) commands=("${demo[@]}" ip mmdebstrap lintian python3)
    [[ $(uname -m) == aarch64 ]] || commands+=(aarch64-linux-gnu-gcc qemu-aarch64-static) ;;
board-guest) commands=("${demo[@]}" rping ip make busybox mmdebstrap python3 udevadm) ;;
interop) commands=("${demo[@]}" rping ip tshark qemu-system-x86_64 busybox) ;;
*) sed -n 's/^# usage:/usage:/p' "$0" >&2; exit 2 ;;
esac

if ! command -v cargo >/dev/null; then
    echo "cargo is missing: install a Rust toolchain first" \
        "(https://rustup.rs, or your distribution's package)" >&2
    exit 1
fi

missing=()
for command in "${commands[@]}"; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$command" >/dev/null || missing+=("${package_of[$command]}")
done
[[ $1 != @(test|stress|interop|bench|apps) || -e $headers ]] || missing+=(libibverbs-dev)
[[ $1 != test || -e $cm_headers ]] || missing+=(librdmacm-dev)
[[ $1 != @(test|board-guest) || -e $pyverbs ]] || missing+=(python3-pyverbs)
[[ $1 != @(test|board-guest) || -e $rdma_core ]] || missing+=(rdma-core)
# The cross-compiler only recommends its C library.
[[ $1 != aarch64 || $(uname -m) == aarch64 || -e /usr/aarch64-linux-gnu/lib/crti.o ]] ||
    missing+=(libc6-dev-arm64-cross)
if [[ $1 == apps ]]; then
    [[ -e /usr/include/librpma.h ]] || missing+=(librpma-dev)
    [[ -e /usr/include/libnl3/netlink/route/link.h ]] || missing+=(libnl-route-3-dev)
    compgen -G '/usr/lib/llvm-*/lib/libclang.so*' >/dev/null || missing+=(libclang-dev)
    compgen -G '/usr/lib/python3/dist-packages/netifaces*' >/dev/null || missing+=(python3-netifaces)
    python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
fi
((${#missing[@]})) || exit 0
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)

as_root=()
if ((EUID != 0)); then
    command -v sudo >/dev/null && as_root=(sudo)
fi
if ! command -v apt-get >/dev/null || { ((EUID != 0)) && ((${#as_root[@]} == 0)); }; then
    echo "please install: ${missing[*]} (names of Debian's packages), then try again" >&2
    exit 1
fi
echo "installing: ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" </dev/null >/dev/null
