//! What programs post to connected queue pairs, and what the model makes of it.

use starverbs_core::coalesce::Backlog;
use starverbs_core::wire::headers::Feth;
use starverbs_core::{Access, FlushLevel, Placement, Seg, SendFlags, SendOp, SendWqe, Sge};
use starverbs_sim::{READ, Recv, Rng, Send, WRITE, any_bytes, any_size, get, put};

use crate::conn::{Bad, Bound, Brings, Cause, Msg, RecvWr, Source, Wr, spoil};
use crate::plan::Transport;
use crate::strom::{Ask, OF_ANSWER};
use crate::world::{MAX_MSG, World};

/// What a request is to be, before it has memory.
pub(crate) struct Draft {
    pub(crate) wqe: SendWqe,
    pub(crate) data: Vec<u8>,
    brings: Option<Brings>,
    pub(crate) bad: Option<Bad>,
    /// The peer's window, not its region
    pub(crate) window: bool,
    off: usize,
    /// Bytes of what it works on
    room: usize,
    /// XRC: which of the peer's queues
    srq: usize,
    /// StRoM: what else it is for
    pub(crate) ask: Ask,
}

impl Draft {
    pub(crate) fn new(wqe: SendWqe) -> Self {
        let (data, ask) = (vec![], Ask::default());
        Draft { wqe, data, brings: None, bad: None, window: false, off: 0, room: 0, srq: 0, ask }
    }
}

/// Marks the cookies of receives.
pub(crate) const RECV: u64 = 1 << 63;

fn on_memory(op: SendOp) -> bool {
    matches!(op, SendOp::Write | SendOp::WriteImm) || op.is_answered()
}

impl World {
    /// Posts a list of requests, and mostly rings.
    pub(crate) fn post_list(&mut self, c: usize, e: usize, eager: bool) -> bool {
        let mut posted = false;
        if !eager && self.had_better_wait(c, e) {
            return false;
        }
        let most = if eager { 64 } else { self.rng.within(1, 6) };
        for _ in 0..most {
            let end = &self.conns[c].ends[e];
            if end.left == 0 || end.is_full() || end.cause == Some(Cause::Gone) {
                break;
            }
            self.post_one(c, e);
            posted = true;
        }
        posted | self.ring(c, e, eager)
    }

    /// Rings for what is posted, now or later.
    pub(crate) fn ring(&mut self, c: usize, e: usize, eager: bool) -> bool {
        let end = &mut self.conns[c].ends[e];
        if end.rung || end.cause == Some(Cause::Gone) || !(eager || self.rng.chance(0.6)) {
            return false;
        }
        end.rung = true;
        /* Where the card says that it will come by itself, the program may leave it at that. */
        let backlog = self.net.hosts[end.host].nic.backlog(end.qpn);
        if backlog != Backlog::AckClocked || self.rng.chance(0.5) {
            self.net.doorbell(end.host, end.qpn);
        }
        true
    }

    fn choose(&mut self, c: usize, e: usize) -> SendOp {
        let conn = &self.conns[c];
        let (me, peer) = (&conn.ends[e], &conn.ends[1 - e]);
        let fits = |op: SendOp| match op {
            SendOp::BindMw => me.window.as_ref().is_some_and(|w| w.bound == Bound::No),
            SendOp::LocalInv => {
                /* What a peer asked of the window and has no answer to may still come, be it gone or its
                 * requests flushed: they are on the wire, or wait here for a packet before them. */
                let unused = !peer.uses_window() && !peer.down();
                me.window.as_ref().is_some_and(|w| w.bound == Bound::Yes) && unused
            }
            SendOp::SendInv => peer.window.as_ref().is_some_and(|w| w.bound == Bound::Yes),
            /* the dialect has none */
            SendOp::Flush => conn.reliable() && conn.plan.strom.is_none(),
            op => conn.reliable() || !op.is_answered(),
        };
        for _ in 0..4 {
            let op = self.rng.pick(&conn.plan.kinds);
            if fits(op) {
                return op;
            }
        }
        SendOp::Write
    }

