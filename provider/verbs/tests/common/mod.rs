//! Two cards in one process, joined by 127.0.0.1: the fixture of the tests in this folder.
#![allow(dead_code, missing_docs, unreachable_pub)]

pub mod board;

use std::fs::{File, read_link};
use std::path::Path;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use starverbs_core::qp::QpAttrMask;
use starverbs_core::{Access, AvId, Cqe, Mtu, Psn, QpState, QpType, SendFlags, SendOp, Sge};
use starverbs_free_port::free_port;
use starverbs_settings::{LinkMode, Settings};
use starverbs_verbs::stat::{self, Snapshot};
use starverbs_verbs::{
    AhAttr, CompChannel, Context, Cq, Mr, Pd, Qp, QpAttr, QpInit, RecvWr, Result, SendWr, Srq,
};

/// How long a test waits for what must come: far beyond what it takes.
const PATIENCE: Duration = Duration::from_secs(120);
pub const BUF: usize = 1 << 16;
pub const QKEY: u32 = 0x1111_1111;

/// Settings of a wire that no other test uses. Queue pairs of this host take the way that STARVERBS_LINK
/// names.
pub fn settings() -> Settings {
    const LINK: &str = "STARVERBS_LINK";
    let link = std::env::var(LINK).map(|link| (LINK.to_owned(), link));
    let given = Settings::from_sources(link.into_iter(), None).unwrap();
    Settings { port: free_port(), addrs: Some(vec!["127.0.0.1".parse().unwrap()]), ..given }
}

/// The same, with shared memory between queue pairs of this host.
pub fn local() -> Settings {
    Settings { link: LinkMode::Auto, ..settings() }
}

/// The same, with packets between all queue pairs.
pub fn wire() -> Settings {
    Settings { link: LinkMode::Udp, ..settings() }
}

/// Zeroed memory for a card: it never ends, and everybody may change it.
pub fn memory(len: usize) -> &'static [AtomicU8] {
    (0..len).map(|_| AtomicU8::new(0)).collect::<Vec<_>>().leak()
}

/// A region of such memory, which peers know by its addresses.
pub fn reg(pd: &Pd, memory: &'static [AtomicU8], access: Access) -> Result<Mr> {
    let addr = memory.as_ptr() as u64;
    // SAFETY: see `memory`.
    unsafe { Mr::reg(pd, addr, memory.len() as u64, addr, access) }
}

/// One side: everything a small program holds.
pub struct Node {
    pub ctx: Context,
    pub pd: Pd,
    pub channel: CompChannel,
    pub cq: Cq,
    pub buf: &'static [AtomicU8],
    pub mr: Mr,
}

pub fn all_access() -> Access {
    let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    Access::LOCAL_WRITE | remote | Access::FLUSH_GLOBAL
}

impl Node {
    pub fn new(settings: &Settings) -> Node {
        let ctx = Context::open_with(board::in_place_of(settings)).unwrap();
        let pd = Pd::alloc(&ctx).unwrap();
        Node::of(ctx, pd)
    }

    /// With a buffer, a region and a completion queue in `pd`.
    pub fn of(ctx: Context, pd: Pd) -> Node {
        let channel = CompChannel::create(&ctx).unwrap();
        let cq = Cq::create(&ctx, 256, Some(&channel), 77).unwrap();
        let buf = memory(BUF);
        let mr = reg(&pd, buf, all_access()).unwrap();
        Node { ctx, pd, channel, cq, buf, mr }
    }

    pub fn pair() -> (Node, Node) {
        let settings = settings();
        (Node::new(&settings), Node::new(&settings))
    }

    pub fn addr(&self, at: usize) -> u64 {
        self.buf.as_ptr() as u64 + at as u64
    }

