# Tests of the module, run in the guest as root. The host sets ON0 and ON1 (words that put a program on a
# function), SELF (the program whose `inside` is for the guest), MODULE, and names a test in the last line.
sys=/sys/class/starverbs
driver=/sys/bus/pci/drivers/starverbs
loaders=() # numbers of processes
# What a kernel says when something is wrong with it, or with its memory.
wrong='BUG|WARNING:|Oops|Call Trace|Bad (page|rss)|refcount_t|INFO: (task|rcu)|Redzone|Poison|Object padding'

fail() {
    echo "FAILED: $*"
    tail -n 3 /tmp/load.* /tmp/traffic.* 2>/dev/null
    dmesg | tail -n 12
    ((${#loaders[@]} == 0)) || kill -KILL "${loaders[@]}"
    exit 1
}

# Until a command succeeds, so many seconds.
await() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < deadline)) || return 1
        sleep 0.1
    done
}

# The PCI address of a function.
pci() { basename "$(readlink -f $sys/star"$1"/device)"; }

listens() { grep -q ":$(printf %04X "$1") 0*:0000 0A" /proc/net/tcp /proc/net/tcp6; }
has_ended() { ! kill -0 "$1" 2>/dev/null; }
has_moved() { (($(<"$1") > $2)); }

has_devices() { [[ -e /dev/star0 && -e /dev/star1 ]] && chmod 666 /dev/star0 /dev/star1; }

# What programs have pinned for long.
pinned() {
    awk '$1 == "nr_foll_pin_acquired" { got = $2 } $1 == "nr_foll_pin_released" { given = $2 }
         END { print got - given }' /proc/vmstat
}

is_clean() {
    local file
    for file in $sys/star*/contexts; do
        [[ ! -e $file || $(<"$file") == 0 ]] || return 1
    done
    [[ $(pinned) == 0 ]] && [[ ! -e /sys/module/starverbs/refcnt || $(</sys/module/starverbs/refcnt) == 0 ]]
}

# Nothing is left of any program, and the kernel complains of nothing.
clean() {
    await 30 is_clean || fail "left over: contexts $(cat $sys/star*/contexts), pages pinned $(pinned)," \
        "references $(</sys/module/starverbs/refcnt)"
    if dmesg | grep -Eq "$wrong"; then
        dmesg | grep -E -A 12 "$wrong" | head -n 40
        fail "the kernel complains"
    fi
}

# A server on the first function, and its client on the second, which finds it at a TCP port. Words of one of
# them are in SERVER and CLIENT.
both() {
    local port=$1
    shift
    # shellcheck disable=SC2086
    timeout 120 $ON0 "$@" -p "$port" ${SERVER:-} >/tmp/traffic.server 2>&1 &
    local server=$!
    await 30 listens "$port" || fail "no server: $*"
    # shellcheck disable=SC2086
    timeout 120 $ON1 "$@" -p "$port" ${CLIENT:-} 127.0.0.1 >/tmp/traffic.client 2>&1 ||
        fail "the client of $*"
    wait $server || fail "the server of $*"
}

# Programs of the library on both functions, which check what arrives.
traffic() { both 19000 ibv_rc_pingpong -g 0 -c -n 100 -d star0; }

# Begins traffic of the library between both functions, and of raw programs on each, without end. Afterwards
# loaders[0] and [2] are on the first function.
load() {
    local words=(ib_send_bw -x 0 -d star0 -p 19100 -D 3000) writes
    writes=$(<$sys/star1/counters/dma_writes)
    # shellcheck disable=SC2086
    $ON0 "${words[@]}" >/tmp/load.server 2>&1 &
    loaders=($!)
    await 30 listens 19100 || fail "no server for the load"
    # shellcheck disable=SC2086
    $ON1 "${words[@]}" 127.0.0.1 >/tmp/load.client 2>&1 &
    loaders+=($!)
    for number in 0 1; do
        "$SELF" inside load /dev/star$number >/tmp/load.raw$number 2>&1 &
        loaders+=($!)
    done
    await 60 has_moved $sys/star1/counters/dma_writes $((writes + 500)) || fail "no load"
    for number in 0 1; do
        (($(<$sys/star$number/contexts) == 2)) || fail "not every program of the load has a context"
    done
}

