//! What a stateless end says to its peer, message by message: who answers too often, too late or not at all.

use starverbs_core::env::{RecvQueue, SendQueue};
use starverbs_core::mr::Rule;
use starverbs_core::{
    Access, Av, Gid, Mtu, Nanos, NicConfig, PdId, Psn, SendOp, SendWqe, WcOpcode, WcStatus,
};
use starverbs_sim::{Faults, Net, Recv, Send, SimCq, SimEnv, SimRq, SimSq};
use starverbs_star::channel::FIRST_TIMEOUT;
use starverbs_star::control::{Control, MAX_CONTROL, Setup, Sum};
use starverbs_star::library::{Patience, SlInit, SlQp, SlState};
use starverbs_star::message::CqeMsg;
use starverbs_star::registry::MAX_RULES;
use starverbs_star::ring::{CQE_SLOT, REPLAY_SLOT, Stamp};
use starverbs_star::stateless::Peer;
use starverbs_star::wire::{Head, Packet, Prefix, Queue, Side};

const SL_QPN: u32 = 0x11;
const SF_QPN: u32 = 0x22;
const EPOCH: u32 = 0x0007_0001;
const PD: PdId = PdId(3);
const SF: Gid = Gid::from_ipv4([10, 0, 0, 9]);
const DEPTH: u32 = 8;
/// Longer than it waits for anything, ns.
const LONG: Nanos = 100_000_000_000;

/// A stateless end, and what its peer says to it.
struct Talk {
    net: Net,
    sl: SlQp<SimEnv>,
    now: Nanos,
    /// Messages that the peer has said
    spoken: u32,
    sq: SimSq,
    rq: SimRq,
    cq: SimCq,
}

fn rule(key: u32) -> Rule {
    Rule { key, pd: PD, qpn: 0, addr: 4096, len: 64, iova: 4096, access: Access::REMOTE_READ }
}

impl Talk {
    /// One that has begun, with these rules: said by others before, or not.
    fn new(rules: &[Rule], known: bool) -> Talk {
        let mut net = Net::new(1, NicConfig::default(), Faults::default(), 1);
        let env = &mut net.hosts[0].env;
        let mut slots = |count: u32, size| env.memory.alloc(u64::from(count) * size);
        let setup = Setup {
            boot: 1,
            pd: PD,
            mtu: Mtu::M1024,
            sq_depth: DEPTH,
            rq_depth: DEPTH,
            srq: false,
            send_ring: slots(DEPTH, CQE_SLOT),
            recv_ring: slots(DEPTH, CQE_SLOT),
            replay: slots(1, REPLAY_SLOT),
            replay_slots: 1,
            access: Access::empty(),
            max_rd_atomic: 1,
            rnr_retry: 7,
            min_rnr_timer: 1,
        };
        let (sq, rq, cq) = (SimSq::new(DEPTH), SimRq::new(DEPTH as usize, 1), SimCq::new(64));
        let init = SlInit {
            qpn: SL_QPN,
            sq: sq.clone(),
            first_send: sq.posted(),
            rq: rq.clone(),
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            sq_sig_all: true,
            setup,
            inline_key: 0,
            patience: Patience::of(14, 7),
            keepalive: 50_000_000,
            rules: Default::default(),
            form: Default::default(),
            stats: Default::default(),
        };
        let mut sl = SlQp::new(init).expect("a good set-up");
        let av = Av { dgid: SF, sgid: env.gid, ..Av::default() };
        let mut sum = Sum::default();
        rules.iter().for_each(|rule| sum.add(rule));
        let peer = Peer { av, port: 1, qpn: SF_QPN, epoch: EPOCH };
        sl.start(env, 1, peer, known.then_some(sum), rules.iter().copied());
        Talk { net, sl, now: 1, spoken: 0, sq, rq, cq }
    }

    /// What it has said since this was asked last, with the numbers of the messages.
    fn said(&mut self) -> Vec<(u32, Control)> {
        self.sl.poll_transmit(&mut self.net.hosts[0].env, self.now);
        let frames = self.net.hosts[0].env.flush_star();
        let packets = frames.iter().map(|f| Packet::open(Side::Stateful, &f.path, &f.bytes).expect("good"));
        let said = packets.filter(|packet| packet.header.migrate);
        said.filter_map(|p| Some((p.header.psn.get(), Control::decode(p.data)?))).collect()
    }

