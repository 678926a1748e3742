//! StaR with programs on functions of a board: with a card in software, and with each other. Others of StaR's
//! tests run on boards, too (`tests/board.filter`).

use std::fs::File;
use std::io::BufRead;

use nix::sys::memfd::{MFdFlags, memfd_create};
use starverbs_core::{Cqe, QpState, QpType, SendOp, WcOpcode, WcStatus};
use starverbs_settings::{DeviceChoice, Settings, StarPreference};
use starverbs_verbs::{Context, Cq, Pd, Preference, Qp, QpInit, SendWr, Settled};

use crate::common::board::BoardThread;
use crate::common::wire as settings;
use crate::common::*;
use crate::star_stateless::{connected, given_back, messages, one_sided};

/// Where two ends are.
#[derive(Clone, Copy, Debug)]
enum Places {
    /// The stateless one on a board, the other on a card in software
    StatelessOnBoard,
    /// The other way round
    StatefulOnBoard,
    /// On two functions of one board
    OneBoard,
    /// On two boards
    TwoBoards,
}

const PLACES: [Places; 4] =
    [Places::StatelessOnBoard, Places::StatefulOnBoard, Places::OneBoard, Places::TwoBoards];

/// Two programs there, the first of which wants to be stateless, and the boards.
fn programs(places: Places) -> (Vec<BoardThread>, [Node; 2]) {
    let wire = settings();
    let board = |sockets| BoardThread::start(&wire, sockets);
    let (boards, [a, b]) = match places {
        Places::StatelessOnBoard => {
            let board = board(1);
            let at = [board.client(0), wire];
            (vec![board], at)
        }
        Places::StatefulOnBoard => {
            let board = board(1);
            let at = [wire, board.client(0)];
            (vec![board], at)
        }
        Places::OneBoard => {
            let board = board(2);
            let at = [board.client(0), board.client(1)];
            (vec![board], at)
        }
        Places::TwoBoards => {
            let boards = vec![board(1), board(1)];
            let at = [boards[0].client(0), boards[1].client(0)];
            (boards, at)
        }
    };
    let node = |at, star| Node::new(&Settings { star, ..at });
    (boards, [node(a, StarPreference::Stateless), node(b, StarPreference::Stateful)])
}

#[test]
fn ends_on_boards_carry_messages_reads_and_writes() {
    for places in PLACES {
        println!("{places:?}");
        let (_boards, nodes) = programs(places);
        let qps = connected(&nodes);
        messages(&nodes, &qps);
        one_sided(&nodes, &qps);
        let infos = qps.each_ref().map(|qp| qp.star().unwrap());
        assert_eq!(infos.map(|info| info.preference), [Preference::Stateless, Preference::Stateful]);
        assert_eq!(infos[0].card_bytes, 0, "the card has nothing of it");
        assert!(infos[0].host_bytes > 0 && infos[1].card_bytes > 0, "{infos:?}");
    }
}

/// What answers a message comes behind the completion of that message, as with RC: a program that waits for
/// the events of two queues in turn relies on it.
#[test]
fn an_answer_comes_behind_the_completion_of_what_it_answers() {
    const ROUNDS: u64 = 300;
    for places in PLACES {
        println!("{places:?}");
        let (_boards, nodes) = programs(places);
        let [a, b] = &nodes;
        let (sends, recvs) =
            (Cq::create(&a.ctx, 16, None, 0).unwrap(), Cq::create(&a.ctx, 16, None, 0).unwrap());
        let init = QpInit { send_cq: &sends, recv_cq: &recvs, ..a.init(QpType::Rc, None) };
        let (qa, qb) = (Qp::create(&a.pd, &init).unwrap(), b.qp(QpType::Rc));
        connect(a, &qa, b, &qb);
        wait_for("the role", || qa.star().unwrap().role == Settled::Stateless);
        let mut late = 0;
        std::thread::scope(|scope| {
            b.post_recv(&qb, 0, 0, 64).unwrap();
            scope.spawn(|| {
                let mut came = 0;
                while came < ROUNDS {
                    b.cq.req_notify(false).unwrap();
                    let mut cqe = [Cqe::default()];
                    while b.cq.poll(&mut cqe).unwrap() == 1 {
                        assert_eq!(cqe[0].status, WcStatus::Success);
                        if cqe[0].opcode == WcOpcode::Recv {
                            came += 1;
                            b.post_recv(&qb, came, 0, 64).unwrap();
                            post_inline(&qb, &send(came, &[]), &[2; 8]).unwrap();
                        }
                    }
                    if came < ROUNDS {
                        b.channel.get_event().unwrap();
                    }
                }
            });
            for n in 0..ROUNDS {
                a.post_recv(&qa, n, 64, 64).unwrap();
                post_inline(&qa, &send(n, &[]), &[1; 8]).unwrap();
                assert_eq!(poll(&recvs, 1)[0].status, WcStatus::Success);
                let mut sent = [Cqe::default()];
                if sends.poll(&mut sent).unwrap() == 0 {
                    late += 1;
                    sent = [poll(&sends, 1)[0]];
                }
                assert_eq!((sent[0].wr_id, sent[0].status), (n, WcStatus::Success));
            }
        });
        assert_eq!(late, 0, "of {ROUNDS}");
    }
}

