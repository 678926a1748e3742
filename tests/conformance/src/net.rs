//! Two network namespaces joined by a veth pair, made and removed by this run.

use starverbs_conformance::netns::{ip, name, remove_left_over, wait_for_carrier};

/// The pair of namespaces. Dropping it removes both, and with them the veth pair.
pub(crate) struct Namespaces {
    names: [String; 2],
    mtu: u32,
}

/// Addresses of the two ends.
pub(crate) const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
const ADDRESSES_V6: [&str; 2] = ["fd77::1", "fd77::2"];

impl Namespaces {
    /// Makes both namespaces; needs root.
    pub(crate) fn new() -> Result<Namespaces, String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("network namespaces need root".to_owned());
        }
        remove_left_over();
        let pair = Namespaces { names: [name("a"), name("b")], mtu: 1500 };
        let [a, b] = &pair.names;
        let steps = || -> Result<(), String> {
            for name in [a, b] {
                ip(&format!("netns add {name}"))?;
                ip(&format!("-n {name} link set lo up"))?;
            }
            ip(&format!("-n {a} link add veth0 type veth peer name veth0 netns {b}"))?;
            for (name, end) in [(a, 0), (b, 1)] {
                ip(&format!("-n {name} addr add {}/24 dev veth0", ADDRESSES[end]))?;
                ip(&format!("-n {name} addr add {}/64 dev veth0 nodad", ADDRESSES_V6[end]))?;
                ip(&format!("-n {name} link set veth0 up"))?;
            }
            [a, b].into_iter().try_for_each(|name| wait_for_carrier(name, "veth0"))
        };
        steps().map(|()| pair).map_err(|error| format!("no network namespaces here: {error}"))
    }

    /// Sets the IP MTU of both ends.
    pub(crate) fn set_mtu(&mut self, mtu: u32) -> Result<(), String> {
        if self.mtu != mtu {
            for name in &self.names {
                ip(&format!("-n {name} link set veth0 mtu {mtu}"))?;
            }
            self.mtu = mtu;
        }
        Ok(())
    }

    /// The name of one end.
    pub(crate) fn name(&self, end: usize) -> &str {
        &self.names[end]
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}
