//! Messages of a stateless end, one by one: its peer answers too often, too late or not at all.

use starverbs_core::env::{RecvQueue, SendQueue};
use starverbs_core::mr::MemoryRule;
use starverbs_core::{
    Access, Av, Gid, Mtu, Nanos, NicConfig, PdId, Psn, SendOp, SendWqe, WcOpcode, WcStatus,
};
use starverbs_sim::{Faults, Net, Recv, Send, SimCq, SimEnv, SimRq, SimSq};
use starverbs_star::channel::FIRST_TIMEOUT;
use starverbs_star::control::{Control, MAX_CONTROL, Setup, Sum};
use starverbs_star::endpoint::{Patience, SlInit, SlQp, SlState};
use starverbs_star::message::CqeMsg;
use starverbs_star::registry::MAX_RULES;
use starverbs_star::ring::Stamp;
use starverbs_star::stateless::SfPeer;
use starverbs_star::token::{SlotArea, Token};
use starverbs_star::wire::{CardHalf, Prefix, Queue, StarHead, StarPacket};

const SL_QPN: u32 = 0x11;
const SF_QPN: u32 = 0x22;
const EPOCH: u32 = 0x0007_0001;
const PD: PdId = PdId(3);
const SF: Gid = Gid::from_ipv4([10, 0, 0, 9]);
const DEPTH: u32 = 8;
/// Longer than it waits for anything, ns.
const LONG: Nanos = 100_000_000_000;

/// A stateless end, and its peer's messages.
struct Talk {
    net: Net,
    sl: SlQp<SimEnv>,
    now: Nanos,
    /// Messages that the peer has sent
    peer_seq: u32,
    sq: SimSq,
    rq: SimRq,
    cq: SimCq,
}

fn rule(key: u32) -> MemoryRule {
    MemoryRule { key, pd: PD, qpn: 0, addr: 4096, len: 64, iova: 4096, access: Access::REMOTE_READ }
}

impl Talk {
    /// One that has begun, with these rules; `known`: other connections have sent them.
    fn new(rules: &[MemoryRule], known: bool) -> Talk {
        let mut net = Net::new(1, NicConfig::default(), Faults::default(), 1);
        let env = &mut net.hosts[0].env;
        let mut setup = Setup {
            boot: 1,
            pd: PD,
            mtu: Mtu::M1024,
            sq_depth: DEPTH,
            rq_depth: DEPTH,
            srq: false,
            token: Token::NONE,
            replay_slots: 1,
            access: Access::empty(),
            max_rd_atomic: 1,
            rnr_retry: 7,
            min_rnr_timer: 1,
        };
        let len = SlotArea::len_for(setup.slot_bytes());
        setup.token.slots = SlotArea::new(env.memory.alloc(len), len).expect("an area");
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
            dialect: false,
            stats: Default::default(),
        };
        let mut sl = SlQp::new(init).expect("a good set-up");
        let av = Av { dgid: SF, sgid: env.gid, ..Av::default() };
        let mut sum = Sum::default();
        rules.iter().for_each(|rule| sum.add(rule));
        let peer = SfPeer { av, port: 1, qpn: SF_QPN, epoch: EPOCH };
        sl.start(env, 1, peer, known.then_some(sum), rules.iter().copied());
        Talk { net, sl, now: 1, peer_seq: 0, sq, rq, cq }
    }

    /// Messages since the last call, with their sequences.
    fn sent(&mut self) -> Vec<(u32, Control)> {
        let host = &mut self.net.hosts[0];
        self.sl.poll_transmit(&mut host.env, self.now, host.nic.memory(), true);
        let frames = self.net.hosts[0].env.flush_star();
        let packets =
            frames.iter().map(|f| StarPacket::open(CardHalf::Stateful, &f.path, &f.bytes).expect("good"));
        let sent = packets.filter(|packet| packet.header.migrate);
        sent.filter_map(|p| Some((p.header.psn.get(), Control::decode(p.data)?))).collect()
    }

    fn get(&mut self, head: &StarHead, data: &[u8]) {
        let bytes = [head.bytes(), data].concat();
        let packet = StarPacket::parse(CardHalf::Stateful, &bytes).expect("a packet");
        self.sl.handle_control(&mut self.net.hosts[0].env, self.now, &SF, &packet);
    }

    const FROM: Prefix = Prefix { qpn: SF_QPN, epoch: EPOCH };

    /// The peer answers a message.
    fn answer(&mut self, seq: u32) {
        self.get(&StarHead::control_ack(SL_QPN, Talk::FROM, Psn::new(seq)), &[]);
    }

    /// A message of the peer.
    fn receive(&mut self, message: Control) {
        let mut room = [0; MAX_CONTROL];
        let len = message.encode(&mut room).expect("it fits");
        let head = StarHead::control(SL_QPN, Talk::FROM, Psn::new(self.peer_seq), len as u16);
        self.peer_seq += 1;
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

    /// Answers all its messages; gives them.
    fn answer_all(&mut self) -> Vec<Control> {
        let mut all = Vec::new();
        loop {
            let sent = self.sent();
            let Some((seq, message)) = sent.last().copied() else { return all };
            all.push(message);
            self.answer(seq);
        }
    }
}

