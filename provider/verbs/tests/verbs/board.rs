//! Programs on functions of a board, which is a thread of this process: all that goes between them goes as
//! between processes, by sockets and shared memory.

use std::fs::File;
use std::io::BufRead;
use std::time::Duration;

use starverbs_core::wire::headers::Feth;
use starverbs_core::{
    Access, Cqe, FlushLevel, Placement, QpState, QpType, SendFlags, SendOp, WcFlags, WcOpcode, WcStatus,
};
use starverbs_queues::board::{DOORBELL_SEND, DoorbellMessage};
use starverbs_settings::{BoardDoorbell, DeviceChoice, Settings};
use starverbs_verbs::cm::{Agent, BindAddr, PortSpace};
use starverbs_verbs::{Ah, Builtin, Context, Dm, Mr, Pd, RecvWr, SendWr, Srq, VerbsEvent, kind};

use crate::common::board::BoardThread;
use crate::common::*;

/// A board, and two programs on functions of it.
fn on_board() -> (BoardThread, Node, Node) {
    let board = BoardThread::start(&settings(), 2);
    let (a, b) = (Node::new(&board.client(0)), Node::new(&board.client(1)));
    (board, a, b)
}

#[test]
fn rc_messages_arrive_in_order_with_their_bytes() {
    let (_board, a, b) = on_board();
    crate::transfers::rc_messages(&a, &b);
}

#[test]
fn one_sided_operations_move_the_bytes() {
    let (_board, a, b) = on_board();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let text: Vec<u8> = (0..20_000).map(|i| (i * 31) as u8).collect();
    a.fill(0, &text);
    let (out, back) = ([a.sge(0, 20_000)], [a.sge(30_000, 20_000)]);
    let remote = |op, sges| SendWr { op, remote_addr: b.addr(5), rkey: b.mr.rkey(), ..send(2, sges) };
    post(&qa, &remote(SendOp::Write, &out)).unwrap();
    post(&qa, &remote(SendOp::Read, &back)).unwrap();
    let done = a.completions(2);
    let said: Vec<_> = done.iter().map(|cqe| (cqe.opcode, cqe.status)).collect();
    assert_eq!(said, [(WcOpcode::RdmaWrite, WcStatus::Success), (WcOpcode::RdmaRead, WcStatus::Success)]);
    assert_eq!(done[1].byte_len, 20_000);
    assert_eq!((b.bytes(5, 20_000), a.bytes(30_000, 20_000)), (text.clone(), text));
    let cell = (8 - b.addr(40_000) as usize % 8) % 8 + 40_000;
    b.fill(cell, &40u64.to_ne_bytes());
    let into = [a.sge(0, 8)];
    let base = SendWr { remote_addr: b.addr(cell), rkey: b.mr.rkey(), ..send(1, &into) };
    post(&qa, &SendWr { op: SendOp::FetchAdd, compare_add: 2, ..base }).unwrap();
    assert_eq!((a.completions(1)[0].status, a.word(0), b.word(cell)), (WcStatus::Success, 40, 42));
    post(&qa, &SendWr { op: SendOp::CmpSwap, compare_add: 42, swap: 7, ..base }).unwrap();
    assert_eq!((a.completions(1)[0].status, a.word(0), b.word(cell)), (WcStatus::Success, 42, 7));
    post(&qa, &SendWr { op: SendOp::CmpSwap, compare_add: 42, swap: 9, ..base }).unwrap();
    assert_eq!((a.completions(1)[0].status, a.word(0), b.word(cell)), (WcStatus::Success, 7, 7));
}

