//! RPCs of SL (StRoM): their parameters are fetched as a SEND's data is, a kernel of this card runs, and its
//! answer stands in our send queue, as a WRITE to SL's memory. RPC WRITEs: their kernel gets the data piece
//! by piece, each as long as a packet of RC.
//!
//! One is executed as a WRITE is: when all before it is done, and before anything behind it begins. SL's
//! WQE is stored once, so its kernel runs once. There is room for one piece, so what comes before its turn is
//! refused, and asked for again; how far ahead is asked follows from that. The core has the kernels.

use starverbs_core::strom::{Code, ReplyHead, TARGET_LEN};
use starverbs_core::transport::{PeerSite, Turned};
use starverbs_core::{Nanos, Psn, QpId, QpState, SendFlags, SendOp, SendWqe, WcStatus};

use super::begin::Begin;
use super::clock::KEEPALIVE;
use super::rare::Rare;
use super::stream::{OrderClass, WqeProgress};
use super::window::{InFlight, Of};
use super::{CardCtx, Ended, Stateful};
use crate::env::StarEnv;

/// Too many kernels are at work: one is asked again after this, ns.
const AGAIN: Nanos = 20_000;
/// Pieces of an RPC WRITE that are asked for together, at most.
const MOST_AHEAD: u8 = 64;

/// The piece of an RPC WRITE that is coming, or that its kernel is at.
#[derive(Clone, Copy)]
pub(super) struct StreamPiece {
    /// Bytes of it that have not come
    left: u16,
    /// Pieces from it on that may be asked for: one more with each that its kernel took at once, one alone
    /// when any came too early
    ahead: u8,
}

impl Default for StreamPiece {
    fn default() -> Self {
        StreamPiece { left: 0, ahead: MOST_AHEAD }
    }
}

/// Calls [`EngineRpc`](starverbs_core::engine::EngineRpc) with what a kernel works with.
macro_rules! with_peer {
    ($end:ident, $card:ident, $method:ident $(, $of:expr)*) => {{
        let (access, max_msg) = ($end.local.access, $end.max_msg());
        let qp = QpId { pd: $end.local.pd, qpn: $end.local.qpn };
        let (env, mrs, stats, sq) = (&mut *$card.env, &*$card.mrs, $card.stats, &$end.local.sq);
        let mut peer = PeerSite { env, mrs, stats, sq, qp, access, max_msg };
        $card.rpc.$method(&mut peer $(, $of)*)
    }};
}

impl<E: StarEnv> Stateful<E> {
    /// Whether an RPC of SL is under way: nothing begins behind it.
    pub(super) fn is_at_rpc(&self) -> bool {
        let oldest = self.streams[1].oldest();
        oldest.is_some_and(|op| matches!(op.class, OrderClass::Rpc | OrderClass::Stream))
    }

    /// Whether our program answers an RPC: it is a SEND with immediate data then.
    pub(super) fn is_for_program(&self, card: &CardCtx<'_, E>, wqe: &SendWqe) -> bool {
        let qp = QpId { pd: self.local.pd, qpn: self.local.qpn };
        wqe.op == SendOp::Rpc && card.rpc.is_programs(qp, wqe.remote_addr)
    }

    /// Why an RPC is none, whoever is to answer it: of one that is fetched the head is not looked at.
    pub(super) fn rpc_error(&self, seq: Psn, wqe: &SendWqe) -> Option<WcStatus> {
        let inline = wqe.flags.contains(SendFlags::INLINE);
        if wqe.length > self.mtu() {
            Some(WcStatus::LocLenErr)
        } else if (wqe.length as usize) < TARGET_LEN
            || inline && ReplyHead::decode(self.inline(seq)).is_none()
        {
            Some(WcStatus::RemInvReqErr)
        } else {
            None
        }
    }

    /// RPC `seq` of SL begins: its parameters are here, or are fetched.
    pub(super) fn begin_rpc(&mut self, card: &mut CardCtx<'_, E>, seq: Psn, wqe: &SendWqe) -> Begin {
        let Some(rare) = self.rare_of_rpc(card.now) else { return Begin::Wait };
        rare.rpc_at = 0;
        if let Some(status) = self.rpc_error(seq, wqe) {
            return Begin::failed(OrderClass::Rpc, status);
        }
        let inline = wqe.flags.contains(SendFlags::INLINE);
        card.rpc.expect(wqe.length as usize);
        if inline && card.rpc.put(0, self.inline(seq)).is_none() {
            return Begin::failed(OrderClass::Rpc, WcStatus::RemInvReqErr);
        }
        Begin::Go(WqeProgress {
            class: OrderClass::Rpc,
            length: wqe.length,
            all: inline,
            ..WqeProgress::default()
        })
    }

