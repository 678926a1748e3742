//! Programs that call a kernel of their own card, which sends by their queue pairs: the shuffle kernel
//! spreads a region over those of several peers. What it must send is known before; what it has sent so far
//! stands in send queues behind what was posted before, and in front of what is posted later.

use std::collections::VecDeque;

use starverbs_core::nic::OwnRequest;
use starverbs_core::strom::Code;
use starverbs_core::{Access, QpState, Qpn, SendOp};
use starverbs_kernels::shuffle;
use starverbs_sim::{READ, SimHost};
use starverbs_star::control::Preference;
use zerocopy::IntoBytes;

use super::Answer;
use super::partitions::{Partitions, Write};
use super::streams::{self, BITS, BUSY};
use crate::conn::{Conn, Wr};
use crate::plan::Whose;
use crate::world::World;

/// RPC op-code of the kernel that programs call.
pub(super) const OP: u64 = 0x1_0000_0016;
/// Bytes of the region that is spread.
const ROOM: u64 = 8 << 10;
/// Regions that a program spreads.
const TIMES: u32 = 4;

/// What a program has for it.
pub(crate) struct Sends {
    /// Its region: first byte and key
    region: (u64, u32),
    left: u32,
    work: Option<Work>,
}

/// A region that is being spread.
struct Work {
    request: OwnRequest,
    /// Parameters of the calls behind that one
    calls: VecDeque<Vec<u8>>,
    /// What is still to be sent
    writes: VecDeque<Write>,
    /// By partition: the end that sends, and its queue pair
    by: Vec<(usize, Whose, Qpn)>,
    want: Answer,
    outages: u64,
}

impl Work {
    fn end_of(&self, at: usize) -> Whose {
        self.by.iter().find(|(lane, ..)| *lane == at).expect("it has room, and so a queue pair").1
    }
}

impl Sends {
    pub(super) fn new(host: &mut SimHost) -> Self {
        let region = host.region(ROOM, Access::LOCAL_WRITE);
        host.env.memory.allow(region.0, ROOM, READ);
        Sends { region, left: TIMES, work: None }
    }
}

fn request(params: &[u8]) -> OwnRequest {
    OwnRequest::new(params).expect("memory")
}

impl World {
    /// The program of a host goes on with what it asks of its card's kernel.
    pub(crate) fn act_sends(&mut self, at: usize, eager: bool) -> bool {
        let sends = self.sites[at].kernels.as_mut().and_then(|kernels| kernels.sends.as_mut());
        let Some(Sends { work, left, .. }) = sends else { return false };
        if !eager && !self.rng.chance(self.plan.act) {
            return false;
        }
        let work = match work.take() {
            Some(work) => Some(work),
            None if *left == 0 => None,
            None => self.draft_work(at),
        };
        let Some(mut work) = work else { return false };
        let now = self.net.now();
        let host = &mut self.net.hosts[at];
        let before = host.nic.counters().tx_kernel_writes.get();
        let ended = host.nic.call_kernel(&mut host.env, now, host.pd, OP, &mut work.request);
        let posted = host.nic.counters().tx_kernel_writes.get() - before;
        self.summary.add("send kernels", "writes", posted);
        for _ in 0..posted {
            let write = work.writes.pop_front().expect("a kernel sends more than it was given");
            self.note_own_write(work.end_of(write.at), &write);
        }
        let goes_on = match ended {
            None => true,
            Some(code) => self.is_next(at, &mut work, code),
        };
        let waits = ended.is_none() && posted == 0 && work.request.waits();
        if goes_on {
            self.sends_of(at).work = Some(work);
        }
        self.summary.add("send kernels", "waits for room", waits.into());
        !waits
    }

    fn sends_of(&mut self, at: usize) -> &mut Sends {
        let sends = self.sites[at].kernels.as_mut().and_then(|kernels| kernels.sends.as_mut());
        sends.expect("its program has called a kernel")
    }

