//! SL's queues as SF keeps them: the WQEs that came in WQEPs, by sequence (holes 2, 3, 12).
//!
//! A slot belongs to a sequence until that WQE is done; SL has no more WQEs under way than the queue is deep,
//! so that what does not fit is no WQE of a sound SL. Room for SGEs and inline bytes grows to what SL
//! was seen to use, and stays.

use alloc::boxed::Box;
use alloc::vec::Vec;

use starverbs_core::room::{exact, filled};
use starverbs_core::{NicError, Psn, SendWqe, Sge};

use crate::message::{Body, MAX_SGE, Wqe, inline_room};

/// What became of a WQEP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stored {
    /// It is new
    New,
    /// It had come before
    Known,
    /// It is none that SL may send now, or there is no memory: no EA
    Refused,
}

/// One of SL's queues.
pub(super) struct RemoteQueue {
    wqes: Box<[SendWqe]>,
    there: Box<[bool]>,
    sges: Parts<Sge>,
    inline: Parts<u8>,
    /// Oldest WQE that is not done
    una: Psn,
    /// All before it have come
    stored: Psn,
}

/// The variable part of each slot.
struct Parts<T> {
    all: Box<[T]>,
    each: usize,
}

impl<T: Clone + Default + Copy> Parts<T> {
    fn new(slots: usize, each: usize) -> Result<Self, NicError> {
        Ok(Parts { all: filled(slots * each)?, each })
    }

    /// Room for `each` in every slot.
    fn widen(&mut self, slots: usize, each: usize) -> Result<(), NicError> {
        if each <= self.each {
            return Ok(());
        }
        let each = each.next_power_of_two();
        let mut wide: Vec<T> = Vec::new();
        exact(&mut wide, slots * each)?;
        for slot in 0..slots {
            wide.extend_from_slice(self.of(slot, self.each));
            wide.resize((slot + 1) * each, T::default());
        }
        *self = Parts { all: wide.into_boxed_slice(), each };
        Ok(())
    }

    fn of(&self, slot: usize, n: usize) -> &[T] {
        self.all.get(slot * self.each..slot * self.each + n).unwrap_or(&[])
    }

    fn put(&mut self, slot: usize, values: impl Iterator<Item = T>) {
        for (place, value) in self.all.iter_mut().skip(slot * self.each).take(self.each).zip(values) {
            *place = value;
        }
    }
}

