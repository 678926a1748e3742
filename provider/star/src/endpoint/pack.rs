//! WQEs of an [`SlQp`] leave: many in one packet, or as the paper has them, one in each.

use starverbs_core::env::{RecvQueue, SendQueue};
use starverbs_core::mr::MrTable;
use starverbs_core::{Nanos, Psn, Seg, SendFlags, SendOp, SendWqe, Sge};

use crate::env::StarEnv;
use crate::form::Form;
use crate::message::{
    INLINE_KEPT, MAX_SGE, SMALL_INLINE, SMALL_WQE, encode_inline, encode_recv, encode_send, inline_room,
};
use crate::packed::{PackedWqes, may_be_eager, recv_len};
use crate::stateless::{send_eager, send_wqep, send_wqeps};
use crate::wire::{Opt, Queue};

use super::{SlQp, SlState};

/// So few receives at SF that more leave as soon as they are posted.
const FEW_RECVS: u32 = 1;

/// What became of a WQE that was to be added to a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Added {
    /// It is there
    Done,
    /// It is there, and its data is to follow
    Eager,
    /// It has left in a packet of its own
    Alone,
    /// The packet has to leave first
    Full,
    /// It is none that StaR carries
    Never,
}

impl<E: StarEnv> SlQp<E> {
    /// Sends WQEs that are posted and not sent, as far as the port takes them and SF has answered the rules.
    pub(super) fn supply(&mut self, env: &mut E, now: Nanos, memory: &MrTable<E::Mrs>, alone: bool) {
        if self.state != SlState::Ready || self.quiescing || self.is_closed() {
            return;
        }
        if self.stuck && self.send.una == self.send.next {
            /* whether or not the port takes anything */
            return self.refuse(env, now);
        }
        match self.init.form {
            Form::Packed => self.supply_packed(env, now, memory, alone),
            Form::Paper => self.supply_paper(env, now),
        }
        let looks = self.looks_for_recvs() && self.recv.has_room() && self.may_take();
        self.owes_look = looks && !env.can_send_star();
    }

    fn supply_paper(&mut self, env: &mut E, now: Nanos) {
        while env.can_send_star() && self.take_recv() {
            self.send_recv(env, self.recv.next);
            self.note_recv(now);
        }
        while env.can_send_star() && self.may_send() {
            if !self.carries_next() || !self.send_send(env, self.send.next) {
                return self.refuse(env, now);
            }
            self.note_send(now);
        }
    }

    /// Receives first: the other end may need them for what the sends bring about.
    fn supply_packed(&mut self, env: &mut E, now: Nanos, memory: &MrTable<E::Mrs>, alone: bool) {
        let mut room = env.can_send_star();
        let sends = room && self.may_send();
        let mut found = room && self.looks_for_recvs() && (sends || !self.holds_recvs()) && self.take_recv();
        if !found && !sends {
            return;
        }
        let mut batch = self.new_batch();
        let mut eager = None;
        while found && room {
            self.add_recv(&mut batch, self.recv.next);
            self.note_recv(now);
            if batch.left() < recv_len(self.stride) {
                room = self.ship(env, &mut batch);
            }
            found = room && self.looks_for_recvs() && self.take_recv();
        }
        while room && self.may_send() {
            let carried = self.carries_next();
            let added = if carried {
                self.add_send(env, &mut batch, self.send.next, Some(memory), alone && eager.is_none())
            } else {
                Added::Never
            };
            match added {
                Added::Done => self.note_send(now),
                Added::Eager => {
                    eager = Some(self.send.next);
                    self.note_send(now);
                }
                Added::Alone => {
                    self.note_send(now);
                    room = env.can_send_star();
                }
                Added::Full => room = self.ship(env, &mut batch),
                Added::Never => {
                    self.ship(env, &mut batch);
                    return self.refuse(env, now);
                }
            }
        }
        self.ship(env, &mut batch);
        if let Some(seq) = eager {
            self.send_data(env, seq, memory);
        }
    }

