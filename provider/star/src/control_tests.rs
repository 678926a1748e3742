use super::*;
use crate::token::SlotArea;

const SETUP: Setup = Setup {
    boot: 0x0102_0304_0506_0708,
    pd: PdId(9),
    mtu: Mtu::M2048,
    sq_depth: 64,
    rq_depth: 1,
    srq: true,
    token: Token { slots: SlotArea::new(1 << 40, 96 * 32).unwrap(), mac: 0x1122_3344_5566_7788 },
    replay_slots: 16,
    access: Access::REMOTE_WRITE,
    max_rd_atomic: 8,
    rnr_retry: 7,
    min_rnr_timer: 12,
};
const RULE: MemoryRule = MemoryRule {
    key: 1,
    pd: PdId(2),
    qpn: 3,
    addr: 0xffff_ffff_ffff_f000,
    len: 0x1000,
    iova: 0,
    access: Access::REMOTE_READ,
};

const TERMS: Terms =
    Terms { preference: Preference::Stateless, stateful: 1, threshold: 120, ports: [4793, 50_000], boot: 3 };

#[test]
fn what_is_said_is_understood() {
    for message in [
        Control::Offer { terms: TERMS, version: 2 },
        Control::Accept { role: Role::Stateful, ports: [1, 2], boot: 4 },
        Control::Confirm { role: Role::Stateless },
        Control::Plain,
        Control::NotYet,
        Control::Setup(SETUP),
        Control::Rule(RULE),
        Control::Unrule { key: 5 },
        Control::Want { upto: 6 },
        Control::KeepAlive,
        Control::Begin { known: None },
        Control::Begin { known: Some(Sum { rules: 7, sum: 0x0123_4567_89ab_cdef }) },
        Control::ResendRules,
        Control::RuleQuery,
        Control::RuleSum(Sum { rules: 9, sum: u64::MAX }),
        Control::Bye { why: 12, recvs: Psn::new(0x00ab_cdef) },
        Control::Change { round: 0x1234, version: 0xfe, star: true, terms: TERMS },
        Control::Quiescing { round: 1, role: Role::Stateful, ports: [3, 4], boot: 6, point: None },
        Control::Quiescing {
            round: u16::MAX,
            role: Role::Stateless,
            ports: [3, 4],
            boot: 6,
            point: Some(QuiescePoint { sends: Psn::new(0x00ab_cdef), recvs: Psn::new(7) }),
        },
        Control::Settled { round: 3, star: false },
    ] {
        let mut room = [0xff; MAX_CONTROL];
        let len = message.encode(&mut room).expect("it fits");
        assert_eq!(Control::decode(&room[..len]), Some(message));
        assert_eq!([&room[..len - 1], &room[..=len]].map(Control::decode), [None; 2]);
        assert_eq!(message.encode(&mut room[..len - 1]), None);
    }
}

#[test]
fn what_cannot_be_is_none() {
    let understood = |message: Control| {
        let mut room = [0; MAX_CONTROL];
        let len = message.encode(&mut room).expect("it fits");
        Control::decode(&room[..len]).is_some()
    };
    assert!(!understood(Control::Setup(Setup { sq_depth: 3, ..SETUP })));
    assert!(!understood(Control::Setup(Setup { rq_depth: 1 << 21, ..SETUP })));
    assert!(!understood(Control::Setup(Setup { rnr_retry: 8, ..SETUP })));
    assert!(!understood(Control::Setup(Setup { rq_depth: 64, ..SETUP })), "more slots than there is memory");
    assert!(!understood(Control::Rule(MemoryRule { len: 0x1001, ..RULE })), "past the end of memory");
    assert!(understood(Control::Rule(MemoryRule { len: 0, iova: u64::MAX, ..RULE })));
    for bytes in [&[][..], &[0], &[13], &[2, 1], &[1, 4, 0, 0, 0, 0, 0, 0, 0, 0], &[17, 0, 0, 2], &[18]] {
        assert_eq!(Control::decode(bytes), None);
    }
}
