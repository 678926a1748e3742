//! WQEs begin: whether they may, with what receive WQE, and what is wrong with them.

use starverbs_core::engine::TakenRecv;
use starverbs_core::env::{RecvQueue, SendQueue, TakenWqe};
use starverbs_core::mr::{WindowBind, WindowType};
use starverbs_core::nic::PACKET_OVERHEAD;
use starverbs_core::transport::{RNR_TIMER_10US, slices};
use starverbs_core::{Access, Nanos, NicError, Psn, QpId, SendFlags, SendOp, SendWqe, Sge, WcStatus};

use super::clock::KEEPALIVE;
use super::stream::{Carry, OrderClass, WqeProgress};
use super::window::Of;
use super::{CardCtx, RecvOfSl, Stateful};
use crate::env::StarEnv;
use crate::form::Form;
use crate::registry::FoundRule;

/// SL repeats a WQEP for so long before it gives up: 1 ms, doubled seven times. A receive WQE of SL may be
/// under way as long, so that a SEND for which none is here is not refused before.
const WQEP_LIFETIME: Nanos = 255_000_000;

/// Packets of a SEND that SL's card does in their turn, at most.
const MOST_TURNS: u32 = 16;
/// Of a WRITE on a path that loses some, if SL's card has no room for what is early: as what is behind a lost
/// one goes again, longer ones are faster by themselves.
const MOST_TURNS_IF_LOST: u32 = 32;
/// Of a WRITE on a path that loses nothing: 2 MiB, less than the longest packets have room for.
const MOST_TURNS_OF_WRITE: u32 = 528;

/// What becomes of a WQE that would begin.
pub(super) enum Begin {
    /// Not now
    Wait,
    /// It begins, or begins to fail
    Go(WqeProgress),
}

impl Begin {
    /// It fails before anything was done for it.
    pub(super) fn failed(class: OrderClass, status: WcStatus) -> Self {
        Begin::Go(WqeProgress { class, status, all: true, ..WqeProgress::default() })
    }
}

/// Waiting time of an RNR NAK timer code, nanoseconds.
pub(super) fn rnr_time(code: u8) -> Nanos {
    Nanos::from(RNR_TIMER_10US[usize::from(code & 31)]) * 10_000
}

impl<E: StarEnv> Stateful<E> {
    /// Begins WQE `next` of our own queue.
    pub(super) fn begin_local(&mut self, card: &mut CardCtx<'_, E>) -> Begin {
        let next = self.streams[0].next;
        let wqe = self.local.sq.wqe(next);
        let class = OrderClass::of(wqe.op);
        if let Err(status) = self.admit(&wqe) {
            return Begin::failed(class, status);
        }
        if self.must_wait(Of::Local, &wqe, self.local.max_rd_atomic) {
            return Begin::Wait;
        }
        if wqe.op.brings_data() && !self.writable(card, next, wqe.length) {
            return Begin::failed(class, WcStatus::LocProtErr);
        }
        match class {
            OrderClass::Send => self.begin_send(card, &wqe),
            OrderClass::Write => self.begin_write(card, &wqe),
            OrderClass::Read => self.begin_read(card, &wqe, Access::REMOTE_READ),
            OrderClass::Atomic => self.begin_read(card, &wqe, Access::REMOTE_ATOMIC),
            OrderClass::Rpc | OrderClass::Stream => Begin::failed(class, WcStatus::LocQpOpErr),
            OrderClass::Own => self.do_own(card, &wqe),
        }
    }

    /// Checks that need nothing but the WQE.
    fn admit(&self, wqe: &SendWqe) -> Result<(), WcStatus> {
        if self.ended != super::Ended::Not {
            return Err(WcStatus::RetryExcErr);
        }
        if wqe.op.is_answered() && self.local.max_rd_atomic == 0 {
            return Err(WcStatus::LocQpOpErr);
        }
        match wqe.op {
            /* their words are SL's to keep, in a form that a gather list cannot give */
            SendOp::AtomicWrite | SendOp::Flush | SendOp::Malformed => Err(WcStatus::LocQpOpErr),
            SendOp::Rpc | SendOp::RpcWrite => Err(WcStatus::LocQpOpErr),
            _ if wqe.length > self.max_msg() || wqe.op.is_atomic() && wqe.length != 8 => {
                Err(WcStatus::LocLenErr)
            }
            _ => Ok(()),
        }
    }

