//! Messages between processes of an XRC domain about a shared receiving QP: `SharedQpMessage::decode`, and a
//! live card that gets them.
//!
//! The card has two domains with a QP each. Two untrusted peers are in the first; they take turns, with
//! messages that are nearly right. Only an attached one may change the QP, neither reaches the QP of the
//! other domain, and when all are gone nothing is left.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::AsRawFd;

use nix::sys::memfd::{MFdFlags, memfd_create};
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::shared_qp::{SharedQpMessage, SharedQpRequest};
use starverbs_core::{Access, Av, Gid, Mtu, Psn, QpState, Qpn};
use starverbs_settings::Settings;
use starverbs_verbs::fuzzing::inject_message;
use starverbs_verbs::{Context, Qp, Xrcd};

use crate::bytes::Bytes;

/// Messages of one input.
const MOST: usize = 200;
/// The peers' links; the card has no such, so that its replies go nowhere.
const LINKS: [u32; 2] = [70, 71];

/// A card whose program does all the work, and its two domains.
struct Card {
    ctx: Context,
    domains: [Xrcd; 2],
}

thread_local! {
    static CARD: RefCell<Card> = RefCell::new(Card::new());
}

impl Card {
    fn new() -> Card {
        /* below those that the kernel gives away, and below those of port.rs */
        let port = 10_000 + (std::process::id() % 10_000) as u16;
        let addrs = Some(vec!["127.0.0.1".parse().expect("an address")]);
        let settings = Settings { port, addrs, progress_thread: false, ..Settings::default() };
        let ctx = Context::open_with(settings).expect("the card opens");
        let domains = [(); 2].map(|()| {
            let file = File::from(memfd_create(c"domain", MFdFlags::MFD_CLOEXEC).expect("a memfd"));
            Xrcd::open(&ctx, Some(file.as_raw_fd()), true, false).expect("a domain")
        });
        Card { ctx, domains }
    }
}

/// Checks one input.
pub fn check(input: &[u8]) {
    if let Some(message) = SharedQpMessage::decode(input) {
        assert_eq!(SharedQpMessage::decode(&message.encode()), Some(message), "messages survive encoding");
    }
    CARD.with_borrow(|card| {
        let [made, secret] = [0, 1].map(|of| card.domains[of].create_qp(&card.ctx, of as u64).expect("a QP"));
        let number = made.number();
        let mut bytes = Bytes(input);
        let mut attached = [false; 2];
        for _ in 0..MOST {
            let Some(how) = bytes.next() else { break };
            one(card, how, [&made, &secret], &mut attached, &mut bytes);
        }
        drop(made);
        let there = card.domains[0].open_qp(&card.ctx, number, 2).is_ok();
        assert_eq!(there, attached.contains(&true), "a QP lives as long as somebody has it open");
        LINKS.iter().for_each(|link| _ = inject_message(&card.ctx, &secret, *link, None));
        assert!(card.domains[0].open_qp(&card.ctx, number, 3).is_err(), "nobody has it open");
    });
}

/// One message, or the end of the peer that might have sent it.
fn one(card: &Card, how: u8, qps: [&Qp; 2], attached: &mut [bool; 2], bytes: &mut Bytes<'_>) {
    let who = usize::from(how & 1);
    let before = qps.map(state);
    let numbers = qps.map(Qp::number);
    if how >> 1 == 0 {
        inject_message(&card.ctx, qps[0], LINKS[who], None);
        attached[who] = false;
    } else {
        let mut sent = forge(numbers, bytes).encode();
        if how >> 1 == 1 {
            let at = usize::from(bytes.half()) % sent.len();
            sent[at] = bytes.byte();
        }
        let message = SharedQpMessage::decode(&sent);
        assert_eq!(inject_message(&card.ctx, qps[0], LINKS[who], Some(&sent)), message.is_some());
        match message {
            Some(SharedQpMessage::Request { qpn, request: SharedQpRequest::Attach, .. })
                if qpn == numbers[0] =>
            {
                attached[who] = true
            }
            Some(SharedQpMessage::Detach { qpn }) if qpn == numbers[0] => attached[who] = false,
            _ => {}
        }
    }
    let after = qps.map(state);
    assert!(attached[who] || before[0] == after[0], "changed by one that is not attached");
    assert_eq!(after[1], QpState::Reset, "that of another domain is nobody's");
}

fn state(qp: &Qp) -> QpState {
    qp.query().expect("the QP lives").state
}

/// A message that is near to what is right.
fn forge(numbers: [Qpn; 2], bytes: &mut Bytes<'_>) -> SharedQpMessage {
    let kind = bytes.byte();
    let qpn = match bytes.byte() {
        0..200 => numbers[0],
        200..240 => numbers[1],
        near => numbers[0] ^ u32::from(near & 7),
    };
    let serial = u32::from(bytes.byte());
    match kind % 8 {
        0 | 1 => SharedQpMessage::Request { serial, qpn, request: SharedQpRequest::Attach },
        2 => SharedQpMessage::Request { serial, qpn, request: SharedQpRequest::Query },
        3 | 4 => {
            let (attr, mask) = change(bytes);
            SharedQpMessage::Request { serial, qpn, request: SharedQpRequest::Modify(attr, mask) }
        }
        5 => SharedQpMessage::Detach { qpn },
        6 => SharedQpMessage::Reply { serial, errno: u32::from(bytes.byte()), attr: change(bytes).0 },
        _ => SharedQpMessage::Event { qpn, kind: u32::from(bytes.byte()) % 24 },
    }
}

/// A transition, mostly one that the state machine knows.
fn change(bytes: &mut Bytes<'_>) -> (QpAttr, QpAttrMask) {
    let init = QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
    let rtr = QpAttrMask::AV | QpAttrMask::PATH_MTU | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN;
    let rtr = rtr | QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
    let rts = QpAttrMask::SQ_PSN | QpAttrMask::TIMEOUT;
    let (state, mask) = bytes.pick(&[
        (QpState::Init, init),
        (QpState::Rtr, rtr),
        (QpState::Rts, rts),
        (QpState::Err, QpAttrMask::empty()),
        (QpState::Reset, QpAttrMask::empty()),
        (QpState::Sqd, QpAttrMask::empty()),
    ]);
    let mut mask = mask | QpAttrMask::STATE;
    if bytes.byte() > 200 {
        mask ^= QpAttrMask::from_bits_truncate(bytes.word());
    }
    let gid = |host| Gid::from_ipv4([127, 0, 0, host]);
    let sgid = gid(if bytes.byte() < 200 { 1 } else { 2 });
    let av = Av { dgid: gid(bytes.byte()), sgid, hop_limit: 64, ..Av::default() };
    let attr = QpAttr {
        state,
        av,
        port_num: 1,
        path_mtu: bytes.pick(&[Mtu::M256, Mtu::M1024, Mtu::M4096]),
        access: Access::from_bits_truncate(u32::from(bytes.byte())),
        dest_qpn: u32::from(bytes.half()),
        rq_psn: Psn::new(bytes.word()),
        max_dest_rd_atomic: bytes.byte(),
        min_rnr_timer: bytes.byte(),
        timeout: bytes.byte(),
        ..QpAttr::default()
    };
    (attr, mask)
}