    /// All bytes of SL's oldest WQE are here: its kernel begins, or has a turn. How it ended; `None`: it is
    /// not done.
    pub(super) fn kernel_turn(
        &mut self,
        card: &mut CardCtx<'_, E>,
        index: u32,
        class: OrderClass,
    ) -> Option<WcStatus> {
        if class == OrderClass::Stream { self.stream_turn(card, index) } else { self.rpc_turn(card, index) }
    }

    fn rpc_turn(&mut self, card: &mut CardCtx<'_, E>, index: u32) -> Option<WcStatus> {
        let wqe = self.sends.get(Psn::new(index)).copied().unwrap_or_default();
        if self.rpc_at() == 0 {
            match with_peer!(self, card, begin, wqe.remote_addr) {
                Some(true) => {}
                Some(false) => {
                    self.arm(card.now + AGAIN);
                    return None;
                }
                None => return Some(WcStatus::RemInvReqErr),
            }
        } else if self.is_before_turn(card.now) {
            return None;
        }
        self.turn_ended(card).map(|_| WcStatus::Success)
    }

    /// What is kept of an RPC that begins, as nothing of SL is under way. `None`: something is, or there is
    /// no memory.
    fn rare_of_rpc(&mut self, now: Nanos) -> Option<&mut Rare> {
        if self.streams[1].under_way() > 0 {
            return None;
        }
        if self.rare.make().is_err() {
            self.arm(now + KEEPALIVE);
        }
        self.rare.get_mut()
    }

    /// When the kernel has its next turn; 0: none is at work.
    fn rpc_at(&self) -> Nanos {
        self.rare.get().map_or(0, |rare| rare.rpc_at)
    }

    /// The piece of an RPC WRITE of SL.
    fn piece(&self) -> StreamPiece {
        self.rare.get().map_or(StreamPiece::default(), |rare| rare.piece)
    }

    /// Whether another timer was earlier than the kernel's.
    fn is_before_turn(&mut self, now: Nanos) -> bool {
        let at = self.rpc_at();
        if now < at {
            self.arm(at);
        }
        now < at
    }

    /// The kernel has a turn. `None`: it has not ended, and gets another.
    fn turn_ended(&mut self, card: &mut CardCtx<'_, E>) -> Option<Code> {
        match with_peer!(self, card, turn) {
            Turned::Ended(code) => Some(code),
            Turned::Later(after) => {
                let at = card.now + after;
                if let Some(rare) = self.rare.get_mut() {
                    rare.rpc_at = at;
                }
                self.arm(at);
                None
            }
        }
    }

    /// RPC WRITE `seq` of SL begins.
    pub(super) fn begin_stream(&mut self, card: &mut CardCtx<'_, E>, seq: Psn, wqe: &SendWqe) -> Begin {
        if self.rare_of_rpc(card.now).is_none() {
            return Begin::Wait;
        }
        if self.next_piece(card, seq, wqe, 0).is_none() {
            return Begin::failed(OrderClass::Stream, WcStatus::RemOpErr);
        }
        let all = wqe.length == 0 || wqe.flags.contains(SendFlags::INLINE);
        Begin::Go(WqeProgress {
            class: OrderClass::Stream,
            length: wqe.length,
            all,
            ..WqeProgress::default()
        })
    }

    /// The piece from byte `at` on is to come, or is here.
    fn next_piece(&mut self, card: &mut CardCtx<'_, E>, seq: Psn, wqe: &SendWqe, at: u32) -> Option<()> {
        let len = (wqe.length - at).min(self.mtu());
        card.rpc.expect(len as usize);
        /* a path MTU has no more */
        let mut left = len as u16;
        if wqe.flags.contains(SendFlags::INLINE) {
            let bytes = self.inline(seq).get(at as usize..)?.get(..len as usize)?;
            card.rpc.put(0, bytes)?;
            left = 0;
        }
        let rare = self.rare.get_mut()?;
        (rare.rpc_at, rare.piece.left) = (0, left);
        Some(())
    }

    /// Whether the bytes from `offset` on of SL's RPC WRITE have a place now.
    pub(super) fn takes_piece(&self, offset: u32) -> bool {
        self.is_near_piece(offset, 1)
    }

    /// Whether they may be asked for now.
    pub(super) fn wants_piece(&self, offset: u32) -> bool {
        self.is_near_piece(offset, self.piece().ahead)
    }

    /// Whether a piece is coming, and these are of it, or of one of so many from it on.
    fn is_near_piece(&self, offset: u32, pieces: u8) -> bool {
        let at = self.streams[1].oldest().map_or(0, |op| op.number);
        self.piece().left > 0 && offset.wrapping_sub(at) < u32::from(pieces) * self.mtu()
    }

