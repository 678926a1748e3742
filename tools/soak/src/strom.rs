//! Connections of StRoM's dialect among the others: their plan, and what ends and hosts have for it.
//!
//! `ask` posts RPCs and RPC WRITEs, `judge` checks what kernels saw and what they answered, `journal` is the
//! kernel that writes down what it is started with, `shelf` what the kernels of every card look at, `streams`
//! what those that take streams make of them, and `sends` has programs call kernels of their own cards.

mod ask;
mod journal;
mod judge;
mod partitions;
mod sends;
mod shelf;
mod sketched;
mod streams;

use std::collections::VecDeque;

use starverbs_core::env::SendQueue;
use starverbs_core::strom::{Code, Kernel, KernelId, RECORD_LEN, ReplyMemory, SLOT_BYTES};
use starverbs_core::{Access, Nanos};
use starverbs_kernels::{Builtin, Consistent, Get, Traverse};
use starverbs_sim::{READ, Rng, SimHost, SimSq, WRITE};
use starverbs_star::control::Preference;

pub(crate) use ask::{Ask, OF_ANSWER};

use crate::conn::ConnEnd;
use crate::plan::{Chaos, ConnPlan, Plan, Transport};
use crate::world::{Site, World};
use journal::{Journal, Notes, Watched};
use sends::Sends;
use shelf::Shelf;
use streams::{HLL, SHUFFLE, Streams};

const MS: Nanos = 1_000_000;
/// RPC op-code of the journal.
const JOURNAL: u64 = 0x1_0000_0010;
/// One that nobody has; answers show the same low half.
const NOBODY: u64 = JOURNAL & 0xffff_ffff;
/// Answers of an end's peer that may be under way.
const PLACES: u32 = 8;
/// What memory for an answer holds before it comes.
const BLANK: u8 = 0xee;

/// What a connection has of StRoM.
#[derive(Clone, Debug)]
pub struct StromPlan {
    /// Ends that speak the dialect
    pub speaks: [bool; 2],
    /// Ends that post RPCs
    pub asks: [bool; 2],
    /// Share of requests that are RPCs or RPC WRITEs
    pub share: f64,
    /// Slots for answers of the ends' cards
    pub slots: [u8; 2],
    /// Longest answer, bytes
    pub longest: u32,
    /// Kernels write, too: not where they are unloaded in the middle
    pub writes: bool,
    /// Kernels work on windows, too, where these are bound
    pub windows: bool,
    /// Streams go to the shuffle and HyperLogLog kernels, too, and programs call kernels of their own cards,
    /// which send
    pub streams: bool,
}

impl StromPlan {
    fn any(rng: &mut Rng, writes: bool) -> Self {
        let both = [true; 2];
        let speaks = rng.pick(&[both, both, both, both, both, both, [true, false], [false, true]]);
        let share = rng.pick(&[0.1, 0.5, 0.9]);
        StromPlan {
            speaks,
            asks: rng.pick(&[both, both, [true, false]]),
            share: if speaks == both { share } else { share / 10.0 },
            slots: [rng.pick(&[1, 2, 4, 16]), rng.pick(&[1, 2, 4, 16])],
            longest: rng.pick(&[16, 64, 300, 1200, 4096]),
            writes,
            windows: true,
            streams: false,
        }
    }
}