    /// Sends WQEs of a queue again that SF has not stored: `most` from `low` on, and as many receives more as
    /// the last packet takes.
    pub(super) fn send_again(&mut self, env: &mut E, queue: Queue, low: u32, most: u32) {
        let waiting = self.track(queue).next.wrapping_sub(low);
        let (packed, len) = (self.init.form == Form::Packed && queue == Queue::Recv, recv_len(self.stride));
        let mut batch = self.new_batch();
        for n in 0..waiting {
            let seq = low.wrapping_add(n);
            if n >= most && (!packed || batch.left() < len) {
                break;
            }
            if self.track(queue).is_stored(seq) || !env.can_send_star() {
                continue;
            }
            match (self.init.form, queue) {
                (Form::Packed, _) => self.add_again(env, &mut batch, (queue, seq)),
                (Form::Paper, Queue::Send) => _ = self.send_send(env, seq),
                (Form::Paper, Queue::Recv) => self.send_recv(env, seq),
            }
            self.init.stats.star_wqep_again.inc();
        }
        self.ship(env, &mut batch);
    }

    fn add_again(&mut self, env: &mut E, batch: &mut PackedWqes, (queue, seq): (Queue, u32)) {
        match queue {
            Queue::Send => {
                if self.add_send(env, batch, seq, None, false) == Added::Full && self.ship(env, batch) {
                    self.add_send(env, batch, seq, None, false);
                }
            }
            Queue::Recv => {
                if !self.add_recv(batch, seq) && self.ship(env, batch) {
                    self.add_recv(batch, seq);
                }
            }
        }
    }

    /// Most inline bytes of a send that travel with it.
    fn inline_room(&self) -> usize {
        inline_room(self.init.setup.mtu.bytes(), self.init.setup.sq_depth)
    }

    fn new_batch(&self) -> PackedWqes {
        PackedWqes::new(self.init.setup.mtu.bytes() as usize)
    }

    /// What was collected leaves. Whether the port takes more.
    fn ship(&self, env: &mut E, batch: &mut PackedWqes) -> bool {
        send_wqeps(env, &self.peer, batch);
        batch.clear();
        env.can_send_star()
    }

    /// Whether a receive is there that may be sent now.
    pub(super) fn has_recv(&self) -> bool {
        self.recv.has_room() && self.may_take() && !self.init.rq.is_empty() && !self.holds_recvs()
    }

    /// Whether more receives may leave than SF has places for while so many answers to data are owed.
    pub(crate) fn may_outrun(&self, owed: u32) -> bool {
        let there = self.recv.next.wrapping_sub(self.recv.una).saturating_add(self.init.rq.len());
        owed > 0 && there.saturating_add(owed) > self.init.setup.rq_depth && self.has_recv()
    }

    /// Receives that SF has, or that are on their way there.
    fn recvs_there(&self) -> u32 {
        self.recv.next.wrapping_sub(self.recv.una)
    }

    /// Whether receives wait for more of them, or for a send to go with: SF has more than there are. Each
    /// that it uses is a reason to look again.
    fn holds_recvs(&self) -> bool {
        let (packed, there) = (self.init.form == Form::Packed && !self.init.setup.srq, self.recvs_there());
        packed && there > FEW_RECVS && self.init.rq.len() < there
    }

    /// Whether a receive is worth looking for: where none is found, the next post rings. While SF has more
    /// than a few, that it uses one is early enough to look at what was posted meanwhile.
    fn looks_for_recvs(&self) -> bool {
        self.init.setup.srq || self.recvs_there() <= FEW_RECVS || !self.init.rq.is_empty()
    }

    /// Whether the next send may be sent now.
    fn may_send(&self) -> bool {
        self.send.next != self.posted() && !self.behind_window_op() && self.send.has_room()
    }

    /// Whether StaR carries the next send of this end.
    fn carries_next(&self) -> bool {
        self.init.dialect || !self.init.sq.op(self.index(self.send.next)).is_rpc()
    }

    fn note_recv(&mut self, now: Nanos) {
        self.recv.sent(now);
        self.init.stats.star_wqep.inc();
    }

