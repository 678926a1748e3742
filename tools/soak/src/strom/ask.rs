//! What programs post to queue pairs of the dialect, and what the model makes of it.

use starverbs_core::strom::{Code, RECORD_LEN, ReplyFlags, ReplyHead, ReplyTarget, TARGET_LEN};
use starverbs_core::{SendFlags, SendOp, SendWqe};
use starverbs_kernels::crc64::crc64;
use starverbs_sim::{SimHost, WRITE, any_bytes, any_size};
use starverbs_star::control::{Preference, Role};
use zerocopy::IntoBytes;

use super::journal::{TASK_LEN, Task, filling};
use super::streams::{self, HLL, SHUFFLE};
use super::{Answer, Asked, BLANK, Due, Immediate, JOURNAL, NOBODY, Progress, RpcEnd, Sight};
use crate::conn::{Bad, Bound};
use crate::post::Draft;
use crate::world::World;

/// Immediates of answers have this bit, those of programs have not, where both may come.
pub(crate) const OF_ANSWER: u32 = 1 << 31;
/// What the head of an answer of the journal has.
const HEAD: u32 = 16;

/// What the model is to do for a request that may be executed.
#[derive(Default)]
pub(crate) struct Ask {
    sight: Option<Sight>,
    asked: Option<Asked>,
    /// Where its kernel writes in the peer's region, or window, and what
    write: Option<(usize, Vec<u8>)>,
    /// It is the window
    window: bool,
    /// Its answer is to go where nobody may write
    bad_target: bool,
}

/// An RPC before it has a place for its answer.
struct Call {
    op: u64,
    params: Vec<u8>,
    want: Answer,
    sight: Option<Sight>,
    write: Option<(usize, Vec<u8>)>,
}

/// What of the dialect a connection carries from an end, as far as that is settled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Carried {
    /// It may yet become StaR's, or is in doubt
    Unknown,
    All,
    Nothing,
}

impl World {
    /// An end that wants no StaR, or knows that it has none, asks for all; one of StaR asks a stateful end,
    /// once both ends know what they are.
    fn carried(&self, c: usize, e: usize) -> Carried {
        let peer = self.conns[c].ends[1 - e].host;
        match [e, 1 - e].map(|end| self.role(c, end)) {
            _ if self.conns[c].plan.preferences == [Preference::Off; 2] || self.plan.star.is_none() => {
                Carried::All
            }
            /* a late copy of such an answer may come when its place is in use again (docs/strom.md) */
            [Some(Role::Stateless), Some(Role::Stateful)] if self.papers.contains(&peer) => Carried::Unknown,
            [Some(Role::Stateless), Some(Role::Stateful)] => Carried::All,
            [Some(Role::Stateful), Some(Role::Stateless)] => Carried::Nothing,
            _ if (0..2).all(|end| self.is_plain(c, end)) => Carried::All,
            _ => Carried::Unknown,
        }
    }

    /// Whether a program of the dialect had better wait until it is settled what its connection carries.
    pub(crate) fn had_better_wait(&self, c: usize, e: usize) -> bool {
        self.conns[c].plan.strom.is_some() && self.carried(c, e) == Carried::Unknown
    }