    /// Bytes of SL's RPC WRITE came before their turn. SL is not silent: it did answer.
    pub(super) fn refuse_piece(&mut self, card: &mut CardCtx<'_, E>, psn: Psn, entry: &InFlight) {
        self.backoff = 0;
        if let Some(rare) = self.rare.get_mut() {
            rare.piece.ahead = 1;
        }
        self.refused_early(card, psn, entry);
        if self.piece().left == 0 {
            self.forget_ahead(card, entry.wqe);
        }
    }

    /// The kernel is at work on a piece. Packets of those behind it that are lost, or were refused, may not
    /// go again before it ends, and would have no others pass them in the window: they are forgotten, and
    /// those behind them, and leave anew then. What comes of them is dropped. Those in flight may come in
    /// their turn if none is lost.
    fn forget_ahead(&mut self, card: &mut CardCtx<'_, E>, index: u32) {
        let end = self.streams[1].get(index).number.saturating_add(self.mtu());
        let ahead = |entry: &InFlight| entry.of == Of::Remote && entry.wqe == index && entry.offset >= end;
        if self.window.next_lost(ahead).is_some() {
            let packets = self.forget_packets(card, ahead);
            self.streams[1].rewind(index, end, packets);
        }
    }

    /// Bytes of SL's RPC WRITE came. With all of a piece its kernel begins; with all of the last piece once
    /// the packet has its answer, as the WQE is done with that kernel. How it ends, if the kernel refuses a
    /// piece.
    pub(super) fn put_piece(
        &mut self,
        card: &mut CardCtx<'_, E>,
        entry: &InFlight,
        data: &[u8],
    ) -> Result<(), WcStatus> {
        let WqeProgress { number: at, length, .. } = *self.streams[1].get(entry.wqe);
        card.rpc.put(entry.offset.wrapping_sub(at) as usize, data).ok_or(WcStatus::RemOpErr)?;
        let last = length - at <= self.mtu();
        let Some(Rare { piece, .. }) = self.rare.get_mut() else { return Err(WcStatus::RemOpErr) };
        piece.left = piece.left.saturating_sub(data.len() as u16);
        if last || piece.left > 0 {
            return Ok(());
        }
        self.stream_turn(card, entry.wqe).map_or(Ok(()), Err)
    }

    /// A kernel in the middle of SL's RPC WRITE goes on, if it is its turn.
    pub(super) fn stream_turn_due(&mut self, card: &mut CardCtx<'_, E>) {
        let over = self.state != QpState::Rts || self.ended != Ended::Not;
        let at = |op: &WqeProgress| op.class == OrderClass::Stream && !(op.all && op.left == 0);
        if over || self.piece().left > 0 || !self.streams[1].oldest().is_some_and(at) {
            return;
        }
        let index = self.streams[1].una;
        if let Some(status) = self.stream_turn(card, index) {
            self.abandon(card, Of::Remote, index, status);
        }
    }

    /// A piece of SL's RPC WRITE is here: its kernel begins, or has a turn; when it has ended, the next piece
    /// is to come. How the WQE ends, if it does.
    fn stream_turn(&mut self, card: &mut CardCtx<'_, E>, index: u32) -> Option<WcStatus> {
        let ended = self.feed_piece(card, index);
        if ended.is_none() && self.piece().left == 0 {
            self.forget_ahead(card, index);
        }
        ended
    }

    fn feed_piece(&mut self, card: &mut CardCtx<'_, E>, index: u32) -> Option<WcStatus> {
        let seq = Psn::new(index);
        let wqe = self.sends.get(seq).copied().unwrap_or_default();
        while self.piece().left == 0 {
            let at = self.streams[1].get(index).number;
            let next = wqe.length.min(at.saturating_add(self.mtu()));
            let at_once = self.rpc_at() == 0;
            if at_once {
                let of = (at == 0, next == wqe.length);
                if !with_peer!(self, card, feed, wqe.remote_addr, of) {
                    self.arm(card.now + AGAIN);
                    return None;
                }
            } else if self.is_before_turn(card.now) {
                return None;
            }
            let code = self.turn_ended(card)?;
            self.streams[1].op(index).number = next;
            match code {
                Code::Ok if next == wqe.length => return Some(WcStatus::Success),
                Code::Ok if self.next_piece(card, seq, &wqe, next).is_some() => {}
                _ => return Some(WcStatus::RemOpErr),
            }
            if let Some(Rare { piece, .. }) = self.rare.get_mut().filter(|_| at_once) {
                piece.ahead = MOST_AHEAD.min(piece.ahead + 1);
            }
        }
        None
    }
}