impl Plan {
    /// One run in four has RC connections of the dialect, also of those that ask for StaR; in some of them
    /// kernels are unloaded while they run.
    pub(crate) fn mix_strom(&mut self, rng: &mut Rng) {
        if !rng.chance(0.25) {
            return;
        }
        let (share, unloads) = (rng.pick(&[0.5, 1.0]), rng.chance(0.3));
        let plain =
            |conn: &&mut ConnPlan| conn.kind == Transport::Rc && conn.preferences == [Preference::Off; 2];
        for conn in self.conns.iter_mut().filter(plain) {
            if rng.chance(share) {
                conn.strom = Some(StromPlan::any(rng, !unloads));
            }
        }
        let (hosts, steps) = (self.hosts as u64, if self.is_long { 50_000 } else { 400 });
        for _ in 0..if unloads { rng.within(1, 5) } else { 0 } {
            let time = rng.pick(&[0, 1_000, MS / 10, 10 * MS]);
            let unload = Chaos::Unload(rng.below(hosts) as usize, time);
            self.chaos.push((rng.below(steps) as usize, unload));
        }
        /* drawn last, so that a seed's plan is otherwise what it was before there was this */
        let streams = rng.chance(0.5);
        self.conns
            .iter_mut()
            .filter_map(|conn| conn.strom.as_mut())
            .for_each(|strom| strom.streams = streams);
        let share = rng.pick(&[0.0, 0.5, 1.0]);
        let star = |conn: &&mut ConnPlan| conn.preferences != [Preference::Off; 2];
        for conn in self.conns.iter_mut().filter(star) {
            if rng.chance(share) {
                conn.strom = Some(StromPlan { streams, ..StromPlan::any(rng, !unloads) });
            }
        }
    }

    /// Streams go to the journal alone, nobody calls a kernel of the own card, and no connection of the
    /// dialect is StaR's: what a seed was before they did.
    pub fn without_streams(mut self) -> Plan {
        let star = |conn: &&mut ConnPlan| conn.preferences != [Preference::Off; 2];
        self.conns.iter_mut().filter(star).for_each(|conn| conn.strom = None);
        self.conns.iter_mut().filter_map(|conn| conn.strom.as_mut()).for_each(|strom| strom.streams = false);
        self
    }

    fn has_streams(&self) -> bool {
        self.conns.iter().any(ConnPlan::has_streams)
    }

    /// No connection is of the dialect, and kernels stay: what a seed was before there was this.
    pub fn without_strom(mut self) -> Plan {
        self.conns.iter_mut().for_each(|conn| conn.strom = None);
        self.chaos.retain(|(_, chaos)| !matches!(chaos, Chaos::Unload(..)));
        self
    }

    /// Kernels work on regions alone: what a seed was before they used windows.
    pub fn without_kernel_windows(self) -> Plan {
        let mut plan = self.without_streams();
        plan.conns.iter_mut().filter_map(|conn| conn.strom.as_mut()).for_each(|strom| strom.windows = false);
        plan
    }
}

impl ConnPlan {
    fn has_streams(&self) -> bool {
        self.strom.as_ref().is_some_and(|strom| strom.streams)
    }

    /// A send queue of an end, with room for its card's answers beside the program's requests.
    pub(crate) fn make_sq(&self, e: usize) -> SimSq {
        let own = self.strom.as_ref().filter(|strom| strom.speaks[e]).map_or(0, |strom| strom.slots[e]);
        SimSq::new((self.sq[e] + u32::from(own)).next_power_of_two())
    }
}

/// How an RPC ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Answer {
    code: Code,
    /// Bytes of data, or what there would have been
    len: u32,
    data: Vec<u8>,
}

impl Answer {
    pub(crate) fn ok(data: Vec<u8>) -> Self {
        Answer { code: Code::Ok, len: data.len() as u32, data }
    }

    pub(crate) fn error(code: Code) -> Self {
        Answer { code, len: 0, data: Vec::new() }
    }

    /// In a region of so many bytes.
    fn within(self, room: u32) -> Self {
        let fits = self.len + RECORD_LEN as u32 <= room;
        if fits { self } else { Answer { len: self.len, ..Answer::error(Code::Overflow) } }
    }
}

/// What a kernel of the peer's host must see.
#[derive(Debug)]
pub(crate) enum Sight {
    /// An RPC, and the CRC of what it reads if it comes to its end
    Call(Vec<u8>, Option<u64>),
    /// An RPC WRITE, of which so many bytes were seen; `None`: nothing yet
    Stream(Vec<u8>, Option<usize>),
}