    /// A request of the dialect, if the next one of an end is to be that.
    pub(crate) fn draft_rpc(&mut self, c: usize, e: usize) -> Option<Draft> {
        let strom = self.conns[c].plan.strom.as_ref()?;
        if !strom.asks[e] || !self.rng.chance(strom.share) {
            return None;
        }
        let carried = self.carried(c, e);
        if carried == Carried::Unknown || carried == Carried::Nothing && !self.rng.chance(0.02) {
            return None;
        }
        let stream = self.rng.chance(0.4);
        let op = if stream { SendOp::RpcWrite } else { SendOp::Rpc };
        let (rng, conn) = (&mut self.rng, &self.conns[c]);
        let seq = conn.ends[e].next;
        let mut wqe = SendWqe { wr_id: seq, op, ..SendWqe::default() };
        wqe.flags.set(SendFlags::SIGNALED, rng.chance(conn.plan.signaled));
        wqe.flags.set(SendFlags::FENCE, rng.chance(0.1));
        let mut d = Draft::new(wqe);
        if stream {
            let len = any_size(rng, conn.plan.setup.mtu.bytes());
            let op =
                if conn.plan.has_streams() { rng.pick(&[JOURNAL, SHUFFLE, SHUFFLE, HLL]) } else { JOURNAL };
            d.data = match op {
                SHUFFLE => streams::values(rng, (c, e), seq, len),
                HLL => streams::items(rng, len),
                _ => any_bytes(rng, len),
            };
            d.wqe.remote_addr = op;
            d.ask = Ask { sight: Some(Sight::Stream(d.data.clone(), None)), ..Ask::default() };
        } else {
            self.draft_call(c, e, seq, &mut d);
        }
        let conn = &self.conns[c];
        let bad = conn.plan.bad;
        if carried == Carried::Nothing
            || conn.ends.iter().any(|end| end.rpc.as_ref().is_none_or(|rpc| rpc.own.is_none()))
        {
            d.bad = Some(Bad::OpCode);
        } else if bad > 0.0 && self.rng.chance(bad) {
            self.spoil_rpc(c, &mut d);
        }
        if d.bad.is_some() {
            let ask = std::mem::take(&mut d.ask);
            self.give_place(c, e, ask.asked.as_ref());
        }
        Some(d)
    }

    /// An RPC to one of the kernels, or to none.
    fn draft_call(&mut self, c: usize, e: usize, seq: u64, d: &mut Draft) {
        let call = match self.rng.below(10) {
            4.. if self.conns[c].plan.has_streams() && self.rng.chance(0.6) => self.draft_stream_call(c, e),
            0 => Call {
                op: NOBODY,
                params: any_bytes(&mut self.rng, 30),
                want: Answer::error(Code::NoKernel),
                sight: None,
                write: None,
            },
            1 | 2 => {
                let at = self.conns[c].ends[1 - e].host;
                let shelf = self.sites[at].kernels.as_ref().expect("it has kernels").shelf;
                let (op, params, want) = shelf.ask(&mut self.rng);
                Call { op, params, want, sight: None, write: None }
            }
            3 => {
                let params = any_bytes(&mut self.rng, TASK_LEN as u32 - 1);
                let want = Answer::error(Code::BadParam);
                Call {
                    op: JOURNAL,
                    sight: Some(Sight::Call(params.clone(), None)),
                    params,
                    want,
                    write: None,
                }
            }
            _ => self.draft_task(c, e, seq, d),
        };
        let (target, asked, bad_target) = self.draft_target(c, e, seq, &call);
        d.data = [ReplyHead::new(&target).as_bytes(), &call.params].concat();
        d.wqe.remote_addr = call.op;
        d.ask = Ask { sight: call.sight, asked, write: call.write, window: d.window, bad_target };
    }

    /// An RPC around streams.
    fn draft_stream_call(&mut self, c: usize, e: usize) -> Call {
        let (rng, conn) = (&mut self.rng, &self.conns[c]);
        let (peer, strom) = (conn.ends[1 - e].host, conn.plan.strom.as_ref().expect("it has a plan"));
        let most = conn.plan.setup.mtu.bytes() as usize - TARGET_LEN;
        let streams = self.sites[peer].streams().expect("it has a plan");
        let (op, params, want) = streams.ask(rng, most, strom.longest);
        Call { op, sight: Some(Sight::Call(params.clone(), None)), params, want, write: None }
    }

