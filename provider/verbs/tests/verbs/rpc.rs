//! RPCs between two cards (StRoM): GET on the wire and between cards of one host, streams, and who may not.

use std::process::Command;

use crate::common::*;
use starverbs_core::strom::{
    Code, RECORD_LEN, ReplyFlags, ReplyHead, ReplyRecord, ReplyTarget, RpcAnswer, RpcOutcome,
};
use starverbs_core::wire::headers::Feth;
use starverbs_core::{FlushLevel, Placement, QpType, SendFlags, SendOp, SendWqe, WcOpcode, WcStatus};
use starverbs_kernels::get::{Bucket, HashEntry, Params};
use starverbs_kernels::{hll, shuffle};
use starverbs_settings::Settings;
use starverbs_verbs::{Builtin, Preference, Qp, QpInit, SendWr, Settled, send_ops_offered};
use zerocopy::{FromBytes, IntoBytes};

pub(crate) const OP: u64 = 0x1234_5678_9abc;
const EINVAL: i32 = 22;
const EBUSY: i32 = 16;
const EOPNOTSUPP: i32 = 95;
/// Where answers go: up to here, from 512 bytes before.
const ANSWER: usize = 4096;
const ROOM: usize = 512;

pub(crate) fn rpc_qp(node: &Node) -> Qp {
    Qp::create(&node.pd, &QpInit { rpc: true, ..node.init(QpType::Rc, None) }).unwrap()
}

/// A region for the answer that ends at a multiple of 8.
fn answer_at(node: &Node) -> usize {
    ANSWER - node.addr(0) as usize % 8
}

fn target(node: &Node, flags: ReplyFlags) -> ReplyHead {
    let (addr, rkey) = (node.addr(answer_at(node) - ROOM), node.mr.rkey());
    ReplyHead::new(&ReplyTarget { addr, rkey, len: ROOM as u32, imm: 77, flags })
}

pub(crate) fn call(node: &Node, qp: &Qp, params: &[u8], flags: ReplyFlags) {
    node.fill(answer_at(node) - RECORD_LEN, &[0; RECORD_LEN]);
    let wr = SendWr { op: SendOp::Rpc, remote_addr: OP, ..send(5, &[]) };
    post_inline(qp, &wr, &[target(node, flags).as_bytes(), params].concat()).unwrap();
}

/// Code and bytes of the answer, once it is there.
fn answer(node: &Node) -> (u32, Vec<u8>) {
    let end = answer_at(node);
    let record = || ReplyRecord::decode(&node.bytes(end - RECORD_LEN, RECORD_LEN));
    wait_for("the answer", || {
        assert!(node.cq.poll(&mut []).is_ok());
        record().is_some()
    });
    let RpcAnswer { op, length, code } = record().unwrap();
    assert_eq!(op, OP as u32);
    let data = if code == 0 { length as usize } else { 0 };
    (code, node.bytes(end - RECORD_LEN - data, data))
}

/// A table with key 7, whose value is seven bytes.
fn table(node: &Node) -> Params {
    let mut entry = HashEntry::default();
    let value = node.addr(1024);
    entry.buckets[1] = Bucket { key: 7.into(), value: value.into(), len: 7.into() };
    node.fill(64, entry.as_bytes());
    node.fill(1024, b"a value");
    let key = node.mr.rkey();
    Params {
        table: node.addr(0).into(),
        key: 7.into(),
        index: 1.into(),
        table_key: key.into(),
        value_key: key.into(),
        hops: 4.into(),
    }
}

#[test]
fn a_get_is_one_request() {
    for settings in [settings(), wire()] {
        gets(&Node::new(&settings), &Node::new(&settings));
    }
}

