//! What a run of 1RMA's cards is: drawn from its seed.

use starverbs_core::Nanos;
use starverbs_onerma::CardConfig;
use starverbs_sim::Rng;
use starverbs_sim::onerma::OneRmaFaults;

use crate::plan::At;

/// Something that befalls 1RMA's hosts.
#[derive(Clone, Copy, Debug)]
pub(super) enum Chaos {
    /// A host ends without a word, and its card is a new one
    Restart(At),
    /// The owner closes the region that a host serves, and opens its memory under another name and key
    Reopen(At),
    /// The owner changes the key of the region that a host serves
    Rekey(At),
    /// The wire carries nothing for so long
    Dark(Nanos),
}

/// A run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) hosts: usize,
    pub(super) config: CardConfig,
    /// What the wire does
    pub(super) faults: OneRmaFaults,
    /// Operations of each host's process
    pub(super) ops: u32,
    /// Share of operations that are transfers of an executor's, of several commands
    pub(super) moves: f64,
    /// Share of those that must fail
    pub(super) wrong: f64,
    /// Share of those that change the key of the region that they reach
    pub(super) rekeys: f64,
    /// How often somebody on the path sends a packet, a step
    pub(super) attacks: f64,
    /// What befalls, and in which step
    pub(super) chaos: Vec<(usize, Chaos)>,
}

impl Plan {
    pub(super) fn new(rng: &mut Rng) -> Plan {
        let hosts = rng.within(2, 4) as usize;
        let faults = if rng.chance(0.3) {
            OneRmaFaults::default()
        } else {
            let mut chance = || rng.pick(&[0.0, 0.0, 0.02, 0.1, 0.3]);
            OneRmaFaults { loss: chance(), repeat: chance(), late: chance(), change: chance() }
        };
        let config = CardConfig {
            slots: 16,
            portals: 2,
            regions: 4,
            transfers: rng.pick(&[1, 2, 8, 64]),
            inbound: rng.pick(&[1, 4, 64]),
            fragment: rng.pick(&[64, 256, 1024, 4096]),
            window: rng.pick(&[4096, 16_384, 98_304]),
            nack_threshold: rng.pick(&[4096, 16_384, 65_536]),
            ..CardConfig::default()
        };
        let chaos = (0..rng.pick(&[0, 0, 1, 3])).map(|_| (rng.below(800) as usize, Self::one(rng, hosts)));
        let chaos = chaos.collect();
        Plan {
            hosts,
            config,
            faults,
            ops: rng.within(1, 30) as u32,
            moves: rng.pick(&[0.0, 0.2, 1.0]),
            wrong: rng.pick(&[0.0, 0.1]),
            rekeys: rng.pick(&[0.0, 0.05]),
            attacks: rng.pick(&[0.0, 0.0, 0.05, 0.3]),
            chaos,
        }
    }

    fn one(rng: &mut Rng, hosts: usize) -> Chaos {
        let at = rng.below(hosts as u64) as usize;
        match rng.below(4) {
            0 => Chaos::Restart(at),
            1 => Chaos::Reopen(at),
            2 => Chaos::Rekey(at),
            _ => Chaos::Dark(rng.pick(&[5_000, 30_000, 200_000])),
        }
    }
}
