//! SL's card, packet by packet: what it does is in the packet and in memory, and nowhere else.

use starverbs_core::{Access, Counters, FrameMeta, Gid, NicConfig, Psn, SendOp, WcStatus};
use starverbs_sim::{Faults, Net, StarFrame};
use starverbs_star::answers::{Answers, TURNS_KEPT};
use starverbs_star::bounds::Bounds;
use starverbs_star::bundle::{Bundle, ShortRdc};
use starverbs_star::carried::Carried;
use starverbs_star::env::{News, SlEvent, StarSource};
use starverbs_star::form::{Form, Upto};
use starverbs_star::message::{Atomic, CqeMsg};
use starverbs_star::ring::{CQE_SLOT, REPLAY_SLOT, Stamp};
use starverbs_star::stateless::{StatelessCard, handle};
use starverbs_star::token::{CardSecret, SlotArea};
use starverbs_star::turn::DataTurn;
use starverbs_star::wire::{CardHalf, Opt, Prefix, Ptype, Queue, StarHead, StarHeader, StarPacket};

const EPOCH: u32 = 0x0003_0105;
const PREFIX: Prefix = Prefix { qpn: 0x10, epoch: EPOCH };
const SF: Gid = Gid::from_ipv4([10, 0, 0, 9]);
const SF_PORT: u16 = 4_999;

struct Sl {
    net: Net,
    bounds: Bounds,
    stats: Counters,
    /// A region, a completion slot and replay slots
    data: u64,
    slot: u64,
    replay: u64,
    secret: CardSecret,
    /// The slots of the connection that packets name, whose gate has their token
    area: SlotArea,
    /// Those of another
    elsewhere: SlotArea,
}

impl Sl {
    fn new() -> Sl {
        Sl::with_slots(1)
    }

    /// With so many replay slots.
    fn with_slots(atomics: u32) -> Sl {
        let mut net = Net::new(1, NicConfig::default(), Faults::default(), 1);
        let memory = &mut net.hosts[0].env.memory;
        let len = SlotArea::len_for(CQE_SLOT + u64::from(atomics) * REPLAY_SLOT);
        let data = memory.alloc(256);
        let [area, elsewhere] = [0; 2].map(|_| SlotArea::new(memory.alloc(len), len).expect("an area"));
        let (slot, replay) = (area.first(), area.first() + CQE_SLOT);
        memory.set_word(slot, Stamp::before_psn(EPOCH, 0, 1).word());
        for n in 0..atomics {
            memory.set_word(replay + u64::from(n) * REPLAY_SLOT, Stamp::before(EPOCH, n, atomics).word());
        }
        let mut bounds = Bounds::new();
        bounds.add(data, 256, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC).expect("memory");
        let (stats, secret) = (Counters::default(), CardSecret::new([1, 2]));
        Sl { net, bounds, stats, data, slot, replay, secret, area, elsewhere }
    }

    /// A packet for the card, alone in its turn: its frames and events.
    fn get(&mut self, header: StarHeader, prefix: Prefix, data: &[u8]) -> (Vec<StarFrame>, Vec<SlEvent>) {
        let mut owed = Answers::default();
        self.give(&mut owed, header, prefix, data);
        self.end_turn(&mut owed)
    }

    /// A packet for the card in a turn at whose end it owes this.
    fn give(&mut self, owed: &mut Answers, header: StarHeader, prefix: Prefix, data: &[u8]) {
        let token = self.secret.token(&SF, prefix, self.area);
        self.net.hosts[0].env.memory.set_word(self.area.gate(), token.mac);
        let bytes = [StarHead::to_stateless(header, prefix, &token).bytes(), data].concat();
        let packet = StarPacket::parse(CardHalf::Stateless, &bytes).expect("a packet");
        let card = StatelessCard { bounds: Some(&self.bounds), secret: &self.secret, stats: &self.stats };
        let env = &mut self.net.hosts[0].env;
        let meta = FrameMeta { src: SF, dst: env.gid, ..FrameMeta::default() };
        handle(&card, owed, env, StarSource { meta: &meta, port: SF_PORT }, &packet);
    }

    fn end_turn(&mut self, owed: &mut Answers) -> (Vec<StarFrame>, Vec<SlEvent>) {
        let env = &mut self.net.hosts[0].env;
        owed.flush(env);
        let frames = env.flush_star();
        assert!(
            frames.iter().all(|f| f.path.dst == SF && f.path.dport == SF_PORT),
            "back to where it came from"
        );
        (frames, std::mem::take(&mut env.star.events).into())
    }