    /// A region to spread, if the host has queue pairs for that.
    fn draft_work(&mut self, at: usize) -> Option<Work> {
        let mut ends: Vec<Whose> = vec![];
        /* what a card keeps nothing of sends nothing by itself */
        let plain = |conn: &Conn| !conn.over && conn.plan.preferences == [Preference::Off; 2];
        for (c, conn) in self.conns.iter().enumerate().filter(|(_, conn)| plain(conn)) {
            let sends = |e: &usize| {
                let end = &conn.ends[*e];
                let room = end.rpc.as_ref().and_then(|rpc| rpc.own).is_some_and(|own| own.slots > 1);
                end.host == at && room && !end.down()
            };
            ends.extend((0..2).filter(sends).map(|e| (c, e)));
        }
        if ends.is_empty() {
            return None;
        }
        self.sends_of(at).left -= 1;
        let bits = self.rng.pick(&BITS);
        let mut partitions = Partitions::default();
        partitions.begin(bits);
        let mut calls = VecDeque::new();
        let mut by = vec![];
        for lane in BUSY.into_iter().filter(|lane| lane >> bits == 0) {
            let (c, e) = self.rng.pick(&ends);
            let (me, peer) = (&self.conns[c].ends[e], &self.conns[c].ends[1 - e]);
            let room = peer.arena.len() as u64;
            let len = self.rng.below(room + 1);
            let to = peer.arena.addr + self.rng.below(room - len + 1);
            partitions.set(lane as usize, to, len);
            by.push((lane as usize, (c, e), me.qpn));
            let params = command(shuffle::HISTOGRAM, peer.arena.key, lane as u32, me.qpn);
            let place = shuffle::Partition { to: to.into(), len: len.into() };
            calls.push_back([params.as_bytes(), place.as_bytes()].concat());
        }
        let (region, number) = (self.sends_of(at).region, self.rng.below(1 << 20));
        let len = self.rng.below(ROOM / 8 + 1) as u32 * 8;
        let data = streams::values(&mut self.rng, (0, 0), number, len);
        self.net.hosts[at].env.memory.write(region.0, &data);
        let values = data.as_chunks().0.iter().map(|value| u64::from_le_bytes(*value));
        let mut writes: VecDeque<Write> = values.filter_map(|value| partitions.take(value)).collect();
        writes.extend(partitions.flush());
        let stream = shuffle::Partition { to: region.0.into(), len: u64::from(len).into() };
        let params = command(shuffle::STREAM, region.1, 0, 0);
        calls.push_back([params.as_bytes(), stream.as_bytes()].concat());
        calls.push_back(command(shuffle::FLUSH, 4, 0, 0).as_bytes().to_vec());
        self.summary.add("send kernels", "begun", 1);
        let request = request(command(shuffle::BEGIN, bits, 0, 0).as_bytes());
        let (want, outages) = (partitions.counts(0, 4), self.sites[at].outages());
        Some(Work { request, calls, writes, by, want, outages })
    }

    /// A call has ended. Whether another is next.
    fn is_next(&mut self, at: usize, work: &mut Work, code: Code) -> bool {
        let host = &mut self.net.hosts[at];
        let mut answer = [0; 64];
        match work.calls.pop_front() {
            Some(params) if code == Code::Ok => {
                work.request = request(&params);
                return true;
            }
            None if code == work.want.code => {
                assert!(work.writes.is_empty(), "host {at}: a kernel sent less than it was given");
                if code == Code::Ok {
                    let len = host.nic.take_answer(&mut host.env, host.pd, &work.request, &mut answer);
                    assert_eq!(len, Ok(work.want.len), "host {at}: a kernel's counts");
                    assert!(
                        answer[..work.want.len as usize] == work.want.data,
                        "host {at}: a kernel's counts"
                    );
                }
                self.summary.add("send kernels", "ended", 1);
            }
            _ => {
                let gone = |(_, (c, e), qpn): &(usize, Whose, Qpn)| {
                    self.conns[*c].ends[*e].qpn != *qpn || self.state(*c, *e) != QpState::Rts
                };
                let denied = code == Code::Access && work.by.iter().any(gone);
                let away = self.sites[at].was_out(work.outages);
                let unloaded = away && matches!(code, Code::NoKernel | Code::Access);
                assert!(
                    denied || unloaded,
                    "host {at}: a call of a kernel ended as {code:?} without a reason"
                );
                let why = if denied { "whose queue pair was gone" } else { "whose kernel went away" };
                self.summary.add("send kernels", why, 1);
            }
        }
        false
    }

    /// An end's card has posted a WRITE of its own, which completes to nobody.
    fn note_own_write(&mut self, (c, e): Whose, write: &Write) {
        let [low, high] = &mut self.conns[c].ends;
        let (me, peer) = if e == 0 { (low, high) } else { (high, low) };
        if me.down() || me.doomed.is_some() {
            /* it is not executed */
            return;
        }
        peer.arena.write(me.next, (write.to - peer.arena.addr) as usize, &write.bytes);
        me.sends.push_back(Wr::of_card(me.next, SendOp::Write, write.bytes.len() as u32));
        me.next += 1;
        self.say(|| format!("the card of conn {c}.{e} posts {} bytes to {:#x}", write.bytes.len(), write.to));
    }

    /// At the end a host's program has all that it asked for.
    pub(crate) fn finish_sends(&mut self, at: usize) {
        let sends = self.sites[at].kernels.as_ref().and_then(|kernels| kernels.sends.as_ref());
        assert!(sends.is_none_or(|sends| sends.work.is_none()), "host {at}: a call of a kernel has no end");
    }

    /// An end fails: its requests before the one at `until` are done, if they are not flushed. What its
    /// card has posted for a kernel is flushed without a word, and only what stands before one of those is
    /// known to be done.
    pub(crate) fn forget_own_writes(&mut self, c: usize, e: usize, until: usize) {
        let sends = &mut self.conns[c].ends[e].sends;
        let known = sends.iter().take(until).rposition(|wr| !wr.of_card).map_or(0, |at| at + 1);
        let mut at = 0..;
        sends.retain(|wr| at.next().is_some_and(|at| at < known) || !wr.of_card);
    }
}

fn command(command: u32, number: u32, first: u32, qpn: Qpn) -> shuffle::Params {
    let [command, number, first, qpn] = [command, number, first, qpn].map(Into::into);
    shuffle::Params { command, number, first, qpn }
}