/// `starverbs stat --qp` asks the board for the queue pairs of all its functions, `starverbs kernel` for
/// their kernels, which it does not change.
#[test]
fn tools_see_its_queue_pairs_and_kernels() {
    let settings = settings();
    let board = BoardThread::start(&settings, 2);
    let (a, b) = (Node::new(&board.client(0)), Node::new(&board.client(1)));
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let ask = |text: &[u8]| {
        let said = starverbs_backend::ask(settings.port, board.block, text, Duration::from_secs(60));
        String::from_utf8(said.unwrap()).unwrap()
    };
    let (said, numbers) = (ask(b"qps"), [qa.number(), qb.number()]);
    assert!(said.starts_with("qpn state remote_qpn"), "{said}");
    for [own, peer] in [numbers, [numbers[1], numbers[0]]] {
        let line = said.lines().find(|line| line.starts_with(&format!("{own:#x} ")));
        assert!(line.is_some_and(|line| line.contains(&format!(" Rts {peer:#x} 127."))), "{said}");
    }
    assert_eq!(ask(b"kernels"), "pd op kernel\n");
    for (node, kernel) in [(&a, Builtin::Get), (&b, Builtin::Hll)] {
        node.pd.load_kernel(0x53, kernel).unwrap();
    }
    b.pd.leave_to_program(u64::MAX).unwrap();
    let [first, second] = [&a, &b].map(|node| node.pd.id().0);
    let mut lines =
        [(first, format!("{first} 0x53 get")), (second, format!("{second} 0x53 hll\n{second} any program"))];
    lines.sort_unstable();
    assert_eq!(ask(b"kernels"), format!("pd op kernel\n{}\n{}\n", lines[0].1, lines[1].1));
    assert_eq!(ask(b"unload 1 - 83"), "error: its card is a board\n");
}

#[test]
fn inline_and_immediate_data_arrive() {
    let (_board, a, b) = on_board();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let mut said = *b"inline message";
    post_inline(&qa, &SendWr { op: SendOp::SendImm, imm: 0x0102_0304, ..send(1, &[]) }, &said).unwrap();
    said.fill(0);
    b.post_recv(&qb, 5, 0, 64).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    let got = b.completions(1)[0];
    assert!(got.flags.contains(WcFlags::WITH_IMM));
    assert_eq!((got.imm, got.byte_len, b.bytes(0, 14)), (0x0102_0304, 14, b"inline message".to_vec()));
}

#[test]
fn datagrams_arrive_with_their_header() {
    let (_board, a, b) = on_board();
    let (qa, qb) = (a.qp(QpType::Ud), b.qp(QpType::Ud));
    ud_ready(&qa);
    ud_ready(&qb);
    let ah = Ah::create(&a.pd, &way_to(&b)).unwrap();
    b.post_recv(&qb, 9, 0, 2000).unwrap();
    a.fill(0, b"hello datagram");
    let to = SendWr { ah: ah.id(), remote_qpn: qb.number(), qkey: QKEY, ..send(3, &[]) };
    post(&qa, &SendWr { sges: &[a.sge(0, 14)], ..to }).unwrap();
    let got = b.completions(1)[0];
    assert_eq!((got.wr_id, got.status, got.byte_len, got.src_qp), (9, WcStatus::Success, 54, qa.number()));
    assert!(got.flags.contains(WcFlags::GRH));
    assert_eq!(b.bytes(40, 14), b"hello datagram");
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    ah.destroy().unwrap();
}

#[test]
fn a_shared_queue_serves_queue_pairs_and_warns() {
    let (_board, a, b) = on_board();
    let srq = Srq::create(&b.pd, 8, 1, 2, 55).unwrap();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp_with_srq(&srq));
    connect(&a, &qa, &b, &qb);
    for wr_id in 0..2 {
        srq.post(&RecvWr { wr_id, sges: &[b.sge(64 * wr_id as usize, 64)] }).unwrap();
    }
    for round in 0..2u64 {
        post_inline(&qa, &send(round, &[]), &[round as u8 + 1; 8]).unwrap();
        let got = b.completions(1)[0];
        assert_eq!((got.wr_id, got.status), (round, WcStatus::Success));
        assert_eq!(b.bytes(64 * round as usize, 8), [round as u8 + 1; 8]);
    }
    assert_eq!(
        b.ctx.get_async_event().unwrap(),
        VerbsEvent::Srq { kind: kind::SRQ_LIMIT_REACHED, cookie: 55 }
    );
    assert_eq!(srq.query().unwrap().limit, 0, "the event disarms it");
    srq.modify(None, Some(3)).unwrap();
    assert_eq!(srq.query().unwrap().limit, 3);
    assert_eq!(srq.destroy().unwrap_err().errno(), libc::EBUSY);
    qb.destroy().unwrap();
    srq.destroy().unwrap();
}