/// `b` answers what `a` gets.
pub(crate) fn gets(a: &Node, b: &Node) {
    let (qa, qb) = (rpc_qp(a), rpc_qp(b));
    connect(a, &qa, b, &qb);
    b.pd.load_kernel(OP, Builtin::Get).unwrap();
    assert_eq!(b.pd.load_kernel(OP, Builtin::Hll).unwrap_err().errno(), EBUSY);
    let params = table(b);
    for _ in 0..40 {
        call(a, &qa, params.as_bytes(), ReplyFlags::empty());
        assert_eq!(answer(a), (Code::Ok as u32, b"a value".to_vec()));
        let done = a.completions(1)[0];
        assert_eq!((done.wr_id, done.status, done.opcode), (5, WcStatus::Success, WcOpcode::RdmaWrite));
    }
    let other = Params { key: 8.into(), ..params };
    call(a, &qa, other.as_bytes(), ReplyFlags::empty());
    assert_eq!(answer(a).0, Code::NotFound as u32);
    a.completions(1);
    /* with an immediate, for a program that sleeps */
    a.post_recv(&qa, 6, 0, 0).unwrap();
    call(a, &qa, params.as_bytes(), ReplyFlags::IMM);
    let mut done: Vec<_> = a.completions(2).iter().map(|c| (c.wr_id, c.opcode)).collect();
    done.sort_by_key(|(id, _)| *id);
    assert_eq!(done, [(5, WcOpcode::RdmaWrite), (6, WcOpcode::RecvRdmaWithImm)]);
    assert_eq!(answer(a).1, b"a value");
    b.pd.unload_kernel(OP).unwrap();
    assert_eq!(b.pd.unload_kernel(OP).unwrap_err().errno(), EINVAL);
    call(a, &qa, params.as_bytes(), ReplyFlags::empty());
    assert_eq!(answer(a).0, Code::NoKernel as u32);
    a.completions(1);
    assert!(b.cq.poll(&mut [Default::default()]).unwrap() == 0, "answers complete to nobody");
}

/// A program calls a kernel of its own card: it reaches what an SGE does, and others have their turns.
#[test]
fn a_program_calls_its_own_cards_kernel() {
    let node = Node::new(&settings());
    let params = table(&node);
    let mut answer = [0; 64];
    let ended = |code, len| RpcOutcome { code, len };
    let none = node.pd.call_kernel(OP, params.as_bytes(), &mut answer).unwrap();
    assert_eq!(none, ended(Code::NoKernel, 0));
    node.pd.load_kernel(OP, Builtin::Get).unwrap();
    assert_eq!(node.pd.call_kernel(OP, params.as_bytes(), &mut answer).unwrap(), ended(Code::Ok, 7));
    assert_eq!(&answer[..7], b"a value");
    let short = node.pd.call_kernel(OP, params.as_bytes(), &mut answer[..6]).unwrap();
    assert_eq!(short, ended(Code::Overflow, 7));
    let other = Params { key: 8.into(), ..params };
    let unknown = node.pd.call_kernel(OP, other.as_bytes(), &mut answer).unwrap();
    assert_eq!(unknown, ended(Code::NotFound, 0));
    let foreign = Params { value_key: 0x1234.into(), ..params };
    let denied = node.pd.call_kernel(OP, foreign.as_bytes(), &mut answer).unwrap();
    assert_eq!(denied, ended(Code::Access, 0));
    assert_eq!(node.pd.call_kernel(OP, &[0; 4097], &mut answer).unwrap_err().errno(), EINVAL);
}

