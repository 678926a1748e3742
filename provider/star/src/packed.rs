//! WQEs of both queues of SL, many in one packet: records, one behind the other.
//!
//! ```text
//! queue 1 (1: receive) | 0 7 | sequence 24
//! op-code 8 | flags 8 | number of SGEs 8 | 0 7 | its data follows in EDs 1
//! length 32
//!          SEND with immediate data, or with a key: that, 32
//!          other sends but SEND: address 64, operands 64 and 64, rkey 32, immediate data 32, two words
//!          SGEs, or inline bytes
//! ```
//!
//! Bytes in, numbers out.

use starverbs_core::{AvId, Psn, QPN_MASK, SendFlags, SendOp, SendWqe, Sge};

use super::message::Wqe;
use super::message::{
    Body, MAX_SGE, RECV, SGE_LEN, SMALL_INLINE, Sges, WQE_HEAD, WqeReader, Writer, imm_bytes, imm_of, op_of,
    sge, sge_bytes, sge_sum, sum,
};
use super::wire::Queue;

/// Most bytes of records in a packet: with all headers they fit an Ethernet frame.
pub const ROOM: usize = 1408;
/// Bytes of a record of a send before its SGEs or inline bytes, at most.
const SEND_HEAD: usize = 4 + WQE_HEAD;
/// Bytes of a record of a receive before its SGEs.
const RECV_HEAD: usize = 12;
/// Bytes of the largest record.
pub const MAX_RECORD: usize = SEND_HEAD + SMALL_INLINE;
/// Longest message, bytes, whose data may follow its WQE.
pub const MOST_EAGER: u32 = 16 << 10;
/// The bit of the receive queue.
const OF_RECV: u32 = 1 << 31;

/// Bytes of the record of a receive of so many SGEs.
pub const fn recv_len(sges: usize) -> usize {
    RECV_HEAD + sges * SGE_LEN
}

/// Records that are being collected for one packet.
pub struct PackedWqes {
    room: [u8; ROOM],
    most: usize,
    len: usize,
    first: (Queue, Psn),
}

impl PackedWqes {
    /// For so many bytes at most; it takes any record, and no more than [`ROOM`].
    pub fn new(most: usize) -> Self {
        let most = most.clamp(MAX_RECORD, ROOM);
        PackedWqes { room: [0; ROOM], most, len: 0, first: (Queue::Send, Psn::default()) }
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Bytes that still fit.
    pub fn left(&self) -> usize {
        self.most - self.len
    }
    /// The queue and the sequence of its first record.
    pub fn first(&self) -> (Queue, Psn) {
        self.first
    }
    /// The records.
    pub fn bytes(&self) -> &[u8] {
        self.room.get(..self.len).unwrap_or(&[])
    }
    /// They have left.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    fn add(&mut self, of: (Queue, Psn), write: impl FnOnce(&mut Writer<'_>) -> Option<()>) -> Option<()> {
        let mut out = Writer::new(self.room.get_mut(self.len..self.most)?);
        write(&mut out)?;
        let len = out.len();
        if self.len == 0 {
            self.first = of;
        }
        self.len += len;
        Some(())
    }

    /// A receive. `None`: there is no room, or it is none that a packet takes.
    pub fn push_recv(&mut self, seq: Psn, sges: &[Sge]) -> Option<()> {
        if sges.len() > MAX_SGE {
            return None;
        }
        self.add((Queue::Recv, seq), |out| {
            out.word(OF_RECV | seq.get())?;
            out.bytes(&[RECV, 0, sges.len() as u8, 0])?;
            out.word(sum(sges.iter().map(|s| s.len))?)?;
            sges.iter().try_for_each(|s| out.bytes(&sge_bytes(s)))
        })
    }

    /// A send without the INLINE flag; with the EAGER flag, its data follows. `None`: as of
    /// [`push_recv`](PackedWqes::push_recv).
    pub fn push_send(&mut self, seq: Psn, wqe: &SendWqe, sges: &[Sge]) -> Option<()> {
        if sges.len() > MAX_SGE {
            return None;
        }
        let length = sum(sges.iter().map(|s| s.len))?;
        self.add((Queue::Send, seq), |out| {
            send_head(seq, wqe, (sges.len() as u8, length), out)?;
            sges.iter().try_for_each(|s| out.bytes(&sge_bytes(s)))
        })
    }

    /// A send with the INLINE flag, and `length` bytes that `fill` writes. `None`: there is no room, or they
    /// are too many for any packet, or `fill` has said no.
    pub fn push_inline(
        &mut self,
        seq: Psn,
        wqe: &SendWqe,
        length: u32,
        fill: impl FnOnce(&mut [u8]) -> bool,
    ) -> Option<()> {
        if length as usize > SMALL_INLINE {
            return None;
        }
        self.add((Queue::Send, seq), |out| {
            send_head(seq, wqe, (0, length), out)?;
            fill(out.take(length as usize)?).then_some(())
        })
    }
}

/// Whether a send's record has only what a SEND needs.
fn is_short(op: SendOp) -> bool {
    matches!(op, SendOp::Send | SendOp::SendImm | SendOp::SendInv)
}