#[test]
fn events_wake_a_program_that_sleeps() {
    let (_board, a, b) = on_board();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    for round in 0..20u64 {
        b.post_recv(&qb, round, 0, 64).unwrap();
        b.cq.req_notify(false).unwrap();
        let came_before = b.cq.poll(&mut [Cqe::default()]).unwrap();
        assert_eq!(came_before, 0);
        post_inline(&qa, &send(round, &[]), b"wake").unwrap();
        assert_eq!(b.channel.get_event().unwrap(), 77);
        assert_eq!(b.completions(1)[0].wr_id, round);
        a.completions(1);
    }
    /* a solicited event comes of a solicited message alone */
    for wr_id in 0..2 {
        b.post_recv(&qb, wr_id, 0, 64).unwrap();
    }
    b.cq.req_notify(true).unwrap();
    post_inline(&qa, &send(1, &[]), b"quiet").unwrap();
    assert_eq!((a.completions(1).len(), b.completions(1)[0].wr_id), (1, 0));
    let solicited = SendWr { flags: SendFlags::SIGNALED | SendFlags::SOLICITED, ..send(2, &[]) };
    post_inline(&qa, &solicited, b"loud").unwrap();
    assert_eq!((b.channel.get_event().unwrap(), b.completions(1)[0].wr_id), (77, 1));
}

#[test]
fn a_queue_pair_in_error_flushes_what_was_posted_and_what_comes() {
    let (_board, a, b) = on_board();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    for wr_id in 0..3 {
        b.post_recv(&qb, wr_id, 0, 64).unwrap();
    }
    to_err(&qb);
    let flushed: Vec<_> = b.completions(3).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    assert_eq!(flushed, [0, 1, 2].map(|wr_id| (wr_id, WcStatus::WrFlushErr)));
    b.post_recv(&qb, 7, 0, 64).unwrap();
    post(&qb, &send(8, &[])).unwrap();
    let mut late: Vec<_> = b.completions(2).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    late.sort_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(late, [(7, WcStatus::WrFlushErr), (8, WcStatus::WrFlushErr)]);
    assert_eq!(qb.state(), QpState::Err);
    /* and from RESET on it is new */
    reconnect(&a, &qa, &b, &qb);
    b.post_recv(&qb, 11, 0, 64).unwrap();
    post_inline(&qa, &send(12, &[]), b"again").unwrap();
    assert_eq!((b.completions(1)[0].wr_id, a.completions(1)[0].wr_id), (11, 12));
}

#[test]
fn a_key_that_is_closed_opens_nothing() {
    let (_board, a, b) = on_board();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let mr = b.reg(100, 64, all_access());
    let write = |key, at| SendWr { op: SendOp::Write, remote_addr: b.addr(at), rkey: key, ..send(1, &[]) };
    post_inline(&qa, &write(mr.rkey(), 100), b"open").unwrap();
    assert_eq!((a.completions(1)[0].status, b.bytes(100, 4)), (WcStatus::Success, b"open".to_vec()));
    let key = mr.rkey();
    mr.dereg().unwrap();
    post_inline(&qa, &write(key, 100), b"shut").unwrap();
    assert_eq!((a.completions(1)[0].status, b.bytes(100, 4)), (WcStatus::RemAccessErr, b"open".to_vec()));
    assert_eq!(b.ctx.get_async_event().unwrap(), VerbsEvent::Qp { kind: kind::QP_ACCESS_ERR, cookie: 99 });
}

/// The other function's keys, domains and queues are no names here, and its memory is out of reach.
#[test]
fn functions_do_not_reach_each_other() {
    let (_board, a, b) = on_board();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    /* a key of the other's in an SGE of ours */
    post(&qa, &send(1, &[b.sge(0, 8)])).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::LocProtErr);
}

#[test]
fn what_a_board_does_not_take_is_said() {
    let (_board, a, _b) = on_board();
    let srq = Srq::create(&a.pd, 4, 1, 0, 0).unwrap();
    let refused =
        [srq.modify(Some(8), None).unwrap_err(), Srq::create_tagged(&a.pd, &a.cq, 4, 4, 1, 0).err().unwrap()];
    assert_eq!(refused.map(|error| error.errno()), [libc::EOPNOTSUPP; 2]);
    assert!(!a.ctx.device_attr().tags);
}

