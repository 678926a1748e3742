//! For the oracles of tests/untrusted: a board without sockets, clock and chance.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use starverbs_backend::HostAddr;
use starverbs_core::{Counters, FrameMeta, Gid, Nanos};
use starverbs_vfio::message::Head;
use starverbs_vfio::{MessageOp, VfioMessage};

use crate::Board;
use crate::record::{RecordHeader, Tap};
use crate::server::carry_out;
use crate::stats::Stats;
use crate::wire::{LoopLine, WireRx, WireTx};

/// The one address of its port.
pub const GID: Gid = Gid::from_ipv4([10, 0, 0, 1]);

/// A board whose port brings back what it sends, and whose time is told.
pub struct Driven {
    board: Board,
    line: Rc<LoopLine>,
    stats: Stats,
    now: Nanos,
}

impl Driven {
    /// One of so many functions.
    ///
    /// # Panics
    /// There is no memory for it.
    pub fn new(functions: usize, seed: [u64; 2]) -> Driven {
        let addr = HostAddr { gid: GID, ifindex: 1, link_mtu: 4200, name: "line".to_owned(), loopback: true };
        let line = LoopLine::new(std::slice::from_ref(&addr));
        let (tx, mut rx) = (WireTx::Line(Rc::clone(&line)), WireRx::Line(Rc::clone(&line), Vec::new()));
        let stats = Stats::default();
        let blocks = vec![rx.claim_block().expect("the first block")];
        let header =
            RecordHeader { seed, guid: 1, functions, addrs: vec![addr], blocks, ..RecordHeader::default() };
        let now = 1_000_000;
        let board = Board::assemble(&header, stats.clone(), (tx, rx), Tap::off(), now);
        let board = board.expect("a board");
        Driven { board, line, stats, now }
    }

    /// A message to a function from a client that has said which version it speaks; gives the body of the
    /// answer, or its errno. `None`: no such operation.
    pub fn message(
        &mut self,
        function: usize,
        op: u16,
        body: &[u8],
        fds: Vec<OwnedFd>,
        same_user: bool,
    ) -> Option<Result<Vec<u8>, i32>> {
        let Board { card, functions, .. } = &mut self.board;
        let head = Head { op, ..Head::default() };
        let message = VfioMessage { head, body: body.to_vec(), fds };
        let done =
            carry_out(MessageOp::from_code(op)?, message, same_user, functions.get_mut(function)?, card);
        Some(done.map(|(body, _)| body))
    }

    /// A function's client is gone.
    pub fn disconnect(&mut self, function: usize) {
        let Board { card, functions, .. } = &mut self.board;
        if let Some(function) = functions.get_mut(function) {
            function.disconnect(card);
        }
    }

    /// A frame comes from the wire, its ICRC seen to be right.
    pub fn frame(&mut self, src: Gid, dst: Gid, frame: &[u8]) {
        let meta = FrameMeta { src, dst, traffic_class: 0, hop_limit: 64 };
        self.line.put(meta, frame.to_vec());
    }

    /// A turn, so much later than the last; says whether there was anything to do.
    pub fn turn(&mut self, later: Nanos) -> bool {
        self.now += later;
        let had = self.board.turn(self.now);
        for function in &mut self.board.functions {
            function.look_after_memory(&self.board.card);
        }
        had
    }

    /// What the card counts.
    pub fn counters(&self) -> &Counters {
        &self.stats
    }
}