impl RemoteQueue {
    /// Of `depth` WQEs, a power of two. `Exhausted`: no memory.
    pub(super) fn new(depth: u32) -> Result<Self, NicError> {
        let depth = depth as usize;
        Ok(RemoteQueue {
            wqes: filled(depth)?,
            there: filled(depth)?,
            sges: Parts::new(depth, 1)?,
            inline: Parts::new(depth, 0)?,
            una: Psn::default(),
            stored: Psn::default(),
        })
    }

    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.wqes)
            + size_of_val(&*self.there)
            + size_of_val(&*self.sges.all)
            + size_of_val(&*self.inline.all)
    }

    fn slot(&self, seq: Psn) -> usize {
        seq.get() as usize & (self.wqes.len() - 1)
    }

    /// Slots.
    pub(super) fn depth(&self) -> u32 {
        self.wqes.len() as u32
    }

    /// A WQEP came.
    pub(super) fn store(&mut self, seq: Psn, wqe: &Wqe<'_>) -> Stored {
        let ahead = seq.since(self.una);
        if ahead < 0 {
            return Stored::Known;
        }
        if ahead as u32 >= self.depth() {
            return Stored::Refused;
        }
        let slot = self.slot(seq);
        if self.there[slot] {
            return Stored::Known;
        }
        let stored = match wqe.body {
            Body::Sges(sges) if sges.len() <= MAX_SGE => {
                self.sges.widen(self.wqes.len(), sges.len()).map(|()| self.sges.put(slot, sges.iter()))
            }
            Body::Inline(bytes) if bytes.len() <= inline_room(u32::MAX, self.depth()) => {
                let room = self.inline.widen(self.wqes.len(), bytes.len());
                room.map(|()| self.inline.put(slot, bytes.iter().copied()))
            }
            _ => Err(NicError::Invalid),
        };
        if stored.is_err() {
            return Stored::Refused;
        }
        self.wqes[slot] = wqe.wqe;
        self.there[slot] = true;
        while self.get(self.stored).is_some() {
            self.stored = self.stored.plus(1);
        }
        Stored::New
    }

    /// All WQEs before this one have come.
    pub(super) fn stored(&self) -> Psn {
        self.stored
    }

    /// WQE `seq`, if it is here.
    pub(super) fn get(&self, seq: Psn) -> Option<&SendWqe> {
        let ahead = seq.since(self.una);
        let slot = self.slot(seq);
        (ahead >= 0 && (ahead as u32) < self.depth() && self.there[slot]).then(|| &self.wqes[slot])
    }

    /// Its SGEs.
    pub(super) fn sges(&self, seq: Psn) -> &[Sge] {
        self.get(seq).map_or(&[], |wqe| self.sges.of(self.slot(seq), usize::from(wqe.num_sge)))
    }

    /// Its inline bytes.
    pub(super) fn inline(&self, seq: Psn) -> &[u8] {
        self.get(seq).map_or(&[], |wqe| self.inline.of(self.slot(seq), wqe.length as usize))
    }

    /// All before `seq` are done.
    pub(super) fn release(&mut self, seq: Psn) {
        while self.una.before(seq) {
            let slot = self.slot(self.una);
            self.there[slot] = false;
            self.una = self.una.plus(1);
        }
        if self.stored.before(self.una) {
            self.stored = self.una;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{MAX_INLINE, MAX_WQE, encode_recv, encode_send};
    use starverbs_core::{QPN_MASK, SendFlags};

    fn recv(room: &mut [u8; MAX_WQE], n: u64, sges: usize) -> Wqe<'_> {
        let list: Vec<Sge> = (0..sges).map(|i| Sge { addr: n, len: 1, lkey: i as u32 }).collect();
        let len = encode_recv(&list, room).unwrap();
        Wqe::decode(&room[..len]).unwrap()
    }

    #[test]
    fn each_wqe_is_taken_once_in_any_order_and_none_beyond_the_depth() {
        let mut queue = RemoteQueue::new(4).unwrap();
        queue.una = Psn::new(QPN_MASK - 1);
        let first = queue.una;
        let mut room = [0; MAX_WQE];
        for (n, stored) in [
            (3, Stored::New),
            (1, Stored::New),
            (1, Stored::Known),
            (4, Stored::Refused),
            (1 << 22, Stored::Refused),
            (0, Stored::New),
        ] {
            let wqe = recv(&mut room, n.into(), 1 + n as usize % 4);
            assert_eq!(queue.store(first.plus(n), &wqe), stored, "{n}");
        }
        assert!(queue.get(first.plus(2)).is_none());
        assert_eq!(
            queue.sges(first.plus(3)).iter().map(|s| (s.addr, s.lkey)).collect::<Vec<_>>(),
            [(3, 0), (3, 1), (3, 2), (3, 3)]
        );
        assert_eq!(queue.sges(first.plus(1)).len(), 2, "as it was before room was made for more");
        queue.release(first.plus(2));
        assert_eq!(queue.store(first, &recv(&mut room, 0, 1)), Stored::Known);
        assert_eq!(queue.store(first.plus(5), &recv(&mut room, 5, 0)), Stored::New);
        assert!(queue.sges(first.plus(5)).is_empty());
    }

    #[test]
    fn inline_bytes_stay_with_their_wqe() {
        let mut queue = RemoteQueue::new(2).unwrap();
        let wqe = SendWqe { flags: SendFlags::INLINE, ..SendWqe::default() };
        for (seq, bytes) in [(0, &b"a"[..]), (1, b"some more")] {
            let mut room = [0; MAX_WQE];
            let len = encode_send(&wqe, &[], bytes, &mut room).unwrap();
            assert_eq!(queue.store(Psn::new(seq), &Wqe::decode(&room[..len]).unwrap()), Stored::New);
        }
        assert_eq!((queue.inline(Psn::new(0)), queue.inline(Psn::new(1))), (&b"a"[..], &b"some more"[..]));
        assert!(queue.bytes() > 2 * size_of::<SendWqe>());
        /* as many as an honest SL sends from a queue of this depth */
        for (depth, most) in [(64, 4048), (1024, 512)] {
            let mut queue = RemoteQueue::new(depth).unwrap();
            for (len, stored) in [(most + 1, Stored::Refused), (most, Stored::New)] {
                let wqe = Wqe { recv: false, wqe, body: Body::Inline(&[7; MAX_INLINE + 1][..len]) };
                assert_eq!(queue.store(Psn::new(3), &wqe), stored, "{depth} {len}");
            }
        }
    }
}
