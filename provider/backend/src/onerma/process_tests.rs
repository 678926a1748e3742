//! Two processes, through memory or over loopback's UDP. Time is the test's: it goes on only when no packet
//! is on its way.

use std::collections::HashSet;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::Instant;

use starverbs_onerma::wire::{MAX_PACKET, OneRmaHeader};
use starverbs_onerma::{CARDS, CardPath, Class};
use starverbs_settings::{FaultSpec, LinkMode};

use super::*;

const KEY: RegionKey = RegionKey([0x4b; 16]);
const LEN: usize = 64 << 10;
/// Of a packet that is there: longer than any machine needs to hand it over
const PATIENCE: Duration = Duration::from_secs(20);
const ALL: Rights = Rights::all();

fn addr(ip: [u8; 4]) -> HostAddr {
    let gid = Gid::from_ipv4(ip);
    HostAddr { gid, ifindex: 1, link_mtu: 65_536, name: "lo".to_owned(), loopback: true }
}

/// A process at an address of loopback that nobody has.
fn open(pid: u32, retries: u8) -> Process {
    open_with(pid, retries, &Settings::default())
}

fn open_with(pid: u32, retries: u8, settings: &Settings) -> Process {
    open_as(&ProcessOptions { pid, retries, ..ProcessOptions::default() }, settings)
}

