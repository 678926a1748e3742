# The guest's part of the world, run by guest.sh: the module, and a device for each function of the board.
# MODULE and FUNCTIONS are set by the host.
failed() {
    echo "setup: $*"
    dmesg | tail -n 20
    sleep 1
    busybox poweroff -f
}

busybox insmod "$MODULE" || failed "insmod $MODULE"
for ((number = 0; number < FUNCTIONS; number++)); do
    for _ in {1..100}; do
        [[ ! -e /dev/star$number ]] || break
        sleep 0.1
    done
    # What the udev rule does, where udev runs.
    chmod 666 "/dev/star$number" || failed "no /dev/star$number"
done