    /// Fences, and READs and atomics beyond what may be outstanding.
    fn must_wait(&self, of: Of, wqe: &SendWqe, limit: u8) -> bool {
        let answered = self.streams[of as usize].answered();
        wqe.flags.contains(SendFlags::FENCE) && answered > 0
            || wqe.op.is_answered() && answered >= u32::from(limit.max(1))
    }

    fn writable(&self, card: &CardCtx<'_, E>, index: u32, len: u32) -> bool {
        let (mrs, pd, sges) = (&card.mrs, self.local.pd, self.local.sq.sges(index));
        slices(sges, 0, len, |sge, _, n| mrs.resolve_local(sge.lkey, pd, sge.addr, n, true).ok().map(|_| ()))
            .is_some()
    }

    /// Whether a rule lets us reach all of SL's SGEs.
    fn reaches(&self, card: &CardCtx<'_, E>, sges: &[Sge], need: Access) -> bool {
        let found = |sge: &Sge| card.registry.find(self.conn, sge.lkey, sge.addr, sge.len, need).is_some();
        sges.iter().all(|sge| sge.len == 0 || found(sge))
    }

    /// The next receive WQE of SL. `None`: there is none; the WQE fails once it has waited as long as it may.
    fn match_recv(&mut self, card: &CardCtx<'_, E>, class: OrderClass) -> Result<Psn, Begin> {
        let seq = self.next_recv;
        if self.recvs.get(seq).is_some() {
            self.streams[0].got_recv();
            return Ok(seq);
        }
        let retries = self.local.rnr_retry;
        let patience = rnr_time(self.terms.min_rnr_timer) * (Nanos::from(retries) + 1);
        if self.lacks_recv(card, Of::Local, retries, patience.max(WQEP_LIFETIME)) {
            card.stats.rnr_retry_exceeded.inc();
            return Err(Begin::failed(class, WcStatus::RnrRetryExcErr));
        }
        Err(Begin::Wait)
    }

    /// No receive WQE is there. Gives whether that has been so for too long.
    fn lacks_recv(&mut self, card: &CardCtx<'_, E>, of: Of, retries: u8, patience: Nanos) -> bool {
        let now = card.now.max(1);
        let since = self.stream(of).lack_recv(now);
        if since.is_none() {
            self.arm(now + KEEPALIVE);
        }
        let until = since.unwrap_or(now) + patience;
        if retries == 7 {
            return false;
        }
        if now < until {
            self.arm(until);
        }
        now >= until
    }

    fn begin_send(&mut self, card: &mut CardCtx<'_, E>, wqe: &SendWqe) -> Begin {
        let seq = match self.match_recv(card, OrderClass::Send) {
            Ok(seq) => seq,
            Err(begin) => return begin,
        };
        /* the SL host would find it too late: the message would be complete, and those behind it executed */
        let strange = wqe.op == SendOp::SendInv && !card.registry.is_window(self.conn, wqe.imm);
        if strange && self.inquires(card) {
            return Begin::Wait;
        }
        let (sges, stream) = (self.recv_sges(seq), &self.streams[0]);
        /* where its data goes, if that is one place: then no packet looks for it again */
        let place = match sges {
            [Sge { addr, len, lkey }] if wqe.length > 0 => {
                card.registry.find(self.conn, *lkey, *addr, *len, Access::LOCAL_WRITE)
            }
            _ => None,
        };
        let room = match sges {
            /* of most receives: no loop */
            [one] => u64::from(one.len),
            all => all.iter().map(|sge| u64::from(sge.len)).sum(),
        };
        let status = if u64::from(wqe.length) > room {
            WcStatus::RemInvReqErr
        } else if wqe.length > 0 && place.is_none() && !self.reaches(card, sges, Access::LOCAL_WRITE) {
            WcStatus::RemOpErr
        } else if strange {
            WcStatus::RemAccessErr
        } else {
            WcStatus::Success
        };
        if stream.changes() {
            let host = |sge: &Sge| {
                card.registry
                    .find(self.conn, sge.lkey, sge.addr, sge.len, Access::LOCAL_WRITE)
                    .map(|found| found.addr)
            };
            let busy = |sge: &Sge| host(sge).is_some_and(|addr| stream.writes_to(addr, sge.len));
            if sges.iter().any(|sge| sge.len > 0 && busy(sge)) {
                return Begin::Wait;
            }
        }
        let whole = sges.first().is_some_and(|sge| sge.len >= wqe.length);
        let failed = status != WcStatus::Success;
        let turns = self.turns_of_send(card, wqe).filter(|_| whole && !failed);
        let carries = turns.is_some() || self.may_carry(Of::Local, wqe);
        let quiet = turns.is_some() && !card.path.rtt.is_lossy();
        self.next_recv = seq.plus(1);
        if matches!(status, WcStatus::RemOpErr | WcStatus::RemAccessErr) {
            card.stats.star_rejects.inc();
        }
        let number = self.writes;
        self.writes = number.wrapping_add(turns.unwrap_or(0));
        let FoundRule { rule, addr: base } = place.unwrap_or_default();
        Begin::Go(WqeProgress {
            class: OrderClass::Send,
            rule,
            base,
            in_turn: turns.is_some(),
            quiet,
            number,
            carries: carries && !failed,
            recv: Some(seq.get()),
            status,
            all: failed || wqe.length == 0,
            length: wqe.length,
            ..WqeProgress::default()
        })
    }