    fn cqep(&mut self, seq: u32, epoch: u32, byte_len: u32) -> (usize, usize) {
        let cqe = CqeMsg { slot: self.slot, byte_len, ..CqeMsg::default() };
        let header = StarHeader { psn: Psn::new(seq), ..header(Ptype::Cqep, Opt::Recv, 0, 32) };
        let (frames, events) = self.get(header, Prefix { epoch, ..PREFIX }, &cqe.encode());
        let what = News::Completed;
        let told = SlEvent { qpn: PREFIX.qpn, epoch, queue: Queue::Recv, what, upto: None };
        assert!(events.iter().all(|event| *event == told));
        (frames.len(), events.len())
    }

    /// The last data of a message with its completion: the answer's kind and length, and how many events.
    fn rdc(&mut self, seq: u32, epoch: u32, data: &[u8]) -> (Option<(Ptype, u16)>, usize) {
        self.rdc_in(Opt::Send, seq, epoch, data)
    }

    /// Two RDCs in one packet, of `most` bytes at most, whose data goes to these offsets of the region: the
    /// answers' kinds, PSNs and lengths, and how many events.
    fn rdcs(&mut self, seq: u32, to: [u64; 2], most: usize) -> (Vec<(Ptype, u32, u16)>, usize) {
        let mut bundle = Bundle::default();
        bundle.make_room().expect("memory");
        for (n, to) in (0..).zip(to) {
            let cqe = CqeMsg { slot: self.slot, byte_len: 2, ..CqeMsg::default() };
            let carried = Carried { queue: Queue::Recv, seq: Psn::new(seq + n), cqe, stored: 0 };
            let header = header(Ptype::Rdc, Opt::Send, self.data + to, 0);
            let header = StarHeader { psn: Psn::new(8 + 4 * n), ..header };
            let (completion, data) = (&carried.encode(), &[n as u8 + 1; 2][..]);
            assert!(bundle.add(&ShortRdc { header, completion, data }, 1024));
        }
        let (header, data) = bundle.packet().expect("they are there");
        let data = &data[..data.len().min(most)];
        let (frames, events) = self.get(StarHeader { len: data.len() as u16, ..header }, PREFIX, data);
        let kind = |frame| {
            let StarHeader { ptype, psn, len, .. } = answer(std::slice::from_ref(frame)).header;
            (ptype, psn.get(), len)
        };
        (frames.iter().map(kind).collect(), events.len())
    }

    /// The same as `rdc`, in this turn.
    fn rdc_in_turn(&mut self, seq: u32, turn: DataTurn, data: &[u8]) -> (Option<(Ptype, u16)>, usize) {
        self.rdc_in(Opt::Recv, seq, EPOCH, &[&turn.encode()[..], data].concat())
    }

    fn rdc_in(&mut self, opt: Opt, seq: u32, epoch: u32, data: &[u8]) -> (Option<(Ptype, u16)>, usize) {
        let cqe = CqeMsg { slot: self.slot, byte_len: data.len() as u32, ..CqeMsg::default() };
        let upto = Upto { sends: Psn::new(5), recvs: Psn::new(6) };
        let carried = Carried { queue: Queue::Recv, seq: Psn::new(seq), cqe, stored: upto.word() };
        let bytes = [&carried.encode()[..], data].concat();
        let header = header(Ptype::Rdc, opt, self.data, bytes.len() as u16);
        let (frames, events) = self.get(header, Prefix { epoch, ..PREFIX }, &bytes);
        let what = News::Completed;
        let told = SlEvent { qpn: PREFIX.qpn, epoch, queue: Queue::Recv, what, upto: Some(upto) };
        assert!(events.iter().all(|event| *event == told));
        let answered = (!frames.is_empty()).then(|| {
            let StarHeader { ptype, len, .. } = answer(&frames).header;
            (ptype, len)
        });
        (answered, events.len())
    }

    fn completion(&self) -> (Stamp, CqeMsg) {
        let memory = &self.net.hosts[0].env.memory;
        let body = memory.read(self.slot + 8, 16).try_into().expect("16 bytes");
        (Stamp::of(memory.word(self.slot)), CqeMsg::from_body(self.slot, &body).expect("a completion"))
    }
}

fn header(ptype: Ptype, opt: Opt, addr: u64, len: u16) -> StarHeader {
    let (qpn, psn) = (0x20, Psn::new(1));
    StarHeader { ptype, opt, migrate: false, ack: true, qpn, epoch: 0, psn, addr, len }
}

/// The answer, as SF sees it.
fn answer(frames: &[StarFrame]) -> StarPacket<'_> {
    let [frame] = frames else { panic!("one answer: {frames:?}") };
    StarPacket::open(CardHalf::Stateful, &frame.path, &frame.bytes).expect("a good packet")
}

