//! A kernel that anybody may ask, for the oracles of tests/untrusted and the seeded test beside.
//!
//! Whatever comes, a request ends within a bounded number of steps, a step that does not end it asks for
//! something, and a kernel uses no key but those that requests gave it. What a key opens is for the card to
//! check: here [`KEY`] opens all of the memory, and others nothing.

use starverbs_core::strom::Kernel;

use crate::Builtin;
use crate::host::TestHost;

/// First byte of the memory.
pub const BASE: u64 = 0x4000;
/// Its bytes.
pub const LEN: usize = 1 << 14;
/// Its key.
pub const KEY: u32 = TestHost::KEY;
/// Bytes of a change: one that says where, in units of as many as follow at most.
const CHANGE: usize = 1 + 64;

/// A kernel and its host. Each method panics where the kernel does what it must not.
pub struct AskedKernel {
    kernel: Box<dyn Kernel>,
    /// It looks at memory, and never writes
    looks: bool,
    host: TestHost,
    /// Parameters of all requests, one behind the other
    params: Vec<u8>,
}

impl AskedKernel {
    /// One that has seen nothing; the memory is zeros.
    pub fn new(kernel: Builtin) -> Self {
        let mut host = TestHost::new(BASE, LEN);
        host.strict = true;
        let looks = matches!(kernel, Builtin::Get | Builtin::Traverse | Builtin::Consistent);
        AskedKernel { kernel: kernel.make(), looks, host, params: Vec::new() }
    }

    /// Puts bytes into memory, from its byte `at` on, as far as they fit.
    pub fn put(&mut self, at: usize, bytes: &[u8]) {
        let at = at.min(LEN);
        let fit = bytes.len().min(LEN - at);
        self.host.put(BASE + at as u64, &bytes[..fit]);
    }

    /// From now on memory changes before each read: by the next piece of `changes`, whose first byte says
    /// where. Behind the last one the first comes again.
    pub fn change_before_reads(&mut self, changes: Vec<u8>) {
        let (mut next, count) = (0, changes.len().div_ceil(CHANGE).max(1));
        self.host.before_read = Some(Box::new(move |memory: &mut [u8]| {
            let change = changes.chunks(CHANGE).nth(next).and_then(<[u8]>::split_first);
            next = (next + 1) % count;
            if let Some((place, bytes)) = change {
                let from = usize::from(*place) * (CHANGE - 1);
                memory[from..from + bytes.len()].copy_from_slice(bytes);
            }
        }));
    }

    /// An RPC: the card's own program's, or a peer's.
    pub fn call(&mut self, params: &[u8], own: bool) {
        self.params.extend_from_slice(params);
        let before = self.begin(own);
        self.host.call(&mut *self.kernel, params);
        self.check(own, &before);
    }

    /// A packet of a peer's RPC WRITE.
    pub fn feed(&mut self, data: &[u8], first: bool, last: bool) {
        let before = self.begin(false);
        self.host.feed(&mut *self.kernel, data, first, last);
        self.check(false, &before);
    }

    /// A request begins; gives the memory as it is.
    fn begin(&mut self, own: bool) -> Vec<u8> {
        self.host.own = own;
        self.host.keys.clear();
        self.host.sent.clear();
        self.host.get(BASE, LEN).to_vec()
    }

    /// A request has ended.
    fn check(&self, own: bool, before: &[u8]) {
        let given = |key: &u32| self.params.windows(4).any(|word| *word == key.to_le_bytes());
        assert!(self.host.keys.iter().all(given), "a key that no request gave: {:#x?}", self.host.keys);
        assert!(own || self.host.sent.is_empty(), "a peer has the card send");
        let same = self.host.before_read.is_some() || *self.host.get(BASE, LEN) == *before;
        assert!(same || !self.looks, "a kernel that only looks has written");
    }
}
