#!/bin/bash
# In the guest: goodput between two interfaces that are joined and lose packets, each with an rdma_rxe device of its own.
# rdma_rxe of Linux 6.1 knows the first network namespace alone, so both ends are in it; rules make what is for one end's
# address leave by the other.
# usage: loss.sh setup | loss.sh run rxe|repeat|go-back-n PERCENT MESSAGES LIB | loss.sh run tcp PERCENT SECONDS PROGRAM
set -euo pipefail
address=(10.79.0.1 10.79.0.2)

setup() {
    ip link add v0 mtu 4200 type veth peer name v1 mtu 4200
    echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
    for at in 0 1; do
        other=$((1 - at))
        echo 0 >/proc/sys/net/ipv4/conf/v$at/rp_filter
        echo 1 >/proc/sys/net/ipv4/conf/v$at/accept_local
        ip link set v$at gso_max_segs 1 up # each packet is lost by itself
        ip addr add ${address[at]}/32 dev v$at
        ip neigh replace ${address[other]} lladdr "$(</sys/class/net/v$other/address)" dev v$at
        ip route add ${address[other]} dev v$at src ${address[at]} table 101
        ip rule add pref 10 iif v$at lookup local
        rdma link add rxe_v$at type rxe netdev v$at
    done
    ip rule add pref 20 to 10.79.0.0/24 lookup 101
    ip rule add pref 30 lookup local
    ip rule del pref 0
}

gid_index() {
    local hex
    hex=$(printf '0000:0000:0000:0000:0000:ffff:0a4f:000%d' $(($1 + 1)))
    grep -l "$hex" /sys/class/infiniband/rxe_v"$1"/ports/1/gids/? | head -1 | sed 's,.*/,,'
}

# end WHAT INDEX MESSAGES LIB [SERVER]
end() {
    if [[ $1 == rxe ]]; then
        exec ib_write_bw -F -p 18515 -s 65536 -m 4096 -n "$3" -d rxe_v"$2" -x "$(gid_index "$2")" "${@:5}"
    fi
    [[ $1 == repeat ]] && export STARVERBS_REPEAT=auto || export STARVERBS_REPEAT=off
    # the kernel has 4791; netem would lose a segmented send as a whole
    export LD_LIBRARY_PATH=$4 STARVERBS_ADDRS=${address[$2]} STARVERBS_PORT=4900 STARVERBS_GSO=off STARVERBS_LINK=udp
    exec ib_write_bw -F -p 18515 -s 65536 -m 4096 -n "$3" "${@:5}"
}

run() {
    for at in 0 1; do
        tc qdisc replace dev v$at root netem limit 100000 loss "$2%"
    done
    if [[ $1 == tcp ]]; then
        exec "$4" --tcp ${address[1]} --seconds "$3"
    fi
    end "$1" 1 "$3" "$4" >/tmp/server 2>&1 &
    server=$!
    until grep -q ':4853 0*:0000 0A' /proc/net/tcp /proc/net/tcp6 || ! kill -0 $server; do sleep 0.1; done 2>/dev/null
    (end "$1" 0 "$3" "$4" 127.0.0.1) >/tmp/client 2>&1 || { cat /tmp/server /tmp/client >&2; kill $server; exit 1; }
    wait $server || true
    # MiB/s
    awk '$1 == 65536 { printf "%.6f\n", $4 * 1048576 / 1e9 }' /tmp/client
    cat /tmp/client >&2
}

"$@"
