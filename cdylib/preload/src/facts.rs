//! Gathers what the sysfs view shows: what the device says, the host's about the interface behind it, and
//! counters.
//!
//! Owns where facts come from; it must not know how they are shown.

use std::fs;
use std::path::Path;

use starverbs_verbs::stat::{self, Snapshot};
use starverbs_verbs::{VerbsError, describe, device_name};

use crate::counters::LiveNumber;
use crate::sysfs_view::Facts;

/// What a program that opened the device now would find.
///
/// # Errors
/// Wrong settings, or a host without addresses.
pub(crate) fn now() -> Result<Facts, VerbsError> {
    let device = describe()?;
    let netdev = device.gids.first().map_or("lo", |gid| gid.netdev.split(':').next().unwrap_or("lo"));
    let hardware = format!("/sys/class/net/{netdev}/device");
    let numa_node = line(&format!("{hardware}/numa_node")).and_then(|node| node.parse().ok()).unwrap_or(-1);
    let cpus = line(&format!("{hardware}/local_cpulist")).or_else(|| line("/sys/devices/system/cpu/online"));
    Ok(Facts { name: device_name().to_owned(), device, numa_node, cpus: cpus.unwrap_or_default() })
}

fn line(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

/// What a counter of the device says: the sum over the processes in this network namespace that use it, as
/// far as this process may look into them.
pub(crate) fn value(live: &LiveNumber) -> u64 {
    let own = namespace("self");
    let beside = |pid: &u32| namespace(&pid.to_string()) == own;
    let pages: Vec<Snapshot> =
        stat::pids().into_iter().filter(beside).filter_map(|pid| stat::page_of(pid).ok().flatten()).collect();
    live.value(|name| {
        let values = pages.iter().flat_map(|page| &page.counters).filter(|(n, _)| n == name).map(|(_, v)| *v);
        // Another process writes what it likes on its page.
        values.fold(0, u64::wrapping_add)
    })
}

/// The network namespace of a process; None if it does not say.
fn namespace(process: &str) -> Option<std::path::PathBuf> {
    fs::read_link(Path::new("/proc").join(process).join("ns/net")).ok()
}
