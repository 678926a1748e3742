//! A client as a driver would be, without a library: registers, commands and memory as bytes.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};
use starverbs_backend::sealed;
use starverbs_core::{Cqe, SendFlags, SendOp, SendWqe, Sge, WcStatus};
use starverbs_queues::board::*;
use starverbs_queues::format::{CqeWords, ProgramIndex, RecvWqe};
use starverbs_settings::Settings;
use starverbs_vfio::Client;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

use crate::{Board, SERVE_EVERY, socket_paths};

/// The DMA address of a client's memory, and its bytes.
pub(super) const BASE: u64 = 0x10_0000;
pub(super) const BYTES: usize = 2 << 20;
pub(super) const COMMANDS: usize = 0;
pub(super) const COMMANDS_LOG: u32 = 4;
pub(super) const EVENTS: usize = 0x1000;
pub(super) const EVENTS_LOG_RAW: u32 = 8;
pub(super) const CQ: usize = 0x2000;
pub(super) const CQ_LOG: u32 = 8;
pub(super) const QPS: usize = 0x1_0000;
pub(super) const DATA: usize = 0x10_0000;
pub(super) const SLOTS_LOG: u8 = 6;
pub(super) const SEND_STRIDE: usize = 128;
pub(super) const RECV_STRIDE: usize = 32;
/// IBV_ACCESS_LOCAL_WRITE and what peers may
pub(super) const ALL: u32 = 0xf;

/// A client without a library.
pub(super) struct Raw {
    pub(super) client: Client,
    pub(super) memory: MmapRaw,
    pub(super) page: MmapRaw,
    pub(super) tail: u32,
    pub(super) taken: u32,
}

/// A QP of it.
#[derive(Clone, Copy)]
pub(super) struct RawQp {
    pub(super) qpn: u32,
    pub(super) cell: u32,
    /// Where its queues lie
    pub(super) at: usize,
    pub(super) sends: u32,
    pub(super) recvs: u32,
}

pub(super) fn settings() -> Settings {
    let free = std::net::UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).unwrap();
    Settings { port: free.port(), addrs: Some(vec!["127.0.0.1".parse().unwrap()]), ..Settings::default() }
}

/// Runs a board of so many sockets while `clients` runs in another thread; gives the board afterwards.
pub(super) fn with_board(sockets: usize, clients: impl FnOnce(&[PathBuf]) + Send) -> Board {
    with_board_of(&settings(), sockets, clients)
}

/// The same of a board with these settings.
pub(super) fn with_board_of(
    settings: &Settings,
    sockets: usize,
    clients: impl FnOnce(&[PathBuf]) + Send,
) -> Board {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("starverbs-raw-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let paths = socket_paths(&std::env::temp_dir().join(name), sockets);
    let mut board = Board::open(settings, &paths, [1, 2]).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| clients(&paths)));
            stop.store(true, Ordering::Relaxed);
            done
        });
        board.run(&stop);
        client.join().unwrap().unwrap();
    });
    /* what the clients left is seen in these turns */
    for _ in 0..2 * SERVE_EVERY {
        board.turn();
    }
    board
}

impl Raw {
    pub(super) fn connect(path: &Path) -> Raw {
        let mut client = Client::connect(path).unwrap();
        let (memory, file) = sealed::create(c"raw", BYTES, sealed::SIZE_STAYS).unwrap();
        client.dma_map(file.as_fd(), 0, BASE, BYTES as u64).unwrap();
        let region = client.region(BAR_DOORBELLS).unwrap();
        let page = MmapOptions::new().len(region.size as usize).map_raw(&region.file.unwrap()).unwrap();
        Raw { client, memory, page, tail: 0, taken: 0 }
    }

    /// Connected and enabled.
    pub(super) fn open(path: &Path) -> Raw {
        let mut raw = Raw::connect(path);
        raw.write(REG_COMMANDS, &(BASE + COMMANDS as u64).to_le_bytes()).unwrap();
        raw.write(REG_COMMANDS_LOG, &COMMANDS_LOG.to_le_bytes()).unwrap();
        raw.write(REG_EVENTS, &(BASE + EVENTS as u64).to_le_bytes()).unwrap();
        raw.write(REG_EVENTS_LOG, &EVENTS_LOG_RAW.to_le_bytes()).unwrap();
        raw.write(REG_CONTROL, &CTRL_ENABLE.to_le_bytes()).unwrap();
        assert_eq!(raw.register(REG_STATUS), STATUS_ENABLED);
        raw
    }

    pub(super) fn write(&mut self, at: u32, bytes: &[u8]) -> io::Result<()> {
        self.client.write(BAR_CONTROL, at.into(), bytes)
    }

    pub(super) fn register(&mut self, at: u32) -> u32 {
        let mut word = [0; 4];
        self.client.read(BAR_CONTROL, at.into(), &mut word).unwrap();
        u32::from_le_bytes(word)
    }

    pub(super) fn counter(&mut self, which: u32) -> u64 {
        let mut word = [0; 8];
        self.client.read(BAR_CONTROL, (REG_COUNTERS + 8 * which).into(), &mut word).unwrap();
        u64::from_le_bytes(word)
    }

