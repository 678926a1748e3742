use std::format;

use super::super::{MrAttr, Plain};
use super::*;

const PD: PdId = PdId(3);
const QP: QpId = QpId { pd: PD, qpn: 77 };
const ALL: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);
const READ: Access = Access::REMOTE_READ;

/// An MR of 0x100 bytes at host 0x1000, known as 0x9000, and a window.
fn table(access: Access, kind: WindowType) -> (MrTable, u32, u32) {
    let mut t = MrTable::<Plain>::default();
    let attr = MrAttr { pd: PD, addr: 0x1000, length: 0x100, iova: 0x9000, access, ..MrAttr::default() };
    let mr = t.register(attr, 0x1234_5678_9abc_def0).unwrap();
    let window = t.alloc_window(PD, kind, 99).unwrap();
    (t, mr, window)
}

fn bindable(kind: WindowType) -> (MrTable, WindowBind) {
    let (t, mr, window) = table(Access::LOCAL_WRITE | Access::MW_BIND, kind);
    let rkey = (window & !0xff) | u32::from((window as u8).wrapping_add(1));
    (t, WindowBind { window, rkey, mr, addr: 0x9010, length: 0x20, access: ALL, qpn: QP.qpn, pd: PD })
}

fn at(t: &MrTable, key: u32, va: u64, len: u32) -> Result<u64, MrFault> {
    t.resolve_remote(key, QP, va, len, READ)
}

#[test]
fn a_window_opens_its_bytes_and_no_others() {
    for kind in [WindowType::One, WindowType::Two] {
        let (mut t, b) = bindable(kind);
        assert_eq!(at(&t, b.window, 0x9010, 4), Err(MrFault::Access), "not bound");
        assert_eq!(t.bind(&b), Ok(kind));
        assert_eq!(at(&t, b.window, 0x9010, 4), Err(MrFault::BadKey), "the key of before");
        assert_eq!(at(&t, b.rkey, 0x9010, 0x20), Ok(0x1010));
        assert_eq!(at(&t, b.rkey, 0x900f, 2), Err(MrFault::Bounds));
        assert_eq!(at(&t, b.rkey, 0x902f, 2), Err(MrFault::Bounds));
        assert_eq!(at(&t, b.mr, 0x9010, 4), Err(MrFault::Access), "the MR itself gives no remote right");
        let other = t.resolve_remote(b.rkey, QpId { pd: PD, qpn: 78 }, 0x9010, 4, READ);
        assert_eq!(other.is_ok(), kind == WindowType::One, "type 2 is for the QP it was bound on");
        assert_eq!(
            t.resolve_remote(b.rkey, QpId { pd: PdId(4), qpn: 77 }, 0x9010, 4, READ),
            Err(MrFault::Pd)
        );
        assert!(t.resolve_local(b.rkey, PD, 0x9010, 4, false).is_err(), "not in SGEs");
    }
}

/// mlx5 and rxe take the low eight bits, whatever stands above them.
#[test]
fn a_bind_gives_eight_bits_of_a_key() {
    for kind in [WindowType::One, WindowType::Two] {
        let (mut t, b) = bindable(kind);
        for rkey in [b.rkey ^ 0x100, !b.window, 0, u32::MAX] {
            let key = b.window & !0xff | rkey & 0xff;
            assert_eq!(t.bind(&WindowBind { rkey, ..b }), Ok(kind), "{rkey:#x}");
            assert_eq!(at(&t, key, 0x9010, 0x20), Ok(0x1010));
            if kind == WindowType::Two {
                assert_eq!(t.invalidate(key, QP), Ok(()));
            }
        }
    }
}

#[test]
fn a_window_does_not_take_the_key_of_an_import() {
    let (mut t, b) = bindable(WindowType::One);
    let attr =
        MrAttr { pd: PD, addr: 0x5000, length: 0x100, iova: 0x9000, access: READ, ..MrAttr::default() };
    t.import(b.rkey, attr).unwrap();
    assert_eq!(t.bind(&b), Err(MrFault::State));
    assert_eq!(at(&t, b.rkey, 0x9010, 4), Ok(0x5010), "still the import");
    t.unimport(b.rkey).unwrap();
    assert_eq!(t.bind(&b), Ok(WindowType::One));
}

#[test]
fn zero_based_windows_count_from_their_first_byte() {
    let (mut t, b) = bindable(WindowType::Two);
    t.bind(&WindowBind { access: READ | Access::ZERO_BASED, ..b }).unwrap();
    assert_eq!(at(&t, b.rkey, 0, 0x20), Ok(0x1010));
    assert_eq!(at(&t, b.rkey, 1, 0x20), Err(MrFault::Bounds));
    assert_eq!(at(&t, b.rkey, 0x9010, 1), Err(MrFault::Bounds));
    assert_eq!(t.resolve_remote(b.rkey, QP, 0, 4, Access::REMOTE_WRITE), Err(MrFault::Access));
}