/// A process holds a service among all of the host, be their cards boards or not.
#[test]
fn a_service_of_a_board_has_one_holder_of_the_host() {
    let settings = settings();
    let board = BoardThread::start(&settings, 2);
    let nodes = [board.client(0), board.client(1), settings].map(|settings| Node::new(&settings));
    let agents = nodes.each_ref().map(|node| Agent::of(&node.ctx).unwrap());
    let local = "127.0.0.1:7471".parse().unwrap();
    let bind = BindAddr { space: PortSpace::Tcp, local, v6_only: false, reuse: false };
    for first in 0..agents.len() {
        let held = agents[first].bind(bind).unwrap();
        for agent in &agents {
            assert_eq!(agent.bind(bind).err().unwrap().errno(), libc::EADDRINUSE);
        }
        drop(held);
    }
}

#[test]
fn a_board_and_a_card_in_software_talk_to_each_other() {
    let settings = settings();
    let board = BoardThread::start(&settings, 1);
    let (a, b) = (Node::new(&board.client(0)), Node::new(&settings));
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    b.post_recv(&qb, 4, 0, 4096).unwrap();
    a.post_recv(&qa, 5, 8192, 4096).unwrap();
    a.fill(0, &[3; 4000]);
    b.fill(8000, &[4; 4000]);
    post(&qa, &send(1, &[a.sge(0, 4000)])).unwrap();
    post(&qb, &send(2, &[b.sge(8000, 4000)])).unwrap();
    let mut done: Vec<_> = [a.completions(2), b.completions(2)].concat();
    done.sort_by_key(|cqe| cqe.wr_id);
    let said: Vec<_> = done.iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    assert_eq!(said, [1, 2, 4, 5].map(|wr_id| (wr_id, WcStatus::Success)));
    assert_eq!((b.bytes(0, 4000), a.bytes(8192, 4000)), (vec![3; 4000], vec![4; 4000]));
}

#[test]
fn a_word_is_written_whole_and_flushed() {
    let (_board, a, b) = on_board();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let cell = (8 - b.addr(0) as usize % 8) % 8;
    a.fill(0, b"eight ch");
    let from = [a.sge(0, 8)];
    let base = SendWr { remote_addr: b.addr(cell), rkey: b.mr.rkey(), ..send(1, &from) };
    post(&qa, &SendWr { op: SendOp::AtomicWrite, ..base }).unwrap();
    assert_eq!((a.completions(1)[0].status, b.bytes(cell, 8)), (WcStatus::Success, b"eight ch".to_vec()));
    let global = Feth::word(Placement::GLOBAL, FlushLevel::Range);
    post(&qa, &SendWr { op: SendOp::Flush, imm: global, compare_add: 8, ..base }).unwrap();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
}

/// A program that is killed leaves nothing, and disturbs nobody. The program is this test, run once more.
#[test]
fn a_client_that_is_killed_leaves_nothing() {
    const SOCKET: &str = "STARVERBS_TEST_KILLED";
    const RUNNING: &str = "the program runs";
    const FORKED: &str = "its child: ";
    if let Some(socket) = std::env::var_os(SOCKET) {
        let settings = Settings { device: DeviceChoice::Board(socket.into()), ..Settings::default() };
        let node = Node::new(&settings);
        let (qa, qb) = (node.qp(QpType::Rc), node.qp(QpType::Rc));
        connect(&node, &qa, &node, &qb);
        // SAFETY: the child does nothing but wait for its end.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: takes nothing.
                unsafe { libc::pause() };
            }
        }
        println!("\n{FORKED}{child}\n{RUNNING}");
        let sges = [node.sge(0, 8192)];
        let wr = SendWr {
            op: SendOp::Write,
            remote_addr: node.addr(8192),
            rkey: node.mr.rkey(),
            ..send(1, &sges)
        };
        loop {
            post(&qa, &wr).unwrap();
            assert_eq!(node.completions(1)[0].status, WcStatus::Success);
        }
    }
    let board = BoardThread::start(&settings(), 3);
    let (a, b) = (Node::new(&board.client(1)), Node::new(&board.client(2)));
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    for round in 0..8 {
        let mut program = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "board::a_client_that_is_killed_leaves_nothing", "--nocapture"])
            .env(SOCKET, &board.sockets[0])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let lines = std::io::BufReader::new(program.stdout.take().unwrap()).lines();
        let mut child = None;
        for line in lines.map_while(Result::ok).take_while(|line| line != RUNNING) {
            child = child.or(line.strip_prefix(FORKED).map(|pid| pid.parse().unwrap()));
        }
        let child: libc::pid_t = child.expect("the program ended by itself");
        /* at one moment or another of its work */
        for n in 0..round * 5 {
            b.post_recv(&qb, n, 0, 64).unwrap();
            post_inline(&qa, &send(n, &[]), &[n as u8; 8]).unwrap();
            assert_eq!((b.completions(1)[0].status, b.bytes(0, 8)), (WcStatus::Success, vec![n as u8; 8]));
            assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        }
        program.kill().unwrap();
        program.wait().unwrap();
        /* its child lives on, and holds nothing once it has run: the next one has the function */
        let mut next = None;
        wait_for("the function", || {
            next = Context::open_with(board.client(0)).ok();
            next.is_some()
        });
        // SAFETY: the number is of a process that this test has started, and that has not ended.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
        let next = next.expect("it is there");
        let pd = Pd::alloc(&next).unwrap();
        let next = Node::of(next, pd);
        let (to, from) = (next.qp(QpType::Rc), next.qp(QpType::Rc));
        connect(&next, &to, &next, &from);
        next.post_recv(&from, 1, 0, 64).unwrap();
        post_inline(&to, &send(2, &[]), b"next").unwrap();
        assert!(next.completions(2).iter().all(|cqe| cqe.status == WcStatus::Success));
    }
}

