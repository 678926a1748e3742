//! The counters below ports/1/counters and ports/1/hw_counters, and which of the card's counters each
//! shows.
//!
//! `counters` has the names of the IBTA's PortCounters (vol. 1, 16.1.3.5), as far as they mean something on
//! this wire, and 0 for the others, which programs expect to find. `hw_counters` has the card's own, under
//! their own names. Owns that mapping; it must not know where values come from.

use starverbs_core::Counters;

/// A number made of the card's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LiveNumber {
    /// The card's counters that are added
    of: &'static [&'static str],
    /// How many of theirs are one of this
    unit: u64,
}

impl LiveNumber {
    /// The value, where `lookup` knows what each of the card's counters says.
    pub(crate) fn value(&self, lookup: impl Fn(&str) -> u64) -> u64 {
        self.of.iter().fold(0u64, |sum, name| sum.wrapping_add(lookup(name))) / self.unit
    }
}

/// PortXmitData and PortRcvData count words of four bytes.
const WORD: u64 = 4;

const PORT: &[(&str, &[&str], u64)] = &[
    ("port_xmit_data", &["tx_bytes"], WORD),
    ("port_rcv_data", &["rx_bytes"], WORD),
    ("port_xmit_packets", &["tx_packets"], 1),
    ("port_rcv_packets", &["rx_packets"], 1),
    ("unicast_xmit_packets", &["tx_packets"], 1),
    ("unicast_rcv_packets", &["rx_packets"], 1),
    ("port_rcv_errors", &["drop_malformed", "drop_icrc"], 1),
    ("port_xmit_discards", &["tx_errors"], 1),
    ("multicast_xmit_packets", &[], 1),
    ("multicast_rcv_packets", &[], 1),
    ("port_rcv_constraint_errors", &[], 1),
    ("port_rcv_remote_physical_errors", &[], 1),
    ("port_rcv_switch_relay_errors", &[], 1),
    ("port_xmit_constraint_errors", &[], 1),
    ("port_xmit_wait", &[], 1),
    ("symbol_error", &[], 1),
    ("link_error_recovery", &[], 1),
    ("link_downed", &[], 1),
    ("local_link_integrity_errors", &[], 1),
    ("excessive_buffer_overrun_errors", &[], 1),
    ("VL15_dropped", &[], 1),
];

/// The port's counters, by path below the port.
pub(crate) fn port() -> impl Iterator<Item = (String, LiveNumber)> {
    PORT.iter().map(|&(name, of, unit)| (format!("counters/{name}"), LiveNumber { of, unit }))
}

/// The card's own counters, by path below the port.
pub(crate) fn card() -> impl Iterator<Item = (String, LiveNumber)> {
    let own = |name: &&str| format!("hw_counters/{name}");
    Counters::NAMES
        .iter()
        .zip(Counters::NAMES.chunks(1))
        .map(move |(name, of)| (own(name), LiveNumber { of, unit: 1 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_counters_of_the_card() {
        let known = |name: &&'static str| Counters::NAMES.contains(name);
        assert!(PORT.iter().flat_map(|(_, of, _)| of.iter()).all(known));
        assert_eq!(card().count(), Counters::NAMES.len());
    }

    #[test]
    fn values_are_sums_in_units() {
        let page = |name: &str| match name {
            "tx_bytes" => 4096,
            "drop_malformed" => 2,
            "drop_icrc" => 3,
            _ => 0,
        };
        let value = |wanted: &str| port().find(|(name, _)| name == wanted).map(|(_, live)| live.value(page));
        assert_eq!(value("counters/port_xmit_data"), Some(1024));
        assert_eq!(value("counters/port_rcv_errors"), Some(5));
        assert_eq!(value("counters/symbol_error"), Some(0));
        let own = card().find(|(name, _)| name == "hw_counters/drop_icrc").map(|(_, live)| live.value(page));
        assert_eq!(own, Some(3));
    }
}
