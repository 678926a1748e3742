//! A host's memory: bytes at a base address, handed out front to back.

/// Gap between two allocations, filled with [`CANARY`].
const GAP: u64 = 64;
/// What untouched memory holds.
const CANARY: u8 = 0xa5;

/// Memory that grows; never given back.
#[derive(Debug)]
pub struct Memory {
    base: u64,
    bytes: Vec<u8>,
    /// Start and end of each gap
    gaps: Vec<(u64, u64)>,
}

impl Memory {
    /// Empty memory that begins at `base`.
    pub fn new(base: u64) -> Self {
        Memory { base, bytes: Vec::new(), gaps: Vec::new() }
    }

    /// `len` bytes, 64-aligned, with gaps around them that nobody may touch.
    pub fn alloc(&mut self, len: u64) -> u64 {
        let gap = self.base + self.bytes.len() as u64;
        let addr = (gap + GAP).next_multiple_of(GAP);
        self.gaps.push((gap, addr));
        self.bytes.resize((addr - self.base + len) as usize, CANARY);
        addr
    }

    /// Whether all gaps are as they were.
    pub fn gaps_intact(&self) -> bool {
        self.gaps.iter().all(|&(a, b)| self.read(a, (b - a) as usize).iter().all(|x| *x == CANARY))
    }

    fn at(&self, addr: u64, len: usize) -> core::ops::Range<usize> {
        let start = addr.checked_sub(self.base).map(|o| o as usize);
        match start {
            Some(s) if s.checked_add(len).is_some_and(|e| e <= self.bytes.len()) => s..s + len,
            _ => panic!("the card touched {len} bytes at {addr:#x}, outside the host's memory"),
        }
    }

    /// The bytes at `addr`.
    pub fn read(&self, addr: u64, len: usize) -> &[u8] {
        &self.bytes[self.at(addr, len)]
    }

    /// Sets the bytes at `addr`.
    pub fn write(&mut self, addr: u64, data: &[u8]) {
        let range = self.at(addr, data.len());
        self.bytes[range].copy_from_slice(data);
    }

    /// The word at `addr`.
    pub fn word(&self, addr: u64) -> u64 {
        let mut w = [0; 8];
        w.copy_from_slice(self.read(addr, 8));
        u64::from_ne_bytes(w)
    }

    /// Sets the word at `addr`.
    pub fn set_word(&mut self, addr: u64, value: u64) {
        self.write(addr, &value.to_ne_bytes());
    }
}
