//! StRoM, if a capability says so: B66 to B69.

use starverbs_core::strom::{
    ANY_OP, Code, RECORD_LEN, ReplyFlags, ReplyHead, ReplyRecord, ReplyTarget, RpcAnswer, TARGET_LEN,
};
use starverbs_queues::board::*;
use starverbs_queues::{SendOp, SendWqe, WcStatus};
use zerocopy::IntoBytes;

use super::optional::needs;
use crate::bench::Bench;
use crate::fault::{Tested, expect};
use crate::qp::{RawQp, UC, address, data, request};
use crate::raw::{BASE, Basics, DATA, QP_BYTES, QPS, RawDriver};

const EINVAL: u32 = libc::EINVAL as u32;
const EBUSY: u32 = libc::EBUSY as u32;
const EFAULT: u32 = libc::EFAULT as u32;
const EOPNOTSUPP: u32 = libc::EOPNOTSUPP as u32;

/// The RPC op-code of most.
const OP: u64 = 0x1_0000_0053;
/// Where the answers of a queue pair stand, behind its queues.
const ANSWERS: usize = 0x8000;
/// How many: fewer than RPCs are sent.
const SLOTS: u8 = 2;
/// Where an answer goes: its last byte is in front of this.
const ANSWER_END: usize = 0x5000;
/// Bytes for it.
const ANSWER_ROOM: usize = 64;
/// Entry 0 of a hash table, and the value that it has for key 7.
const TABLE: usize = 0x6000;
const VALUE: usize = 0x6100;
const TEXT: &[u8; 8] = b"a value!";

/// A queue pair that speaks the dialect.
fn create(raw: &RawDriver, of: Basics, n: usize) -> CreateQp {
    let at = raw.at(QPS + n * QP_BYTES);
    let plain = RawDriver::create_qp(of.pd, of.cq.number, at);
    let answers = BASE + (at + ANSWERS) as u64;
    CreateQp { flags: plain.flags | QP_RPC, answer_slots: SLOTS, answers, ..plain }
}

/// A connection of two, the second of which is asked.
struct Ends {
    raw: RawDriver,
    of: Basics,
    a: RawQp,
    b: RawQp,
}

impl Ends {
    fn open(bench: &mut Bench) -> Tested<Ends> {
        let mut raw = bench.open()?;
        needs(&mut raw, CAP_STROM, "CAP_STROM")?;
        let of = raw.basics()?;
        let (first, second) = (create(&raw, of, 0), create(&raw, of, 1));
        let (a, b) = (raw.qp_of(0, &first)?, raw.qp_of(1, &second)?);
        raw.connect_qp(a, b.qpn)?;
        raw.connect_qp(b, a.qpn)?;
        raw.put(DATA + VALUE, TEXT);
        let bucket = [7, address(VALUE), TEXT.len() as u64];
        raw.put(DATA + TABLE, &[0; 64]);
        raw.put(DATA + TABLE, bucket.as_bytes());
        Ok(Ends { raw, of, a, b })
    }

    /// Parameters of GET, of a table that this key opens.
    fn get(&self, key: u32) -> Vec<u8> {
        let words = [0, key, self.of.key, 4];
        [[address(TABLE), 7].as_bytes(), words.as_bytes()].concat()
    }

    fn head(&self) -> ReplyHead {
        let (addr, rkey) = (address(ANSWER_END - ANSWER_ROOM), self.of.key);
        let (len, flags) = (ANSWER_ROOM as u32, ReplyFlags::empty());
        ReplyHead::new(&ReplyTarget { addr, rkey, len, imm: 0, flags })
    }

    /// Posts an RPC with these parameters.
    fn post(&mut self, op: u64, params: &[u8]) -> Tested {
        let wqe = SendWqe { remote_addr: op, ..request(SendOp::Rpc, 5) };
        let bytes = [self.head().as_bytes(), params].concat();
        self.raw.put_inline(&mut self.a, wqe, &bytes);
        self.raw.doorbell(&self.a)
    }

