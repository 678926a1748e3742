use super::*;
use crate::ring::CQE_SLOT;
use crate::token::SlotArea;

fn server(pd: u32) -> MemoryOwner {
    MemoryOwner { gid: Gid::from_ipv4([10, 0, 0, 9]), boot: 1, pd: PdId(pd) }
}

fn join(registry: &mut RuleRegistry, pd: u32, qpn: Qpn) -> ConnId {
    let slots = SlotArea::new(0x1000 * u64::from(qpn), 5 * CQE_SLOT).unwrap();
    let peer = SlPeer { av: Av::default(), port: 4793, control_port: 4794, qpn, epoch: 1 };
    registry.join(server(pd), peer, Token { slots, mac: 1 }).unwrap()
}

/// Whether a packet of the connection may fill these bytes as a slot, alone and with what `rule` opens.
fn may_fill(registry: &RuleRegistry, conn: ConnId, rule: RuleRef, slot: Seg) -> [bool; 2] {
    let conn = &registry.conns[conn.0 as usize];
    let with =
        Claim::WithSlots { rule, addr: 0x1000, len: 1, need: Access::REMOTE_READ, slots: [None, Some(slot)] };
    [Claim::Slot(slot), with].map(|claim| registry.allows(conn, &claim))
}

fn rule(key: u32, pd: u32, qpn: Qpn) -> MemoryRule {
    let access = Access::REMOTE_READ | Access::LOCAL_WRITE;
    MemoryRule { key, pd: PdId(pd), qpn, addr: 0x1000, len: 0x100, iova: 0x10, access }
}

fn may(registry: &RuleRegistry, conn: ConnId, rule: RuleRef, addr: u64, len: u32, need: Access) -> bool {
    let conn = &registry.conns[conn.0 as usize];
    registry.allows(conn, &Claim::Memory { rule, addr, len, need })
}

#[test]
fn a_rule_opens_its_bytes_to_its_domain_and_queue_pair() {
    let mut all = RuleRegistry::default();
    let (a, b, other) = (join(&mut all, 1, 5), join(&mut all, 1, 6), join(&mut all, 2, 7));
    all.add(a, rule(30, 1, 0)).unwrap();
    all.add(b, rule(10, 1, 6)).unwrap();
    assert_eq!(all.add(a, rule(11, 2, 0)), Err(NicError::Invalid), "of another protection domain");
    let read = Access::REMOTE_READ;
    let FoundRule { rule: found, addr } = all.find(b, 30, 0x20, 0xf0, read).unwrap();
    assert_eq!(addr, 0x1010);
    for (conn, key, va, len, need) in [
        (other, 30, 0x10, 1, read),
        (a, 10, 0x10, 1, read),
        (a, 31, 0x10, 1, read),
        (a, 30, 0x10, 0x101, read),
        (a, 30, 0xf, 1, read),
        (a, 30, u64::MAX, 2, read),
        (a, 30, 0x10, 1, Access::REMOTE_WRITE),
    ] {
        assert_eq!(all.find(conn, key, va, len, need), None);
    }
    assert!(may(&all, a, found, 0x1000, 0x100, read) && !may(&all, other, found, 0x1000, 1, read));
    assert!(!may(&all, a, found, 0x1000, 0x101, read) && !may(&all, a, found, 0xfff, 1, read));
    assert!(!may(&all, a, found, 0x1000, 1, Access::REMOTE_ATOMIC));
    let own = all.find(b, 10, 0x10, 1, read).unwrap().rule;
    assert!(may(&all, b, own, 0x1000, 1, read) && !may(&all, a, own, 0x1000, 1, read), "a window of one QP");
    assert!(!may(&all, a, RuleRef::default(), 0x1000, 1, Access::empty()));
}