# Programs on the first function end with an error, by themselves; the raw one on the second goes on.
first_ends() {
    for number in 0 2; do
        await 60 has_ended "${loaders[number]}" || fail "a program goes on without its board: $number"
        wait "${loaders[number]}" && fail "a program took the end of its board for success: $number"
    done
    ! has_ended "${loaders[3]}" || fail "a program on the other function has ended"
}

end_load() {
    kill -KILL "${loaders[@]}" 2>/dev/null
    wait "${loaders[@]}" 2>/dev/null
    loaders=()
}

test_loads() {
    for number in {1..100}; do
        busybox rmmod starverbs || fail "rmmod $number"
        [[ ! -e /dev/star0 ]] || fail "a device without a module"
        busybox insmod "$MODULE" || fail "insmod $number"
        await 10 has_devices || fail "no devices after insmod $number"
    done
    clean
    traffic
    clean
    echo "100 times"
}

test_unload_under_load() {
    load
    for _ in {1..20}; do
        ! busybox rmmod starverbs 2>/dev/null || fail "it was unloaded"
        sleep 0.05
    done
    end_load
    clean
    busybox rmmod starverbs || fail "rmmod"
    busybox insmod "$MODULE" || fail "insmod"
    await 10 has_devices || fail "no devices"
    traffic
    clean
    echo "refused 20 times"
}

test_opens() {
    local most
    most=$("$SELF" inside fill /dev/star0) || fail "$most"
    clean
    "$SELF" inside opens /dev/star0 "$COUNT" "$SEED" || fail "opens"
    clean
    [[ $("$SELF" inside fill /dev/star0) == "$most" ]] || fail "contexts are lost"
    clean
    traffic
    clean
    echo "$most contexts before and after"
}

test_flr() {
    for _ in {1..5}; do
        load
        echo 1 >"$sys/star0/device/reset" || fail "no reset"
        first_ends
        end_load
        clean
        traffic
    done
    clean
    echo "5 times"
}

test_unbind() {
    local address
    for _ in {1..5}; do
        load
        address=$(pci 0)
        echo "$address" >$driver/unbind || fail "unbind"
        first_ends
        [[ ! -e /dev/star0 ]] || fail "a device without a driver"
        end_load
        clean
        echo "$address" >$driver/bind || fail "bind"
        await 10 has_devices || fail "no devices"
        traffic
    done
    load
    echo 1 >"$sys/star0/device/remove"
    first_ends
    end_load
    clean
    echo 1 >/sys/bus/pci/rescan
    await 10 has_devices || fail "no devices after a rescan"
    traffic
    clean
    echo "5 times, and the device removed"
}

# As nobody, with the memory that a user may pin by default.
test_attacks() {
    (
        ulimit -l 8192
        exec setpriv --reuid 65534 --regid 65534 --clear-groups "$SELF" inside attacks /dev/star0 "$SEED"
    ) || fail "an attack succeeded"
    clean
    traffic
    clean
}

# EXPECT is what becomes of memory that the board was not given.
test_wild() {
    local address folder said
    address=$(pci 1)
    folder=/sys/bus/pci/devices/$address
    echo "$address" >$driver/unbind || fail "unbind"
    said=$("$SELF" inside wild "$folder" $((0x10000000))) || fail "$said"
    [[ $said == "$EXPECT" ]] || fail "what the board said: $said"
    echo 0 >"$folder/enable"
    echo "$address" >$driver/bind || fail "bind"
    await 10 has_devices || fail "no devices"
    traffic
    clean
    echo "$said"
}

