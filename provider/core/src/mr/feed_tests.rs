use std::vec;
use std::vec::Vec;

use super::super::{MrAttr, Plain, WindowBind, WindowType};
use super::*;
use crate::types::{Access, PdId, QpId};

const PD: PdId = PdId(1);
const QPN: u32 = 7;

fn region(table: &mut MrTable) -> u32 {
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    table
        .register(MrAttr { pd: PD, addr: 4096, length: 4096, iova: 4096, access, ..MrAttr::default() }, 1)
        .unwrap()
}

fn bind(table: &mut MrTable, mr: u32) -> u32 {
    let window = table.alloc_window(PD, WindowType::Two, 2).unwrap();
    let access = Access::REMOTE_READ;
    let rkey = window ^ 1;
    table.bind(&WindowBind { window, rkey, mr, addr: 4096, length: 64, access, qpn: QPN, pd: PD }).unwrap();
    rkey
}

fn opened(table: &mut MrTable) -> Option<u32> {
    match table.next_change()? {
        KeyChange::Opened(rule) => Some(rule.key),
        KeyChange::Closed(rule) => panic!("{rule:?} was closed"),
    }
}

/// What the feed had opened it also closes, whatever memory there is then.
#[test]
fn the_end_of_what_is_open_needs_no_memory() {
    let mut table = MrTable::<Plain>::default();
    let mr = region(&mut table);
    let mut keys = vec![bind(&mut table, mr)];
    table.follow().unwrap();
    assert_eq!(table.next_change(), None, "it is among the rules");
    keys.extend((0..20).map(|_| bind(&mut table, mr)));
    for key in &keys[1..] {
        let rule = table.rule(*key).unwrap();
        assert_eq!(table.next_change(), Some(KeyChange::Opened(rule)));
    }
    let room = |table: &MrTable| table.feed.as_ref().map(|feed| feed.list.capacity());
    let before = room(&table);
    for key in &keys {
        table.invalidate(*key, QpId { pd: PD, qpn: QPN }).unwrap();
    }
    table.deregister(mr).unwrap();
    keys.push(mr);
    assert_eq!(room(&table), before);
    for key in keys {
        assert!(matches!(table.next_change(), Some(KeyChange::Closed(rule)) if rule.key == key));
    }
    assert_eq!((table.next_change(), table.feed.as_ref().map(|feed| feed.open)), (None, Some(0)));
}

#[test]
fn regions_and_imports_are_followed_like_windows() {
    let mut table = MrTable::<Plain>::default();
    table.follow().unwrap();
    let mr = region(&mut table);
    let before = table.rule(mr).unwrap();
    assert_eq!(table.next_change(), Some(KeyChange::Opened(before)));
    let attr = MrAttr { length: 100, ..table.query(mr).unwrap() };
    table.reregister(mr, attr).unwrap();
    assert_eq!(table.next_change(), Some(KeyChange::Closed(before)));
    assert_eq!(table.next_change(), Some(KeyChange::Opened(MemoryRule { len: 100, ..before })));
    let foreign = mr ^ 0x100;
    table.import(foreign, attr).unwrap();
    assert_eq!(opened(&mut table), Some(foreign));
    assert_eq!(table.rules().map(|rule| rule.key).collect::<Vec<_>>(), [mr, foreign]);
    table.hide(foreign);
    table.unimport(foreign).unwrap();
    assert_eq!(table.next_change(), None, "the feed left it out");
}

/// What the feed left out is no rule, and its end is no change.
#[test]
fn what_is_hidden_is_not_spoken_of() {
    let mut table = MrTable::<Plain>::default();
    table.follow().unwrap();
    let mr = region(&mut table);
    let key = bind(&mut table, mr);
    assert_eq!([opened(&mut table), opened(&mut table)], [Some(mr), Some(key)]);
    table.hide(key);
    table.hide(mr);
    assert_eq!((table.rule(key), table.rule(mr), table.rules().count()), (None, None, 0));
    let attr = table.query(mr).unwrap();
    assert_eq!(attr.access, Access::LOCAL_WRITE | Access::MW_BIND, "to its program it is what it was");
    table.invalidate(key, QpId { pd: PD, qpn: QPN }).unwrap();
    assert_eq!(table.next_change(), None);
    table.reregister(mr, attr).unwrap();
    assert_eq!(opened(&mut table), Some(mr), "another try");
}
