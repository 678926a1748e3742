//! What queue pairs of two processes say to each other, as records of a channel.
//!
//! A request goes out in the order of its send queue, one record for up to [`CHUNK`] bytes. That it was
//! executed is known by its place in the ring, which the other end gives back: only READs and atomics have
//! answers, and what is refused. A refusal stands in the answers before the place is given back.

use std::mem::offset_of;

use crate::share::GatePass;
use starverbs_core::types::SendOp;
use starverbs_core::{Access, PdId, Qpn, WcStatus};
use starverbs_rings::{DataRoom, Record as Words};
use zerocopy::{FromBytes, Immutable, IntoBytes, transmute};

/// Most bytes of a message in one record.
pub(super) const CHUNK: u32 = 16 << 10;
/// Most bytes of a message that one record has its receiver fetch.
pub(super) const FETCHED: u32 = 64 << 10;
/// Bytes that fit into a record itself.
pub(super) const BODY: usize = 16;

/// Requests that are no operation of a send queue.
pub(super) mod control {
    /// The sender's QP can have a local connection with the QP that it is for
    pub(in super::super) const PROPOSE: u8 = 0x80;
    /// It has none: what was proposed is carried by the wire
    pub(in super::super) const REFUSE: u8 = 0x81;
    /// It proposes it no more
    pub(in super::super) const WITHDRAW: u8 = 0x82;
}

/// Answers.
pub(super) mod answer {
    /// Bytes of a READ: `total` says where they begin
    pub(in super::super) const DATA: u8 = 1;
    /// The value before an atomic, in the body
    pub(in super::super) const VALUE: u8 = 2;
    /// There is no receive: `imm` has the code of the time to wait
    pub(in super::super) const RNR: u8 = 3;
    /// The request failed; `imm` has the status
    pub(in super::super) const REFUSED: u8 = 4;
    /// There is no such connection any more
    pub(in super::super) const GONE: u8 = 5;
    /// The data that the request names cannot be fetched
    pub(in super::super) const COPY: u8 = 6;
}

/// In a proposal that offers memory: who made it fetches the data of SENDs.
const FETCHES: u32 = 1;

/// Flags of a record.
pub(super) mod flag {
    /// The first of a message
    pub(in super::super) const FIRST: u8 = 1;
    /// The last of a message
    pub(in super::super) const LAST: u8 = 2;
    /// The sender asks for an event
    pub(in super::super) const SOLICITED: u8 = 4;
    /// The requester found no memory where it names some
    pub(in super::super) const ABSENT: u8 = 16;
    /// The data of a SEND lies in its sender's memory: `addr` and `rkey` name it
    pub(in super::super) const RENDEZVOUS: u8 = 32;
    /// It is not asked for again, should there be no receive
    pub(in super::super) const NO_MORE: u8 = 64;
    /// `at` says how many requests of the connection's other end the sender has executed
    pub(in super::super) const ACKS: u8 = 8;
}

/// One record: a request or an answer.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct LocalRecord {
    /// [`SendOp`], or one of [`control`] or [`answer`]
    pub(super) op: u8,
    /// Of [`flag`]
    pub(super) flags: u8,
    /// Incarnation of the requester's connection
    pub(super) epoch: u16,
    /// QP that it is for
    pub(super) to: Qpn,
    /// QP of the sender
    pub(super) from: Qpn,
    /// Number of the request among those of its connection
    pub(super) seq: u32,
    /// Bytes of data: in the body, if they fit, else in the data area
    pub(super) len: u32,
    /// Where in the data area; or see [`flag::ACKS`]. Of an answer without data: which record of the channel
    /// it answers
    pub(super) at: u32,
    /// Immediate data, or a key to invalidate
    pub(super) imm: u32,
    /// Key of the responder's memory
    pub(super) rkey: u32,
    /// Bytes of the message; of an answer, where in the message its data begins
    pub(super) total: u32,
    /// Address in the responder's memory
    pub(super) addr_words: [u32; 2],
    /// Short data; atomics: what to compare with or to add, and what to swap in
    pub(super) body: [u8; BODY],
}

const _: () = assert!(
    size_of::<LocalRecord>() == size_of::<Words>() && align_of::<LocalRecord>() == align_of::<Words>()
);

/// The word of a record that says which queue pair it is for.
pub(super) const TO: usize = offset_of!(LocalRecord, to) / size_of::<u32>();

impl LocalRecord {
    #[inline]
    pub(super) fn of(words: Words) -> LocalRecord {
        transmute!(words)
    }

    #[inline]
    pub(super) fn words(self) -> Words {
        transmute!(self)
    }

    /// Writes it to where it goes; gives where its body lies there.
    #[inline]
    pub(super) fn write_to(self, room: DataRoom) -> *mut u8 {
        let place = room.record.cast::<LocalRecord>();
        // SAFETY: a record's words, which are the writer's alone.
        unsafe {
            place.write(self);
            (&raw mut (*place).body).cast()
        }
    }

    #[inline]
    pub(super) fn addr(&self) -> u64 {
        u64::from(self.addr_words[0]) | u64::from(self.addr_words[1]) << 32
    }

    #[inline]
    pub(super) fn set_addr(&mut self, addr: u64) {
        self.addr_words = [addr as u32, (addr >> 32) as u32];
    }

    #[inline]
    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// The operation that is asked for.
    #[inline]
    pub(super) fn send_op(&self) -> SendOp {
        SendOp::decode(self.op)
    }

    /// Whether its data is in the record itself.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        self.len as usize <= BODY
    }

    /// Whether its data is to be fetched from its sender.
    #[inline]
    pub(super) fn is_rendezvous(&self) -> bool {
        if !self.has(flag::RENDEZVOUS) {
            return false;
        }
        self.len <= FETCHED && self.send_op().is_send()
    }

    /// An answer to it.
    pub(super) fn answer(&self, op: u8) -> LocalRecord {
        let LocalRecord { epoch, to, from, seq, .. } = *self;
        LocalRecord { op, epoch, to: from, from: to, seq, ..LocalRecord::default() }
    }

    /// The answer that it was refused.
    pub(super) fn refused(&self, status: WcStatus) -> LocalRecord {
        LocalRecord { imm: status as u32, ..self.answer(answer::REFUSED) }
    }

    /// Two words of the body: an atomic's.
    pub(super) fn operands(&self) -> [u64; 2] {
        transmute!(self.body)
    }

    /// A proposal says how the peer reaches the proposer's memory by itself: the proposer's gate, its QP's
    /// protection domain and access rights.
    pub(super) fn offer(&mut self, gate: GatePass, pd: PdId, access: Access) {
        (self.total, self.seq) = (1, FETCHES);
        (self.rkey, self.imm) = (pd.0, access.bits());
        self.addr_words = [gate.number, gate.incarnation];
    }

    /// Whether who proposes fetches the data of SENDs.
    pub(super) fn fetches(&self) -> bool {
        self.seq & FETCHES != 0
    }

    /// What [`LocalRecord::offer`] put there.
    pub(super) fn offered(&self) -> Option<(GatePass, PdId, Access)> {
        let [number, incarnation] = self.addr_words;
        let access = Access::from_bits_truncate(self.imm);
        (self.total == 1).then_some((GatePass { number, incarnation }, PdId(self.rkey), access))
    }

    /// The same, to be sent.
    pub(super) fn set_operands(&mut self, operands: [u64; 2]) {
        self.body = transmute!(operands);
    }
}
