//! Messages between cards that share an XRC domain, about requests that reach a QP of one and name an SRQ of
//! the other.
//!
//! The QP's card leases receive WQEs of the SRQ, forwards requests into them, and acknowledges once the SRQ's
//! card has confirmed that they are in memory. Responses with data or a result come from the SRQ's card. Owns
//! the messages and their encoding; it must not know how they travel.

use crate::types::{FlushLevel, Mtu, Placement, Psn, Qpn, WcFlags};

/// A connection to another card's process. Its host gives the numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkId(pub u32);

/// Why there is no link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkError {
    /// The other process does not answer now
    Busy,
    /// There is no such process in the domain
    Gone,
}

/// One message. The SRQ's card names leased WQEs (`lease`), the QP's card names messages (`serial`); SRQs
/// have their number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Relay<'a> {
    /// QP's card: requests leases
    RequestLease {
        /// Of this SRQ's WQEs
        srq: u32,
        /// How many at most
        count: u32,
    },
    /// QP's card: bytes of a message
    Data {
        /// Where they belong
        part: MessagePart,
        /// The bytes
        data: &'a [u8],
    },
    /// QP's card: bytes of an RDMA WRITE. The end of one with immediate data uses a lease.
    Write {
        /// Which message they are part of
        part: MessagePart,
        /// Memory of the SRQ's protection domain
        place: TargetMemory,
        /// The bytes
        data: &'a [u8],
    },
    /// QP's card: an atomic, ATOMIC WRITE or FLUSH, to be executed once
    Execute {
        /// The request
        from: RelayOrigin,
        /// The memory that it names
        place: TargetMemory,
        /// The operation
        what: Operation,
    },
    /// QP's card: requests the next bytes of a READ response
    Fetch {
        /// The READ
        from: RelayOrigin,
        /// From here on
        place: TargetMemory,
        /// So many
        wanted: WantedPart,
    },
    /// QP's card: ends a lease that it will not use (further)
    Return {
        /// The lease
        lease: u32,
        /// The QP that had it
        qpn: Qpn,
        /// The reason
        why: Returned,
    },
    /// SRQ's card: leases a WQE
    Lease {
        /// Of this SRQ
        srq: u32,
        /// Names the lease
        lease: u32,
        /// Bytes of the WQE's buffers
        room: u32,
    },
    /// SRQ's card: there is no WQE
    Refuse {
        /// In this SRQ
        srq: u32,
        /// There is no such SRQ either
        gone: bool,
    },
    /// SRQ's card: the outcome of a message or request
    Done {
        /// The QP that received it
        qpn: Qpn,
        /// Its serial
        serial: u32,
        /// The outcome
        outcome: RelayOutcome,
        /// The value that an atomic found
        found: u64,
    },
    /// SRQ's card: a response packet of a READ
    Bytes {
        /// The QP that received the READ
        qpn: Qpn,
        /// As of a [`MessagePart`]
        epoch: u32,
        /// The response packet
        psn: Psn,
        /// The outcome
        outcome: RelayOutcome,
        /// Its bytes, if it is a success
        data: &'a [u8],
    },
    /// SRQ's card: revokes unused leases
    Revoke {
        /// Those of this SRQ
        srq: u32,
    },
}

/// Where bytes of a message belong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessagePart {
    /// The leased WQE
    pub lease: u32,
    /// Names the message, by the QP's card
    pub serial: u32,
    /// The QP that received it
    pub qpn: Qpn,
    /// Its connection: after a fault nothing more of the same one is taken
    pub epoch: u32,
    /// From here on in the WQE's buffers
    pub offset: u32,
    /// These are the last
    pub end: Option<MessageEnd>,
}

/// Which memory a request names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TargetMemory {
    /// The SRQ that it names, whose protection domain must have the memory
    pub srq: u32,
    /// Address: of these bytes
    pub va: u64,
    /// Its key
    pub key: u32,
    /// Bytes: of a WRITE the whole message, of a READ what is left
    pub total: u32,
}

/// The request that is forwarded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RelayOrigin {
    /// Names the request, by the QP's card
    pub serial: u32,
    /// As of a [`MessagePart`]
    pub qpn: Qpn,
    /// As of a [`MessagePart`]
    pub epoch: u32,
}

