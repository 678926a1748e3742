//! SL's queues as SF keeps them: the WQEs that came in WQEPs, by sequence (holes 2, 3, 12).
//!
//! A slot belongs to a sequence until that WQE is done; SL has no more WQEs under way than the queue is deep,
//! so that what does not fit is no WQE of a sound SL. Room for SGEs and inline bytes grows to what SL
//! was seen to use, and stays. How deep it is its owner says, who has it with the queue's completions.

use starverbs_core::env::Host;
use starverbs_core::{NicError, Psn, SendFlags, SendOp, SendWqe, Sge};

use super::Stateful;
use super::places::Places;
use super::rare::{Rare, RareBox, WqeLists};
use crate::env::StarEnv;
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

/// What is kept of a WQE of SL beside its SGEs and inline bytes: of a receive next to nothing, so that it
/// shares its cache line with others.
pub(super) trait KeptWqe: Copy + Default {
    /// Of a WQE that came
    fn of(wqe: &SendWqe) -> Self;
    /// How many SGEs it has
    fn sges(&self) -> usize;
    /// Those, and its inline bytes, if they are more than one SGE
    fn lists(rare: &Rare) -> &WqeLists;
    /// As `lists`, to be changed
    fn lists_mut(rare: &mut Rare) -> &mut WqeLists;
}

impl KeptWqe for SendWqe {
    fn of(wqe: &SendWqe) -> Self {
        *wqe
    }
    fn sges(&self) -> usize {
        usize::from(self.num_sge)
    }
    fn lists(rare: &Rare) -> &WqeLists {
        &rare.sends
    }
    fn lists_mut(rare: &mut Rare) -> &mut WqeLists {
        &mut rare.sends
    }
}

/// A receive WQE of SL.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeptRecv {
    num_sge: u8,
}

impl KeptWqe for KeptRecv {
    fn of(wqe: &SendWqe) -> Self {
        const { assert!(MAX_SGE <= u8::MAX as usize) };
        KeptRecv { num_sge: wqe.num_sge as u8 }
    }
    fn sges(&self) -> usize {
        usize::from(self.num_sge)
    }
    fn lists(rare: &Rare) -> &WqeLists {
        &rare.recvs
    }
    fn lists_mut(rare: &mut Rare) -> &mut WqeLists {
        &mut rare.recvs
    }
}

/// A place of a WQE.
#[derive(Clone, Copy, Default)]
struct Slot<T> {
    /// The WQE, if it has come
    wqe: Option<T>,
    /// Its SGE, if it has one alone
    sge: Sge,
}

/// One of SL's queues.
pub(super) struct RemoteQueue<T> {
    slots: Places<Slot<T>>,
    /// Oldest WQE that is not done
    una: Psn,
    /// All before it have come
    stored: Psn,
}

impl<T: KeptWqe> RemoteQueue<T> {
    /// Without WQEs.
    pub(super) fn new() -> Self {
        RemoteQueue { slots: Places::new(), una: Psn::default(), stored: Psn::default() }
    }

    /// Bytes of memory that it takes, without lists.
    pub(super) fn bytes(&self) -> usize {
        self.slots.bytes()
    }

    /// The place of the next WQE will be used soon.
    #[inline]
    pub(super) fn expect(&self, env: &impl Host) {
        self.expect_at(env, self.stored);
    }

    /// The place of WQE `seq` will be used soon.
    #[inline]
    pub(super) fn expect_at(&self, env: &impl Host, seq: Psn) {
        self.slots.expect(env, seq.get());
    }

    /// Oldest WQE that is not done.
    pub(super) fn oldest(&self) -> Psn {
        self.una
    }

