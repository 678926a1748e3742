//! Incarnations of StaR's connections: packets of a former one that are late, messages that a peer never
//! gets, and errors of unsignaled requests.

use starverbs_core::mr::WindowType;
use starverbs_core::qp::RecvSource;
use starverbs_core::{
    Access, AsyncEvent, FrameMeta, Nanos, NicConfig, QpState, QpType, Qpn, SendFlags, SendOp, SendWqe, Sge,
    WcStatus,
};
use starverbs_sim::{Faults, Net, Recv, Send, Setup, SimCq, SimRq, SimSq, StarCard};
use starverbs_star::control::{Control, MAX_CONTROL, Preference, Role};
use starverbs_star::env::{QpPair, StarEnv};
use starverbs_star::form::Form;
use starverbs_star::negotiate::Outcome;
use starverbs_star::role_message::RoleMessage;

const MS: Nanos = 1_000_000;
const SECOND: Nanos = 1_000 * MS;
/// The host that keeps nothing, and the other.
const SL: usize = 0;
const SF: usize = 1;
/// Of each memory, bytes: more than the way takes at once
const LEN: u32 = 16_384;

/// One connection of two hosts, and one more host.
struct World {
    net: Net,
    /// Where its ends are
    hosts: [usize; 2],
    qpns: [Qpn; 2],
    sqs: [SimSq; 2],
    rqs: [SimRq; 2],
    cqs: [SimCq; 2],
    /// Memory of each that its peer may reach
    regions: [Sge; 2],
    setup: Setup,
}

impl World {
    fn new(preferences: [Preference; 2], setup: Setup) -> World {
        let mut net = Net::new(3, NicConfig { window: 4096, ..NicConfig::default() }, Faults::default(), 7);
        (0..3).for_each(|at| {
            net.open_star(
                at,
                StarCard { threshold: 9, key: None, boot: 70 + at as u64, form: Form::default() },
            )
        });
        let (sqs, rqs) = ([(); 2].map(|()| SimSq::new(16)), [(); 2].map(|()| SimRq::new(16, 1)));
        let cqs = [(); 2].map(|()| SimCq::new(64));
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let regions = [SL, SF].map(|at| {
            let pd = net.hosts[at].pd;
            net.hosts[at].region_in(pd, LEN, rights)
        });
        let mut world = World { net, hosts: [SL, SF], qpns: [0; 2], sqs, rqs, cqs, regions, setup };
        world.make_qps(preferences);
        world
    }

    fn make_qps(&mut self, preferences: [Preference; 2]) {
        let World { net, hosts, sqs, rqs, cqs, .. } = self;
        self.qpns = [SL, SF].map(|at| {
            let (host, own) = (&mut net.hosts[hosts[at]], [&cqs[at], &cqs[at]]);
            let qpn = host.qp(QpType::Rc, &sqs[at], RecvSource::Own(rqs[at].clone()), own, false);
            host.preference(qpn, preferences[at]);
            qpn
        });
    }

    /// Another connection, of queues of its own; the one of before goes on.
    fn connect_another(&mut self) {
        (self.sqs, self.rqs) = ([(); 2].map(|()| SimSq::new(16)), [(); 2].map(|()| SimRq::new(16, 1)));
        self.make_qps(STAR);
        self.connect();
    }

    fn connect(&mut self) {
        self.connect_with([self.setup; 2]);
    }

    fn connect_with(&mut self, setups: [Setup; 2]) {
        for at in [SL, SF] {
            let (now, dgid) = (self.net.now(), self.net.hosts[self.hosts[1 - at]].gid);
            let (host, own, theirs, setup) =
                (&mut self.net.hosts[self.hosts[at]], self.qpns[at], self.qpns[1 - at], &setups[at]);
            host.to_init(own, false, setup, now);
            host.to_rts(own, QpType::Rc, dgid, theirs, setup, now);
        }
    }

    fn reset(&mut self) {
        let now = self.net.now();
        for at in [SL, SF] {
            self.net.hosts[self.hosts[at]]
                .to_state(self.qpns[at], QpState::Reset, now)
                .expect("from every state");
        }
    }

    fn delay(&mut self, delay: Nanos) {
        self.net.set_link(SL, SF, Faults { delay, ..Faults::default() });
    }

