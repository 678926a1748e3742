//! How many packets a message takes with StaR, and with RC: `cargo nextest run -p starverbs-sim star_packets
//! --success-output=final` prints them.

use std::cell::RefCell;
use std::rc::Rc;

use starverbs_core::qp::RecvSource;
use starverbs_core::qpc::Policy;
use starverbs_core::{
    Access, ContextCache, Mtu, NicConfig, QpType, Qpn, Seg, SendFlags, SendOp, SendWqe, Sge, WcStatus,
};
use starverbs_sim::{Faults, Net, Recv, Send, Setup, SimCq, SimRq, SimSq, StarCard, StarFrame};
use starverbs_star::control::Preference;
use starverbs_star::form::Form;
use starverbs_star::packed::Records;
use starverbs_star::wire::{CRC_LEN, CardHalf, Ptype, StarPacket};

const SERVER: usize = 0;
const CLIENT: usize = 1;
const MESSAGE: u32 = 32;
/// Requests of a call: the paper's RPC workload (V-A).
const REQUESTS: u32 = 3;
const CALLS: u64 = 100;
/// Bytes of a message of several packets.
const LONG: u32 = 3_500;

/// One connection; with StaR the server keeps nothing.
struct Pair {
    net: Net,
    qpns: [Qpn; 2],
    sqs: [SimSq; 2],
    rqs: [SimRq; 2],
    cqs: [SimCq; 2],
    memory: [Sge; 2],
}

/// A queue pair of a host.
fn end(net: &mut Net, at: usize, sq: &SimSq, rq: &SimRq, cq: &SimCq) -> Qpn {
    let host = &mut net.hosts[at];
    let qpn = host.qp(QpType::Rc, sq, RecvSource::Own(rq.clone()), [cq; 2], false);
    host.preference(qpn, if at == SERVER { Preference::Stateless } else { Preference::Stateful });
    qpn
}

fn connect(net: &mut Net, qpns: [Qpn; 2], mtus: [Mtu; 2]) {
    let now = net.now();
    for at in [SERVER, CLIENT] {
        let (dgid, setup) = (net.hosts[1 - at].gid, Setup { mtu: mtus[at], ..Setup::default() });
        net.hosts[at].to_init(qpns[at], false, &setup, now);
        net.hosts[at].to_rts(qpns[at], QpType::Rc, dgid, qpns[1 - at], &setup, now);
    }
}

impl Pair {
    fn new(star: Option<Form>) -> Pair {
        Pair::on(Faults::default(), star)
    }

    fn on(wire: Faults, star: Option<Form>) -> Pair {
        Pair::of(wire, star, None, [Mtu::M1024; 2])
    }

    /// With so many contexts at the client's card, and these path MTUs.
    fn of(wire: Faults, star: Option<Form>, contexts: Option<ContextCache>, mtus: [Mtu; 2]) -> Pair {
        let mut net = Net::new(2, NicConfig::default(), wire, 7);
        net.replace_card(CLIENT, NicConfig { contexts, ..NicConfig::default() });
        let cqs = [SimCq::new(64), SimCq::new(64)];
        let (sqs, rqs) = ([SimSq::new(32), SimSq::new(32)], [SimRq::new(32, 1), SimRq::new(32, 1)]);
        let mut memory = [Sge::default(); 2];
        let qpns = [SERVER, CLIENT].map(|at| {
            if let Some(form) = star {
                net.open_star(at, StarCard { threshold: 120, key: None, boot: 70 + at as u64, form });
            }
            let host = &mut net.hosts[at];
            memory[at] = host.region_in(
                host.pd,
                65_536,
                Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            );
            end(&mut net, at, &sqs[at], &rqs[at], &cqs[at])
        });
        connect(&mut net, qpns, mtus);
        let mut pair = Pair { net, qpns, sqs, rqs, cqs, memory };
        (0..2 * REQUESTS).for_each(|_| pair.post_recv(SERVER));
        pair.net.doorbell(SERVER, pair.qpns[SERVER]);
        pair.net.run_for(100_000_000);
        pair
    }

