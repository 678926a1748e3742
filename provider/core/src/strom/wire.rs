//! What stands in front of an RPC's parameters, and behind its answer. All numbers are little-endian.
//!
//! The paper's parameters begin with the requester's address; its other parts are ours (docs/strom.md).

use bitflags::bitflags;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a [`ReplyHead`].
pub const TARGET_LEN: usize = size_of::<ReplyHead>();
/// Bytes of a [`ReplyRecord`].
pub const RECORD_LEN: usize = size_of::<ReplyRecord>();

/// How an RPC ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u32)]
pub enum Code {
    /// The kernel did what it was asked
    #[default]
    Ok = 0,
    /// No kernel has this RPC op-code, or it was unloaded meanwhile
    NoKernel = 1,
    /// Parameters that the kernel does not take
    BadParam = 2,
    /// There is no such thing in the data structure
    NotFound = 3,
    /// Given up after as many tries as were asked for
    Retries = 4,
    /// A key does not open the memory, or not for this
    Access = 5,
    /// The answer is longer than the region for it; the record's length is what it would have been. Or the
    /// kernel's own room is used up
    Overflow = 6,
    /// The kernel is broken: a program of a user's that broke a rule
    Fault = 7,
}

impl Code {
    /// From its number. `None`: there is none such.
    pub const fn from_number(number: i32) -> Option<Self> {
        Some(match number {
            0 => Code::Ok,
            1 => Code::NoKernel,
            2 => Code::BadParam,
            3 => Code::NotFound,
            4 => Code::Retries,
            5 => Code::Access,
            6 => Code::Overflow,
            7 => Code::Fault,
            _ => return None,
        })
    }
}

/// How a request of a card's own program at a kernel ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RpcOutcome {
    /// Its code
    pub code: Code,
    /// Bytes of the answer; of OVERFLOW how many there would have been, of other failures 0
    pub len: u32,
}

bitflags! {
    /// How an answer is to come.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct ReplyFlags: u32 {
        /// It takes a receive, and completes it
        const IMM = 1;
        /// With `IMM`: one that ends well has no record, whose place is left as it is; the receive's
        /// completion has the length
        const BARE = 2;
    }
}

/// The head of an RPC's parameters: where its answer goes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct ReplyHead {
    addr: U64,
    rkey: U32,
    len: U32,
    imm: [u8; 4],
    flags: U32,
}

/// A decoded [`ReplyHead`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReplyTarget {
    /// First byte of the requester's region
    pub addr: u64,
    /// Its key
    pub rkey: u32,
    /// Its length, bytes; 0: no answer is wanted
    pub len: u32,
    /// Immediate data, as it lies on the wire
    pub imm: u32,
    /// How it is to come
    pub flags: ReplyFlags,
}

impl ReplyHead {
    /// Encodes where an answer goes.
    pub fn new(reply: &ReplyTarget) -> Self {
        ReplyHead {
            addr: reply.addr.into(),
            rkey: reply.rkey.into(),
            len: reply.len.into(),
            imm: reply.imm.to_ne_bytes(),
            flags: reply.flags.bits().into(),
        }
    }

    /// The head of `params`, and what is behind it. `None`: too short, a region that cannot hold a record,
    /// or flags that there are not, or not alone.
    pub fn decode(params: &[u8]) -> Option<(ReplyTarget, &[u8])> {
        let (head, rest) = ReplyHead::ref_from_prefix(params).ok()?;
        let len = head.len.get();
        let fits = len == 0 || len as usize >= RECORD_LEN;
        let flags =
            ReplyFlags::from_bits(head.flags.get()).filter(|flags| fits && *flags != ReplyFlags::BARE)?;
        let (addr, rkey, imm) = (head.addr.get(), head.rkey.get(), u32::from_ne_bytes(head.imm));
        Some((ReplyTarget { addr, rkey, len, imm, flags }, rest))
    }

    /// Whether an RPC with these parameters is answered.
    pub(crate) fn wants_answer(params: &[u8]) -> bool {
        ReplyHead::ref_from_prefix(params).is_ok_and(|(head, _)| head.len.get() > 0)
    }
}

/// What a record says of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RpcAnswer {
    /// RPC op-code that is answered, its low 32 bits
    pub op: u32,
    /// Bytes of the answer, in front of the record
    pub length: u32,
    /// A [`Code`]; others than these from a card of a later version
    pub code: u32,
}

/// The last bytes of the region for an answer; the answer ends in front of it. What a program polls: the
/// card writes its last eight bytes last, if they are aligned.
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ReplyRecord {
    op: U32,
    length: U32,
    code: U32,
    magic: U32,
}

impl ReplyRecord {
    /// Nothing that a program clears it to.
    pub const MAGIC: u32 = u32::from_le_bytes(*b"StRM");

    /// Of an RPC by its op-code (its low 32 bits), whose answer has `length` bytes.
    pub fn new(op: u64, length: u32, code: Code) -> Self {
        let magic = ReplyRecord::MAGIC.into();
        ReplyRecord { op: (op as u32).into(), length: length.into(), code: (code as u32).into(), magic }
    }

    /// What the record at the end of a region says, if it was written.
    pub fn decode(region: &[u8]) -> Option<RpcAnswer> {
        let (_, record) = ReplyRecord::ref_from_suffix(region).ok()?;
        let (op, length, code) = (record.op.get(), record.length.get(), record.code.get());
        (record.magic.get() == ReplyRecord::MAGIC).then_some(RpcAnswer { op, length, code })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_and_records_have_their_places() {
        let reply =
            ReplyTarget { addr: 0x0102_0304_0506_0708, rkey: 9, len: 64, imm: 7, flags: ReplyFlags::IMM };
        let mut params = ReplyHead::new(&reply).as_bytes().to_vec();
        assert_eq!((params.len(), TARGET_LEN, params[0], params[12]), (24, 24, 8, 64));
        params.extend_from_slice(b"more");
        assert_eq!(ReplyHead::decode(&params), Some((reply, &b"more"[..])));
        assert!(ReplyHead::decode(&params[..23]).is_none());
        params[20] = 2;
        assert!(ReplyHead::decode(&params).is_none(), "a flag that there is not");
        let short = ReplyHead::new(&ReplyTarget { len: 15, ..ReplyTarget::default() });
        assert!(ReplyHead::decode(short.as_bytes()).is_none(), "no room for a record");
        let record = ReplyRecord::new(0x1_0000_0003, 5, Code::NotFound);
        assert_eq!(
            ReplyRecord::decode(&[b"data", record.as_bytes()].concat()),
            Some(RpcAnswer { op: 3, length: 5, code: 3 })
        );
        assert_eq!(ReplyRecord::decode(&[0; 16]), None);
        assert_eq!(record.as_bytes()[12..], *b"StRM");
    }
}
