//! A board in use, and a client of one of its functions that sends and writes what it likes: messages of
//! vfio-user, registers, commands, queues, doorbells.
//!
//! The input is a program of that client, which has what it needs to come far: memory that the board takes,
//! commands that are nearly right. A second function has an honest client. Whatever the first one does, the
//! board goes on, answers fit into messages, the honest one's messages arrive and its memory stays as it is;
//! and when the first client goes, nothing of it is left.

mod client;

use std::os::fd::OwnedFd;

use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use starverbs_board::fuzzing::{Driven, GID};
use starverbs_core::strom::{ReplyHead, ReplyTarget};
use starverbs_core::{AvId, Gid};
use starverbs_queues::board::*;
use starverbs_queues::{SendFlags, SendOp, SendWqe};
use starverbs_rules::RawDriver;
use starverbs_rules::qp::{QKEY, RC, SLOTS, UC, UD, XRC_RECV, XRC_SEND, address};
use starverbs_rules::raw::{BASE, BYTES, CQ, CQ_LOG, DATA, QP_BYTES, QPS};
use starverbs_vfio::MessageOp;
use starverbs_vfio::message::{
    DMA_READ, DMA_WRITE, DmaMap, DmaUnmap, HEAD_BYTES, IRQ_ACTION_TRIGGER, IRQ_DATA_EVENTFD, IRQ_MSIX,
    MAX_BYTES, PCI_CONFIG, SetIrqs,
};
use zerocopy::{IntoBytes, transmute};

use crate::bytes::Bytes;
use client::{Client, Honest};

/// Steps of one input.
const MOST: usize = 256;
/// Where answers of kernels stand behind the queues of a queue pair.
const ANSWERS: usize = 0x8000;
/// The RPC op-code of most.
const RPC: u64 = 0x53;
/// The functions.
const UNTRUSTED: usize = 0;
const HONEST: usize = 1;

/// Checks one input.
pub fn check(input: &[u8]) {
    drive(input);
}

/// The same; gives what the board counted of the client's function.
fn drive(input: &[u8]) -> Vec<u64> {
    /* QPNs and keys are others for each input: nobody learns those of the honest one */
    let mut board = Driven::new(2, seed(input));
    let mut honest = Honest::new(&mut board, HONEST);
    let objects = |board: &Driven| (board.counters().qps.get(), board.counters().mrs.get());
    let before = objects(&board);
    let mut untrusted = Untrusted::new(&mut board);
    let mut bytes = Bytes(input);
    for _ in 0..MOST {
        let Some(how) = bytes.next() else { break };
        untrusted.step(&mut board, how, &mut bytes);
    }
    board.turn(1000);
    honest.exchange(&mut board);
    let counted = untrusted.counters(&mut board);
    board.disconnect(UNTRUSTED);
    assert_eq!(objects(&board), before, "its queue pairs and regions end with it");
    board.turn(1_000_000);
    honest.exchange(&mut board);
    assert!(honest.is_untouched(), "somebody wrote into memory that is another client's");
    counted
}

