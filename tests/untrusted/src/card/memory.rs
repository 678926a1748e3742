//! Rights, and memory that peers may not touch.

use starverbs_core::mr::MrAttr;
use starverbs_core::{Access, PdId, SrqId};
use starverbs_sim::{Net, Setup, SimCq, SimRq};

/// An address and how many bytes are there.
type Span = (u64, u64);
/// An address and a key.
type Target = (u64, u32);

/// The same with fewer rights.
pub(crate) fn limited(setup: Setup, how: u8) -> Setup {
    let rights = [all_rights(), Access::LOCAL_WRITE, Access::REMOTE_READ, Access::REMOTE_WRITE];
    let (rights, rd_atomic) = (rights[usize::from(how & 3)], [3, 0, 1, 16][usize::from(how >> 2 & 3)]);
    Setup { access: rights, rd_atomic, ..setup }
}

/// All that a region or queue pair may allow.
pub(crate) fn all_rights() -> Access {
    let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    Access::LOCAL_WRITE | remote | Access::FLUSH_GLOBAL | Access::MW_BIND
}

/// An SRQ of host 0 that XRC requests may name.
pub(crate) fn named_srq(net: &mut Net) -> (PdId, SrqId) {
    let host = &mut net.hosts[0];
    let domain = host.nic.alloc_pd().expect("a PD");
    let (rq, cq) = (SimRq::new(1, 1), SimCq::new(1));
    (domain, host.nic.create_xrc_srq(host.pd, domain, rq, cq, 0).expect("an SRQ"))
}

/// Memory that no peer may touch, with keys for most of it; and a key that was good once.
pub(crate) fn guard(net: &mut Net, page: (u64, u32)) -> (Vec<Span>, Vec<Target>) {
    const LEN: u64 = 128;
    let host = &mut net.hosts[1];
    let secret = host.env.memory.alloc(LEN);
    let (local, local_key) = host.region(LEN, Access::LOCAL_WRITE);
    let (read, read_key) = host.region(LEN, Access::REMOTE_READ);
    let other_pd = host.nic.alloc_pd().expect("a PD");
    let other = host.env.memory.alloc(LEN);
    let attr = MrAttr {
        pd: other_pd,
        addr: other,
        length: LEN,
        iova: other,
        access: all_rights(),
        ..MrAttr::default()
    };
    let other_key = host.nic.reg_mr(attr).expect("a good registration");
    let (old, old_key) = host.region(LEN, all_rights());
    host.nic.dereg_mr(old_key).expect("it exists");
    let guarded = [secret, local, read, other, old].map(|addr| (addr, LEN));
    let keys = [(secret, page.1), (local, local_key), (read, read_key), (other, other_key), (old, old_key)];
    (guarded.to_vec(), keys.to_vec())
}