    /// Packets of a SEND that SL's card is to do in their turn: one of several packets if nothing else is
    /// under way, so that none waits for the answer to another, and if the path takes it as a whole, as the
    /// last one's answer alone makes room. `None`: it goes by itself. Behind WRITEs it does: SL's program,
    /// which has its completion, may take the memory of one away whose answer was lost.
    fn turns_of_send(&self, card: &CardCtx<'_, E>, wqe: &SendWqe) -> Option<u32> {
        let turns = self.turns(wqe.length, true);
        let wanted = self.local.form == Form::Packed
            && self.streams[0].is_idle()
            && (2..=MOST_TURNS).contains(&turns)
            && card.path.takes(wqe.length + turns * PACKET_OVERHEAD);
        wanted.then_some(turns)
    }

    fn begin_write(&mut self, card: &mut CardCtx<'_, E>, wqe: &SendWqe) -> Begin {
        let mut op = WqeProgress {
            class: OrderClass::Write,
            length: wqe.length,
            all: wqe.length == 0,
            ..WqeProgress::default()
        };
        let allowed = self.terms.access().contains(Access::REMOTE_WRITE);
        let answers = wqe.flags.contains(SendFlags::CARD);
        if wqe.length > 0 {
            let need = Access::REMOTE_WRITE;
            let found = card.registry.find(self.conn, wqe.rkey, wqe.remote_addr, wqe.length, need);
            let Some(FoundRule { rule, addr: base }) = found.filter(|_| allowed) else {
                return self.refuse(card, OrderClass::Write);
            };
            op.relaxed = !answers && card.registry.rights(rule).contains(Access::RELAXED_ORDERING);
            (op.rule, op.base) = (rule, base);
        } else if !allowed {
            return self.refuse(card, OrderClass::Write);
        }
        /* a relaxed one, too, if others are to the same place and would wait for it; else none waits for what
         * is lost */
        let (stream, lossy) = (&self.streams[0], card.path.rtt.is_lossy());
        let in_turn = stream.takes_turn() && (!op.relaxed || !lossy || self.overlaps);
        let turns = self.turns_of(op.length, lossy, answers).filter(|_| in_turn);
        let waits = match turns {
            Some(_) => false,
            None if op.relaxed => stream.is_in_the_way(op.base, op.length),
            None => stream.under_way() > 0,
        };
        if waits {
            self.overlaps |= op.relaxed;
            return Begin::Wait;
        }
        self.overlaps &= lossy;
        if wqe.op.takes_recv() {
            match self.match_recv(card, OrderClass::Write) {
                Ok(seq) => op.recv = Some(seq.get()),
                Err(begin) => return begin,
            }
            /* what has turns is not overtaken by what has none */
            op.carries = (turns.is_none() || self.streams[0].is_idle()) && self.may_carry(Of::Local, wqe);
            self.next_recv = self.next_recv.plus(1);
        }
        if let Some(turns) = turns.filter(|_| !op.carries) {
            (op.in_turn, op.number) = (true, self.writes);
            self.writes = self.writes.wrapping_add(turns);
        }
        Begin::Go(op)
    }