fn open_as(options: &ProcessOptions, settings: &Settings) -> Process {
    for _ in 0..1000 {
        let [a, b, c, ..] = sockopt::random().to_le_bytes();
        match Process::open(&addr([127, a, b, c & 0x7f | 2]), options, settings) {
            Ok(process) => return process,
            Err(BackendError::OnermaAddress { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    panic!("no free address");
}

/// One whose packets are the wire's.
fn open_on_the_wire(pid: u32) -> Process {
    open_with(pid, 0, &Settings { link: LinkMode::Udp, ..Settings::default() })
}

/// An initiator with memory of ones and a target with memory of twos, each a region of all rights.
struct Pair {
    ends: [Process; 2],
    regions: [RegionId; 2],
    memory: [Box<[AtomicU64]>; 2],
    now: Nanos,
}

impl Pair {
    fn new(retries: u8) -> Self {
        Pair::of([open(7, retries), open(8, retries)])
    }

    fn of(mut ends: [Process; 2]) -> Self {
        let memory = [0x11, 0x22].map(|byte| {
            (0..LEN / 8).map(|_| AtomicU64::new(u64::from_ne_bytes([byte; 8]))).collect::<Box<[_]>>()
        });
        let mut open = |at: usize| {
            // SAFETY: the pair has the memory as long as the process, as words that anybody may write.
            let region = unsafe { ends[at].open_region(memory[at].as_ptr() as *mut u8, LEN, ALL, KEY) };
            region.expect("a place")
        };
        let regions = [open(0), open(1)];
        Pair { ends, regions, memory, now: 1 }
    }

    /// From the initiator to the target.
    fn to_target(&self) -> CardPath {
        let [local, remote] = self.ends.each_ref().map(|end| end.local);
        CardPath { local, remote, card: self.ends[1].world.port.card() }
    }

    fn bytes(&self, end: usize) -> Vec<u8> {
        self.memory[end].iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
    }

    fn submit(&mut self, op: OneRmaOp, key: &RegionKey, len: u64) {
        let transfer = Transfer {
            op,
            class: Class::High,
            len,
            remote: self.ends[1].local,
            region: self.regions[1],
            offset: 64,
            local: self.regions[0],
            local_offset: 128,
            key: self.ends[0].own_key(key, op),
            token: 5,
        };
        self.ends[0].submit(transfer).expect("a good transfer");
        self.ends[0].advance(self.now);
    }

    /// Runs both until the transfer has ended. What of a packet's arrival becomes is `keep`'s to say.
    fn finish_with(&mut self, mut keep: impl FnMut(&mut [u8]) -> bool) -> Status {
        loop {
            let (now, mut came) = (self.now, false);
            for end in &mut self.ends {
                while end.receive(|| now, &mut keep) {
                    came = true;
                }
                end.advance(now);
            }
            if let Some(Finished { token, status, issue_delay, total_delay }) = self.ends[0].poll() {
                assert!(token == 5 && issue_delay <= total_delay);
                return status;
            }
            /* pacing: the test's clock; otherwise somebody waits for a packet */
            if let Some(next) = self.ends[0].executor.next_time() {
                self.now = self.now.max(next);
            } else if !came {
                self.ends.iter_mut().for_each(Process::prepare_to_sleep);
                let fds = self.ends.each_ref().map(|end| end.as_raw_fd());
                assert!(sockopt::wait(&fds, libc::POLLIN, PATIENCE), "a packet is on its way");
            }
        }
    }

    fn run(&mut self, op: OneRmaOp, key: &RegionKey, len: u64) -> Status {
        self.submit(op, key, len);
        self.finish_with(|_| true)
    }

    /// Waits for a packet at an end, and takes it from there.
    fn take(&mut self, end: usize, keep: impl FnOnce(&mut [u8]) -> bool) {
        let (now, here) = (self.now, &mut self.ends[end]);
        here.prepare_to_sleep();
        assert!(here.received.any() || sockopt::wait(&[here.as_raw_fd()], libc::POLLIN, PATIENCE));
        assert!(here.receive(|| now, keep));
    }
}

/// A READ and a WRITE of so many bytes move these and no others.
fn read_and_write(len: usize, pair: impl Fn() -> Pair) {
    let mut reader = pair();
    assert_eq!(reader.run(OneRmaOp::Read, &KEY, len as u64), Status::Ok);
    let here = reader.bytes(0);
    assert!(here[128..128 + len].iter().all(|byte| *byte == 0x22));
    assert!(here[..128].iter().chain(&here[128 + len..]).all(|byte| *byte == 0x11));

    let mut writer = pair();
    assert_eq!(writer.run(OneRmaOp::Write, &KEY, len as u64), Status::Ok);
    let there = writer.bytes(1);
    assert!(there[64..64 + len].iter().all(|byte| *byte == 0x11));
    assert!(there[..64].iter().chain(&there[64 + len..]).all(|byte| *byte == 0x22));
}

#[test]
fn data_of_any_length_is_read_and_written() {
    for len in [1, 64, 4096, 50_001] {
        read_and_write(len, || Pair::new(0));
        read_and_write(len, || Pair::of([open_on_the_wire(7), open_on_the_wire(8)]));
        /* who takes no session is sent datagrams, and sends by memory itself */
        read_and_write(len, || Pair::of([open(7, 0), open_on_the_wire(8)]));
    }
}

/// Packets of an end that went through memory, and that came so.
fn through_memory(end: &Process) -> [u64; 2] {
    let [.., sent, came] = end.port_counts();
    [sent, came]
}

/// More slots than a portal has: portals complete beside each other.
#[test]
fn a_process_has_as_many_portals_as_its_slots_take() {
    let of = |slots| {
        let options = ProcessOptions { slots, pid: 7, retries: 0, ..ProcessOptions::default() };
        open_as(&options, &Settings::default())
    };
    let rooms = [1, 64, 65, 130, 256].map(|slots| of(slots).portals.len());
    assert_eq!(rooms, [1, 1, 2, 3, 4]);
    let mut pair = Pair::of([of(130), open(8, 0)]);
    /* the window is of 32 commands at most: what is more waits for it */
    for _ in 0..3 {
        assert_eq!(pair.run(OneRmaOp::Read, &KEY, 60_000), Status::Ok);
    }
    assert_eq!(pair.ends[0].executor.in_flight(), 0);
}

/// READs until either end has taken the other's session: the wire has the packets before.
fn meet(pair: &mut Pair) {
    for _ in 0..1000 {
        assert_eq!(pair.run(OneRmaOp::Read, &KEY, 64), Status::Ok);
        if pair.ends.iter().all(|end| through_memory(end)[0] > 0) {
            return;
        }
    }
    panic!("all goes by the wire");
}

#[test]
fn cards_of_one_host_use_memory() {
    let mut pair = Pair::new(0);
    meet(&mut pair);
    let before = pair.ends.each_ref().map(through_memory);
    assert_eq!(pair.run(OneRmaOp::Read, &KEY, 50_000), Status::Ok);
    let after = pair.ends.each_ref().map(through_memory);
    assert_eq!([after[0], after[1]], [[after[1][1], after[1][0]], after[1]], "none is lost");
    let more = |end: usize| after[end][0] - before[end][0];
    assert_eq!([more(0), more(1)], [13, 13], "a request and an answer for each 4 KiB");

    /* the next process at that address is found, too: the old one's session is over */
    let before = addr(pair.ends[1].local.ipv4().expect("an IPv4 address"));
    let [initiator, target] = pair.ends;
    drop(target);
    let next = Process::open(&before, &ProcessOptions::default(), &Settings::default());
    let mut pair = Pair::of([initiator, next.expect("its own address")]);
    meet(&mut pair);
    assert_eq!(pair.run(OneRmaOp::Write, &KEY, 4096), Status::Ok);
}

/// Sessions are kept, also of cards that have one place among those that are found without a search.
#[test]
fn many_cards_have_one_session_each() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").expect("this process's").count();
    let [a, b, c, _] = open(8, 0).local.ipv4().expect("an IPv4 address");
    let target = |low| {
        let home = addr([a, b, c, low]);
        Process::open(&home, &ProcessOptions::default(), &Settings::default()).expect("its own address")
    };
    let mut first = Pair::of([open(7, 0), target(131)]);
    meet(&mut first);
    let [initiator, other] = first.ends;
    let mut second = Pair::of([initiator, target(195)]);
    meet(&mut second);
    let had = descriptors();
    let mut ends = [second.ends, [target(140), other]];
    for _ in 0..20 {
        /* the initiator goes from one target to the other */
        let [[initiator, near], [spare, far]] = ends;
        let mut pair = Pair::of([initiator, far]);
        assert_eq!(pair.run(OneRmaOp::Read, &KEY, 64), Status::Ok);
        let [initiator, far] = pair.ends;
        ends = [[initiator, far], [spare, near]];
    }
    assert!(descriptors() <= had + 8, "{} descriptors, {had} before", descriptors());
}

/// Somebody has the name of a card, and takes no session: the wire has the packets.
#[test]
fn a_name_whose_holder_does_not_answer_is_of_no_use() {
    let home = addr(open(8, 0).local.ipv4().expect("an IPv4 address"));
    let name = format!("starverbs/1rma/{}/{PORT}", home.ip());
    let holder = crate::peer::socket::listen(&crate::registry::abstract_address(&name)).expect("the name");
    let target = Process::open(&home, &ProcessOptions::default(), &Settings::default());
    let mut pair = Pair::of([open(7, 0), target.expect("its own address")]);
    for _ in 0..100 {
        assert_eq!(pair.run(OneRmaOp::Read, &KEY, 64), Status::Ok);
    }
    assert_eq!(through_memory(&pair.ends[0])[0], 0);
    drop(holder);
}

/// Another process of the user writes what no card does: a turn passes over some of it, and goes on.
#[test]
fn what_no_card_sends_takes_so_much_of_a_turn() {
    use crate::peer::{NO_BLOCK, Peers, socket};
    const MESSAGES: u64 = 1000;
    let mut pair = Pair::new(0);
    let stranger = Peers::new(PORT).expect("sessions");
    let name = format!("starverbs/1rma/{}/{PORT}", addr(pair.ends[1].local.ipv4().expect("IPv4")).ip());
    let address = crate::registry::abstract_address(&name);
    let session = stranger.connect(&address, NO_BLOCK, socket::user()).expect("the card's name");
    for _ in 0..MESSAGES {
        // SAFETY: there are no pieces.
        assert_eq!(unsafe { stranger.send_frames(session, b"nothing", &[]) }, Some(true));
    }
    let (mut most, mut before) = (0, 0);
    for _ in 0..10_000 {
        pair.ends[1].turn(|| 1);
        let [_, foreign, ..] = pair.ends[1].port_counts();
        (most, before) = (most.max(foreign - before), foreign);
        if foreign == MESSAGES {
            break;
        }
    }
    assert_eq!(before, MESSAGES);
    assert!(most <= 64, "{most} in one turn");
    assert_eq!(pair.run(OneRmaOp::Read, &KEY, 4096), Status::Ok);
}

#[test]
fn what_finds_no_room_in_memory_is_the_wires() {
    const SENT: u64 = 300;
    let mut pair = Pair::new(0);
    meet(&mut pair);
    let [before, _] = through_memory(&pair.ends[0]);
    let [_, received] = through_memory(&pair.ends[1]);
    let (to, port) = (pair.to_target(), &mut pair.ends[0].world.port);
    for _ in 0..SENT {
        port.packet(&to, 4000).fill(0x11);
    }
    port.flush();
    let sent = through_memory(&pair.ends[0])[0] - before;
    assert!(sent > 0 && sent < SENT, "{sent} through memory");
    for _ in 0..SENT {
        pair.take(1, |_| true);
    }
    let through = through_memory(&pair.ends[1])[1] - received;
    assert_eq!((pair.ends[1].counts().malformed, through), (SENT, sent));
}

#[test]
fn cards_of_an_ipv6_address_read_and_write() {
    if UdpSocket::bind((Ipv6Addr::LOCALHOST, 0)).is_err() {
        return eprintln!("skipped: this host has no IPv6 on loopback");
    }
    let home = HostAddr { gid: Gid(Ipv6Addr::LOCALHOST.octets()), ..addr([127, 0, 0, 1]) };
    let open = |pid| {
        let options = ProcessOptions { pid, retries: 0, ..ProcessOptions::default() };
        Process::open(&home, &options, &Settings::default()).expect("a number that nobody has")
    };
    for len in [1, 4096, 50_001] {
        read_and_write(len, || Pair::of([open(7), open(8)]));
    }
}

/// A round trip that is set has the targets that are not set follow it.
#[test]
fn constants_that_are_set_take_the_place_of_the_cards() {
    let usual = ProcessOptions::default().congestion;
    assert_eq!(as_set(usual, &Settings::default()), usual);
    let with = |text| Settings {
        onerma_window: starverbs_settings::OneRmaWindow::parse(text).expect("constants"),
        ..Settings::default()
    };
    let set = as_set(usual, &with("beta=0.5,initial=2,rtt=50us,local_target=7us"));
    let wanted = CongestionSettings { beta: 0.5, initial: 2.0, rtt: 50_000, local_target: 7_000, ..usual };
    assert_eq!(set, CongestionSettings { remote_target: 55_000, ..wanted });
    for (text, [least, initial, most]) in
        [("most=4", [0.01, 4.0, 4.0]), ("least=64", [64.0; 3]), ("most=0.005", [0.005; 3])]
    {
        let set = as_set(usual, &with(text));
        assert_eq!([set.least, set.initial, set.most], [least, initial, most], "{text}");
    }
    let mut pair = Pair::of([8, 7].map(|pid| {
        let options = ProcessOptions { pid, ..ProcessOptions::default() };
        open_as(&options, &with("most=1"))
    }));
    pair.submit(OneRmaOp::Read, &KEY, 4096);
    assert_eq!(pair.finish_with(|_| true), Status::Ok);
}

#[test]
fn nothing_of_the_data_is_on_the_wire() {
    let mut pair = Pair::new(0);
    for op in [OneRmaOp::Write, OneRmaOp::Read, OneRmaOp::Rekey] {
        pair.submit(op, &KEY, if op == OneRmaOp::Rekey { 16 } else { 4096 });
        let mut packets = 0;
        let status = pair.finish_with(|packet| {
            packets += 1;
            !packet.windows(8).any(|window| window == [0x11; 8] || window == [0x22; 8])
        });
        assert_eq!((status, packets), (Status::Ok, if op == OneRmaOp::Read { 2 } else { 4 }));
    }
}

#[test]
fn a_rekey_ends_the_old_key_and_begins_the_new() {
    let mut pair = Pair::new(0);
    assert_eq!(pair.run(OneRmaOp::Rekey, &KEY, 16), Status::Ok);
    assert_eq!(pair.run(OneRmaOp::Read, &KEY, 64), Status::RemoteAuthenticationFailure);
    let next = RegionKey([0x11; 16]);
    assert_eq!(pair.run(OneRmaOp::Read, &next, 64), Status::Ok);
    let region = pair.regions[1];
    pair.ends[1].rekey_region(region, KEY).expect("it is open");
    assert_eq!(pair.run(OneRmaOp::Read, &next, 64), Status::RemoteAuthenticationFailure);
    pair.ends[1].close_region(region).expect("it is open");
    assert_eq!(pair.run(OneRmaOp::Read, &KEY, 64), Status::RemoteAuthenticationFailure);
    assert_eq!(pair.ends[1].counts().rekeys, 1);
}

#[test]
fn a_wrong_key_moves_nothing() {
    let mut pair = Pair::new(3);
    for op in [OneRmaOp::Read, OneRmaOp::Write, OneRmaOp::Rekey] {
        let status = pair.run(op, &RegionKey([0x4c; 16]), 16);
        assert_eq!(status, Status::RemoteAuthenticationFailure);
    }
    assert_eq!((pair.bytes(0), pair.bytes(1)), (vec![0x11; LEN], vec![0x22; LEN]));
    assert_eq!(pair.ends[1].counts().auth_failures, 3);
}

#[test]
fn a_transfer_beyond_a_region_fails_at_either_end() {
    let mut pair = Pair::new(0);
    let beyond = LEN as u64 - 127;
    assert_eq!(pair.run(OneRmaOp::Read, &KEY, beyond), Status::LocalAccess);
    let small = RegionId(pair.regions[1].0 + 1);
    // SAFETY: as of the pair's regions.
    let opened = unsafe { pair.ends[1].open_region(pair.memory[1].as_ptr() as *mut u8, 80, ALL, KEY) };
    assert_eq!(opened, Ok(small));
    pair.regions[1] = small;
    assert_eq!(pair.run(OneRmaOp::Write, &KEY, 17), Status::RemoteAccess);
    assert_eq!(pair.run(OneRmaOp::Write, &KEY, 16), Status::Ok);
}

#[test]
fn a_lost_packet_is_a_timeout_and_another_try_is_not() {
    for op in [OneRmaOp::Read, OneRmaOp::Write] {
        let mut pair = Pair::new(0);
        pair.submit(op, &KEY, 64);
        pair.take(1, |_| false);
        pair.now = pair.ends[0].card.next_deadline().expect("a command in service");
        assert_eq!(pair.finish_with(|_| panic!("nothing was sent")), Status::Timeout);
        assert_eq!((pair.ends[0].counts().timeouts, pair.ends[0].counts().refused), (1, 0));

        let mut pair = Pair::new(1);
        pair.submit(op, &KEY, 64);
        pair.take(1, |_| false);
        pair.now = pair.ends[0].card.next_deadline().expect("a command in service");
        assert_eq!(pair.finish_with(|_| true), Status::Ok);
    }
}

#[test]
fn tampered_packets_are_dropped_at_either_end() {
    /* a READ's answer: its header, its data, its tag */
    for at in [20, 30, 90] {
        let mut pair = Pair::new(0);
        pair.submit(OneRmaOp::Read, &KEY, 64);
        pair.take(1, |_| true);
        pair.ends[1].advance(pair.now);
        pair.take(0, |packet| {
            packet[at] ^= 1;
            true
        });
        let CardCounts { forged, late, malformed, completed, .. } = *pair.ends[0].counts();
        assert_eq!((forged + late + malformed, completed), (1, 0), "byte {at}");
        assert_eq!(pair.bytes(0), [0x11; LEN]);
        pair.now = pair.ends[0].card.next_deadline().expect("a command in service");
        assert_eq!(pair.finish_with(|_| true), Status::Timeout);
    }
    /* a WRITE's data */
    let mut pair = Pair::new(0);
    pair.submit(OneRmaOp::Write, &KEY, 64);
    pair.take(1, |_| true);
    pair.ends[1].advance(pair.now);
    pair.take(0, |_| true);
    pair.ends[0].advance(pair.now);
    pair.take(1, |packet| {
        packet[40] ^= 1;
        true
    });
    assert_eq!((pair.ends[1].counts().forged, pair.bytes(1)), (1, vec![0x22; LEN]));
}

#[test]
fn cards_that_follow_one_another_repeat_no_vector() {
    let mut first = open(7, 0);
    let home = addr(first.local.ipv4().expect("an IPv4 address"));
    let options = ProcessOptions::default();
    let target = open_on_the_wire(8);
    let mut seen = HashSet::new();
    for _ in 0..50 {
        let mut process = first;
        // SAFETY: nobody answers, so that nothing of it is touched.
        let local = unsafe { process.open_region(std::ptr::null_mut(), LEN, ALL, KEY) }.expect("a place");
        for token in 0..20 {
            let (op, class, len) = (OneRmaOp::Read, Class::High, 1);
            let (remote, region, offset, local_offset) = (target.local, local, 0, 0);
            let key = process.own_key(&KEY, op);
            let one = Transfer { op, class, len, remote, region, offset, local, local_offset, key, token };
            process.submit(one).expect("a good transfer");
        }
        let mut now = 1;
        process.advance(now);
        while let Some(next) = process.executor.next_time() {
            now = now.max(next);
            process.advance(now);
        }
        drop(process);
        first = Process::open(&home, &options, &Settings::default()).expect("its own address");
        assert_eq!(first.world.port.card(), 0);
    }
    let (mut port, mut received) = (target.world.port, target.received);
    let mut packets = 0;
    while let Some((_, packet)) = received.next(&mut port) {
        let (head, _) = OneRmaHeader::parse(packet).expect("a request");
        assert!(seen.insert(head.prefix.iv.bytes()), "an initialisation vector repeats");
        packets += 1;
    }
    assert!(packets > 50, "more than one of each card: {packets}");
}

#[test]
fn processes_of_one_address_have_a_card_each() {
    let mut cards = vec![open(7, 0)];
    let home = addr(cards[0].local.ipv4().expect("an IPv4 address"));
    let options = ProcessOptions { pid: 7, ..ProcessOptions::default() };
    for _ in 1..CARDS {
        cards.push(Process::open(&home, &options, &Settings::default()).expect("a number that nobody has"));
    }
    let one_more = Process::open(&home, &options, &Settings::default());
    assert!(matches!(one_more, Err(BackendError::OnermaAddress { source, .. })
        if source.kind() == std::io::ErrorKind::AddrInUse));

    /* each reads the memory of the next one, with one key and one PID, by nothing but the region's name */
    let memory: Vec<_> = (0..CARDS)
        .map(|card| {
            [const { AtomicU64::new(0) }; 2].map(|word| {
                word.store(card.into(), Ordering::Relaxed);
                word
            })
        })
        .collect();
    let regions: Vec<_> = cards
        .iter_mut()
        .zip(&memory)
        .map(|(card, words)| {
            // SAFETY: the memory lives as long as the cards, as words that anybody may write.
            unsafe { card.open_region(words.as_ptr() as *mut u8, 16, ALL, KEY) }.expect("a place")
        })
        .collect();
    let count = usize::from(CARDS);
    for (at, card) in cards.iter_mut().enumerate() {
        let (op, class, len, remote) = (OneRmaOp::Read, Class::High, 8, home.gid);
        let (region, local, key) = (regions[(at + 1) % count], regions[at], card.own_key(&KEY, op));
        assert_eq!(usize::from(local.card()), at);
        let (offset, local_offset, token) = (0, 8, 0);
        let one = Transfer { op, class, len, remote, region, offset, local, local_offset, key, token };
        card.submit(one).expect("a good transfer");
    }
    let begun = Instant::now();
    let mut ends = vec![];
    while ends.len() < count && begun.elapsed() < PATIENCE {
        for card in &mut cards {
            card.turn(|| 1);
            ends.extend(card.poll());
        }
    }
    assert!(ends.len() == count && ends.iter().all(|end| end.status == Status::Ok), "{ends:?}");
    for (at, words) in memory.iter().enumerate() {
        let read = words[1].load(Ordering::Relaxed);
        assert_eq!(read, ((at + 1) % count) as u64, "card {at}");
    }
}

#[test]
fn numbers_that_run_out_are_renewed() {
    let mut pair = Pair::new(0);
    let process = &mut pair.ends[0];
    process.card.renew_counters(SealCounters::of_range(0..0));
    process.numbered = 0;
    assert_eq!(pair.run(OneRmaOp::Read, &KEY, 64), Status::Ok);
    /* those of the future were given away: none is left */
    let process = &mut pair.ends[0];
    process.card.renew_counters(SealCounters::of_range(0..0));
    process.numbered = u64::MAX;
    assert_eq!(pair.run(OneRmaOp::Read, &KEY, 64), Status::Exhausted);
}

#[test]
fn strangers_datagrams_are_counted_and_harm_nobody() {
    let mut pair = Pair::of([open(7, 0), open_on_the_wire(8)]);
    let to = (Ipv4Addr::from(pair.ends[1].local.ipv4().expect("an IPv4 address")), PORT);
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("a port");
    stranger.send_to(&[0; 9000], to).expect("a datagram");
    assert_eq!(pair.run(OneRmaOp::Read, &KEY, 4096), Status::Ok);
    assert_eq!(pair.ends[1].port_counts()[..2], [0, 1]);
    /* from a card's port: too short, too long, empty */
    for len in [0, 10, MAX_PACKET + 100] {
        let (to, port) = (pair.to_target(), &mut pair.ends[0].world.port);
        port.packet(&to, len).fill(0x11);
        port.flush();
        pair.take(1, |_| true);
    }
    assert_eq!(pair.ends[1].counts().malformed, 3);
    assert_eq!(pair.run(OneRmaOp::Write, &KEY, 4096), Status::Ok);
}

/// Settings of a program's faults and capture are the card's, too: all arrives, and the file has what left.
#[test]
fn faults_and_captures_are_as_they_are_for_others() {
    let path = std::env::temp_dir().join(format!("starverbs-1rma-tap-{}.pcap", std::process::id()));
    let fault = "loss=5%,dup=5%,reorder=5%,delay=50us,jitter=50us,seed=7";
    let fault = FaultSpec::parse(fault).expect("a fault");
    let settings = Settings { fault, pcap: Some(path.clone()), ..Settings::default() };
    let mut pair = Pair::of([open_with(7, 100, &settings), open_with(8, 0, &settings)]);
    let begun = Instant::now();
    let now = || begun.elapsed().as_nanos() as Nanos + 1;
    let copies = |pair: &Pair| {
        let seen = pair.ends.iter().map(|end| end.counts().copies + end.counts().late);
        seen.sum::<u64>()
    };
    /* a copy that comes when its transfer is over is nobody's */
    let mut ops = [OneRmaOp::Write, OneRmaOp::Read].into_iter().cycle();
    let mut done = 0;
    while done < 2 || copies(&pair) == 0 {
        let Some(op) = ops.next() else { break };
        pair.submit(op, &KEY, 50_000);
        done += 1;
        let ended = loop {
            pair.ends.iter_mut().for_each(|end| _ = end.turn(now));
            assert!(begun.elapsed() < PATIENCE, "{op:?} has no end");
            if let Some(ended) = pair.ends[0].poll() {
                break ended;
            }
        };
        assert_eq!(ended.status, Status::Ok);
    }
    assert!(pair.bytes(1)[64..50_064].iter().all(|byte| *byte == 0x11));
    assert_eq!(pair.bytes(0)[128..50_128], pair.bytes(1)[64..50_064]);
    drop(pair);
    let captured = std::fs::metadata(&path).expect("a capture").len();
    std::fs::remove_file(&path).expect("a capture");
    assert!(captured > 4 * 50_000, "both directions, at both ends: {captured}");
}

#[test]
fn a_bit_that_a_fault_changes_in_a_request_makes_it_one_of_nobody() {
    let fault = FaultSpec::parse("corrupt=100%,seed=9").expect("a fault");
    let settings = Settings { fault, ..Settings::default() };
    let mut pair = Pair::of([open_with(7, 0, &settings), open(8, 0)]);
    pair.submit(OneRmaOp::Write, &KEY, 64);
    pair.take(1, |_| true);
    let counts = *pair.ends[1].counts();
    assert_eq!(counts.auth_failures + counts.malformed, 1, "{counts:?}");
}

/// Packets that go out together come in joined; a turn that leaves some of them says that it goes on at once.
#[test]
fn what_a_turn_leaves_of_joined_packets_is_not_slept_over() {
    let mut pair = Pair::new(0);
    let (to, port) = (pair.to_target(), &mut pair.ends[0].world.port);
    /* shorter ones do not join the first */
    for len in [20; 5].into_iter().chain([10; RECEIVED]) {
        port.packet(&to, len).fill(0x11);
    }
    port.flush();
    let target = &mut pair.ends[1];
    target.prepare_to_sleep();
    assert!(sockopt::wait(&[target.as_raw_fd()], libc::POLLIN, PATIENCE));
    assert_eq!(target.turn(|| 1), RECEIVED);
    assert!(target.received.any(), "the socket has nothing more, but these are there");
    assert_eq!(target.next_time(), Some(0));
    assert_eq!((target.turn(|| 1), target.turn(|| 1)), (5, 0));
    assert_eq!((target.counts().malformed, target.next_time()), (RECEIVED as u64 + 5, None));
}

#[path = "process_limits_tests.rs"]
mod limits;
