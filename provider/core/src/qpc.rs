//! QP contexts that never block, as csRNA keeps them (Kang et al., "Towards Connection-Scalable RNIC
//! Architecture", 2023).
//!
//! A card has on-chip memory for a few hundred QP contexts (QPC) and serves tens of thousands of QPs; the
//! rest lies in host or board memory, half a microsecond away. [`Qpc`] is the paper's QPC management module
//! (section 4.3): it answers those whose context is at hand first, and keeps the order within each QP.
//! [`RequesterUnit`] is the other half (section 4.4): who asks, and what waits meanwhile.
//!
//! | unit | paper | here |
//! |---|---|---|
//! | QPC cache, LRU | 3, 5.1 | `cache` |
//! | pending record table | 4.3.2 | `record` |
//! | online and offline pending FIFO | 4.3.1 | `pending` |
//! | request and pending handling unit | 4.3.3, 4.3.4 | `unit` |
//! | requester: index FIFO, waiting memory | 4.4 | `requester` |
//! | SQ address table, QPC split, prefetch | 4.5 | `sq`, `unit` |
//!
//! The module owns contexts and their order. Time and memory are the caller's: it calls [`Qpc::cycle`] once a
//! clock cycle, carries out what [`Qpc::poll_fetch`] and [`Qpc::poll_write_back`] ask for, hands contexts in
//! with [`Qpc::handle_fetched`] in the order in which they were asked for, and takes answers from
//! [`Qpc::poll_response`]. A fetch must see all write-backs that were polled before it.
//!
//! It must not know what a context holds, nor clocks, buses and packets.

mod cache;
mod config;
mod pending;
mod record;
mod requester;
mod sq;
mod unit;

#[cfg(test)]
mod tests;

pub use config::{CacheConfig, ConfigError, ContextPlacement, OnChip, Policy};
pub use requester::{Index, RequesterUnit};
pub use sq::SendRing;
pub use unit::{Qpc, QpcCounters, QpcError, UnitResponse};

/// Bytes of a context in memory: that of a ConnectX-4 (section 2.1).
pub const QPC_BYTES: u32 = 256;

/// Who asks: the three requesters of the RDMA engine (section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestChannel {
    /// The descriptor unit, once a doorbell: where does the SQ lie, and how far was it read?
    Sq = 0,
    /// The requester unit, once a WQE
    Tx = 1,
    /// The responder unit, once a request packet
    Rx = 2,
}

impl RequestChannel {
    /// How many there are.
    pub const COUNT: usize = 3;
    /// All, in the order of their numbers.
    pub const ALL: [RequestChannel; RequestChannel::COUNT] =
        [RequestChannel::Sq, RequestChannel::Tx, RequestChannel::Rx];
}

/// What a cached context must be able to do.
pub trait CachedContext: Clone {
    /// It is read over `channel`, and takes the change that this read brings: the next PSN to send (Tx) or to
    /// expect (Rx), `wqes` descriptors fetched (Sq). Contexts change when they are read, so that the next
    /// read, which may come before the first one's work is done, sees the change.
    fn access(&mut self, channel: RequestChannel, wqes: u16);
    /// Where its SQ lies and how far it was read; asked only where the QPC is not split.
    fn send_ring(&self) -> SendRing;
}