/// Whether a WQE's data may follow it: a SEND's, from one SGE, and not much.
pub fn may_be_eager(wqe: &SendWqe) -> bool {
    let is_one = wqe.op.is_send() && wqe.num_sge == 1 && !wqe.flags.contains(SendFlags::INLINE);
    is_one && (1..=MOST_EAGER).contains(&wqe.length)
}

fn send_head(seq: Psn, wqe: &SendWqe, (num_sge, length): (u8, u32), out: &mut Writer<'_>) -> Option<()> {
    out.word(seq.get())?;
    let eager = wqe.flags.contains(SendFlags::EAGER);
    out.bytes(&[wqe.op as u8, (wqe.flags - SendFlags::EAGER).bits(), num_sge, u8::from(eager)])?;
    out.word(length)?;
    match wqe.op {
        SendOp::Send => return Some(()),
        op if is_short(op) => return out.bytes(&imm_bytes(op, wqe.imm)),
        _ => {}
    }
    out.long(wqe.remote_addr)?;
    out.long(wqe.compare_add)?;
    out.long(wqe.swap)?;
    out.word(wqe.rkey)?;
    out.bytes(&imm_bytes(wqe.op, wqe.imm))?;
    out.word(wqe.remote_qpn)?;
    out.word(wqe.qkey)
}

/// One WQE of a packet.
#[derive(Clone, Copy, Debug)]
pub struct PackedWqe<'a> {
    /// Its sequence in its queue, which the WQE says
    pub seq: Psn,
    /// The WQE
    pub wqe: Wqe<'a>,
}

/// The records of a packet, from front to back.
pub struct Records<'a>(WqeReader<'a>);

impl<'a> Records<'a> {
    /// Of these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Records(WqeReader(bytes))
    }
}

/// Bytes of a receive of one SGE.
const SHORT_RECV: usize = recv_len(1);

/// The receive of one SGE that these bytes begin with, as most do, and what is behind it. `None`: they begin
/// with something else.
#[inline]
pub fn short_recv(bytes: &[u8]) -> Option<(Psn, Sge, &[u8])> {
    let (record, rest) = bytes.split_first_chunk::<SHORT_RECV>()?;
    let mut from = WqeReader(record);
    let (word, kind, length) = (from.word()?, from.bytes()?, from.word()?);
    let sge = sge(&from.bytes()?);
    let is_one = word & !QPN_MASK == OF_RECV && kind == [RECV, 0, 1, 0] && length == sge.len;
    is_one.then(|| (Psn::new(word & QPN_MASK), sge, rest))
}

/// `None`: what comes next is no record, and nothing behind it is.
impl<'a> Iterator for Records<'a> {
    type Item = Option<PackedWqe<'a>>;

    fn next(&mut self) -> Option<Option<PackedWqe<'a>>> {
        if self.0.end().is_some() {
            return None;
        }
        let record = record(&mut self.0);
        if record.is_none() {
            self.0 = WqeReader(&[]);
        }
        Some(record)
    }
}

fn record<'a>(from: &mut WqeReader<'a>) -> Option<PackedWqe<'a>> {
    let word = from.word()?;
    let recv = word & OF_RECV != 0;
    let seq = word & !OF_RECV;
    let [code, flags, num_sge, eager] = from.bytes()?;
    let flags = SendFlags::from_bits(flags)?;
    if seq > QPN_MASK || eager > 1 || recv != (code == RECV) || recv && !(flags.is_empty() && eager == 0) {
        return None;
    }
    let length = from.word()?;
    let mut wqe = SendWqe { length, num_sge: num_sge.into(), flags, av: AvId(0), ..SendWqe::default() };
    if !recv {
        wqe.op = op_of(code)?;
        rest_of_send(&mut wqe, from)?;
    }
    if eager == 1 {
        if !may_be_eager(&wqe) {
            return None;
        }
        wqe.flags |= SendFlags::EAGER;
    }
    let body = if flags.contains(SendFlags::INLINE) {
        if num_sge != 0 || length as usize > SMALL_INLINE {
            return None;
        }
        Body::Inline(from.take(length as usize)?)
    } else {
        let count = usize::from(num_sge);
        if count > MAX_SGE {
            return None;
        }
        let (sges, []) = from.take(count * SGE_LEN)?.as_chunks::<SGE_LEN>() else { return None };
        if sge_sum(sges) != Some(length) {
            return None;
        }
        Body::Sges(Sges::new(sges))
    };
    Some(PackedWqe { seq: Psn::new(seq), wqe: Wqe { recv, wqe, body } })
}

fn rest_of_send(wqe: &mut SendWqe, from: &mut WqeReader<'_>) -> Option<()> {
    match wqe.op {
        SendOp::Send => return Some(()),
        op if is_short(op) => {
            wqe.imm = imm_of(op, from.bytes()?);
            return Some(());
        }
        _ => {}
    }
    (wqe.remote_addr, wqe.compare_add, wqe.swap) = (from.long()?, from.long()?, from.long()?);
    wqe.rkey = from.word()?;
    wqe.imm = imm_of(wqe.op, from.bytes()?);
    (wqe.remote_qpn, wqe.qkey) = (from.word()?, from.word()?);
    Some(())
}

#[cfg(test)]
#[path = "packed_tests.rs"]
mod tests;