/// A send kernel: the values of a region go to partitions at the peer, though there are fewer slots than
/// WRITEs, and no thread that takes their ACKs.
#[test]
fn a_kernel_sends_while_its_program_waits() {
    const VALUES: usize = 6144;
    for settings in [settings(), wire()] {
        let a = Node::new(&Settings { progress_thread: false, ..settings.clone() });
        let b = Node::new(&settings);
        let (qa, qb) = (rpc_qp(&a), rpc_qp(&b));
        connect(&a, &qa, &b, &qb);
        a.pd.load_kernel(OP, Builtin::Shuffle).unwrap();
        let values: Vec<u64> = (0..VALUES as u64).collect();
        a.fill(0, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
        let ask = |command: u32, number: u32, qpn: u32, place: Option<(u64, usize)>| {
            let params = shuffle::Params {
                command: command.into(),
                number: number.into(),
                qpn: qpn.into(),
                ..shuffle::Params::default()
            };
            let place = place.map(|(to, len)| shuffle::Partition { to: to.into(), len: (len as u64).into() });
            let more = place.as_ref().map_or(&[][..], IntoBytes::as_bytes);
            let ended = a.pd.call_kernel(OP, &[params.as_bytes(), more].concat(), &mut [0; 64]).unwrap();
            assert_eq!(ended.code, Code::Ok, "command {command}");
        };
        ask(shuffle::BEGIN, 0, 0, None);
        ask(shuffle::HISTOGRAM, b.mr.rkey(), qa.number(), Some((b.addr(0), 8 * VALUES)));
        ask(shuffle::STREAM, a.mr.lkey(), 0, Some((a.addr(0), 8 * VALUES)));
        ask(shuffle::FLUSH, 0, 0, None);
        /* what is posted now stands behind it */
        let last = SendWr { op: SendOp::Write, rkey: b.mr.rkey(), remote_addr: b.addr(0), ..send(9, &[]) };
        post(&qa, &last).unwrap();
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        let there = b.bytes(0, 8 * VALUES);
        assert!(there.chunks(8).zip(&values).all(|(there, value)| there == value.to_le_bytes()));
    }
}

/// docs/strom.lua decodes what two cards say to each other.
#[test]
fn tshark_reads_rpcs_with_the_dissector() {
    if Command::new("tshark").arg("-v").output().is_err() {
        eprintln!("skipped: tshark is not installed");
        return;
    }
    let path = std::env::temp_dir().join(format!("starverbs-strom-{}.pcap", std::process::id()));
    let settings = Settings { pcap: Some(path.clone()), ..settings() };
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let (qa, qb) = (rpc_qp(&a), rpc_qp(&b));
    connect(&a, &qa, &b, &qb);
    b.pd.load_kernel(OP, Builtin::Get).unwrap();
    let params = table(&b);
    call(&a, &qa, params.as_bytes(), ReplyFlags::empty());
    assert_eq!(answer(&a).0, Code::Ok as u32);
    b.pd.unload_kernel(OP).unwrap();
    b.pd.load_kernel(OP, Builtin::Hll).unwrap();
    let wqe = SendWqe { flags: SendFlags::SIGNALED, remote_addr: OP, ..SendWqe::default() };
    let mut batch = qa.start(0);
    batch.begin(SendWqe { wr_id: 1, op: SendOp::RpcWrite, ..wqe });
    batch.set_sges(&[a.sge(8192, 64)]);
    batch.complete().unwrap();
    a.completions(2);
    let port = format!("udp.port=={},infiniband", settings.port);
    drop((qa, qb, a, b));
    let script = concat!("lua_script:", env!("CARGO_MANIFEST_DIR"), "/../../docs/strom.lua");
    let mut tshark = Command::new("tshark");
    tshark.args(["-X", script, "-d", &port, "-Y", "strom", "-T", "fields", "-e", "_ws.col.Info"]);
    let out = tshark.args(["-e", "_ws.lua.error", "-r"]).arg(&path).output().expect("tshark runs");
    std::fs::remove_file(&path).unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let mut lines: Vec<&str> = text.lines().filter_map(|line| line.split(" QPN ").next()).collect();
    /* each is there twice, sent and received; the answer may come before its question was written */
    lines.sort_unstable();
    lines.dedup();
    let wanted = [
        "Dialect: asks as StRoM",
        "Dialect: says StRoM",
        "RPC WRITE Only op 0x123456789abc, 64 bytes",
        "RPC answer: OK, 7 bytes",
        "RPC op 0x123456789abc, 32 bytes of parameters",
    ];
    assert_eq!(lines, wanted, "{text}{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn streams_are_built_in_place() {
    let (a, b) = Node::pair();
    let (qa, qb) = (rpc_qp(&a), rpc_qp(&b));
    connect(&a, &qa, &b, &qb);
    b.pd.load_kernel(OP, Builtin::Hll).unwrap();
    let items: Vec<u8> = (0..2500u32).flat_map(|n| (n % 100).to_le_bytes()).collect();
    a.fill(8192, &items);
    let wqe = SendWqe { flags: SendFlags::SIGNALED, remote_addr: OP, ..SendWqe::default() };
    let mut batch = qa.start(0);
    batch.begin(SendWqe { wr_id: 1, op: SendOp::RpcWrite, ..wqe });
    batch.set_sges(&[a.sge(8192, items.len())]);
    batch.complete().unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    call(&a, &qa, hll::Params::default().as_bytes(), ReplyFlags::empty());
    let (code, data) = answer(&a);
    let Ok(estimate) = hll::Estimate::read_from_bytes(&data) else { panic!("{data:?}") };
    assert_eq!((code, estimate.distinct.get(), estimate.items.get()), (0, 100, 2500));
}

#[test]
fn a_plain_peer_fails_the_first_rpc() {
    let (a, b) = Node::pair();
    let (qa, qb) = (rpc_qp(&a), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    call(&a, &qa, &[], ReplyFlags::empty());
    assert_eq!(a.completions(1)[0].status, WcStatus::LocQpOpErr);
}

#[test]
fn who_did_not_ask_has_no_rpcs() {
    let (a, b) = Node::pair();
    let (qa, qb) = (a.qp(QpType::Rc), rpc_qp(&b));
    connect(&a, &qa, &b, &qb);
    let wr = SendWr { op: SendOp::Rpc, remote_addr: OP, ..send(5, &[]) };
    assert_eq!(post(&qa, &wr).unwrap_err().errno(), EINVAL);
    let mut batch = qa.start(u64::MAX >> 1);
    batch.begin(SendWqe { op: SendOp::Rpc, ..SendWqe::default() });
    assert_eq!(batch.complete().unwrap_err().errno(), EINVAL);
    let refused = |init: &QpInit<'_>| Qp::create(&a.pd, init).err().map(|error| error.errno());
    let rpc = |qp_type| QpInit { rpc: true, ..a.init(qp_type, None) };
    assert_eq!(refused(&rpc(QpType::Uc)), Some(EOPNOTSUPP));
}

/// Queue pairs with RPCs, the first of which is to be stateless.
fn star_ends(a: &Node, b: &Node) -> (Qp, Qp) {
    let end = |node: &Node, star| {
        Qp::create(&node.pd, &QpInit { rpc: true, star: Some(star), ..node.init(QpType::Rc, None) }).unwrap()
    };
    (end(a, Preference::Stateless), end(b, Preference::Stateful))
}

/// With StaR an RPC goes to the stateful end, whose kernel answers; others are refused where they are posted.
#[test]
fn with_star_the_stateful_end_answers() {
    let settings = wire();
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let (qa, qb) = star_ends(&a, &b);
    b.pd.load_kernel(OP, Builtin::Get).unwrap();
    connect(&a, &qa, &b, &qb);
    let params = table(&b);
    /* it waits until it is settled what the ends are */
    call(&a, &qa, params.as_bytes(), ReplyFlags::empty());
    assert_eq!(answer(&a), (Code::Ok as u32, b"a value".to_vec()));
    let done = a.completions(1)[0];
    assert_eq!((done.wr_id, done.status, done.opcode), (5, WcStatus::Success, WcOpcode::RdmaWrite));
    assert_eq!([&qa, &qb].map(|qp| qp.star().unwrap().role), [Settled::Stateless, Settled::Stateful]);
    for _ in 0..40 {
        call(&a, &qa, params.as_bytes(), ReplyFlags::empty());
        assert_eq!(answer(&a).1, b"a value");
        a.completions(1);
    }
    if !board::are_in_place() {
        let counted = b.ctx.counters().unwrap();
        assert_eq!((counted.rx_rpc.get(), counted.tx_rpc_replies.get()), (41, 41));
    }
    for op in [SendOp::Rpc, SendOp::RpcWrite] {
        let wr = SendWr { op, remote_addr: OP, ..send(5, &[]) };
        assert_eq!(post(&qb, &wr).unwrap_err().errno(), EOPNOTSUPP, "{op:?}");
        let mut batch = qb.start(0);
        batch.begin(wr.wqe());
        assert_eq!(batch.complete().unwrap_err().errno(), EOPNOTSUPP, "{op:?}");
    }
    assert!(b.cq.poll(&mut [Default::default()]).unwrap() == 0, "answers complete to nobody");
    for (qp, other) in [(&qa, Preference::Stateful), (&qb, Preference::Auto)] {
        assert_eq!(qp.change_preference(Some(other)).unwrap_err().errno(), EOPNOTSUPP, "settled once");
    }
}

/// A stream of the stateless end is shuffled by the stateful one's card: partitions have what a plain loop
/// puts there.
#[test]
fn with_star_a_stream_is_shuffled_by_the_stateful_end() {
    const VALUES: u64 = 4000;
    const FROM: usize = 8192;
    const BITS: u32 = 4;
    let settings = wire();
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let (qa, qb) = star_ends(&a, &b);
    b.pd.load_kernel(OP, Builtin::Shuffle).unwrap();
    connect(&a, &qa, &b, &qb);
    let ask = |command: u32, number: u32, places: &[shuffle::Partition]| {
        let params =
            shuffle::Params { command: command.into(), number: number.into(), ..shuffle::Params::default() };
        a.fill(answer_at(&a) - RECORD_LEN, &[0; RECORD_LEN]);
        let data =
            [target(&a, ReplyFlags::empty()).as_bytes(), params.as_bytes(), places.as_bytes()].concat();
        a.fill(0, &data);
        let sges = [a.sge(0, data.len())];
        post(&qa, &SendWr { op: SendOp::Rpc, remote_addr: OP, ..send(5, &sges) }).unwrap();
        let (code, counts) = answer(&a);
        assert_eq!((code, a.completions(1)[0].status), (0, WcStatus::Success), "command {command}");
        counts
    };
    ask(shuffle::BEGIN, BITS, &[]);
    let room = BUF >> BITS;
    let place = |at: usize| shuffle::Partition { to: b.addr(at * room).into(), len: (room as u64).into() };
    ask(shuffle::HISTOGRAM, b.mr.rkey(), &(0..1 << BITS).map(place).collect::<Vec<_>>());
    let values: Vec<u64> = (0..VALUES).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    a.fill(FROM, &bytes);
    /* in one stream of several packets, one inline, and one without a byte */
    let (long, short) = (bytes.len() - 40, &bytes[bytes.len() - 40..]);
    let wr = SendWr { op: SendOp::RpcWrite, remote_addr: OP, ..send(6, &[]) };
    post(&qa, &SendWr { sges: &[a.sge(FROM, 1000), a.sge(FROM + 1000, long - 1000)], ..wr }).unwrap();
    post_inline(&qa, &wr, short).unwrap();
    post(&qa, &wr).unwrap();
    let done = a.completions(3);
    assert!(done.iter().all(|cqe| (cqe.status, cqe.opcode) == (WcStatus::Success, WcOpcode::RdmaWrite)));
    let counts = ask(shuffle::FLUSH, 1 << BITS, &[]);
    for at in 0..1 << BITS {
        let wanted = values.iter().filter(|value| **value as usize % (1 << BITS) == at);
        let wanted: Vec<u8> = wanted.flat_map(|value| value.to_le_bytes()).collect();
        assert!(b.bytes(at * room, wanted.len()) == wanted, "partition {at}");
        assert_eq!(counts[at * 8..][..8], (wanted.len() as u64 / 8).to_le_bytes(), "partition {at}");
    }
    assert_eq!([&qa, &qb].map(|qp| qp.star().unwrap().role), [Settled::Stateless, Settled::Stateful]);
    if !board::are_in_place() {
        assert_eq!(b.ctx.counters().unwrap().rx_rpc.get(), 3 + (long as u64).div_ceil(1024) + 2);
    }
}

/// Its room for answers holds the domain no longer than a stateless end lives.
#[test]
fn a_stateless_end_that_is_destroyed_leaves_no_room_for_answers() {
    let settings = wire();
    let (a, b) = (Node::new(&settings), Node::new(&settings));
    let pd = starverbs_verbs::Pd::alloc(&a.ctx).unwrap();
    let create = |node: &Node, pd, star| {
        Qp::create(pd, &QpInit { rpc: true, star: Some(star), ..node.init(QpType::Rc, None) }).unwrap()
    };
    let qa = create(&a, &pd, Preference::Stateless);
    let qb = create(&b, &b.pd, Preference::Stateful);
    connect(&a, &qa, &b, &qb);
    wait_for("the roles", || {
        assert!(a.cq.poll(&mut []).is_ok() && b.cq.poll(&mut []).is_ok());
        qa.star().unwrap().role == Settled::Stateless
    });
    assert_eq!(pd.dealloc().unwrap_err().errno(), EBUSY);
    qa.destroy().unwrap();
    pd.dealloc().unwrap();
}

/// The dialect has no FLUSH: it is refused where it is posted, and all else goes on.
#[test]
fn a_flush_is_not_posted() {
    let (a, b) = Node::pair();
    let (qa, qb) = (rpc_qp(&a), rpc_qp(&b));
    connect(&a, &qa, &b, &qb);
    let imm = Feth::word(Placement::GLOBAL, FlushLevel::Range);
    let to = SendWr { remote_addr: b.addr(0), rkey: b.mr.rkey(), imm, compare_add: 8, ..send(1, &[]) };
    let flush = SendWr { op: SendOp::Flush, ..to };
    assert_eq!(post(&qa, &flush).unwrap_err().errno(), EOPNOTSUPP);
    for ops in [send_ops_offered(QpType::Rc), 0] {
        let mut batch = qa.start(ops);
        batch.begin(flush.wqe());
        assert_eq!(batch.complete().unwrap_err().errno(), EOPNOTSUPP);
    }
    post(&qa, &SendWr { op: SendOp::Write, ..to }).unwrap();
    let done = a.completions(1)[0];
    assert_eq!((done.status, done.opcode), (WcStatus::Success, WcOpcode::RdmaWrite));
}

/// Its places for answers are not among those that were granted.
#[test]
fn answers_take_no_place_of_the_programs() {
    let node = Node::new(&settings());
    let qp = rpc_qp(&node);
    assert!(qp.caps().max_send_wr >= 16);
    let (mr, kept) = (node.mr.rkey(), qp.number());
    drop((qp, mr, kept));
    let pd = starverbs_verbs::Pd::alloc(&node.ctx).unwrap();
    pd.load_kernel(OP, Builtin::Traverse).unwrap();
    assert_eq!(pd.dealloc().unwrap_err().errno(), EBUSY);
    pd.unload_kernel(OP).unwrap();
    pd.dealloc().unwrap();
}
