#!/bin/busybox sh
# First process of the guest, in its initramfs: loads the modules, lays a writable overlay over the host's
# root, which it sees read-only, and goes on there with guest.sh.
B=/bin/busybox
$B mount -t devtmpfs dev /dev
exec >/dev/console 2>&1
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
while read -r module; do $B insmod "/mod/$module" || echo "guest: insmod $module failed"; done </mod/order
$B mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose hostroot /lower
$B mount -t tmpfs -o size=75% upper /upper
$B mkdir -p /upper/files /upper/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /new
$B mkdir -p /new/mnt/share
$B mount -t 9p -o rw,trans=virtio,version=9p2000.L,msize=512000,cache=none share /new/mnt/share
for folder in proc sys dev; do $B mount --move /$folder /new/$folder; done
exec $B switch_root /new /bin/bash /mnt/share/guest.sh
