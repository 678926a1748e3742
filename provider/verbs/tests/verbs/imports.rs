//! Imports from another process, which here is another card of this one: tests/abi/import.c has real
//! processes.

use crate::common::*;
use starverbs_core::{Access, QpType, SendOp, Sge, WcStatus};
use starverbs_settings::Settings;
use starverbs_verbs::{Context, Dm, MemoryRange, Mr, Pd, Qp, Rereg, Result, SendWr, Td};

fn errno<T>(result: Result<T>) -> i32 {
    result.err().map_or(0, |error| error.errno())
}

/// A node in a protection domain of another card.
fn importer(settings: &Settings, exporter: &Node) -> Node {
    let ctx = Context::import_with(settings.clone(), exporter.ctx.command_fd()).unwrap();
    let pd = Pd::import(&ctx, exporter.pd.handle()).unwrap();
    Node::of(ctx, pd)
}

/// An exporter with an importer that is connected to a peer.
struct Three {
    exporter: Node,
    importer: Node,
    peer: Node,
    ours: Qp,
    theirs: Qp,
}

impl Three {
    fn new() -> Three {
        let settings = settings();
        let exporter = Node::new(&settings);
        let importer = importer(&settings, &exporter);
        let peer = Node::new(&settings);
        let (ours, theirs) = (importer.qp(QpType::Rc), peer.qp(QpType::Rc));
        connect(&importer, &ours, &peer, &theirs);
        Three { exporter, importer, peer, ours, theirs }
    }

    fn import(&self) -> Mr {
        Mr::import(&self.importer.pd, self.exporter.mr.lkey()).unwrap()
    }

    /// A request of the peer to the exporter's memory at `at`.
    fn peer_does(&self, op: SendOp, at: usize) -> WcStatus {
        let (remote_addr, rkey) = (self.exporter.addr(at), self.exporter.mr.rkey());
        let sges = [self.peer.sge(0, 3000)];
        post(&self.theirs, &SendWr { op, remote_addr, rkey, ..send(1, &sges) }).unwrap();
        self.peer.completions(1)[0].status
    }

    /// Bytes of the exporter's region for the importer's requests.
    fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { lkey: self.exporter.mr.lkey(), ..self.exporter.sge(at, len) }
    }
}

/// Of a node's region, which stays in the node's buffer.
fn rereg(mr: &Mr, change: &Rereg<'_>) -> Result<()> {
    // SAFETY: see above.
    unsafe { mr.rereg(change) }
}

#[test]
fn peers_reach_imported_memory_and_it_is_sent_and_received_into() {
    let three = Three::new();
    let mr = three.import();
    assert_eq!((mr.lkey(), mr.rkey(), mr.length()), {
        let own = &three.exporter.mr;
        (own.lkey(), own.rkey(), own.length())
    });
    three.peer.fill(0, &[0x5a; 3000]);
    assert_eq!(three.peer_does(SendOp::Write, 101), WcStatus::Success);
    assert_eq!(three.exporter.bytes(101, 3000), [0x5a; 3000]);
    three.exporter.fill(0, b"read by the peer");
    assert_eq!(three.peer_does(SendOp::Read, 0), WcStatus::Success);
    assert_eq!(three.peer.bytes(0, 16), b"read by the peer");

    let mut poster = three.ours.post_recv();
    poster.push(&starverbs_verbs::RecvWr { wr_id: 7, sges: &[three.sge(8000, 4000)] }).unwrap();
    poster.ring();
    three.peer.fill(0, &[0xa5; 3000]);
    post(&three.theirs, &send(2, &[three.peer.sge(0, 3000)])).unwrap();
    assert_eq!(three.importer.completions(1)[0].wr_id, 7);
    assert_eq!(three.exporter.bytes(8000, 3000), [0xa5; 3000]);
    assert_eq!(three.peer.completions(1)[0].status, WcStatus::Success);

    /* gathered from both processes */
    three.exporter.fill(0, b"exporter's ");
    three.importer.fill(0, b"importer's");
    three.peer.post_recv(&three.theirs, 8, 0, 100).unwrap();
    post(&three.ours, &send(3, &[three.sge(0, 11), three.importer.sge(0, 10)])).unwrap();
    assert_eq!(three.peer.completions(1)[0].byte_len, 21);
    assert_eq!(three.peer.bytes(0, 21), b"exporter's importer's");
    assert_eq!(three.importer.completions(1)[0].status, WcStatus::Success);
}

#[test]
fn a_region_that_its_exporter_ends_or_changes_opens_nothing() {
    let end: [fn(&Three); 3] = [
        |three| three.exporter.mr.dereg().unwrap(),
        |three| rereg(&three.exporter.mr, &Rereg { access: Some(all_access()), ..Rereg::default() }).unwrap(),
        |three| three.exporter.ctx.close(),
    ];
    for end in end {
        let three = Three::new();
        let _mr = three.import();
        assert_eq!(three.peer_does(SendOp::Write, 0), WcStatus::Success);
        end(&three);
        assert_eq!(three.peer_does(SendOp::Write, 0), WcStatus::RemAccessErr);
        let three = Three::new();
        let _mr = three.import();
        end(&three);
        post(&three.ours, &send(1, &[three.sge(0, 8)])).unwrap();
        assert_eq!(three.importer.completions(1)[0].status, WcStatus::LocProtErr);
    }
}