    /// Another connection beside its own: both.
    fn two(&mut self) -> [([Qpn; 2], [SimSq; 2], [SimRq; 2]); 2] {
        let (sqs, rqs) = ([SimSq::new(32), SimSq::new(32)], [SimRq::new(32, 1), SimRq::new(32, 1)]);
        let qpns = [SERVER, CLIENT].map(|at| end(&mut self.net, at, &sqs[at], &rqs[at], &self.cqs[at]));
        connect(&mut self.net, qpns, [Mtu::M1024; 2]);
        self.net.run_for(100_000_000);
        [(self.qpns, self.sqs.clone(), self.rqs.clone()), (qpns, sqs, rqs)]
    }

    fn post_recv(&mut self, at: usize) {
        self.rqs[at].post(Recv { wr_id: 0, sges: vec![Sge { len: 4096, ..self.memory[at] }] }).unwrap();
        if self.rqs[at].was_starved() {
            self.net.doorbell(at, self.qpns[at]);
        }
    }

    fn send(&mut self, at: usize, op: SendOp, len: u32, inline: bool) {
        let mut flags = SendFlags::SIGNALED;
        flags.set(SendFlags::INLINE, inline);
        let to = self.memory[1 - at];
        let (remote_addr, rkey, num_sge) = (to.addr, to.lkey, u16::from(!inline));
        let wqe = SendWqe { op, flags, remote_addr, rkey, length: len, num_sge, ..SendWqe::default() };
        let from = Sge { len, ..self.memory[at] };
        let inline = inline.then_some(Seg { addr: from.addr, len });
        let sges = if inline.is_some() { vec![] } else { vec![from] };
        self.sqs[at].post(Send { wqe, sges, inline }).unwrap();
    }

    /// Waits for so many completions.
    fn wait(&mut self, at: usize, mut count: u32) {
        while count > 0 {
            while count > 0 && self.cqs[at].poll().is_some() {
                count -= 1;
            }
            assert!(count == 0 || self.net.step(), "nothing happens any more");
        }
    }

    /// Three requests, and one message back.
    fn call(&mut self) {
        self.post_recv(CLIENT);
        (0..REQUESTS).for_each(|_| self.send(CLIENT, SendOp::Send, MESSAGE, true));
        self.net.doorbell(CLIENT, self.qpns[CLIENT]);
        self.wait(SERVER, REQUESTS);
        (0..REQUESTS).for_each(|_| self.post_recv(SERVER));
        self.send(SERVER, SendOp::Send, MESSAGE, true);
        self.net.doorbell(SERVER, self.qpns[SERVER]);
        /* its own requests, and the answer */
        self.wait(CLIENT, REQUESTS + 1);
        self.wait(SERVER, 1);
    }

    /// One message of several packets, to the server.
    fn long(&mut self) {
        self.send(CLIENT, SendOp::Send, LONG, false);
        self.net.doorbell(CLIENT, self.qpns[CLIENT]);
        self.wait(SERVER, 1);
        self.post_recv(SERVER);
        self.wait(CLIENT, 1);
    }

    /// One message to the client.
    fn down(&mut self, len: u32, inline: bool) {
        self.post_recv(CLIENT);
        self.down_again(len, inline);
    }

    /// One message to the client, from memory, for which it has so much room.
    fn down_to(&mut self, len: u32, room: u32) {
        self.rqs[CLIENT]
            .post(Recv { wr_id: 0, sges: vec![Sge { len: room, ..self.memory[CLIENT] }] })
            .unwrap();
        self.down_again(len, false);
    }

    /// One message to the client, which has a receive for it.
    fn down_again(&mut self, len: u32, inline: bool) {
        self.send(SERVER, SendOp::Send, len, inline);
        self.net.doorbell(SERVER, self.qpns[SERVER]);
        self.wait(CLIENT, 1);
        self.wait(SERVER, 1);
    }

