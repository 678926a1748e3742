//! Hosts that are slower than their senders, with the buffer of a socket: RC must find a pace at which
//! it makes progress, and never give up on a peer that is merely busy.

use crate::common::all_rights;
use starverbs_core::qp::RecvSource;
use starverbs_core::{Mtu, NicConfig, QpType, Qpn, SendOp, SendWqe, Sge, WcStatus};
use starverbs_sim::{Faults, Net, QpAt, Send, Setup, SimCq, SimRq, SimSq};

/// A stream of equal messages from a host to host 0.
struct Stream {
    from: usize,
    qpn: Qpn,
    sq: SimSq,
    wqe: SendWqe,
    sge: Sge,
    left: u64,
}

#[derive(Clone, Copy)]
struct Load {
    /// Sending hosts
    hosts: u8,
    /// QPs of each
    qps: usize,
    op: SendOp,
    len: u32,
    /// Messages of each QP
    count: u64,
    mtu: Mtu,
    /// ns that host 0 needs for a frame
    service: u64,
    /// Frames that it can keep
    queue: u64,
    /// Loss beside that
    loss: f64,
    /// Selective repeat
    repeat: bool,
    /// Windows are moved by delays, ns
    delay_target: Option<u64>,
}

impl Load {
    /// Goodput that must be reached: well below what is, well above what a stall leaves.
    fn least(&self) -> f64 {
        match (self.loss, self.repeat) {
            (0.0, _) => 0.6,
            /* with a window for whole pieces alone, and a timeout for each that is lost, it is 0.2 */
            (0.05.., true) if self.op == SendOp::Read => 0.7,
            (0.05.., true) => 0.35,
            /* with a timeout for each lost request that finds the window full, it is 0.77 */
            (_, true) if self.op == SendOp::Read => 0.9,
            (_, true) => 0.5,
            (_, false) => 0.05,
        }
    }
}

/// What came of it.
#[derive(Debug)]
struct Outcome {
    /// Share of the receiver's time that went into payload
    goodput: f64,
    /// Frames sent again, as a share of those needed
    waste: f64,
    /// Longest time without a completion, ns
    pause: u64,
    /// Timeouts
    timeouts: u64,
}

fn run(load: &Load) -> Outcome {
    let faults = Faults { service: load.service, queue: load.queue, loss: load.loss, ..Faults::default() };
    let cfg = NicConfig { repeat: load.repeat, delay_target: load.delay_target, ..NicConfig::default() };
    let mut net = Net::new(load.hosts + 1, cfg, faults, 1);
    let setup = Setup { mtu: load.mtu, timeout: 14, retry_cnt: 7, ..Setup::default() };
    let cqs: Vec<SimCq> = (0..=load.hosts).map(|_| SimCq::new(1 << 16)).collect();
    let (target, rkey) = net.hosts[0].region(u64::from(load.len), all_rights());
    let mut streams = Vec::new();
    for from in 1..=usize::from(load.hosts) {
        let (addr, lkey) = net.hosts[from].region(u64::from(load.len), all_rights());
        for _ in 0..load.qps {
            let (sq, other) = (SimSq::new(64), SimSq::new(1));
            let own = || RecvSource::Own(SimRq::new(1, 1));
            let qpn = net.hosts[from].qp(QpType::Rc, &sq, own(), [&cqs[from], &cqs[from]], true);
            let peer = net.hosts[0].qp(QpType::Rc, &other, own(), [&cqs[0], &cqs[0]], true);
            net.connect(QpType::Rc, QpAt { host: from, qpn }, QpAt { host: 0, qpn: peer }, &setup);
            let wqe = SendWqe { op: load.op, remote_addr: target, rkey, ..SendWqe::default() };
            let sge = Sge { addr, len: load.len, lkey };
            streams.push(Stream { from, qpn, sq, wqe, sge, left: load.count });
        }
    }
    let began = net.now();
    let (mut last, mut pause, mut done) = (began, 0, 0);
    let total = load.count * streams.len() as u64;
    while done < total {
        for s in &mut streams {
            while s.left > 0 && !s.sq.is_full() {
                s.sq.post(Send { wqe: s.wqe, sges: vec![s.sge], inline: None }).expect("there is room");
                s.left -= 1;
                net.doorbell(s.from, s.qpn);
            }
        }
        assert!(net.step(), "{done} of {total} done, and nothing happens any more");
        for cq in &cqs {
            while let Some((cqe, _)) = cq.poll() {
                assert_eq!(cqe.status, WcStatus::Success, "after {done} of {total}, at {} ns", net.now());
                pause = pause.max(net.now() - last);
                last = net.now();
                done += 1;
            }
        }
    }
    let frames = total * u64::from(load.len.div_ceil(load.mtu.bytes()));
    let retransmitted: u64 = net.hosts.iter().map(|h| h.nic.counters().retransmitted.get()).sum();
    Outcome {
        goodput: (frames * load.service) as f64 / (net.now() - began) as f64,
        waste: retransmitted as f64 / frames as f64,
        pause,
        timeouts: net.hosts.iter().map(|h| h.nic.counters().timeouts.get()).sum(),
    }
}