# The first function's counters, one a word: those of data and contexts.
counted() {
    local name
    for name in dma_reads dma_writes qpc_misses qpc_prefetched qpc_evicted malformed dma_misses; do
        cat "$sys/star0/counters/$name"
    done
}

# Messages of one packet between two queue pairs of the first function, whose contexts take turns on chip.
# Sets reads and writes to those of memory beyond data's, fetched and evicted to how many contexts were.
context_traffic() {
    local before after messages=200
    mapfile -t before <<<"$(counted)"
    ON1=$ON0 both 19500 ibv_rc_pingpong -g 0 -c -s 1024 -n $((messages / 2)) -d star0
    mapfile -t after <<<"$(counted)"
    ((after[5] == before[5])) || fail "the board finds contexts that are not as it wrote them"
    ((after[6] == before[6])) || fail "accesses to memory that is not there: $((after[6] - before[6]))"
    reads=$((after[0] - before[0] - messages))
    writes=$((after[1] - before[1] - messages))
    fetched=$((after[2] + after[3] - before[2] - before[3]))
    evicted=$((after[4] - before[4]))
    ((fetched > 100 && evicted > 100)) || fail "contexts fetched $fetched, evicted $evicted"
}

# In the board's memory, they cost no reads and writes of the host's (an ACK that is late does).
contexts_in_board() {
    [[ $(<$sys/star0/qpc_placement) == board ]] || fail "contexts are in the $(<$sys/star0/qpc_placement)"
    context_traffic
    ((reads < fetched && writes < evicted)) || fail "contexts in the board: $reads reads, $writes writes"
}

# In the host's, each that is fetched is a read, and each that makes room a write, but for those of queue
# pairs that have ended; a new one is a write, too.
contexts_in_host() {
    [[ $(<$sys/star0/qpc_placement) == host ]] || fail "contexts are in the $(<$sys/star0/qpc_placement)"
    context_traffic
    ((reads >= fetched && writes >= evicted)) || fail "contexts in the host: $reads reads for $fetched," \
        "$writes writes for $evicted"
}

test_qpc() {
    local reads writes fetched evicted said
    contexts_in_board
    busybox rmmod starverbs || fail "rmmod"
    busybox insmod "$MODULE" qpc_log=10 || fail "insmod qpc_log=10"
    await 10 has_devices || fail "no devices"
    contexts_in_host
    said="$fetched contexts fetched by $reads reads, $evicted made room by $writes writes"
    echo 1 >"$sys/star0/device/reset" || fail "no reset"
    contexts_in_host
    clean
    busybox rmmod starverbs || fail "rmmod"
    # more than QPNs can have
    busybox insmod "$MODULE" qpc_log=25 || fail "insmod qpc_log=25"
    [[ ! -e $sys/star0 ]] || fail "a device with too many contexts"
    busybox rmmod starverbs || fail "rmmod"
    busybox insmod "$MODULE" || fail "insmod"
    await 10 has_devices || fail "no devices"
    contexts_in_board
    clean
    echo "$said"
}

has_rights() { [[ -e /dev/star0 && $(stat -c %a /dev/star0) == "$1" ]]; }

# The rule gives everyone the right to open a device, whenever one comes.
test_udev() {
    busybox rmmod starverbs || fail "rmmod"
    busybox insmod "$MODULE" || fail "insmod"
    await 10 has_rights 600 || fail "without the rule: $(stat -c %a /dev/star0)"
    busybox rmmod starverbs || fail "rmmod"
    mkdir -p /run/udev/rules.d
    cp "$RULES" /run/udev/rules.d/
    /lib/systemd/systemd-udevd --daemon --resolve-names=never >/dev/null 2>&1 || fail "no udev"
    await 30 udevadm control --ping --timeout 5 || fail "udev does not answer"
    busybox insmod "$MODULE" || fail "insmod"
    await 30 has_rights 666 || fail "with the rule: $(stat -c %a /dev/star0)"
    await 30 test -e /dev/star1
    setpriv --reuid 65534 --regid 65534 --clear-groups "$SELF" inside fill /dev/star0 || fail "as nobody"
    udevadm control --exit
    rm /run/udev/rules.d/60-starverbs.rules
    await 10 has_devices || fail "no devices"
    traffic
    clean
    echo "0600 before, 0666 with it"
}