/// Who names the first socket gets the first function that is free, and no two get the same.
#[test]
fn programs_of_one_setting_have_functions_of_their_own() {
    let board = BoardThread::start(&settings(), 2);
    let client = board.client(0);
    let open = || Context::open_with(client.clone());
    let path = |ctx: &Context| ctx.board_facts().unwrap().unwrap().path;
    let start = std::sync::Barrier::new(2);
    let [a, b] = std::thread::scope(|scope| {
        let at_once = || {
            start.wait();
            open().unwrap()
        };
        [scope.spawn(at_once), scope.spawn(at_once)].map(|thread| thread.join().unwrap())
    });
    let mut taken = [path(&a), path(&b)];
    taken.sort();
    assert_eq!(taken[..], board.sockets[..]);
    let refused = open().err().unwrap();
    let text = refused.to_string();
    assert_eq!(refused.errno(), libc::EBUSY);
    assert!(text.starts_with(&format!("STARVERBS_DEVICE=board:{}: ", taken[0].display())), "{text}");
    assert!(text.contains("functions there (2)") && text.contains("`starverbs board --sockets N`"), "{text}");
    /* one that is named is that one alone */
    assert_eq!(Context::open_with(board.client(1)).err().unwrap().errno(), libc::EBUSY);
    let freed = path(&b);
    drop(b);
    let again = open().unwrap();
    assert_eq!(path(&again), freed);
    /* those who were refused did no harm */
    let [a, again] = [a, again].map(|ctx| {
        let pd = Pd::alloc(&ctx).unwrap();
        Node::of(ctx, pd)
    });
    crate::transfers::rc_messages(&a, &again);
}

/// A context of a board is imported where it was opened, and nowhere else: it shows others no memory.
#[test]
fn objects_of_a_board_are_their_process_s_alone() {
    let (_board, a, _b) = on_board();
    let fd = a.ctx.command_fd();
    assert!(fd >= 0, "a name for imports");
    assert_eq!(Context::import_with(settings(), fd).err().unwrap().errno(), libc::EOPNOTSUPP);
    let again = a.ctx.import().unwrap();
    let pd = Pd::import(&again, a.pd.handle()).unwrap();
    assert_eq!(Mr::import(&pd, a.mr.lkey()).unwrap().rkey(), a.mr.rkey());
    let dm = Dm::alloc(&a.ctx, 4096, 12).unwrap();
    assert_eq!(Dm::import(&again, dm.handle()).unwrap().handle(), dm.handle());
}

