//! A host: the card, its memory, and what its processes hold.

use starverbs_core::mr::Plain;
use starverbs_core::{Dma, Gid, Seg};
use starverbs_onerma::{
    COMPLETION_LEN, CardConfig, CardPath, Class, Completion, OneRmaCard, PortalId, Region, RegionId,
    RegionKey, Rights, SealCounters, packet_in_buffer,
};

use super::seal::SimSeal;
use crate::memory::{Memory, READ, WRITE};

/// A packet that leaves a card.
#[derive(Clone, Debug)]
pub struct SentPacket {
    /// Between which addresses
    pub path: CardPath,
    /// Its class
    pub class: Class,
    /// What stands behind the UDP header
    pub bytes: Vec<u8>,
}

/// What a card works in.
pub struct OneRmaHostEnv {
    /// The host's memory
    pub memory: Memory,
    /// What it has sent
    pub out: Vec<SentPacket>,
    /// Portals that have completions
    pub completed: Vec<PortalId>,
    /// Its memory is not there now
    pub absent: bool,
}

impl Dma for OneRmaHostEnv {
    type Mrs = Plain;

    fn dma_write(&mut self, addr: u64, data: &[u8]) -> bool {
        if !self.absent {
            self.memory.check(addr, data.len(), WRITE);
            self.memory.write(addr, data);
        }
        !self.absent
    }

    fn dma_fetch_add(&mut self, _: u64, _: u64) -> Option<u64> {
        panic!("1RMA has no atomics")
    }

    fn dma_compare_swap(&mut self, _: u64, _: u64, _: u64) -> Option<u64> {
        panic!("1RMA has no atomics")
    }

    fn dma_store(&mut self, addr: u64, bytes: [u8; 8]) -> bool {
        assert!(addr.is_multiple_of(8), "stores of eight bytes are aligned");
        self.dma_write(addr, &bytes)
    }

    fn dma_copy(&mut self, from: u64, to: &mut [u8]) -> bool {
        if !self.absent {
            self.memory.check(from, to.len(), READ);
            to.copy_from_slice(self.memory.read(from, to.len()));
        }
        !self.absent
    }

    fn dma_fence(&mut self) {}

    fn begin_payload(&mut self) {}

    fn dma_read(&mut self, from: Seg) -> Option<Seg> {
        Some(from)
    }
}

impl starverbs_onerma::OneRmaEnv for OneRmaHostEnv {
    fn send(
        &mut self,
        path: &CardPath,
        class: Class,
        head: &[u8],
        data: Seg,
        seal: impl FnOnce(&mut [u8]),
    ) -> bool {
        let packet = packet_in_buffer(self, head, data, seal);
        let sent = packet.is_some();
        self.out.extend(packet.map(|bytes| SentPacket { path: *path, class, bytes }));
        sent
    }

    fn completed(&mut self, portal: PortalId) {
        self.completed.push(portal);
    }
}

/// A region, and where it lies.
#[derive(Clone, Copy, Debug)]
pub struct SimRegion {
    /// Its name at its card
    pub id: RegionId,
    /// Its address in the host's memory
    pub addr: u64,
    /// Its bytes
    pub len: u64,
}

/// A process's slots and completions.
#[derive(Clone, Copy, Debug)]
pub struct Portal {
    /// Its name at its card
    pub id: PortalId,
    /// Its process
    pub pid: u32,
    /// How many slots
    pub slots: u16,
    /// Where its completions go
    pub completions: SimRegion,
    seen: u32,
}

/// A host.
pub struct OneRmaHost {
    /// Its address
    pub gid: Gid,
    /// Its card
    pub card: OneRmaCard<SimSeal>,
    /// What the card works in
    pub env: OneRmaHostEnv,
    config: CardConfig,
    epoch: u32,
}

impl OneRmaHost {
    /// A host with a number, from which its address and its sender ID follow.
    pub fn new(number: u16, config: CardConfig) -> Self {
        let [high, low] = number.to_be_bytes();
        let gid = Gid::from_ipv4([10, 1, high, low]);
        let base = 0x1_0000_0000 * (u64::from(number) + 1);
        let memory = Memory::new(base);
        let env = OneRmaHostEnv { memory, out: Vec::new(), completed: Vec::new(), absent: false };
        OneRmaHost { gid, card: Self::card(gid, config, 0), env, config, epoch: 0 }
    }

    fn card(gid: Gid, config: CardConfig, epoch: u32) -> OneRmaCard<SimSeal> {
        let sender = u32::from_be_bytes(gid.ipv4().expect("an IPv4 address"));
        OneRmaCard::new(config, SimSeal, gid, sender, SealCounters::of_epoch(epoch)).expect("memory")
    }

    /// The card is a new one, of the next epoch; regions and portals are gone.
    pub fn restart(&mut self) {
        self.epoch += 1;
        self.card = Self::card(self.gid, self.config, self.epoch);
    }

    /// A new region of `len` bytes.
    pub fn region(&mut self, owner: u32, len: u64, rights: Rights, key: RegionKey) -> SimRegion {
        let addr = self.env.memory.alloc(len);
        self.env.memory.allow(addr, len, READ | WRITE);
        let id = self.card.open_region(Region { addr, len, owner, rights, key }).expect("a place");
        SimRegion { id, addr, len }
    }

    /// Slots for a process.
    pub fn portal(&mut self, pid: u32, slots: u16) -> Portal {
        let len = u64::from(slots) * COMPLETION_LEN as u64;
        let completions = self.region(pid, len, Rights::LOCAL_WRITE, RegionKey([0; 16]));
        let id = self.card.open_portal(pid, slots).expect("slots");
        Portal { id, pid, slots, completions, seen: 0 }
    }

    /// Bytes of a region.
    pub fn bytes(&self, region: &SimRegion) -> &[u8] {
        self.env.memory.read(region.addr, region.len as usize)
    }
}

impl Portal {
    /// The next completion, if there is one.
    pub fn poll(&mut self, host: &OneRmaHost) -> Option<Completion> {
        let at = u64::from(self.seen % u32::from(self.slots)) * COMPLETION_LEN as u64;
        let record = host.env.memory.read(self.completions.addr + at, COMPLETION_LEN);
        let completion = Completion::decode(record.try_into().ok()?)?;
        let next = self.seen.wrapping_add(1);
        if completion.sequence != next {
            return None;
        }
        self.seen = next;
        Some(completion)
    }
}