#[test]
fn a_late_copy_of_a_completion_changes_nothing() {
    let mut sl = Sl::new();
    assert_eq!(sl.cqep(0, EPOCH, 10), (1, 1));
    assert_eq!(sl.cqep(0, EPOCH, 11), (1, 0), "its answer was lost: again, and nothing more");
    assert_eq!(sl.cqep(1, EPOCH, 20), (1, 1), "the next turn");
    assert_eq!(sl.cqep(0, EPOCH, 30), (1, 0), "a copy of before");
    assert_eq!(sl.cqep(2, EPOCH + 1, 40), (0, 0), "another connection's");
    let (stamp, cqe) = sl.completion();
    assert_eq!((stamp, cqe.byte_len, cqe.status), (Stamp { epoch: EPOCH, seq: 1 }, 20, WcStatus::Success));
    assert_eq!((sl.stats.star_cqep.get(), sl.stats.star_stale.get()), (2, 3));
}

#[test]
fn each_message_of_a_packet_is_done_once_and_in_order() {
    let mut sl = Sl::new();
    let data = |sl: &Sl, at| sl.net.hosts[0].env.memory.read(sl.data + at, 2).to_vec();
    let (both, first) = (vec![(Ptype::Rdas, 12, 2)], vec![(Ptype::Rda, 8, 34)]);
    assert_eq!(sl.rdcs(0, [0, 8], 1024), (both.clone(), 2));
    assert_eq!((data(&sl, 0), data(&sl, 8), sl.completion().0.seq), (vec![1; 2], vec![2; 2], 1));
    assert_eq!(sl.rdcs(0, [16, 24], 1024), (both, 0), "a copy");
    assert_ne!(data(&sl, 16), [1; 2]);
    assert_eq!(sl.rdcs(2, [32, 255], 1024), (first.clone(), 1), "the second goes beyond the region");
    assert_eq!((data(&sl, 32), sl.completion().0.seq, sl.stats.star_refused.get()), (vec![1; 2], 2, 1));
    assert_eq!(sl.rdcs(3, [40, 48], 91), (first, 1), "the second is cut");
    assert_eq!(sl.rdcs(4, [40, 48], 45), (vec![], 0), "so is the first");
    assert_eq!((sl.completion().0.seq, sl.stats.star_bad.get()), (3, 2));
}

/// RDs of these PSNs come in one turn. What their answers are: type, PSN and LEN.
fn answers_to(form: Form, psns: &[u32]) -> Vec<(Ptype, u32, u16)> {
    let mut sl = Sl::new();
    let answers = answers_in_turn(&mut sl, &mut Answers::new(form), psns);
    assert_eq!(sl.stats.star_rd.get(), psns.len() as u64);
    answers
}

/// The same of this card.
fn answers_in_turn(sl: &mut Sl, owed: &mut Answers, psns: &[u32]) -> Vec<(Ptype, u32, u16)> {
    for psn in psns {
        let header = StarHeader { psn: Psn::new(*psn), ..header(Ptype::Rd, Opt::Send, sl.data, 3) };
        sl.give(owed, header, PREFIX, b"abc");
    }
    let (frames, _) = sl.end_turn(owed);
    let kind = |frame| {
        let StarHeader { ptype, psn, len, addr, .. } = answer(std::slice::from_ref(frame)).header;
        assert_eq!(addr, sl.data);
        (ptype, psn.get(), len)
    };
    frames.iter().map(kind).collect()
}

#[test]
fn packets_that_come_one_behind_the_other_are_answered_together() {
    let (one, many) = (|psn| (Ptype::Rda, psn, 3), |psn, count| (Ptype::Rdas, psn, count));
    assert_eq!(answers_to(Form::Packed, &[8]), [one(8)]);
    assert_eq!(answers_to(Form::Packed, &[0xff_fff8, 0xff_fffc, 0, 4]), [many(4, 4)]);
    assert_eq!(answers_to(Form::Packed, &[8, 12, 20, 24, 16]), [many(12, 2), many(24, 2), one(16)]);
    assert_eq!(answers_to(Form::Packed, &[8, 8, 9, 13, 16]), [one(8), one(8), many(13, 2), one(16)]);
    assert_eq!(answers_to(Form::Paper, &[8, 12]), [one(8), one(12)]);
}

