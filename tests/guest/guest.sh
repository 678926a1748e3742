#!/bin/bash
# First process of the guest after init.sh: does the setup that the host gives, and then runs what the host
# asks for, until told to stop. A request is a file jobs/N.run, a script; its output goes to N.out and N.err,
# its status to N.status. A file N.kill asks for its end. The host writes each file under another name first,
# so that none is seen half.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
ulimit -l unlimited
exec </dev/null
share=/mnt/share
# shellcheck source=/dev/null
source $share/settings
ip link set lo up
echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad # its address is no one else's: saves two seconds
ip link set eth0 mtu "$MTU" up
ip addr add "$ADDRESS/24" dev eth0
ip addr add "$ADDRESS6/64" dev eth0 nodad
for _ in {1..50}; do
    ip -6 addr show dev eth0 tentative | grep -q tentative || break
    sleep 0.1
done
# shellcheck source=/dev/null
source $share/setup
touch $share/ready
cd $share/jobs || exit

run() {
    setsid bash "$1.taken" >"$1.out" 2>"$1.err" &
    echo $! >"$1.pid"
    wait $!
    echo $? >"$1.status.new"
    mv "$1.status.new" "$1.status"
}

until [[ -e $share/stop ]]; do
    for file in *.run; do
        [[ -e $file ]] || continue
        mv "$file" "${file%.run}.taken"
        run "${file%.run}" &
    done
    for file in *.kill; do
        [[ -e $file ]] || continue
        kill -KILL -- "-$(<"${file%.kill}.pid")"
        rm "$file"
    done
    sleep 0.05
done
dmesg >$share/dmesg
busybox poweroff -f
