use std::collections::HashMap;

use starverbs_core::mr::Plain;
use starverbs_core::{Dma, Gid, Seg};
use starverbs_onerma::{
    COMPLETION_LEN, CardConfig, CardPath, Class, Completion, OneRmaCard, OneRmaCommand, OneRmaEnv, PortalId,
    Region, Rights, SealCounters, Status, Transmit, packet_in_buffer,
};

use super::*;
use crate::onerma::sender_of;

fn hex<const N: usize>(text: &str) -> [u8; N] {
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("hex");
    assert_eq!(text.len(), 2 * N);
    std::array::from_fn(byte)
}

/// McGrew and Viega, "The Galois/Counter Mode of Operation", test cases 1 and 4.
#[test]
fn gcm_is_that_of_its_specification() {
    let key = GcmSeal.prepare(&DerivedKey([0; 16]));
    let tag = GcmSeal.seal(&key, &[0; 12], &[], &mut []);
    assert_eq!(tag, hex("58e2fccefa7e3061367f1d57a4e7455a"));

    let key = GcmSeal.prepare(&DerivedKey(hex("feffe9928665731c6d6a8f9467308308")));
    let plain: [u8; 60] = hex(concat!(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72",
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
    ));
    let bound: [u8; 20] = hex("feedfacedeadbeeffeedfacedeadbeefabaddad2");
    let iv = hex("cafebabefacedbaddecaf888");
    let mut body = plain;
    let tag = GcmSeal.seal(&key, &iv, &bound, &mut body);
    let cipher: [u8; 60] = hex(concat!(
        "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e",
        "21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091",
    ));
    assert_eq!((body, tag), (cipher, hex("5bc94fbc3221a5db94fae95ae7121a47")));
    assert!(GcmSeal.open(&key, &iv, &bound, &mut body, &tag));
    assert_eq!(body, plain);
    for (at, bit) in [(0, 1), (15, 0x80)] {
        let (mut body, mut wrong) = (cipher, tag);
        wrong[at] ^= bit;
        assert!(!GcmSeal.open(&key, &iv, &bound, &mut body, &wrong));
    }
    let mut body = cipher;
    assert!(!GcmSeal.open(&key, &iv, &bound[1..], &mut body, &tag));
}

/// What `openssl enc -aes-128-ecb -nopad` gives for the blocks that `derive` names.
#[test]
fn derived_keys_are_aes_of_who_asks_for_what() {
    let region = RegionKey(hex("000102030405060708090a0b0c0d0e0f"));
    let four = Gid::from_ipv4([10, 1, 2, 3]);
    let six = Gid(hex("20010db8000000000000000000000001"));
    let of = |addr, op| GcmSeal.derive(&region, &Initiator { addr, pid: 77 }, op).0;
    assert_eq!(of(four, OneRmaOp::Read), hex("faf75f0d49dd384a04aefa7319700d06"));
    assert_eq!(of(four, OneRmaOp::Write), hex("86c75b30f26e65be438b4309ae213486"));
    assert_eq!(of(six, OneRmaOp::Read), hex("e0e4d5a0b2c10dc220cd49ecf996d252"));
    let others = [
        GcmSeal.derive(&region, &Initiator { addr: four, pid: 78 }, OneRmaOp::Read).0,
        GcmSeal.derive(&RegionKey([0; 16]), &Initiator { addr: four, pid: 77 }, OneRmaOp::Read).0,
        of(Gid::from_ipv4([10, 1, 2, 4]), OneRmaOp::Read),
        of(Gid(hex("20010db8000000000000000000000002")), OneRmaOp::Read),
        of(Gid(hex("20010db8000000010000000000000001")), OneRmaOp::Read),
        of(six, OneRmaOp::Rekey),
    ];
    assert!(
        others.iter().all(|other| *other != of(four, OneRmaOp::Read) && *other != of(six, OneRmaOp::Read))
    );
}

/// Memory, and what a card has sent.
#[derive(Default)]
struct Host {
    bytes: Vec<u8>,
    out: Vec<(CardPath, Vec<u8>)>,
}