    /// An RPC to the journal, which works on the peer's region, or on its window.
    fn draft_task(&mut self, c: usize, e: usize, seq: u64, d: &mut Draft) -> Call {
        let (rng, conn) = (&mut self.rng, &self.conns[c]);
        let (peer, strom) = (&conn.ends[1 - e], conn.plan.strom.as_ref().expect("it has a plan"));
        let bound = peer.window.as_ref().filter(|w| strom.windows && w.bound == Bound::Yes);
        let window = bound.filter(|_| rng.chance(0.5));
        d.window = window.is_some();
        let (arena, key) = window.map_or((&peer.arena, peer.arena.key), |w| (&w.arena, w.key));
        let room = arena.len() as u64;
        let len = if rng.chance(0.1) { room } else { rng.below(room.min(9000) + 1) };
        let from = rng.below(room - len + 1);
        let most = (conn.plan.setup.mtu.bytes() as usize - TARGET_LEN - TASK_LEN).min(room as usize) as u64;
        let writes = if strom.writes && rng.chance(0.5) { rng.below(most + 1) } else { 0 };
        let to = rng.below(room - writes + 1);
        let more = rng.below(u64::from(strom.longest - HEAD) + 1) as u32;
        let mut task = Task {
            seq: seq.into(),
            from: (arena.addr + from).into(),
            to: (arena.addr + to).into(),
            rkey: key.into(),
            len: (len as u32).into(),
            piece: rng.pick(&[7u32, 64, 250, 4096]).into(),
            idle: rng.pick(&[0u32, 0, 0, 1, 600, 3000]).into(),
            more: more.into(),
        };
        let crc = crc64(0, arena.bytes(from as usize, len as usize));
        let head = [seq.to_le_bytes(), crc.to_le_bytes()].concat();
        let mut want = Answer::ok([head, filling(seq, more as usize)].concat());
        let mut data = any_bytes(rng, writes as u32);
        let mut sees = Some(crc);
        if len > 0 && rng.chance(0.05) {
            /* its first command is denied */
            let len = len.min(4096);
            match rng.below(2) {
                0 => task.rkey = (key ^ rng.pick(&[1, 0x100, 0x8000_0000])).into(),
                _ => task.from = (arena.addr + room - len + 1).into(),
            }
            (task.len, task.piece) = ((len as u32).into(), 4096.into());
            (want, sees) = (Answer::error(Code::Access), None);
            data.clear();
        }
        let write = (!data.is_empty()).then(|| (to as usize, data.clone()));
        let params = [task.as_bytes(), &data].concat();
        Call { op: JOURNAL, sight: Some(Sight::Call(params.clone(), sees)), params, want, write }
    }

    /// Where the answer of a call goes: into a place of the end's, nowhere, or where it must not.
    fn draft_target(
        &mut self,
        c: usize,
        e: usize,
        seq: u64,
        call: &Call,
    ) -> (ReplyTarget, Option<Asked>, bool) {
        let (rng, conn) = (&mut self.rng, &mut self.conns[c]);
        let (bad, peer) = (conn.plan.bad, conn.ends[1 - e].host);
        let end = &mut conn.ends[e];
        let rpc = end.rpc.as_mut().expect("it has a plan");
        /* answers stand behind their end's own requests: two ends that wait for room at each other would
         * do so for ever (what its card sends for a kernel leaves one slot); what a bad target's answer comes
         * to is not told */
        let strom = conn.plan.strom.as_ref().expect("it has a plan");
        let room = if strom.streams { 1 } else { strom.slots[1 - e].into() };
        let full = rpc.bad_target || rpc.asked.len() >= room;
        let many = strom.asks[1 - e] && full;
        if bad > 0.0 && !many && rng.chance(bad / 4.0) {
            let rkey = rpc.page.1 ^ 0x100;
            return (
                ReplyTarget { addr: rpc.page.0, rkey, len: RECORD_LEN as u32, ..ReplyTarget::default() },
                None,
                true,
            );
        }
        let Some(place) = (!many && !rng.chance(0.1)).then(|| rpc.free.pop()).flatten() else {
            return (ReplyTarget::default(), None, false);
        };
        let needs = call.want.len + RECORD_LEN as u32;
        let room = match rng.below(8) {
            0 => rng.within(RECORD_LEN as u64, needs.min(rpc.place).into()) as u32,
            1 => needs.min(rpc.place),
            _ => rng.within(needs.min(rpc.place).into(), rpc.place.into()) as u32,
        };
        let imm = rng.chance(0.3).then_some(OF_ANSWER | seq as u32 & !OF_ANSWER);
        let flags = if imm.is_some() { ReplyFlags::IMM } else { ReplyFlags::empty() };
        let (addr, rkey) = (rpc.addr(place), rpc.page.1);
        let memory = &mut self.net.hosts[end.host].env.memory;
        memory.write(addr, &vec![BLANK; room as usize]);
        memory.allow(addr, room.into(), WRITE);
        let outages = self.sites[peer].outages();
        let want = call.want.clone().within(room);
        let open = matches!(call.op, SHUFFLE | HLL);
        let progress = Progress::Posted;
        let asked = Asked { seq, op: call.op, place, room, want, open, imm, progress, outages };
        (ReplyTarget { addr, rkey, len: room, imm: imm.unwrap_or_default(), flags }, Some(asked), false)
    }