    /// What leaves of StaR from now on.
    fn read_wire(&mut self) -> Rc<RefCell<Vec<StarFrame>>> {
        let kept = Rc::<RefCell<Vec<StarFrame>>>::default();
        let seen = Rc::clone(&kept);
        self.net.forger = Some(Box::new(move |frame| {
            seen.borrow_mut().push(frame.clone());
            None
        }));
        kept
    }

    /// Packets that one of many takes, on average.
    fn packets_of(&mut self, mut what: impl FnMut(&mut Pair)) -> f64 {
        (0..10).for_each(|_| what(self));
        let before = self.net.tally.sent;
        (0..CALLS).for_each(|_| what(self));
        (self.net.tally.sent - before) as f64 / CALLS as f64
    }
}

/// PTYPE, as on the wire.
fn ptype(frame: &StarFrame) -> u8 {
    frame.bytes[0] >> 4
}

/// As in the paper, only its seven packets leave, from either half, whatever programs do.
#[test]
fn only_the_paper_s_packets_leave_as_in_the_paper() {
    let [packed, paper] = [Form::Packed, Form::Paper].map(|form| {
        let mut pair = Pair::new(Some(form));
        let frames = pair.read_wire();
        (0..10).for_each(|_| pair.call());
        pair.long();
        [(MESSAGE, true), (MESSAGE, false), (4096, false)]
            .iter()
            .for_each(|(len, inline)| pair.down(*len, *inline));
        for at in [SERVER, CLIENT] {
            for (op, len) in [(SendOp::Write, LONG), (SendOp::Read, LONG), (SendOp::FetchAdd, 8)] {
                (0..3).for_each(|_| pair.send(at, op, len, false));
                pair.net.doorbell(at, pair.qpns[at]);
                pair.wait(at, 3);
            }
        }
        let mut types: Vec<u8> = frames.borrow().iter().map(ptype).collect();
        types.sort_unstable();
        types.dedup();
        types
    });
    assert_eq!(paper, [1, 2, 3, 4, 5, 6, 7]);
    assert!(packed.iter().any(|ptype| *ptype > 7), "{packed:?}");
}

/// What the server posts for a call, three receives and an inline SEND, is one packet.
#[test]
fn three_receives_and_an_inline_send_are_one_packet() {
    let mut pair = Pair::new(Some(Form::Packed));
    (0..10).for_each(|_| pair.call());
    let frames = pair.read_wire();
    for n in 1..=10 {
        pair.call();
        let frames = frames.take();
        let from_sl: Vec<_> = frames
            .iter()
            .filter(|frame| [Ptype::Wqep, Ptype::Wqeps].iter().any(|of| *of as u8 == ptype(frame)))
            .collect();
        let [frame] = from_sl[..] else { panic!("call {n}: {} packets with WQEs", from_sl.len()) };
        let body = &frame.bytes[..frame.bytes.len() - CRC_LEN];
        let packet = StarPacket::parse(CardHalf::Stateful, body).expect("as it left");
        assert_eq!((packet.header.ptype, Records::new(packet.data).count()), (Ptype::Wqeps, 4), "call {n}");
    }
}

#[test]
fn a_call_of_the_rpc_workload() {
    let [rc, packed, paper] =
        [None, Some(Form::Packed), Some(Form::Paper)].map(|star| Pair::new(star).packets_of(Pair::call));
    println!("packets of a call: RC {rc}, StaR {packed}, as in the paper {paper}");
    assert!(rc <= 6.0, "{rc}");
    assert!(packed <= 7.0, "{packed}");
    assert!(paper <= 22.0, "{paper}");
}

/// Inline bytes up to the path MTU travel with the WQE: nobody fetches them.
#[test]
fn an_inline_message_of_the_stateless_end() {
    let [small, large] =
        [MESSAGE, 976].map(|len| Pair::new(Some(Form::Packed)).packets_of(|pair| pair.down(len, true)));
    println!("packets of an inline message of {MESSAGE} bytes: {small}, of 976: {large}");
    assert!(large <= 3.0 && small <= 3.0, "{small}, {large}");
}

