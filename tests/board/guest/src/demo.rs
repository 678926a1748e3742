//! `make demo-board`: a guest whose PCI device is a board, and perftest in it against the host's card in
//! software.

use std::time::Duration;

use crate::cases::Pair;
use crate::report::Report;
use crate::world::{Boot, Parts};

/// What the guest shows of the device.
const SHOW: &str = r#"
say() { printf '\n$ %s\n' "$*"; "$@"; }
address=$(basename "$(readlink -f /sys/class/starverbs/star0/device)")
say cat "/sys/bus/pci/devices/$address/uevent"
say ls -l /dev/star0
say grep . /sys/class/starverbs/star0/{state,version,contexts}
printf '\n$ STARVERBS_DEVICE=board:/dev/star0 ibv_devinfo\n'
$ON ibv_devinfo | head -n 14
"#;
/// What the board counted.
const COUNTED: &str =
    "cd /sys/class/starverbs/star0/counters && grep . doorbells send_fetches cqe_writes dma_* qpc_*";
const LIMIT: Duration = Duration::from_secs(120);

/// Shows it; an error if a program fails.
pub(crate) fn run(parts: &Parts) -> Result<bool, String> {
    say("A guest of QEMU boots; its PCI devices are functions of `starverbs board`, a process of this host");
    let mut world = Report::new().boot(parts, &Boot::default())?;
    say("The kernel module has found the device, and made /dev/star0");
    let on = world.on_board(0).join(" ");
    println!("{}", world.run(&format!("ON='{on}'\n{SHOW}"), LIMIT)?.trim());
    for (words, what) in [
        ("ib_send_lat -x 0 -n 1000 -s 8", "Latency: the server on the host, the client in the guest"),
        ("ib_write_bw -x 0 -n 1000 -s 65536", "Bandwidth: RDMA WRITE from the guest's memory to the host's"),
        ("ib_read_bw -x 0 -n 1000 -s 65536", "Bandwidth: RDMA READ of the host's memory"),
    ] {
        say(what);
        println!("host$  starverbs run -- {words}");
        println!("guest$ STARVERBS_DEVICE=board:/dev/star0 starverbs run -- {words} 10.78.0.1\n");
        println!("{}", Pair::to_host(words).run(&mut world)?.trim());
    }
    say("What the board counted in all of that");
    println!("{}", world.run(COUNTED, LIMIT)?.trim());
    println!(
        "
   perftest in the guest is the same program as on the host, with the same library. On the host it found the
   card in software, a part of its own process. In the guest it found a board: it wrote work requests into
   memory that the kernel had mapped for the device, stored one word into the device's doorbell page, and read
   completions where the device had put them. No call of the kernel lies between. The board, a process that
   stands in for an FPGA, fetched the requests from the guest's memory by DMA, and spoke RoCEv2 on UDP with
   the host's card. The guest's CPU may be emulated (tcg), so the times tell nothing of a board.

   docs/board.md has the contract, kernel-shim/README.md the module."
    );
    Ok(true)
}

fn say(what: &str) {
    println!("\n== {what}");
}