    fn role(&self, at: usize) -> Option<Role> {
        match self.net.hosts[self.hosts[at]].star.as_ref()?.roles.outcome(self.qpns[at])? {
            Outcome::Star { role, .. } => Some(role),
            Outcome::Plain => None,
        }
    }

    /// The program of `at` fills its peer's memory with a byte.
    fn write(&mut self, at: usize, byte: u8, flags: SendFlags) {
        let (mine, theirs) = (self.regions[at], self.regions[1 - at]);
        self.net.hosts[self.hosts[at]].env.memory.write(mine.addr, &[byte; LEN as usize]);
        let (remote_addr, rkey) = (theirs.addr, theirs.lkey);
        let wqe =
            SendWqe { wr_id: byte.into(), op: SendOp::Write, remote_addr, rkey, flags, ..SendWqe::default() };
        self.post(at, wqe);
    }

    fn post(&mut self, at: usize, wqe: SendWqe) {
        self.post_to(at, wqe, vec![self.regions[at]]);
    }

    fn post_to(&mut self, at: usize, wqe: SendWqe, sges: Vec<Sge>) {
        self.sqs[at].post(Send { wqe, sges, inline: None }).expect("room");
        self.net.doorbell(self.hosts[at], self.qpns[at]);
    }

    /// How a new window of SL is bound.
    fn bind(&mut self) -> SendWqe {
        let host = &mut self.net.hosts[SL];
        let (addr, mr) = host.region(LEN.into(), Access::LOCAL_WRITE | Access::MW_BIND);
        let window = host.nic.alloc_mw(host.pd, WindowType::Two).expect("a window");
        SendWqe {
            op: SendOp::BindMw,
            remote_addr: addr,
            compare_add: LEN.into(),
            rkey: window ^ 1,
            imm: mr,
            remote_qpn: window,
            qkey: Access::REMOTE_WRITE.bits(),
            ..SendWqe::default()
        }
    }