/// What is executed on memory and answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Fetch and add of this value
    Add(u64),
    /// Compare and swap
    Swap {
        /// What must be there
        compare: u64,
        /// What takes its place
        swap: u64,
    },
    /// ATOMIC WRITE of these bytes
    Store([u8; 8]),
    /// FLUSH of placement type and level
    Flush(Placement, FlushLevel),
}

/// The part of a READ response that is requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WantedPart {
    /// The first packet
    pub psn: Psn,
    /// How many; 0 of a request that is only looked at
    pub packets: u32,
    /// Bytes of each but the last
    pub mtu: Mtu,
    /// The request comes in the order of its connection. False: it came before, and bytes are requested
    /// again, or the next ones.
    pub first: bool,
}

/// Fields of a message's completion, beside its length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessageEnd {
    /// The sender's QP
    pub src_qp: Qpn,
    /// As in a completion
    pub imm: u32,
    /// WITH_IMM, WITH_INV
    pub flags: WcFlags,
    /// The sender asked for an event
    pub solicited: bool,
}

/// Why a lease ends without a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Returned {
    /// No byte of a message was placed in it
    Unused,
    /// The QP ended, or failed, in the middle of a message
    Flushed,
    /// The message was longer than the buffers
    TooLong,
}

/// The outcome of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RelayOutcome {
    /// In memory, and completed
    Success,
    /// There is no such WQE or SRQ any more
    Invalid,
    /// It may not access that memory
    Access,
    /// The buffers cannot be written
    Operation,
    /// In memory, but its receive failed: the key that it names cannot be invalidated (class J)
    ReceivedInError,
}

/// Most response packets that one fetch requests.
pub const AHEAD: u32 = 16;

/// Bytes of a message before its data.
pub const HEAD: usize = WORDS * 4;
const WORDS: usize = 15;

