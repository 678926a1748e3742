//! The data path: doorbells, frames, timeouts in; frames out.

use super::mads::QPN_GSI;
use super::{Nic, PathId, QpShared};
use crate::coalesce::{Backlog, is_much, is_small};
use crate::engine::Engine;
use crate::env::Env;
use crate::transport::{Ctx, Qp, answer_probe, lacks_receives};
use crate::types::{AsyncEvent, FrameMeta, Nanos, QPN_MULTICAST, QpState, QpType, Qpn};
use crate::wire::{PKEY_DEFAULT, Packet, PacketKind, Transport, WireError};

impl<E: Env> Nic<E> {
    /// The program posted to the send queue of `qpn`, or to any queue of it while in ERR.
    pub fn handle_doorbell(&mut self, env: &mut E, qpn: Qpn, now: Nanos) {
        if self.is_qpc_limited() {
            return self.ring_qpc_limited(env, qpn, now);
        }
        if let Some(mut cx) = self.context(env, qpn, now) {
            cx.doorbell();
        }
    }

    /// What a queue pair has to send, and what is under way before it: whether its doorbell may wait.
    #[inline]
    pub fn backlog(&self, qpn: Qpn) -> Backlog {
        let Some(qp) = self.qps.get(qpn) else { return Backlog::Due };
        let unacked = qp.req.max_psn.since(qp.req.una_psn);
        Backlog::of(unacked, self.shared.paths.in_flight(qp.path), || Self::has_small_backlog(qp))
    }

    /// Where packets of a queue pair go, if it is connected.
    #[inline]
    pub fn path_of(&self, qpn: Qpn) -> Option<PathId> {
        self.qps.get(qpn).map(|qp| qp.path)
    }

    /// Whether so much is under way on a path that small messages wait: no queue pair is looked at.
    #[inline]
    pub fn has_much_in_flight(&self, path: PathId) -> bool {
        is_much(self.shared.paths.in_flight(path))
    }

    /// Whether all that a reliable queue pair has to send is a few messages, the last of them small.
    fn has_small_backlog(qp: &Qp<E>) -> bool {
        let next = match &qp.engine {
            Some(engine) => engine.next_send(),
            None if qp.flags.held => return false,
            None => qp.req.next,
        };
        qp.qp_type.is_reliable() && qp.state == QpState::Rts && is_small(&qp.sq, next)
    }

    /// A frame or doorbell of `qpn` waits behind others that are handled first: the first of two passes over
    /// a batch has the host fetch the contexts that the second one uses (csRNA's prefetch, 4.5, where the
    /// chip's memory is the CPU's cache).
    #[inline]
    pub fn expect(&self, env: &E, qpn: Qpn) {
        if let Some(qp) = self.qps.get(qpn) {
            env.prefetch(qp);
        }
    }

    /// As [`Nic::expect`], of a queue pair whose engine does the work: the engine is found in the context's
    /// first line.
    #[inline]
    pub fn expect_engine(&self, env: &E, qpn: Qpn) {
        if let Some(qp) = self.qps.get(qpn) {
            env.prefetch(&qp.engine);
        }
    }

    /// A doorbell of `qpn`, whose context was fetched, is handled soon: what lies behind the context.
    #[inline]
    pub fn expect_requests(&self, env: &E, qpn: Qpn) {
        if let Some(qp) = self.qps.get(qpn)
            && let Some(track) = qp.req.track.get(qp.req.slot(qp.req.next))
        {
            env.prefetch(track);
        }
    }

