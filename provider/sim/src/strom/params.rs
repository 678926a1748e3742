//! What StRoM's cards, their bus and their link are like. One set for each of the paper's two cards; no
//! figure has numbers of its own, and none was chosen to fit a figure, but for [`Params::store`].
//!
//! Sources: P is the paper with its section, M a manual of a part that it names, I our inference.

use crate::rnic::Picos;

/// A card, its bus and its link.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Params {
    /// Cycle of the RoCE stack and of kernels. P 3.5, 7: 156.25 MHz at 10 Gb/s, 322 MHz at 100 Gb/s
    pub cycle: Picos,
    /// Bytes that the data path moves a cycle. P 3.5, 7: 8 and 64
    pub width: u32,
    /// Cycles of each stage that parses or makes a header; of each step of a kernel, too. P 4.1: the steps
    /// around the state table take "around 5 cycles per packet", which is the least between two packets. I:
    /// so does each stage, and a kernel's step
    pub stage: u64,
    /// Stages that a packet passes, in and out. P figure 2 and 4.1: IP, UDP, BTH, packet dropper, RETH and
    /// AETH; request handler, RETH and AETH, BTH, UDP, IP
    pub stages: u64,
    /// From the stack to the wire, and from the wire to the stack. M PG210, the core of the paper's note 4:
    /// MAC and PCS of 10 Gb/s with 64 bits take 67.2 and 121.62 ns. I: 100 Gb/s as many cycles
    pub mac: [Picos; 2],
    /// Of a byte on the wire. P: 10 and 100 Gb/s
    pub byte: Picos,
    /// The cable. P 6.1: the cards are connected directly; I: 3 m
    pub cable: Picos,
    /// From a read's request to its first byte. P 6.2: 1.5 us
    pub read: Picos,
    /// From the first byte of a write to where it can be seen: of the card in memory, and of a program in the
    /// card. I: half of a read, which goes both ways
    pub write: Picos,
    /// Of a byte on the bus, thousandths of a picosecond. P 6.1, 7: PCIe 3.0, 8 and 16 lanes of 8 GT/s, 128
    /// bits in 130
    pub bus_byte: u64,
    /// Cycle of the DMA engine. P 4.2: 250 MHz
    pub dma_cycle: Picos,
    /// Bytes that it moves a cycle. P 4.2: 32. I: 64 at 100 Gb/s, as 32 at 250 MHz are 64 Gb/s
    pub dma_width: u32,
    /// Between two commands of a program. P 7.1: one store of 32 bytes each, whose rate bounds messages
    /// "smaller than 2 KB" at 100 Gb/s; I: so that 2 KB just fill that link (2,228 bytes). That the rate
    /// bounds below 2 KB is no evidence, therefore
    pub store: Picos,
    /// Of every 32 bytes of parameters of an RPC beside that. P 7.1: none, the store has "all relevant
    /// parameters". Ours, with the place of the answer, have 56 bytes; [`TEN_STORES`] has stores for them
    pub further: Picos,
    /// From memory that changes to a program that knows it. P note 7: a modern CPU's memory has a latency of
    /// 80 ns
    pub poll: Picos,
}

/// Bytes of a TLP's data at most. I: what hosts of that time set
const TLP: u64 = 256;
/// Bytes around it: framing and LCRC 8, header of 64-bit addresses 16 (PCIe 3.0, 2.2.1 and 4.2.2)
const AROUND_TLP: u64 = 24;
/// Ethernet, IPv4 and UDP in front of the BTH, and the ICRC: bytes on the data path.
const AROUND_STACK: u64 = 14 + 20 + 8 + 4;
/// Preamble, gap and FCS, which the MAC adds.
const AROUND_WIRE: u64 = 8 + 12 + 4;

/// The card at 10 Gb/s: Alpha Data ADM-PCIE-7V3.
pub const TEN: Params = Params {
    cycle: 6_400,
    width: 8,
    stage: 5,
    stages: 5,
    mac: [67_200, 121_620],
    byte: 800,
    cable: 15_000,
    read: 1_500_000,
    write: 750_000,
    bus_byte: 126_953,
    dma_cycle: 4_000,
    dma_width: 32,
    store: 178_240,
    further: 0,
    poll: 80_000,
};

/// The same, where further stores bring an RPC's parameters.
pub const TEN_STORES: Params = Params { further: TEN.store, ..TEN };

/// The card at 100 Gb/s: Xilinx VCU118.
pub const HUNDRED: Params = Params {
    cycle: 3_106,
    width: 64,
    /* 10.5 and 19 cycles */
    mac: [32_613, 59_023],
    byte: 80,
    bus_byte: 63_477,
    dma_width: 64,
    ..TEN
};

impl Params {
    /// How long a frame of `bytes` from the BTH to the pad occupies the data path.
    pub(super) fn path(&self, bytes: usize) -> Picos {
        let words = (bytes as u64 + AROUND_STACK).div_ceil(self.width.into());
        words.max(self.stage) * self.cycle
    }

    /// The same of the wire.
    pub(super) fn wire(&self, bytes: usize) -> Picos {
        (bytes as u64 + AROUND_STACK + AROUND_WIRE) * self.byte
    }

    /// How long `bytes` occupy a direction of the bus, or the DMA engine, if that is longer.
    pub(super) fn bus(&self, bytes: u32) -> Picos {
        let bytes = u64::from(bytes);
        let around = bytes.div_ceil(TLP) * AROUND_TLP;
        let bus = (bytes + around) * self.bus_byte / 1000;
        bus.max(bytes.div_ceil(self.dma_width.into()) * self.dma_cycle)
    }

    /// How long a packet takes through the stages of one direction.
    pub(super) fn through(&self) -> Picos {
        self.stages * self.stage * self.cycle
    }

    /// How long a command with so many bytes of its own occupies the program's stores.
    pub(super) fn stores(&self, inline: u32) -> Picos {
        self.store + u64::from(inline.div_ceil(32)) * self.further
    }
}
