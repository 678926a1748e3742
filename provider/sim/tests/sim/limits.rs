//! A card holds as many objects of each kind as it reports, and not one more; an end makes room again.

use starverbs_core::mr::{MrAttr, WindowType};
use starverbs_core::qp::{QpInit, RecvSource};
use starverbs_core::{Av, CardLimits, NicConfig, NicError, PdId, QpType};
use starverbs_sim::{Faults, Net, Rng, SimCq, SimRq, SimSq};

const CAP: u32 = 5;

/// Makes objects until the card refuses, ends the first, and makes one more.
fn fill<T: Copy>(
    kind: &str,
    net: &mut Net,
    mut make: impl FnMut(&mut Net) -> Result<T, NicError>,
    mut end: impl FnMut(&mut Net, T) -> Result<(), NicError>,
) {
    let made: Vec<T> = std::iter::from_fn(|| make(net).ok()).collect();
    assert_eq!(made.len(), CAP as usize, "{kind}");
    assert_eq!(make(net).err(), Some(NicError::Exhausted), "{kind}");
    end(net, made[0]).expect(kind);
    let again = make(net).expect(kind);
    assert!(make(net).is_err(), "{kind}");
    for object in made[1..].iter().copied().chain([again]) {
        end(net, object).expect(kind);
    }
}

#[test]
fn as_many_as_promised_and_no_more() {
    let limits = CardLimits { qps: CAP, pds: CAP + 1, avs: CAP, srqs: CAP, mrs: CAP, windows: CAP };
    let cfg = NicConfig { limits, ..NicConfig::default() };
    let mut net = Net::new(1, cfg, Faults::default(), 1);
    let pd: PdId = net.hosts[0].pd;
    fill(
        "protection domains",
        &mut net,
        |n| n.hosts[0].nic.alloc_pd(),
        |n, pd| n.hosts[0].nic.dealloc_pd(pd),
    );
    let attr = MrAttr { pd, addr: 4096, length: 1, ..MrAttr::default() };
    fill("regions", &mut net, |n| n.hosts[0].nic.reg_mr(attr), |n, key| n.hosts[0].nic.dereg_mr(key));
    fill(
        "windows",
        &mut net,
        |n| n.hosts[0].nic.alloc_mw(pd, WindowType::One),
        |n, key| n.hosts[0].nic.dealloc_mw(key),
    );
    fill(
        "address vectors",
        &mut net,
        |n| n.hosts[0].nic.create_av(pd, Av::default()),
        |n, av| n.hosts[0].nic.destroy_av(av),
    );
    fill(
        "shared receive queues",
        &mut net,
        |n| n.hosts[0].nic.create_srq(pd, SimRq::new(1, 1), 0, 0),
        |n, srq| n.hosts[0].nic.destroy_srq(srq),
    );
    let cq = SimCq::new(1);
    let init = || qp_init(pd, &cq, 0);
    fill(
        "queue pairs",
        &mut net,
        |n| n.hosts[0].nic.create_qp(init()),
        |n, qpn| {
            let h = &mut n.hosts[0];
            h.nic.destroy_qp(&mut h.env, qpn)
        },
    );
    assert_eq!(net.hosts[0].nic.dealloc_pd(pd), Ok(()), "nothing failed half way");
}

fn qp_init(pd: PdId, cq: &SimCq, cookie: u64) -> QpInit<SimSq, SimRq, SimCq> {
    QpInit {
        qp_type: QpType::Rc,
        pd,
        sq: SimSq::new(1),
        rq: RecvSource::Own(SimRq::new(1, 1)),
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        sq_sig_all: false,
        block_own_multicast: false,
        cookie,
    }
}

/// Where a queue pair goes, another one takes its place in memory: each is found by its number all the same.
#[test]
fn queue_pairs_come_and_go_in_any_order() {
    let mut net = Net::new(1, NicConfig::default(), Faults::default(), 1);
    let (pd, cq, mut rng) = (net.hosts[0].pd, SimCq::new(1), Rng::new(5));
    let host = &mut net.hosts[0];
    let mut live: Vec<(u32, u64)> = Vec::new();
    for cookie in 0..2000 {
        /* they grow to several hundred, and all go twice */
        let grows = cookie % 1000 < 700;
        if live.is_empty() || rng.below(10) < if grows { 8 } else { 1 } {
            live.push((host.nic.create_qp(qp_init(pd, &cq, cookie)).unwrap(), cookie));
        } else {
            let (qpn, _) = live.swap_remove(rng.below(live.len() as u64) as usize);
            host.nic.destroy_qp(&mut host.env, qpn).unwrap();
            assert_eq!(host.nic.qp_owner(qpn), None);
        }
        for (qpn, cookie) in &live {
            assert_eq!(host.nic.qp_owner(*qpn).map(|owner| owner.cookie), Some(*cookie));
        }
        assert_eq!(host.nic.qpns().count(), live.len());
    }
    for (qpn, _) in live {
        host.nic.destroy_qp(&mut host.env, qpn).unwrap();
    }
    assert_eq!(host.nic.qpns().count(), 0);
}