    /// Bytes of memory that this WQE takes more in a queue of `depth`, a power of two. `None`: there is no
    /// place for it.
    #[inline]
    pub(super) fn growth(&self, rare: &RareBox, depth: u32, seq: Psn, wqe: &Wqe<'_>) -> Option<usize> {
        let ahead = seq.since(self.una);
        if ahead < 0 {
            return Some(0);
        }
        let count = ahead as u32 + 1;
        if count > depth {
            return None;
        }
        let places = self.slots.places_for(count, depth);
        let lists = match wqe.body {
            Body::Sges(sges) if sges.len() <= 1 => 0,
            Body::Sges(sges) if sges.len() <= MAX_SGE => {
                rare.growth(|rare| T::lists(rare).sges.growth(places, sges.len()))
            }
            Body::Inline([]) => 0,
            Body::Inline(bytes) if bytes.len() <= inline_room(u32::MAX, depth) => {
                rare.growth(|rare| T::lists(rare).inline.growth(places, bytes.len()))
            }
            _ => return None,
        };
        Some(self.slots.growth(count, depth) + lists)
    }

    /// A WQEP came for a queue of `depth`.
    #[inline]
    pub(super) fn store(&mut self, rare: &mut RareBox, depth: u32, seq: Psn, wqe: &Wqe<'_>) -> Stored {
        let ahead = seq.since(self.una);
        if ahead < 0 {
            return Stored::Known;
        }
        if ahead as u32 >= depth {
            return Stored::Refused;
        }
        if self.get(seq).is_some() {
            return Stored::Known;
        }
        if self.put(rare, depth, seq, wqe).is_err() {
            return Stored::Refused;
        }
        while self.get(self.stored).is_some() {
            self.stored = self.stored.plus(1);
        }
        Stored::New
    }

    /// Keeps WQE `seq`. `Invalid`: it is none that SL may send; `Exhausted`: no memory.
    #[inline]
    fn put(&mut self, rare: &mut RareBox, depth: u32, seq: Psn, wqe: &Wqe<'_>) -> Result<(), NicError> {
        let (first, number) = (self.una.get(), seq.get());
        self.slots.make_room(first, seq.since(self.una) as u32 + 1, depth)?;
        let sge = match wqe.body {
            Body::Sges(sges) if sges.len() <= 1 => sges.iter().next().unwrap_or_default(),
            Body::Inline([]) => Sge::default(),
            _ => {
                self.put_list(rare, depth, number, &wqe.body)?;
                Sge::default()
            }
        };
        self.slots[number] = Slot { wqe: Some(T::of(&wqe.wqe)), sge };
        Ok(())
    }

    /// The part of [`put`](RemoteQueue::put) that few connections need.
    #[inline(never)]
    fn put_list(&self, rare: &mut RareBox, depth: u32, number: u32, body: &Body<'_>) -> Result<(), NicError> {
        let (first, places) = (self.una.get(), self.slots.len());
        match *body {
            Body::Sges(sges) if sges.len() <= MAX_SGE => {
                let WqeLists { sges: lists, .. } = T::lists_mut(rare.make()?);
                lists.make_room(first, places, sges.len())?;
                lists.of_mut(number).iter_mut().zip(sges.iter()).for_each(|(entry, sge)| *entry = sge);
            }
            Body::Inline(bytes) if bytes.len() <= inline_room(u32::MAX, depth) => {
                let WqeLists { inline: lists, .. } = T::lists_mut(rare.make()?);
                lists.make_room(first, places, bytes.len())?;
                let place = lists.of_mut(number).get_mut(..bytes.len()).ok_or(NicError::Exhausted)?;
                place.copy_from_slice(bytes);
            }
            _ => return Err(NicError::Invalid),
        }
        Ok(())
    }

    /// All WQEs before this one have come.
    pub(super) fn stored(&self) -> Psn {
        self.stored
    }

    /// WQE `seq`, if it is here.
    #[inline]
    pub(super) fn get(&self, seq: Psn) -> Option<&T> {
        self.slot(seq)?.wqe.as_ref()
    }

    #[inline]
    fn slot(&self, seq: Psn) -> Option<&Slot<T>> {
        let ahead = seq.since(self.una);
        let held = ahead >= 0 && (ahead as u32) < self.slots.len();
        held.then(|| &self.slots[seq.get()])
    }