/// A board that is gone: calls fail, polls find nothing, and nothing hangs.
#[test]
fn a_board_that_is_gone_is_an_error() {
    let board = BoardThread::start(&settings(), 1);
    let client = board.client(0);
    let node = Node::new(&client);
    let (qa, qb) = (node.qp(QpType::Rc), node.qp(QpType::Rc));
    connect(&node, &qa, &node, &qb);
    drop(board);
    post_inline(&qa, &send(1, &[]), b"nobody").unwrap();
    assert_eq!(node.completions(1)[0].status, WcStatus::WrFlushErr);
    let failed = [node.mr.dereg().unwrap_err(), qa.query().unwrap_err(), Pd::alloc(&node.ctx).err().unwrap()];
    assert!(failed.iter().all(|error| [libc::EIO, libc::EPIPE].contains(&error.errno())), "{failed:?}");
    assert!(Context::open_with(client).is_err(), "nobody is at the socket");
}

/// No doorbell is lost where several threads post to one queue.
#[test]
fn threads_share_a_doorbell() {
    let (_board, a, b) = on_board();
    share_a_doorbell(&a, &b);
}

/// Nor where each is a message: the board is told of each WQE once, and by no cell.
#[test]
fn threads_share_a_doorbell_that_is_a_message() {
    let path = std::env::temp_dir().join(format!("starverbs-messages-{}", std::process::id()));
    let record = File::create(&path).unwrap();
    let board = BoardThread::start_recorded(&settings(), 2, Some(record));
    let by = |n, board_doorbell| Settings { board_doorbell, ..board.client(n) };
    let (a, b) = (Node::new(&by(0, BoardDoorbell::Message)), Node::new(&by(1, BoardDoorbell::Cell)));
    let posted = share_a_doorbell(&a, &b);
    drop((a, b, board));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let word = |digits: &str| u64::from_str_radix(digits, 16).unwrap().swap_bytes();
    let messages = text.lines().filter_map(|line| line.strip_prefix("write 0 2 fff8 ")).map(word);
    let mut next = 0;
    for message in messages.map(DoorbellMessage::from_word) {
        assert_eq!((message.op, message.offset), (DOORBELL_SEND, next));
        next += message.count;
    }
    assert_eq!(usize::from(next), posted);
    assert!(!text.lines().any(|line| line.starts_with("bell 0 0 ") && !line.starts_with("bell 0 0 0 ")));
}

/// Four threads post to one queue, in rounds; gives how much they posted.
fn share_a_doorbell(a: &Node, b: &Node) -> usize {
    /* all of a round have room in the completion queue: a request's slot is free again before it is polled */
    const EACH: usize = 25;
    const ROUNDS: usize = 20;
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(a, &qa, b, &qb);
    let wr = SendWr { op: SendOp::Write, remote_addr: b.addr(0), rkey: b.mr.rkey(), ..send(1, &[]) };
    for _ in 0..ROUNDS {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        while post_inline(&qa, &wr, b"word").is_err() {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            /* a lost one would leave the last requests where they are */
            let done = a.completions(4 * EACH);
            assert!(done.iter().all(|cqe| cqe.status == WcStatus::Success));
        });
    }
    4 * EACH * ROUNDS
}

/// Device memory lies in a memory file: the board, which is in this process, maps it as long as a key opens
/// it.
#[test]
fn regions_in_memory_files_are_mapped() {
    let (_board, a, b) = on_board();
    let (qa, qb) = (a.qp(QpType::Rc), b.qp(QpType::Rc));
    connect(&a, &qa, &b, &qb);
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("starverbs-memory")).count()
    };
    let dm = Dm::alloc(&b.ctx, 10_000, 12).unwrap();
    let before = mapped();
    let reg = |at| Mr::device(&b.pd, &dm, at, 5000, all_access() | Access::ZERO_BASED).unwrap();
    let (one, two) = (reg(0), reg(5000));
    assert_eq!(mapped(), before + 1, "once for both");
    let into = [a.sge(0, 8)];
    let wr = SendWr { remote_addr: 4096, rkey: one.rkey(), ..send(1, &into) };
    a.fill(8, &40u64.to_ne_bytes());
    post(&qa, &SendWr { op: SendOp::Write, sges: &[a.sge(8, 8)], ..wr }).unwrap();
    post(&qa, &SendWr { op: SendOp::FetchAdd, compare_add: 2, ..wr }).unwrap();
    post(&qa, &SendWr { op: SendOp::Read, sges: &[a.sge(16, 8)], ..wr }).unwrap();
    assert!(a.completions(3).iter().all(|cqe| cqe.status == WcStatus::Success));
    assert_eq!((a.word(0), a.word(16)), (40, 42));
    one.dereg().unwrap();
    assert_eq!(mapped(), before + 1);
    two.dereg().unwrap();
    assert_eq!(mapped(), before, "it goes with the last key");
    dm.free().unwrap();
}