/// A request that a kernel of the peer's host must see.
#[derive(Debug)]
pub(crate) struct Due {
    seq: u64,
    op: u64,
    sight: Sight,
    /// [`Site::outages`] of that host when it was posted
    outages: u64,
}

/// How far an RPC is whose answer has not come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Progress {
    /// No kernel that writes it down has seen it, or never does
    Posted,
    Began,
    Ended,
}

/// An RPC whose answer has not come.
#[derive(Debug)]
pub(crate) struct Asked {
    seq: u64,
    op: u64,
    /// Place of the answer, and bytes of its region
    place: u32,
    room: u32,
    want: Answer,
    /// What is wanted is not known yet, or never is: others ask the kernel, too
    open: bool,
    /// It comes with this immediate
    imm: Option<u32>,
    progress: Progress,
    outages: u64,
}

/// An answer with immediate whose receive has not completed.
#[derive(Debug)]
struct Immediate {
    seq: u64,
    imm: u32,
    /// Bytes, once it is in memory
    len: Option<u32>,
}

/// What an end of a connection has for it.
#[derive(Debug)]
pub(crate) struct RpcEnd {
    /// Where answers of its card stand, if it speaks the dialect
    own: Option<ReplyMemory>,
    /// Where answers to it come: first byte and key, bytes of a place, and the free ones
    page: (u64, u32),
    place: u32,
    free: Vec<u32>,
    due: VecDeque<Due>,
    /// The RPC that the peer's journal began last and has not ended: its number, and the CRC that it must
    /// tell
    running: Option<(u64, Option<u64>)>,
    asked: VecDeque<Asked>,
    immediates: VecDeque<Immediate>,
    /// In this incarnation an answer was to go where its key opens nothing
    bad_target: bool,
}

impl RpcEnd {
    fn make(host: &mut SimHost, strom: &StromPlan, e: usize) -> Self {
        let own = strom.speaks[e].then(|| {
            let bytes = u64::from(strom.slots[e]) * SLOT_BYTES as u64;
            let (addr, lkey) = host.region(bytes, Access::LOCAL_WRITE);
            host.env.memory.allow(addr, bytes, READ | WRITE);
            ReplyMemory { addr, lkey, slots: strom.slots[e] }
        });
        let place = (strom.longest + RECORD_LEN as u32).next_multiple_of(64);
        let page = host.region(u64::from(PLACES * place), Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        RpcEnd {
            own,
            page,
            place,
            free: (0..PLACES).collect(),
            due: VecDeque::new(),
            running: None,
            asked: VecDeque::new(),
            immediates: VecDeque::new(),
            bad_target: false,
        }
    }

    fn addr(&self, place: u32) -> u64 {
        self.page.0 + u64::from(place * self.place)
    }

    /// No answer comes any more.
    fn forget_asked(&mut self, host: &mut SimHost) {
        self.asked.clear();
        self.immediates.clear();
        self.free = (0..PLACES).collect();
        host.env.memory.allow(self.page.0, u64::from(PLACES * self.place), 0);
    }
}

/// The kernels of a host.
pub(crate) struct Kernels {
    /// Those that write down what they get, if they are loaded now; else from when on they are again, ns
    watched: Result<Vec<KernelId>, Nanos>,
    notes: Notes,
    /// How often they were unloaded
    outages: u64,
    shelf: Shelf,
    /// Where streams go to kernels of every card
    streams: Option<Streams>,
    /// What the host's program asks of its own card
    sends: Option<Sends>,
}

impl Kernels {
    /// That a kernel was away the peers may not have heard before a restart.
    pub(crate) fn remember(&mut self, before: &Kernels) {
        self.outages += before.outages;
    }
}

impl ConnEnd {
    /// Whether these bytes are of a place for an answer that may be under way.
    pub(crate) fn awaits_answer(&self, from: u64, to: u64) -> bool {
        self.rpc.as_ref().is_some_and(|rpc| {
            let end = rpc.page.0 + u64::from(PLACES * rpc.place);
            rpc.page.0 <= from && to <= end
        })
    }