    fn post_one(&mut self, c: usize, e: usize) {
        let (op, mut draft) = match self.draft_rpc(c, e) {
            Some(draft) => (draft.wqe.op, draft),
            None => {
                let op = self.choose(c, e);
                (op, self.draft(c, e, op))
            }
        };
        let seq = self.conns[c].ends[e].next;
        let (wqe, bad) = (draft.wqe, draft.bad);
        let (pieces, send) = self.furnish(c, e, &draft);
        self.note(c, e, seq, &draft);
        if draft.bad.is_none() {
            self.note_rpc(c, e, seq, wqe.remote_addr, std::mem::take(&mut draft.ask));
        }
        let conn = &mut self.conns[c];
        let end = &mut conn.ends[e];
        end.sq.post(send).expect("there is room");
        end.sends.push_back(Wr {
            seq,
            op,
            len: draft.data.len() as u32,
            signaled: conn.plan.all_signaled || wqe.flags.contains(SendFlags::SIGNALED),
            fence: wqe.flags.contains(SendFlags::FENCE),
            bad,
            pieces,
            brings: draft.brings,
            window: draft.window || op == SendOp::SendInv,
            remote: wqe.remote_addr,
            of_card: false,
        });
        end.next += 1;
        end.left -= 1;
        end.rung = false;
        let fatal = bad.filter(|bad| conn.plan.kind != Transport::Uc || bad.is_local());
        end.doomed = end.doomed.or(fatal.map(|bad| (seq, bad)));
        self.summary.count(if bad.is_some() { "bad requests" } else { "requests" }, op);
        if let Some(bad) = bad {
            self.summary.count("faults of requests", bad);
        }
        self.say(|| format!("conn {c}.{e} posts {seq} {op:?} {wqe:?} bad {bad:?}"));
    }

    /// What the request asks for.
    fn draft(&mut self, c: usize, e: usize, op: SendOp) -> Draft {
        let forbidden = self.forbidden(c, e);
        let (rng, conn) = (&mut self.rng, &mut self.conns[c]);
        let seq = conn.ends[e].next;
        let mut wqe = SendWqe { wr_id: seq, op, imm: rng.bits() as u32, ..SendWqe::default() };
        wqe.flags.set(SendFlags::SIGNALED, rng.chance(conn.plan.signaled));
        wqe.flags.set(SendFlags::FENCE, rng.chance(0.1));
        wqe.flags.set(SendFlags::SOLICITED, rng.chance(0.2));
        if conn.plan.strom.is_some() {
            wqe.imm &= !OF_ANSWER;
        }
        let mut d = Draft::new(wqe);
        let peer = &conn.ends[1 - e];
        if conn.plan.kind == Transport::Xrc {
            let site = &self.sites[peer.host];
            d.srq = rng.below(2) as usize;
            d.wqe.remote_qpn = site.xrc[d.srq].id.0;
        }
        let mut len = any_size(rng, conn.plan.setup.mtu.bytes());
        if on_memory(op) {
            if let Some(w) = peer.window.as_ref().filter(|w| w.bound == Bound::Yes && rng.chance(0.5)) {
                d.window = true;
                d.wqe.rkey = w.key;
            }
            let arena =
                if d.window { &peer.window.as_ref().expect("it is bound").arena } else { &peer.arena };
            let room = arena.len();
            d.room = room;
            len = match op {
                SendOp::CmpSwap | SendOp::FetchAdd | SendOp::AtomicWrite => 8,
                _ if rng.chance(conn.plan.long) => room as u32,
                _ => len.min(room as u32),
            };
            d.off = rng.below((room - len as usize) as u64 + 1) as usize;
            if len == 8 && op != SendOp::Read && !matches!(op, SendOp::Write | SendOp::WriteImm) {
                d.off &= !7;
            }
            d.wqe.remote_addr = arena.addr + d.off as u64;
            if !d.window {
                d.wqe.rkey = arena.key;
            }
            draft_memory(rng, arena, &mut d, len);
        } else if !op.is_local() {
            len = if rng.chance(conn.plan.long) { self.plan.room } else { len.min(self.plan.room) };
            d.data = any_bytes(rng, len);
            if op == SendOp::SendInv {
                d.wqe.imm = peer.window.as_ref().map_or(0, |w| w.key);
                /* a READ is done when its data has come: without a fence the window may be gone before */
                let reads = conn.ends[e].sends.iter().any(|wr| wr.window && wr.op == SendOp::Read);
                d.wqe.flags.set(SendFlags::FENCE, reads || d.wqe.flags.contains(SendFlags::FENCE));
            }
        } else {
            draft_local(conn.ends[e].window.as_ref().expect("it has a window"), &mut d);
        }
        if conn.plan.bad > 0.0 && rng.chance(conn.plan.bad) {
            let room = self.plan.room;
            spoil_request(rng, conn.plan.kind, room, &mut d, &forbidden);
        }
        d
    }

