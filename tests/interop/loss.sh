#!/bin/bash
# In the guest: goodput between two interfaces that are joined and lose packets, each with an rdma_rxe device
# of its own. rdma_rxe of Linux 6.1 knows the first network namespace alone, so both ends are in it; rules
# make what is for one end's address leave by the other.
# usage: loss.sh setup | loss.sh run rxe|repeat|go-back-n PERCENT SECONDS LIB |
#        loss.sh run tcp PERCENT SECONDS PROGRAM
# run prints GB/s and the share of packets that were lost in fact, both directions together, in percent.
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

# end WHAT INDEX SECONDS LIB [SERVER]; a second at the beginning and one at the end are not counted
end() {
    if [[ $1 == rxe ]]; then
        exec ib_write_bw -F -p 18515 -s 65536 -m 4096 -D "$3" -f 1 -d rxe_v"$2" -x "$(gid_index "$2")" \
            "${@:5}"
    fi
    [[ $1 == repeat ]] && export STARVERBS_REPEAT=auto || export STARVERBS_REPEAT=off
    # the kernel has 4791; netem would lose a segmented send as a whole
    export LD_LIBRARY_PATH=$4 STARVERBS_ADDRS=${address[$2]} STARVERBS_PORT=4900 STARVERBS_GSO=off \
        STARVERBS_LINK=udp
    exec ib_write_bw -F -p 18515 -s 65536 -m 4096 -D "$3" -f 1 "${@:5}"
}

measured() {
    for at in 0 1; do tc -s qdisc show dev v$at; done |
        awk '/Sent/ { sent += $4; lost += $7 } END { printf "%.4f\n", 100 * lost / (sent + lost + !sent) }'
}

pair() {
    end "$1" 1 "$3" "$4" >/tmp/server 2>&1 &
    server=$!
    until grep -q ':4853 0*:0000 0A' /proc/net/tcp /proc/net/tcp6 || ! kill -0 $server; do
        sleep 0.1
    done 2>/dev/null
    (end "$1" 0 "$3" "$4" 127.0.0.1) >/tmp/client 2>&1 ||
        { cat /tmp/server /tmp/client >&2; kill $server; exit 1; }
    wait $server || true
    cat /tmp/client >&2
    # MiB/s
    awk '$1 == 65536 { printf "%.6f\n", $4 * 1048576 / 1e9 }' /tmp/client
}

run() {
    for at in 0 1; do
        tc qdisc del dev v$at root 2>/dev/null || true
        tc qdisc add dev v$at root netem limit 100000 loss "$2%"
    done
    if [[ $1 == tcp ]]; then
        figure=$("$4" --tcp ${address[1]} --seconds "$3")
    else
        figure=$(pair "$@")
    fi
    echo "$figure $(measured)"
}

"$@"