/// So does what is short, from memory, but behind a fence: what is before it may fill that memory.
#[test]
fn a_short_message_of_the_stateless_end_takes_its_data_along() {
    let [short, long] =
        [512, 513].map(|len| Pair::new(Some(Form::Packed)).packets_of(|pair| pair.down(len, false)));
    assert_eq!([short, long], [3.0, 4.0]);
    let mut pair = Pair::new(Some(Form::Packed));
    let [source, there, behind, here] = [(CLIENT, 0), (CLIENT, 1), (CLIENT, 2), (SERVER, 0)]
        .map(|(at, page)| Sge { addr: pair.memory[at].addr + 4096 * page, len: 8, ..pair.memory[at] });
    let memory =
        |pair: &mut Pair, at: usize, sge: Sge| pair.net.hosts[at].env.memory.read(sge.addr, 8).to_vec();
    for n in 1..=50_u8 {
        pair.net.hosts[CLIENT].env.memory.write(source.addr, &[n; 8]);
        pair.rqs[CLIENT].post(Recv { wr_id: 0, sges: vec![there] }).unwrap();
        let read =
            SendWqe { op: SendOp::Read, remote_addr: source.addr, rkey: source.lkey, ..SendWqe::default() };
        let send = SendWqe { op: SendOp::Send, ..SendWqe::default() };
        let fenced = SendWqe { flags: SendFlags::FENCE, ..send };
        pair.rqs[CLIENT].post(Recv { wr_id: 0, sges: vec![behind] }).unwrap();
        for wqe in [read, fenced, send] {
            let flags = wqe.flags | SendFlags::SIGNALED;
            let wqe = SendWqe { flags, length: 8, num_sge: 1, ..wqe };
            pair.sqs[SERVER].post(Send { wqe, sges: vec![here], inline: None }).unwrap();
        }
        pair.net.doorbell(CLIENT, pair.qpns[CLIENT]);
        pair.net.doorbell(SERVER, pair.qpns[SERVER]);
        pair.wait(CLIENT, 2);
        pair.wait(SERVER, 3);
        assert_eq!([there, behind].map(|sge| memory(&mut pair, CLIENT, sge)), [[n; 8]; 2]);
    }
}

/// Up to 16 KiB follow the WQE: nobody asks for them, and they are there after one hop. More is asked for,
/// and so is what comes with another message.
#[test]
fn a_message_of_the_stateless_end_follows_its_wqe() {
    const ONE_WAY: u64 = 100_000;
    let mut pair = Pair::on(Faults { delay: ONE_WAY, ..Faults::default() }, Some(Form::Packed));
    let gets = |frames: &[StarFrame]| frames.iter().filter(|frame| ptype(frame) == Ptype::Gd as u8).count();
    (0..10).for_each(|_| pair.down(512, false));
    let frames = pair.read_wire();
    for (len, asked) in [(513, 0), (4096, 0), (16 << 10, 0), ((16 << 10) + 1, 17)] {
        let begun = pair.net.now();
        pair.down_to(len, 16 << 11);
        let took = pair.net.now() - begun;
        /* there, and its completion back */
        assert_eq!(took < 3 * ONE_WAY, asked == 0, "{len}: {took}");
        assert_eq!(gets(&frames.take()), asked, "{len}");
    }
    for len in [1000, 3000] {
        (0..2).for_each(|_| pair.post_recv(CLIENT));
        (0..2).for_each(|_| pair.send(SERVER, SendOp::Send, len, false));
        pair.net.doorbell(SERVER, pair.qpns[SERVER]);
        pair.wait(CLIENT, 2);
        pair.wait(SERVER, 2);
        assert!(gets(&frames.take()) >= 2, "two of {len}");
    }
}