    /// Gives a draft its memory. The buffers are the card's until the request completes.
    fn furnish(&mut self, c: usize, e: usize, d: &Draft) -> (Vec<Sge>, Send) {
        let at = self.conns[c].ends[e].host;
        let (host, pool, rng) = (&mut self.net.hosts[at], &mut self.sites[at].pool, &mut self.rng);
        let len = d.data.len() as u32;
        if d.wqe.op.is_local() || d.wqe.op == SendOp::Flush {
            return (vec![], Send { wqe: d.wqe, sges: vec![], inline: None });
        }
        if d.bad == Some(Bad::TooLong) {
            let piece = pool.take(host, 64, READ | WRITE);
            let sges = vec![Sge { len: MAX_MSG + 1, ..piece }];
            return (vec![piece], Send { wqe: d.wqe, sges, inline: None });
        }
        let rights = if d.wqe.op.brings_data() { WRITE } else { READ };
        if !d.wqe.op.brings_data() && len <= 256 && d.bad != Some(Bad::Lkey) && rng.chance(0.2) {
            let place = pool.take(host, len, READ);
            host.env.memory.write(place.addr, &d.data);
            return (
                vec![place],
                Send { wqe: d.wqe, sges: vec![], inline: Some(Seg { addr: place.addr, len }) },
            );
        }
        let pieces = pool.scatter(host, rng, len, 4, rights);
        if rights == READ {
            put(host, &pieces, &d.data);
        }
        let mut sges = pieces.clone();
        if d.bad == Some(Bad::Lkey) {
            spoil(&mut sges);
        }
        (pieces, Send { wqe: d.wqe, sges, inline: None })
    }

    /// The model does what the request asks for.
    fn note(&mut self, c: usize, e: usize, seq: u64, d: &Draft) {
        let conn = &mut self.conns[c];
        let [low, high] = &mut conn.ends;
        let (me, peer) = if e == 0 { (low, high) } else { (high, low) };
        let (op, reliable) = (d.wqe.op, conn.plan.kind != Transport::Uc);
        if me.down() {
            return;
        }
        if me.doomed.is_some() {
            /* Behind one that fails nothing happens, but for what the card does by itself. */
            if op.is_local() {
                self.note_window(c, e, seq, d);
            }
            return;
        }
        let off = d.off;
        let arena = match &mut peer.window {
            Some(w) if d.window => &mut w.arena,
            _ => &mut peer.arena,
        };
        if d.bad.is_none() {
            if !op.brings_data() && on_memory(op) {
                arena.write(seq, off, &d.data);
            }
            if let Some(Brings { want, .. }) = d.brings.as_ref().filter(|_| op.is_atomic()) {
                let before = u64::from_ne_bytes(want[..8].try_into().expect("eight bytes"));
                let after = after_atomic(&d.wqe, before);
                arena.write(seq, off, &after.to_ne_bytes());
            }
        }
        let arrives = d.bad.is_none() || (d.bad == Some(Bad::Oversize) && reliable);
        if op.takes_recv() && arrives {
            let msg = Msg {
                seq,
                op,
                data: d.data.clone(),
                len: d.data.len() as u32,
                imm: d.wqe.imm,
                solicited: d.wqe.flags.contains(SendFlags::SOLICITED),
                srq: d.srq,
                bad: d.bad,
                came: 0,
                off,
            };
            if reliable { peer.inbox.push_back(msg) } else { peer.mail.push(msg) }
        }
        self.note_window(c, e, seq, d);
    }