#[test]
fn a_changed_region_can_be_imported_anew() {
    let three = Three::new();
    let old = three.import();
    let (start, length) = (three.exporter.addr(0), 5000);
    let change = Rereg { range: Some(MemoryRange { addr: start, length }), ..Rereg::default() };
    rereg(&three.exporter.mr, &change).unwrap();
    assert_eq!(errno(Mr::import(&three.importer.pd, old.lkey())), libc::EBUSY, "the old one has the key");
    drop(old);
    assert_eq!(three.import().length(), 5000);
}

#[test]
fn imports_of_one_thing_are_one_thing_until_the_last_is_gone() {
    let three = Three::new();
    let ctx = three.importer.ctx.import().unwrap();
    let again = Pd::import(&ctx, three.exporter.pd.handle()).unwrap();
    assert_eq!((again.id(), again.handle()), (three.importer.pd.id(), three.exporter.pd.handle()));
    let parent = Pd::parent_of(&again, Some(&Td::alloc(&ctx).unwrap()), None).unwrap();
    let (first, second) = (three.import(), Mr::import(&parent, three.exporter.mr.lkey()).unwrap());
    drop(first);
    assert_eq!(three.peer_does(SendOp::Write, 0), WcStatus::Success);
    drop(second);
    assert_eq!(three.peer_does(SendOp::Write, 0), WcStatus::RemAccessErr);
}

#[test]
fn what_is_not_there_or_not_ours_is_refused() {
    let three = Three::new();
    let (pd, key) = (&three.importer.pd, three.exporter.mr.lkey());
    let other = Pd::alloc(&three.exporter.ctx).unwrap();
    let elsewhere = Pd::import(&three.importer.ctx, other.handle()).unwrap();
    assert_eq!(errno(Mr::import(&elsewhere, key)), libc::EINVAL, "a region of another domain");
    other.dealloc().unwrap();
    let local = Pd::alloc(&three.importer.ctx).unwrap();
    assert_eq!(errno(Mr::import(&local, key)), libc::EINVAL, "a domain of this process");
    assert_eq!(errno(Mr::import(pd, three.peer.mr.lkey())), libc::EINVAL);
    assert_eq!(errno(Pd::import(&three.importer.ctx, other.handle())), libc::EINVAL);
    assert_eq!(errno(Dm::import(&three.importer.ctx, 99)), libc::EINVAL);
    assert_eq!(errno(pd.dealloc()), libc::EOPNOTSUPP);
    let mr = three.import();
    assert_eq!(errno(mr.dereg()), libc::EOPNOTSUPP);
    assert_eq!(errno(rereg(&mr, &Rereg { access: Some(Access::empty()), ..Rereg::default() })), libc::EINVAL);
    three.exporter.ctx.close();
    assert_eq!(errno(Mr::import(pd, key)), libc::ENODEV);
    assert_eq!(errno(Context::import_with(settings(), three.exporter.ctx.command_fd())), libc::ENODEV);
}

#[test]
fn a_region_that_another_handle_ends_is_taken_from_importers_too() {
    let three = Three::new();
    let _mr = three.import();
    let same = Mr::import(&three.exporter.pd, three.exporter.mr.lkey()).unwrap();
    same.dereg().unwrap();
    assert_eq!(three.peer_does(SendOp::Write, 0), WcStatus::RemAccessErr);
}

#[test]
fn atomics_do_not_reach_imported_memory() {
    let three = Three::new();
    let _mr = three.import();
    let (remote_addr, rkey) = (three.exporter.addr(0).next_multiple_of(8), three.exporter.mr.rkey());
    let sges = [three.peer.sge(0, 8)];
    let add = SendWr { op: SendOp::FetchAdd, remote_addr, rkey, compare_add: 1, ..send(1, &sges) };
    post(&three.theirs, &add).unwrap();
    assert_eq!(three.peer.completions(1)[0].status, WcStatus::RemAccessErr);
    assert_eq!(three.exporter.bytes(0, 16), [0; 16]);
}

#[test]
fn device_memory_is_registered_by_its_importer() {
    let three = Three::new();
    let dm = Dm::alloc(&three.exporter.ctx, 4096, 0).unwrap();
    let same = Dm::import(&three.importer.ctx, dm.handle()).unwrap();
    let access = Access::ZERO_BASED | Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let mr = Mr::device(&three.importer.pd, &same, 1024, 2048, access).unwrap();
    let sges = [three.peer.sge(0, 2048)];
    let write = SendWr { op: SendOp::Write, remote_addr: 0, rkey: mr.rkey(), ..send(1, &sges) };
    post(&three.theirs, &write).unwrap();
    assert_eq!(three.peer.completions(1)[0].status, WcStatus::Success);
    dm.free().unwrap();
    post(&three.theirs, &write).unwrap();
    assert_eq!(three.peer.completions(1)[0].status, WcStatus::RemAccessErr);
    mr.dereg().unwrap();
}