    fn note_send(&mut self, now: Nanos) {
        if self.send.una == self.send.next {
            self.quiet_since = now;
        }
        self.send.sent(now);
        self.init.stats.star_wqep.inc();
    }

    /// False: there is no room.
    fn add_recv(&self, batch: &mut PackedWqes, seq: u32) -> bool {
        batch.push_recv(Psn::new(seq), self.taken(seq).sges).is_some()
    }

    /// With `memory`, a send that is short takes its data along, as if it were inline: SF need not ask for
    /// it. `alone`: so does a longer one, behind it.
    fn add_send(
        &mut self,
        env: &mut E,
        batch: &mut PackedWqes,
        seq: u32,
        memory: Option<&MrTable<E::Mrs>>,
        alone: bool,
    ) -> Added {
        let (psn, index) = (Psn::new(seq), self.index(seq));
        let mut wqe = self.init.sq.wqe(index);
        if self.is_reported(seq) {
            wqe.flags |= SendFlags::SIGNALED;
        }
        if wqe.flags.contains(SendFlags::FENCE) && memory.is_some() {
            self.fenced = seq.wrapping_add(1);
        } else if !self.is_fenced() {
            self.fenced = self.send.una;
        }
        let inline = wqe.flags.contains(SendFlags::INLINE).then(|| self.init.sq.inline(index));
        let mut done = Added::Done;
        let added = match inline {
            Some(bytes) if bytes.len as usize <= SMALL_INLINE => {
                let mut there = true;
                let copy = |place: &mut [u8]| {
                    there = place.is_empty() || env.dma_copy(bytes.addr, place);
                    there
                };
                let added = batch.push_inline(psn, &wqe, bytes.len, copy);
                if !there {
                    /* as if it were lost on the wire */
                    return Added::Done;
                }
                added
            }
            Some(bytes) if bytes.len as usize <= self.inline_room() => {
                /* no record takes so many; they are not copied twice */
                if batch.is_empty() {
                    self.send_send(env, seq);
                    return Added::Alone;
                }
                None
            }
            Some(bytes) => {
                wqe.flags.remove(SendFlags::INLINE);
                let whole = Sge { addr: bytes.addr, len: bytes.len, lkey: self.init.inline_key };
                batch.push_send(psn, &wqe, &[whole])
            }
            None => {
                let (sges, count) = self.sges_of(index);
                let sges = &sges[..count];
                let added =
                    memory.and_then(|memory| self.add_with_data(env, batch, (psn, &wqe), sges, memory));
                added.unwrap_or_else(|| {
                    if alone && self.is_eager(seq, &wqe) {
                        wqe.flags |= SendFlags::EAGER;
                        done = Added::Eager;
                    }
                    batch.push_send(psn, &wqe, sges)
                })
            }
        };
        match added {
            Some(()) => done,
            None if batch.is_empty() => Added::Never,
            None => Added::Full,
        }
    }

    /// Whether a send with a fence is not done.
    fn is_fenced(&self) -> bool {
        self.fenced.wrapping_sub(self.send.una) as i32 > 0
    }

    /// Adds a send that is short with its data. `None`: it has none, or too much, or not before others are
    /// done, or not all of it is to be had here; SF finds out why.
    fn add_with_data(
        &self,
        env: &mut E,
        batch: &mut PackedWqes,
        (seq, wqe): (Psn, &SendWqe),
        sges: &[Sge],
        memory: &MrTable<E::Mrs>,
    ) -> Option<Option<()>> {
        use SendOp::{Rpc, RpcWrite, Send, SendImm, SendInv, Write, WriteImm};
        let gives = matches!(wqe.op, Send | SendImm | SendInv | Write | WriteImm | Rpc | RpcWrite);
        let most = SMALL_INLINE.min(INLINE_KEPT / self.init.setup.sq_depth.max(1) as usize);
        if !gives || self.is_fenced() || wqe.length == 0 || wqe.length as usize > most || sges.len() > MAX_SGE
        {
            return None;
        }
        let (pd, mut there) = (self.init.setup.pd, true);
        let gather = |mut place: &mut [u8]| {
            let mut copy = |sge: &Sge| {
                let addr = memory.resolve_local(sge.lkey, pd, sge.addr, sge.len, false).ok()?;
                let piece = place.split_off_mut(..sge.len as usize)?;
                (piece.is_empty() || env.dma_copy(addr, piece)).then_some(())
            };
            there = sges.iter().try_for_each(&mut copy).is_some();
            there
        };
        let with_data = SendWqe { flags: wqe.flags | SendFlags::INLINE, ..*wqe };
        let added = batch.push_inline(seq, &with_data, wqe.length, gather);
        there.then_some(added)
    }