#[test]
fn memory_of_a_function_that_is_given_back_is_reached_no_more() {
    for places in PLACES {
        println!("{places:?}");
        let (_boards, nodes) = programs(places);
        given_back(&nodes);
    }
}

/// A queue pair is destroyed behind its last completions: its peer has them.
#[test]
fn a_stateful_end_that_is_destroyed_owes_nothing() {
    for places in PLACES {
        println!("{places:?}");
        let (_boards, nodes) = programs(places);
        for _ in 0..8 {
            let qps = connected(&nodes);
            let [a, b] = &nodes;
            b.post_recv(&qps[1], 1, 0, 64).unwrap();
            post(&qps[0], &send(2, &[a.sge(0, 64)])).unwrap();
            assert_eq!(b.completions(1)[0].status, WcStatus::Success);
            qps[1].destroy().unwrap();
            assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        }
    }
}

/// In ERR a stateless end of a board flushes; in RESET it is the card's again, and may be one anew.
#[test]
fn a_stateless_end_of_a_board_comes_back() {
    let (_boards, nodes) = programs(Places::StatelessOnBoard);
    let [a, b] = &nodes;
    let qps = connected(&nodes);
    for id in 0..4 {
        a.post_recv(&qps[0], id, 0, 64).unwrap();
    }
    to_err(&qps[0]);
    assert_eq!(qps[0].state(), QpState::Err);
    let flushed: Vec<_> = a.completions(4).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    assert_eq!(flushed, [0, 1, 2, 3].map(|id| (id, WcStatus::WrFlushErr)));
    to_err(&qps[1]);
    reconnect(a, &qps[0], b, &qps[1]);
    wait_for("the roles", || {
        qps.each_ref().map(|qp| qp.star().unwrap().role) == [Settled::Stateless, Settled::Stateful]
    });
    messages(&nodes, &qps);
}

/// A program on a board says what its end is to be while it runs: plain, and stateless again. Receives that a
/// stateless end held come first.
#[test]
fn a_program_changes_roles_on_a_board() {
    for places in PLACES {
        println!("{places:?}");
        let (_boards, nodes) = programs(places);
        let qps = connected(&nodes);
        let [a, b] = &nodes;
        for id in 0..8 {
            a.post_recv(&qps[0], id, 4096 + 64 * id as usize, 64).unwrap();
        }
        let are = |roles| qps.each_ref().map(|qp| qp.star().unwrap().role) == roles;
        for (round, roles) in
            [[Settled::Plain; 2], [Settled::Stateless, Settled::Stateful]].iter().enumerate()
        {
            let wanted = match roles[0] {
                Settled::Plain => [Preference::Off; 2],
                _ => [Preference::Stateless, Preference::Stateful],
            };
            for (qp, wanted) in qps.iter().zip(wanted) {
                qp.change_preference(Some(wanted)).unwrap();
            }
            wait_for("the roles", || are(*roles));
            for n in 0..4 {
                let id = 4 * round as u64 + n;
                post_inline(&qps[1], &send(id, &[]), &[id as u8; 8]).unwrap();
                assert_eq!(b.completions(1)[0].status, WcStatus::Success);
                let got = a.completions(1)[0];
                assert_eq!((got.wr_id, got.status), (id, WcStatus::Success));
                assert_eq!(a.bytes(4096 + 64 * id as usize, 8), [id as u8; 8]);
            }
        }
    }
}

/// A stateful end whose peer's board is gone fails, and says so; the other way round, too.
#[test]
fn whoever_is_left_by_a_board_finds_out() {
    for (places, left) in [(Places::StatelessOnBoard, 1), (Places::StatefulOnBoard, 0)] {
        let (boards, nodes) = programs(places);
        let qps = connected(&nodes);
        drop(boards);
        let (node, qp) = (&nodes[left], &qps[left]);
        post(qp, &send(1, &[node.sge(0, 64)])).unwrap();
        let status = node.completions(1)[0].status;
        assert_eq!(status, WcStatus::RetryExcErr, "{places:?}");
    }
}

