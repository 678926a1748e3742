//! A card that has no record of connections: which packets it takes for a connection's, what reaches nothing
//! once that is over, and what becomes of its slots.

use std::cell::RefCell;
use std::rc::Rc;

use crate::common::roles::{Conn, SECOND, STAR, World};
use starverbs_core::{Access, Counters, FrameMeta, Gid, QpState, SendOp, SendWqe, Sge, WcStatus};
use starverbs_sim::{READ, Recv, Send, SimHost, StarFrame, WRITE};
use starverbs_star::answers::Answers;
use starverbs_star::bounds::Bounds;
use starverbs_star::card::Turn;
use starverbs_star::control::Preference;
use starverbs_star::env::StarSource;
use starverbs_star::host::{EndpointHost, InboundPacket};
use starverbs_star::stateless::{StatelessCard, handle};
use starverbs_star::token::{CardSecret, SlotArea};
use starverbs_star::wire::{
    CRC_LEN, CardHalf, HEADER_LEN, Opt, PORT_STATELESS, PREFIX_LEN, Ptype, StarPacket,
};

/// Of a message that has more packets than have turns.
const LEN: u32 = 20_000;
/// As the simulator seeds the secret of host 0's card.
const SEED: [u64; 2] = [70, PORT_STATELESS as u64];

type Frames = Rc<RefCell<Vec<StarFrame>>>;

/// Somebody reads the wire: what goes to the stateless half.
fn read_wire(w: &mut World) -> Frames {
    let kept = Frames::default();
    let seen = Rc::clone(&kept);
    w.net.forger = Some(Box::new(move |frame| {
        if frame.path.dport == PORT_STATELESS {
            seen.borrow_mut().push(frame.clone());
        }
        None
    }));
    kept
}

/// A connection whose first end is stateless.
fn stateless(w: &mut World, hosts: [usize; 2]) -> Conn {
    let conn = w.connect_hosts(hosts, [None; 2]);
    w.want(&conn, 0, Preference::Stateless);
    w.net.run_for(SECOND);
    assert_eq!(w.roles(&conn), STAR);
    conn
}

/// The program of the second end sends a message; gives where it is to land.
fn send(w: &mut World, conn: &Conn, byte: u8) -> Sge {
    let [to, from] = conn.hosts.map(|at| {
        let host = &mut w.net.hosts[at];
        let sge = host.region_in(host.pd, LEN, Access::LOCAL_WRITE);
        host.env.memory.allow(sge.addr, LEN.into(), READ | WRITE);
        sge
    });
    conn.rqs[0].post(Recv { wr_id: 1, sges: vec![to] }).expect("room");
    w.net.doorbell(conn.hosts[0], conn.qpns[0]);
    w.net.hosts[conn.hosts[1]].env.memory.write(from.addr, &[byte; LEN as usize]);
    conn.sqs[1].post(Send { wqe: SendWqe::default(), sges: vec![from], inline: None }).expect("room");
    w.net.doorbell(conn.hosts[1], conn.qpns[1]);
    to
}

/// A message that has arrived, with what of it went to the stateless half.
fn sent(w: &mut World, conn: &Conn, byte: u8) -> (Sge, Vec<StarFrame>) {
    let frames = read_wire(w);
    let to = send(w, conn, byte);
    w.net.run_for(SECOND);
    assert!(w.completions(conn).iter().all(|cqe| cqe.status == WcStatus::Success));
    assert_eq!(at(w, to), (byte, byte));
    let frames = frames.take();
    (to, frames)
}

/// First and last byte of a message.
fn at(w: &World, to: Sge) -> (u8, u8) {
    let bytes = w.net.hosts[0].env.memory.read(to.addr, LEN as usize);
    (bytes[0], bytes[LEN as usize - 1])
}

fn ptype(frame: &StarFrame) -> Ptype {
    open(frame).header.ptype
}

