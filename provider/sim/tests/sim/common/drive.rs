//! Two hosts with programs on RC connections, to whose time something happens.

use starverbs_sim::{Net, Rng, SimCq};

use crate::common::program::{Conn, Shape};

/// Runs two programs of `shape` over hosts 0 and 1 until all that they plan is done, and looks that it is;
/// before each step `befall` may do something to the hosts. Each completion is looked at.
///
/// # Panics
/// When the programs are not done after `steps` steps.
pub(crate) fn drive(
    net: &mut Net,
    rng: &mut Rng,
    shape: &Shape,
    steps: usize,
    mut befall: impl FnMut(&mut Net, &mut Rng),
) {
    let cqs = [(); 2].map(|()| SimCq::new(4096));
    let mut conns: Vec<Conn> = (0..2).map(|_| Conn::new(net, rng, &cqs, [None, None], shape)).collect();
    for _ in 0..steps {
        befall(net, rng);
        let mut acted = false;
        for conn in &mut conns {
            acted |= conn.act(net, rng, false);
        }
        let happened = net.step();
        let mut polled = false;
        for (host, cq) in cqs.iter().enumerate() {
            while let Some((cqe, solicited)) = cq.poll() {
                polled = true;
                assert!(conns.iter_mut().any(|c| c.complete(net, host, &cqe, solicited, &[])));
            }
        }
        if happened || polled || acted {
            continue;
        }
        /* Who sleeps may have something to send yet. */
        (0..2).for_each(|host| net.sleep(host, 0));
        if !net.step() && !conns.iter_mut().any(|c| c.act(net, rng, true)) {
            return conns.iter().for_each(|c| c.finish(net));
        }
    }
    panic!("no end after {steps} steps");
}