    pub fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: self.addr(at), len: len as u32, lkey: self.mr.lkey() }
    }

    /// Another region, of a part of the buffer.
    pub fn reg(&self, at: usize, len: usize, access: Access) -> Mr {
        reg(&self.pd, &self.buf[at..at + len], access).unwrap()
    }

    /// What the card may have written: read as memory that others change.
    pub fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        self.buf[at..at + len].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    pub fn fill(&self, at: usize, bytes: &[u8]) {
        let room = &self.buf[at..at + bytes.len()];
        room.iter().zip(bytes).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
    }

    pub fn word(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.bytes(at, 8).try_into().unwrap())
    }

    pub fn init<'a>(&'a self, qp_type: QpType, srq: Option<&'a Srq>) -> QpInit<'a> {
        QpInit {
            qp_type,
            send_cq: &self.cq,
            recv_cq: &self.cq,
            srq,
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline: 64,
            sq_sig_all: false,
            block_own_multicast: false,
            star: None,
            rpc: false,
            cookie: 99,
        }
    }

    pub fn qp(&self, qp_type: QpType) -> Qp {
        Qp::create(&self.pd, &self.init(qp_type, None)).unwrap()
    }

    pub fn qp_with_srq(&self, srq: &Srq) -> Qp {
        Qp::create(&self.pd, &self.init(QpType::Rc, Some(srq))).unwrap()
    }

    /// Polls until `count` completions came.
    pub fn completions(&self, count: usize) -> Vec<Cqe> {
        poll(&self.cq, count)
    }

    pub fn post_recv(&self, qp: &Qp, wr_id: u64, at: usize, len: usize) -> Result<()> {
        let mut poster = qp.post_recv();
        let posted = poster.push(&RecvWr { wr_id, sges: &[self.sge(at, len)] });
        poster.ring();
        posted
    }
}

pub fn poll(cq: &Cq, count: usize) -> Vec<Cqe> {
    let mut all = Vec::new();
    let start = Instant::now();
    while all.len() < count {
        let mut out = [Cqe::default(); 16];
        let want = (count - all.len()).min(16);
        let got = cq.poll(&mut out[..want]).unwrap();
        all.extend_from_slice(&out[..got]);
        assert!(start.elapsed() < PATIENCE, "only {all:?} of {count} completions came");
    }
    all
}

/// What each of this process's cards on the wire of UDP port `port` shows, in the order in which they were
/// opened.
fn pages(port: u16) -> impl Iterator<Item = Snapshot> {
    let mut files: Vec<_> = std::fs::read_dir("/proc/self/fd").unwrap().flatten().collect();
    files.sort_by_key(|file| file.file_name().to_str().and_then(|fd| fd.parse::<u32>().ok()));
    let is_page = |path: &Path| read_link(path).is_ok_and(|to| to.to_string_lossy().contains(stat::NAME));
    let pages = files.into_iter().map(|file| file.path()).filter(move |path| is_page(path));
    let pages = pages.filter_map(|path| Snapshot::read(&File::open(path).ok()?).ok());
    pages.filter(move |page| page.port == port)
}

/// A counter of each of them.
pub fn counters(port: u16, name: &str) -> Vec<u64> {
    let counters = pages(port).flat_map(|page| page.counters);
    counters.filter(|(n, _)| n == name).map(|(_, value)| value).collect()
}

/// The row of a queue pair in what the cards tell `starverbs stat --qp`, which are run meanwhile.
pub fn row_of(port: u16, qpn: u32) -> String {
    let ask = |page: Snapshot| starverbs_backend::ask(page.port, page.first_block, b"qps", PATIENCE).unwrap();
    let said: Vec<String> = pages(port).map(|page| String::from_utf8(ask(page)).unwrap()).collect();
    let row = said.iter().flat_map(|text| text.lines()).find(|row| row.contains(&format!("{qpn:#x}")));
    row.unwrap_or_else(|| panic!("{qpn:#x} is not in {said:?}")).to_owned()
}

/// Waits for something that comes without this thread's polling.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what} did not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn send(wr_id: u64, sges: &[Sge]) -> SendWr<'_> {
    SendWr {
        wr_id,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        imm: 0,
        sges,
        remote_addr: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        ah: AvId(0),
        remote_qpn: 0,
        qkey: 0,
    }
}

pub fn post(qp: &Qp, wr: &SendWr<'_>) -> Result<()> {
    let mut poster = qp.post_send();
    let posted = poster.push(wr);
    poster.ring();
    posted
}

/// Posts `wr` with these bytes in it.
pub fn post_inline(qp: &Qp, wr: &SendWr<'_>, data: &[u8]) -> Result<()> {
    let sges = [Sge { addr: data.as_ptr() as u64, len: data.len() as u32, lkey: 0xdead }];
    let mut poster = qp.post_send();
    // SAFETY: the slice is read in this call.
    let posted =
        unsafe { poster.push_inline(&SendWr { flags: wr.flags | SendFlags::INLINE, sges: &sges, ..*wr }) };
    poster.ring();
    posted
}