/// Four frames of 4 KiB a microsecond is what a core can take in; a default socket buffer holds some 50.
const BASE: Load = Load {
    hosts: 1,
    qps: 1,
    op: SendOp::Write,
    len: 1 << 20,
    count: 60,
    mtu: Mtu::M4096,
    service: 1_000,
    queue: 50,
    loss: 0.0,
    repeat: true,
    delay_target: None,
};

fn table() -> Vec<(&'static str, Load)> {
    let base = BASE;
    vec![
        ("write 1 MiB", Load { ..base }),
        ("write 1 MiB, large buffer", Load { queue: 400, ..base }),
        ("write 64 KiB x 16 QPs", Load { qps: 16, len: 64 << 10, ..base }),
        ("write 4 KiB x 16 QPs", Load { qps: 16, len: 4096, count: 1000, ..base }),
        ("write 8 MiB, MTU 1024", Load { len: 8 << 20, count: 6, mtu: Mtu::M1024, queue: 100, ..base }),
        ("read 1 MiB", Load { op: SendOp::Read, ..base }),
        ("read 64 KiB x 16 QPs", Load { op: SendOp::Read, qps: 16, len: 64 << 10, ..base }),
        ("write 1 MiB from 4 hosts", Load { hosts: 4, count: 20, ..base }),
        ("write 64 KiB x 4 QPs from 8 hosts", Load { hosts: 8, qps: 4, len: 64 << 10, count: 40, ..base }),
        ("write 1 MiB, 0.1% lost", Load { queue: 400, loss: 0.001, ..base }),
        ("write 1 MiB, 1% lost", Load { queue: 400, loss: 0.01, ..base }),
        ("write 1 MiB, 5% lost", Load { queue: 400, loss: 0.05, ..base }),
        ("read 1 MiB, 1% lost", Load { op: SendOp::Read, queue: 400, loss: 0.01, ..base }),
        ("read 1 MiB, 5% lost", Load { op: SendOp::Read, queue: 400, loss: 0.05, ..base }),
        ("write 1 MiB, 1% lost, go-back-N", Load { queue: 400, loss: 0.01, repeat: false, ..base }),
        (
            "read 64 KiB x 16 QPs, 1% lost",
            Load { op: SendOp::Read, qps: 16, len: 64 << 10, queue: 400, loss: 0.01, ..base },
        ),
        (
            "read 1 MiB, 1% lost, go-back-N",
            Load { op: SendOp::Read, queue: 400, loss: 0.01, repeat: false, ..base },
        ),
        ("write 64 KiB x 16 QPs, 1% lost", Load { qps: 16, len: 64 << 10, queue: 400, loss: 0.01, ..base }),
    ]
}

#[test]
fn slow_receivers_are_served_and_not_given_up() {
    for (name, load) in table() {
        let out = run(&load);
        println!(
            "{name:36} goodput {:4.0}% waste {:4.0}% pause {:7.1} ms, {} timeouts",
            out.goodput * 100.0,
            out.waste * 100.0,
            out.pause as f64 / 1e6,
            out.timeouts
        );
        assert!(out.goodput > load.least(), "{name}: {out:?}");
        assert!(load.loss > 0.0 || out.waste < 0.25, "{name}: {out:?}");
    }
}

/// By delays senders find the pace before the buffer is full, where losses tell it too late: as much goodput,
/// and nothing is sent twice once they have found it.
#[test]
fn windows_by_delay_fill_no_buffer() {
    for (name, load) in [
        ("write 1 MiB from 4 hosts", Load { hosts: 4, count: 60, ..BASE }),
        ("write 64 KiB x 4 QPs from 4 hosts", Load { hosts: 4, qps: 4, len: 64 << 10, count: 240, ..BASE }),
        ("read 1 MiB", Load { op: SendOp::Read, count: 200, ..BASE }),
    ] {
        let by_loss = run(&load);
        let by_delay = run(&Load { delay_target: Some(30_000), ..load });
        println!("{name:36} by loss {by_loss:?}\n{:36} by delay {by_delay:?}", "");
        assert!(by_delay.goodput > 0.9 * by_loss.goodput, "{name}: {by_delay:?}, {by_loss:?}");
        assert!(by_delay.waste <= by_loss.waste / 2.0, "{name}: {by_delay:?}, {by_loss:?}");
    }
}