/// Once a packet comes that SF has sent again, each answer leaves once more with those of the next turn, in
/// front of them. After a while without such it leaves once, as before.
#[test]
fn where_packets_are_lost_answers_leave_twice() {
    let (one, two) = (|psn| (Ptype::Rda, psn, 3), |psn| (Ptype::Rdas, psn, 2));
    for form in [Form::Packed, Form::Paper] {
        let (mut sl, mut owed) = (Sl::new(), Answers::new(form));
        let mut turn = |psns: &[u32]| answers_in_turn(&mut sl, &mut owed, psns);
        if form == Form::Paper {
            assert_eq!([turn(&[8]), turn(&[13]), turn(&[16])], [[one(8)], [one(13)], [one(16)]]);
            continue;
        }
        assert_eq!(turn(&[8]), [one(8)]);
        assert_eq!(turn(&[16, 13]), [one(16), one(13)]);
        assert_eq!(turn(&[]), [], "they alone are no reason");
        let all = turn(&[20, 24, 32]);
        assert_eq!(all, [one(13), (Ptype::Rdas, 24, 3), one(32)], "with what goes on behind it as one");
        assert_eq!(turn(&[36]), [two(24), two(36)]);
        let once = (0..2000).find(|n| turn(&[40 + 4 * n]) == [one(40 + 4 * n)]);
        assert!(once.is_some_and(|n| (1000..1030).contains(&n)), "{once:?}");
        assert_eq!(turn(&[8]), [one(8)]);
    }
}

/// A turn may have more answers than are kept.
#[test]
fn as_many_answers_leave_twice_as_there_is_room_for() {
    let (mut sl, mut owed) = (Sl::new(), Answers::new(Form::Packed));
    let psns: Vec<u32> = (0..100).map(|n| 8 * n + 1).collect();
    assert_eq!(answers_in_turn(&mut sl, &mut owed, &psns).len(), 100);
    assert_eq!(answers_in_turn(&mut sl, &mut owed, &[1001]).len(), 32 + 1);
    assert_eq!(answers_in_turn(&mut sl, &mut owed, &[1009]).len(), 1 + 1);
}

/// An answer that no other follows soon is not told later, when its number may be another packet's.
#[test]
fn an_answer_that_waited_long_does_not_leave_twice() {
    let (mut sl, mut owed) = (Sl::new(), Answers::new(Form::Packed));
    answers_in_turn(&mut sl, &mut owed, &[1]);
    assert_eq!(answers_in_turn(&mut sl, &mut owed, &[9]).len(), 1 + 1);
    (0..TURNS_KEPT).for_each(|_| _ = sl.end_turn(&mut owed));
    assert_eq!(answers_in_turn(&mut sl, &mut owed, &[17]).len(), 1);
    owed.begin();
    assert_eq!(answers_in_turn(&mut sl, &mut owed, &[25]).len(), 1, "of another connection");
    assert_eq!(answers_in_turn(&mut sl, &mut owed, &[33]).len(), 1 + 1);
}

#[test]
fn completions_that_come_one_behind_the_other_are_acknowledged_together() {
    for (opts, answers) in [
        ([Opt::Recv; 3], vec![(7, 3)]),
        ([Opt::Send, Opt::Write, Opt::Read], vec![(7, 3)]),
        ([Opt::Recv, Opt::Send, Opt::Send], vec![(5, 0), (7, 2)]),
    ] {
        let mut sl = Sl::new();
        let mut owed = Answers::default();
        for (psn, opt) in (5..).zip(opts) {
            let cqe = CqeMsg { slot: sl.slot, ..CqeMsg::default() };
            let header = StarHeader { psn: Psn::new(psn), ..header(Ptype::Cqep, opt, 0, 32) };
            sl.give(&mut owed, header, PREFIX, &cqe.encode());
        }
        let (frames, events) = sl.end_turn(&mut owed);
        let got = |frame| {
            let StarHeader { ptype, psn, len, .. } = answer(std::slice::from_ref(frame)).header;
            assert_eq!(ptype, Ptype::Ea);
            (psn.get(), len)
        };
        assert_eq!((frames.iter().map(got).collect::<Vec<_>>(), events.len()), (answers, 3), "{opts:?}");
    }
}

#[test]
fn an_early_write_is_not_answered_with_those_before_it() {
    let mut sl = Sl::new();
    sl.bounds.add(sl.data, 256, Access::REMOTE_WRITE).expect("memory");
    let mut owed = Answers::default();
    let turn = |sl: &Sl, number| DataTurn { slot: sl.replay, number, send: false }.encode();
    for (psn, number) in [(4, 0), (8, 2), (12, 1)] {
        let bytes = [&turn(&sl, number)[..], b"abc"].concat();
        let len = bytes.len() as u16;
        let header = StarHeader { psn: Psn::new(psn), ..header(Ptype::Rd, Opt::Recv, sl.data, len) };
        sl.give(&mut owed, header, PREFIX, &bytes);
    }
    let (frames, _) = sl.end_turn(&mut owed);
    let got = |frame| {
        let StarHeader { ptype, psn, len, .. } = answer(std::slice::from_ref(frame)).header;
        (ptype, psn.get(), len)
    };
    let len = turn(&sl, 0).len() as u16 + 3;
    assert_eq!(
        frames.iter().map(got).collect::<Vec<_>>(),
        [(Ptype::Rda, 4, len), (Ptype::Rda, 8, 0), (Ptype::Rda, 12, len)]
    );
}

