//! Two network namespaces joined by a veth pair, made and removed by this run.

use std::process::Command;

/// The pair of namespaces. Dropping it removes both, and with them the veth pair.
pub(crate) struct Namespaces {
    names: [String; 2],
    mtu: u32,
}

/// Addresses of the two ends.
pub(crate) const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
const ADDRESSES_V6: [&str; 2] = ["fd77::1", "fd77::2"];
const PREFIX: &str = "sv-";

impl Namespaces {
    /// Makes both namespaces; needs root.
    pub(crate) fn new() -> Result<Namespaces, String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("network namespaces need root".to_owned());
        }
        remove_left_over();
        let pid = std::process::id();
        let pair = Namespaces { names: [format!("{PREFIX}{pid}-a"), format!("{PREFIX}{pid}-b")], mtu: 1500 };
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
            Ok(())
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

/// Removes what an earlier run, killed before it could tidy up, has left.
fn remove_left_over() {
    let Ok(folder) = std::fs::read_dir("/run/netns") else { return };
    for name in folder.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if owner.is_some_and(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|e| format!("ip: {e}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}
