//! A region that one direction of one connection works on from afar, and what must be in it.
//!
//! The model does each operation when it is posted. What the card did lies somewhere between what has
//! completed and what is posted, in that order: a reliable connection must show one such state, and never
//! anything else.

use std::collections::VecDeque;

use starverbs_core::Access;
use starverbs_sim::{READ, Rng, SimHost, WRITE};

/// What an operation changes.
struct Effect {
    seq: u64,
    off: usize,
    bytes: Vec<u8>,
}

/// The region and its model.
pub(crate) struct Arena {
    pub(crate) addr: u64,
    pub(crate) key: u32,
    /// State after all that is posted
    now: Vec<u8>,
    /// State after all that is known to be done
    base: Vec<u8>,
    /// What lies between them
    log: VecDeque<Effect>,
    /// Unreliable: everything that was ever written, and the first state
    ever: Vec<Effect>,
    keeps: bool,
}

impl Arena {
    /// `len` bytes of `host`, to be reached with `access`. `keeps`: nothing is forgotten, as anything may
    /// come late.
    pub(crate) fn new(host: &mut SimHost, rng: &mut Rng, len: u32, access: Access, keeps: bool) -> Self {
        let (addr, key) = host.region(u64::from(len), access);
        let mut now = vec![0; len as usize];
        rng.fill(&mut now);
        host.env.memory.write(addr, &now);
        let mut ever = Vec::new();
        if keeps {
            ever.push(Effect { seq: 0, off: 0, bytes: now.clone() });
        }
        let arena = Arena { addr, key, base: now.clone(), now, log: VecDeque::new(), ever, keeps };
        arena.open(host);
        arena
    }

    /// The host lost its memory: a region at the same place with the same key. What is still on the wire for
    /// it is written where it would have been before, if it is of a kind that UC takes; else nobody may write
    /// here before the connection begins anew.
    pub(crate) fn renew(&mut self, host: &mut SimHost, access: Access) {
        let again = host.region(self.len() as u64, access);
        assert_eq!(again, (self.addr, self.key), "regions come again in another order");
        host.env.memory.write(self.addr, &self.now);
        if self.keeps {
            self.open(host);
        }
        self.adopt(host);
    }

    /// From now on the card may write here, as its connection begins.
    pub(crate) fn open(&self, host: &mut SimHost) {
        host.env.memory.allow(self.addr, self.len() as u64, READ | WRITE);
    }

    pub(crate) fn len(&self) -> usize {
        self.now.len()
    }

    /// Bytes as they are when all that is posted is done.
    pub(crate) fn bytes(&self, off: usize, len: usize) -> &[u8] {
        &self.now[off..off + len]
    }

    pub(crate) fn word(&self, off: usize) -> u64 {
        let mut w = [0; 8];
        w.copy_from_slice(self.bytes(off, 8));
        u64::from_ne_bytes(w)
    }

    /// Operation `seq` writes.
    pub(crate) fn write(&mut self, seq: u64, off: usize, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.now[off..off + bytes.len()].copy_from_slice(bytes);
        if self.keeps {
            self.ever.push(Effect { seq, off, bytes: bytes.to_vec() });
        } else {
            self.log.push_back(Effect { seq, off, bytes: bytes.to_vec() });
        }
    }

    /// All operations before `seq` are done.
    pub(crate) fn settle(&mut self, seq: u64) {
        while self.log.front().is_some_and(|e| e.seq < seq) {
            if let Some(e) = self.log.pop_front() {
                self.base[e.off..e.off + e.bytes.len()].copy_from_slice(&e.bytes);
            }
        }
    }

    /// Whether `got` may be what a READ at `off` brought that should have brought `want`: what later
    /// operations, before `until`, wrote may be in it.
    pub(crate) fn may_have_read(&self, want: &[u8], got: &[u8], off: usize, seq: u64, until: u64) -> bool {
        if want == got {
            return true;
        }
        let later = |at: usize, byte: u8| {
            self.log.iter().any(|e| {
                e.seq > seq
                    && e.seq < until
                    && (e.off..e.off + e.bytes.len()).contains(&at)
                    && e.bytes[at - e.off] == byte
            })
        };
        want.iter().zip(got).enumerate().all(|(i, (w, g))| w == g || later(off + i, *g))
    }