# Until the host has done what it does: the load goes on in the background.
test_begin() {
    load
    disown -a
    echo "${loaders[@]}" >/tmp/loaders
}

# The load of test_begin still moves data, on both functions.
test_goes_on() {
    local number counter
    read -ra loaders </tmp/loaders
    for number in 0 1; do
        counter=$sys/star$number/counters/dma_writes
        await 60 has_moved "$counter" $(($(<"$counter") + 500)) || fail "the load does not go on"
    done
    for number in "${loaders[@]}"; do
        ! has_ended "$number" || fail "a program has ended: $number"
    done
}

# And its end, which others take for no failure.
test_end() {
    read -ra loaders </tmp/loaders
    end_load
    clean
    traffic
    clean
    echo "the load went on each time"
}

# The board answers no more: who asks it something ends, as whoever opens it, and who only polls.
test_silent_board() {
    local number
    read -ra loaders </tmp/loaders
    for number in "${loaders[@]}"; do
        await 120 has_ended "$number" || fail "a program waits for a silent board: $number"
    done
    ! "$SELF" inside fill /dev/star0 >/dev/null || fail "a context on a board that is silent"
    end_load
    clean
    echo "the programs end: $(sed -n 's/^FAILED: //p' /tmp/load.raw0)"
}

# The board answers what it likes: no program that comes has to work, each ends, and the kernel is unharmed. A
# reset brings a board back that was taken for broken.
test_lied_to() {
    local number round worked=0 resets=0
    for round in {1..20}; do
        for number in 0 1; do
            timeout -s KILL 5 "$SELF" inside load /dev/star$number >/tmp/load.raw$number 2>&1 &
            loaders+=($!)
            cat $sys/star$number/counters/* >/dev/null 2>&1
        done
        # shellcheck disable=SC2086
        timeout -s KILL 30 $ON0 ibv_devinfo >/tmp/traffic.server 2>&1 && worked=$((worked + 1))
        timeout -s KILL 30 "$SELF" inside fill /dev/star1 >/tmp/traffic.client 2>&1
        wait "${loaders[@]}" 2>/dev/null
        loaders=()
        for number in 0 1; do
            [[ $(<$sys/star$number/state) != broken ]] || resets=$((resets + 1))
            echo 1 >"$sys/star$number/device/reset" 2>/dev/null
        done
        ! dmesg | grep -Eq "$wrong" || clean
    done
    echo "ibv_devinfo worked $worked of 20 times, the module gave a board up $resets times"
}

test_after_lies() {
    local number
    for number in 0 1; do
        echo 1 >"$sys/star$number/device/reset" || fail "no reset"
        [[ $(<$sys/star$number/state) != broken ]] || fail "a board that tells the truth is broken"
    done
    clean
    traffic
    clean
}

# The board's process is gone, and with it both functions.
test_without_a_board() {
    local number
    read -ra loaders </tmp/loaders
    for number in "${loaders[@]}"; do
        await 120 has_ended "$number" || fail "a program goes on without its board: $number"
    done
    clean
    ! "$SELF" inside fill /dev/star0 >/dev/null || fail "a context on a board that is gone"
    [[ $(<$sys/star0/state) == broken ]] || fail "state $(<$sys/star0/state)"
    busybox rmmod starverbs || fail "rmmod"
    busybox insmod "$MODULE" || fail "insmod"
    clean
    echo "all ended"
}

# A server of the connection manager on the first function, and its client on the second, which asks again
# until the server listens. WORDS are both's, in SERVER and CLIENT those of each; the client prints SAYS.
connected() {
    # shellcheck disable=SC2086
    timeout 120 $ON0 $WORDS $SERVER >/tmp/traffic.server 2>&1 &
    local server=$!
    # shellcheck disable=SC2317
    ask() {
        # shellcheck disable=SC2086
        timeout 60 $ON1 $WORDS $CLIENT >/tmp/traffic.client 2>&1
    }
    await 60 ask || fail "the client of $WORDS"
    wait $server || fail "the server of $WORDS"
    grep -q -e "$SAYS" /tmp/traffic.client || fail "what the client of $WORDS says"
}

# perftest with the connection manager. Its server listens for a second time once it has spoken with its
# client; one that is faster is refused, uses memory that it has freed (perftest 4.5, on every card), dies of
# that, and leaves a server that waits. Then both begin anew. Sets refused to how often.
perftest_connected() {
    local server words=(ib_send_lat -R -x 0 -n 50 -p 19300)
    for refused in {0..29}; do
        # shellcheck disable=SC2086
        timeout 60 $ON0 "${words[@]}" >/tmp/traffic.server 2>&1 &
        server=$!
        await 10 grep -qx 1 $sys/star0/contexts || fail "no server: ${words[*]}"
        # shellcheck disable=SC2086
        if (timeout 60 $ON1 "${words[@]}" 127.0.0.1 >/tmp/traffic.client 2>&1 || exit) 2>/dev/null; then
            wait $server || fail "the server of ${words[*]}"
            grep -q t_typical /tmp/traffic.client || fail "no figures of ${words[*]}"
            return
        fi
        kill $server
        wait $server 2>/dev/null
        await 10 is_clean || fail "${words[*]} leaves something"
    done
    fail "30 times in a row the client of ${words[*]}"
}

test_cm() {
    local refused
    SAYS='ping data: rdma-ping-' SERVER=-s CLIENT='-c -a 127.0.0.1' WORDS='rping -C 10 -v' connected
    SAYS='data transfers complete' SERVER='' CLIENT='-s 127.0.0.1' WORDS='udaddy -C 10' connected
    SAYS='data transfers complete' SERVER='' CLIENT='-s 127.0.0.1' WORDS='ucmatose -C 10' connected
    perftest_connected
    clean
    echo "rping, udaddy, ucmatose, ib_send_lat -R, whose client was refused $refused times before"
}

test_multicast() {
    local group=0:0:0:0:0:0:0:0:0:0:0xff:0xff:239:77:0
    SERVER="-M $group:1" CLIENT="-M $group:2" both 19200 ib_send_bw -c UD -g -n 200
    clean
}

# rdma-core's own tests: TESTS says which.
test_pyverbs() {
    local tests said passed=0
    for tests in $TESTS; do
        said=$(STARVERBS_DEVICE=board:/dev/star0 "$PYVERBS" --only "tests.$tests" "$LIB" 2>&1)
        [[ $said == *', 0 failed'* ]] || fail "$tests: $(grep -E '^(FAILED|ERROR|pyverbs)' <<<"$said")"
        passed=$((passed + $(sed -n 's/^pyverbs: \([0-9]*\) passed.*/\1/p' <<<"$said")))
    done
    clean
    echo "$passed passed"
}

# Those that make queue pairs of any size: memory for which only an IOMMU makes one piece of many.
test_pyverbs_qp() { TESTS=test_qp. test_pyverbs; }

test_traffic() {
    traffic
    clean
}

# The rules that a program sees, of a board behind the kernel.
test_rules() {
    has_devices || fail "no devices"
    "$LIB/../bin/starverbs" board test /dev/star0 /dev/star1 --patience 30 >/tmp/rules 2>&1 ||
        fail "$(grep -A2 FAILED /tmp/rules)"
    local passed
    passed=$(tail -n 1 /tmp/rules | grep -Eo '^[0-9]+') || fail "$(tail -n 3 /tmp/rules)"
    ((passed >= 28)) || fail "$passed rules alone: $(grep 'not tested' /tmp/rules)"
    tail -n 1 /tmp/rules
}