    fn get(&mut self, head: &Head, data: &[u8]) {
        let bytes = [head.bytes(), data].concat();
        let packet = Packet::parse(Side::Stateful, &bytes).expect("a packet");
        self.sl.handle_control(&mut self.net.hosts[0].env, self.now, &SF, &packet);
    }

    const FROM: Prefix = Prefix { qpn: SF_QPN, epoch: EPOCH };

    /// The peer answers a message.
    fn answer(&mut self, seq: u32) {
        self.get(&Head::control_ack(SL_QPN, Talk::FROM, Psn::new(seq)), &[]);
    }

    /// The peer says something.
    fn hear(&mut self, message: Control) {
        let mut room = [0; MAX_CONTROL];
        let len = message.encode(&mut room).expect("it fits");
        let head = Head::control(SL_QPN, Talk::FROM, Psn::new(self.spoken), len as u16);
        self.spoken += 1;
        self.get(&head, &room[..len]);
    }

    /// Time passes, with nobody answering.
    fn wait(&mut self, time: Nanos) {
        let until = self.now + time;
        for tries in 0.. {
            let Some(due) = self.sl.next_deadline().filter(|due| *due <= until) else { break };
            assert!(tries < 1000, "it waits for nothing");
            self.now = self.now.max(due);
            self.sl.handle_timeout(&mut self.net.hosts[0].env, self.now);
            self.net.hosts[0].env.flush_star();
        }
        self.now = until;
    }

    /// Answers all that it says; gives that.
    fn answer_all(&mut self) -> Vec<Control> {
        let mut all = Vec::new();
        loop {
            let said = self.said();
            let Some((seq, message)) = said.last().copied() else { return all };
            all.push(message);
            self.answer(seq);
        }
    }
}

/// All rules are told once, however often they are asked for meanwhile.
#[test]
fn a_flood_of_questions_has_one_answer() {
    let rules: Vec<Rule> = (1..4).map(rule).collect();
    let mut talk = Talk::new(&rules, true);
    assert!(matches!(talk.answer_all()[..], [Control::Setup(_), Control::Begin { known: Some(_) }]));
    for _ in 0..50 {
        talk.hear(Control::Tell);
        if talk.sl.must_tell() {
            let env = &mut talk.net.hosts[0].env;
            talk.sl.tell_all(env, talk.now, rules.iter().copied());
        }
    }
    let told = talk.answer_all();
    let wanted = rules.iter().copied().map(Control::Rule).chain([Control::Begin { known: None }]);
    assert_eq!(told, wanted.collect::<Vec<_>>());
    talk.hear(Control::Tell);
    assert!(talk.sl.must_tell(), "whoever still does not know is told again");
}

/// What others say of memory is not said, not even when the peer comes back late; then it is told as it is
/// now.
#[test]
fn one_that_others_speak_for_says_no_rule_late() {
    let mut talk = Talk::new(&[rule(1)], false);
    talk.answer_all();
    let env = &mut talk.net.hosts[0].env;
    talk.sl.tell(env, talk.now, Control::Rule(rule(2)));
    let [(seq, Control::Rule(_))] = talk.said()[..] else { panic!("it says it") };
    assert!(talk.sl.is_heard() && talk.sl.changes().given == 1);
    talk.wait(LONG);
    assert!(!talk.sl.is_heard() && talk.sl.state() == SlState::Ready);
    assert_eq!(talk.sl.next_deadline(), None, "it has said it often enough");
    talk.sl.untell();
    talk.hear(Control::KeepAlive);
    assert_eq!(talk.said(), [(seq, Control::KeepAlive)], "under the number that the peer may have had");
    assert!(!talk.sl.must_tell() && talk.sl.changes().given == 0);
    talk.answer(seq);
    assert!(talk.sl.must_tell() && talk.sl.is_heard());
}