impl Relay<'_> {
    /// Whether it must arrive: hosts queue it until there is room. The others may be refused.
    pub fn is_due(&self) -> bool {
        match self {
            Relay::RequestLease { .. } | Relay::Data { .. } | Relay::Write { .. } | Relay::Execute { .. } => {
                false
            }
            Relay::Fetch { wanted, .. } => !wanted.first,
            _ => true,
        }
    }

    /// Its bytes: these, and its data behind them.
    pub fn encode(&self) -> ([u8; HEAD], &[u8]) {
        let mut data = &[][..];
        let mut w = [0; WORDS];
        let mut put = |words: &[u32]| w.iter_mut().zip(words).for_each(|(to, word)| *to = *word);
        match *self {
            Relay::RequestLease { srq, count } => put(&[1, srq, count]),
            Relay::Data { part, data: bytes } => {
                data = bytes;
                put(&part.words(2));
            }
            Relay::Return { lease, qpn, why } => put(&[3, lease, qpn, why as u32]),
            Relay::Lease { srq, lease, room } => put(&[4, srq, lease, room]),
            Relay::Refuse { srq, gone } => put(&[5, srq, u32::from(gone)]),
            Relay::Done { qpn, serial, outcome, found } => {
                let [low, high] = halves(found);
                put(&[6, qpn, serial, outcome as u32, low, high]);
            }
            Relay::Revoke { srq } => put(&[7, srq]),
            Relay::Write { part, place, data: bytes } => {
                data = bytes;
                put(&part.words(8));
                w[PART..].copy_from_slice(&place.words());
            }
            Relay::Execute { from: RelayOrigin { serial, qpn, epoch }, place, what } => {
                let (kind, [a, b, c, d]) = what.words();
                put(&[9, kind, serial, qpn, epoch, a, b, c, d]);
                w[PART..].copy_from_slice(&place.words());
            }
            Relay::Fetch { from: RelayOrigin { serial, qpn, epoch }, place, wanted } => {
                let WantedPart { psn, packets, mtu, first } = wanted;
                put(&[10, psn.get(), serial, qpn, epoch, packets, mtu as u32, u32::from(first)]);
                w[PART..].copy_from_slice(&place.words());
            }
            Relay::Bytes { qpn, epoch, psn, outcome, data: bytes } => {
                data = bytes;
                put(&[11, psn.get(), outcome as u32, qpn, epoch]);
            }
        }
        let mut head = [0; HEAD];
        for (to, word) in head.as_chunks_mut::<4>().0.iter_mut().zip(w) {
            *to = word.to_ne_bytes();
        }
        (head, data)
    }

    /// The message that these bytes are.
    pub fn decode(bytes: &[u8]) -> Option<Relay<'_>> {
        let (head, data) = bytes.split_first_chunk::<HEAD>()?;
        let mut w = [0; WORDS];
        for (to, word) in w.iter_mut().zip(head.as_chunks::<4>().0) {
            *to = u32::from_ne_bytes(*word);
        }
        Some(match w[0] {
            1 => Relay::RequestLease { srq: w[1], count: w[2] },
            2 => Relay::Data { part: MessagePart::of(&w), data },
            3 => {
                let why = match w[3] {
                    0 => Returned::Unused,
                    1 => Returned::Flushed,
                    2 => Returned::TooLong,
                    _ => return None,
                };
                Relay::Return { lease: w[1], qpn: w[2], why }
            }
            4 => Relay::Lease { srq: w[1], lease: w[2], room: w[3] },
            5 => Relay::Refuse { srq: w[1], gone: w[2] != 0 },
            6 => {
                let outcome = RelayOutcome::of(w[3])?;
                Relay::Done { qpn: w[1], serial: w[2], outcome, found: whole(w[4], w[5]) }
            }
            7 => Relay::Revoke { srq: w[1] },
            8 => Relay::Write { part: MessagePart::of(&w), place: TargetMemory::of(&w), data },
            9 => {
                let what = Operation::of(w[1], [w[5], w[6], w[7], w[8]])?;
                Relay::Execute { from: RelayOrigin::of(&w), place: TargetMemory::of(&w), what }
            }
            10 => {
                let (psn, mtu) = (Psn::new(w[1]), Mtu::from_code(w[6])?);
                let wanted = WantedPart { psn, packets: w[5], mtu, first: w[7] != 0 };
                Relay::Fetch { from: RelayOrigin::of(&w), place: TargetMemory::of(&w), wanted }
            }
            11 => {
                let (psn, outcome) = (Psn::new(w[1]), RelayOutcome::of(w[2])?);
                Relay::Bytes { qpn: w[3], epoch: w[4], psn, outcome, data }
            }
            _ => return None,
        })
    }
}

/// Words before those of a [`TargetMemory`].
const PART: usize = WORDS - 5;

fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

