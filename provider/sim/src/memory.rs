//! A host's memory: bytes at a base address, handed out front to back; and, where a test wants it, who may
//! touch which of them.

/// Gap between two allocations, filled with [`CANARY`].
const GAP: u64 = 64;
/// What untouched memory holds.
const CANARY: u8 = 0xa5;

/// The card may read.
pub const READ: u8 = 1;
/// The card may write.
pub const WRITE: u8 = 2;

/// What the card may do with the first bytes of a line. Allocations begin with a line, and nothing is allowed
/// but from such a place on: so this is as good as rights of each byte.
#[derive(Clone, Copy, Debug, Default)]
struct LineRights {
    rights: u8,
    bytes: u8,
}

/// Memory that a watched host has before it must be moved.
const ROOM: usize = 1 << 20;

/// Memory that grows; never given back.
#[derive(Debug)]
pub struct Memory {
    base: u64,
    bytes: Vec<u8>,
    /// What the card may do with each line of [`GAP`] bytes, if that is watched
    guard: Option<Vec<LineRights>>,
    /// Reads are not watched
    reads: bool,
    /// Start and end of each gap
    gaps: Vec<(u64, u64)>,
}

impl Memory {
    /// Empty memory that begins at `base`.
    pub fn new(base: u64) -> Self {
        Memory { base, bytes: Vec::new(), guard: None, reads: false, gaps: Vec::new() }
    }

    /// From now on the card may touch only what [`Memory::allow`] opens.
    pub fn watch(&mut self) {
        self.bytes.reserve(ROOM);
        let mut guard = Vec::with_capacity(ROOM / GAP as usize);
        guard.resize(self.lines(), LineRights::default());
        self.guard = Some(guard);
    }

    fn lines(&self) -> usize {
        self.bytes.len().div_ceil(GAP as usize)
    }

    /// The card may read what it likes, at any time.
    pub fn read_at_will(&mut self) {
        self.reads = true;
    }

    /// The card may do with these bytes, which begin where an allocation may, what `rights` allows ([`READ`],
    /// [`WRITE`]; 0: nothing), and no more; and nothing with what lies behind them in their last 64.
    pub fn allow(&mut self, addr: u64, len: u64, rights: u8) {
        if len == 0 {
            return;
        }
        let range = self.at(addr, len as usize);
        assert!(addr.is_multiple_of(GAP), "rights begin with a line");
        let (first, end) = (range.start / GAP as usize, range.end / GAP as usize);
        if let Some(guard) = &mut self.guard {
            guard[first..end].fill(LineRights { rights, bytes: GAP as u8 });
            let bytes = (range.end % GAP as usize) as u8;
            if bytes > 0 {
                guard[end] = LineRights { rights, bytes };
            }
        }
    }

    /// Panics unless the card may do `what` here.
    pub(crate) fn check(&self, addr: u64, len: usize, what: u8) {
        let Some(guard) = self.guard.as_ref().filter(|_| len > 0) else { return };
        let range = self.at(addr, len);
        if what == READ && self.reads {
            return;
        }
        let (first, last) = (range.start / GAP as usize, (range.end - 1) / GAP as usize);
        let whole = |line: &LineRights| line.rights & what != 0 && line.bytes == GAP as u8;
        let allowed = guard[first..last].iter().all(whole)
            && guard[last].rights & what != 0
            && (range.end - 1) % (GAP as usize) < usize::from(guard[last].bytes);
        let verb = if what == READ { "read" } else { "wrote" };
        assert!(allowed, "the card {verb} {len} bytes at {addr:#x}, which were not its own then");
    }

    /// `len` bytes, 64-aligned, with gaps around them that nobody may touch.
    pub fn alloc(&mut self, len: u64) -> u64 {
        let gap = self.base + self.bytes.len() as u64;
        let addr = (gap + GAP).next_multiple_of(GAP);
        self.gaps.push((gap, addr));
        self.bytes.resize((addr - self.base + len) as usize, CANARY);
        let lines = self.lines();
        if let Some(guard) = &mut self.guard {
            guard.resize(lines, LineRights::default());
        }
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