/// All rules are sent once, however often they are asked for meanwhile.
#[test]
fn a_flood_of_questions_has_one_answer() {
    let rules: Vec<MemoryRule> = (1..4).map(rule).collect();
    let mut talk = Talk::new(&rules, true);
    assert!(matches!(talk.answer_all()[..], [Control::Setup(_), Control::Begin { known: Some(_) }]));
    for _ in 0..50 {
        talk.receive(Control::ResendRules);
        if talk.sl.must_send_rules() {
            let env = &mut talk.net.hosts[0].env;
            talk.sl.send_rules(env, talk.now, rules.iter().copied());
        }
    }
    let sent_rules = talk.answer_all();
    let wanted = rules.iter().copied().map(Control::Rule).chain([Control::Begin { known: None }]);
    assert_eq!(sent_rules, wanted.collect::<Vec<_>>());
    talk.receive(Control::ResendRules);
    assert!(talk.sl.must_send_rules(), "whoever still does not know is told again");
}

/// Rules that other connections send are retracted, also when the peer comes back late; then all are sent as
/// they are now.
#[test]
fn retracted_rules_are_not_sent_late() {
    let mut talk = Talk::new(&[rule(1)], false);
    talk.answer_all();
    let env = &mut talk.net.hosts[0].env;
    talk.sl.send_rule(env, talk.now, Control::Rule(rule(2)));
    let [(seq, Control::Rule(_))] = talk.sent()[..] else { panic!("it says it") };
    assert!(talk.sl.is_reachable() && talk.sl.changes().given == 1);
    talk.wait(LONG);
    assert!(!talk.sl.is_reachable() && talk.sl.state() == SlState::Ready);
    assert_eq!(talk.sl.next_deadline(), None, "it has said it often enough");
    talk.sl.retract_rules();
    talk.receive(Control::KeepAlive);
    assert_eq!(talk.sent(), [(seq, Control::KeepAlive)], "under the number that the peer may have had");
    assert!(!talk.sl.must_send_rules() && talk.sl.changes().given == 0);
    talk.answer(seq);
    assert!(talk.sl.must_send_rules() && talk.sl.is_reachable());
}

/// One that had stopped repeating its messages ends: its Bye is sent all the same, and its timer does not
/// fire all the time meanwhile.
#[test]
fn one_that_had_fallen_silent_sends_its_bye() {
    let mut talk = Talk::new(&[], false);
    talk.answer_all();
    talk.sl.send_rule(&mut talk.net.hosts[0].env, talk.now, Control::Rule(rule(2)));
    talk.sent();
    talk.wait(LONG);
    assert_eq!(talk.sl.next_deadline(), None, "it has said it often enough");
    let env = &mut talk.net.hosts[0].env;
    let mut linger = talk.sl.close(env, talk.now, false).expect("it has something to say");
    assert!(!linger.poll(env, talk.now));
    assert_eq!(env.flush_star().len(), 1);
    assert!(linger.next_deadline() >= talk.now + FIRST_TIMEOUT);
}

