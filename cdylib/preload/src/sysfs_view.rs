//! The sysfs view: what a kernel would show of the device in /sys and /dev, as a list of virtual files.
//!
//! Made of facts alone: no operating system here. The files are those of a RoCE device in
//! Documentation/ABI/stable/sysfs-class-infiniband of the Linux kernel. Owns the list of files and
//! their contents; it must not know where they are kept.

use std::fmt::Write;

use starverbs_verbs::{Description, GidEntry, PortAttr};

use crate::counters::{self, LiveNumber};

/// Major and minor number of the character device: those that kernels give to uverbs0.
pub(crate) const DEVICE_NUMBER: (u32, u32) = (231, 192);
/// Where the device node lies.
pub(crate) const DEVICE_NODE: &str = "dev/infiniband/uverbs0";
/// The parent device's folder, below sys: no bus has it.
const CARD: &str = "devices/virtual/starverbs/card0";

/// What the view is made of.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// Name of the device
    pub(crate) name: String,
    /// What the device says of itself
    pub(crate) device: Description,
    /// NUMA node of the first address's interface; -1 if it has none
    pub(crate) numa_node: i32,
    /// CPUs that are near that interface, as in `0-3,8`
    pub(crate) cpus: String,
}

/// A virtual file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    /// Text that stays
    Text(String),
    /// A symbolic link
    Link(String),
    /// A number that is read when the file is opened
    Live(LiveNumber),
    /// The character device
    Device,
}

/// All virtual files, by path without the leading slash. Folders are those that the paths name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SysfsView(pub(crate) Vec<(String, Node)>);

impl SysfsView {
    /// The view of one device.
    pub(crate) fn of(facts: &Facts) -> SysfsView {
        let mut view = SysfsView(Vec::new());
        let name = &facts.name;
        let (device, verbs) =
            (format!("{CARD}/infiniband/{name}"), format!("{CARD}/infiniband_verbs/uverbs0"));
        view.parent(facts, &format!("sys/{CARD}"));
        view.device(facts, &format!("sys/{device}"));
        view.port(&facts.device, &format!("sys/{device}/ports/1"));
        view.verbs(name, &format!("sys/{verbs}"));
        view.link(&format!("sys/class/infiniband/{name}"), &format!("../../{device}"));
        view.text("sys/class/infiniband_verbs/abi_version", "6");
        view.link("sys/class/infiniband_verbs/uverbs0", &format!("../../{verbs}"));
        view.0.push((DEVICE_NODE.to_owned(), Node::Device));
        view
    }

    /// A number that two views share only if they are the same (FNV-1a).
    pub(crate) fn fingerprint(&self) -> u64 {
        let text = format!("{:?}", self.0);
        text.bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }

    fn text(&mut self, path: &str, line: &str) {
        self.0.push((path.to_owned(), Node::Text(format!("{line}\n"))));
    }

    fn link(&mut self, path: &str, target: &str) {
        self.0.push((path.to_owned(), Node::Link(target.to_owned())));
    }

    /// The device that a bus would show: what programs read to place a card in the machine.
    fn parent(&mut self, facts: &Facts, at: &str) {
        self.text(&format!("{at}/vendor"), "0xffff");
        self.text(&format!("{at}/device"), "0x0000");
        self.text(&format!("{at}/numa_node"), &facts.numa_node.to_string());
        self.text(&format!("{at}/local_cpulist"), &facts.cpus);
        self.text(&format!("{at}/uevent"), "DRIVER=starverbs");
        let mut netdevs: Vec<&str> = facts.device.gids.iter().map(interface).collect();
        netdevs.sort_unstable();
        netdevs.dedup();
        for netdev in netdevs {
            self.link(&format!("{at}/net/{netdev}"), &format!("/sys/class/net/{netdev}"));
        }
    }

    fn device(&mut self, facts: &Facts, at: &str) {
        let attr = &facts.device.attr;
        self.text(&format!("{at}/node_type"), "1: CA");
        self.text(&format!("{at}/node_guid"), &quads(&attr.node_guid.to_be_bytes()));
        self.text(&format!("{at}/sys_image_guid"), &quads(&attr.sys_image_guid.to_be_bytes()));
        self.text(&format!("{at}/node_desc"), &facts.name);
        self.text(&format!("{at}/fw_ver"), attr.fw_ver);
        self.text(&format!("{at}/hw_rev"), &format!("0x{:x}", attr.hw_ver));
        self.text(&format!("{at}/hca_type"), "starverbs");
        self.text(&format!("{at}/board_id"), "starverbs");
        self.text(&format!("{at}/uevent"), &format!("NAME={}", facts.name));
        self.link(&format!("{at}/device"), "../../../card0");
        self.link(&format!("{at}/subsystem"), "../../../../../../class/infiniband");
    }