    /// Panics unless memory shows the state after all before `lo` and perhaps more, up to before `hi`, in
    /// order, the next one perhaps in part. `loose`: those that are not known to be done may be there in
    /// any order.
    pub(crate) fn check(&self, host: &SimHost, (lo, hi): (u64, u64), loose: bool, what: &str) {
        let there = host.env.memory.read(self.addr, self.len());
        if loose && self.shows_some(there, lo, hi) {
            return;
        }
        let mut state = self.base.clone();
        let mut log = self.log.iter().peekable();
        let apply = |state: &mut Vec<u8>, e: &Effect| {
            state[e.off..e.off + e.bytes.len()].copy_from_slice(&e.bytes);
        };
        while let Some(e) = log.next_if(|e| e.seq < lo) {
            apply(&mut state, e);
        }
        loop {
            if state == there {
                return;
            }
            let Some(e) = log.next_if(|e| e.seq < hi) else { break };
            let end = e.off + e.bytes.len();
            let mut part = e.off;
            while part < end && there[part] == e.bytes[part - e.off] {
                part += 1;
            }
            if there[part..] == state[part..] && there[..e.off] == state[..e.off] {
                return;
            }
            apply(&mut state, e);
        }
        let first = state.iter().zip(there).position(|(a, b)| a != b);
        panic!("{what}: memory shows no state between operation {lo} and {hi}; first odd byte {first:?}");
    }

    /// Whether memory shows the state after all before `lo`, but for bytes that those up to before `hi`
    /// write, in any order.
    fn shows_some(&self, there: &[u8], lo: u64, hi: u64) -> bool {
        let mut known: Vec<bool> = vec![false; there.len()];
        let mut state = self.base.clone();
        for e in &self.log {
            let range = e.off..e.off + e.bytes.len();
            if e.seq < lo {
                state[range].copy_from_slice(&e.bytes);
            } else if e.seq < hi {
                let same = there[range.clone()].iter().zip(&e.bytes).map(|(a, b)| a == b);
                known[range].iter_mut().zip(same).for_each(|(known, same)| *known |= same);
            }
        }
        state.iter().zip(there).zip(known).all(|((a, b), known)| a == b || known)
    }

    /// Panics unless each byte is one that somebody wrote there.
    pub(crate) fn check_unreliable(&self, host: &SimHost) {
        let there = host.env.memory.read(self.addr, self.len());
        if let Some(at) = self.odd(0, there, &mut vec![false; there.len()]) {
            panic!("byte {at} of a region is {:#x}, which nobody wrote", there[at]);
        }
    }

    /// The first byte of `there`, which is at `off`, that nobody wrote, beside those that are `known`.
    fn odd(&self, off: usize, there: &[u8], known: &mut [bool]) -> Option<usize> {
        for e in self.ever.iter().rev() {
            let (from, to) = (off.max(e.off), (off + there.len()).min(e.off + e.bytes.len()));
            if from < to {
                let here = there[from - off..to - off].iter().zip(&e.bytes[from - e.off..]);
                known[from - off..to - off].iter_mut().zip(here).for_each(|(k, (t, b))| *k |= t == b);
            }
        }
        known.iter().position(|known| !known)
    }

    /// Unreliable: `want` is at `off`, but for what others wrote.
    pub(crate) fn shows(&self, host: &SimHost, off: usize, want: &[u8]) -> bool {
        let there = host.env.memory.read(self.addr + off as u64, want.len());
        if there == want {
            return true;
        }
        let mut known: Vec<bool> = there.iter().zip(want).map(|(t, w)| t == w).collect();
        self.odd(off, there, &mut known).is_none()
    }

    /// What is there is what counts from now on.
    pub(crate) fn adopt(&mut self, host: &SimHost) {
        self.log.clear();
        self.base.copy_from_slice(host.env.memory.read(self.addr, self.now.len()));
        self.now.copy_from_slice(&self.base);
    }
}
