//! What a card with a key does to StaR's offers and control messages on their way out and in. Without a key they pass as they are.

use starverbs_core::star::control::MAX_CONTROL;
use starverbs_core::star::seal::{Ends, MAX_SEALED, SALT_LEN, Seal, SealError};
use starverbs_core::star::wire::{Head, Packet};
use starverbs_core::{Counters, FrameMeta, Gid, Qpn};
use starverbs_settings::Settings;

use crate::card::seed;
use crate::error::Result;

/// A card's key, if it has one.
#[derive(Default)]
pub(crate) struct Sealing(Option<Box<Seal>>);

impl Sealing {
    /// With the key of the settings. EINVAL: there is none where they say.
    pub(crate) fn new(settings: &Settings) -> Result<Self> {
        let Some(place) = &settings.star_key else { return Ok(Sealing(None)) };
        let key = place.load()?;
        let [high, low] = seed().map(u64::to_ne_bytes);
        let mut salt = [0; SALT_LEN];
        let (front, back) = salt.split_at_mut(high.len());
        front.copy_from_slice(&high);
        back.copy_from_slice(&low);
        Ok(Sealing(Some(Box::new(Seal::new(&key, salt)))))
    }

    /// A packet that leaves, from one address to the other, as it is sealed: head and length. `None`: it leaves as it is.
    #[inline]
    pub(crate) fn seal_packet(
        &mut self,
        (src, dst): (&Gid, &Gid),
        head: &Head,
        data: &[u8],
        room: &mut [u8; MAX_SEALED],
    ) -> Option<(Head, usize)> {
        self.0.as_mut()?.seal_packet(Ends { src, dst }, head, data, room)
    }

    /// A control message that came. `None`: it is none for this card.
    pub(crate) fn open_packet<'r>(
        &mut self,
        meta: &FrameMeta,
        packet: &Packet<'r>,
        room: &'r mut [u8; MAX_CONTROL],
        stats: &Counters,
    ) -> Option<Packet<'r>> {
        let Some(seal) = &mut self.0 else { return Some(*packet) };
        let ends = Ends { src: &meta.src, dst: &meta.dst };
        seal.open_packet(ends, packet, room).map_err(|error| count(stats, error)).ok()
    }

    /// A message by which roles are settled, as it leaves.
    pub(crate) fn seal_offer<'r>(
        &mut self,
        (src, dst): (&Gid, &Gid),
        qpns: (Qpn, Qpn),
        message: &'r [u8],
        room: &'r mut [u8; MAX_SEALED],
    ) -> Option<&'r [u8]> {
        let Some(seal) = &mut self.0 else { return Some(message) };
        let len = seal.seal_offer(Ends { src, dst }, qpns, message, room)?;
        room.get(..len)
    }

    /// A message by which roles are settled, that came. `None`: it is none for this card.
    pub(crate) fn open_offer<'r>(
        &mut self,
        (src, dst): (&Gid, &Gid),
        qpns: (Qpn, Qpn),
        message: &'r [u8],
        room: &'r mut [u8; MAX_CONTROL],
        stats: &Counters,
    ) -> Option<&'r [u8]> {
        let Some(seal) = &mut self.0 else { return Some(message) };
        seal.open_offer(Ends { src, dst }, qpns, message, room).map_err(|error| count(stats, error)).ok()
    }
}

fn count(stats: &Counters, error: SealError) {
    match error {
        SealError::Foreign => stats.star_foreign.inc(),
        SealError::Replayed => stats.star_replayed.inc(),
    }
}
