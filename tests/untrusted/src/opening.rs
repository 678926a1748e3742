//! What processes of an XRC domain say about a receiving QP that more than one has open: `Opening::decode`,
//! and a live card that hears it.
//!
//! The card has two domains with a QP each. Two untrusted processes are in the first; they speak in turn,
//! close to what is right. Only who has the QP open may change it, nobody reaches the QP of the other domain,
//! and when all are gone nothing is left.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};

use starverbs_core::opening::{Opening, Wish};
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::{Access, Av, Gid, Mtu, Psn, QpState, Qpn};
use starverbs_settings::Settings;
use starverbs_verbs::fuzzing::hear;
use starverbs_verbs::{Context, Qp, Xrcd};

use crate::bytes::Bytes;

/// Messages of one input.
const MOST: usize = 200;
/// The untrusted processes' links; the card has no such, so that its answers go nowhere.
const LINKS: [u32; 2] = [70, 71];

/// A card whose program does all the work, and its two domains.
struct Home {
    ctx: Context,
    domains: [Xrcd; 2],
}

thread_local! {
    static HOME: RefCell<Home> = RefCell::new(Home::new());
}

impl Home {
    fn new() -> Home {
        /* below those that the kernel gives away, and below those of port.rs */
        let port = 10_000 + (std::process::id() % 10_000) as u16;
        let addrs = Some(vec!["127.0.0.1".parse().expect("an address")]);
        let settings = Settings { port, addrs, progress_thread: false, ..Settings::default() };
        let ctx = Context::open_with(settings).expect("the card opens");
        let domains = [(); 2].map(|()| {
            // SAFETY: a name of static bytes; the descriptor is the file's alone.
            let file =
                unsafe { File::from_raw_fd(libc::memfd_create(c"domain".as_ptr(), libc::MFD_CLOEXEC)) };
            Xrcd::open(&ctx, Some(file.as_raw_fd()), true, false).expect("a domain")
        });
        Home { ctx, domains }
    }
}

/// Checks one input.
pub fn check(input: &[u8]) {
    if let Some(message) = Opening::decode(input) {
        assert_eq!(Opening::decode(&message.encode()), Some(message), "what is said is understood");
    }
    HOME.with_borrow(|home| {
        let [made, secret] = [0, 1].map(|of| home.domains[of].create_qp(&home.ctx, of as u64).expect("a QP"));
        let number = made.number();
        let mut bytes = Bytes(input);
        let mut guests = [false; 2];
        for _ in 0..MOST {
            let Some(how) = bytes.next() else { break };
            one(home, how, [&made, &secret], &mut guests, &mut bytes);
        }
        drop(made);
        let there = home.domains[0].open_qp(&home.ctx, number, 2).is_ok();
        assert_eq!(there, guests.contains(&true), "a QP lives as long as somebody has it open");
        LINKS.iter().for_each(|link| _ = hear(&home.ctx, &secret, *link, None));
        assert!(home.domains[0].open_qp(&home.ctx, number, 3).is_err(), "nobody has it open");
    });
}

/// One message, or the end of who might have said it.
fn one(home: &Home, how: u8, qps: [&Qp; 2], guests: &mut [bool; 2], bytes: &mut Bytes<'_>) {
    let who = usize::from(how & 1);
    let before = qps.map(state);
    let numbers = qps.map(Qp::number);
    if how >> 1 == 0 {
        hear(&home.ctx, qps[0], LINKS[who], None);
        guests[who] = false;
    } else {
        let mut said = forge(numbers, bytes).encode();
        if how >> 1 == 1 {
            let at = usize::from(bytes.half()) % said.len();
            said[at] = bytes.byte();
        }
        let message = Opening::decode(&said);
        assert_eq!(hear(&home.ctx, qps[0], LINKS[who], Some(&said)), message.is_some());
        match message {
            Some(Opening::Ask { qpn, wish: Wish::Open, .. }) if qpn == numbers[0] => guests[who] = true,
            Some(Opening::Close { qpn }) if qpn == numbers[0] => guests[who] = false,
            _ => {}
        }
    }
    let after = qps.map(state);
    assert!(guests[who] || before[0] == after[0], "changed by one who has not opened it");
    assert_eq!(after[1], QpState::Reset, "that of another domain is nobody's");
}

fn state(qp: &Qp) -> QpState {
    qp.query().expect("the QP lives").state
}

/// A message that is near to what is right.
fn forge(numbers: [Qpn; 2], bytes: &mut Bytes<'_>) -> Opening {
    let kind = bytes.byte();
    let qpn = match bytes.byte() {
        0..200 => numbers[0],
        200..240 => numbers[1],
        near => numbers[0] ^ u32::from(near & 7),
    };
    let serial = u32::from(bytes.byte());
    match kind % 8 {
        0 | 1 => Opening::Ask { serial, qpn, wish: Wish::Open },
        2 => Opening::Ask { serial, qpn, wish: Wish::Query },
        3 | 4 => {
            let (attr, mask) = change(bytes);
            Opening::Ask { serial, qpn, wish: Wish::Modify(attr, mask) }
        }
        5 => Opening::Close { qpn },
        6 => Opening::Answer { serial, errno: u32::from(bytes.byte()), attr: change(bytes).0 },
        _ => Opening::Told { qpn, kind: u32::from(bytes.byte()) % 24 },
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
