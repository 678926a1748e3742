//! A host of 1RMA's: the region that it serves, and its process.

use starverbs_core::Nanos;
use starverbs_onerma::congestion::CongestionSettings;
use starverbs_onerma::executor::{Executor, OwnPortal};
use starverbs_onerma::{CardConfig, OneRmaOp, Region, RegionKey, Rights};
use starverbs_sim::onerma::{OneRmaNet, Portal, SimRegion};

use crate::plan::At;

/// Bytes of a place; each operation has one at both ends while it runs.
pub(super) const PLACE: u64 = 8192;
/// Bytes behind those of an operation that it must leave as they are.
pub(super) const MARGIN: u64 = 64;
/// Places of the region that a host serves.
const SERVED: u64 = 16;
/// Slots for single commands, and for the executor's.
const SLOTS: u16 = 8;
/// Transfers that the executor has at once, at most.
const MOVES: usize = 2;
/// Whose the served regions are.
const OWNER: u32 = 1;
/// How often the executor tries a chunk again.
const RETRIES: u8 = 5;
/// A round trip without a wait.
const RTT: Nanos = 5_000;

/// The region that a host serves.
pub(super) struct Served {
    pub(super) region: SimRegion,
    /// The keys that it may have: two, while a REKEY is under way
    pub(super) keys: Vec<RegionKey>,
    /// Changes whenever its name, its key or its host does
    pub(super) version: u64,
    /// Starts of its places that nobody uses
    pub(super) free: Vec<u64>,
    /// Which of all that were ever served it is
    pub(super) born: u64,
}

/// A host.
pub(super) struct Site {
    pub(super) pid: u32,
    pub(super) served: Served,
    /// Slots of single commands
    pub(super) portal: Portal,
    pub(super) slots: Vec<u16>,
    /// Slots of the executor's
    pub(super) moving: Portal,
    pub(super) executor: Executor,
    pub(super) transfers: usize,
    /// When the executor will be looked at
    pub(super) wake: Option<Nanos>,
    /// What both work with
    pub(super) local: SimRegion,
    pub(super) places: Vec<u64>,
    /// Operations that are left
    pub(super) left: u32,
}

/// Rights of a served region.
const REMOTE: Rights = Rights::REMOTE_READ.union(Rights::REMOTE_WRITE).union(Rights::REMOTE_REKEY);

impl Site {
    /// Of a host whose card is new.
    pub(super) fn new(net: &mut OneRmaNet, at: At, key: RegionKey, born: u64, left: u32) -> Site {
        let host = &mut net.hosts[at];
        let pid = 100 + at as u32;
        let region = host.region(OWNER, SERVED * PLACE, REMOTE, key);
        let local_len = (u64::from(SLOTS) + MOVES as u64) * PLACE;
        let local = host.region(pid, local_len, Rights::LOCAL_READ | Rights::LOCAL_WRITE, RegionKey([1; 16]));
        let (portal, moving) = (host.portal(pid, SLOTS), host.portal(pid, SLOTS));
        let settings = CongestionSettings::of_rtt(RTT);
        let executor = Executor::new(
            settings,
            RETRIES,
            &[OwnPortal { slots: SLOTS, completions: moving.completions.id }],
        );
        let places = |len: u64| (0..len / PLACE).map(|place| place * PLACE).collect();
        let served = Served { region, keys: vec![key], version: born, free: places(region.len), born };
        Site {
            pid,
            served,
            portal,
            slots: (0..SLOTS).collect(),
            moving,
            executor,
            transfers: 0,
            wake: None,
            local,
            places: places(local.len),
            left,
        }
    }

    /// Whether the executor takes another transfer.
    pub(super) fn may_move(&self) -> bool {
        self.transfers < MOVES
    }
}

impl Served {
    /// Its owner gives it another key.
    pub(super) fn rekey(&mut self, net: &mut OneRmaNet, at: At, key: RegionKey, version: u64) {
        net.hosts[at].card.rekey_region(self.region.id, key).expect("it is open");
        (self.keys, self.version) = (vec![key], version);
    }

    /// Its owner closes it, and opens its memory under another name and key.
    pub(super) fn reopen(&mut self, net: &mut OneRmaNet, at: At, key: RegionKey, version: u64) {
        let SimRegion { id, addr, len } = self.region;
        let card = &mut net.hosts[at].card;
        card.close_region(id).expect("it is open");
        let id = card.open_region(Region { addr, len, owner: OWNER, rights: REMOTE, key });
        self.region.id = id.expect("there is room");
        (self.keys, self.version) = (vec![key], version);
    }
}

/// The most that one operation moves.
pub(super) fn most(op: OneRmaOp, single: bool, config: &CardConfig) -> u64 {
    match op {
        OneRmaOp::Rekey => 16,
        _ if single => 4096,
        /* a 64 B fragment makes many packets */
        _ if config.fragment < 1024 => 4096 + 65,
        _ => PLACE - MARGIN,
    }
}