    fn port(&mut self, device: &Description, at: &str) {
        let port = &device.port;
        self.text(&format!("{at}/state"), &format!("{}: {}", port.state, state(port.state)));
        self.text(
            &format!("{at}/phys_state"),
            &format!("{}: {}", port.phys_state, phys_state(port.phys_state)),
        );
        self.text(&format!("{at}/rate"), &rate(port));
        self.text(&format!("{at}/lid"), &format!("0x{:x}", port.lid));
        self.text(&format!("{at}/sm_lid"), &format!("0x{:x}", port.sm_lid));
        self.text(&format!("{at}/lid_mask_count"), &port.lmc.to_string());
        self.text(&format!("{at}/sm_sl"), &port.sm_sl.to_string());
        self.text(&format!("{at}/cap_mask"), &format!("0x{:08x}", port.port_cap_flags));
        self.text(&format!("{at}/link_layer"), if port.link_layer == 2 { "Ethernet" } else { "InfiniBand" });
        self.text(&format!("{at}/pkeys/0"), &format!("0x{:04x}", starverbs_verbs::PKEY));
        for gid in &device.gids {
            let index = gid.index;
            self.text(&format!("{at}/gids/{index}"), &quads(&gid.gid.0));
            self.text(&format!("{at}/gid_attrs/types/{index}"), "RoCE v2");
            self.text(&format!("{at}/gid_attrs/ndevs/{index}"), interface(gid));
        }
        for (name, live) in counters::port().chain(counters::card()) {
            self.0.push((format!("{at}/{name}"), Node::Live(live)));
        }
    }

    fn verbs(&mut self, name: &str, at: &str) {
        self.text(&format!("{at}/ibdev"), name);
        self.text(&format!("{at}/abi_version"), "1");
        self.text(&format!("{at}/dev"), &format!("{}:{}", DEVICE_NUMBER.0, DEVICE_NUMBER.1));
        self.text(
            &format!("{at}/uevent"),
            &format!("MAJOR={}\nMINOR={}\nDEVNAME=infiniband/uverbs0", DEVICE_NUMBER.0, DEVICE_NUMBER.1),
        );
        self.link(&format!("{at}/device"), "../../../card0");
        self.link(&format!("{at}/subsystem"), "../../../../../../class/infiniband_verbs");
    }
}

/// The interface behind an address; an alias (eth0:1) is no interface of its own.
pub(crate) fn interface(gid: &GidEntry) -> &str {
    gid.netdev.split(':').next().unwrap_or_default()
}

/// Bytes as sysfs writes GUIDs and GIDs: in groups of four digits.
fn quads(bytes: &[u8]) -> String {
    let mut text = String::new();
    for (i, pair) in bytes.chunks(2).enumerate() {
        text += if i > 0 { ":" } else { "" };
        for byte in pair {
            let _ = write!(text, "{byte:02x}");
        }
    }
    text
}

fn state(state: u32) -> &'static str {
    ["NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"]
        .get(state as usize)
        .copied()
        .unwrap_or("UNKNOWN")
}

fn phys_state(state: u8) -> &'static str {
    let words = [
        "",
        "Sleep",
        "Polling",
        "Disabled",
        "PortConfigurationTraining",
        "LinkUp",
        "LinkErrorRecovery",
        "Phy Test",
    ];
    words.get(usize::from(state)).copied().unwrap_or("<unknown>")
}

/// Width and speed as `enum ib_port_width` and `enum ib_port_speed` have them, in sysfs' words.
fn rate(port: &PortAttr) -> String {
    let width = match port.active_width {
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    // Tenths of Gb/s on one lane
    let (lane, word) = match port.active_speed {
        2 => (50, " DDR"),
        4 => (100, " QDR"),
        8 => (100, " FDR10"),
        16 => (140, " FDR"),
        32 => (250, " EDR"),
        64 => (500, " HDR"),
        128 => (1000, " NDR"),
        _ => (25, ""),
    };
    let tenths = lane * width;
    let part = if tenths % 10 == 0 { String::new() } else { format!(".{}", tenths % 10) };
    format!("{}{part} Gb/sec ({width}X{word})", tenths / 10)
}

#[cfg(test)]
#[path = "sysfs_view_tests.rs"]
pub(crate) mod tests;