    /// A frame from the wire: from the BTH up to before the ICRC, which the port has checked.
    pub fn handle_frame(&mut self, env: &mut E, now: Nanos, meta: &FrameMeta, frame: &[u8]) {
        let stats = &self.shared.stats;
        stats.rx_packets.inc();
        if meta.traffic_class & 3 == 3 {
            stats.rx_ecn_marked.inc();
        }
        let packet = match Packet::parse(frame) {
            Ok(packet) => packet,
            Err(error) => match self.parse_dialect(frame) {
                Some(packet) => packet,
                None if error == WireError::Opcode => return stats.drop_opcode.inc(),
                None => return stats.drop_malformed.inc(),
            },
        };
        /* Full and limited members of one partition talk to each other: the top bit is free (IBTA 10.9.3). */
        if (packet.bth().pkey() ^ PKEY_DEFAULT) & 0x7fff != 0 {
            return stats.drop_pkey.inc();
        }
        let transport = packet.op().transport;
        if transport == Transport::Own {
            return self.own_frame(env, now, meta, &packet);
        }
        let dest = packet.bth().dest_qpn();
        let Some(qp) = self.qps.get_mut(dest) else {
            if dest == QPN_MULTICAST {
                return self.receive_multicast(env, now, meta, &packet);
            }
            if dest == QPN_GSI {
                return self.receive_mad(env, meta, &packet);
            }
            return stats.drop_no_qp.inc();
        };
        /* What goes to a group names no QP: it would reach one card of many, and that one might answer. */
        if meta.dst.is_multicast() {
            return stats.drop_multicast.inc();
        }
        if qp.qp_type != QpType::Ud && qp.attr.av.dgid != meta.src {
            /* It has no peer yet, rather than another one. */
            let connected = !matches!(qp.state, QpState::Reset | QpState::Init);
            return if connected { stats.drop_source.inc() } else { stats.drop_state.inc() };
        }
        if !transport.serves(qp.qp_type) {
            return if transport == Transport::Cnp { stats.rx_cnp.inc() } else { stats.drop_opcode.inc() };
        }
        if qp.flags.held && qp.engine.as_ref().is_some_and(|engine| !engine.is_quiesced()) {
            return stats.drop_state.inc();
        }
        let mut cx = Ctx { qp, sh: &mut self.shared, env, now };
        if cx.qp.flags.held {
            /* a new request comes of a peer that has settled; anything else is of before */
            let old = packet.bth().psn().since(cx.qp.resp.epsn) < 0;
            if old || !packet.op().kind.is_request() {
                return cx.sh.stats.drop_state.inc();
            }
            cx.resume();
        }
        cx.receive(meta, &packet);
    }

    /// Receive back-pressure: whether a UC or UD message took the last receive of its queue. The next one
    /// would be lost, while its program may be about to post: the host should leave frames in the socket for
    /// a moment. Of several queues this is the one that was starved last. When it has a receive again, frames
    /// go on, whatever the others have.
    #[inline]
    pub fn is_starved(&self) -> bool {
        self.shared.starved.is_some()
    }

    /// [`Nic::is_starved`], updated: false when a receive was posted, or the QP is gone or in a state in
    /// which it drops messages.
    pub fn still_starved(&mut self) -> bool {
        let qp = self.shared.starved.and_then(|qpn| self.qps.get(qpn));
        let takes = |state| matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        let out = qp.is_some_and(|qp| takes(qp.state) && lacks_receives(qp, &self.shared));
        if !out {
            self.shared.starved = None;
        }
        out
    }

    /// Whether there is a QP whose peers wait for acknowledges. Looks at all of them.
    pub fn has_reliable(&self) -> bool {
        let waits =
            |qp: &Qp<E>| qp.qp_type.is_reliable() && !matches!(qp.state, QpState::Reset | QpState::Init);
        self.qps.each().any(waits)
    }

    /// Frames come again, and are dropped if there is no receive for them.
    pub fn end_back_pressure(&mut self) {
        self.shared.starved = None;
    }

    /// Frames that only starverbs cards exchange.
    fn own_frame(&mut self, env: &mut E, now: Nanos, meta: &FrameMeta, packet: &Packet<'_>) {
        if meta.dst.is_multicast() {
            return self.shared.stats.drop_multicast.inc();
        }
        match packet.op().kind {
            PacketKind::Probe => return answer_probe(env, meta, packet),
            PacketKind::Sack => return self.handle_sack(env, now, meta, packet),
            PacketKind::Negotiate => return self.negotiate(env, meta, packet),
            PacketKind::Dialect => return self.handle_dialect(env, now, meta, packet),
            _ => {}
        }
        let Some(id) = self.shared.paths.lookup(meta.src) else {
            return self.shared.stats.drop_stale_response.inc();
        };
        let path = self.shared.paths.get(id);
        let bytes = path.pace.answered(packet.bth().psn().get());
        if bytes == 0 {
            return self.shared.stats.drop_stale_response.inc();
        }
        path.acked(bytes);
        self.shared.open_path(id);
        if let Some(mut cx) = self.context(env, packet.bth().dest_qpn(), now) {
            cx.ready();
        }
    }