    fn note_window(&mut self, c: usize, e: usize, seq: u64, d: &Draft) {
        if d.bad.is_some() {
            return;
        }
        let conn = &mut self.conns[c];
        match d.wqe.op {
            SendOp::BindMw => {
                let host = &mut self.net.hosts[conn.ends[e].host];
                let w = conn.ends[e].window.as_mut().expect("it has one");
                (w.bound, w.key) = (Bound::Binding(seq), d.wqe.rkey);
                host.env.memory.allow(w.arena.addr, w.arena.len() as u64, READ | WRITE);
            }
            SendOp::LocalInv => conn.ends[e].window.as_mut().expect("it has one").bound = Bound::Closing(seq),
            SendOp::SendInv => {
                conn.ends[1 - e].window.as_mut().expect("it has one").bound = Bound::Leaving;
            }
            _ => {}
        }
    }

    /// Posts receives, as there is room.
    pub(crate) fn feed(&mut self, c: usize, e: usize, eager: bool) -> bool {
        let mut any = false;
        loop {
            let conn = &self.conns[c];
            let end = &conn.ends[e];
            let Source::Own(rq) = &end.source else { return any };
            if rq.is_full() || conn.over || end.cause == Some(Cause::Gone) || !(eager || self.rng.chance(0.5))
            {
                return any;
            }
            if end.down() && (eager || any) {
                /* the card flushes whatever comes */
                return any;
            }
            let (rq, at, bad, id) = (rq.clone(), end.host, conn.plan.bad_recv, end.next_recv);
            let (recv, wr) = self.make_recv(at, id, bad);
            rq.post(recv).expect("there is room");
            let end = &mut self.conns[c].ends[e];
            end.next_recv += 1;
            end.bad_recv |= wr.bad;
            end.recvs.push_back(wr);
            any = true;
            if rq.was_starved() {
                self.net.doorbell(at, self.conns[c].ends[e].qpn);
            }
        }
    }

    /// A receive with the room that all have.
    pub(crate) fn make_recv(&mut self, at: usize, id: u64, bad: f64) -> (Recv, RecvWr) {
        let (host, pool, rng) = (&mut self.net.hosts[at], &mut self.sites[at].pool, &mut self.rng);
        let pieces = pool.scatter(host, rng, self.plan.room, 4, WRITE);
        let mut sges = pieces.clone();
        let bad = bad > 0.0 && rng.chance(bad) && spoil(&mut sges);
        self.summary.count("receives", if bad { "bad" } else { "good" });
        let id = id | RECV;
        (Recv { wr_id: id, sges }, RecvWr { id, pieces, bad })
    }

    /// What a READ or an atomic brought must be what the model says.
    pub(crate) fn check_brought(&self, c: usize, e: usize, wr: &Wr) {
        let Some(brings) = &wr.brings else { return };
        let conn = &self.conns[c];
        let (me, peer) = (&conn.ends[e], &conn.ends[1 - e]);
        let got = get(&self.net.hosts[me.host], &wr.pieces, wr.len as usize);
        let arena = match &peer.window {
            Some(w) if wr.window => &w.arena,
            _ => &peer.arena,
        };
        let until = me.sends.iter().find(|w| w.fence && w.seq > wr.seq).map_or(u64::MAX, |w| w.seq);
        let fits = if brings.exact {
            got == brings.want
        } else {
            arena.may_have_read(&brings.want, &got, brings.off, wr.seq, until)
        };
        assert!(fits, "conn {c}.{e}: {:?} {} of {} bytes brought what is not there", wr.op, wr.seq, wr.len);
    }
}

fn draft_memory(rng: &mut Rng, arena: &crate::arena::Arena, d: &mut Draft, len: u32) {
    let op = d.wqe.op;
    match op {
        SendOp::Read => {
            let want = arena.bytes(d.off, len as usize).to_vec();
            d.data = vec![0; len as usize];
            d.brings = Some(Brings { want, off: d.off, exact: false });
        }
        SendOp::CmpSwap | SendOp::FetchAdd => {
            let value = arena.word(d.off);
            d.wqe.compare_add = if rng.chance(0.7) { value } else { rng.bits() };
            d.wqe.swap = rng.bits();
            d.data = vec![0; 8];
            d.brings = Some(Brings { want: value.to_ne_bytes().to_vec(), off: d.off, exact: true });
        }
        SendOp::Flush => {
            let level = rng.pick(&[FlushLevel::Range, FlushLevel::Mr]);
            d.wqe.compare_add = u64::from(len);
            d.wqe.imm = Feth::word(Placement::GLOBAL, level);
        }
        _ => d.data = any_bytes(rng, len),
    }
}

