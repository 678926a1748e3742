//! The network: a namespace of this run's own, with a tap device to the guest and no way out.

use std::process::Command;

use starverbs_conformance::netns::{self, ip};

/// The addresses of the namespace and of the guests.
pub const ADDRESSES: [&str; 3] = ["10.78.0.1", "10.78.0.2", "10.78.0.3"];
/// The same in IPv6.
pub const ADDRESSES_V6: [&str; 3] = ["fd78::1", "fd78::2", "fd78::3"];
/// The first guest's tap device in the namespace.
pub const TAP: &str = "tap0";
/// What joins those of several guests.
const BRIDGE: &str = "br0";

/// The name of a guest's tap device in the namespace.
pub fn tap(guest: usize) -> String {
    format!("tap{guest}")
}

/// The namespace. Dropping it removes it.
pub struct Net {
    name: String,
}

impl Net {
    /// Makes it, for so many guests; needs root. `what` is a part of its name, `mtu` the IP MTU of its end.
    ///
    /// # Errors
    /// What `ip` says.
    pub fn new(what: &str, mtu: u32, guests: usize) -> Result<Net, String> {
        netns::remove_left_over();
        let net = Net { name: netns::name(what) };
        let name = &net.name;
        ip(&format!("netns add {name}"))?;
        ip(&format!("-n {name} link set lo up"))?;
        let end = if guests > 1 { BRIDGE } else { TAP };
        if guests > 1 {
            ip(&format!("-n {name} link add {BRIDGE} type bridge forward_delay 0"))?;
            ip(&format!("-n {name} link set {BRIDGE} mtu {mtu} up"))?;
        }
        for guest in 0..guests {
            let tap = tap(guest);
            ip(&format!("-n {name} tuntap add dev {tap} mode tap"))?;
            if guests > 1 {
                ip(&format!("-n {name} link set {tap} master {BRIDGE}"))?;
            }
            ip(&format!("-n {name} link set {tap} mtu {mtu} up"))?;
        }
        ip(&format!("-n {name} addr add {}/24 dev {end}", ADDRESSES[0]))?;
        ip(&format!("-n {name} addr add {}/64 dev {end} nodad", ADDRESSES_V6[0]))?;
        Ok(net)
    }

    /// A command that runs in it.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = ip(&format!("netns del {}", self.name));
    }
}