impl Dma for Host {
    type Mrs = Plain;
    fn dma_write(&mut self, addr: u64, data: &[u8]) -> bool {
        self.bytes[addr as usize..][..data.len()].copy_from_slice(data);
        true
    }
    fn dma_copy(&mut self, from: u64, to: &mut [u8]) -> bool {
        to.copy_from_slice(&self.bytes[from as usize..][..to.len()]);
        true
    }
    fn dma_store(&mut self, addr: u64, bytes: [u8; 8]) -> bool {
        self.dma_write(addr, &bytes)
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
    fn send(
        &mut self,
        path: &CardPath,
        _: Class,
        head: &[u8],
        data: Seg,
        seal: impl FnOnce(&mut [u8]),
    ) -> bool {
        let packet = packet_in_buffer(self, head, data, seal);
        let sent = packet.is_some();
        self.out.extend(packet.map(|packet| (*path, packet)));
        sent
    }
    fn completed(&mut self, _: PortalId) {}
}

const KEY: RegionKey = RegionKey([0x4b; 16]);
const LEN: u64 = 8192;

/// What a command ends as between two cards, the second of which has a region of `KEY`; and both memories.
fn run(op: OneRmaOp, key: &RegionKey) -> (Status, [Host; 2], Vec<Vec<u8>>) {
    let gids = [1, 2].map(|last| Gid::from_ipv4([10, 0, 0, last]));
    let card = |gid: &Gid| {
        let counters = SealCounters::of_epoch(1);
        OneRmaCard::new(CardConfig::default(), GcmSeal, *gid, sender_of(gid), counters).expect("memory")
    };
    let (mut cards, mut hosts) = (gids.each_ref().map(card), [Host::default(), Host::default()]);
    let region = |addr, rights| Region { addr, len: LEN, owner: 7, rights, key: KEY };
    hosts[0].bytes = vec![0x11; 2 * LEN as usize];
    hosts[1].bytes = vec![0x22; LEN as usize];
    let local = cards[0].open_region(region(0, Rights::LOCAL_READ | Rights::LOCAL_WRITE)).expect("a place");
    let completions = cards[0].open_region(region(LEN, Rights::LOCAL_WRITE)).expect("a place");
    let remote =
        cards[1].open_region(region(0, Rights::REMOTE_READ | Rights::REMOTE_WRITE)).expect("a place");
    let portal = cards[0].open_portal(7, 1).expect("slots");
    let command = OneRmaCommand {
        op,
        class: Class::High,
        haste: 0,
        size: 4096,
        remote: gids[1],
        region: remote,
        offset: 64,
        local,
        local_offset: 128,
        completions,
        key: GcmSeal.derive(key, &Initiator { addr: gids[0], pid: 7 }, op),
    };
    cards[0].issue(0, portal, 0, &command).expect("a free slot");
    let at: HashMap<Gid, usize> = [(gids[0], 0), (gids[1], 1)].into();
    let mut seen = Vec::new();
    loop {
        for (card, host) in cards.iter_mut().zip(&mut hosts) {
            while card.poll_transmit(host, 0) == Transmit::More {}
        }
        let packets: Vec<_> = hosts.iter_mut().flat_map(|host| host.out.drain(..)).collect();
        if packets.is_empty() {
            break;
        }
        for (path, mut bytes) in packets {
            seen.push(bytes.clone());
            let (to, back) = (at[&path.remote], CardPath { local: path.remote, remote: path.local, card: 0 });
            cards[to].handle_packet(&mut hosts[to], 0, &back, &mut bytes);
        }
    }
    let record = hosts[0].bytes[LEN as usize..][..COMPLETION_LEN].try_into().expect("a record");
    (Completion::decode(record).expect("it completed").status, hosts, seen)
}

#[test]
fn cards_read_and_write_encrypted() {
    let (status, hosts, packets) = run(OneRmaOp::Read, &KEY);
    assert_eq!((status, packets.len()), (Status::Ok, 2));
    assert_eq!(hosts[0].bytes[128..128 + 4096], [0x22; 4096]);
    let (status, hosts, mut all) = run(OneRmaOp::Write, &KEY);
    assert_eq!((status, all.len()), (Status::Ok, 4));
    assert_eq!(hosts[1].bytes[64..64 + 4096], [0x11; 4096]);
    all.extend(packets);
    for bytes in all {
        let plain = |byte| bytes.windows(16).any(|window| window == [byte; 16]);
        assert!(!plain(0x11) && !plain(0x22), "nothing of the data is on the wire");
    }
}

#[test]
fn another_region_s_key_opens_nothing() {
    for op in [OneRmaOp::Read, OneRmaOp::Write] {
        let (status, hosts, packets) = run(op, &RegionKey([0x4c; 16]));
        assert_eq!((status, packets.len()), (Status::RemoteAuthenticationFailure, 2));
        assert_eq!(hosts[0].bytes[..LEN as usize], [0x11; LEN as usize]);
        assert_eq!(hosts[1].bytes, [0x22; LEN as usize]);
    }
}
