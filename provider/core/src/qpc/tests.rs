//! The module against a plain model: memory is a list, time is a number.

use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::types::Qpn;

/// A context that counts what was done with it, so that a stale copy, a lost change or a change of order
/// shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    reads: [u32; RequestChannel::COUNT],
    ring: u16,
}

impl CachedContext for Counts {
    fn access(&mut self, channel: RequestChannel, wqes: u16) {
        self.reads[channel as usize] += 1;
        self.ring = (self.ring + wqes) % RING;
    }
    fn send_ring(&self) -> SendRing {
        SendRing { address: 0, offset: self.ring }
    }
}

const RING: u16 = 128;

/// The module, three requesters, and a memory that answers in order, each time after a while.
struct Bench {
    qpc: Qpc<Counts>,
    requesters: Vec<RequesterUnit<(Qpn, u64)>>,
    memory: Vec<Counts>,
    /// Fetches under way: ready at, QPN, as it was in memory
    under_way: VecDeque<(u64, Qpn, Counts)>,
    /// What waits to be asked, by channel
    todo: [VecDeque<(Qpn, u64)>; RequestChannel::COUNT],
    /// By channel and QP: the tickets answered, in order
    answered: Vec<Vec<Vec<u64>>>,
    rings_seen: Vec<u64>,
    now: u64,
    latency: u64,
}

impl Bench {
    fn new(config: CacheConfig, latency: u64) -> Bench {
        let qps = config.qps as usize;
        Bench {
            qpc: Qpc::new(config).unwrap(),
            requesters: (0..3).map(|_| RequesterUnit::new(config.ooo_cap)).collect(),
            memory: vec![Counts::default(); qps],
            under_way: VecDeque::new(),
            todo: Default::default(),
            answered: vec![vec![Vec::new(); qps]; 3],
            rings_seen: vec![0; qps],
            now: 0,
            latency,
        }
    }

    fn step(&mut self) {
        for channel in RequestChannel::ALL {
            let todo = &mut self.todo[channel as usize];
            if let Some(&(qpn, ticket)) = todo.front()
                && let Ok(index) = self.requesters[channel as usize].begin((qpn, ticket))
            {
                todo.pop_front();
                self.qpc
                    .handle_request(channel, index, qpn, u16::from(channel == RequestChannel::Sq))
                    .unwrap();
            }
        }
        while let Some(&(at, qpn, context)) = self.under_way.front()
            && at <= self.now
        {
            self.under_way.pop_front();
            self.qpc.handle_fetched(qpn, context).unwrap();
        }
        let waiting: Vec<bool> =
            (0..self.memory.len()).map(|qpn| self.qpc.is_waited_for(qpn as Qpn)).collect();
        let bypassed = self.qpc.counters().bypassed;
        self.qpc.cycle();
        let bypassed = self.qpc.counters().bypassed > bypassed;
        let responses: Vec<_> = std::iter::from_fn(|| self.qpc.poll_response()).collect();
        while let Some((qpn, context)) = self.qpc.poll_write_back() {
            // one that was answered in this cycle was the last, and a new request of it may have been taken
            // up since
            let waits =
                waiting[qpn as usize] && !bypassed && responses.iter().all(|response| response.qpn != qpn);
            assert!(!waits, "QP {qpn} was evicted under a waiter");
            self.memory[qpn as usize] = context;
        }
        while let Some(qpn) = self.qpc.poll_fetch() {
            self.under_way.push_back((self.now + self.latency, qpn, self.memory[qpn as usize]));
        }
        for response in responses {
            self.take(response);
        }
        self.now += 1;
    }

    fn take(&mut self, response: UnitResponse<Counts>) {
        let UnitResponse { channel, index, qpn, ring, context } = response;
        let (asked, ticket) =
            self.requesters[channel as usize].finish(index).expect("an answer to what was asked, once");
        assert_eq!(asked, qpn);
        let answered = &mut self.answered[channel as usize][qpn as usize];
        if let Some(context) = context {
            assert_eq!(
                context.reads[channel as usize] as usize,
                answered.len(),
                "a change was lost or came twice"
            );
        }
        if channel == RequestChannel::Sq {
            assert_eq!(u64::from(ring.offset), self.rings_seen[qpn as usize] % u64::from(RING));
            self.rings_seen[qpn as usize] += 1;
        }
        answered.push(ticket);
    }