/// What comes before its turn is kept, and is done once with the one that was missing, in its order. Once
/// memory is taken away, nothing that was kept is.
#[test]
fn what_is_early_is_kept_until_its_turn() {
    for revoked in [false, true] {
        let mut sl = Sl::new();
        sl.bounds.add(sl.data, 256, Access::REMOTE_WRITE).expect("memory");
        let mut owed = Answers::new(Form::Packed);
        owed.begin();
        let len = DataTurn { slot: sl.replay, number: 0, send: false }.encode().len() as u16 + 3;
        let mut give = |sl: &mut Sl, number: u32, data: &[u8; 3]| {
            if revoked && number == 0 {
                owed.forget_ahead();
            }
            let turn = DataTurn { slot: sl.replay, number, send: false };
            let psn = Psn::new(4 * (number + 1));
            let header = StarHeader { psn, ..header(Ptype::Rd, Opt::Recv, sl.data, len) };
            sl.give(&mut owed, header, PREFIX, &[&turn.encode()[..], data].concat());
            let (frames, _) = sl.end_turn(&mut owed);
            let got = |frame| {
                let StarHeader { ptype, psn, len, .. } = answer(std::slice::from_ref(frame)).header;
                (ptype, psn.get(), len)
            };
            frames.iter().map(got).collect::<Vec<_>>()
        };
        let data = |sl: &Sl| sl.net.hosts[0].env.memory.read(sl.data, 3).to_vec();
        for number in [2, 1, 1, 4] {
            assert_eq!(give(&mut sl, number, b"new"), [(Ptype::Rda, 4 * (number + 1), 1)], "kept");
        }
        let before = data(&sl);
        let (all, alone) = ([(Ptype::Rdas, 12, 3)], [(Ptype::Rda, 4, len)]);
        let got = give(&mut sl, 0, b"old");
        assert_eq!((&got[..], sl.stats.star_rd.get()), if revoked { (&alone[..], 1) } else { (&all[..], 3) });
        assert_eq!(data(&sl), if revoked { b"old" } else { b"new" });
        assert_ne!(before, b"new");
        if !revoked {
            assert_eq!(give(&mut sl, 2, b"bad"), [(Ptype::Rda, 12, len)], "a copy");
            assert_eq!(give(&mut sl, 3, b"3rd"), [(Ptype::Rdas, 20, 2)]);
            assert_eq!((data(&sl), sl.stats.star_stale.get()), (b"new".to_vec(), 1));
        }
    }
}

#[test]
fn the_last_data_of_a_message_brings_its_completion_once() {
    let mut sl = Sl::new();
    let data = |sl: &Sl| sl.net.hosts[0].env.memory.read(sl.data, 3).to_vec();
    let done = Some((Ptype::Rda, 35));
    assert_eq!(sl.rdc(0, EPOCH, b""), (Some((Ptype::Gda, 0)), 0), "it has not come");
    assert_eq!((sl.rdc(0, EPOCH, b"one"), data(&sl)), ((done, 1), b"one".to_vec()));
    assert_eq!((sl.rdc(0, EPOCH, b"two"), data(&sl)), ((done, 0), b"one".to_vec()), "a copy");
    assert_eq!(sl.rdc(0, EPOCH, b""), (Some((Ptype::Rda, 32)), 0), "it has");
    assert_eq!((sl.rdc(1, EPOCH, b"new"), data(&sl)), ((done, 1), b"new".to_vec()), "the next turn");
    assert_eq!((sl.rdc(0, EPOCH, b"old"), data(&sl)), ((done, 0), b"new".to_vec()), "a turn late");
    assert_eq!(
        (sl.rdc(2, EPOCH + 1, b"bad"), data(&sl)),
        ((None, 0), b"new".to_vec()),
        "another connection's"
    );
    let (stamp, cqe) = sl.completion();
    assert_eq!((stamp.seq, cqe.byte_len), (1, 3));
    assert_eq!([&sl.stats.star_rd, &sl.stats.star_cqep, &sl.stats.star_stale].map(|c| c.get()), [2, 2, 4]);
    /* the program has deregistered the buffer: a copy is answered, and a new message is not placed */
    sl.bounds.remove(sl.data, 256, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC);
    assert_eq!((sl.rdc(1, EPOCH, b"two"), sl.rdc(2, EPOCH, b"two")), ((done, 0), (None, 0)));
    assert_eq!((sl.completion().0.seq, data(&sl)), (1, b"new".to_vec()));
    /* no slot of this connection */
    sl.area = sl.elsewhere;
    assert_eq!(sl.rdc(1, EPOCH, b"two"), (None, 0));
    assert_eq!(sl.stats.star_refused.get(), 2);
}

