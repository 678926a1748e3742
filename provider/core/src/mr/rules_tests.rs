use std::vec;

use super::super::{Bind, MrAttr, WindowType};
use super::*;
use crate::types::{Access, PdId};

const PD: PdId = PdId(1);
const QPN: u32 = 7;

fn region(table: &mut MrTable) -> u32 {
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    table.register(MrAttr { pd: PD, addr: 4096, length: 4096, iova: 4096, access }, 1).unwrap()
}

fn bind(table: &mut MrTable, mr: u32) -> u32 {
    let window = table.alloc_window(PD, WindowType::Two, 2).unwrap();
    let access = Access::REMOTE_READ;
    let rkey = window ^ 1;
    table.bind(&Bind { window, rkey, mr, addr: 4096, length: 64, access, qpn: QPN, pd: PD }).unwrap();
    rkey
}

/// Whoever told a peer of a window hears of its end, whatever memory there is then.
#[test]
fn the_end_of_a_window_needs_no_memory() {
    let mut table = MrTable::new();
    let mr = region(&mut table);
    let mut keys = vec![bind(&mut table, mr)];
    table.watch_windows().unwrap();
    assert_eq!(table.next_change(), None, "it is among the rules");
    keys.extend((0..20).map(|_| bind(&mut table, mr)));
    for key in &keys[1..] {
        let rule = table.rule(*key).unwrap();
        assert_eq!(table.next_change(), Some(Change::Bound(rule)));
    }
    let room = |table: &MrTable| table.changes.as_ref().map(|changes| changes.list.capacity());
    let before = room(&table);
    for key in &keys {
        table.invalidate(*key, (PD, QPN)).unwrap();
    }
    assert_eq!(room(&table), before);
    for key in keys {
        assert!(matches!(table.next_change(), Some(Change::Unbound(rule)) if rule.key == key));
    }
    assert_eq!((table.next_change(), table.changes.as_ref().map(|changes| changes.bound)), (None, Some(0)));
}

/// What nobody could be told of is no rule, and its end is no change.
#[test]
fn what_is_hidden_is_not_spoken_of() {
    let mut table = MrTable::new();
    table.watch_windows().unwrap();
    let mr = region(&mut table);
    let key = bind(&mut table, mr);
    assert!(matches!(table.next_change(), Some(Change::Bound(rule)) if rule.key == key));
    table.hide(key);
    table.hide(mr);
    assert_eq!((table.rule(key), table.rule(mr), table.rules().count()), (None, None, 0));
    let attr = table.query(mr).unwrap();
    assert_eq!(attr.access, Access::LOCAL_WRITE | Access::MW_BIND, "to its program it is what it was");
    table.invalidate(key, (PD, QPN)).unwrap();
    assert_eq!(table.next_change(), None);
    table.reregister(mr, attr).unwrap();
    assert!(table.rule(mr).is_some(), "another try");
}