/// A program that is killed in the middle of its StaR traffic leaves nothing, and disturbs nobody. It is this
/// test, run once more, and has both ends of its connection.
#[test]
fn a_client_with_star_that_is_killed_leaves_nothing() {
    const SOCKET: &str = "STARVERBS_TEST_STAR_KILLED";
    const RUNNING: &str = "the program runs";
    if let Some(socket) = std::env::var_os(SOCKET) {
        let settings = Settings { device: DeviceChoice::Board(socket.into()), ..Settings::default() };
        let node = Node::new(&settings);
        let qps = both_ends(&node);
        println!("\n{RUNNING}");
        let sges = [node.sge(0, 8192)];
        let write = SendWr {
            op: SendOp::Write,
            remote_addr: node.addr(8192),
            rkey: node.mr.rkey(),
            ..send(1, &sges)
        };
        for qp in qps.iter().cycle() {
            post(qp, &write).unwrap();
            assert_eq!(node.completions(1)[0].status, WcStatus::Success);
        }
    }
    let board = BoardThread::start(&settings(), 3);
    let node = |n, star| Node::new(&Settings { star, ..board.client(n) });
    let nodes = [node(1, StarPreference::Stateless), node(2, StarPreference::Stateful)];
    let qps = connected(&nodes);
    for _ in 0..6 {
        let mut program = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "board_star::a_client_with_star_that_is_killed_leaves_nothing", "--nocapture"])
            .env(SOCKET, &board.sockets[0])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(program.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line == RUNNING)), "the program ended by itself");
        /* at one moment or another of its work */
        messages(&nodes, &qps);
        program.kill().unwrap();
        program.wait().unwrap();
        let mut next = None;
        wait_for("the function", || {
            next = Context::open_with(board.client(0)).ok();
            next.is_some()
        });
        let next = next.expect("it is there");
        let pd = Pd::alloc(&next).unwrap();
        let next = Node::of(next, pd);
        let [a, b] = both_ends(&next);
        next.post_recv(&b, 1, 0, 64).unwrap();
        post_inline(&a, &send(2, &[]), b"next").unwrap();
        assert!(next.completions(2).iter().all(|cqe| cqe.status == WcStatus::Success));
    }
    messages(&nodes, &qps);
}

/// The ends of a connection of one program: the first is stateless.
fn both_ends(node: &Node) -> [Qp; 2] {
    let of =
        |star| Qp::create(&node.pd, &QpInit { star: Some(star), ..node.init(QpType::Rc, None) }).unwrap();
    let qps = [of(Preference::Stateless), of(Preference::Stateful)];
    connect(node, &qps[0], node, &qps[1]);
    wait_for("the roles", || {
        qps.each_ref().map(|qp| qp.star().unwrap().role) == [Settled::Stateless, Settled::Stateful]
    });
    qps
}

/// Inline bytes that some packets would not take: such a queue pair is plain, whatever its program wants.
#[test]
fn many_inline_bytes_are_plain_on_a_board() {
    let (_boards, nodes) = programs(Places::StatelessOnBoard);
    let [a, b] = &nodes;
    let of = |init: QpInit<'_>| Qp::create(&a.pd, &init).unwrap();
    let init = a.init(QpType::Rc, None);
    for (max_inline, role) in [(480, Settled::Stateless), (1024, Settled::Plain)] {
        let (qp, peer) = (of(QpInit { max_inline, ..init }), b.qp(QpType::Rc));
        connect(a, &qp, b, &peer);
        wait_for("the role", || qp.star().unwrap().role == role);
        b.post_recv(&peer, 1, 0, 64).unwrap();
        post_inline(&qp, &send(2, &[]), &[3; 40]).unwrap();
        assert_eq!((b.completions(1)[0].status, b.bytes(0, 40)), (WcStatus::Success, vec![3; 40]));
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    }
}

/// What a board without StaR answers: one that is recorded.
#[test]
fn a_board_without_star_says_so() {
    let record = memfd_create(c"record", MFdFlags::MFD_CLOEXEC).unwrap();
    let board = BoardThread::start_recorded(&settings(), 2, Some(File::from(record)));
    let a = Node::new(&board.client(0));
    let init = QpInit { star: Some(Preference::Auto), ..a.init(QpType::Rc, None) };
    assert_eq!(Qp::create(&a.pd, &init).err().unwrap().errno(), libc::EOPNOTSUPP);
    /* what the settings ask for is left where there is none */
    let asking = Node::new(&Settings { star: StarPreference::Auto, ..board.client(1) });
    assert_eq!(asking.qp(QpType::Rc).preference(), Preference::Off);
    let qp = a.qp(QpType::Rc);
    assert_eq!(qp.star().err().unwrap().errno(), libc::EOPNOTSUPP);
    /* nor does it leave a peer waiting that asks */
    let b = Node::new(&Settings {
        star: StarPreference::Stateful,
        device: DeviceChoice::Soft,
        ..board.client(0)
    });
    let peer = b.qp(QpType::Rc);
    connect(&a, &qp, &b, &peer);
    wait_for("the role", || peer.star().unwrap().role == Settled::Plain);
}