fn seed(input: &[u8]) -> [u64; 2] {
    /* FNV-1a, 64 bits */
    let hash = |from: u64| {
        input.iter().fold(from, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    };
    [hash(0xcbf2_9ce4_8422_2325), hash(0x1234_5678_9abc_def1)]
}

/// The client that does as the input says, and what it knows of what it made.
struct Untrusted {
    client: Client,
    pd: u32,
    key: u32,
    cq: u32,
    ah: u32,
    /// QPNs and cells
    qps: Vec<(u32, u32)>,
    /// Send WQEs posted to each place of queues
    posted: [u32; 4],
}

impl Untrusted {
    fn new(board: &mut Driven) -> Untrusted {
        let mut untrusted = Untrusted {
            client: Client::new(UNTRUSTED),
            pd: 0,
            key: 0,
            cq: 0,
            ah: 0,
            qps: Vec::new(),
            posted: [0; 4],
        };
        untrusted.client.map(board);
        untrusted
    }

    fn counters(&self, board: &mut Driven) -> Vec<u64> {
        let mut bytes = vec![0; 8 * COUNTERS as usize];
        self.client.read(board, BAR_CONTROL, REG_COUNTERS.into(), &mut bytes).expect("registers");
        bytes.as_chunks::<8>().0.iter().map(|value| u64::from_le_bytes(*value)).collect()
    }

    fn step(&mut self, board: &mut Driven, how: u8, bytes: &mut Bytes<'_>) {
        match how % 16 {
            0 => self.message(board, bytes),
            1 => self.register(board, bytes),
            2 => self.command(board, bytes),
            3 => self.make(board, bytes),
            4 => {
                let (at, len) = (bytes.word() as usize % (BYTES - 64), usize::from(bytes.byte()) % 64);
                self.client.memory.put(at, bytes.take(len));
            }
            5 | 6 => self.ring(board, bytes),
            7 | 8 => {
                let later = u64::from(bytes.byte()).pow(3);
                board.turn(later);
            }
            9 => self.frame(board, bytes),
            10 | 11 => self.post(board, bytes),
            12 => self.recv(bytes),
            13 => {
                self.client.enable(board);
                (self.pd, self.key, self.cq) = self.client.basics(board).unwrap_or_default();
            }
            14 => self.map(board, bytes),
            _ if how > 250 => {
                board.disconnect(UNTRUSTED);
                self.qps.clear();
                self.client.map(board);
            }
            _ => self.vectors(board, bytes),
        }
    }

    /// Any message.
    fn message(&mut self, board: &mut Driven, bytes: &mut Bytes<'_>) {
        let (op, len) = (u16::from(bytes.byte() % 16), usize::from(bytes.half()) % 512);
        let fds = (0..bytes.byte() % 3).map(|_| self.fd(bytes)).collect();
        let same_user = bytes.byte() & 1 == 0;
        if let Some(Ok(answer)) = board.message(UNTRUSTED, op, bytes.take(len), fds, same_user) {
            assert!(HEAD_BYTES + answer.len() <= MAX_BYTES, "an answer that is no message");
        }
    }

    /// A file that the board may or may not take.
    fn fd(&self, bytes: &mut Bytes<'_>) -> OwnedFd {
        match bytes.byte() % 4 {
            0 => self.client.file(),
            1 => {
                let file =
                    std::fs::File::from(memfd_create(c"none", MFdFlags::MFD_CLOEXEC).expect("a memfd"));
                file.set_len(u64::from(bytes.byte()) * 4096).expect("memory");
                file.into()
            }
            2 => EventFd::new().expect("an eventfd").into(),
            _ => std::fs::File::open("/dev/null").expect("it is there").into(),
        }
    }

    fn register(&mut self, board: &mut Driven, bytes: &mut Bytes<'_>) {
        let named = [
            REG_CONTROL,
            REG_COMMANDS,
            REG_COMMANDS_LOG,
            REG_COMMANDS_TAIL,
            REG_EVENTS,
            REG_EVENTS_LOG,
            REG_ERROR,
        ];
        let region = bytes.pick(&[BAR_CONTROL, BAR_CONTROL, BAR_CONTROL, BAR_MSIX, PCI_CONFIG]);
        let at = if region == BAR_CONTROL { bytes.pick(&named) } else { u32::from(bytes.half()) };
        let near = u64::from(bytes.half());
        let value =
            bytes.pick(&[near, near, near + BASE, BASE + near * 64, near << 32, u64::from(self.client.tail)]);
        let len = if matches!(at, REG_COMMANDS | REG_EVENTS) { 8 } else { 4 };
        let len = if bytes.byte() > 240 { usize::from(bytes.byte()) % 9 } else { len };
        let _ = self.client.write(board, region, at.into(), &value.to_le_bytes()[..len]);
        let mut answer = vec![0; usize::from(bytes.byte())];
        let _ = self.client.read(board, region, at.into(), &mut answer);
    }

    /// Any command.
    fn command(&mut self, board: &mut Driven, bytes: &mut Bytes<'_>) {
        let op = u16::from(bytes.byte() % 0x80) | u16::from(bytes.byte() & 1) << 8;
        self.client.context = u16::from(bytes.byte() % 4);
        let len = usize::from(bytes.byte()) % BODY_BYTES;
        let _ = self.client.command::<Object>(board, op, bytes.take(len));
    }

    /// A command that is right, but perhaps for one byte.
    fn make(&mut self, board: &mut Driven, bytes: &mut Bytes<'_>) {
        let Untrusted { pd, key, cq, .. } = *self;
        let n = usize::from(bytes.byte()) % 4;
        let at = QPS + n * QP_BYTES;
        let (taken, entries) = (BASE + CQ as u64, BASE + CQ as u64 + 64);
        let srq = CreateSrq { queues: RawDriver::create_qp(pd, cq, at).queues, pd, limit: 1 };
        let to = Address { dgid: GID.0, sgid: GID.0, hop_limit: 64, ..Address::default() };
        let qpn = self.qps.get(n).map_or(0, |(qpn, _)| *qpn);
        let kind = bytes.pick(&[RC, RC, UC, UD, XRC_SEND, XRC_RECV]);
        let how = bytes.byte();
        let (op, mut body) = match how % 14 {
            0..=2 => {
                let create = CreateQp { kind, ..RawDriver::create_qp(pd, cq, at) };
                let answers = BASE + (at + ANSWERS) as u64;
                let rpc = CreateQp { flags: create.flags | QP_RPC, answer_slots: 1, answers, ..create };
                (OP_CREATE_QP, if how > 250 { rpc } else { create }.as_bytes().to_vec())
            }
            11 if how > 240 => {
                let (op, kernel, flags) = (bytes.pick(&[RPC, u64::MAX]), bytes.byte() % 8, bytes.byte() % 3);
                let kernel = RpcKernel { op, pd, kernel: kernel.into(), flags: flags.into(), reserved: 0 };
                (bytes.pick(&[OP_LOAD_KERNEL, OP_UNLOAD_KERNEL]), kernel.as_bytes().to_vec())
            }
            3 | 4 => {
                let peer = self.qps.get(usize::from(bytes.byte()) % 4).map_or(0, |(qpn, _)| *qpn);
                for step in RawDriver::steps_to_rts(GID.0, peer, kind) {
                    let step = ModifyQp { qpn, ..step };
                    let _ = self.client.command::<Object>(board, OP_MODIFY_QP, step.as_bytes());
                }
                return;
            }
            5 => (OP_REG_MR, RawDriver::region(pd, 0, BYTES).as_bytes().to_vec()),
            6 => {
                let paged = Region {
                    pieces: 4,
                    page_log: 12,
                    offset: u32::from(bytes.byte()),
                    length: 8192,
                    ..RawDriver::region(pd, 0, 0)
                };
                (OP_REG_MR, paged.as_bytes().to_vec())
            }
            7 => (OP_CREATE_CQ, CreateCq { entries, taken, log: CQ_LOG, flags: 0 }.as_bytes().to_vec()),
            8 => (OP_CREATE_SRQ, srq.as_bytes().to_vec()),
            9 => (OP_ALLOC_MW, Window { pd, kind: 2 }.as_bytes().to_vec()),
            10 => (OP_CREATE_AH, AddressHandle { pd, address: to }.as_bytes().to_vec()),
            11 => (
                OP_OPEN_CONTEXT,
                OpenContext { events: BASE + 0x1000, events_log: 4, vector: 1 }.as_bytes().to_vec(),
            ),
            12 => {
                let mad = Mad { addr: address(0), address: to, reserved: 0 };
                let op = bytes.pick(&[OP_OPEN_MADS, OP_SEND_MAD, OP_RECEIVE_MAD]);
                (op, mad.as_bytes().to_vec())
            }
            _ => {
                let object = Object { number: bytes.pick(&[pd, key, cq, qpn, self.ah]), reserved: 0 };
                let ops = [
                    OP_DEALLOC_PD,
                    OP_DEREG_MR,
                    OP_QUERY_MR,
                    OP_DESTROY_CQ,
                    OP_DESTROY_QP,
                    OP_QUERY_QP,
                    OP_DESTROY_AH,
                    OP_DEALLOC_MW,
                    OP_DESTROY_SRQ,
                    OP_CLOSE_CONTEXT,
                    OP_ALLOC_NULL_MR,
                ];
                (bytes.pick(&ops), object.as_bytes().to_vec())
            }
        };
        if bytes.byte() > 200 {
            let place = usize::from(bytes.byte()) % body.len();
            body[place] = bytes.byte();
        }
        self.client.context = if bytes.byte() > 230 { 1 } else { 0 };
        let Ok(NumberReply { number, cell }) = self.client.command(board, op, &body) else { return };
        match op {
            OP_CREATE_QP => self.qps.push((number, cell)),
            OP_REG_MR | OP_ALLOC_MW | OP_ALLOC_NULL_MR => self.key = number,
            OP_CREATE_AH => self.ah = number,
            _ => {}
        }
    }

    fn ring(&mut self, board: &mut Driven, bytes: &mut Bytes<'_>) {
        let value = match bytes.byte() % 4 {
            0 => u64::from(bytes.word()) | u64::from(bytes.word()) << 32,
            n => u64::from(self.posted[usize::from(n)]) | u64::from(bytes.byte()) << 32,
        };
        let context = u64::from(bytes.byte() / 128);
        let cells = u64::from(REG_CELLS_OF_A_PAGE);
        let at = (context * cells + u64::from(bytes.byte() % 16)) * u64::from(CELL_BYTES);
        let _ = self.client.write(board, BAR_DOORBELLS, at, &value.to_le_bytes());
    }

    /// A frame from the wire, for one of its QPs, or for queue pair 1.
    fn frame(&mut self, board: &mut Driven, bytes: &mut Bytes<'_>) {
        let len = usize::from(bytes.half()) % 1200;
        let mut frame = bytes.take(len).to_vec();
        let qpns: Vec<u32> = self.qps.iter().map(|(qpn, _)| *qpn).chain([1]).collect();
        let qpn = bytes.pick(&qpns);
        let Some(place) = frame.get_mut(5..8) else { return };
        place.copy_from_slice(&qpn.to_be_bytes()[1..]);
        let src = bytes.pick(&[GID, Gid::from_ipv4([10, 0, 0, 2])]);
        board.frame(src, GID, &frame);
    }

    /// A work request that may be right, to a QP's queue.
    fn post(&mut self, board: &mut Driven, bytes: &mut Bytes<'_>) {
        let n = usize::from(bytes.byte()) % 4;
        let near = u64::from(bytes.half());
        let any = u32::from(bytes.half());
        let length = bytes.pick(&[0, 8, 64, any, u32::MAX]);
        let op = match bytes.byte() {
            254 => SendOp::Rpc,
            255 => SendOp::RpcWrite,
            op => SendOp::decode(op % 24),
        };
        if op.is_rpc() {
            let (addr, rkey) = (address(0), self.key);
            let target = ReplyTarget { addr, rkey, len: any, ..ReplyTarget::default() };
            self.client.memory.put(DATA + near as usize, ReplyHead::new(&target).as_bytes());
        }
        let wqe = SendWqe {
            wr_id: near,
            op,
            flags: SendFlags::from_bits_retain(bytes.byte()),
            remote_addr: if op.is_rpc() { RPC } else { address(0) + near },
            rkey: self.key,
            remote_qpn: self.qps.first().map_or(0, |(qpn, _)| *qpn),
            qkey: QKEY,
            av: AvId(self.ah),
            imm: bytes.word(),
            length,
            num_sge: u16::from(bytes.byte() % 3),
            blocks: u16::from(bytes.byte() % 4),
            ..SendWqe::default()
        };
        let mut words: [u64; 8] = transmute!(wqe);
        if bytes.byte() > 220 {
            words[usize::from(bytes.byte()) % 8] ^= u64::from(bytes.word());
        }
        let body = [address(near as usize), u64::from(length) | u64::from(self.key) << 32];
        self.client.put_send(n, self.posted[n] % SLOTS, &words, &body);
        self.posted[n] = self.posted[n].wrapping_add(1);
        if let Some((_, cell)) = self.qps.get(n) {
            let value = u64::from(self.posted[n]);
            let at = u64::from(*cell) * u64::from(CELL_BYTES);
            let _ = self.client.write(board, BAR_DOORBELLS, at, &value.to_le_bytes());
        }
    }

    fn recv(&mut self, bytes: &mut Bytes<'_>) {
        let n = usize::from(bytes.byte()) % 4;
        let any = bytes.half();
        let posted = bytes.pick(&[1, u32::from(any & 15), u32::from(any)]);
        let sges = u64::from(bytes.byte() % 4);
        let sge = [address(usize::from(bytes.half())), u64::from(bytes.half()) | u64::from(self.key) << 32];
        self.client.put_recv(n, posted, &[7, sges, sge[0], sge[1]]);
    }

    /// Maps and unmaps, at addresses where there is something and where there is nothing.
    fn map(&mut self, board: &mut Driven, bytes: &mut Bytes<'_>) {
        let pages = |n: u8| u64::from(n) * 4096;
        let address = bytes
            .pick(&[BASE, BASE + BYTES as u64, 0, (1 << 48) - 4096, u64::MAX - 4095])
            .wrapping_add(pages(bytes.byte()));
        let any = pages(bytes.byte());
        let size = bytes.pick(&[BYTES as u64, 4096, u64::MAX, any]);
        if bytes.byte().is_multiple_of(3) {
            let unmap = DmaUnmap { argsz: 0, flags: u32::from(bytes.byte()) & 2, address, size };
            let _ = board.message(UNTRUSTED, MessageOp::DmaUnmap as u16, unmap.as_bytes(), Vec::new(), true);
            return;
        }
        let flags = bytes.pick(&[DMA_READ, DMA_READ | DMA_WRITE]);
        let offset = pages(bytes.byte() % 8);
        let map = DmaMap { argsz: 0, flags, offset, address, size };
        let fds = vec![self.fd(bytes)];
        let _ =
            board.message(UNTRUSTED, MessageOp::DmaMap as u16, map.as_bytes(), fds, bytes.byte() & 1 == 0);
    }

    fn vectors(&mut self, board: &mut Driven, bytes: &mut Bytes<'_>) {
        let fds: Vec<OwnedFd> = (0..bytes.byte() % 4).map(|_| self.fd(bytes)).collect();
        let (start, count) = (u32::from(bytes.byte() % 40), fds.len() as u32);
        let flags = IRQ_DATA_EVENTFD | IRQ_ACTION_TRIGGER;
        let irqs = SetIrqs { argsz: 0, flags, index: IRQ_MSIX, start, count };
        let _ = board.message(UNTRUSTED, MessageOp::SetIrqs as u16, irqs.as_bytes(), fds, true);
    }
}

/// Cells of a page of the emulated board.
const REG_CELLS_OF_A_PAGE: u32 = 8192;

#[cfg(test)]
mod tests {
    use super::*;

    /// A corpus that comes nowhere would find nothing.
    #[test]
    fn the_corpus_comes_far() {
        let counted = |name: &str| {
            let file = format!("{}/../fuzz/corpus/board/{name}", env!("CARGO_MANIFEST_DIR"));
            drive(&std::fs::read(file).expect("a file of the corpus"))
        };
        for (name, completions) in [("rc", 2), ("rdma", 4), ("uc", 2), ("ud", 2), ("paged", 1)] {
            let counted = counted(name);
            let written = counted[COUNTER_CQE_WRITES as usize];
            assert!(written >= completions, "{name}: {written} completions, {counted:?}");
        }
        let of_strom = counted("strom");
        assert!(of_strom[COUNTER_DMA_WRITES as usize] >= 3, "a kernel answers: {of_strom:?}");
        assert!(counted("vectors")[COUNTER_COMMANDS as usize] > 3, "a CQ is made");
        assert!(counted("unmap")[COUNTER_DMA_MISSES as usize] > 0, "queues are out of reach");
    }
}