    /// Packets of a WRITE that SL's card is to do in their turn. `None`: it goes by itself. A long one does
    /// on a path that loses packets if SL's card has no room for what is early: whatever of it is lost, the
    /// rest need not be sent again. Not so an answer of a kernel: SL's program, which looks for it in memory,
    /// may use that again before a late copy comes.
    fn turns_of(&self, len: u32, lossy: bool, answers: bool) -> Option<u32> {
        let packets = self.turns(len, false);
        let most = match lossy {
            _ if answers => u32::MAX,
            true if self.turns.limit().is_some() => MOST_TURNS_IF_LOST,
            _ => MOST_TURNS_OF_WRITE,
        };
        (self.local.form == Form::Packed && (1..=most).contains(&packets)).then_some(packets)
    }

    fn begin_read(&mut self, card: &mut CardCtx<'_, E>, wqe: &SendWqe, need: Access) -> Begin {
        let class = OrderClass::of(wqe.op);
        let stream = &self.streams[0];
        let atomic = class == OrderClass::Atomic;
        /* SL's card does atomics in their order, and a slot is used anew once its answer is here */
        let waits = if atomic {
            !stream.takes_atomic() || stream.atomics() >= self.terms.replay_slots()
        } else {
            stream.changes()
        };
        if waits {
            return Begin::Wait;
        }
        if atomic && wqe.remote_addr & 7 != 0 {
            /* before its key is looked at, as RC's responder does */
            return Begin::failed(class, WcStatus::RemInvReqErr);
        }
        let mut op =
            WqeProgress { class, length: wqe.length, all: wqe.length == 0, ..WqeProgress::default() };
        let allowed = self.terms.access().contains(need);
        if wqe.length > 0 {
            let found = card.registry.find(self.conn, wqe.rkey, wqe.remote_addr, wqe.length, need);
            let Some(FoundRule { rule, addr: base }) = found.filter(|_| allowed) else {
                return self.refuse(card, class);
            };
            (op.rule, op.base) = (rule, base);
        } else if !allowed {
            return self.refuse(card, class);
        }
        if atomic && (wqe.remote_addr | op.base) & 7 != 0 {
            return Begin::failed(class, WcStatus::RemInvReqErr);
        }
        if atomic {
            op.number = self.atomics;
            self.atomics = self.atomics.wrapping_add(1);
        }
        Begin::Go(op)
    }

    /// What our card does by itself (IBTA 10.6.7.2), once all before it is done.
    fn do_own(&mut self, card: &mut CardCtx<'_, E>, wqe: &SendWqe) -> Begin {
        if self.streams[0].under_way() > 0 {
            return Begin::Wait;
        }
        let owner = QpId { pd: self.local.pd, qpn: self.local.qpn };
        let done = if wqe.op == SendOp::BindMw {
            let bound = card.mrs.bind(&WindowBind::of(wqe, owner));
            self.windows |= bound == Ok(WindowType::Two);
            bound.is_ok()
        } else {
            card.mrs.invalidate(wqe.rkey, owner).is_ok()
        };
        let status = if done { WcStatus::Success } else { WcStatus::MwBindErr };
        Begin::Go(WqeProgress { class: OrderClass::Own, status, all: true, ..WqeProgress::default() })
    }