    /// Its SGEs.
    #[inline]
    fn sges<'a>(&'a self, rare: &'a RareBox, seq: Psn) -> &'a [Sge] {
        let Some(Slot { wqe: Some(wqe), sge }) = self.slot(seq) else { return &[] };
        match wqe.sges() {
            0 => &[],
            1 => core::slice::from_ref(sge),
            several => rare.get().map_or(&[], |rare| T::lists(rare).sges.of(seq.get(), several)),
        }
    }

    /// All before `seq` are done.
    pub(super) fn release(&mut self, seq: Psn) {
        while self.una.before(seq) {
            self.slots[self.una.get()].wqe = None;
            self.una = self.una.plus(1);
        }
        if self.stored.before(self.una) {
            self.stored = self.una;
        }
    }
}

impl RemoteQueue<KeptRecv> {
    /// The next receive that comes, of one SGE, is stored. False: it is not the next, or room is to be made.
    #[inline]
    pub(super) fn store_next(&mut self, seq: Psn, sge: Sge) -> bool {
        if seq != self.stored || seq.since(self.una) as u32 >= self.slots.len() {
            return false;
        }
        self.slots[seq.get()] = Slot { wqe: Some(KeptRecv { num_sge: 1 }), sge };
        self.stored = seq.plus(1);
        while self.get(self.stored).is_some() {
            self.stored = self.stored.plus(1);
        }
        true
    }
}

impl RemoteQueue<SendWqe> {
    /// WQE `seq` is an RPC that our program answers: from now on a SEND, with the low half of the RPC op-code
    /// as immediate data.
    #[cold]
    pub(super) fn leave_to_program(&mut self, seq: Psn) -> Option<SendWqe> {
        self.get(seq)?;
        let wqe = self.slots[seq.get()].wqe.as_mut()?;
        (wqe.op, wqe.imm) = (SendOp::SendImm, (wqe.remote_addr as u32).to_be());
        Some(*wqe)
    }

    /// No data of WQE `seq` comes by itself.
    pub(super) fn ask_for(&mut self, seq: Psn) {
        if self.get(seq).is_some()
            && let Some(wqe) = &mut self.slots[seq.get()].wqe
        {
            wqe.flags -= SendFlags::EAGER;
        }
    }

    /// The inline bytes of WQE `seq`.
    fn inline<'a>(&self, rare: &'a RareBox, seq: Psn) -> &'a [u8] {
        let (Some(wqe), Some(rare)) = (self.get(seq), rare.get()) else { return &[] };
        rare.sends.inline.of(seq.get(), wqe.length as usize)
    }
}

impl<E: StarEnv> Stateful<E> {
    /// SGEs of a send WQE of SL.
    pub(super) fn send_sges(&self, seq: Psn) -> &[Sge] {
        self.sends.sges(&self.rare, seq)
    }

    /// SGEs of a receive WQE of SL.
    pub(super) fn recv_sges(&self, seq: Psn) -> &[Sge] {
        self.recvs.sges(&self.rare, seq)
    }

    /// Inline bytes of a send WQE of SL.
    pub(super) fn inline(&self, seq: Psn) -> &[u8] {
        self.sends.inline(&self.rare, seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{MAX_INLINE, MAX_WQE, encode_recv, encode_send};
    use starverbs_core::QPN_MASK;
    use std::vec::Vec;

    fn recv(room: &mut [u8; MAX_WQE], n: u64, sges: usize) -> Wqe<'_> {
        let list: Vec<Sge> = (0..sges).map(|i| Sge { addr: n, len: 1, lkey: i as u32 }).collect();
        let len = encode_recv(&list, room).unwrap();
        Wqe::decode(&room[..len]).unwrap()
    }

    #[test]
    fn each_wqe_is_taken_once_in_any_order_and_none_beyond_the_depth() {
        let (mut queue, mut rare) = (RemoteQueue::<KeptRecv>::new(), RareBox::default());
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
            assert_eq!(queue.store(&mut rare, 4, first.plus(n), &wqe), stored, "{n}");
        }
        assert!(queue.get(first.plus(2)).is_none());
        assert_eq!(
            queue.sges(&rare, first.plus(3)).iter().map(|s| (s.addr, s.lkey)).collect::<Vec<_>>(),
            [(3, 0), (3, 1), (3, 2), (3, 3)]
        );
        assert_eq!(queue.sges(&rare, first.plus(1)).len(), 2, "as it was before room was made for more");
        queue.release(first.plus(2));
        assert_eq!(queue.store(&mut rare, 4, first, &recv(&mut room, 0, 1)), Stored::Known);
        assert_eq!(queue.store(&mut rare, 4, first.plus(5), &recv(&mut room, 5, 0)), Stored::New);
        assert!(queue.sges(&rare, first.plus(5)).is_empty());
    }