    /// Makes a request of the dialect one that must fail.
    fn spoil_rpc(&mut self, c: usize, d: &mut Draft) {
        let (rng, mtu) = (&mut self.rng, self.conns[c].plan.setup.mtu.bytes());
        let mut can = vec![Bad::TooLong];
        if !d.data.is_empty() {
            can.push(Bad::Lkey);
        }
        match d.wqe.op {
            SendOp::Rpc => can.extend([Bad::Size, Bad::NoTarget]),
            _ => can.push(Bad::NoKernel),
        }
        let bad = rng.pick(&can);
        match bad {
            Bad::Size => d.data.resize(mtu as usize + 1, 0),
            Bad::NoTarget if rng.chance(0.5) => d.data.truncate(TARGET_LEN - 1),
            /* a flag that there is not */
            Bad::NoTarget => d.data[TARGET_LEN - 1] |= 0x80,
            Bad::NoKernel => d.wqe.remote_addr = NOBODY,
            _ => {}
        }
        d.bad = Some(bad);
    }

    /// The place of an answer that will not come is free.
    fn give_place(&mut self, c: usize, e: usize, asked: Option<&Asked>) {
        let end = &mut self.conns[c].ends[e];
        if let (Some(rpc), Some(asked)) = (&mut end.rpc, asked) {
            rpc.give(&mut self.net.hosts[end.host], asked);
        }
    }

    /// The model does what a request of the dialect asks for.
    pub(crate) fn note_rpc(&mut self, c: usize, e: usize, seq: u64, op: u64, ask: Ask) {
        let star = self.is_star(c);
        let conn = &mut self.conns[c];
        let [low, high] = &mut conn.ends;
        let (me, peer) = if e == 0 { (low, high) } else { (high, low) };
        if me.down() || me.doomed.is_some() {
            /* it is not executed */
            return self.give_place(c, e, ask.asked.as_ref());
        }
        let Some(rpc) = &mut me.rpc else { return };
        if let Some(sight) = ask.sight {
            rpc.due.push_back(Due { seq, op, sight, outages: self.sites[peer.host].outages() });
        }
        if let Some(asked) = ask.asked {
            self.summary.count("rpcs", asked.want.code);
            if star {
                self.summary.add("rpcs", "with StaR", 1);
            }
            if let Some(imm) = asked.imm {
                rpc.immediates.push_back(Immediate { seq, imm, len: None });
            }
            rpc.asked.push_back(asked);
        }
        if let Some((off, data)) = &ask.write {
            let arena = match &mut peer.window {
                Some(w) if ask.window => &mut w.arena,
                _ => &mut peer.arena,
            };
            arena.write(seq, *off, data);
        }
        if ask.window {
            self.summary.add("rpcs", "by windows", 1);
        }
        rpc.bad_target |= ask.bad_target;
    }
}

impl RpcEnd {
    /// The place of an answer is free, and nobody may write there.
    pub(super) fn give(&mut self, host: &mut SimHost, asked: &Asked) {
        host.env.memory.allow(self.addr(asked.place), asked.room.into(), 0);
        self.free.push(asked.place);
    }
}
