//! PCI configuration space of a function, as PCI Local Bus 3.0 and PCI Express Base lay it out.
//!
//! Owns which of its bits can be written, and what they mean for the function: whether it may reach memory,
//! and when it is to be reset. It must not know what the function is.

use starverbs_queues::board::{
    BAR_CONTROL, BAR_DOORBELLS, BAR_MSIX, CONTROL_BYTES, PCI_CLASS, PCI_DEVICE, PCI_VENDOR, VERSION,
};

/// Bytes of configuration space, those of PCI Express with it, where nothing is.
pub(crate) const CONFIG_BYTES: u64 = 4096;
/// Bytes of the BAR of the MSI-X table and the array of pending bits.
pub(crate) const MSIX_BYTES: u32 = 4096;
/// Where the pending bits stand in it.
const MSIX_PENDING: u32 = 0x800;
/// Bytes where registers are.
const BYTES: usize = 256;

/* registers of a header of type 0 */
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const REVISION: usize = 0x08;
const CACHE_LINE: usize = 0x0c;
const BARS: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
/* capabilities, and registers of them */
const PM: usize = 0x40;
const PM_CONTROL: usize = PM + 4;
const EXPRESS: usize = 0x50;
const DEVICE_CONTROL: usize = EXPRESS + 8;
const MSIX: usize = 0x90;
const MSIX_CONTROL: usize = MSIX + 2;

/// Command: answers its BARs, masters the bus, reports errors, raises no INTx.
const COMMAND_WRITABLE: u16 = 1 << 1 | COMMAND_MASTER | 1 << 6 | 1 << 8 | 1 << 10;
const COMMAND_MASTER: u16 = 1 << 2;
/// Status: there are capabilities.
const STATUS_CAPABILITIES: u16 = 1 << 4;
/// PM control: registers stay in D3hot.
const NO_SOFT_RESET: u16 = 1 << 3;
const POWER_STATE: u16 = 3;
/// Device capabilities: reports errors by role, has FLR.
const DEVICE_CAPS: u32 = 1 << 15 | 1 << 28;
/// Device control: FLR, which reads as 0.
const FLR: u16 = 1 << 15;
/// Link capabilities and status: 2.5 GT/s, one lane.
const LINK: u16 = 0x11;
/// MSI-X control: enabled, all masked.
const MSIX_WRITABLE: u16 = 3 << 14;

/// What a write asks of the function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Effect {
    None,
    /// A reset of the function, which configuration space has been through
    Flr,
}

/// Configuration space.
pub(crate) struct ConfigSpace {
    bytes: [u8; BYTES],
    /// Bits that can be written
    writable: [u8; BYTES],
}

impl ConfigSpace {
    /// As it is after a reset. `doorbell_bytes`: of that BAR, a power of two.
    pub(crate) fn new(vectors: u32, doorbell_bytes: u64) -> ConfigSpace {
        let mut config = ConfigSpace { bytes: [0; BYTES], writable: [0; BYTES] };
        config.header(doorbell_bytes);
        config.capabilities(vectors);
        config
    }