    /// Whether its program may post no more: its card's answers have their slots beside.
    pub(crate) fn is_full(&self) -> bool {
        match self.rpc.as_ref().and_then(|rpc| rpc.own) {
            Some(own) => self.sq.outstanding() + u32::from(own.slots) >= self.sq.slots(),
            None => self.sq.is_full(),
        }
    }
}

impl World {
    /// The kernels of a host, if any connection has use for them.
    pub(crate) fn make_kernels(&mut self, at: usize) -> Option<Kernels> {
        if self.plan.conns.iter().all(|conn| conn.strom.is_none()) {
            return None;
        }
        let host = &mut self.net.hosts[at];
        let notes = Notes::default();
        let all: [(u64, Box<dyn Kernel>); 3] = [
            (shelf::GET, Box::new(Get)),
            (shelf::TRAVERSE, Box::new(Traverse)),
            (shelf::CONSISTENT, Box::new(Consistent)),
        ];
        for (op, kernel) in all {
            host.nic.load_kernel(host.pd, op, kernel).expect("nobody has the op-code");
        }
        let shelf = Shelf::new(host);
        let streams = self.plan.has_streams();
        let sends = streams.then(|| Sends::new(host));
        let streams = streams.then(|| Streams::new(host));
        let watched = Ok(load(host, &notes, streams.is_some()));
        Some(Kernels { watched, notes, outages: 0, shelf, streams, sends })
    }

    /// What an end has for the dialect, if its connection has it.
    pub(crate) fn make_rpc(&mut self, at: usize, plan: &ConnPlan, e: usize) -> Option<RpcEnd> {
        let strom = plan.strom.as_ref()?;
        Some(RpcEnd::make(&mut self.net.hosts[at], strom, e))
    }

    /// An end's queue pair, which is new, speaks the dialect if its plan says so.
    pub(crate) fn speak(&mut self, c: usize, e: usize) {
        let end = &self.conns[c].ends[e];
        if let Some(own) = end.rpc.as_ref().and_then(|rpc| rpc.own) {
            let nic = &mut self.net.hosts[end.host].nic;
            nic.speak_strom(end.qpn, own).expect("an RC queue pair in RESET");
        }
    }

    /// An end's host lost its memory: it has the same again, at the same place.
    pub(crate) fn renew_rpc(&mut self, c: usize, e: usize) {
        let conn = &mut self.conns[c];
        let (Some(strom), Some(before)) = (&conn.plan.strom, conn.ends[e].rpc.take()) else { return };
        let host = &mut self.net.hosts[conn.ends[e].host];
        let again = RpcEnd::make(host, strom, e);
        assert_eq!((again.own, again.page), (before.own, before.page), "regions come in another order");
        /* what it posted before may still come to its peer */
        let (due, running) = (before.due, before.running);
        conn.ends[e].rpc = Some(RpcEnd { due, running, ..again });
    }

    /// The connection of an end has ended.
    pub(crate) fn forget_rpcs(&mut self, c: usize, e: usize) {
        let end = &mut self.conns[c].ends[e];
        if let Some(rpc) = &mut end.rpc {
            rpc.forget_asked(&mut self.net.hosts[end.host]);
            let in_the_middle = |due: &&Due| matches!(due.sight, Sight::Stream(_, Some(_)));
            let broken_off = rpc.due.iter().filter(in_the_middle).count();
            self.summary.add("rpcs", "streams that broke off", broken_off as u64);
            rpc.due.clear();
            (rpc.running, rpc.bad_target) = (None, false);
        }
        let at = self.conns[c].ends[1 - e].host;
        if let Some(streams) = self.sites[at].streams() {
            streams.ended((c, e));
        }
    }

    /// The queue pair of an end is gone, with what was to come to it.
    pub(crate) fn forget_answers(&mut self, c: usize, e: usize) {
        let end = &mut self.conns[c].ends[e];
        if let Some(rpc) = &mut end.rpc {
            rpc.forget_asked(&mut self.net.hosts[end.host]);
        }
    }