/// A SEND in its turn: data, then the last of it with the completion, each once and behind the one before.
#[test]
fn the_last_data_of_a_message_has_its_turn() {
    let mut sl = Sl::new();
    let slot = sl.replay;
    let of_send = |number| DataTurn { slot, number, send: true };
    let data = |sl: &Sl| sl.net.hosts[0].env.memory.read(sl.data, 3).to_vec();
    let (done, early) = (Some((Ptype::Rda, 51)), Some((Ptype::Rda, 0)));
    assert_eq!(sl.rdc_in_turn(0, of_send(1), b"two"), (early, 0), "the first is missing");
    assert_eq!(sl.rdc_in_turn(0, of_send(1), b""), (Some((Ptype::Gda, 0)), 0), "it has not come");
    let first = [&of_send(0).encode()[..], b"one"].concat();
    let head = header(Ptype::Rd, Opt::Recv, sl.data, first.len() as u16);
    assert_eq!(answer(&sl.get(head, PREFIX, &first).0).header.len, 19);
    assert_eq!((sl.rdc_in_turn(0, of_send(1), b"two"), data(&sl)), ((done, 1), b"two".to_vec()));
    assert_eq!((sl.rdc_in_turn(0, of_send(1), b"bad"), data(&sl)), ((done, 0), b"two".to_vec()), "a copy");
    assert_eq!(sl.rdc_in_turn(0, of_send(1), b""), (Some((Ptype::Rda, 48)), 0), "it has");
    /* a copy of what came before is answered, too */
    assert_eq!(answer(&sl.get(head, PREFIX, &first).0).header.len, 19);
    assert_eq!(data(&sl), b"two");
    assert_eq!(sl.rdc_in_turn(1, of_send(3), b"bad").0, early);
    assert_eq!(sl.rdc_in_turn(1, of_send(1), b"bad"), (None, 0), "its turn was another's");
    assert_eq!((sl.completion().0.seq, data(&sl)), (0, b"two".to_vec()));
    /* the buffer is no memory for WRITEs, nor is the slot anywhere else */
    for turn in [
        DataTurn { send: false, ..of_send(2) },
        DataTurn { slot: slot + 8, ..of_send(2) },
        DataTurn { slot: sl.data, ..of_send(2) },
    ] {
        assert_eq!(sl.rdc_in_turn(1, turn, b"bad"), (None, 0), "{turn:?}");
    }
    assert_eq!((sl.rdc_in_turn(1, of_send(2), b"new"), data(&sl)), ((done, 1), b"new".to_vec()));
    assert_eq!((sl.stats.star_writes_early.get(), sl.stats.star_refused.get()), (2, 2));
}

#[test]
fn atomics_are_done_once() {
    let mut sl = Sl::new();
    sl.net.hosts[0].env.memory.set_word(sl.data, 5);
    let add = |seq| {
        Atomic { op: SendOp::FetchAdd, seq, slots: 0, slot: sl.replay, compare_add: 3, swap: 0 }.encode()
    };
    let (first, second) = (add(0), add(1));
    let head = header(Ptype::Gd, Opt::Recv, sl.data, 32);
    let mut before = |atomic: &[u8]| {
        let (frames, _) = sl.get(head, PREFIX, atomic);
        (!frames.is_empty()).then(|| answer(&frames).data.to_vec())
    };
    let value = |n: u64| Some(n.to_be_bytes().to_vec());
    assert_eq!([before(&first), before(&first), before(&second)], [value(5), value(5), value(8)]);
    assert_eq!(before(&first), None, "its slot has a later one");
    assert_eq!(sl.net.hosts[0].env.memory.word(sl.data), 11);
}

/// The card keeps nothing: the slot of the one before shows that it is done, and the packet has its address.
#[test]
fn atomics_are_done_behind_the_one_before() {
    let mut sl = Sl::with_slots(4);
    sl.net.hosts[0].env.memory.set_word(sl.data, 5);
    let (data, replay) = (sl.data, sl.replay);
    let head = header(Ptype::Gd, Opt::Recv, data, 32);
    let mut before = |seq: u32| {
        let slot = replay + u64::from(seq % 4) * REPLAY_SLOT;
        let atomic = Atomic { op: SendOp::FetchAdd, seq, slots: 2, slot, compare_add: 3, swap: 0 };
        let (frames, _) = sl.get(head, PREFIX, &atomic.encode());
        (!frames.is_empty()).then(|| answer(&frames).data.to_vec())
    };
    let value = |n: u64| Some(n.to_be_bytes().to_vec());
    assert_eq!([before(1), before(2), before(u32::MAX - 4)], [Some(vec![]), Some(vec![]), None]);
    assert_eq!([before(0), before(2), before(1), before(2)], [value(5), Some(vec![]), value(8), value(11)]);
    assert_eq!([before(0), before(4), before(3), before(4)], [value(5), Some(vec![]), value(14), value(17)]);
    assert_eq!([before(0), before(1), before(3)], [None, value(8), value(14)]);
    assert_eq!(sl.net.hosts[0].env.memory.word(data), 20);
    assert_eq!((sl.stats.star_atomics.get(), sl.stats.star_atomics_early.get()), (5, 4));
}

