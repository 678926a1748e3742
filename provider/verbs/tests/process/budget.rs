//! The memory that a process's queues may take.

use crate::alone;
use crate::common::settings;
use starverbs_core::QpType;
use starverbs_settings::Settings;
use starverbs_verbs::{Context, Cq, Pd, Qp, QpInit, Srq, VerbsError, budget};

#[test]
fn queues_take_no_more_than_they_may_and_give_it_back() {
    let _alone = alone();
    let begun = budget::used();
    let ctx = Context::open_with(Settings { memory: Some(8 << 20), ..settings() }).expect("a card");
    let pd = Pd::alloc(&ctx).expect("a domain");
    let cq = Cq::create(&ctx, 128, None, 0).expect("a queue");
    let init = QpInit {
        qp_type: QpType::Rc,
        send_cq: &cq,
        recv_cq: &cq,
        srq: None,
        max_send_wr: 128,
        max_recv_wr: 128,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
        sq_sig_all: false,
        block_own_multicast: false,
        star: None,
        rpc: false,
        cookie: 0,
    };
    let attr = ctx.device_attr();
    assert!((100..=1000).contains(&attr.max_qp) && attr.max_cqe < 1 << 16, "as many as fit: {attr:?}");

    /* its limit of them */
    let before = budget::used();
    let mut all: Vec<Qp> = std::iter::from_fn(|| Qp::create(&pd, &init).ok()).collect();
    assert_eq!(all.len(), attr.max_qp as usize);
    assert!(matches!(Qp::create(&pd, &init), Err(VerbsError::NoMemory(_) | VerbsError::Card(_))));
    let each = (budget::used() - before) / all.len();
    assert!(each > 8 << 10, "{each}");

    /* queues that take what is left */
    let big = || Srq::create(&pd, attr.max_srq_wr, 1, 0, 0);
    let mut rest: Vec<Srq> = std::iter::from_fn(|| big().ok()).collect();
    assert!(matches!(big(), Err(error) if error.errno() == libc::ENOMEM));
    let small = QpInit { max_recv_wr: attr.max_qp_wr, max_send_wr: attr.max_qp_wr, ..init };
    drop(all.pop());
    let refused = Qp::create(&pd, &small).err().map(|error| error.errno());
    assert_eq!(refused, Some(libc::ENOMEM), "not for their number");
    all.push(Qp::create(&pd, &init).expect("there is room for what was there"));
    rest.pop();
    assert!(big().is_ok(), "given back");

    drop((all, rest));
    assert_eq!(budget::used(), before);
    drop((cq, pd, ctx));
    assert_eq!(budget::used(), begun);
}