/// Two that are posted while none is known there: the data of the first alone follows.
#[test]
fn data_follows_one_message_at_a_time() {
    let mut pair = Pair::on(Faults { delay: 100_000, ..Faults::default() }, Some(Form::Packed));
    let frames = pair.read_wire();
    for _ in 0..10 {
        for _ in 0..2 {
            pair.post_recv(CLIENT);
            pair.send(SERVER, SendOp::Send, 4096, false);
            pair.net.doorbell(SERVER, pair.qpns[SERVER]);
            pair.net.run_for(1);
        }
        pair.wait(CLIENT, 2);
        pair.wait(SERVER, 2);
        let frames = frames.take();
        let count = |kind| frames.iter().filter(|frame| ptype(frame) == kind as u8).count();
        assert_eq!([Ptype::Ed, Ptype::Gd].map(count), [4, 4]);
    }
}

/// So is what leaves while another connection of the card waits.
#[test]
fn a_message_beside_that_of_another_connection_is_asked_for() {
    let mut pair = Pair::on(Faults { delay: 100_000, ..Faults::default() }, Some(Form::Packed));
    let both = pair.two();
    let frames = pair.read_wire();
    for _ in 0..10 {
        for connection in &both {
            (pair.qpns, pair.sqs, pair.rqs) = connection.clone();
            pair.post_recv(CLIENT);
            pair.send(SERVER, SendOp::Send, 4096, false);
            pair.net.doorbell(SERVER, pair.qpns[SERVER]);
        }
        pair.wait(CLIENT, 2);
        pair.wait(SERVER, 2);
        let frames = frames.take();
        let count = |kind| frames.iter().filter(|frame| ptype(frame) == kind as u8).count();
        assert_eq!([Ptype::Ed, Ptype::Gd].map(count), [4, 4]);
    }
}

/// A card whose contexts are elsewhere keeps data with its WQE until the context is there; and an end with
/// the smaller path MTU takes it, too.
#[test]
fn data_that_follows_its_wqe_waits_for_the_context_and_fits_any_path_mtu() {
    let contexts = ContextCache { entries: 1, policy: Policy::NonBlocking, miss: 500, fetch: 500 };
    let smaller = [Mtu::M1024, Mtu::M256];
    for (contexts, mtus) in
        [(Some(contexts), [Mtu::M1024; 2]), (None, smaller), (None, [Mtu::M256, Mtu::M1024])]
    {
        let mut pair = Pair::of(Faults::default(), Some(Form::Packed), contexts, mtus);
        let both = pair.two();
        let frames = pair.read_wire();
        for n in 0..20 {
            (pair.qpns, pair.sqs, pair.rqs) = both[n % if contexts.is_some() { 2 } else { 1 }].clone();
            pair.down(4000, false);
            pair.net.run_for(10_000_000);
        }
        let frames = frames.take();
        let count = |kind| frames.iter().filter(|frame| ptype(frame) == kind as u8).count();
        let each = 4000_u32.div_ceil(mtus[SERVER].bytes()) as usize;
        assert_eq!([Ptype::Ed, Ptype::Gd].map(count), [20 * each, 0], "{contexts:?} {mtus:?}");
    }
}

/// What of it is lost is asked for; so is all of it where a receive is posted late.
#[test]
fn what_is_lost_behind_a_wqe_is_asked_for() {
    for loss in [0.0, 0.1] {
        let mut pair = Pair::on(Faults { loss, duplicate: loss, ..Faults::default() }, Some(Form::Packed));
        let (from, to) = (pair.memory[SERVER].addr, pair.memory[CLIENT].addr);
        for n in 0..300_u32 {
            let (len, late) = (513 + n * 37 % 9000, n % 3 == 0);
            let data: Vec<u8> = (0..len).map(|at| (at * 7 + n) as u8 ^ (at >> 8) as u8).collect();
            pair.net.hosts[SERVER].env.memory.write(from, &data);
            pair.net.hosts[CLIENT].env.memory.write(to, &vec![0; 10_000]);
            let recv = Recv { wr_id: 0, sges: vec![Sge { len: 10_000, ..pair.memory[CLIENT] }] };
            if !late {
                pair.rqs[CLIENT].post(recv.clone()).unwrap();
            }
            pair.send(SERVER, SendOp::Send, len, false);
            pair.net.doorbell(SERVER, pair.qpns[SERVER]);
            if late {
                pair.net.run_for(50_000);
                pair.rqs[CLIENT].post(recv).unwrap();
            }
            pair.wait(CLIENT, 1);
            let got = pair.net.hosts[CLIENT].env.memory.read(to, 10_000);
            let (there, rest) = got.split_at(len as usize);
            assert!(there == data && rest.iter().all(|byte| *byte == 0), "{loss} {n}");
            pair.wait(SERVER, 1);
        }
    }
}