#[test]
fn bad_binds_change_nothing() {
    let (mut t, b) = bindable(WindowType::One);
    t.bind(&b).unwrap();
    let other = t.alloc_window(PD, WindowType::One, 5).unwrap();
    let all = |t: &MrTable| format!("{:?} {:?}", t.entries, t.slots);
    let before = all(&t);
    for (bad, why) in [
        (WindowBind { window: b.mr, rkey: b.mr, ..b }, MrFault::BadKey),
        (WindowBind { mr: b.mr ^ 1, ..b }, MrFault::BadKey),
        (WindowBind { mr: other, ..b }, MrFault::BadKey),
        (WindowBind { pd: PdId(4), ..b }, MrFault::Pd),
        (WindowBind { access: ALL | Access::LOCAL_WRITE, ..b }, MrFault::Access),
        (WindowBind { addr: 0x8fff, ..b }, MrFault::Bounds),
        (WindowBind { addr: 0x90f0, ..b }, MrFault::Bounds),
        (WindowBind { length: u64::MAX, ..b }, MrFault::Bounds),
    ] {
        assert_eq!(t.bind(&bad), Err(why), "{bad:?}");
    }
    assert!(all(&t) == before, "all entries are as they were");
    let (mut t, mr, window) = table(Access::LOCAL_WRITE, WindowType::One);
    assert_eq!(t.bind(&WindowBind { mr, window, rkey: window, ..b }), Err(MrFault::Access), "no MW_BIND");
    let (mut t, mr, window) = table(Access::MW_BIND, WindowType::One);
    let b = WindowBind { mr, window, rkey: window, ..b };
    assert_eq!(t.bind(&b), Err(MrFault::Access), "no LOCAL_WRITE");
    assert_eq!(t.bind(&WindowBind { access: READ, ..b }), Ok(WindowType::One));
}

#[test]
fn an_mr_with_windows_stays() {
    let (mut t, b) = bindable(WindowType::One);
    let second = t.alloc_window(PD, WindowType::Two, 3).unwrap();
    t.bind(&b).unwrap();
    t.bind(&b).unwrap();
    t.bind(&WindowBind { window: second, rkey: second, ..b }).unwrap();
    assert_eq!(t.deregister(b.mr), Err(NicError::Busy));
    assert_eq!(t.deregister(b.rkey), Err(NicError::NotFound), "a window is no MR");
    assert_eq!(t.free_window(b.mr), Err(NicError::NotFound), "an MR is no window");
    t.bind(&WindowBind { length: 0, ..b }).unwrap();
    assert_eq!(at(&t, b.rkey, 0x9010, 1), Err(MrFault::Access));
    assert_eq!(t.deregister(b.mr), Err(NicError::Busy));
    assert_eq!(t.free_window(second), Ok(PD));
    assert_eq!(t.deregister(b.mr), Ok(PD));
    assert_eq!(t.free_window(b.window), Ok(PD), "by a key of the past");
    assert_eq!(t.free_window(b.window), Err(NicError::NotFound));
}

#[test]
fn type_2_is_invalidated_before_it_is_bound_again() {
    let (mut t, b) = bindable(WindowType::Two);
    assert_eq!(t.bind(&WindowBind { length: 0, ..b }), Err(MrFault::State));
    assert_eq!(t.invalidate(b.window, QP), Ok(()), "unbound already");
    assert_eq!(t.invalidate_remote(b.window, QP), Err(MrFault::State));
    t.bind(&b).unwrap();
    assert_eq!(t.bind(&b), Err(MrFault::State));
    assert_eq!(t.invalidate(b.rkey, QpId { pd: PD, qpn: 78 }), Err(MrFault::Pd));
    assert_eq!(t.invalidate(b.window, QP), Err(MrFault::BadKey), "the key of before");
    assert_eq!(t.invalidate(b.mr, QP), Err(MrFault::BadKey));
    assert_eq!(t.invalidate_remote(b.rkey, QP), Ok(()));
    assert_eq!(at(&t, b.rkey, 0x9010, 1), Err(MrFault::Access));
    t.bind(&b).unwrap();
    t.unbind_all(78);
    assert!(at(&t, b.rkey, 0x9010, 1).is_ok());
    t.unbind_all(77);
    assert_eq!(at(&t, b.rkey, 0x9010, 1), Err(MrFault::Access));
    t.deregister(b.mr).unwrap();
    let (mut t, b) = bindable(WindowType::One);
    t.bind(&b).unwrap();
    assert_eq!(t.invalidate(b.rkey, QP), Err(MrFault::State), "type 1 is rebound instead");
    assert_eq!(t.invalidate_remote(b.rkey, QP), Err(MrFault::State));
}

#[test]
fn an_mr_with_windows_keeps_what_it_opens() {
    let (mut t, b) = bindable(WindowType::One);
    let before = t.query(b.mr).expect("it is registered");
    let new = MrAttr { addr: 0x5000, ..before };
    t.bind(&b).expect("it can be bound");
    assert_eq!(t.reregister(b.mr, new), Err(NicError::Busy));
    assert_eq!(t.query(b.mr), Some(before));
    assert_eq!(t.query(b.rkey), None, "a window is not an MR");
    t.free_window(b.window).expect("it exists");
    assert_eq!(t.reregister(b.mr, new), Ok(PD));
    assert_eq!(t.resolve_local(b.mr, PD, 0x9000, 1, false), Ok(0x5000));
}
