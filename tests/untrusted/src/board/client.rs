//! A client of a function that is driven without a socket.

use std::mem::{offset_of, size_of};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use starverbs_board::fuzzing::{Driven, GID};
use starverbs_queues::board::*;
use starverbs_queues::format::{CqeWords, ProgramIndex};
use starverbs_queues::{Cqe, SendFlags, SendOp, SendWqe, WcStatus};
use starverbs_rules::qp::{RC, RECV_STRIDE, RECVS, SEND_STRIDE, SENDS, SLOTS, address};
use starverbs_rules::raw::{BASE, BYTES, COMMANDS_LOG, CQ, CQ_LOG, DATA, EVENTS, EVENTS_LOG, QP_BYTES, QPS};
use starverbs_rules::{MemoryFile, RawDriver};
use starverbs_vfio::MessageOp;
use starverbs_vfio::message::{Access, DMA_READ, DMA_WRITE, DmaMap, PCI_CONFIG};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

/// A client: its memory, which lies as [`RawDriver`]'s.
pub(super) struct Client {
    function: usize,
    pub(super) memory: MemoryFile,
    pub(super) tail: u32,
    pub(super) context: u16,
}

impl Client {
    pub(super) fn new(function: usize) -> Client {
        Client { function, memory: MemoryFile::new(BYTES).expect("memory"), tail: 0, context: 0 }
    }

    /// Its memory's file.
    pub(super) fn file(&self) -> OwnedFd {
        self.memory.file().try_clone_to_owned().expect("a descriptor")
    }

    /// Gives the board its memory.
    pub(super) fn map(&mut self, board: &mut Driven) {
        let flags = DMA_READ | DMA_WRITE;
        let map = DmaMap { argsz: 0, flags, offset: 0, address: BASE, size: BYTES as u64 };
        let _ =
            board.message(self.function, MessageOp::DmaMap as u16, map.as_bytes(), vec![self.file()], true);
    }

    pub(super) fn write(
        &self,
        board: &mut Driven,
        region: u32,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), i32> {
        let body = [Access { offset, region, count: bytes.len() as u32 }.as_bytes(), bytes].concat();
        let done = board.message(self.function, MessageOp::RegionWrite as u16, &body, Vec::new(), true);
        done.expect("an operation").map(drop)
    }

    pub(super) fn read(
        &self,
        board: &mut Driven,
        region: u32,
        offset: u64,
        to: &mut [u8],
    ) -> Result<(), i32> {
        let access = Access { offset, region, count: to.len() as u32 };
        let done =
            board.message(self.function, MessageOp::RegionRead as u16, access.as_bytes(), Vec::new(), true);
        let answer = done.expect("an operation")?;
        to.copy_from_slice(&answer[size_of::<Access>()..]);
        Ok(())
    }

    /// Has the function master the bus, and enables it with queues as [`RawDriver`] has them.
    pub(super) fn enable(&mut self, board: &mut Driven) {
        let _ = self.write(board, PCI_CONFIG, 4, &[6, 0]);
        let long = |value: u64| value.to_le_bytes().to_vec();
        let word = |value: u32| value.to_le_bytes().to_vec();
        let registers = [
            (REG_COMMANDS, long(BASE)),
            (REG_COMMANDS_LOG, word(COMMANDS_LOG)),
            (REG_EVENTS, long(BASE + EVENTS as u64)),
            (REG_EVENTS_LOG, word(EVENTS_LOG)),
            (REG_CONTROL, word(CTRL_ENABLE)),
        ];
        for (at, value) in registers {
            let _ = self.write(board, BAR_CONTROL, at.into(), &value);
        }
        let mut done = [0; 4];
        let _ = self.read(board, BAR_CONTROL, REG_COMMANDS_HEAD.into(), &mut done);
        (self.tail, self.context) = (u32::from_le_bytes(done), 0);
    }

    /// Carries out a command; its status is the error.
    pub(super) fn command<R: FromBytes + KnownLayout + Immutable>(
        &mut self,
        board: &mut Driven,
        op: u16,
        body: &[u8],
    ) -> Result<R, u32> {
        let at = RawDriver::command_at(self.tail);
        self.tail = self.tail.wrapping_add(1);
        self.memory.put(at, CommandHead { op, context: self.context, status: PENDING }.as_bytes());
        self.memory.put(at + size_of::<CommandHead>(), body);
        self.write(board, BAR_CONTROL, REG_COMMANDS_TAIL.into(), &self.tail.to_le_bytes())
            .map_err(|e| e as u32)?;
        match self.memory.word(at + offset_of!(CommandHead, status)).load(Ordering::Acquire) {
            0 => Ok(self.memory.get(at + size_of::<CommandHead>())),
            errno => Err(errno),
        }
    }

    /// A domain, the key of a region of all of the memory, a CQ.
    pub(super) fn basics(&mut self, board: &mut Driven) -> Result<(u32, u32, u32), u32> {
        let pd = self.command::<NumberReply>(board, OP_ALLOC_PD, &[])?.number;
        let key =
            self.command::<NumberReply>(board, OP_REG_MR, RawDriver::region(pd, 0, BYTES).as_bytes())?.number;
        let (taken, entries) = (BASE + CQ as u64, BASE + CQ as u64 + 64);
        let cq = CreateCq { entries, taken, log: CQ_LOG, flags: 0 };
        Ok((pd, key, self.command::<NumberReply>(board, OP_CREATE_CQ, cq.as_bytes())?.number))
    }