#[test]
fn what_was_found_before_is_worth_nothing_after() {
    let mut all = RuleRegistry::default();
    let a = join(&mut all, 1, 5);
    for _ in 0..3 {
        all.add(a, rule(30, 1, 0)).unwrap();
        all.add(a, rule(30, 1, 0)).unwrap();
        let found = all.find(a, 30, 0x10, 1, Access::empty()).unwrap().rule;
        assert_eq!(all.remove(a, 30, 50, 1000), 50, "nothing ever left by it");
        all.add(a, MemoryRule { key: 31, ..rule(0, 1, 0) }).unwrap();
        assert!(!may(&all, a, found, 0x1000, 1, Access::empty()), "its slot is another rule's");
        all.remove(a, 31, 50, 1000);
    }
    all.add(a, rule(30, 1, 0)).unwrap();
    let used = all.find(a, 30, 0x10, 1, Access::empty()).unwrap().rule;
    all.slots[used.slot as usize].used = 40;
    assert_eq!(all.remove(a, 30, 50, 1000), 1040);
    all.add(a, rule(30, 1, 0)).unwrap();
    assert_eq!(all.remove(a, 30, 60, 1000), 1040, "what left by the rule of before may be under way");
    assert_eq!(all.find(a, 30, 0x10, 1, Access::empty()), None, "and the rule is gone all the same");
    assert_eq!(all.remove(a, 30, 2000, 1000), 2000);
    all.add(a, rule(30, 1, 0)).unwrap();
    let old = all.find(a, 30, 0x10, 1, Access::empty()).unwrap().rule;
    all.add(a, MemoryRule { len: 8, ..rule(30, 1, 0) }).unwrap();
    assert!(!may(&all, a, old, 0x1000, 1, Access::empty()), "it was changed");
}

/// The gate before them, which is not theirs, other connections' and what lies behind are not opened.
#[test]
fn a_connection_fills_its_own_slots_alone() {
    let mut all = RuleRegistry::default();
    let (a, b) = (join(&mut all, 1, 5), join(&mut all, 1, 6));
    all.add(a, rule(30, 1, 0)).unwrap();
    let found = all.find(a, 30, 0x10, 1, Access::REMOTE_READ).unwrap().rule;
    let slot = |addr| Seg { addr, len: CQE_SLOT as u32 };
    for (addr, fills) in [(0x5000, false), (0x5001, false), (0x5020, true), (0x5080, true), (0x5081, false)] {
        assert_eq!(may_fill(&all, a, found, slot(addr)), [fills; 2], "{addr:#x}");
        assert_eq!(may_fill(&all, b, found, slot(addr)), [false; 2], "{addr:#x}");
    }
    assert_eq!(may_fill(&all, a, RuleRef::default(), slot(0x5020)), [true, false], "a rule is needed, too");
}

#[test]
fn rules_end_with_their_connections() {
    let mut all = RuleRegistry::default();
    let (a, b) = (join(&mut all, 1, 5), join(&mut all, 1, 6));
    all.add(a, rule(30, 1, 0)).unwrap();
    all.leave(a);
    assert!(all.find(b, 30, 0x10, 1, Access::empty()).is_some());
    all.leave(b);
    assert_eq!((all.domains.len(), all.free.len()), (0, all.slots.len()));
    let again = join(&mut all, 1, 8);
    assert_eq!(all.find(again, 30, 0x10, 1, Access::empty()), None);
}

/// Ends that make no request any more keep no rules alive that nobody can remove; SL still gets completions.
#[test]
fn ended_connections_hold_no_rules() {
    let mut all = RuleRegistry::default();
    let (a, b) = (join(&mut all, 1, 5), join(&mut all, 1, 6));
    all.add(a, rule(30, 1, 0)).unwrap();
    all.release(a);
    all.release(a);
    let found = all.find(b, 30, 0x10, 1, Access::empty()).expect("another holds them").rule;
    all.release(b);
    assert!(
        !may(&all, b, found, 0x1000, 1, Access::empty())
            && all.find(b, 30, 0x10, 1, Access::empty()).is_none()
    );
    assert_eq!((all.add(a, rule(31, 1, 0)), all.sum(a)), (Ok(()), Some(Sum::default())), "what comes late");
    let c = join(&mut all, 1, 7);
    assert_eq!((all.find(c, 30, 0x10, 1, Access::empty()), all.sum(c)), (None, Some(Sum::default())));
    let slot = Seg { addr: 0x5020, len: CQE_SLOT as u32 };
    assert_eq!(may_fill(&all, a, found, slot), [true, false]);
    all.add(b, rule(32, 1, 0)).unwrap();
    assert!(all.find(c, 32, 0x10, 1, Access::empty()).is_some());
    [a, b, c].into_iter().for_each(|conn| all.leave(conn));
    assert!(all.domains.is_empty() && all.conns.is_empty());
}
