#!/usr/bin/env bash
# Programs look at the device in /sys and /dev through libstarverbs.so: C, tools, shells, python,
# infiniband-diags, UCX. Others ask for it by netlink: C, rdma(8). Fails if one sees something else than the
# device, or if a view is left behind. Programs that are not installed are skipped, and named.
# usage: run.sh LIBRARY_DIRECTORY
set -uo pipefail
lib=$(cd "${1:?usage: run.sh LIBRARY_DIRECTORY}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server" 2>/dev/null; rm -rf "$tmp"' EXIT
# An unprivileged user must reach the library too.
chmod 755 "$tmp"
cp "$lib/libstarverbs.so" "$tmp/"
preload=$tmp/libstarverbs.so
# Addresses of our own make a view of our own, whatever else runs on this host.
export STARVERBS_ADDRS=127.77.$((RANDOM % 256)).$((RANDOM % 254 + 1)) \
    STARVERBS_PORT=$((20000 + RANDOM % 10000))
star=/sys/class/infiniband/star0
failures=0 checks=0

seen() { LD_PRELOAD=$preload timeout 60 "$@" 2>&1; }

fail() { failures=$((failures + 1)); printf 'FAILED: %s\n' "$*" >&2; }

# Expects what a program prints, or a part of it: expect TEXT PROGRAM ARGUMENTS...
expect() {
    local wanted=$1 got
    shift
    checks=$((checks + 1))
    got=$(seen "$@") || fail "$* ended with $?"
    [[ $got == *"$wanted"* ]] || fail "$*: no '$wanted' in: $got"
}

have() {
    PATH=$PATH:/usr/sbin command -v "$1" >/dev/null && return
    echo "skipped: $1 is not installed"
    return 1
}

# Where the view lies just now: the folder's own path is shown to programs without the library.
folder() { seen bash -c "cd $star && env -u LD_PRELOAD /bin/pwd -P; true" | sed 's,/sys/devices/.*,,'; }

### Calls

for flags in -O1 "-O2 -D_FORTIFY_SOURCE=2 -D_FILE_OFFSET_BITS=64"; do
    # shellcheck disable=SC2086
    cc -Wall -Wextra $flags -o "$tmp/look" "$here/look.c" -libverbs -lpthread || fail "cc $flags"
    expect "all as it should be" "$tmp/look"
done
cc -Wall -Wextra -O1 -o "$tmp/ask" "$here/ask.c" -lpthread || fail "cc ask.c"
expect "all as it should be" "$tmp/ask"
cc -Wall -Wextra -O1 -o "$tmp/kept" "$here/kept.c" -ldl || fail "cc kept.c"
expect "all as it should be" "$tmp/kept"

### Tools

expect "4: ACTIVE" cat $star/ports/1/state
expect "uverbs0" ls /dev/infiniband
expect "crw-rw-rw- 1 root root 231, 192" ls -l /dev/infiniband/uverbs0
expect "star0 -> ../../devices/virtual" ls -l /sys/class/infiniband
expect "/dev/infiniband/uverbs0" find /dev/infiniband -type c
expect "$star/ports/1/hw_counters/rx_packets" find $star/ -name rx_packets
expect "character special file" stat /dev/infiniband/uverbs0
expect "RoCE v2" grep -r . $star/ports/1/gid_attrs/types/
expect "/sys/devices/virtual/starverbs/card0" readlink -f $star/device
expect "star0" cat /sys/class/infiniband_verbs/uverbs0/ibdev
expect "Ethernet" bash -c "cd $star/ports && cat */link_layer"
expect "$star" bash -c "echo /sys/class/infiniband/*"
expect "Permission denied" bash -c "echo x 2>&1 >$star/node_desc || true"
expect "lo" ls $star/device/net

[[ -x /usr/bin/python3 ]] && expect "['star0'] True 2" /usr/bin/python3 -c "
import os, stat
node = os.stat('/dev/infiniband/uverbs0')
verbs = list(os.scandir('/sys/class/infiniband_verbs'))
print(os.listdir('/sys/class/infiniband'), stat.S_ISCHR(node.st_mode), len(verbs))"

### RDMA programs

have ibv_devinfo && expect "starverbs" sh -c "ibv_devinfo | grep board_id"
have ibstat && expect "Link layer: Ethernet" /usr/sbin/ibstat star0
have ibstatus && expect "state:		 4: ACTIVE" /usr/sbin/ibstatus
have fi_info && expect "domain: star0" fi_info -p verbs

# What rdma(8) is told by netlink is what files say, and what verbs say.
if have rdma; then
    guid=$(seen cat $star/node_guid) netdev=$(seen cat $star/ports/1/gid_attrs/ndevs/0)
    link="link star0/1 state ACTIVE physical_state LINK_UP netdev $netdev"
    index=$(cat "/sys/class/net/$netdev/ifindex")
    expect "$link" rdma link show
    expect "$link" rdma link show star0/1
    expect "$link netdev_index $index" rdma -d link show
    expect '"ifname":"star0","port":1,"state":"ACTIVE","physical_state":"LINK_UP","netdev":"'"$netdev" \
        rdma link show -j
    expect "0: star0: node_type ca " rdma dev show
    expect "fw $(seen cat $star/fw_ver) node_guid $guid sys_image_guid $guid" rdma dev show star0
    expect "MEM_WINDOW" rdma -d dev show
    expect "copy-on-fork on" rdma system show
    expect "star0           	${guid//:/}" ibv_devices
    expect "Operation not supported" sh -c "! rdma link add rxe9 type rxe netdev $netdev"
    expect "Wrong device name" sh -c "! rdma link show star1/1"
fi

# UCX's own transports over the device, between two processes: $1 transports, the rest what ucx_perftest does.
ucx() {
    local port=$((30000 + RANDOM % 2000)) got
    export UCX_NET_DEVICES=star0:1 UCX_TLS=$1
    shift
    checks=$((checks + 1))
    seen ucx_perftest -p $port >"$tmp/server" &
    server=$!
    for _ in $(seq 100); do
        grep -qsiE "$(printf ':%04X [0-9A-F]+:0000 0A ' $port)" /proc/net/tcp /proc/net/tcp6 && break
        sleep 0.05
    done
    got=$(seen ucx_perftest 127.0.0.1 -p $port "$@")
    [[ $got == *Final:* ]] || fail "ucx_perftest $*: $got $(cat "$tmp/server")"
    kill "$server" 2>/dev/null
    wait "$server"
    server=
    unset UCX_NET_DEVICES UCX_TLS
}

if have ucx_info && have ucx_perftest; then
    expect "Transport: rc_verbs" ucx_info -d
    expect "Transport: ud_verbs" ucx_info -d
    ucx rc_verbs,ud_verbs -t tag_lat -n 500
    ucx rc_verbs,ud_verbs -t ucp_put_bw -s 65536 -n 100
    ucx rc_verbs,ud_verbs -t ucp_fadd -s 8 -n 200
    ucx ud_verbs -t tag_bw -s 4096 -n 500
fi

### What is left

if ((EUID == 0)) && have runuser; then
    expect "star0" runuser -u nobody -- env LD_PRELOAD="$preload" \
        cat /sys/class/infiniband_verbs/uverbs0/ibdev
    expect "all as it should be" runuser -u nobody -- env LD_PRELOAD="$preload" "$tmp/ask"
fi

place=$(folder)
checks=$((checks + 1))
[[ $place == */starverbs-sysfs-* ]] || fail "the view lies at '$place'"
[[ ! -e $place ]] || fail "$place is left though nobody looks"
if [[ -x /usr/bin/python3 ]]; then
    expect "" /usr/bin/python3 -c "
import os
os.listdir('/sys/class/infiniband')
os.execve(os.open('/bin/true', os.O_RDONLY), ['true'], os.environ)"
    [[ ! -e $place ]] || fail "$place is left by a program that became another through its descriptor"
fi
checks=$((checks + 1))
{ seen bash -c "[[ -e $star ]] && kill -9 \$\$"; } >/dev/null 2>&1
[[ -e $place ]] || fail "a killed program's view was expected at $place"
STARVERBS_PORT=4791 STARVERBS_ADDRS=127.78.0.$((RANDOM % 254 + 1)) seen ls /sys/class/infiniband >/dev/null
[[ ! -e $place ]] || fail "what a killed program left at $place is still there"

echo "$checks checks, $failures failed"
((failures == 0))