    /// Puts a WQE into slot `slot` of the queues of place `n`.
    pub(super) fn put_send(&self, n: usize, slot: u32, words: &[u64; 8], body: &[u64]) {
        let at = QPS + n * QP_BYTES + SENDS + slot as usize * SEND_STRIDE;
        self.memory.put(at, words.as_bytes());
        self.memory.put(at + size_of::<SendWqe>(), body.as_bytes());
    }

    /// Puts a receive into the slot in front of `posted`, and says that so many are posted.
    pub(super) fn put_recv(&self, n: usize, posted: u32, words: &[u64; 4]) {
        let at = QPS + n * QP_BYTES;
        let slot = posted.wrapping_sub(1) % SLOTS;
        self.memory.put(at + RECVS + slot as usize * RECV_STRIDE, words.as_bytes());
        self.memory.word(at + offset_of!(ProgramIndex, recv_posted)).store(posted, Ordering::Release);
    }
}

/// A client that does what it should, with two QPs that are connected to each other.
pub(super) struct Honest {
    client: Client,
    key: u32,
    /// QPNs and cells
    qps: [(u32, u32); 2],
    /// Messages sent
    sent: u32,
}

/// Bytes of its memory that nobody may write, behind those that it sends.
const CANARY: std::ops::Range<usize> = DATA + 0x1_0000..DATA + 0x2_0000;
const CANARY_BYTE: u8 = 0xa5;
/// Turns that a message may take.
const TURNS: usize = 1000;

impl Honest {
    pub(super) fn new(board: &mut Driven, function: usize) -> Honest {
        let mut client = Client::new(function);
        client.map(board);
        client.enable(board);
        client.memory.put(CANARY.start, &[CANARY_BYTE; CANARY.end - CANARY.start]);
        let (pd, key, cq) = client.basics(board).expect("basics");
        let qps = [0, 1].map(|n| {
            let create = CreateQp { kind: RC, ..RawDriver::create_qp(pd, cq, QPS + n * QP_BYTES) };
            let made: NumberReply = client.command(board, OP_CREATE_QP, create.as_bytes()).expect("a QP");
            (made.number, made.cell)
        });
        for (mine, peer) in [(0, 1), (1, 0)] {
            for step in RawDriver::steps_to_rts(GID.0, qps[peer].0, RC) {
                let step = ModifyQp { qpn: qps[mine].0, ..step };
                client.command::<Object>(board, OP_MODIFY_QP, step.as_bytes()).expect("a step");
            }
        }
        Honest { client, key, qps, sent: 0 }
    }

    /// Sends a message from one QP to the other, and looks at what arrives and completes.
    pub(super) fn exchange(&mut self, board: &mut Driven) {
        let memory = &self.client.memory;
        let n = u64::from(self.sent) + 1;
        let rest = 8 | u64::from(self.key) << 32;
        memory.put(DATA, &n.to_le_bytes());
        self.client.put_recv(1, self.sent + 1, &[n, 1, address(4096), rest]);
        let wqe = SendWqe {
            wr_id: !n,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            num_sge: 1,
            length: 8,
            blocks: 2,
            ..SendWqe::default()
        };
        self.client.put_send(0, self.sent % SLOTS, &transmute!(wqe), &[address(0), rest]);
        self.sent += 1;
        let at = u64::from(self.qps[0].1) * u64::from(CELL_BYTES);
        let posted = u64::from(self.sent).to_le_bytes();
        self.client.write(board, BAR_DOORBELLS, at, &posted).expect("its doorbell");
        let first = 2 * (self.sent - 1);
        let mut came = Vec::new();
        for _ in 0..TURNS {
            board.turn(1_000_000);
            while let Some(cqe) = self.cqe(first + came.len() as u32) {
                came.push((cqe.wr_id, cqe.status));
            }
            if came.len() == 2 {
                break;
            }
        }
        came.sort_by_key(|(wr_id, _)| *wr_id);
        assert_eq!(came, [(n, WcStatus::Success), (!n, WcStatus::Success)], "an honest client's message");
        assert_eq!(self.client.memory.get::<u64>(DATA + 4096), n, "and its bytes");
    }

    /// CQE `index`, if it is there.
    fn cqe(&self, index: u32) -> Option<Cqe> {
        let memory = &self.client.memory;
        let at = CQ + 64 + (index & ((1 << CQ_LOG) - 1)) as usize * size_of::<Cqe>();
        let words: CqeWords = [0, 8, 16, 24].map(|word| memory.get(at + word));
        let phase = words[3].to_le_bytes()[7] & CQE_PHASE != 0;
        (phase == (index >> CQ_LOG & 1 == 0)).then(|| Cqe::decode(words))
    }

    /// Nobody wrote where nobody may.
    pub(super) fn is_untouched(&self) -> bool {
        self.client
            .memory
            .bytes(CANARY.start, CANARY.end - CANARY.start)
            .iter()
            .all(|byte| *byte == CANARY_BYTE)
    }
}