/// One that had given up saying something ends: it says so all the same, and is not looked at all the time
/// meanwhile.
#[test]
fn one_that_had_fallen_silent_says_its_last_word() {
    let mut talk = Talk::new(&[], false);
    talk.answer_all();
    talk.sl.tell(&mut talk.net.hosts[0].env, talk.now, Control::Rule(rule(2)));
    talk.said();
    talk.wait(LONG);
    assert_eq!(talk.sl.next_deadline(), None, "it has said it often enough");
    let (_, parting) = talk.sl.close(talk.now, false);
    let (mut parting, env) = (parting.expect("it has something to say"), &mut talk.net.hosts[0].env);
    assert!(!parting.poll(env, talk.now));
    assert_eq!(env.flush_star().len(), 1);
    assert!(parting.next_deadline() >= talk.now + FIRST_TIMEOUT);
}

/// A stateful end that cannot begin says so: nothing more is asked of it, receives wait, and who sends is
/// told after the time that RC would take.
#[test]
fn a_peer_that_cannot_begin_is_asked_once() {
    let mut talk = Talk::new(&[], false);
    talk.rq.post(Recv { wr_id: 1, sges: vec![] }).expect("room");
    assert!(matches!(talk.said()[..], [(0, Control::Setup(_))]));
    talk.hear(Control::Bye { why: 0 });
    assert!(!talk.sl.speaks());
    talk.wait(LONG);
    assert_eq!((talk.said(), talk.cq.poll().is_none()), (vec![], true));
    talk.sq
        .post(Send { wqe: SendWqe { op: SendOp::Send, ..SendWqe::default() }, sges: vec![], inline: None })
        .expect("room");
    talk.sl.handle_doorbell(&mut talk.net.hosts[0].env, talk.now);
    talk.wait(4 * FIRST_TIMEOUT);
    assert!(talk.cq.poll().is_none(), "not at once");
    talk.wait(LONG);
    let ends: Vec<_> = std::iter::from_fn(|| talk.cq.poll()).map(|(cqe, _)| cqe.status).collect();
    assert_eq!(ends, [WcStatus::RetryExcErr, WcStatus::WrFlushErr]);
}

/// What the card tells of a request may be lost: the request goes again, and its completion is seen where it
/// was stored.
#[test]
fn what_the_card_tells_may_be_lost() {
    let mut talk = Talk::new(&[], false);
    talk.answer_all();
    let send = Send { wqe: SendWqe { wr_id: 7, ..SendWqe::default() }, sges: vec![], inline: None };
    talk.sq.post(send).expect("room");
    talk.sl.handle_doorbell(&mut talk.net.hosts[0].env, talk.now);
    for _ in 0..2 {
        talk.sl.poll_transmit(&mut talk.net.hosts[0].env, talk.now);
        assert_eq!(talk.net.hosts[0].env.flush_star().len(), 1, "nobody says that it is stored");
        talk.now = talk.sl.next_deadline().expect("it goes again");
        talk.sl.handle_timeout(&mut talk.net.hosts[0].env, talk.now);
    }
    let (slot, env) = (talk.sl.setup().send_ring, &mut talk.net.hosts[0].env);
    env.memory.write(slot + 8, &CqeMsg { slot, opcode: WcOpcode::Send, ..CqeMsg::default() }.body());
    env.memory.set_word(slot, Stamp { epoch: EPOCH, seq: 0 }.word());
    talk.sl.complete(env, talk.now, Queue::Send);
    let ends: Vec<_> =
        std::iter::from_fn(|| talk.cq.poll()).map(|(cqe, _)| (cqe.wr_id, cqe.status)).collect();
    assert_eq!(ends, [(7, WcStatus::Success)]);
}

/// A peer that answers nothing has no more kept for it than all its rules, told and taken away; then it is as
/// one that is gone.
#[test]
fn what_waits_for_one_peer_is_bounded() {
    let mut talk = Talk::new(&[], false);
    talk.answer_all();
    let most = 2 * MAX_RULES as u32 + 64;
    for key in 0..=most {
        assert!(talk.sl.speaks() && talk.sl.changes().taken == key);
        let env = &mut talk.net.hosts[0].env;
        talk.sl.tell(env, talk.now, Control::Unrule { key });
        env.flush_star();
    }
    assert!(!talk.sl.speaks() && talk.sl.changes().taken == 0);
    talk.wait(LONG);
    assert_eq!((talk.said(), talk.sl.state()), (vec![], SlState::Ready));
    assert!(talk.rq.is_empty());
}
