//! Whose turn it is when several QPs send to one host: nobody waits for another's whole queue.

use starverbs_core::qp::RecvSource;
use starverbs_core::{Access, AvId, NicConfig, QpType, Qpn, SendOp, SendWqe, Sge, WcOpcode};
use starverbs_sim::{Faults, Net, Recv, Send, Setup, SimCq, SimRq, SimSq};

/// More than the window towards a host holds.
const MANY: u32 = 1024;
const SIZE: u32 = 100;
const GRH: u32 = 40;
/// Packets of one turn.
const TURN: usize = 64;

/// A UD QP of `net`'s host `at`, with room for [`MANY`] messages.
fn ud(net: &mut Net, at: usize, cq: &SimCq) -> (Qpn, SimSq, SimRq) {
    let (sq, rq) = (SimSq::new(MANY), SimRq::new(2 * MANY as usize, 1));
    let host = &mut net.hosts[at];
    let qpn = host.qp(QpType::Ud, &sq, RecvSource::Own(rq.clone()), [cq, cq], true);
    host.to_rts_ud(qpn, &Setup::default(), 0);
    (qpn, sq, rq)
}

/// A QP with a full queue and one with a single message towards the same host: when the window opens, the
/// first has its turn, and then the second.
#[test]
fn a_datagram_waits_for_one_turn_of_another_queue() {
    let mut net = Net::new(2, NicConfig::default(), Faults::default(), 1);
    /* A turn that the port cuts short begins anew. */
    net.hosts[0].env.port = 4 * TURN;
    let (sent, received) = (SimCq::new(4 * MANY as usize), SimCq::new(4 * MANY as usize));
    let (busy, busy_sq, _) = ud(&mut net, 0, &sent);
    let (brief, brief_sq, _) = ud(&mut net, 0, &sent);
    let (dest, _, rq) = ud(&mut net, 1, &received);
    let (addr, lkey) = net.hosts[1].region(u64::from(SIZE + GRH), Access::LOCAL_WRITE);
    for wr_id in 0..u64::from(MANY) + 1 {
        let sges = vec![Sge { addr, len: SIZE + GRH, lkey }];
        rq.post(Recv { wr_id, sges }).expect("there is room");
    }
    let (addr, lkey) = net.hosts[0].region(u64::from(SIZE), Access::empty());
    let av: AvId = {
        let dgid = net.hosts[1].gid;
        let host = &mut net.hosts[0];
        host.nic.create_av(host.pd, host.av(dgid)).expect("an AV")
    };
    let wqe =
        SendWqe { op: SendOp::Send, av, remote_qpn: dest, qkey: Setup::default().qkey, ..SendWqe::default() };
    let post = |sq: &SimSq| {
        let sges = vec![Sge { addr, len: SIZE, lkey }];
        sq.post(Send { wqe, sges, inline: None }).expect("there is room");
    };
    (0..MANY).for_each(|_| post(&busy_sq));
    net.doorbell(0, busy);
    net.step();
    let first = std::iter::from_fn(|| sent.poll()).count();
    assert!((TURN..MANY as usize / 2).contains(&first), "the window is full: {first} are under way");
    post(&brief_sq);
    net.doorbell(0, brief);
    assert!(net.run_until_idle(100_000));

    let arrivals: Vec<Qpn> = std::iter::from_fn(|| received.poll())
        .filter(|(cqe, _)| cqe.opcode == WcOpcode::Recv)
        .map(|(cqe, _)| cqe.src_qp)
        .collect();
    assert_eq!(arrivals.len(), MANY as usize + 1, "nothing is lost");
    let place = arrivals.iter().position(|qpn| *qpn == brief).expect("it came");
    assert!(place <= first + TURN, "behind {} of the other's, {first} of which came first", place);
}
