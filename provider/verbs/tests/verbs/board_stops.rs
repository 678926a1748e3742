//! A board whose process is stopped, or killed, in the middle of traffic: for a while nobody notices; who
//! asks it something for longer ends with errors, and the board, should it go on, has forgotten them.
//!
//! The board is this test, run once more.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use starverbs_board::{Board, socket_paths};
use starverbs_core::{Cqe, QpType, SendOp, Sge, WcStatus};
use starverbs_settings::{DeviceChoice, Settings};
use starverbs_verbs::{Context, Pd, Qp, RecvWr, SendWr, VerbsEvent, kind};

use crate::common::*;

/// What tells a process of this program that it is the board: its first socket, and its port.
const SOCKET: &str = "STARVERBS_TEST_STOPPED";
const PORT: &str = "STARVERBS_TEST_STOPPED_PORT";
const READY: &str = "the board runs";
const FUNCTIONS: usize = 3;

/// A board in a process of its own.
struct BoardProcess {
    child: Child,
    settings: Settings,
    sockets: Vec<PathBuf>,
}

impl BoardProcess {
    /// Starts `test` once more, which begins with [`be_the_board`].
    fn start(test: &str) -> BoardProcess {
        let settings = settings();
        let first = std::env::temp_dir().join(format!("starverbs-stopped-{}-{test}", std::process::id()));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("board_stops::{test}"), "--nocapture"])
            .env(SOCKET, &first)
            .env(PORT, settings.port.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(lines.any(|line| line == READY), "the board ended by itself");
        BoardProcess { child, settings, sockets: socket_paths(&first, FUNCTIONS) }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// Stops it, and waits until all its threads are: they may be in the middle of a command.
    fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        let mut status = 0;
        // SAFETY: a child that was not waited for; a status that can be written.
        let stopped =
            unsafe { libc::waitpid(self.child.id().cast_signed(), &raw mut status, libc::WUNTRACED) };
        assert!(stopped > 0 && libc::WIFSTOPPED(status), "{status:#x}");
    }

    /// Settings of a client of function `n`.
    fn client(&self, n: usize) -> Settings {
        Settings { device: DeviceChoice::Board(self.sockets[n].clone()), ..self.settings.clone() }
    }
}

impl Drop for BoardProcess {
    fn drop(&mut self) {
        /* SIGKILL ends one that is stopped, too, which leaves its sockets */
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.sockets.iter().for_each(|socket| _ = std::fs::remove_file(socket));
    }
}

/// Is the board, if this process was started to be it.
fn be_the_board() {
    let (Some(socket), Ok(port)) = (std::env::var_os(SOCKET), std::env::var(PORT)) else { return };
    let settings = Settings { port: port.parse().unwrap(), ..settings() };
    let sockets = socket_paths(Path::new(&socket), FUNCTIONS);
    let mut board = Board::open(&settings, &sockets, [7, 7]).unwrap();
    println!("\n{READY}");
    board.run(&AtomicBool::new(false)).unwrap();
}

/// WRITEs of a node to itself, and receives that nothing comes for.
struct Load {
    node: Node,
    qps: [Qp; 2],
    next: u64,
}

impl Load {
    fn on(settings: &Settings) -> Load {
        let node = Node::new(settings);
        let qps = [node.qp(QpType::Rc), node.qp(QpType::Rc)];
        connect(&node, &qps[0], &node, &qps[1]);
        Load { node, qps, next: 0 }
    }

    /// Posts some, and gives how many.
    fn post(&mut self) -> usize {
        const EACH: u64 = 8;
        const POLLS: u32 = 100_000;
        let (remote_addr, rkey) = (self.node.addr(8192), self.node.mr.rkey());
        let sges = [self.node.sge(0, 8192)];
        for _ in 0..EACH {
            self.next += 1;
            let wr = SendWr { op: SendOp::Write, remote_addr, rkey, ..send(self.next, &sges) };
            /* a board that wakes up writes once more that little is released: polling makes it good */
            let mut polls = 0..POLLS;
            while post(&self.qps[0], &wr).is_err() {
                assert!(polls.next().is_some(), "there is no room");
                assert_eq!(self.node.cq.poll(&mut [Cqe::default()]).unwrap(), 0);
            }
        }
        EACH as usize
    }

    fn take(&self, count: usize) -> Vec<WcStatus> {
        self.node.completions(count).iter().map(|cqe| cqe.status).collect()
    }

    /// Everything works.
    fn moves(&mut self) {
        let count = self.post();
        assert!(self.take(count).iter().all(|status| *status == WcStatus::Success));
    }

    /// The program was told that its board is gone, and what it posts is flushed.
    fn has_ended(&mut self) {
        assert_eq!(self.node.ctx.get_async_event().unwrap(), VerbsEvent::Device { kind: kind::DEVICE_FATAL });
        self.flushes();
    }

    fn flushes(&mut self) {
        for _ in 0..4 {
            let count = self.post();
            assert!(self.take(count).iter().all(|status| *status == WcStatus::WrFlushErr));
        }
        assert!(self.qps[0].query().is_err() && Pd::alloc(&self.node.ctx).is_err());
    }
}

fn may_end(statuses: &[WcStatus]) -> bool {
    statuses.iter().all(|status| [WcStatus::Success, WcStatus::WrFlushErr].contains(status))
}

