//! What is set: policy, sizes, placement; and what that takes on the chip.

use thiserror::Error;

use super::{QPC_BYTES, RequestChannel};

/// How requests for contexts are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// First come, first served: a miss blocks all that come after it (section 3)
    Fcfs,
    /// Others pass a miss; order holds within a QP only (sections 4.3, 4.4)
    NonBlocking,
    /// As non-blocking, with the SQ addresses on the chip, and a context is fetched ahead while its WQEs are
    /// (section 4.5)
    #[default]
    LatencyHiding,
}

/// Where contexts lie that are not in the cache (section 4.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ContextPlacement {
    /// In host memory: a fetch takes PCIe's time and bandwidth
    #[default]
    Host,
    /// In memory on the board: a fetch takes none of PCIe's
    Board,
}

/// Sizes and policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// How requests are served
    pub policy: Policy,
    /// Where contexts lie; the caller fetches from there
    pub placement: ContextPlacement,
    /// Contexts in the cache
    pub entries: u32,
    /// Requests in flight of each channel: 1 to 256, as an index has 8 bits (section 4.4)
    pub ooo_cap: u16,
    /// QPs there are; their numbers are 0 to `qps - 1`
    pub qps: u32,
    /// WQEs of a send queue, where its offset wraps
    pub ring_wqes: u16,
}

/// Why a [`CacheConfig`] cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// A cache without entries
    #[error("the QPC cache has no entries")]
    NoEntries,
    /// An out-of-order capacity that an index of 8 bits cannot number
    #[error("the out-of-order capacity is {0}, not 1 to 256")]
    OooCap(u16),
    /// QPNs have 24 bits
    #[error("{0} QPs are none, or more than 2^24")]
    Qps(u32),
    /// A send queue without room
    #[error("a send queue has no WQEs")]
    Ring,
}

/// Bytes on the chip (section 4.7, table 1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnChip {
    /// The QPC cache: 256 B an entry
    pub cache: u64,
    /// Requesters, pending FIFOs and pending record table: 40 B x `ooo_cap` (formula 2); none with FCFS
    pub out_of_order: u64,
    /// The SQ address table: 10 B a QP; none where the QPC is not split
    pub send_rings: u64,
}

impl OnChip {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.cache + self.out_of_order + self.send_rings
    }
}

impl CacheConfig {
    /// Bytes that one more index of each channel takes (formula 2). By the widths that the paper gives (QPN
    /// 24, index 8, channel 2, flags 1 bit each; a count of 8 bits) it is 3 B of index FIFOs, 6 pending
    /// elements of 35 bits and 3 records of 34 bits: 42 B, which the paper rounds to 40.
    pub const BYTES_PER_INDEX: u64 = 40;
    /// Bytes that a QP takes in the SQ address table (section 4.7).
    pub const BYTES_PER_SEND_RING: u64 = 10;

    /// Whether it can be.
    pub fn check(&self) -> Result<(), ConfigError> {
        match self {
            CacheConfig { entries: 0, .. } => Err(ConfigError::NoEntries),
            CacheConfig { ooo_cap, .. } if !(1..=256).contains(ooo_cap) => Err(ConfigError::OooCap(*ooo_cap)),
            CacheConfig { qps, .. } if !(1..=1 << 24).contains(qps) => Err(ConfigError::Qps(*qps)),
            CacheConfig { ring_wqes: 0, .. } => Err(ConfigError::Ring),
            _ => Ok(()),
        }
    }

    /// Whether SQ addresses are kept apart from the contexts.
    pub fn is_split(&self) -> bool {
        self.policy == Policy::LatencyHiding
    }

    /// Slots of the pending record table, and elements of each pending FIFO.
    pub(super) fn slots(&self) -> usize {
        RequestChannel::COUNT * usize::from(self.ooo_cap)
    }

    /// What it takes on the chip.
    pub fn on_chip(&self) -> OnChip {
        OnChip {
            cache: u64::from(self.entries) * u64::from(QPC_BYTES),
            out_of_order: match self.policy {
                Policy::Fcfs => 0,
                _ => Self::BYTES_PER_INDEX * u64::from(self.ooo_cap),
            },
            send_rings: if self.is_split() { Self::BYTES_PER_SEND_RING * u64::from(self.qps) } else { 0 },
        }
    }
}