    pub(super) fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= BYTES);
        // SAFETY: inside the mapping, which may be written.
        unsafe { self.memory.as_mut_ptr().add(at).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    pub(super) fn get<T: FromBytes + KnownLayout + Immutable>(&self, at: usize) -> T {
        let mut bytes = vec![0; size_of::<T>()];
        assert!(at + bytes.len() <= BYTES);
        // SAFETY: inside the mapping.
        unsafe { bytes.as_mut_ptr().copy_from(self.memory.as_ptr().add(at), bytes.len()) };
        T::read_from_bytes(&bytes).unwrap()
    }

    pub(super) fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: inside the mapping, by the callers' constants; aligned.
        unsafe { AtomicU32::from_ptr(self.memory.as_mut_ptr().add(at).cast()) }
    }

    pub(super) fn ring(&self, cell: u32, value: u64) {
        assert!((cell as usize) < self.page.len() / 8);
        // SAFETY: inside the page; aligned.
        let cell = unsafe {
            std::sync::atomic::AtomicU64::from_ptr(self.page.as_mut_ptr().cast::<u64>().add(cell as usize))
        };
        cell.store(value, Ordering::Release);
    }

    /// Carries out a command; gives its status and answer.
    pub(super) fn command<R: FromBytes + KnownLayout + Immutable>(
        &mut self,
        op: u16,
        body: &[u8],
    ) -> Result<R, u32> {
        let at = COMMANDS + (self.tail & ((1 << COMMANDS_LOG) - 1)) as usize * COMMAND_BYTES;
        self.put(at, CommandHead { op, context: 0, status: PENDING }.as_bytes());
        self.put(at + 8, body);
        self.tail = self.tail.wrapping_add(1);
        self.write(REG_COMMANDS_TAIL, &self.tail.to_le_bytes()).unwrap();
        match self.word(at + 4).load(Ordering::Acquire) {
            0 => Ok(self.get(at + 8)),
            errno => Err(errno),
        }
    }

    pub(super) fn object(&mut self, op: u16, number: u32) -> Result<(), u32> {
        self.command::<Object>(op, Object { number, reserved: 0 }.as_bytes()).map(drop)
    }

    pub(super) fn number(&mut self, op: u16, body: &[u8]) -> NumberReply {
        self.command(op, body).unwrap()
    }

    /// A domain, a region of all of the memory, and a CQ: numbers, and the CQ's cell.
    pub(super) fn basics(&mut self) -> (u32, u32, NumberReply) {
        let pd = self.number(OP_ALLOC_PD, &[]).number;
        let region =
            Region { pd, access: ALL, addr: BASE, length: BYTES as u64, iova: BASE, ..Region::default() };
        let key = self.number(OP_REG_MR, region.as_bytes()).number;
        let (taken, entries) = (BASE + CQ as u64, BASE + CQ as u64 + 64);
        let cq = CreateCq { entries, taken, log: CQ_LOG, flags: 0 };
        (pd, key, self.number(OP_CREATE_CQ, cq.as_bytes()))
    }

    pub(super) fn create_qp(pd: u32, cq: u32, at: usize) -> CreateQp {
        let base = BASE + at as u64;
        let queues = Queues {
            program: base,
            card: base + 64,
            recv: base + 0x1000,
            send: base + 0x2000,
            send_stride: SEND_STRIDE as u16,
            send_sge: 4,
            recv_stride: RECV_STRIDE as u16,
            recv_sge: 1,
            send_log: SLOTS_LOG,
            recv_log: SLOTS_LOG,
            reserved: [0; 6],
        };
        CreateQp {
            queues,
            pd,
            send_cq: cq,
            recv_cq: cq,
            srq: NONE,
            kind: 2,
            flags: QP_SIGNAL_ALL,
            reserved: [0; 6],
        }
    }

    pub(super) fn qp(&mut self, pd: u32, cq: u32, n: usize) -> RawQp {
        let at = QPS + n * 0x1_0000;
        let NumberReply { number: qpn, cell } =
            self.number(OP_CREATE_QP, Raw::create_qp(pd, cq, at).as_bytes());
        RawQp { qpn, cell, at, sends: 0, recvs: 0 }
    }

    /// RC, from RESET to RTS.
    pub(super) fn connect_qp(&mut self, qp: RawQp, peer: u32) {
        let gid: GidReply = self.command(OP_QUERY_GID, Object::default().as_bytes()).unwrap();
        let address = Address { dgid: gid.gid, sgid: gid.gid, hop_limit: 64, ..Address::default() };
        let attr = QpAttr {
            path_mtu: 3,
            dest_qpn: peer,
            access: 0xe,
            port_num: 1,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            address,
            ..QpAttr::default()
        };
        /* enum ibv_qp_attr_mask: what each step takes */
        let steps = [
            (1, 1 | 1 << 3 | 1 << 4 | 1 << 5),
            (2, 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20),
            (3, 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16),
        ];
        for (state, mask) in steps {
            let modify = ModifyQp { qpn: qp.qpn, mask, attr: QpAttr { state, ..attr } };
            self.command::<Object>(OP_MODIFY_QP, modify.as_bytes()).unwrap();
        }
    }

    pub(super) fn post_recv(&self, qp: &mut RawQp, wr_id: u64, sge: Sge) {
        let at = qp.at + 0x1000 + (qp.recvs as usize & 63) * RECV_STRIDE;
        let wqe = RecvWqe { wr_id, num_sge: 1, reserved: 0 };
        let words = [wqe.wr_id, 1, sge.addr, u64::from(sge.len) | u64::from(sge.lkey) << 32];
        self.put(at, words.as_bytes());
        qp.recvs += 1;
        self.word(qp.at + std::mem::offset_of!(ProgramIndex, recv_posted)).store(qp.recvs, Ordering::Release);
    }

    pub(super) fn put_send(&self, qp: &mut RawQp, wqe: SendWqe, sge: Sge) {
        let at = qp.at + 0x2000 + (qp.sends as usize & 63) * SEND_STRIDE;
        let wqe = SendWqe { num_sge: 1, length: sge.len, blocks: 2, ..wqe };
        let words: [u64; 8] = transmute!(wqe);
        self.put(at, words.as_bytes());
        self.put(at + 64, [sge.addr, u64::from(sge.len) | u64::from(sge.lkey) << 32].as_bytes());
        qp.sends += 1;
        self.word(qp.at).store(qp.sends, Ordering::Release);
    }

    pub(super) fn doorbell(&self, qp: &RawQp) {
        self.ring(qp.cell, u64::from(qp.sends) | u64::from(qp.recvs) << 32);
    }

    /// The next completion.
    pub(super) fn completion(&mut self) -> Cqe {
        let begun = Instant::now();
        loop {
            let at = CQ + 64 + (self.taken as usize & 255) * size_of::<Cqe>();
            let words: CqeWords = self.get(at);
            let phase = words[3].to_ne_bytes()[7] & CQE_PHASE != 0;
            if phase == (self.taken >> CQ_LOG & 1 == 0) {
                self.taken = self.taken.wrapping_add(1);
                self.word(CQ).store(self.taken, Ordering::Release);
                return Cqe::decode(words);
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "no completion came");
            std::thread::yield_now();
        }
    }
}