fn open(frame: &StarFrame) -> StarPacket<'_> {
    /* what was changed has wrong checksums, which anybody can make right */
    StarPacket::parse(CardHalf::Stateless, &frame.bytes[..frame.bytes.len() - CRC_LEN]).expect("a packet")
}

/// Where the slots of the connection lie that a packet is of.
fn slots_of(frame: &StarFrame) -> SlotArea {
    open(frame).token.expect("a token").slots
}

/// A packet comes to host 0, alone in its turn; how many it has dropped for it, and how many its stateless
/// half has sent.
fn replay(w: &mut World, frame: &StarFrame) -> (u64, usize) {
    let dropped = arrive(w, frame);
    let now = w.net.now();
    let SimHost { nic, env, star, .. } = &mut w.net.hosts[0];
    star.as_mut().expect("it has StaR").endpoints.run_timers(&mut Turn { nic, env, now });
    let answers = env.flush_star().into_iter().filter(|frame| frame.path.sport == PORT_STATELESS);
    (dropped, answers.count())
}

/// A packet comes to host 0, and more may in this turn; how many it has dropped for it.
fn arrive(w: &mut World, frame: &StarFrame) -> u64 {
    let now = w.net.now();
    let SimHost { nic, env, star, .. } = &mut w.net.hosts[0];
    let drops = nic.counters().star_drops.get();
    let meta = FrameMeta { src: frame.path.src, dst: frame.path.dst, ..FrameMeta::default() };
    let packet = open(frame);
    let (side, port) = (CardHalf::Stateless, frame.path.sport);
    let inbound = InboundPacket { side, meta: &meta, port, packet: &packet };
    star.as_mut().expect("it has StaR").handle_packet(&mut Turn { nic, env, now }, &inbound);
    nic.counters().star_drops.get() - drops
}

/// Bytes of slots that host 0 keeps of ended connections.
fn kept(w: &World) -> u64 {
    w.net.hosts[0].nic.counters().star_quarantined_bytes.get()
}

fn destroy(w: &mut World, conn: &Conn) {
    let now = w.net.now();
    w.net.hosts[0].destroy_qp(conn.qpns[0], now).expect("it is there");
}

/// For a tenth of a second nobody but the card is at host 0: a secret, bounds, and this region of its memory.
/// Gives what it has counted, and what came.
fn serve_alone(
    w: &mut World,
    frames: &Frames,
    (region, access): (Sge, Access),
) -> (Counters, Vec<StarFrame>) {
    let host = w.net.hosts[0].star.take();
    let (secret, mut bounds, stats) = (CardSecret::new(SEED), Bounds::new(), Counters::default());
    bounds.add(region.addr, region.len.into(), access).expect("memory");
    let card = StatelessCard { bounds: Some(&bounds), secret: &secret, stats: &stats };
    let mut owed = Answers::default();
    let mut came = Vec::new();
    for _ in 0..100 {
        w.net.run_for(SECOND / 1000);
        for frame in frames.take() {
            let meta = FrameMeta { src: frame.path.src, dst: frame.path.dst, ..FrameMeta::default() };
            let from = StarSource { meta: &meta, port: frame.path.sport };
            handle(&card, &mut owed, &mut w.net.hosts[0].env, from, &open(&frame));
            came.push(frame);
        }
        owed.flush(&mut w.net.hosts[0].env);
    }
    assert_eq!([&stats.star_drops, &stats.star_refused, &stats.star_bad].map(|count| count.get()), [0; 3]);
    w.net.hosts[0].star = host;
    (stats, came)
}

