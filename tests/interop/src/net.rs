//! The network: a namespace of this run's own, with a tap device to the guest and no way out.

use std::process::Command;

use starverbs_conformance::netns::{self, ip};

/// The addresses of the namespace and of the guest. Dropping the network removes it.
pub(crate) const ADDRESSES: [&str; 2] = ["10.78.0.1", "10.78.0.2"];
/// The same in IPv6.
pub(crate) const ADDRESSES_V6: [&str; 2] = ["fd78::1", "fd78::2"];
/// The tap device's name in the namespace.
pub(crate) const TAP: &str = "tap0";

/// The namespace.
pub(crate) struct Net {
    name: String,
}

impl Net {
    /// Makes it; needs root. `mtu` is the IP MTU of the namespace's end.
    pub(crate) fn new(mtu: u32) -> Result<Net, String> {
        netns::remove_left_over();
        let net = Net { name: netns::name("interop") };
        let name = &net.name;
        ip(&format!("netns add {name}"))?;
        ip(&format!("-n {name} link set lo up"))?;
        ip(&format!("-n {name} tuntap add dev {TAP} mode tap"))?;
        ip(&format!("-n {name} link set {TAP} mtu {mtu} up"))?;
        ip(&format!("-n {name} addr add {}/24 dev {TAP}", ADDRESSES[0]))?;
        ip(&format!("-n {name} addr add {}/64 dev {TAP} nodad", ADDRESSES_V6[0]))?;
        Ok(net)
    }

    /// A command that runs in it.
    pub(crate) fn command(&self, program: &str) -> Command {
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