    /// Begins WQE `next` of SL's send queue.
    pub(super) fn begin_remote(&mut self, card: &mut CardCtx<'_, E>) -> Begin {
        let index = self.streams[1].next;
        let seq = Psn::new(index);
        let Some(mut wqe) = self.sends.get(seq).copied() else { return Begin::Wait };
        if self.is_at_rpc() {
            return Begin::Wait;
        }
        if self.is_for_program(card, &wqe) && card.rpc.speaks() {
            if let Some(status) = self.rpc_error(seq, &wqe) {
                return Begin::failed(OrderClass::Rpc, status);
            }
            wqe = self.sends.leave_to_program(seq).unwrap_or(wqe);
        }
        let class = OrderClass::of(wqe.op);
        if self.must_wait(Of::Remote, &wqe, self.terms.max_rd_atomic) {
            return Begin::Wait;
        }
        let into = if wqe.op.brings_data() { Access::LOCAL_WRITE } else { Access::empty() };
        let no_rpc = wqe.op.is_rpc() && !card.rpc.speaks();
        if no_rpc || matches!(wqe.op, SendOp::AtomicWrite | SendOp::Flush) {
            return Begin::failed(class, WcStatus::LocQpOpErr);
        }
        if wqe.length > self.max_msg() || class == OrderClass::Atomic && wqe.length != 8 {
            return Begin::failed(class, WcStatus::LocLenErr);
        }
        if !self.reaches(card, self.send_sges(seq), into) {
            card.stats.star_rejects.inc();
            return Begin::failed(class, WcStatus::LocProtErr);
        }
        match class {
            OrderClass::Send => self.begin_remote_send(card, index, &wqe),
            OrderClass::Write => self.begin_remote_write(card, index, &wqe),
            OrderClass::Rpc => self.begin_rpc(card, seq, &wqe),
            OrderClass::Stream => self.begin_stream(card, seq, &wqe),
            /* SL does it, once it knows that all before it is done */
            OrderClass::Own if self.streams[1].under_way() > 0 => Begin::Wait,
            OrderClass::Own => Begin::Go(WqeProgress { class, all: true, ..WqeProgress::default() }),
            _ => self.begin_remote_read(card, seq, &wqe),
        }
    }

    /// For a receive WQE that WQE `index` of SL takes. `Exhausted`: no memory, or more
    /// than it may have.
    fn make_room_for_recv(&mut self, card: &CardCtx<'_, E>, index: u32) -> Result<(), NicError> {
        let first = self.streams[1].una;
        let (count, most) = (index.wrapping_sub(first) + 1, self.streams[1].depth());
        let each = usize::from(self.local.max_recv_sge);
        let places = self.held.places_for(count, most);
        let lists = if each > 1 { self.rare.growth(|rare| rare.held.growth(places, each)) } else { 0 };
        if !self.may_grow(card, self.held.growth(count, most) + lists) {
            return Err(NicError::Exhausted);
        }
        self.held.make_room(first, count, most)?;
        if each > 1 { self.rare.make()?.held.make_room(first, places, each) } else { Ok(()) }
    }

    /// Takes a receive WQE of ours for WQE `index` of SL.
    fn take_recv(&mut self, card: &mut CardCtx<'_, E>, index: u32, class: OrderClass) -> Result<(), Begin> {
        if self.make_room_for_recv(card, index).is_err() {
            self.arm(card.now + KEEPALIVE);
            return Err(Begin::Wait);
        }
        let held = &mut self.held[index];
        let sges = match self.local.max_recv_sge {
            ..=1 => core::slice::from_mut(&mut held.sge),
            _ => self.rare.get_mut().map_or(&mut [][..], |rare| rare.held.of_mut(index)),
        };
        let taken = match &self.local.rq {
            Some(rq) => rq.take(sges).map(|TakenWqe { wr_id, num_sge }| TakenRecv {
                wr_id,
                num_sge,
                pd: self.local.pd,
            }),
            None => card.srqs.take(self.local.qpn, sges),
        };
        if let Some(TakenRecv { wr_id, num_sge, pd }) = taken {
            *held = RecvOfSl { wr_id, pd, num_sge: num_sge as u8, ..*held };
            self.streams[1].got_recv();
            return Ok(());
        }
        let step = rnr_time(self.local.min_rnr_timer);
        let retries = self.terms.rnr_retry;
        if self.lacks_recv(card, Of::Remote, retries, step * Nanos::from(retries)) {
            return Err(Begin::failed(class, WcStatus::RnrRetryExcErr));
        }
        /* posting a receive is no event here */
        self.arm(card.now + step);
        Err(Begin::Wait)
    }

    /// SGEs of the receive WQE that WQE `index` of SL has taken.
    pub(super) fn held_sges(&self, index: u32) -> &[Sge] {
        let held = &self.held[index];
        match self.local.max_recv_sge {
            ..=1 => core::slice::from_ref(&held.sge).get(..held.num_sge.into()).unwrap_or(&[]),
            _ => self.rare.get().map_or(&[], |rare| rare.held.of(index, held.num_sge.into())),
        }
    }