    fn header(&mut self, doorbell_bytes: u64) {
        let id = PCI_VENDOR | PCI_DEVICE << 16;
        self.put(0, &id.to_le_bytes());
        self.put(SUBSYSTEM, &id.to_le_bytes());
        self.put(REVISION, &(PCI_CLASS << 8 | VERSION >> 16).to_le_bytes());
        self.put(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        self.put(CAPABILITIES, &[PM as u8]);
        let bar = |index: u32| BARS + 4 * index as usize;
        /* 64 bits, prefetchable */
        self.put(bar(BAR_DOORBELLS), &0xcu32.to_le_bytes());
        self.allow(bar(BAR_CONTROL), &(!(CONTROL_BYTES - 1)).to_le_bytes());
        self.allow(bar(BAR_DOORBELLS), &(!(doorbell_bytes - 1)).to_le_bytes());
        self.allow(bar(BAR_MSIX), &(!(MSIX_BYTES - 1)).to_le_bytes());
        self.allow(COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        self.allow(CACHE_LINE, &[0xff]);
        self.allow(INTERRUPT_LINE, &[0xff]);
    }

    fn capabilities(&mut self, vectors: u32) {
        /* power management, version 3 */
        self.put(PM, &[0x01, EXPRESS as u8, 3, 0]);
        self.put(PM_CONTROL, &NO_SOFT_RESET.to_le_bytes());
        self.allow(PM_CONTROL, &POWER_STATE.to_le_bytes());
        /* PCI Express, version 2, an endpoint */
        self.put(EXPRESS, &[0x10, MSIX as u8, 2, 0]);
        self.put(EXPRESS + 4, &DEVICE_CAPS.to_le_bytes());
        self.put(EXPRESS + 0x0c, &LINK.to_le_bytes());
        self.put(EXPRESS + 0x12, &LINK.to_le_bytes());
        self.allow(DEVICE_CONTROL, &(!FLR).to_le_bytes());
        self.put(MSIX, &[0x11, 0]);
        self.put(MSIX_CONTROL, &((vectors - 1) as u16).to_le_bytes());
        self.put(MSIX + 4, &BAR_MSIX.to_le_bytes());
        self.put(MSIX + 8, &(MSIX_PENDING | BAR_MSIX).to_le_bytes());
        self.allow(MSIX_CONTROL, &MSIX_WRITABLE.to_le_bytes());
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn allow(&mut self, at: usize, bits: &[u8]) {
        self.writable[at..at + bits.len()].copy_from_slice(bits);
    }

    fn half(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// Reads; what is no register reads as 0.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) {
        for (n, byte) in to.iter_mut().enumerate() {
            let at = usize::try_from(offset.saturating_add(n as u64));
            *byte = at.ok().and_then(|at| self.bytes.get(at)).copied().unwrap_or(0);
        }
    }

    /// Writes what can be written of it.
    pub(crate) fn write(&mut self, offset: u64, from: &[u8]) -> Effect {
        let mut effect = Effect::None;
        for (n, byte) in from.iter().enumerate() {
            let Ok(at) = usize::try_from(offset.saturating_add(n as u64)) else { break };
            let Some(mask) = self.writable.get(at) else { break };
            self.bytes[at] = self.bytes[at] & !mask | byte & mask;
            if at == DEVICE_CONTROL + 1 && u16::from(*byte) << 8 & FLR != 0 {
                effect = Effect::Flr;
            }
        }
        if effect == Effect::Flr {
            self.reset();
        }
        effect
    }

    /// All that was written is gone.
    pub(crate) fn reset(&mut self) {
        self.bytes.iter_mut().zip(self.writable).for_each(|(byte, mask)| *byte &= !mask);
    }

    /// Whether the function may reach memory, and interrupt.
    pub(crate) fn masters(&self) -> bool {
        self.half(COMMAND) & COMMAND_MASTER != 0 && self.half(PM_CONTROL) & POWER_STATE == 0
    }
}

/// The BAR of the MSI-X table. What stands in the table is the monitor's, which raises interrupts: the board
/// signals what it was given for a vector. No bit is ever pending.
pub(crate) struct MsixTable(Vec<u8>);

/// Bytes of an entry: address, data, control.
const ENTRY: usize = 16;

impl MsixTable {
    /// As it is after a reset: all vectors are masked.
    pub(crate) fn new(vectors: u32) -> MsixTable {
        let mut table = MsixTable(vec![0; ENTRY * vectors as usize]);
        table.reset();
        table
    }

    pub(crate) fn reset(&mut self) {
        let entry = 1u128 << 96;
        self.0.chunks_mut(ENTRY).for_each(|bytes| bytes.copy_from_slice(&entry.to_le_bytes()));
    }

    /// Reads; what is no entry reads as 0.
    pub(crate) fn read(&self, offset: u64, to: &mut [u8]) {
        for (n, byte) in to.iter_mut().enumerate() {
            let at = usize::try_from(offset.saturating_add(n as u64));
            *byte = at.ok().and_then(|at| self.0.get(at)).copied().unwrap_or(0);
        }
    }

    /// Writes entries.
    pub(crate) fn write(&mut self, offset: u64, from: &[u8]) {
        for (n, byte) in from.iter().enumerate() {
            let at = usize::try_from(offset.saturating_add(n as u64)).ok();
            let Some(place) = at.and_then(|at| self.0.get_mut(at)) else { break };
            *place = *byte;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u64 = 1 << 24;

    fn word(config: &ConfigSpace, at: usize) -> u32 {
        let mut bytes = [0; 4];
        config.read(at as u64, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn a_guest_finds_bars_and_capabilities() {
        let mut config = ConfigSpace::new(32, PAGES);
        assert_eq!(word(&config, 0), 0x5354_1234);
        assert_eq!(word(&config, REVISION), 0x0280_0001);
        let sizes: Vec<u32> = (0..6)
            .map(|bar| {
                config.write(BARS as u64 + 4 * bar, &[0xff; 4]);
                word(&config, BARS + 4 * bar as usize)
            })
            .collect();
        assert_eq!(sizes, [0xffff_f000, 0, 0xff00_000c, 0xffff_ffff, 0xffff_f000, 0]);
        let (mut at, mut found) = (word(&config, CAPABILITIES) as usize, Vec::new());
        while at != 0 {
            let head = word(&config, at);
            found.push(head as u8);
            at = (head >> 8 & 0xff) as usize;
        }
        assert_eq!(found, [0x01, 0x10, 0x11]);
        assert_eq!(word(&config, MSIX) >> 16, 31, "vectors but one");
        assert_eq!([word(&config, MSIX + 4), word(&config, MSIX + 8)], [4, 0x804]);
    }

    #[test]
    fn a_function_masters_the_bus_in_d0_alone() {
        let mut config = ConfigSpace::new(32, PAGES);
        assert!(!config.masters());
        config.write(COMMAND as u64, &COMMAND_MASTER.to_le_bytes());
        assert!(config.masters());
        config.write(PM_CONTROL as u64, &[3]);
        assert!(!config.masters());
        config.write(PM_CONTROL as u64, &[0]);
        assert!(config.masters());
        assert_eq!(config.write(DEVICE_CONTROL as u64, &FLR.to_le_bytes()), Effect::Flr);
        assert_eq!((config.masters(), config.half(DEVICE_CONTROL) & FLR), (false, 0), "after a reset");
    }

    #[test]
    fn what_is_only_read_stays_whatever_is_written() {
        use starverbs_core::rng::Rng;
        let fresh = ConfigSpace::new(32, PAGES);
        let (mut config, mut table) = (ConfigSpace::new(32, PAGES), MsixTable::new(32));
        let mut rng = Rng::new([5, 6]);
        for _ in 0..10_000 {
            let len = rng.word() as usize % 64;
            let at = [rng.word(), u64::MAX - rng.word() % 64, rng.word() % CONFIG_BYTES, rng.word() % 256]
                [rng.word() as usize % 4];
            let noise: Vec<u8> = (0..len).map(|_| rng.word() as u8).collect();
            config.write(at, &noise);
            table.write(at, &noise);
            let (mut one, mut two) = (vec![1; len], vec![1; len]);
            config.read(at, &mut one);
            table.read(at, &mut two);
            for at in 0..BYTES {
                let fixed = !fresh.writable[at];
                assert_eq!(config.bytes[at] & fixed, fresh.bytes[at] & fixed, "{at:#x}");
            }
        }
        config.reset();
        assert_eq!(config.bytes, fresh.bytes);
        table.reset();
        assert_eq!(table.0, MsixTable::new(32).0);
    }
}