pub fn to_init(qp: &Qp) {
    let attr = QpAttr {
        state: QpState::Init,
        port_num: 1,
        access: all_access().difference(Access::LOCAL_WRITE),
        ..QpAttr::default()
    };
    let mask = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
    qp.modify(&attr, mask).unwrap();
}

/// Where connections begin: two packets before a PSN's highest bit, so that its wrap is always tested.
pub const FIRST: Psn = Psn::new(0xfffffe);

pub fn to_rtr(qp: &Qp, ah: AhAttr, dest_qpn: u32) {
    to_rtr_with(qp, ah, dest_qpn, Mtu::M1024, FIRST);
}

pub fn to_rtr_with(qp: &Qp, ah: AhAttr, dest_qpn: u32, path_mtu: Mtu, rq_psn: Psn) {
    let attr = QpAttr {
        state: QpState::Rtr,
        av: ah,
        path_mtu,
        dest_qpn,
        rq_psn,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 1,
        ..QpAttr::default()
    };
    let mask = QpAttrMask::STATE
        | QpAttrMask::AV
        | QpAttrMask::PATH_MTU
        | QpAttrMask::DEST_QPN
        | QpAttrMask::RQ_PSN
        | QpAttrMask::MAX_DEST_RD_ATOMIC
        | QpAttrMask::MIN_RNR_TIMER;
    qp.modify(&attr, mask).unwrap();
}

/// RTS with 67 ms of patience a try, which a busy machine needs.
pub fn to_rts(qp: &Qp) {
    to_rts_with(qp, 14, 7, 7);
}

pub fn to_rts_with(qp: &Qp, timeout: u8, retry_cnt: u8, rnr_retry: u8) {
    to_rts_at(qp, timeout, retry_cnt, rnr_retry, FIRST);
}

fn to_rts_at(qp: &Qp, timeout: u8, retry_cnt: u8, rnr_retry: u8, sq_psn: Psn) {
    let attr = QpAttr {
        state: QpState::Rts,
        sq_psn,
        timeout,
        retry_cnt,
        rnr_retry,
        max_rd_atomic: 4,
        ..QpAttr::default()
    };
    let mask = QpAttrMask::STATE
        | QpAttrMask::SQ_PSN
        | QpAttrMask::TIMEOUT
        | QpAttrMask::RETRY_CNT
        | QpAttrMask::RNR_RETRY
        | QpAttrMask::MAX_QP_RD_ATOMIC;
    qp.modify(&attr, mask).unwrap();
}

pub fn to_err(qp: &Qp) {
    qp.modify(&QpAttr { state: QpState::Err, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
}

/// Two cards with a connection, and the port of their wire.
pub struct Pair {
    pub a: Node,
    pub b: Node,
    pub qa: Qp,
    pub qb: Qp,
    pub port: u16,
}

impl Pair {
    /// Both ends have agreed, if it is not the wire.
    pub fn new(settings: &Settings) -> Pair {
        Pair::of(settings, QpType::Rc)
    }

    /// The same of a type: RC or UC.
    pub fn of(settings: &Settings, qp_type: QpType) -> Pair {
        let pair = Pair::connected(settings, qp_type);
        wait_for("the agreement", || settings.link == LinkMode::Udp || pair.count("local_qps") == 2);
        pair
    }

    /// The same of cards that have no thread.
    pub fn polled(settings: &Settings, qp_type: QpType) -> Pair {
        let pair = Pair::connected(settings, qp_type);
        wait_for("the agreement", || {
            for node in [&pair.a, &pair.b] {
                assert_eq!(node.cq.poll(&mut [Cqe::default()]).unwrap(), 0);
            }
            settings.link == LinkMode::Udp || pair.count("local_qps") == 2
        });
        pair
    }

    fn connected(settings: &Settings, qp_type: QpType) -> Pair {
        let (a, b) = (Node::new(settings), Node::new(settings));
        let (qa, qb) = (a.qp(qp_type), b.qp(qp_type));
        if qp_type == QpType::Uc {
            connect_uc(&a, &qa, &b, &qb);
        } else {
            connect(&a, &qa, &b, &qb);
        }
        Pair { a, b, qa, qb, port: settings.port }
    }

    /// A counter of both cards.
    pub fn count(&self, name: &str) -> u64 {
        counters(self.port, name).iter().sum()
    }

    /// An operation on the second one's buffer.
    pub fn wr<'a>(&self, op: SendOp, sges: &'a [Sge], at: usize) -> SendWr<'a> {
        SendWr { op, remote_addr: self.b.addr(at), rkey: self.b.mr.rkey(), ..send(1, sges) }
    }
}