/// A whole message is placed and completed by a card that has a secret, bounds and memory, while its host has
/// no part in it.
#[test]
fn a_card_without_its_host_serves_a_connection() {
    let mut w = World::new([Some(100); 2]);
    let conn = stateless(&mut w, [0, 1]);
    let frames = read_wire(&mut w);
    let to = send(&mut w, &conn, 7);
    while w.net.hosts[1].nic.counters().star_rcvd_wqep.get() == 0 {
        assert!(w.net.step());
    }
    let (stats, came) = serve_alone(&mut w, &frames, (to, Access::LOCAL_WRITE));
    assert_eq!((at(&w, to), stats.star_cqep.get()), ((7, 7), 1));
    assert!(stats.star_rd.get() >= 3, "{}", stats.star_rd.get());
    /* the card's events wait for the host, which looks at them behind a packet */
    assert_eq!(w.net.hosts[0].env.star.events.len(), 2, "an EA, and the completion");
    replay(&mut w, came.last().expect("a packet"));
    w.net.run_for(SECOND);
    let ends: Vec<_> = w.completions(&conn).iter().map(|cqe| (cqe.qpn, cqe.status)).collect();
    assert!(ends.contains(&(conn.qpns[0], WcStatus::Success)) && ends.len() == 2, "{ends:?}");
}

/// So are a READ, a WRITE in its turn and an atomic of SF, and a WRITE of SL, whose completion is a CQEP.
#[test]
fn a_card_without_its_host_serves_requests_of_each_kind() {
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let mut w = World::new([Some(100); 2]);
    let conn = stateless(&mut w, [0, 1]);
    let regions = [0, 1].map(|at| {
        let host = &mut w.net.hosts[at];
        let sge = host.region_in(host.pd, LEN, rights);
        host.env.memory.allow(sge.addr, LEN.into(), READ | WRITE);
        sge
    });
    w.net.run_for(SECOND);
    let frames = read_wire(&mut w);
    for (end, op, length, ptype_of, opt) in [
        (1, SendOp::Read, LEN, Ptype::Gd, Opt::Read),
        (1, SendOp::Write, LEN, Ptype::Rd, Opt::Recv),
        (1, SendOp::FetchAdd, 8, Ptype::Gd, Opt::Recv),
        (0, SendOp::Write, LEN, Ptype::Cqep, Opt::Write),
    ] {
        let (mine, theirs) = (regions[end], regions[1 - end]);
        let from = if op == SendOp::Write { end } else { 1 - end };
        w.net.hosts[from].env.memory.write(regions[from].addr, &[end as u8 + 7; LEN as usize]);
        w.net.hosts[1 - from].env.memory.write(regions[1 - from].addr, &[0; LEN as usize]);
        let (remote_addr, rkey, compare_add) = (theirs.addr, theirs.lkey, 1);
        let wqe = SendWqe { op, remote_addr, rkey, compare_add, length, num_sge: 1, ..SendWqe::default() };
        let before = w.net.hosts[1].nic.counters().star_rcvd_wqep.get();
        conn.sqs[end]
            .post(Send { wqe, sges: vec![Sge { len: length, ..mine }], inline: None })
            .expect("room");
        w.net.doorbell(conn.hosts[end], conn.qpns[end]);
        while end == 0 && w.net.hosts[1].nic.counters().star_rcvd_wqep.get() == before {
            assert!(w.net.step());
        }
        let (stats, came) = serve_alone(&mut w, &frames, (regions[0], rights));
        let of_kind = |frame: &&StarFrame| (ptype(frame), open(frame).header.opt) == (ptype_of, opt);
        assert!(came.iter().filter(of_kind).count() > 0, "{op:?}: no {ptype_of:?}");
        let counts = [&stats.star_gd, &stats.star_rd, &stats.star_atomics, &stats.star_cqep];
        let counts = counts.map(|count| count.get() > 0);
        if end == 0 {
            assert_eq!(counts, [true, false, false, true]);
            replay(&mut w, came.last().expect("a packet"));
            w.net.run_for(SECOND);
        } else {
            let atomic = op == SendOp::FetchAdd;
            assert_eq!(counts, [op == SendOp::Read, op == SendOp::Write, atomic, false], "{op:?}");
        }
        let ends: Vec<_> = w.completions(&conn).iter().map(|cqe| (cqe.qpn, cqe.status)).collect();
        assert_eq!(ends, [(conn.qpns[end], WcStatus::Success)], "{op:?}");
        let there = w.net.hosts[1 - from].env.memory.read(regions[1 - from].addr, length as usize);
        assert!(there.iter().all(|byte| *byte == end as u8 + 7), "{op:?}");
        if op == SendOp::FetchAdd {
            assert_eq!(w.net.hosts[0].env.memory.read(regions[0].addr, 2), [9, 8], "one more");
        }
    }
}