/// A board that ends under load: what was posted is flushed, who waits is woken, and what is posted later is
/// flushed, too.
#[test]
fn a_board_that_ends_flushes_what_was_posted() {
    for _ in 0..5 {
        let board = BoardThread::start(&settings(), 1);
        let node = Node::new(&board.client(0));
        let (qa, qb) = (node.qp(QpType::Rc), node.qp(QpType::Rc));
        connect(&node, &qa, &node, &qb);
        let sges = [node.sge(0, 8192)];
        let (remote_addr, rkey) = (node.addr(8192), node.mr.rkey());
        let write = |wr_id| SendWr { op: SendOp::Write, remote_addr, rkey, ..send(wr_id, &sges) };
        for wr_id in 0..8 {
            node.post_recv(&qb, wr_id, 0, 64).unwrap();
            post(&qa, &write(100 + wr_id)).unwrap();
        }
        drop(board);
        /* each completes: the writes one way or the other, the receives flushed */
        let mut done: Vec<_> = node.completions(16).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
        done.sort_by_key(|(wr_id, _)| *wr_id);
        let wr_ids: Vec<_> = done.iter().map(|(wr_id, _)| *wr_id).collect();
        assert_eq!(wr_ids, (0..8).chain(100..108).collect::<Vec<_>>());
        assert!(done[..8].iter().all(|(_, status)| *status == WcStatus::WrFlushErr), "{done:?}");
        let ended = |status| [WcStatus::Success, WcStatus::WrFlushErr].contains(&status);
        assert!(done[8..].iter().all(|(_, status)| ended(*status)), "{done:?}");
        assert_eq!(node.ctx.get_async_event().unwrap(), VerbsEvent::Device { kind: kind::DEVICE_FATAL });
        for wr_id in 0..200 {
            node.post_recv(&qb, wr_id, 0, 64).unwrap();
            post(&qa, &write(1000 + wr_id)).unwrap();
            let late = node.completions(2);
            assert!(late.iter().all(|cqe| cqe.status == WcStatus::WrFlushErr), "{late:?}");
        }
        assert!(qa.query().is_err() && Pd::alloc(&node.ctx).is_err());
    }
}

/// A program that sleeps when its board ends is woken.
#[test]
fn a_board_that_ends_wakes_who_sleeps() {
    let board = BoardThread::start(&settings(), 1);
    let node = Node::new(&board.client(0));
    let (qa, qb) = (node.qp(QpType::Rc), node.qp(QpType::Rc));
    connect(&node, &qa, &node, &qb);
    node.post_recv(&qb, 7, 0, 64).unwrap();
    node.cq.req_notify(false).unwrap();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| node.channel.get_event().unwrap());
        drop(board);
        assert_eq!(sleeper.join().unwrap(), 77);
    });
    let flushed = node.completions(1)[0];
    assert_eq!((flushed.wr_id, flushed.status), (7, WcStatus::WrFlushErr));
}

/// A board of another user's process is not opened: it would get this process's memory. Without root no other
/// user can be had.
#[test]
fn a_board_of_another_user_is_not_opened() {
    use std::os::unix::fs::PermissionsExt;
    const NOBODY: u32 = 65534;
    // SAFETY: takes nothing, and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        println!("skipped: needs root");
        return;
    }
    let board = BoardThread::start(&settings(), 1);
    /* it may connect, so that who is there decides */
    std::fs::set_permissions(&board.sockets[0], std::fs::Permissions::from_mode(0o777)).unwrap();
    let client = board.client(0);
    // SAFETY: the child changes its user, tries to open the board, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: plain numbers.
        let other = unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) } == 0;
        let refused = Context::open_with(client).err().map(|error| error.errno()) == Some(libc::EPERM);
        // SAFETY: ends the child without what its parent has to do.
        unsafe { libc::_exit(if other && refused { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: the child that was just made; a status that can be written.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    /* the board's own user may */
    drop(Node::new(&board.client(0)));
}