    /// The same; gives the answer's code and bytes, once it is there and the RPC has completed.
    fn call(&mut self, op: u64, params: &[u8]) -> Tested<(u32, Vec<u8>)> {
        self.raw.put(DATA + ANSWER_END - ANSWER_ROOM, &[0; ANSWER_ROOM]);
        self.post(op, params)?;
        let end = DATA + ANSWER_END;
        let came = |raw: &mut RawDriver| Ok(ReplyRecord::decode(&raw.bytes(end - RECORD_LEN, RECORD_LEN)));
        let RpcAnswer { op: of, length, code } = self.raw.wait("the answer of a kernel", came)?;
        expect("the op-code of an answer", of, op as u32)?;
        let cqe = self.raw.completion()?;
        expect("the completion of an RPC", (cqe.wr_id, cqe.status), (5, WcStatus::Success))?;
        let length = if code == 0 { (length as usize).min(ANSWER_ROOM - RECORD_LEN) } else { 0 };
        Ok((code, self.raw.bytes(end - RECORD_LEN - length, length)))
    }

    /// The same of GET, by a key that opens its table.
    fn gets(&mut self, op: u64, key: u32) -> Tested<Result<Vec<u8>, u32>> {
        let (code, bytes) = self.call(op, &self.get(key))?;
        Ok(if code == Code::Ok as u32 { Ok(bytes) } else { Err(code) })
    }

    /// The status of a command about what answers RPCs.
    fn change(&mut self, command: u16, kernel: RpcKernel) -> Tested<Result<(), u32>> {
        Ok(self.raw.command::<Object>(command, kernel.as_bytes())?.map(drop))
    }

    fn load(&mut self, pd: u32, op: u64, kernel: u32, flags: u32) -> Tested<Result<(), u32>> {
        self.change(OP_LOAD_KERNEL, RpcKernel { op, pd, kernel, flags, reserved: 0 })
    }

    fn unload(&mut self, pd: u32, op: u64) -> Tested<Result<(), u32>> {
        self.change(OP_UNLOAD_KERNEL, RpcKernel { op, pd, ..RpcKernel::default() })
    }
}

pub(super) fn answers(bench: &mut Bench) -> Tested {
    let mut ends = Ends::open(bench)?;
    let (right, pd, key) = (create(&ends.raw, ends.of, 2), ends.of.pd, ends.of.key);
    for (what, wrong, errno) in [
        ("UC", CreateQp { kind: UC, ..right }, EOPNOTSUPP),
        ("no answers", CreateQp { answer_slots: 0, ..right }, EINVAL),
        ("too many answers", CreateQp { answer_slots: MAX_ANSWERS as u8 + 1, ..right }, EINVAL),
        ("a crooked place for answers", CreateQp { answers: right.answers + 8, ..right }, EINVAL),
        ("answers at no address", CreateQp { answers: 0, ..right }, EFAULT),
        ("a place for answers that is none", CreateQp { answers: 1 << 40, ..right }, EFAULT),
    ] {
        let done = ends.raw.command::<NumberReply>(OP_CREATE_QP, wrong.as_bytes())?.map(drop);
        expect(&format!("status of StRoM with {what}"), done, Err(errno))?;
    }
    expect("status of LOAD_KERNEL", ends.load(pd, OP, KERNEL_GET, 0)?, Ok(()))?;
    for n in 0..u64::from(3 * SLOTS) {
        expect("the answer of GET", ends.gets(OP, key)?, Ok(TEXT.to_vec()))?;
        /* what the other end posts stands beside its answers, and is counted by itself */
        let Ends { raw, a, b, .. } = &mut ends;
        raw.exchange(key, b, a, n)?;
        let released = raw.released(b);
        expect("send_released of the end that answers", released, b.sends)?;
    }
    expect("a completion of an answer", ends.raw.poll(), None)?;
    let Ends { raw, of, .. } = &mut ends;
    let (mut c, d) = (raw.qp(of.pd, of.cq.number, 2)?, raw.qp(of.pd, of.cq.number, 3)?);
    raw.connect_qp(c, d.qpn)?;
    raw.put_inline(&mut c, SendWqe { remote_addr: OP, ..request(SendOp::Rpc, 6) }, &[0; TARGET_LEN]);
    raw.doorbell(&c)?;
    let status = raw.completion()?.status;
    expect("status of an RPC of a queue pair that speaks no StRoM", status, WcStatus::LocQpOpErr)
}