    fn begin_remote_send(&mut self, card: &mut CardCtx<'_, E>, index: u32, wqe: &SendWqe) -> Begin {
        if let Err(begin) = self.take_recv(card, index, OrderClass::Send) {
            return begin;
        }
        let room: u64 = self.held_sges(index).iter().map(|sge| u64::from(sge.len)).sum();
        let mut op = WqeProgress {
            class: OrderClass::Send,
            recv: Some(index),
            length: wqe.length,
            eager: wqe.flags.contains(SendFlags::EAGER),
            ..WqeProgress::default()
        };
        if u64::from(wqe.length) > room {
            op.status = WcStatus::RemInvReqErr;
        } else if wqe.flags.contains(SendFlags::INLINE)
            && self.place_recv(card, &op, 0, self.inline(Psn::new(index))).is_none()
        {
            op.status = WcStatus::RemOpErr;
        }
        op.all = wqe.length == 0 || wqe.flags.contains(SendFlags::INLINE) || op.status != WcStatus::Success;
        Begin::Go(op)
    }

    fn begin_remote_write(&mut self, card: &mut CardCtx<'_, E>, index: u32, wqe: &SendWqe) -> Begin {
        let allowed = self.local.access.contains(Access::REMOTE_WRITE);
        let owner = QpId { pd: self.local.pd, qpn: self.local.qpn };
        let need = Access::REMOTE_WRITE;
        if !allowed || card.mrs.resolve_remote(wqe.rkey, owner, wqe.remote_addr, wqe.length, need).is_err() {
            return Begin::failed(OrderClass::Write, WcStatus::RemAccessErr);
        }
        let inline = wqe.flags.contains(SendFlags::INLINE);
        if inline && self.settled() != index {
            return Begin::Wait;
        }
        if self.streams[1].held().is_some() {
            /* what waits to be placed behind a READ must not take the window that its last packet needs */
            return Begin::Wait;
        }
        let mut op = WqeProgress { class: OrderClass::Write, length: wqe.length, ..WqeProgress::default() };
        op.all = wqe.length == 0 || inline;
        if wqe.op.takes_recv() {
            if let Err(begin) = self.take_recv(card, index, OrderClass::Write) {
                return begin;
            }
            op.recv = Some(index);
        }
        if inline && self.place_write(card, wqe, 0, self.inline(Psn::new(index))).is_none() {
            op.status = WcStatus::RemAccessErr;
        }
        Begin::Go(op)
    }

    /// SL reads our memory, or does an atomic on it: that is done here, once.
    fn begin_remote_read(&mut self, card: &mut CardCtx<'_, E>, seq: Psn, wqe: &SendWqe) -> Begin {
        let class = OrderClass::of(wqe.op);
        let atomic = class == OrderClass::Atomic;
        let stream = &self.streams[1];
        let waits = if atomic { !stream.takes_atomic() } else { stream.changes() };
        if waits {
            return Begin::Wait;
        }
        if atomic && wqe.remote_addr & 7 != 0 {
            return Begin::failed(class, WcStatus::RemInvReqErr);
        }
        let need = if atomic { Access::REMOTE_ATOMIC } else { Access::REMOTE_READ };
        let owner = QpId { pd: self.local.pd, qpn: self.local.qpn };
        let found = card.mrs.resolve_remote(wqe.rkey, owner, wqe.remote_addr, wqe.length, need);
        let Some(host) = found.ok().filter(|_| self.local.access.contains(need)) else {
            return Begin::failed(class, WcStatus::RemAccessErr);
        };
        let mut op =
            WqeProgress { class, length: wqe.length, all: wqe.length == 0, ..WqeProgress::default() };
        if atomic {
            if (host | wqe.remote_addr) & 7 != 0 {
                return Begin::failed(class, WcStatus::RemInvReqErr);
            }
            let place = self.result_place(card, seq);
            let Some(carry) = self.streams[1].carry_to(place) else { return Begin::Wait };
            let value = match wqe.op {
                SendOp::CmpSwap => card.env.dma_compare_swap(host, wqe.compare_add, wqe.swap),
                _ => card.env.dma_fetch_add(host, wqe.compare_add),
            };
            let Some(value) = value else { return Begin::failed(class, WcStatus::RemAccessErr) };
            (op.value, op.carry, op.base) = (value, carry, place.unwrap_or(0));
            if carry == Carry::Owed {
                (op.all, op.left) = (true, 1);
            }
        } else {
            op.carries = wqe.flags.contains(SendFlags::SIGNALED) && self.may_carry(Of::Remote, wqe);
        }
        Begin::Go(op)
    }
}