    /// What `at` holds, if it is one byte all over.
    fn holds(&self, at: usize) -> Option<u8> {
        let bytes = self.net.hosts[self.hosts[at]].env.memory.read(self.regions[at].addr, LEN as usize);
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    fn ends(&self, at: usize) -> Vec<(u64, WcStatus)> {
        std::iter::from_fn(|| self.cqs[at].poll()).map(|(cqe, _)| (cqe.wr_id, cqe.status)).collect()
    }

    /// Both programs reach each other.
    fn works(&mut self) {
        assert_eq!([SL, SF].map(|at| self.role(at)), [Some(Role::Stateless), Some(Role::Stateful)]);
        for (at, byte) in [(SL, 11), (SF, 12)] {
            self.write(at, byte, SendFlags::SIGNALED);
            self.net.run_for(SECOND);
            assert_eq!(self.ends(at), [(byte.into(), WcStatus::Success)]);
            assert_eq!(self.holds(1 - at), Some(byte));
        }
    }
}

const STAR: [Preference; 2] = [Preference::Stateless, Preference::Stateful];

/// The peer of a stateless end that was reset never answered its Setup, which is not repeated: the peer would
/// begin with it.
#[test]
fn an_incarnation_that_is_over_does_not_begin_at_its_peer() {
    let mut w = World::new(STAR, Setup::default());
    w.connect();
    while w.role(SL).is_none() {
        assert!(w.net.step());
    }
    w.net.cut(SF, SL, 20 * MS);
    w.net.run_for(5 * MS);
    w.reset();
    w.connect();
    w.net.run_for(SECOND);
    w.works();
}

/// The Setup of a former incarnation arrives when its peer waits for the new one, and once more when that has
/// begun.
#[test]
fn a_late_setup_ends_no_later_incarnation() {
    for again in [false, true] {
        let mut w = World::new(STAR, Setup::default());
        w.delay(30 * MS);
        w.connect();
        w.net.run_for(30 * MS + MS / 10);
        assert_eq!(w.role(SL), Some(Role::Stateless), "its first word is under way for 30 ms");
        w.delay(MS / 10);
        w.reset();
        w.connect();
        if !again {
            while w.role(SL).is_none() {
                assert!(w.net.step());
            }
            w.net.cut(SL, SF, 40 * MS);
        }
        w.net.run_for(SECOND);
        w.works();
    }
}

/// SF has taken over an unsignaled WRITE when it no longer reaches SL: SL's program gets an error. One that
/// is done makes no completion.
#[test]
fn an_unsignaled_request_that_is_lost_fails() {
    let mut w = World::new(STAR, Setup { timeout: 8, retry_cnt: 0, ..Setup::default() });
    w.connect();
    w.net.run_for(SECOND);
    w.write(SL, 5, SendFlags::empty());
    w.net.run_for(SECOND);
    assert_eq!((w.holds(SF), w.ends(SL), w.sqs[SL].outstanding()), (Some(5), vec![], 0), "SL knows");
    w.write(SL, 6, SendFlags::empty());
    w.net.step();
    w.net.transmit();
    w.net.cut(SF, SL, 5 * SECOND);
    w.net.run_for(60 * SECOND);
    assert_eq!((w.holds(SF), w.ends(SL)), (None, vec![(6, WcStatus::RetryExcErr)]), "a part of it came");
}

/// SF gave SL up while SL did not reach it. When SL does again, it gets the error.
#[test]
fn who_was_given_up_gets_the_error_when_it_asks() {
    let hasty = Setup { timeout: 8, retry_cnt: 0, ..Setup::default() };
    let mut w = World::new(STAR, hasty);
    w.connect_with([Setup { timeout: 0, ..hasty }, hasty]);
    w.net.run_for(SECOND);
    w.write(SL, 6, SendFlags::empty());
    w.net.step();
    w.net.transmit();
    w.net.cut(SF, SL, 5 * SECOND);
    w.net.run_for(4 * SECOND);
    assert_eq!(w.ends(SL), [], "nobody has told it");
    w.net.run_for(60 * SECOND);
    assert_eq!(w.ends(SL), [(6, WcStatus::RetryExcErr)]);
}

/// SL's program takes its end to ERR while its Setup is on the way, so that SF gets Bye before the rules.
/// What SF's program posts then fails.
#[test]
fn who_ended_before_it_began_is_not_waited_for() {
    let mut w = World::new(STAR, Setup::default());
    w.connect();
    while w.role(SL).is_none() {
        assert!(w.net.step());
    }
    let now = w.net.now();
    w.net.hosts[SL].to_state(w.qpns[SL], QpState::Err, now).expect("from every state");
    w.net.run_for(SECOND);
    assert_eq!(w.role(SF), Some(Role::Stateful));
    w.write(SF, 6, SendFlags::SIGNALED);
    w.net.run_for(10 * SECOND);
    assert_eq!(w.ends(SF), [(6, WcStatus::RetryExcErr)]);
}

/// SL ends when its program has a message whose answer was lost: its Bye says so, and SF's SEND succeeds.
/// What SL has no receive for fails.
#[test]
fn what_sl_had_before_it_ended_succeeds() {
    for destroyed in [false, true] {
        let mut w = World::new(STAR, Setup::default());
        w.connect();
        (1..=2).for_each(|id| w.rqs[SL].post(Recv { wr_id: id, sges: vec![w.regions[SL]] }).expect("room"));
        w.net.run_for(SECOND);
        w.net.cut(SL, SF, 20 * MS);
        for wr_id in 3..=5 {
            let send = SendWqe { wr_id, op: SendOp::Send, flags: SendFlags::SIGNALED, ..SendWqe::default() };
            w.post_to(SF, send, vec![Sge { len: 8, ..w.regions[SF] }]);
        }
        w.net.run_for(10 * MS);
        assert_eq!(w.ends(SL), [1, 2].map(|id| (id, WcStatus::Success)));
        let now = w.net.now();
        let host = &mut w.net.hosts[SL];
        if destroyed {
            host.destroy_qp(w.qpns[SL], now).expect("it is there");
        } else {
            host.to_state(w.qpns[SL], QpState::Err, now).expect("from every state");
        }
        w.net.run_for(10 * SECOND);
        let ends = [(3, WcStatus::Success), (4, WcStatus::Success), (5, WcStatus::RetryExcErr)];
        assert_eq!(w.ends(SF), ends, "destroyed: {destroyed}");
    }
}

/// A SEND that is to take away a key that its peer does not have fails, as RC's does; what comes behind it is
/// not done.
#[test]
fn a_send_that_takes_away_no_window_fails_at_both_ends() {
    let mut w = World::new(STAR, Setup::default());
    w.connect();
    w.rqs[SL].post(Recv { wr_id: 1, sges: vec![w.regions[SL]] }).expect("room");
    w.net.run_for(SECOND);
    let region = w.regions[SL].lkey;
    for (wr_id, imm) in [(2, region), (3, region ^ 1)] {
        w.post(
            SF,
            SendWqe { wr_id, op: SendOp::SendInv, imm, flags: SendFlags::SIGNALED, ..SendWqe::default() },
        );
    }
    w.write(SF, 9, SendFlags::SIGNALED);
    w.net.run_for(SECOND);
    let flushed = |id| (id, WcStatus::WrFlushErr);
    assert_eq!(w.ends(SF), [(2, WcStatus::RemAccessErr), flushed(3), flushed(9)]);
    assert_eq!(w.ends(SL), [flushed(1)]);
    assert_ne!(w.holds(SL), Some(9));
    assert_eq!(w.net.hosts[SL].env.events, [AsyncEvent::QpAccessErr(w.qpns[SL])]);
}

/// SF gets an answer of its peer, to the incarnation that is as many before.
fn answer_sf(w: &mut World, before: u32, message: Control) {
    let (src, dst) = (w.net.hosts[SL].gid, w.net.hosts[SF].gid);
    let qps = QpPair { from: w.qpns[SL], to: w.qpns[SF] };
    let host = &mut w.net.hosts[SF];
    let to = host.star.as_ref().and_then(|star| star.roles.incarnation(qps.to)).expect("it has begun");
    let mut room = [0; MAX_CONTROL];
    let answer = RoleMessage { from: 1, to: to.wrapping_sub(before), message };
    let len = answer.encode(&mut room).expect("it fits");
    assert!(host.env.negotiate(&FrameMeta { src, dst, ..FrameMeta::default() }, qps, &room[..len]));
}

/// Answers to the incarnation before come late: the ends settle their roles all the same.
#[test]
fn answers_to_an_incarnation_before_settle_nothing() {
    let late = [
        Control::Plain,
        Control::Accept { role: Role::Stateful, ports: [4793, 4794], boot: 70 },
        Control::Confirm { role: Role::Stateful },
    ];
    for message in late {
        let mut w = World::new(STAR, Setup::default());
        w.connect();
        answer_sf(&mut w, 1, message);
        w.net.run_for(SECOND);
        assert_eq!(
            [SL, SF].map(|at| w.role(at)),
            [Some(Role::Stateless), Some(Role::Stateful)],
            "{message:?}"
        );
        w.write(SF, 9, SendFlags::SIGNALED);
        w.net.run_for(SECOND);
        assert_eq!((w.ends(SF), w.holds(SL)), (vec![(9, WcStatus::Success)], Some(9)));
    }
}

/// The peer of a stateful end is plain and sends nothing by itself, and the program's patience has no limit:
/// the end asks, and goes on.
#[test]
fn what_waits_for_a_peer_that_is_plain_asks_what_it_is() {
    let mut w = World::new([Preference::Off, Preference::Stateful], Setup { timeout: 0, ..Setup::default() });
    w.connect();
    /* of an incarnation before, when it was not */
    answer_sf(&mut w, 0, Control::Accept { role: Role::Stateless, ports: [4793, 4794], boot: 70 });
    w.net.run_for(SECOND);
    assert_eq!(w.role(SF), Some(Role::Stateful));
    w.write(SF, 9, SendFlags::SIGNALED);
    w.net.run_for(2 * SECOND);
    assert_eq!((w.ends(SF), w.holds(SL), w.role(SF)), (vec![(9, WcStatus::Success)], Some(9), None));
}

/// The way of a stateless end is cut when its peer has accepted, until that one has given up and is plain:
/// the end, which says its Setup without an answer, asks, and goes on.
#[test]
fn who_begins_at_a_peer_that_is_plain_asks_what_it_is() {
    let mut alone = 0;
    for phase in 0..24 {
        let mut w = World::new(STAR, Setup { timeout: 14, ..Setup::default() });
        w.connect();
        w.net.run_for(phase * 500);
        w.net.cut(SL, SF, 3 * SECOND);
        w.net.run_for(3 * SECOND - 1);
        alone += u32::from((w.role(SL), w.role(SF)) == (Some(Role::Stateless), None));
        w.net.run_for(4 * SECOND);
        assert_eq!(w.role(SL).map(Role::other), w.role(SF), "phase {phase}");
        w.write(SL, 9, SendFlags::SIGNALED);
        w.net.run_for(2 * SECOND);
        assert_eq!((w.ends(SL), w.holds(SF)), (vec![(9, WcStatus::Success)], Some(9)), "phase {phase}");
    }
    assert!(alone > 0, "no peer of a stateless end gave up");
}

/// StaR's ports are closed to either end, or to both: a new connection is plain after two seconds, which its
/// program bears.
#[test]
fn behind_closed_ports_a_new_connection_is_plain() {
    for shut in [vec![SL, SF], vec![SL], vec![SF]] {
        let mut w = World::new(STAR, Setup { timeout: 18, ..Setup::default() });
        w.net.star_cut = shut.clone();
        w.connect();
        w.write(SL, 9, SendFlags::SIGNALED);
        w.net.run_for(3 * SECOND);
        assert_eq!((w.role(SL), w.role(SF)), (None, None), "{shut:?}");
        assert_eq!((w.ends(SL), w.holds(SF)), (vec![(9, WcStatus::Success)], Some(9)), "{shut:?}");
    }
}

/// While SF is unreachable the first connection has a rule of new memory to send; the second, whose request
/// names that memory, is reachable first, or not.
#[test]
fn a_rule_that_was_not_sent_is_sent_before_a_request_names_it() {
    for phase in 0..16 {
        let mut w = World::new(STAR, Setup { timeout: 0, ..Setup::default() });
        w.connect();
        w.net.run_for(SECOND);
        w.connect_another();
        w.net.run_for(SECOND);
        let time = 5 * SECOND + phase * 4 * MS;
        w.net.cut(SL, SF, time);
        w.net.cut(SF, SL, time);
        w.write(SL, 1, SendFlags::SIGNALED);
        w.net.run_for(100 * MS + phase * MS);
        let (pd, rights) = (w.net.hosts[SL].pd, Access::LOCAL_WRITE);
        w.regions[SL] = w.net.hosts[SL].region_in(pd, LEN, rights);
        w.net.run_for(4 * SECOND);
        w.write(SL, 2, SendFlags::SIGNALED);
        w.net.run_for(10 * SECOND);
        assert_eq!(w.ends(SL), [(1, WcStatus::Success), (2, WcStatus::Success)], "phase {phase}");
        assert_eq!(w.holds(SF), Some(2));
    }
}

/// A program has memory whose rule its peer's card lacks, and the peer's program has the key by other ways:
/// its request waits until the card has the rule.
#[test]
fn a_card_asks_for_the_rules_that_it_lacks() {
    let both = [(SL, SF), (SF, SL)];
    for (phase, cuts) in [(0, &both[..1]), (1, &both[..1]), (2, &both), (3, &both)] {
        let mut w = World::new(STAR, Setup { timeout: 0, ..Setup::default() });
        w.connect();
        w.net.run_for(SECOND);
        cuts.iter().for_each(|(from, to)| w.net.cut(*from, *to, 4 * SECOND));
        let (pd, rights) = (w.net.hosts[SL].pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        w.regions[SL] = w.net.hosts[SL].region_in(pd, LEN, rights);
        w.net.run_for(phase % 2 * 3 * SECOND);
        w.write(SF, 7, SendFlags::SIGNALED);
        w.net.run_for(20 * SECOND);
        assert_eq!((w.ends(SF), w.holds(SL)), (vec![(7, WcStatus::Success)], Some(7)), "case {phase}");
        w.regions[SL].lkey ^= 1;
        w.write(SF, 8, SendFlags::SIGNALED);
        w.net.run_for(SECOND);
        assert_eq!((w.ends(SF), w.holds(SL)), (vec![(8, WcStatus::RemAccessErr)], Some(7)), "nobody's key");
    }
}

/// A bind waits for another card, while a third does not answer: the timer does not fire again and again.
#[test]
fn who_waits_for_one_card_is_not_woken_for_another() {
    let mut w = World::new(STAR, Setup { timeout: 0, ..Setup::default() });
    w.connect();
    w.net.run_for(SECOND);
    let far = w.rqs[SF].clone();
    let bind = w.bind();
    for (wr_id, wqe) in [(2, SendWqe::default()), (3, bind)] {
        w.post_to(SL, SendWqe { wr_id, flags: SendFlags::SIGNALED, ..wqe }, vec![]);
    }
    w.hosts = [SL, 2];
    w.connect_another();
    w.net.run_for(SECOND);
    /* the peer has both, and cannot get new rules */
    w.net.cut(SL, SF, 20 * SECOND);
    w.net.hosts[SL].region(LEN.into(), Access::LOCAL_WRITE);
    w.net.run_for(5 * SECOND);
    w.net.cut(SL, 2, SECOND);
    far.post(Recv { wr_id: 1, sges: vec![] }).expect("room");
    w.net.run_for(SECOND / 2);
    assert_eq!(w.ends(SL), [(2, WcStatus::Success)], "the other card does not know the window");
    w.net.run_for(2 * SECOND);
    assert_eq!(w.ends(SL), [(3, WcStatus::Success)]);
}

/// A bind waits until a card knows of it; meanwhile a message of the peer takes another window away. Both
/// end, one after the other.
#[test]
fn a_window_that_is_bound_and_one_that_is_taken_away_wait_their_turn() {
    let mut w = World::new(STAR, Setup { timeout: 0, ..Setup::default() });
    w.hosts = [SL, 2];
    w.make_qps(STAR);
    w.connect();
    w.hosts = [SL, SF];
    w.connect_another();
    w.net.run_for(SECOND);
    let binds = [w.bind(), w.bind()];
    w.post_to(SL, SendWqe { wr_id: 1, flags: SendFlags::SIGNALED, ..binds[0] }, vec![]);
    w.rqs[SL].post(Recv { wr_id: 2, sges: vec![] }).expect("room");
    w.net.run_for(SECOND);
    assert_eq!(w.ends(SL), [(1, WcStatus::Success)]);
    w.net.cut(SL, 2, SECOND);
    w.post_to(SL, SendWqe { wr_id: 3, flags: SendFlags::SIGNALED, ..binds[1] }, vec![]);
    w.net.run_for(SECOND / 4);
    let taken = binds[0].rkey;
    w.post_to(
        SF,
        SendWqe {
            wr_id: 4,
            op: SendOp::SendInv,
            imm: taken,
            flags: SendFlags::SIGNALED,
            ..SendWqe::default()
        },
        vec![],
    );
    w.net.run_for(SECOND / 4);
    assert_eq!(w.ends(SL), [], "a card does not know of the bind");
    w.net.run_for(2 * SECOND);
    assert_eq!(w.ends(SL), [(3, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!(w.ends(SF), [(4, WcStatus::Success)]);
}

/// A rule came and went while its peer's card was unreachable: the card does not get it when it is reachable
/// again.
#[test]
fn a_rule_that_is_gone_is_not_sent_late() {
    let mut w = World::new(STAR, Setup { timeout: 0, ..Setup::default() });
    w.connect();
    w.net.run_for(SECOND);
    w.net.cut(SL, SF, 4 * SECOND);
    let (pd, rights) = (w.net.hosts[SL].pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    w.regions[SL] = w.net.hosts[SL].region_in(pd, LEN, rights);
    w.net.run_for(3 * SECOND);
    let key = w.regions[SL].lkey;
    w.net.hosts[SL].dereg_mr(key).expect("nobody uses it");
    w.net.run_for(SECOND / 10);
    assert!(w.net.hosts[SL].is_revoked(key), "nobody waits for a card that is not heard");
    w.net.star_sent = Some(vec![]);
    w.write(SF, 8, SendFlags::SIGNALED);
    w.net.run_for(10 * SECOND);
    assert_eq!(w.ends(SF), [(8, WcStatus::RemAccessErr)]);
    let sent = w.net.star_sent.take().expect("it looks");
    assert!(sent.iter().all(|(from, header)| *from == SL || header.len == 0), "{sent:?}");
}