fn whole(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

impl TargetMemory {
    fn words(&self) -> [u32; WORDS - PART] {
        let TargetMemory { srq, va, key, total } = *self;
        let [low, high] = halves(va);
        [srq, low, high, key, total]
    }

    fn of(w: &[u32; WORDS]) -> TargetMemory {
        TargetMemory {
            srq: w[PART],
            va: whole(w[PART + 1], w[PART + 2]),
            key: w[PART + 3],
            total: w[PART + 4],
        }
    }
}

impl RelayOrigin {
    fn of(w: &[u32; WORDS]) -> RelayOrigin {
        RelayOrigin { serial: w[2], qpn: w[3], epoch: w[4] }
    }
}

impl RelayOutcome {
    fn of(word: u32) -> Option<RelayOutcome> {
        Some(match word {
            0 => RelayOutcome::Success,
            1 => RelayOutcome::Invalid,
            2 => RelayOutcome::Access,
            3 => RelayOutcome::Operation,
            4 => RelayOutcome::ReceivedInError,
            _ => return None,
        })
    }
}

impl Operation {
    /// Its kind, and what belongs to it.
    fn words(&self) -> (u32, [u32; 4]) {
        let (kind, first, second) = match *self {
            Operation::Add(value) => (0, value, 0),
            Operation::Swap { compare, swap } => (1, compare, swap),
            Operation::Store(bytes) => (2, u64::from_ne_bytes(bytes), 0),
            Operation::Flush(placement, level) => (3, u64::from(placement.bits()), level as u64),
        };
        let ([a, b], [c, d]) = (halves(first), halves(second));
        (kind, [a, b, c, d])
    }

    fn of(kind: u32, [a, b, c, d]: [u32; 4]) -> Option<Operation> {
        let (first, second) = (whole(a, b), whole(c, d));
        Some(match kind {
            0 => Operation::Add(first),
            1 => Operation::Swap { compare: first, swap: second },
            2 => Operation::Store(first.to_ne_bytes()),
            3 => {
                let placement = Placement::from_bits(u8::try_from(first).ok()?)?;
                Operation::Flush(Some(placement).filter(|p| !p.is_empty())?, FlushLevel::from_code(c)?)
            }
            _ => return None,
        })
    }
}

impl MessagePart {
    fn words(&self, kind: u32) -> [u32; PART] {
        let MessagePart { lease, serial, qpn, epoch, offset, end } = *self;
        let how = |end: &MessageEnd| 1 | u32::from(end.solicited) << 1;
        let (src_qp, imm, flags) = end.map_or((0, 0, 0), |e| (e.src_qp, e.imm, u32::from(e.flags.bits())));
        [kind, lease, serial, qpn, epoch, offset, end.as_ref().map_or(0, how), src_qp, imm, flags]
    }

    fn of(w: &[u32; WORDS]) -> MessagePart {
        let flags = WcFlags::from_bits_truncate(w[9] as u8) & (WcFlags::WITH_IMM | WcFlags::WITH_INV);
        let end = MessageEnd { src_qp: w[7], imm: w[8], flags, solicited: w[6] & 2 != 0 };
        let end = (w[6] & 1 != 0).then_some(end);
        MessagePart { lease: w[1], serial: w[2], qpn: w[3], epoch: w[4], offset: w[5], end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_encoding() {
        let flags = WcFlags::WITH_IMM;
        let end = MessageEnd { src_qp: 5, imm: 6, flags, solicited: true };
        let part = MessagePart { lease: 1, serial: 2, qpn: 3, epoch: 8, offset: 4, end: None };
        let place = TargetMemory { srq: 1, va: 0x1234_5678_9abc_def0, key: 2, total: 3 };
        let from = RelayOrigin { serial: 2, qpn: 3, epoch: 8 };
        let wanted = WantedPart { psn: Psn::new(9), packets: 4, mtu: Mtu::M256, first: true };
        for message in [
            Relay::RequestLease { srq: 1, count: 2 },
            Relay::Data { part, data: b"abc" },
            Relay::Data { part: MessagePart { end: Some(end), ..part }, data: b"" },
            Relay::Return { lease: 1, qpn: 2, why: Returned::TooLong },
            Relay::Lease { srq: 1, lease: 2, room: 3 },
            Relay::Refuse { srq: 1, gone: true },
            Relay::Done { qpn: 1, serial: 2, outcome: RelayOutcome::Operation, found: 0x1234_5678_9abc_def0 },
            Relay::Revoke { srq: 9 },
            Relay::Write { part, place, data: b"defg" },
            Relay::Execute { from, place, what: Operation::Add(1 << 40) },
            Relay::Execute { from, place, what: Operation::Swap { compare: 1 << 41, swap: u64::MAX } },
            Relay::Execute { from, place, what: Operation::Store(*b"8 bytes.") },
            Relay::Execute { from, place, what: Operation::Flush(Placement::GLOBAL, FlushLevel::Mr) },
            Relay::Fetch { from, place, wanted },
            Relay::Fetch { from, place, wanted: WantedPart { first: false, ..wanted } },
            Relay::Bytes { qpn: 3, epoch: 8, psn: Psn::new(5), outcome: RelayOutcome::Success, data: b"hi" },
        ] {
            let (head, data) = message.encode();
            let bytes = [&head[..], data].concat();
            assert_eq!(Relay::decode(&bytes), Some(message));
            assert_eq!(Relay::decode(&bytes[..HEAD - 1]), None);
        }
        for kind in [0, 9, 10, 11, 12, u32::MAX] {
            let mut bytes = [0xff; HEAD];
            bytes[..4].copy_from_slice(&kind.to_ne_bytes());
            assert_eq!(Relay::decode(&bytes), None);
        }
    }
}