/// WRITEs have one slot: what it has, and what comes before that, is answered and not written again.
#[test]
fn writes_are_done_in_their_turn() {
    let mut sl = Sl::new();
    sl.bounds.add(sl.data, 256, Access::REMOTE_WRITE).expect("memory");
    let (slot, data) = (sl.replay, sl.data);
    let write = |sl: &mut Sl, number: u32, prefix: Prefix, slot: u64, text: &str| {
        let bytes = [&DataTurn { slot, number, send: false }.encode()[..], text.as_bytes()].concat();
        let head = header(Ptype::Rd, Opt::Recv, data, bytes.len() as u16);
        let (frames, events) = sl.get(head, prefix, &bytes);
        assert!(events.is_empty(), "SL's program sees its memory alone");
        let answered = (!frames.is_empty()).then(|| {
            let StarHeader { ptype, opt, len, .. } = answer(&frames).header;
            assert_eq!((ptype, opt), (Ptype::Rda, Opt::Recv));
            len
        });
        let there = sl.net.hosts[0].env.memory.read(data, 3).to_vec();
        (answered, String::from_utf8_lossy(&there).into_owned())
    };
    let mut done = |number, text: &str| write(&mut sl, number, PREFIX, slot, text);
    let is = |answered, there: &str| (answered, there.to_owned());
    assert_eq!(done(1, "bbb").0, Some(0), "early");
    assert_eq!(done(0, "aaa"), is(Some(19), "aaa"));
    assert_eq!(done(1, "bbb"), is(Some(19), "bbb"));
    assert_eq!(done(0, "xxx"), is(Some(19), "bbb"), "a copy of before");
    assert_eq!(done(1, "xxx"), is(Some(19), "bbb"), "a copy");
    assert_eq!(done(3, "ddd"), is(Some(0), "bbb"), "early");
    assert_eq!(done(2, "ccc"), is(Some(19), "ccc"));
    assert_eq!(done(3, ""), is(None, "ccc"), "nothing to write");
    let other = Prefix { epoch: EPOCH + 1, ..PREFIX };
    assert_eq!(write(&mut sl, 3, other, slot, "xxx"), is(None, "ccc"), "another connection's");
    assert_eq!(write(&mut sl, 3, PREFIX, slot + 8, "xxx"), is(None, "ccc"), "no slot");
    assert_eq!(write(&mut sl, 3, PREFIX, data, "xxx"), is(None, "ccc"), "nor this");
    (sl.area, sl.elsewhere) = (sl.elsewhere, sl.area);
    assert_eq!(write(&mut sl, 3, PREFIX, slot, "xxx"), is(None, "ccc"), "of another connection");
    sl.area = sl.elsewhere;
    /* the program has deregistered it: what was done is answered still, and nothing is written */
    sl.bounds.remove(data, 256, Access::REMOTE_WRITE);
    assert_eq!(write(&mut sl, 2, PREFIX, slot, "xxx"), is(Some(19), "ccc"));
    assert_eq!(write(&mut sl, 3, PREFIX, slot, "xxx"), is(None, "ccc"));
    let stats = &sl.stats;
    let counts =
        [&stats.star_rd, &stats.star_writes_early, &stats.star_stale, &stats.star_bad, &stats.star_refused];
    assert_eq!(counts.map(|count| count.get()), [3, 2, 4, 2, 3]);
}

