//! How large a card's tables are, and how long it waits.

use starverbs_core::Nanos;

use crate::fragments::GRANULE;
use crate::region::CARDS;
use crate::types::MAX_OP;

/// What a card is like. Capacities are fixed when it is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CardConfig {
    /// Which card of its address it is, below [`CARDS`]
    pub card: u8,
    /// Command slots, of all portals
    pub slots: u16,
    /// Portals that may be open at once
    pub portals: u16,
    /// Regions that may be open at once
    pub regions: u16,
    /// WRITEs and REKEYs of others that are under way here
    pub transfers: u16,
    /// Requests for data that wait, of each class
    pub inbound: u16,
    /// Bytes of the solicitation window; at least 4 KB
    pub window: u32,
    /// Data bytes of a packet: a multiple of 64, at most 4096
    pub fragment: u32,
    /// How long an operation waits for the window, ns
    pub dispatch_timeout: Nanos,
    /// How long an operation in service waits for all of its answers at most, ns, up to 2^32 - 1; from the
    /// Ask on anew. A command may have the half of it, or the half of that ([`Command::haste`])
    ///
    /// [`Command::haste`]: crate::OneRmaCommand::haste
    pub timeout: Nanos,
    /// Bytes that others wait for, beyond which their requests are refused (NACK)
    pub nack_threshold: u32,
}

impl Default for CardConfig {
    /// The paper's fabric: round trips of 5 us at 100 Gb/s.
    fn default() -> Self {
        CardConfig::of_fabric(5_000, 100_000_000_000)
    }
}

impl CardConfig {
    /// For a round trip of so many nanoseconds and so many bits a second (1RMA, sections 6.1 and 7.5): waits
    /// of 2 and 4 round trips, a window of one and a half bandwidth-delay products, and NACKs where an answer
    /// would come after its initiator's timeout.
    pub fn of_fabric(rtt: Nanos, bits: u64) -> Self {
        let bytes = |time: Nanos| u128::from(time) * u128::from(bits) / 8_000_000_000;
        let (dispatch_timeout, timeout) = (2 * rtt, 4 * rtt);
        let window = bytes(rtt + rtt / 2).clamp(u128::from(MAX_OP), 1 << 30) as u32;
        let nack_threshold = bytes(timeout - rtt - dispatch_timeout).min(1 << 30) as u32;
        CardConfig {
            card: 0,
            slots: 256,
            portals: 16,
            regions: 256,
            transfers: 256,
            inbound: 1024,
            window,
            fragment: MAX_OP,
            dispatch_timeout,
            timeout,
            nack_threshold,
        }
    }

    /// The same, within what a card can be.
    pub(super) fn bounded(self) -> Self {
        let fragment = self.fragment.clamp(GRANULE, MAX_OP) / GRANULE * GRANULE;
        /* no place is u16::MAX, which is none in a list */
        let few = |capacity: u16| capacity.min(u16::MAX - 1);
        CardConfig {
            card: self.card % CARDS,
            slots: few(self.slots),
            portals: few(self.portals),
            transfers: few(self.transfers),
            window: self.window.clamp(MAX_OP, 1 << 30),
            timeout: self.timeout.min(u32::MAX.into()),
            fragment,
            ..self
        }
    }
}

/// What a card has counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CardCounts {
    /// Packets that came
    pub received: u64,
    /// Of them, that no card sends
    pub malformed: u64,
    /// Of them, for an operation that is not under way, or not with that peer
    pub late: u64,
    /// Of them, with data that is there already
    pub copies: u64,
    /// Of them, whose tag was wrong
    pub forged: u64,
    /// Requests that were answered as not authenticated
    pub auth_failures: u64,
    /// Requests that were refused: too much to do
    pub nacks: u64,
    /// Requests that were refused: bounds or rights
    pub access_failures: u64,
    /// Region keys that were changed by REKEY
    pub rekeys: u64,
    /// Transfers that ended for want of data
    pub transfer_timeouts: u64,
    /// Commands that completed
    pub completed: u64,
    /// Of them, refused by the peer's card: too much to do
    pub refused: u64,
    /// Of them, not admitted or not answered in time
    pub timeouts: u64,
    /// Completions that could not be written
    pub lost_completions: u64,
}