/// Two QPs of one client, connected to each other.
pub(super) fn two_qps(raw: &mut Raw) -> (u32, RawQp, RawQp) {
    let (pd, key, cq) = raw.basics();
    let (a, b) = (raw.qp(pd, cq.number, 0), raw.qp(pd, cq.number, 1));
    raw.connect_qp(a, b.qpn);
    raw.connect_qp(b, a.qpn);
    (key, a, b)
}

pub(super) fn data(at: usize, len: u32, lkey: u32) -> Sge {
    Sge { addr: BASE + (DATA + at) as u64, len, lkey }
}

pub(super) fn signaled_send(wr_id: u64) -> SendWqe {
    SendWqe { wr_id, op: SendOp::Send, flags: SendFlags::SIGNALED, ..SendWqe::default() }
}

/// Sends one message from `a` to `b`, and looks at it.
pub(super) fn exchange(raw: &mut Raw, key: u32, a: &mut RawQp, b: &mut RawQp, n: u64) {
    raw.put(DATA, &n.to_le_bytes());
    raw.post_recv(b, n, data(4096, 8, key));
    raw.put_send(a, signaled_send(!n), data(0, 8, key));
    raw.doorbell(a);
    let mut came = [raw.completion(), raw.completion()].map(|cqe| (cqe.wr_id, cqe.status));
    came.sort_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(came, [(n, WcStatus::Success), (!n, WcStatus::Success)]);
    assert_eq!(raw.get::<u64>(DATA + 4096), n);
}

impl Raw {
    /// The next event, if the board has written it.
    pub(super) fn event(&self, index: u32) -> Option<(u32, u32)> {
        let event: Event = self.get(EVENTS + (index as usize & 255) * size_of::<Event>());
        (event.valid == index + 1).then_some((event.kind, event.number))
    }

    pub(super) fn wait_for_event(&self, index: u32) -> (u32, u32) {
        let begun = Instant::now();
        loop {
            if let Some(event) = self.event(index) {
                return event;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "no event came");
            std::thread::yield_now();
        }
    }

    /// The board has taken up to [`SETTLED`] doorbells that were rung before this: each of these is seen
    /// behind one of them.
    pub(super) fn settle(&mut self) {
        for _ in 0..SETTLED {
            let before = self.counter(COUNTER_DOORBELLS);
            self.ring(CELL_EVENTS, (before + 1) << 32);
            let begun = Instant::now();
            while self.counter(COUNTER_DOORBELLS) == before {
                assert!(begun.elapsed() < Duration::from_secs(60), "no doorbell is seen");
            }
        }
    }
}

/// Doorbells that settling takes.
pub(super) const SETTLED: u64 = 3;

pub(super) fn arm(taken: u32, times: u32, solicited: bool) -> u64 {
    u64::from(taken) | u64::from(times | if solicited { ARM_SOLICITED } else { 0 }) << 32
}