/// Each arrives once and whole, also among such as share a packet, on a wire that loses one packet in ten.
#[test]
fn large_inline_messages_survive_loss() {
    for form in [Form::Packed, Form::Paper] {
        let mut pair = Pair::on(Faults { loss: 0.1, ..Faults::default() }, Some(form));
        for n in 0..200_u32 {
            let lens = [16 + n % 960, 513 + n % 464, 8];
            let to = pair.memory[CLIENT].addr;
            let from = pair.memory[SERVER].addr;
            let data = |at: u32| vec![(n + at) as u8 | 1; 1024];
            for (at, len) in (0..).zip(lens) {
                let sge = Sge { addr: to + 4096 * u64::from(at), len: 1024, ..pair.memory[CLIENT] };
                pair.net.hosts[CLIENT].env.memory.write(sge.addr, &[0; 1024]);
                pair.rqs[CLIENT].post(Recv { wr_id: 0, sges: vec![sge] }).unwrap();
                let inline = Seg { addr: from + 4096 * u64::from(at), len };
                pair.net.hosts[SERVER].env.memory.write(inline.addr, &data(at));
                let flags = SendFlags::SIGNALED | SendFlags::INLINE;
                let wqe = SendWqe { op: SendOp::Send, flags, length: len, ..SendWqe::default() };
                pair.sqs[SERVER].post(Send { wqe, sges: vec![], inline: Some(inline) }).unwrap();
            }
            pair.net.doorbell(CLIENT, pair.qpns[CLIENT]);
            pair.net.doorbell(SERVER, pair.qpns[SERVER]);
            pair.wait(CLIENT, 3);
            pair.wait(SERVER, 3);
            for (at, len) in (0..).zip(lens) {
                let got = pair.net.hosts[CLIENT].env.memory.read(to + 4096 * u64::from(at), 1024);
                let (there, rest) = got.split_at(len as usize);
                assert!(
                    there == &data(at)[..len as usize] && rest.iter().all(|byte| *byte == 0),
                    "{form:?} {n}"
                );
            }
        }
    }
}

/// One message at a time: nothing comes behind what is lost. On a path that lost packets of late it is asked
/// for again after two round trips, not after a timeout, by RC and by StaR.
#[test]
fn a_lost_tail_is_asked_for_after_two_round_trips() {
    const ONE_WAY: u64 = 100_000;
    let forms = [None, Some(Form::Packed)];
    for (star, op) in forms.iter().flat_map(|star| [(*star, SendOp::Send), (*star, SendOp::Write)]) {
        let mut pair = Pair::on(Faults { loss: 0.05, delay: ONE_WAY, ..Faults::default() }, star);
        let mut late = Vec::new();
        for _ in 0..600 {
            pair.send(CLIENT, op, MESSAGE, true);
            if op == SendOp::Send {
                pair.post_recv(SERVER);
            }
            pair.net.doorbell(SERVER, pair.qpns[SERVER]);
            pair.net.doorbell(CLIENT, pair.qpns[CLIENT]);
            let begun = pair.net.now();
            pair.wait(CLIENT, 1);
            if op == SendOp::Send {
                pair.wait(SERVER, 1);
            }
            let took = pair.net.now() - begun;
            if took > 3 * ONE_WAY {
                late.push(took);
            }
        }
        /* one way to it, two round trips of silence, and there and back; once it was known that there is
         * loss, and where that is not lost, too */
        let soon = late.iter().filter(|took| **took <= 7 * ONE_WAY).count();
        let what = format!("{star:?} {op:?}: {soon} of {} soon, {late:?}", late.len());
        println!("{what}");
        assert!(late.len() > 30 && soon * 10 >= late.len() * 7, "{what}");
    }
}