/// A stateful end that cannot begin sends Bye: it gets no more messages, receives wait, and sends fail after
/// RC's time.
#[test]
fn a_peer_that_cannot_begin_is_asked_once() {
    let mut talk = Talk::new(&[], false);
    talk.rq.post(Recv { wr_id: 1, sges: vec![] }).expect("room");
    assert!(matches!(talk.sent()[..], [(0, Control::Setup(_))]));
    talk.receive(Control::Bye { why: 0, recvs: Psn::default() });
    assert!(!talk.sl.is_connected());
    talk.wait(LONG);
    assert_eq!((talk.sent(), talk.cq.poll().is_none()), (vec![], true));
    talk.sq
        .post(Send { wqe: SendWqe { op: SendOp::Send, ..SendWqe::default() }, sges: vec![], inline: None })
        .expect("room");
    talk.sl.handle_doorbell(talk.now);
    assert_eq!(talk.sent(), vec![]);
    talk.wait(4 * FIRST_TIMEOUT);
    assert!(talk.cq.poll().is_none(), "not at once");
    talk.wait(LONG);
    let ends: Vec<_> = std::iter::from_fn(|| talk.cq.poll()).map(|(cqe, _)| cqe.status).collect();
    assert_eq!(ends, [WcStatus::RetryExcErr, WcStatus::WrFlushErr]);
}

/// An event of the card may be lost: the WQEP is repeated, and the completion is seen in its slot.
#[test]
fn events_of_the_card_may_be_lost() {
    let mut talk = Talk::new(&[], false);
    talk.answer_all();
    let send = Send { wqe: SendWqe { wr_id: 7, ..SendWqe::default() }, sges: vec![], inline: None };
    talk.sq.post(send).expect("room");
    talk.sl.handle_doorbell(talk.now);
    for _ in 0..2 {
        let host = &mut talk.net.hosts[0];
        talk.sl.poll_transmit(&mut host.env, talk.now, host.nic.memory(), true);
        assert_eq!(talk.net.hosts[0].env.flush_star().len(), 1, "nobody says that it is stored");
        talk.now = talk.sl.next_deadline().expect("it goes again");
        talk.sl.handle_timeout(&mut talk.net.hosts[0].env, talk.now);
    }
    let (slot, env) = (talk.sl.setup().send_ring(), &mut talk.net.hosts[0].env);
    env.memory.write(slot + 8, &CqeMsg { slot, opcode: WcOpcode::Send, ..CqeMsg::default() }.body());
    env.memory.set_word(slot, Stamp { epoch: EPOCH, seq: 0 }.word());
    talk.sl.complete(env, talk.now, Queue::Send);
    let ends: Vec<_> =
        std::iter::from_fn(|| talk.cq.poll()).map(|(cqe, _)| (cqe.wr_id, cqe.status)).collect();
    assert_eq!(ends, [(7, WcStatus::Success)]);
}

/// No more messages wait for a silent peer than all its rules, added and removed; then it counts as gone.
#[test]
fn what_waits_for_one_peer_is_bounded() {
    let mut talk = Talk::new(&[], false);
    talk.answer_all();
    let most = 2 * MAX_RULES as u32 + 64;
    for key in 0..=most {
        assert!(talk.sl.is_connected() && talk.sl.changes().taken == key);
        let env = &mut talk.net.hosts[0].env;
        talk.sl.send_rule(env, talk.now, Control::Unrule { key });
        env.flush_star();
    }
    assert!(!talk.sl.is_connected() && talk.sl.changes().taken == 0);
    talk.wait(LONG);
    assert_eq!((talk.sent(), talk.sl.state()), (vec![], SlState::Ready));
    assert!(talk.rq.is_empty());
}