#[test]
fn a_board_that_is_stopped_for_a_while_goes_on() {
    be_the_board();
    let board = BoardProcess::start("a_board_that_is_stopped_for_a_while_goes_on");
    let mut loads = [0, 1].map(|n| Load::on(&board.client(n)));
    for _ in 0..20 {
        let mut posted = [0; 2];
        for (load, count) in loads.iter_mut().zip(&mut posted) {
            *count += load.post();
        }
        board.stop();
        for (load, count) in loads.iter_mut().zip(&mut posted) {
            *count += load.post();
        }
        std::thread::scope(|scope| {
            /* a command waits for its answer, whenever that comes */
            let asked = scope.spawn(|| Pd::alloc(&loads[0].node.ctx).map(drop));
            board.signal(Signal::SIGCONT);
            asked.join().unwrap().unwrap();
        });
        for (load, count) in loads.iter().zip(posted) {
            assert!(load.take(count).iter().all(|status| *status == WcStatus::Success));
        }
    }
}

/// Of three programs one asks the board something, one only polls, and one sleeps until a completion comes.
#[test]
fn a_board_that_is_silent_is_gone() {
    be_the_board();
    let board = BoardProcess::start("a_board_that_is_silent_is_gone");
    let mut loads = [0, 1, 2].map(|n| Load::on(&board.client(n)));
    loads.iter_mut().for_each(Load::moves);
    let [asks, polls, sleeps] = &mut loads;
    let posted = [asks.post(), polls.post()];
    assert!(sleeps.take(0).is_empty());
    sleeps.node.post_recv(&sleeps.qps[1], 0, 0, 64).unwrap();
    sleeps.node.cq.req_notify(false).unwrap();
    board.stop();
    assert_eq!(Pd::alloc(&asks.node.ctx).err().unwrap().errno(), libc::ETIMEDOUT);
    /* nobody new gets in, in bounded time */
    assert!(Context::open_with(board.client(0)).is_err());
    assert!(may_end(&asks.take(posted[0])) && may_end(&polls.take(posted[1])));
    assert_eq!(sleeps.node.channel.get_event().unwrap(), 77);
    assert_eq!(sleeps.take(1), [WcStatus::WrFlushErr]);
    loads.iter_mut().for_each(Load::has_ended);
    board.signal(Signal::SIGCONT);
    /* their functions are free again */
    for n in 0..FUNCTIONS {
        wait_for("the function", || Context::open_with(board.client(n)).is_ok());
    }
    loads.iter_mut().for_each(Load::flushes);
}

/// Nor without a thread of the library's.
#[test]
fn a_board_that_is_silent_is_gone_for_who_polls_alone() {
    be_the_board();
    let board = BoardProcess::start("a_board_that_is_silent_is_gone_for_who_polls_alone");
    let mut load = Load::on(&Settings { progress_thread: false, ..board.client(0) });
    load.moves();
    let posted = load.post();
    board.stop();
    assert!(may_end(&load.take(posted)));
    let posted = load.post();
    assert!(load.take(posted).iter().all(|status| *status == WcStatus::WrFlushErr));
    load.has_ended();
}

/// The receive of a message that has come in part is flushed as well: it was taken by the board.
#[test]
fn a_board_that_is_killed_in_a_message_flushes_its_receive() {
    const LEN: usize = 64 << 20;
    be_the_board();
    let board = BoardProcess::start("a_board_that_is_killed_in_a_message_flushes_its_receive");
    let node = Node::new(&board.client(0));
    let (qa, qb) = (node.qp(QpType::Rc), node.qp(QpType::Rc));
    connect(&node, &qa, &node, &qb);
    let buf = memory(2 * LEN);
    let mr = reg(&node.pd, buf, all_access()).unwrap();
    let [to, from] =
        [0, LEN].map(|at| Sge { addr: buf[at..].as_ptr() as u64, len: LEN as u32, lkey: mr.lkey() });
    buf[LEN].store(1, Ordering::Relaxed);
    /* all have one number, so that the receive is known by how many came before */
    for _ in 0..2 {
        node.post_recv(&qb, 7, 0, 64).unwrap();
        post(&qa, &send(8, &[node.sge(64, 64)])).unwrap();
        assert!(node.completions(2).iter().all(|cqe| cqe.status == WcStatus::Success));
    }
    let mut poster = qb.post_recv();
    poster.push(&RecvWr { wr_id: 7, sges: &[to] }).unwrap();
    poster.ring();
    post(&qa, &send(8, &[from])).unwrap();
    wait_for("the first bytes", || buf[0].load(Ordering::Relaxed) == 1);
    board.signal(Signal::SIGKILL);
    let mut ended: Vec<_> = node.completions(2).iter().map(|cqe| (cqe.wr_id, cqe.status)).collect();
    ended.sort_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(ended, [7, 8].map(|wr_id| (wr_id, WcStatus::WrFlushErr)));
    assert_eq!(node.cq.poll(&mut [Cqe::default()]).unwrap(), 0);
}

#[test]
fn a_board_that_is_killed_ends_all_its_programs() {
    be_the_board();
    for is_stopped in [false, true] {
        let board = BoardProcess::start("a_board_that_is_killed_ends_all_its_programs");
        let mut loads = [0, 1].map(|n| Load::on(&board.client(n)));
        let posted = loads.each_mut().map(|load| {
            load.moves();
            load.post()
        });
        if is_stopped {
            board.stop();
        }
        board.signal(Signal::SIGKILL);
        for (load, count) in loads.iter_mut().zip(posted) {
            assert!(may_end(&load.take(count)));
            load.has_ended();
        }
        assert!(Context::open_with(board.client(0)).is_err());
    }
}
