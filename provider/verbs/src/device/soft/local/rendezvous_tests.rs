//! A receiver that cannot fetch the data of a SEND gets a copy of it, once, and of all that follows.

use starverbs_core::{Access, Cqe, SendFlags, SendOp, Sge, WcStatus};
use starverbs_free_port::free_port;
use starverbs_settings::LinkTrust;

use super::super::tests::{Card, connect, send};
use crate::device::soft::engine::HostEngine;
use crate::{Dm, Mr, Qp, RecvWr, SendWr};

/// Two pieces and a rest.
const LEN: usize = 150_000;

struct Pair {
    a: Card,
    b: Card,
    qa: Qp,
    qb: Qp,
}

impl Pair {
    fn settle(&self) {
        for _ in 0..10 {
            self.a.take();
            self.b.take();
        }
    }

    fn completion(&self, card: &Card) -> Cqe {
        let mut cqes = [Cqe::default()];
        for _ in 0..1000 {
            self.settle();
            if card.cq.poll(&mut cqes).unwrap() == 1 {
                return cqes[0];
            }
        }
        panic!("it does not come")
    }
}

#[test]
fn who_cannot_fetch_is_sent_a_copy() {
    let port = free_port();
    let [a, b] = [(); 2].map(|()| Card::of(port, LinkTrust::User));
    let (qa, qb) = (a.qp(), b.qp());
    let dm = Dm::alloc(&a.ctx, LEN as u64, 12).unwrap();
    let region = Mr::device(&a.pd, &dm, 0, LEN as u64, Access::LOCAL_WRITE | Access::ZERO_BASED).unwrap();
    let data: Vec<u8> = (0..LEN).map(|n| ((n * 7) >> 3) as u8).collect();
    // SAFETY: a vector of so many bytes.
    unsafe { dm.copy_in(0, data.as_ptr(), LEN as u64) }.unwrap();
    let to = vec![0_u64; LEN.div_ceil(8)].leak().as_ptr() as u64;
    // SAFETY: memory that never ends, and is read as what others may change.
    let mr = unsafe { Mr::reg(&b.pd, to, LEN as u64, to, Access::LOCAL_WRITE) }.unwrap();
    connect(&qa, &b, &qb);
    connect(&qb, &a, &qa);
    let pair = Pair { a, b, qa, qb };
    pair.settle();
    /* receives without a buffer, which are posted with a connection */
    (0..4).for_each(|_| send(&pair.qa));
    for card in [&pair.a, &pair.b] {
        (0..8).for_each(|_| assert_eq!(pair.completion(card).status, WcStatus::Success));
    }
    let fetched = || pair.b.soft.with(|shard, _| shard.nic.counters().local_fetched.get());
    let cannot = || {
        pair.b.soft.with(|shard, _| {
            let engine = shard.nic.engine_mut(pair.qb.number()).expect("it has begun");
            let HostEngine::Local(end) = engine else { panic!("it is local") };
            end.direct = None;
        });
    };
    let fetches_again = || {
        pair.a.soft.with(|shard, _| {
            let end = shard.nic.engine(pair.qa.number()).and_then(HostEngine::local).expect("it is local");
            end.direct.as_ref().expect("equals").memory.set_fetches(true);
        });
    };
    /* fetched; then not; then copied at once; then not, beside a request behind it that cannot be made */
    for (round, wanted) in [(0, 2), (1, 0), (2, 0), (3, 0)] {
        match round {
            1 => cannot(),
            3 => fetches_again(),
            _ => {}
        }
        let before = fetched();
        let mut receives = pair.qb.post_recv();
        let buffer = [Sge { addr: to, len: LEN as u32, lkey: mr.lkey() }];
        receives.push(&RecvWr { wr_id: 1, sges: &buffer }).unwrap();
        receives.ring();
        let sges = [Sge { addr: 0, len: LEN as u32, lkey: region.lkey() }];
        let wr = SendWr {
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            sges: &sges,
            ..crate::device::tests::send(5)
        };
        let mut poster = pair.qa.post_send();
        poster.push(&wr).unwrap();
        if round == 3 {
            let nobodys = [Sge { lkey: 0x7777, ..sges[0] }];
            poster.push(&SendWr { sges: &nobodys, ..wr }).unwrap();
        }
        poster.ring();
        let received = pair.completion(&pair.b);
        assert_eq!((received.status, received.byte_len as usize), (WcStatus::Success, LEN), "{round}");
        assert_eq!(pair.completion(&pair.a).status, WcStatus::Success, "{round}");
        // SAFETY: so many bytes, which nobody writes now.
        assert!(unsafe { std::slice::from_raw_parts(to as *const u8, LEN) } == data, "{round}");
        assert_eq!(fetched() - before, wanted, "{round}");
    }
    assert_eq!(pair.completion(&pair.a).status, WcStatus::LocProtErr);
}