    /// The peer of a QP negotiates what carries their connection: engines handle it.
    fn negotiate(&self, env: &mut E, meta: &FrameMeta, packet: &Packet<'_>) {
        if let Some(deth) = packet.deth() {
            let (from, to) = (deth.src_qp(), packet.bth().dest_qpn());
            E::Engine::negotiate(self, env, meta, from, to, packet.payload());
        }
    }

    /// An acknowledge between starverbs cards; it is for a QP as any other.
    fn handle_sack(&mut self, env: &mut E, now: Nanos, meta: &FrameMeta, packet: &Packet<'_>) {
        let Some(mut cx) = self.context(env, packet.bth().dest_qpn(), now) else {
            return self.shared.stats.drop_no_qp.inc();
        };
        match cx.qp.qp_type {
            QpType::Rc | QpType::XrcSend if cx.qp.attr.av.dgid == meta.src => cx.receive_sack(packet),
            QpType::Rc | QpType::XrcSend => cx.sh.stats.drop_source.inc(),
            _ => cx.sh.stats.drop_opcode.inc(),
        }
    }

    /// Time went on: runs the timers that are due.
    pub fn handle_timeout(&mut self, env: &mut E, now: Nanos) {
        while let Some(qpn) = self.shared.sched.pop_due(now) {
            match self.context(env, qpn, now) {
                Some(mut cx) => cx.timer_fired(),
                None if qpn == QPN_GSI => env.event(AsyncEvent::Mads),
                None => {}
            }
        }
    }

    /// When [`Nic::handle_timeout`] has something to do next.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.shared.sched.next_deadline()
    }

    /// Sends what may be sent until the port is full; gives whether more is left (flush the port and
    /// call again). Without `acks`, QPs that owe nothing but an ACK keep it for a later call, so
    /// that a program's own answer goes out first.
    pub fn poll_transmit(&mut self, env: &mut E, now: Nanos, acks: bool) -> bool {
        if self.is_qpc_limited() {
            if self.transmit_qpc_limited(env, now) {
                return true;
            }
        } else {
            while let Some(qpn) = self.shared.sched.pop_ready().or_else(|| self.wake_waiter()) {
                let Some(mut cx) = self.context(env, qpn, now) else { continue };
                let step = cx.transmit();
                if cx.end_turn(step) {
                    return true;
                }
            }
        }
        acks && !self.flush_acks(env, now)
    }

    /// The next QP that waited for its path's window and may send now.
    pub(super) fn wake_waiter(&mut self) -> Option<Qpn> {
        loop {
            let id = self.shared.sched.pop_open()?;
            let Some(qpn) = self.shared.paths.get(id).wake() else { continue };
            self.shared.open_path(id);
            if let Some(qp) = self.qps.get_mut(qpn) {
                qp.flags.window_wait = None;
                if qp.qp_type == QpType::Ud && qp.path != id {
                    /* One turn at a time, wherever its datagrams go. */
                    self.shared.paths.end_turn(qp.path, qpn);
                    qp.path = id;
                }
                /* Nobody is in the queue of those who are ready, so this one is not, either. */
                qp.flags.queued = true;
                return Some(qpn);
            }
        }
    }

    /// Sends the ACKs owed. False: the port is full.
    fn flush_acks(&mut self, env: &mut E, now: Nanos) -> bool {
        while let Some(qpn) = self.shared.sched.pop_ack() {
            let Some(mut cx) = self.context(env, qpn, now) else { continue };
            if !cx.flush_acks() {
                cx.sh.sched.push_ack_front(qpn);
                return false;
            }
            cx.qp.flags.ack_queued = false;
        }
        true
    }

    /// Whether ACKs are owed that `poll_transmit` without `acks` left.
    pub fn owes_acks(&self) -> bool {
        self.shared.sched.has_acks()
    }

    /// A step's context on one QP. In the place of its call: what a call gives back comes through memory, in
    /// pieces that a CPU does not forward to the wider loads behind it, which wait for all stores before.
    #[inline(always)]
    pub(super) fn context<'a>(&'a mut self, env: &'a mut E, qpn: Qpn, now: Nanos) -> Option<Ctx<'a, E>> {
        let qp: &'a mut Qp<E> = self.qps.get_mut(qpn)?;
        let sh: &'a mut QpShared<E> = &mut self.shared;
        Some(Ctx { qp, sh, env, now })
    }
}