pub(super) fn kernels(bench: &mut Bench) -> Tested {
    let mut ends = Ends::open(bench)?;
    let (pd, key) = (ends.of.pd, ends.of.key);
    let other = ends.raw.number(OP_ALLOC_PD, &[])?.number;
    expect("status of a kernel that there is not", ends.load(pd, OP, 999, 0)?, Err(EOPNOTSUPP))?;
    expect("status of a wild flag", ends.load(pd, OP, KERNEL_GET, 1 << 31)?, Err(EINVAL))?;
    let none = ends.load(other + 100, OP, KERNEL_GET, 0)?;
    expect("status of a kernel in a domain that there is not", none, Err(EINVAL))?;
    expect("status of unloading nothing", ends.unload(pd, OP)?, Err(EINVAL))?;
    expect("status of a first kernel", ends.load(pd, OP, KERNEL_HLL, 0)?, Ok(()))?;
    expect("status of a second one", ends.load(pd, OP, KERNEL_GET, 0)?, Err(EBUSY))?;
    expect("status of one that replaces it", ends.load(pd, OP, KERNEL_GET, KERNEL_REPLACE)?, Ok(()))?;
    expect("the answer of what replaced it", ends.gets(OP, key)?, Ok(TEXT.to_vec()))?;
    expect("status of unloading it", ends.unload(pd, OP)?, Ok(()))?;
    expect("the answer of no kernel", ends.gets(OP, key)?, Err(Code::NoKernel as u32))?;
    expect("status of one for all op-codes", ends.load(pd, ANY_OP, KERNEL_GET, 0)?, Ok(()))?;
    expect("its answer to any", ends.gets(9, key)?, Ok(TEXT.to_vec()))?;
    expect("status of one in another domain", ends.load(other, OP, KERNEL_GET, 0)?, Ok(()))?;
    expect("status of ending that domain", ends.raw.object(OP_DEALLOC_PD, other)?, Err(EBUSY))?;
    expect("status of unloading it", ends.unload(other, OP)?, Ok(()))?;
    ends.raw.done(OP_DEALLOC_PD, other)
}

pub(super) fn left_to_program(bench: &mut Bench) -> Tested {
    const BYTES: usize = TARGET_LEN + 8;
    let mut ends = Ends::open(bench)?;
    let (pd, key) = (ends.of.pd, ends.of.key);
    expect("status of LOAD_KERNEL", ends.load(pd, OP, KERNEL_PROGRAM, 0)?, Ok(()))?;
    let Ends { raw, b, .. } = &mut ends;
    raw.post_recv(b, 9, data(0x3000, 256, key));
    ends.post(OP, TEXT)?;
    let mut came = [ends.raw.completion()?, ends.raw.completion()?];
    came.sort_by_key(|cqe| cqe.wr_id);
    let [sent, got] = came.map(|cqe| (cqe.wr_id, cqe.status));
    expect("the completion of an RPC", sent, (5, WcStatus::Success))?;
    expect("the completion of the receive that it took", got, (9, WcStatus::Success))?;
    let said = (came[1].byte_len as usize, u32::from_be(came[1].imm));
    expect("its bytes and immediate data", said, (BYTES, OP as u32))?;
    let wanted = [ends.head().as_bytes(), TEXT].concat();
    expect("what it has", ends.raw.bytes(DATA + 0x3000, BYTES), wanted)
}

pub(super) fn rights(bench: &mut Bench) -> Tested {
    let mut ends = Ends::open(bench)?;
    let (pd, key) = (ends.of.pd, ends.of.key);
    let denied = Err(Code::Access as u32);
    let other = ends.raw.number(OP_ALLOC_PD, &[])?.number;
    let region = |pd, access| Region { access, ..RawDriver::region(pd, DATA + TABLE, 4096) };
    let all = RawDriver::region(pd, 0, 64).access;
    let mut make = |region: Region| ends.raw.number(OP_REG_MR, region.as_bytes());
    let [unreadable, foreign] = [make(region(pd, 1))?.number, make(region(other, all))?.number];
    expect("status of LOAD_KERNEL", ends.load(pd, OP, KERNEL_GET, 0)?, Ok(()))?;
    expect("the answer of what the peer may read", ends.gets(OP, key)?, Ok(TEXT.to_vec()))?;
    expect("the answer of what it may not", ends.gets(OP, unreadable)?, denied.clone())?;
    expect("the answer of what is another domain's", ends.gets(OP, foreign)?, denied)?;
    expect("the answer of what the peer may read", ends.gets(OP, key)?, Ok(TEXT.to_vec()))
}
