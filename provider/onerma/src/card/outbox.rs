//! Packets that leave: sealed, each with a number of its own. And the opening of those that come.

use alloc::vec;
use alloc::vec::Vec;

use starverbs_core::{Dma, Gid, Seg};

use super::{CardPath, OneRmaEnv};
use crate::seal::{RESERVED_KEY, Seal, SealCounters, TAG_LEN};
use crate::types::{Class, OneRmaOp};
use crate::wire::{Hop, Iv, OneRmaHeader, PacketAad, PacketPrefix};

/// Why a packet did not leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotSent {
    /// No message counter is left
    Exhausted,
    /// The memory of its data is not there
    NoMemory,
}

/// A packet to be.
pub(super) struct Letter<'a, K> {
    pub(super) path: &'a CardPath,
    pub(super) op: OneRmaOp,
    pub(super) class: Class,
    pub(super) hop: Hop,
    /// The packet that it answers
    pub(super) answers: Iv,
    /// Whether the target sends it
    pub(super) by_target: bool,
    pub(super) key: &'a K,
    /// Its data
    pub(super) data: Option<Seg>,
}

/// A packet that came.
pub(super) struct Inward<'p> {
    pub(super) head: OneRmaHeader,
    pub(super) bytes: &'p mut [u8],
    /// Where its data begins
    pub(super) at: usize,
}

/// What sends.
pub(super) struct Outbox<S: Seal> {
    pub(super) seal: S,
    pub(super) counters: SealCounters,
    /// Of answers to what could not be authenticated
    pub(super) reserved: S::Key,
    sender: u32,
}

impl<S: Seal> Outbox<S> {
    pub(super) fn new(seal: S, sender: u32, counters: SealCounters) -> Self {
        let reserved = seal.prepare(&RESERVED_KEY);
        Outbox { seal, counters, reserved, sender }
    }

    /// Seals and sends.
    pub(super) fn send<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        letter: &Letter<'_, S::Key>,
    ) -> Result<Iv, NotSent> {
        let iv = self.next_iv(letter.by_target)?;
        send(&self.seal, env, letter, iv)
    }

    /// The same under the reserved key, by the target.
    pub(super) fn send_reserved<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        (path, op, class): (&CardPath, OneRmaOp, Class),
        hop: Hop,
        answers: Iv,
    ) -> Result<Iv, NotSent> {
        let iv = self.next_iv(true)?;
        let Outbox { seal, reserved: key, .. } = self;
        let letter = Letter { path, op, class, hop, answers, by_target: true, key, data: None };
        send(seal, env, &letter, iv)
    }

    fn next_iv(&mut self, by_target: bool) -> Result<Iv, NotSent> {
        let counters = &mut self.counters;
        let counter = if by_target { counters.as_target() } else { counters.as_initiator() };
        Ok(Iv { sender: self.sender, counter: counter.ok_or(NotSent::Exhausted)? })
    }
}

fn send<S: Seal, E: OneRmaEnv>(
    seal: &S,
    env: &mut E,
    letter: &Letter<'_, S::Key>,
    iv: Iv,
) -> Result<Iv, NotSent> {
    let Letter { path, op, class, hop, answers, by_target, key, data } = *letter;
    let head = OneRmaHeader { prefix: PacketPrefix { op, class, iv }, hop }.encode();
    let head = head.bytes();
    let target = if by_target { &path.local } else { &path.remote };
    let sealed = |packet: &mut [u8]| {
        match packet.get_mut(head.len()..).and_then(|rest| rest.split_last_chunk_mut::<TAG_LEN>()) {
            Some((body, tag)) => {
                *tag = seal.seal(key, &iv.bytes(), PacketAad::new(head, answers, target).bytes(), body);
            }
            /* no packet has such a length: nothing is told */
            None => packet.fill(0),
        }
    };
    let sent = env.send(path, class, head, data.unwrap_or_default(), sealed);
    if sent { Ok(iv) } else { Err(NotSent::NoMemory) }
}

/// A packet of [`OneRmaEnv::send`] in a buffer of its own, for hosts that keep packets. `None`: the memory is
/// not there.
pub fn packet_in_buffer(
    memory: &mut impl Dma,
    head: &[u8],
    Seg { addr, len }: Seg,
    seal: impl FnOnce(&mut [u8]),
) -> Option<Vec<u8>> {
    let (front, len) = (head.len(), len as usize);
    let mut packet = vec![0; front + len + TAG_LEN];
    let (start, rest) = packet.split_at_mut(front);
    start.copy_from_slice(head);
    if len > 0 && !memory.dma_copy(addr, rest.get_mut(..len)?) {
        return None;
    }
    seal(&mut packet);
    Some(packet)
}

/// Decrypts a packet's data in place. `None`: its tag is wrong.
pub(super) fn open<'p, S: Seal>(
    seal: &S,
    key: &S::Key,
    (packet, at): (&'p mut [u8], usize),
    (iv, answers, target): (Iv, Iv, &Gid),
) -> Option<&'p mut [u8]> {
    let (head, rest) = packet.split_at_mut_checked(at)?;
    let (body, tag) = rest.split_last_chunk_mut::<TAG_LEN>()?;
    let bound = PacketAad::new(head, answers, target);
    seal.open(key, &iv.bytes(), bound.bytes(), body, tag).then_some(body)
}