/// What an atomic leaves behind.
fn after_atomic(wqe: &SendWqe, before: u64) -> u64 {
    match wqe.op {
        SendOp::FetchAdd => before.wrapping_add(wqe.compare_add),
        _ if before == wqe.compare_add => wqe.swap,
        _ => before,
    }
}

fn draft_local(w: &crate::conn::Window, d: &mut Draft) {
    if d.wqe.op == SendOp::LocalInv {
        d.wqe.rkey = w.key;
        return;
    }
    let access = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC | Access::FLUSH_GLOBAL;
    d.wqe.remote_addr = w.arena.addr;
    d.wqe.compare_add = w.arena.len() as u64;
    d.wqe.rkey = (w.key & !0xff) | (w.key.wrapping_add(1) & 0xff);
    d.wqe.imm = w.mr;
    d.wqe.remote_qpn = w.key;
    d.wqe.qkey = access.bits();
}

/// Makes a request one that must fail, if it can be one.
fn spoil_request(rng: &mut Rng, kind: Transport, room: u32, d: &mut Draft, forbidden: &[(Bad, u64, u32)]) {
    let op = d.wqe.op;
    let len = d.data.len() as u32;
    let mut can = Vec::new();
    if op == SendOp::BindMw {
        can.push(Bad::Bind);
    }
    if len > 0 {
        can.push(Bad::Lkey);
    }
    match op {
        SendOp::CmpSwap | SendOp::FetchAdd => can.extend([Bad::Rkey, Bad::Bounds, Bad::Unaligned, Bad::Size]),
        SendOp::AtomicWrite => can.extend([Bad::Rkey, Bad::Unaligned, Bad::Size]),
        SendOp::Write | SendOp::WriteImm | SendOp::Read if len > 0 => {
            can.extend([Bad::Rkey, Bad::Bounds, Bad::TooLong]);
        }
        SendOp::Flush => can.extend([Bad::Rkey, Bad::Rights]),
        SendOp::Send | SendOp::SendImm => can.extend([Bad::TooLong, Bad::Oversize]),
        SendOp::SendInv => can.push(Bad::Invalidate),
        _ => {}
    }
    if kind == Transport::Uc && matches!(op, SendOp::Write | SendOp::Send) {
        can.push(Bad::OpCode);
    }
    if matches!(op, SendOp::Write | SendOp::WriteImm | SendOp::Read) && len > 0 || op.is_atomic() {
        can.extend(forbidden.iter().map(|(bad, ..)| *bad));
    }
    if can.is_empty() {
        return;
    }
    let bad = rng.pick(&can);
    match bad {
        Bad::OpCode => {
            d.wqe.op = SendOp::FetchAdd;
            d.brings = None;
        }
        Bad::Bind => d.wqe.imm ^= 0x100,
        Bad::Size => d.data.push(0),
        Bad::Rkey => d.wqe.rkey ^= rng.pick(&[1, 0x100, 0x8000_0000]),
        Bad::Bounds if op.is_atomic() => d.wqe.remote_addr += (d.room - d.off) as u64,
        Bad::Bounds => {
            let last = (d.room - d.off - len as usize) as u64;
            d.wqe.remote_addr += last + 1 + rng.below(u64::from(len));
        }
        Bad::Rights => d.wqe.imm = Feth::word(Placement::PERSISTENT, FlushLevel::Mr),
        Bad::Unaligned => d.wqe.remote_addr += rng.within(1, 7),
        Bad::Oversize => d.data = any_bytes(rng, room + 1 + rng.clone().below(300) as u32),
        Bad::Invalidate => d.wqe.imm ^= 0x1,
        Bad::Foreign | Bad::Revoked | Bad::Others => {
            let named = forbidden.iter().find(|(what, ..)| *what == bad);
            let (_, addr, key) = named.expect("it was picked");
            (d.wqe.remote_addr, d.wqe.rkey) = (*addr, *key);
        }
        Bad::Lkey | Bad::TooLong | Bad::NoKernel | Bad::NoTarget => {}
    }
    d.bad = Some(bad);
}