#[test]
fn a_message_of_several_packets() {
    let [rc, packed, paper] =
        [None, Some(Form::Packed), Some(Form::Paper)].map(|star| Pair::new(star).packets_of(Pair::long));
    println!("packets of a message of {LONG} bytes: RC {rc}, StaR {packed}, as in the paper {paper}");
    assert!(rc <= 5.0, "{rc}");
    assert!(packed <= 9.0, "{packed}");
    assert!(paper <= 12.0, "{paper}");
}

/// A post rings only if the card found no receive before: it has to look until it finds none.
#[test]
fn receives_one_by_one_are_not_left_lying() {
    for form in [Form::Packed, Form::Paper] {
        let mut pair = Pair::new(Some(form));
        for n in 0..2 * REQUESTS + 50 {
            if n >= 2 * REQUESTS {
                pair.post_recv(SERVER);
            }
            pair.send(CLIENT, SendOp::Send, MESSAGE, true);
            pair.net.doorbell(CLIENT, pair.qpns[CLIENT]);
            let begun = pair.net.now();
            pair.wait(SERVER, 1);
            pair.wait(CLIENT, 1);
            let took = pair.net.now() - begun;
            assert!(took < 10_000_000, "{form:?}: message {n} took {took} ns");
        }
    }
}

/// What StaR does not carry fails once it is the oldest, also if an answer has filled the port of SL's card
/// just then: nothing else may come that has the card look once more.
#[test]
fn what_is_refused_does_not_wait_for_room() {
    for form in [Form::Packed, Form::Paper] {
        let mut pair = Pair::new(Some(form));
        /* or it would look for receives once there is room */
        (2 * REQUESTS..32).for_each(|_| pair.post_recv(SERVER));
        pair.net.doorbell(SERVER, pair.qpns[SERVER]);
        pair.net.run_for(1_000_000);
        pair.net.hosts[SERVER].env.port = 1;
        pair.send(SERVER, SendOp::Read, LONG, false);
        pair.send(SERVER, SendOp::Rpc, 8, false);
        pair.net.doorbell(SERVER, pair.qpns[SERVER]);
        let mut ends = Vec::new();
        while ends.len() < 2 && pair.net.step() {
            while let Some((cqe, _)) = pair.cqs[SERVER].poll() {
                ends.push((cqe.status, pair.net.now()));
            }
        }
        let [(read, then), (refused, now), ..] = ends[..] else { panic!("{form:?}: {ends:?}") };
        assert_eq!((read, refused, now), (WcStatus::Success, WcStatus::LocQpOpErr, then), "{form:?}");
    }
}

/// SF uses the last receives while the port of SL's card is full, and SL's program posts more later: a card
/// that has looked for them since asks to be told.
#[test]
fn receives_are_looked_for_when_the_port_has_room_again() {
    for form in [Form::Packed, Form::Paper] {
        let mut pair = Pair::new(Some(form));
        pair.rqs[SERVER].was_starved();
        let room = std::mem::replace(&mut pair.net.hosts[SERVER].env.port, 0);
        (0..2 * REQUESTS).for_each(|_| pair.send(CLIENT, SendOp::Send, MESSAGE, true));
        pair.net.doorbell(CLIENT, pair.qpns[CLIENT]);
        pair.wait(SERVER, 2 * REQUESTS);
        pair.net.hosts[SERVER].env.port = room;
        pair.net.run_for(10_000_000);
        assert!(pair.rqs[SERVER].was_starved(), "{form:?}");
    }
}