/// Who has no token for the very packet that he sends reaches nothing, and gets no answer. A wild address in
/// it is not looked at.
#[test]
fn nobody_else_has_the_token() {
    let mut w = World::new([Some(100); 3]);
    let conn = stateless(&mut w, [0, 1]);
    let (to, frames) = sent(&mut w, &conn, 7);
    w.net.hosts[0].env.memory.write(to.addr, &[0; LEN as usize]);
    let rd = frames.iter().find(|frame| ptype(frame) == Ptype::Rd).expect("the first data");
    let mut forged = Vec::new();
    for (byte, bit) in [
        (HEADER_LEN, 1),                   /* more slots */
        (HEADER_LEN + 3, 1),               /* another of SL's QPs */
        (HEADER_LEN + 4, 1),               /* another boot of its card */
        (HEADER_LEN + PREFIX_LEN, 1),      /* slots elsewhere */
        (HEADER_LEN + PREFIX_LEN + 7, 32), /* slots beside */
        (HEADER_LEN + PREFIX_LEN + 7, 1),  /* twice the slots */
        (HEADER_LEN + PREFIX_LEN + 8, 1),
        (HEADER_LEN + PREFIX_LEN + 15, 128),
    ] {
        let mut frame = rd.clone();
        frame.bytes[byte] ^= bit;
        forged.push(frame);
    }
    let mut later = rd.clone();
    later.bytes[4] ^= 1;
    later.bytes[HEADER_LEN + 7] ^= 1;
    forged.push(later);
    let mut elsewhere = rd.clone();
    elsewhere.path.src = w.net.hosts[2].gid;
    forged.push(elsewhere);
    let mut nowhere = rd.clone();
    nowhere.path.src = Gid::default();
    forged.push(nowhere);
    for frame in &forged {
        assert_eq!(replay(&mut w, frame), (1, 0), "{frame:?}");
    }
    assert_eq!(at(&w, to), (0, 0));
    assert_eq!(w.net.hosts[0].nic.counters().star_refused.get(), 0);
}

/// What docs/security.md says of who reads the wire: with the peer's address he has data written once more,
/// while the connection is open. A completion comes once.
#[test]
fn who_reads_the_wire_can_replay_while_a_connection_is_open() {
    let mut w = World::new([Some(100); 2]);
    let conn = stateless(&mut w, [0, 1]);
    let (to, frames) = sent(&mut w, &conn, 7);
    w.net.hosts[0].env.memory.write(to.addr, &[0; LEN as usize]);
    for frame in &frames {
        assert_eq!(replay(&mut w, frame).0, 0);
    }
    assert_eq!(at(&w, to), (7, 0), "but for the last packet, which has the completion");
    assert_eq!(w.completions(&conn), []);
    /* in ERR the program has its buffers back */
    w.net.hosts[0].env.memory.write(to.addr, &[0; LEN as usize]);
    let now = w.net.now();
    w.net.hosts[0].to_state(conn.qpns[0], QpState::Err, now).expect("from RTS");
    for frame in &frames {
        assert_eq!(replay(&mut w, frame), (1, 0));
    }
    destroy(&mut w, &conn);
    for frame in &frames {
        assert_eq!(replay(&mut w, frame), (1, 0));
    }
    w.net.run_for(5 * SECOND);
    for frame in &frames {
        assert_eq!(replay(&mut w, frame), (1, 0));
    }
    assert_eq!(at(&w, to), (0, 0));
}