    /// Whether the data of a send that leaves as the last of what is posted follows it: there is not much,
    /// and SF has all before it, so that one message is under way in this manner at a time.
    fn is_eager(&self, seq: u32, wqe: &SendWqe) -> bool {
        let last = seq.wrapping_add(1) == self.posted();
        last && may_be_eager(wqe) && self.send.unanswered() == 0 && !self.is_fenced()
    }

    /// The data of a send follows it, as SF would ask for it. What finds no room is lost, as on the wire.
    fn send_data(&self, env: &mut E, seq: u32, memory: &MrTable<E::Mrs>) {
        let ([sge, ..], _) = self.sges_of(self.index(seq));
        let Ok(addr) = memory.resolve_local(sge.lkey, self.init.setup.pd, sge.addr, sge.len, false) else {
            return;
        };
        let (each, mut offset) = (self.init.setup.mtu.bytes(), 0);
        while offset < sge.len && env.can_send_star() {
            let (len, at) = (each.min(sge.len - offset), u64::from(offset));
            send_eager(
                env,
                &self.peer,
                Psn::new(seq),
                sge.addr.wrapping_add(at),
                Seg { addr: addr + at, len },
            );
            offset += len;
        }
    }

    /// SGEs of a send; one more than a packet takes: such a WQE is refused, not cut.
    fn sges_of(&self, index: u32) -> ([Sge; MAX_SGE + 1], usize) {
        let (mut sges, mut count) = ([Sge::default(); MAX_SGE + 1], 0);
        for (place, sge) in sges.iter_mut().zip(self.init.sq.sges(index)) {
            (*place, count) = (sge, count + 1);
        }
        (sges, count)
    }

    fn send_recv(&self, env: &mut E, seq: u32) {
        let mut room = [0; SMALL_WQE];
        if let Some(len) = encode_recv(self.taken(seq).sges, &mut room) {
            send_wqep(env, &self.peer, Opt::Recv, Psn::new(seq), room.get(..len).unwrap_or(&[]), None);
        }
    }

    /// False: the WQE is none that StaR carries.
    fn send_send(&self, env: &mut E, seq: u32) -> bool {
        let index = self.index(seq);
        let mut wqe = self.init.sq.wqe(index);
        if self.is_reported(seq) {
            wqe.flags |= SendFlags::SIGNALED;
        }
        let opt = Opt::of(wqe.op);
        let mut room = [0; SMALL_WQE];
        let inline = wqe.flags.contains(SendFlags::INLINE).then(|| self.init.sq.inline(index));
        let psn = Psn::new(seq);
        let (len, payload) = match inline {
            Some(bytes) if bytes.len as usize <= self.inline_room() => {
                (encode_inline(&wqe, bytes.len, &mut room), (bytes.len > 0).then_some(bytes))
            }
            Some(bytes) => {
                wqe.flags.remove(SendFlags::INLINE);
                let whole = Sge { addr: bytes.addr, len: bytes.len, lkey: self.init.inline_key };
                (encode_send(&wqe, &[whole], &[], &mut room), None)
            }
            None => {
                let (sges, count) = self.sges_of(index);
                (encode_send(&wqe, &sges[..count], &[], &mut room), None)
            }
        };
        let Some(len) = len else { return false };
        send_wqep(env, &self.peer, opt, psn, room.get(..len).unwrap_or(&[]), payload);
        true
    }
}