    /// Across the end of numbers, behind a hole, and where no place is left.
    #[test]
    fn a_receive_that_comes_next_is_stored_as_any() {
        let queues = || (RemoteQueue::<KeptRecv>::new(), RareBox::default());
        let ((mut short, mut rare), (mut any, mut rares)) = (queues(), queues());
        let first = Psn::new(QPN_MASK - 1);
        let mut room = [0; MAX_WQE];
        for queue in [&mut short, &mut any] {
            (queue.una, queue.stored) = (first, first);
        }
        let sge = |n: u32| Sge { addr: n.into(), len: 1, lkey: 0 };
        assert!(!short.store_next(first, sge(0)), "there are no places yet");
        for n in [2, 3, 1, 0, 4, 0] {
            let (seq, wqe) = (first.plus(n), recv(&mut room, n.into(), 1));
            let is_next = n == 0 && any.stored == first;
            any.store(&mut rares, 4, seq, &wqe);
            assert_eq!(short.store_next(seq, sge(n)), is_next, "{n}");
            short.store(&mut rare, 4, seq, &wqe);
            assert_eq!(short.stored, any.stored, "{n}");
        }
        assert_eq!(short.stored, first.plus(4));
        for queue in [&mut short, &mut any] {
            queue.release(first.plus(3));
        }
        for n in 4..7 {
            assert!(short.store_next(first.plus(n), sge(n)), "{n}");
            any.store(&mut rares, 4, first.plus(n), &recv(&mut room, n.into(), 1));
        }
        assert!(!short.store_next(first.plus(7), sge(7)), "no place is left");
        for n in 0..9 {
            assert_eq!(short.sges(&rare, first.plus(n)), any.sges(&rares, first.plus(n)), "{n}");
        }
    }

    #[test]
    fn inline_bytes_stay_with_their_wqe() {
        let (mut queue, mut rare) = (RemoteQueue::<SendWqe>::new(), RareBox::default());
        let wqe = SendWqe { flags: SendFlags::INLINE, ..SendWqe::default() };
        for (seq, bytes) in [(0, &b"a"[..]), (1, b"some more")] {
            let mut room = [0; MAX_WQE];
            let len = encode_send(&wqe, &[], bytes, &mut room).unwrap();
            let wqe = Wqe::decode(&room[..len]).unwrap();
            assert_eq!(queue.store(&mut rare, 2, Psn::new(seq), &wqe), Stored::New);
        }
        let inline = |seq| queue.inline(&rare, Psn::new(seq));
        assert_eq!((inline(0), inline(1)), (&b"a"[..], &b"some more"[..]));
        assert!(queue.bytes() > 2 * size_of::<SendWqe>() && rare.bytes() >= size_of::<Rare>() + 18);
        /* as many as an honest SL sends from a queue of this depth */
        for (depth, most) in [(64, 4048), (1024, 512)] {
            let (mut queue, mut rare) = (RemoteQueue::<SendWqe>::new(), RareBox::default());
            for (len, stored) in [(most + 1, Stored::Refused), (most, Stored::New)] {
                let wqe = Wqe { recv: false, wqe, body: Body::Inline(&[7; MAX_INLINE + 1][..len]) };
                assert_eq!(queue.store(&mut rare, depth, Psn::new(3), &wqe), stored, "{depth} {len}");
            }
        }
    }
}