    /// The kernels of a host that write down what they get are unloaded, whatever they are in the middle
    /// of, and come again after `time`. Where that is 0 others take their places at once.
    pub(crate) fn unload(&mut self, at: usize, time: Nanos) {
        self.read_kernels(at);
        let (now, host) = (self.net.now(), &mut self.net.hosts[at]);
        let Some(kernels) = &mut self.sites[at].kernels else { return };
        let Ok(ids) = &kernels.watched else { return self.reload() };
        kernels.outages += 1;
        if time == 0 {
            kernels.watched = Ok(all_watched(&kernels.notes, kernels.streams.is_some())
                .map(|(op, kernel)| {
                    let (id, old) = host.nic.replace_kernel(host.pd, op, kernel).expect("it is loaded");
                    assert!(old.is_some(), "it was loaded");
                    id
                })
                .collect());
        } else {
            ids.iter().for_each(|id| drop(host.nic.unload_kernel(*id).expect("it is loaded")));
            kernels.watched = Err(now + time);
        }
        if let Some(streams) = &mut kernels.streams {
            streams.forget(host);
        }
        self.reload();
    }

    /// Kernels that were away for long enough are loaded again.
    pub(crate) fn reload(&mut self) {
        let now = self.net.now();
        for (host, site) in self.net.hosts.iter_mut().zip(&mut self.sites) {
            let Some(kernels) = &mut site.kernels else { continue };
            if kernels.watched.as_ref().is_err_and(|until| *until <= now) {
                kernels.watched = Ok(load(host, &kernels.notes, kernels.streams.is_some()));
            }
        }
    }

    /// All queue pairs of a host are gone: no kernel is at work for anybody, and each can be unloaded.
    pub(crate) fn finish_kernels(&mut self, at: usize) {
        let host = &mut self.net.hosts[at];
        let ids: Vec<KernelId> = host.nic.kernels().iter().map(|loaded| loaded.id).collect();
        assert_eq!(host.nic.kernels_running(), 0, "host {at}: kernels at work for nobody");
        for id in ids {
            host.nic.unload_kernel(id).expect("it is loaded");
        }
    }
}

impl Site {
    /// How often kernels were unloaded and loaded again.
    fn outages(&self) -> u64 {
        let over = |kernels: &Kernels| kernels.outages - u64::from(kernels.watched.is_err());
        self.kernels.as_ref().map_or(0, over)
    }

    /// Whether kernels were away, if only for a moment, since [`outages`](Self::outages) was `before`.
    fn was_out(&self, before: u64) -> bool {
        self.kernels.as_ref().is_some_and(|kernels| kernels.outages != before)
    }
}

/// The kernels that write down what they get, and the one that a host's own program calls.
fn all_watched(notes: &Notes, streams: bool) -> impl Iterator<Item = (u64, Box<dyn Kernel>)> {
    let watched = |op: u64, kernel: Builtin| {
        let watched = Watched { op, kernel: kernel.make(), notes: notes.clone() };
        (op, Box::new(watched) as Box<dyn Kernel>)
    };
    let of_streams = [
        watched(SHUFFLE, Builtin::Shuffle),
        watched(HLL, Builtin::Hll),
        (sends::OP, Builtin::Shuffle.make()),
    ];
    let journal = (JOURNAL, Box::new(Journal(notes.clone())) as Box<dyn Kernel>);
    [journal].into_iter().chain(of_streams.into_iter().filter(move |_| streams))
}

fn load(host: &mut SimHost, notes: &Notes, streams: bool) -> Vec<KernelId> {
    let load = |(op, kernel)| host.nic.load_kernel(host.pd, op, kernel).expect("nobody has the op-code");
    all_watched(notes, streams).map(load).collect()
}

/// Whether a kernel of this op-code writes down what it gets.
fn is_watched(op: u64) -> bool {
    [JOURNAL, SHUFFLE, HLL].contains(&op)
}