/// A packet that claims more slots, or an earlier first one, does not lead the card out of those that there
/// are.
#[test]
fn a_ring_of_atomics_ends_where_the_slots_do() {
    let mut sl = Sl::with_slots(4);
    let (first, last) = (sl.replay, sl.replay + 3 * REPLAY_SLOT);
    /* its gate is just before them */
    sl.area = SlotArea::new(sl.slot, CQE_SLOT + 4 * REPLAY_SLOT).expect("an area");
    /* with a word there that would pass for the stamp of the one before */
    let stamp = Stamp { epoch: EPOCH, seq: u32::MAX };
    sl.net.hosts[0].env.memory.set_word(sl.data, stamp.word());
    let hostile = [
        (0, 3, first),
        (0, 31, first),
        (0, 2, first + REPLAY_SLOT),
        (1, 2, first),
        (1, 0, last + REPLAY_SLOT),
        (0, 31, u64::MAX - 15),
        (1, 4, 0),
        (1, 2, sl.data),
    ];
    for (seq, slots, slot) in hostile {
        let atomic = Atomic { op: SendOp::FetchAdd, seq, slots, slot, compare_add: 3, swap: 0 };
        let refused = sl.stats.star_refused.get();
        let (frames, _) = sl.get(header(Ptype::Gd, Opt::Recv, sl.data, 32), PREFIX, &atomic.encode());
        assert!(frames.is_empty(), "{atomic:?}");
        assert_eq!(sl.stats.star_refused.get(), refused + 1, "{atomic:?}");
    }
    /* more slots than have an address are none */
    let atomic = Atomic { op: SendOp::FetchAdd, seq: 0, slots: 32, slot: first, compare_add: 3, swap: 0 };
    assert!(sl.get(header(Ptype::Gd, Opt::Recv, sl.data, 32), PREFIX, &atomic.encode()).0.is_empty());
    assert_eq!((sl.stats.star_bad.get(), sl.stats.star_atomics.get()), (1, 0));
    assert_eq!(sl.net.hosts[0].env.memory.word(sl.data), stamp.word());
}

#[test]
fn data_goes_where_it_may() {
    let mut sl = Sl::new();
    let (frames, _) = sl.get(header(Ptype::Rd, Opt::Send, sl.data + 4, 4), PREFIX, b"data");
    let rda = answer(&frames);
    assert_eq!((rda.header.ptype, rda.header.qpn, rda.header.addr), (Ptype::Rda, 0x20, sl.data + 4));
    let (frames, _) = sl.get(header(Ptype::Gd, Opt::Send, sl.data + 4, 4), PREFIX, &[]);
    assert_eq!(answer(&frames).data, b"data");
    let quiet = StarHeader { ack: false, ..header(Ptype::Rd, Opt::Read, sl.data, 4) };
    assert!(sl.get(quiet, PREFIX, b"more").0.is_empty(), "no answer was wanted");
    assert_eq!(sl.net.hosts[0].env.memory.read(sl.data, 8), b"moredata");
    let refused = [
        (header(Ptype::Rd, Opt::Write, sl.data, 4), PREFIX),
        (header(Ptype::Rd, Opt::Send, sl.data + 253, 4), PREFIX),
        (header(Ptype::Rd, Opt::Send, sl.slot, 4), PREFIX),
        (header(Ptype::Rd, Opt::Send, u64::MAX - 1, 4), PREFIX),
    ];
    for (header, prefix) in refused {
        assert!(sl.get(header, prefix, b"evil").0.is_empty(), "{header:?}");
    }
    assert!(sl.get(header(Ptype::Gd, Opt::Read, sl.data, 4), PREFIX, &[]).0.is_empty(), "no remote READ");
    assert_eq!((sl.stats.star_refused.get(), sl.stats.star_bad.get()), (5, 0));
    assert_eq!(sl.net.hosts[0].env.memory.read(sl.data, 8), b"moredata");
}

/// SF asks for no bytes without naming some, and is not answered.
#[test]
fn an_empty_gather_is_none() {
    let mut sl = Sl::new();
    for opt in [Opt::Send, Opt::Read, Opt::Recv] {
        let (frames, events) = sl.get(header(Ptype::Gd, opt, sl.data, 0), PREFIX, &[]);
        assert!(frames.is_empty() && events.is_empty(), "{opt:?}");
    }
    assert_eq!((sl.stats.star_bad.get(), sl.stats.star_gd.get()), (3, 0));
}

#[test]
fn the_host_gets_what_is_stored() {
    let mut sl = Sl::new();
    let (frames, events) = sl.get(header(Ptype::Ea, Opt::Write, 0, 0), PREFIX, &[]);
    let what = News::Stored(Psn::new(1));
    assert_eq!(events, [SlEvent { qpn: PREFIX.qpn, epoch: EPOCH, queue: Queue::Send, what, upto: None }]);
    assert!(frames.is_empty());
}

/// A packet fills the slots of its connection, and no others.
#[test]
fn a_connection_fills_its_own_slots_alone() {
    let mut sl = Sl::new();
    let (own, slot) = (sl.area, sl.slot);
    sl.area = sl.elsewhere;
    assert_eq!(sl.cqep(0, EPOCH, 5), (0, 0), "another's");
    sl.area = own;
    let range = own.range();
    for at in [own.gate(), range.addr + range.len, !31] {
        sl.slot = at;
        assert_eq!(sl.cqep(0, EPOCH, 5), (0, 0), "none of it");
    }
    assert_eq!(sl.stats.star_refused.get(), 4);
    sl.slot = slot;
    assert_eq!(sl.cqep(0, EPOCH, 5), (1, 1));
    assert_eq!(sl.completion().1.byte_len, 5);
}
