#!/bin/bash
# Multicast between processes: on one address, and between two network namespaces over IPv4 and IPv6 and to
# other users, with a capture that tshark must read as RoCEv2 multicast. usage: multicast.sh LIBRARY_DIRECTORY
set -euo pipefail
lib=$(cd "${1:?usage: multicast.sh LIBRARY_DIRECTORY}" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
tmp=$(mktemp -d)
chmod 777 "$tmp"
readonly COUNT=100
SEND=$COUNT
spaces=()

tidy() {
	jobs -p | xargs -r kill 2>/dev/null || true
	for space in "${spaces[@]}"; do ip netns del "$space"; done
	rm -rf "$tmp"
}
trap tidy EXIT

# Where every user can read it.
cp "$lib/libibverbs.so.1" "$tmp"
cc -Wall -Wextra -O1 -o "$tmp/multicast" "$here/multicast.c" -libverbs

# Runs the program somewhere: run WHERE USER ARGUMENTS...; "-" is here, or whoever runs this.
run() {
	local words=(env "LD_LIBRARY_PATH=$tmp" "STARVERBS_ADDRS=$ADDRS" "STARVERBS_PCAP=${PCAP-}" timeout 60)
	[[ $1 == - ]] || words=(ip netns exec "$1" "${words[@]}")
	[[ $2 == - ]] || words+=(setpriv --reuid "$2" --regid "$2" --clear-groups)
	"${words[@]}" "$tmp/multicast" "${@:3}"
}

# Every receiver must get COUNT datagrams, none twice: everyone GROUP SENDER RECEIVER...,
# each one "WHERE USER ADDRESS".
# SEND are sent: more, where some may be lost on the way.
everyone() {
	local group=$1 sender=$2 receivers=("${@:3}") pids=() at log
	for at in "${!receivers[@]}"; do
		read -r where user ADDRS <<<"${receivers[at]}"
		log=$tmp/receiver-$at
		# What an earlier one said must not be taken for this one's word.
		rm -f "$log"
		run "$where" "$user" receive "$group" $COUNT >"$log" &
		pids+=($!)
		until grep -q ready "$log" 2>/dev/null; do
			kill -0 "${pids[at]}" || return 1
			sleep 0.05
		done
	done
	read -r where user ADDRS <<<"$sender"
	rm -f "$tmp/sender.pcap"
	PCAP=$tmp/sender.pcap run "$where" "$user" send "$group" "$SEND"
	for at in "${!pids[@]}"; do wait "${pids[at]}"; done
	echo "multicast: ${#receivers[@]} receivers of $group got $COUNT of $SEND datagrams"
}

# The sender's capture must hold RoCEv2 multicast: well_formed FILTER.
well_formed() {
	command -v tshark >/dev/null ||
		{ echo 'multicast: tshark is not installed, the capture was not read'; return; }
	local frames
	frames=$(tshark -r "$tmp/sender.pcap" -Y "$1 && udp.dstport == 4791 && infiniband.bth.destqp == 0xffffff &&
		infiniband.bth.opcode == 101 && infiniband.deth.q_key == 0x1234 && !_ws.malformed" 2>/dev/null | wc -l)
	[[ $frames == "$COUNT" ]] || { echo "multicast: tshark knows $frames of $COUNT frames" >&2; return 1; }
}

# In a namespace where there may be one: other programs that use the card here are not part of this.
a=- b=-
if [[ $(id -u) == 0 ]] && ip netns add "sv-mc-$$-a" 2>/dev/null; then
	a=sv-mc-$$-a b=sv-mc-$$-b
	spaces=("$a")
	ip netns add "$b"
	spaces+=("$b")
	for space in "$a" "$b"; do ip -n "$space" link set lo up; done
fi

ADDRS=127.0.0.1 run "$a" -
everyone ::ffff:239.70.2.1 "$a - 127.0.0.1" "$a - 127.0.0.1" "$a - 127.0.0.1" "$a - 127.0.0.1"
well_formed 'ip.dst == 239.70.2.1 && ip.ttl == 9'
if [[ $b == - ]]; then
	echo 'multicast: no network namespaces here, nothing was sent between two'
	exit 0
fi

ip -n "$a" link add veth0 type veth peer name veth0 netns "$b"
for end in "$a 1" "$b 2"; do
	read -r space last <<<"$end"
	ip -n "$space" addr add "10.70.0.$last/24" dev veth0
	ip -n "$space" addr add "fd70::$last/64" dev veth0 nodad
	ip -n "$space" link set veth0 up
done
# IPv6 multicast takes a route that the kernel makes once the link is up.
for space in "$a" "$b"; do
	for _ in {1..200}; do
		ip -n "$space" -6 route show table local | grep -q '^multicast ff00::/8 dev veth0' && break
		sleep 0.05
	done
done
everyone ::ffff:239.70.2.2 "$a - 10.70.0.1" "$b - 10.70.0.2" "$b - 10.70.0.2" "$a - 10.70.0.1"
well_formed 'ip.dst == 239.70.2.2'
everyone ff15::70:1 "$a - fd70::1" "$b - fd70::2" "$b - fd70::2" "$a - fd70::1"
well_formed 'ipv6.dst == ff15::70:1 && ipv6.hlim == 9'
# Users who do not share the port have it all handed on, through queues that are short.
SEND=$((10 * COUNT))
everyone ::ffff:239.70.2.3 "$a - 10.70.0.1" "$b - 10.70.0.2" "$b 65534 10.70.0.2" "$b 65533 10.70.0.2"
everyone ff15::70:2 "$a 65534 fd70::1" "$b 65534 fd70::2" "$b - fd70::2" "$a - fd70::1"