/// A connection that is plain RC again has no use for packets of StaR.
#[test]
fn a_connection_that_has_reverted_is_not_open() {
    let mut w = World::new([Some(100); 2]);
    let (other, conn) = (stateless(&mut w, [0, 1]), stateless(&mut w, [0, 1]));
    let (to, frames) = sent(&mut w, &conn, 7);
    w.want(&conn, 0, Preference::Off);
    w.net.run_for(SECOND);
    assert_eq!((w.roles(&conn), w.roles(&other)), ([None; 2], STAR));
    w.net.hosts[0].env.memory.write(to.addr, &[0; LEN as usize]);
    for frame in &frames {
        assert_eq!(replay(&mut w, frame), (1, 0));
    }
    assert_eq!(at(&w, to), (0, 0));
    let again = stateless(&mut w, [0, 1]);
    let (_, later) = sent(&mut w, &again, 8);
    assert_eq!(slots_of(&later[0]), slots_of(&frames[0]), "its peer agreed to the end");
}

/// Slots of an ended connection are another's once its peer has confirmed, and late packets find the gate of
/// that one.
#[test]
fn slots_are_another_connections_once_the_peer_has_confirmed() {
    let mut w = World::new([Some(100); 2]);
    let (other, conn) = (stateless(&mut w, [0, 1]), stateless(&mut w, [0, 1]));
    let (_, frames) = sent(&mut w, &conn, 7);
    destroy(&mut w, &conn);
    let area = slots_of(&frames[0]);
    assert_eq!(kept(&w), area.range().len);
    w.net.run_for(SECOND / 10);
    assert_eq!(kept(&w), area.range().len, "the peer has confirmed, and it stays slots");
    let again = stateless(&mut w, [0, 1]);
    let (to, later) = sent(&mut w, &again, 8);
    assert_eq!((slots_of(&later[0]), kept(&w)), (area, 0));
    for frame in &frames {
        assert_eq!(replay(&mut w, frame), (1, 0), "of the former connection");
    }
    assert_eq!(at(&w, to), (8, 8));
    assert_eq!(w.write(&again, 1), Some(WcStatus::Success));
    assert_eq!(w.write(&other, 1), Some(WcStatus::Success));
}

/// A peer that does not confirm has the slots quarantined, until the last connection ends: then there is
/// another secret.
#[test]
fn slots_of_a_silent_peer_are_quarantined_until_the_secret_is_replaced() {
    let mut w = World::new([Some(100); 3]);
    w.net.hosts[0].env.memory.watch();
    let (other, conn) = (stateless(&mut w, [0, 2]), stateless(&mut w, [0, 1]));
    let (to, frames) = sent(&mut w, &conn, 7);
    w.net.cut(0, 1, 100 * SECOND);
    destroy(&mut w, &conn);
    let area = slots_of(&frames[0]);
    for _ in 0..3 {
        w.net.run_for(5 * SECOND);
        let again = stateless(&mut w, [0, 2]);
        let (_, later) = sent(&mut w, &again, 8);
        assert_ne!(slots_of(&later[0]), area);
        destroy(&mut w, &again);
        w.net.run_for(SECOND);
        assert_eq!(kept(&w), 2 * area.range().len, "another's, confirmed, is used again");
    }
    for frame in &frames {
        assert_eq!(replay(&mut w, frame), (1, 0));
    }
    let (_, last) = sent(&mut w, &other, 9);
    assert_eq!(arrive(&mut w, &last[0]), 0);
    destroy(&mut w, &other);
    assert_eq!(kept(&w), 0);
    /* their memory is none any more: the simulator complains of whoever looks there */
    drop(w.net.hosts[0].env.make_slots(64, 0));
    for frame in last[..1].iter().chain(&frames) {
        assert_eq!(replay(&mut w, frame), (1, 0));
    }
    let fresh = stateless(&mut w, [0, 2]);
    for frame in &frames {
        assert_eq!(replay(&mut w, frame), (1, 0));
    }
    sent(&mut w, &fresh, 9);
    assert_eq!(at(&w, to), (7, 7));
}
