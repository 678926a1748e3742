//! What the heap holds of peers: nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use starverbs_core::mr::Plain;
use starverbs_core::{Dma, Gid, Seg};
use starverbs_onerma::wire::{Hop, Iv, OneRmaHeader, PacketPrefix};
use starverbs_onerma::{
    CardConfig, CardPath, Class, DerivedKey, Handle, Initiator, OneRmaCard, OneRmaEnv, OneRmaOp, PortalId,
    Region, RegionKey, Rights, Seal, SealCounters, TAG_LEN, Transmit,
};

struct Counted;

thread_local! {
    /// Bytes that this thread has taken and not given back; and how often it took some.
    static HELD: Cell<i64> = const { Cell::new(0) };
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does the work; the counters beside it have no destructor, and allocate
// nothing.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.set(HELD.get() + layout.size() as i64);
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller keeps the rules of the same call
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.set(HELD.get() - layout.size() as i64);
        // SAFETY: the caller keeps the rules of the same call
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// Every tag is right: this is about memory.
struct Open;

impl Seal for Open {
    type Key = DerivedKey;
    fn derive(&self, region: &RegionKey, initiator: &Initiator, _: OneRmaOp) -> DerivedKey {
        let mut key = region.0;
        key[..4].copy_from_slice(&initiator.pid.to_be_bytes());
        DerivedKey(key)
    }
    fn prepare(&self, key: &DerivedKey) -> DerivedKey {
        *key
    }
    fn seal(&self, _: &DerivedKey, _: &[u8; 12], _: &[u8], _: &mut [u8]) -> [u8; 16] {
        [0; 16]
    }
    fn open(&self, _: &DerivedKey, _: &[u8; 12], _: &[u8], _: &mut [u8], _: &[u8; 16]) -> bool {
        true
    }
}

/// Memory of zeros, and the last packet that was sent.
struct Host {
    sent: u64,
    last: [u8; 64],
}

impl Dma for Host {
    type Mrs = Plain;
    fn dma_write(&mut self, _: u64, _: &[u8]) -> bool {
        true
    }
    fn dma_copy(&mut self, _: u64, to: &mut [u8]) -> bool {
        to.fill(0);
        true
    }
    fn dma_store(&mut self, _: u64, _: [u8; 8]) -> bool {
        true
    }
    fn dma_fetch_add(&mut self, _: u64, _: u64) -> Option<u64> {
        None
    }
    fn dma_compare_swap(&mut self, _: u64, _: u64, _: u64) -> Option<u64> {
        None
    }
    fn dma_fence(&mut self) {}
    fn begin_payload(&mut self) {}
    fn dma_read(&mut self, from: Seg) -> Option<Seg> {
        Some(from)
    }
}

impl OneRmaEnv for Host {
    fn send(&mut self, _: &CardPath, _: Class, head: &[u8], data: Seg, seal: impl FnOnce(&mut [u8])) -> bool {
        let (mut packet, len) = ([0; 256], head.len() + data.len as usize + TAG_LEN);
        packet[..head.len()].copy_from_slice(head);
        seal(&mut packet[..len]);
        self.sent += 1;
        self.last.iter_mut().zip(packet).for_each(|(to, from)| *to = from);
        true
    }
    fn completed(&mut self, _: PortalId) {}
}

/// The header and a tag, in a buffer of its own.
fn packet(head: OneRmaHeader, body: usize, room: &mut [u8; 256]) -> usize {
    let bytes = head.to_bytes();
    room[..bytes.len()].copy_from_slice(&bytes);
    bytes.len() + body + 16
}

#[test]
fn a_hundred_thousand_pairs_are_no_byte_of_the_heap() {
    let gid = Gid::from_ipv4([10, 0, 0, 1]);
    let counters = SealCounters::of_epoch(1);
    let mut card = OneRmaCard::new(CardConfig::default(), Open, gid, 1, counters).expect("memory");
    let mut host = Host { sent: 0, last: [0; 64] };
    let rights = Rights::REMOTE_READ | Rights::REMOTE_WRITE;
    let region = Region { addr: 0, len: 4096, owner: 1, rights, key: RegionKey([1; 16]) };
    let region = card.open_region(region).expect("a place");
    let mut room = [0; 256];
    let mut serve = |pair: u32| {
        let [_, a, b, c] = (pair / 4).to_be_bytes();
        let path = CardPath { local: gid, remote: Gid::from_ipv4([11, a, b, c]), card: 0 };
        let from = Handle { index: pair, generation: 0 };
        for op in [OneRmaOp::Read, OneRmaOp::Write] {
            let prefix = PacketPrefix { op, class: Class::High, iv: Iv { sender: pair, counter: 1 } };
            let hop = Hop::Request { from, pid: pair % 4, region, offset: 0, size: 64, timeout: 20_000 };
            let len = packet(OneRmaHeader { prefix, hop }, 0, &mut room);
            card.handle_packet(&mut host, 1, &path, &mut room[..len]);
            while card.poll_transmit(&mut host, 1) == Transmit::More {}
            if op == OneRmaOp::Write {
                let answer = &host.last[..52];
                let Ok((OneRmaHeader { hop: Hop::Ask { from, .. }, .. }, _)) = OneRmaHeader::parse(answer)
                else {
                    panic!("a WRITE is asked for its data")
                };
                let len =
                    packet(OneRmaHeader { prefix, hop: Hop::Data { to: from, offset: 0 } }, 64, &mut room);
                card.handle_packet(&mut host, 1, &path, &mut room[..len]);
            }
        }
    };
    serve(0);
    let before = HELD.get();
    for pair in 1..100_000 {
        serve(pair);
    }
    assert_eq!(HELD.get(), before, "nothing is kept of a pair");
    let calls = CALLS.get();
    assert_eq!(host.sent, 300_000, "data, Ask and Done, for each");
    assert_eq!((card.solicited(), card.inbound_bytes()), (0, 0));
    /* the test's own headers: three a pair */
    assert!(calls < 300_000 + 1_000, "the card allocates nothing: {calls}");
}