/// The way to a node's address.
pub fn way_to(node: &Node) -> AhAttr {
    let dgid = node.ctx.query_gid(1, 0).unwrap().gid;
    AhAttr { dgid, is_global: true, port: 1, hop_limit: 64, ..AhAttr::default() }
}

/// Connects two RC QPs.
pub fn connect(a: &Node, qa: &Qp, b: &Node, qb: &Qp) {
    connect_with(a, qa, b, qb, Mtu::M1024);
}

pub fn connect_with(a: &Node, qa: &Qp, b: &Node, qb: &Qp, path_mtu: Mtu) {
    connect_at(a, qa, b, qb, path_mtu, FIRST);
}

fn connect_at(a: &Node, qa: &Qp, b: &Node, qb: &Qp, path_mtu: Mtu, psn: Psn) {
    for (qp, peer, peer_qp) in [(qa, b, qb), (qb, a, qa)] {
        to_init(qp);
        to_rtr_with(qp, way_to(peer), peer_qp.number(), path_mtu, psn);
    }
    for qp in [qa, qb] {
        to_rts_at(qp, 14, 7, 7, psn);
    }
}

/// Connects two QPs again, at other PSNs: what is still under way of their last connection is not theirs now.
pub fn reconnect(a: &Node, qa: &Qp, b: &Node, qb: &Qp) {
    static TIMES: AtomicU32 = AtomicU32::new(1);
    for qp in [qa, qb] {
        qp.modify(&QpAttr { state: QpState::Reset, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    }
    let at = FIRST.plus(TIMES.fetch_add(1, Ordering::Relaxed) << 14);
    connect_at(a, qa, b, qb, Mtu::M1024, at);
}

/// Connects two UC QPs.
pub fn connect_uc(a: &Node, qa: &Qp, b: &Node, qb: &Qp) {
    connect_uc_end(qa, b, qb);
    connect_uc_end(qb, a, qa);
}

/// One of them.
pub fn connect_uc_end(qp: &Qp, peer: &Node, peer_qp: &Qp) {
    to_init(qp);
    let rtr = QpAttr {
        state: QpState::Rtr,
        av: way_to(peer),
        path_mtu: Mtu::M1024,
        dest_qpn: peer_qp.number(),
        rq_psn: FIRST,
        ..QpAttr::default()
    };
    let mask =
        QpAttrMask::STATE | QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    qp.modify(&rtr, mask).unwrap();
    let rts = QpAttr { state: QpState::Rts, sq_psn: FIRST, ..QpAttr::default() };
    qp.modify(&rts, QpAttrMask::STATE | QpAttrMask::SQ_PSN).unwrap();
}

/// A file that no other test has.
pub fn domain_file() -> File {
    File::from(memfd_create(c"starverbs-xrc", MFdFlags::MFD_CLOEXEC).unwrap())
}

/// Connects a sending XRC QP to a receiving one.
pub fn connect_xrc(sender: &Node, send: &Qp, receiver: &Node, recv: &Qp) {
    for (qp, peer, peer_qp) in [(send, receiver, recv), (recv, sender, send)] {
        to_init(qp);
        to_rtr(qp, way_to(peer), peer_qp.number());
    }
    to_rts(send);
    let rts = QpAttr { state: QpState::Rts, timeout: 14, ..QpAttr::default() };
    recv.modify(&rts, QpAttrMask::STATE | QpAttrMask::SQ_PSN | QpAttrMask::TIMEOUT).unwrap();
}

/// Takes a UD QP to RTS.
pub fn ud_ready(qp: &Qp) {
    let attr = |state| QpAttr { state, port_num: 1, qkey: QKEY, ..QpAttr::default() };
    let init = QpAttrMask::STATE | QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::QKEY;
    qp.modify(&attr(QpState::Init), init).unwrap();
    qp.modify(&attr(QpState::Rtr), QpAttrMask::STATE).unwrap();
    qp.modify(&attr(QpState::Rts), QpAttrMask::STATE | QpAttrMask::SQ_PSN).unwrap();
}