    /// Runs until all is answered, or fails.
    fn drain(&mut self) {
        let work: usize = self.todo.iter().map(VecDeque::len).sum();
        // each request may cost a fetch of its own, and a look at each element that is pending
        let slots = 3 * u64::from(self.qpc.config().ooo_cap);
        let limit = self.now + (work as u64 + 2 * slots + 1) * (self.latency + 2 * slots + 4);
        while self.todo.iter().any(|todo| !todo.is_empty())
            || self.requesters.iter().any(|requester| requester.in_flight() > 0)
            || !self.under_way.is_empty()
            || !self.qpc.is_idle()
        {
            assert!(self.now < limit, "starved");
            self.step();
        }
    }
}

fn policies() -> impl Strategy<Value = Policy> {
    prop_oneof![Just(Policy::Fcfs), Just(Policy::NonBlocking), Just(Policy::LatencyHiding)]
}

fn config(policy: Policy, entries: u32, ooo_cap: u16, qps: u32) -> CacheConfig {
    CacheConfig { policy, placement: ContextPlacement::Host, entries, ooo_cap, qps, ring_wqes: RING }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Per-QP order, nothing lost, nothing twice, no change lost, no starvation, no eviction under a waiter:
    /// whatever the sizes, the policy, memory's latency and the order of requests.
    #[test]
    fn it_does_what_a_list_of_contexts_does(
        policy in policies(),
        entries in 1u32..12,
        ooo_cap in 1u16..9,
        qps in 1u32..16,
        latency in 0u64..60,
        requests in prop::collection::vec((0usize..3, 0u32..16, 0u64..20), 1..200),
    ) {
        let mut bench = Bench::new(config(policy, entries, ooo_cap, qps), latency);
        let mut wanted = vec![vec![Vec::new(); qps as usize]; 3];
        for (ticket, (channel, qpn, pause)) in requests.into_iter().enumerate() {
            let qpn = qpn % qps;
            bench.todo[channel].push_back((qpn, ticket as u64));
            wanted[channel][qpn as usize].push(ticket as u64);
            for _ in 0..pause { bench.step(); }
        }
        bench.drain();
        prop_assert_eq!(&bench.answered, &wanted);
        let counters = *bench.qpc.counters();
        let split = policy == Policy::LatencyHiding;
        let asked: usize = wanted.iter().flatten().map(Vec::len).sum();
        let answered = counters.hits + counters.misses + counters.waited + counters.ring_reads;
        prop_assert_eq!(answered, asked as u64);
        let any_doorbell = wanted[0].iter().any(|tickets| !tickets.is_empty());
        prop_assert_eq!(counters.ring_reads > 0, split && any_doorbell);
        prop_assert!(counters.pending_peak <= 3 * u64::from(ooo_cap));
    }
}

proptest! {
    /// One request at a time, so that nothing is waited for: hits, misses and evictions are those of a plain
    /// list, the newest used last.
    #[test]
    fn the_cache_is_a_list_by_use(
        policy in prop_oneof![Just(Policy::Fcfs), Just(Policy::NonBlocking)],
        entries in 1u32..10,
        requests in prop::collection::vec((0usize..3, 0u32..14), 1..300),
    ) {
        let mut bench = Bench::new(config(policy, entries, 4, 14), 3);
        let (mut list, mut hits, mut evicted) = (Vec::new(), 0, 0);
        for (ticket, (channel, qpn)) in requests.iter().copied().enumerate() {
            bench.todo[channel].push_back((qpn, ticket as u64));
            bench.drain();
            match list.iter().position(|of| *of == qpn) {
                Some(at) => {
                    list.remove(at);
                    hits += 1;
                }
                None if list.len() == entries as usize => {
                    list.remove(0);
                    evicted += 1;
                }
                None => {}
            }
            list.push(qpn);
            let counters = *bench.qpc.counters();
            let misses = ticket as u64 + 1 - hits;
            prop_assert_eq!((counters.hits, counters.misses, counters.evicted), (hits, misses, evicted));
        }
    }
}

/// The paper's algorithm 2 lets the third request of a QP pass the second, when the second was put back
/// before the context came, in the same pass.
#[test]
fn a_pass_that_is_under_way_does_not_reorder_a_qp() {
    let mut bench = Bench::new(config(Policy::NonBlocking, 8, 16, 8), 40);
    // QP 1's context comes first and its eight waiters keep the check busy; QP 0's comes meanwhile, when its
    // first waiter was put back and its second not yet looked at
    bench.todo[1].push_back((1, 0));
    for _ in 0..6 {
        bench.step();
    }
    bench.todo[1].extend([(0, 1), (0, 2)]);
    bench.todo[1].extend((3..11).map(|ticket| (1, ticket)));
    bench.todo[1].push_back((0, 11));
    bench.drain();
    assert_eq!(bench.answered[1][0], [1, 2, 11]);
    assert!(bench.answered[1][1].is_sorted());
}

#[test]
fn a_miss_blocks_others_only_when_first_come_is_first_served() {
    let served_by = |policy| {
        let mut bench = Bench::new(config(policy, 4, 4, 8), 50);
        bench.todo[1].push_back((0, 0));
        bench.drain();
        // QP 0 is in the cache; QP 1 is not, and asks first
        bench.todo[1].extend([(1, 1), (0, 2)]);
        for _ in 0..10 {
            bench.step();
        }
        bench.answered[1][0].len()
    };
    assert_eq!(served_by(Policy::Fcfs), 1);
    assert_eq!(served_by(Policy::NonBlocking), 2);
    assert_eq!(served_by(Policy::LatencyHiding), 2);
}

#[test]
fn a_context_is_fetched_while_the_wqes_are() {
    let mut bench = Bench::new(config(Policy::LatencyHiding, 4, 4, 8), 50);
    bench.todo[0].push_back((3, 0));
    for _ in 0..60 {
        bench.step();
    }
    assert_eq!(bench.answered[0][3], [0]);
    bench.todo[1].push_back((3, 1));
    bench.step();
    assert_eq!(bench.answered[1][3], [1], "it was there when it was needed");
    assert_eq!(bench.qpc.counters().prefetched, 1);
    assert_eq!(bench.qpc.counters().misses, 0);
}

#[test]
fn bytes_on_the_chip_are_the_papers() {
    let csrna = config(Policy::LatencyHiding, 300, 16, 128 * 1024);
    let bytes = csrna.on_chip();
    assert_eq!(bytes.out_of_order, 640, "about 0.5 KB at a capacity of 16, section 5.3");
    assert_eq!(bytes.send_rings, 10 * 128 * 1024);
    assert_eq!(bytes.cache, 300 * 256);
    assert!((1.38e6..1.42e6).contains(&(bytes.total() as f64)), "1.4 MB, table 1");
    let fcfs = config(Policy::Fcfs, 300, 16, 1000).on_chip();
    assert_eq!((fcfs.out_of_order, fcfs.send_rings), (0, 0));
}

#[test]
fn what_callers_do_wrong_is_an_error() {
    assert_eq!(Qpc::<Counts>::new(config(Policy::Fcfs, 0, 1, 1)).err(), Some(ConfigError::NoEntries));
    assert_eq!(Qpc::<Counts>::new(config(Policy::Fcfs, 1, 257, 1)).err(), Some(ConfigError::OooCap(257)));
    let mut qpc = Qpc::<Counts>::new(config(Policy::NonBlocking, 4, 4, 8)).unwrap();
    assert_eq!(qpc.handle_request(RequestChannel::Tx, 0, 8, 0), Err(QpcError::UnknownQp(8)));
    assert_eq!(qpc.handle_request(RequestChannel::Tx, 4, 0, 0), Err(QpcError::BadIndex(4)));
    assert_eq!(qpc.handle_fetched(0, Counts::default()), Err(QpcError::OutOfOrder(0)));
    qpc.cycle();
    assert!(qpc.is_idle());
}

#[test]
fn a_module_grows_with_its_qps() {
    for policy in [Policy::Fcfs, Policy::NonBlocking, Policy::LatencyHiding] {
        let mut qpc = Qpc::<Counts>::new(config(policy, 2, 4, 1)).unwrap();
        assert_eq!(qpc.handle_request(RequestChannel::Tx, 0, 5, 0), Err(QpcError::UnknownQp(5)));
        qpc.grow(6).unwrap();
        qpc.grow(2).unwrap();
        assert_eq!(qpc.handle_request(RequestChannel::Tx, 0, 5, 0), Ok(()));
        qpc.cycle();
        assert_eq!(qpc.poll_fetch(), Some(5));
        qpc.handle_fetched(5, Counts::default()).unwrap();
        qpc.cycle();
        assert_eq!(qpc.poll_response().map(|r| (r.channel, r.qpn)), Some((RequestChannel::Tx, 5)));
        assert!(qpc.grow(1 << 25).is_err());
        assert_eq!(qpc.config().qps, 6);
    }
}
