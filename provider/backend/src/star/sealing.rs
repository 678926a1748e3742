//! What a card with a key does to StaR's offers and control messages on their way out and in. Without a key
//! they pass as they are.

use starverbs_core::Gid;
use starverbs_settings::{Settings, SettingsError};
use starverbs_star::seal::{AddrPair, ControlSeal, MAX_SEALED, SALT_LEN};
use starverbs_star::wire::StarHead;

use crate::seed;

/// A card's key, if it has one.
#[derive(Default)]
pub struct Sealing(Option<Box<ControlSeal>>);

impl Sealing {
    /// With the key of the settings.
    ///
    /// # Errors
    /// There is no key where the settings say.
    pub fn new(settings: &Settings) -> Result<Self, SettingsError> {
        let Some(place) = &settings.star_key else { return Ok(Sealing(None)) };
        let key = place.load()?;
        let [high, low] = seed().map(u64::to_ne_bytes);
        let mut salt = [0; SALT_LEN];
        let (front, back) = salt.split_at_mut(high.len());
        front.copy_from_slice(&high);
        back.copy_from_slice(&low);
        Ok(Sealing(Some(Box::new(ControlSeal::new(&key, salt)))))
    }

    /// A packet that leaves, from one address to the other, as it is sealed: head and length. `None`: it
    /// leaves as it is.
    #[inline]
    pub(super) fn seal_packet(
        &mut self,
        (src, dst): (&Gid, &Gid),
        head: &StarHead,
        data: &[u8],
        room: &mut [u8; MAX_SEALED],
    ) -> Option<(StarHead, usize)> {
        self.0.as_mut()?.seal_packet(AddrPair { src, dst }, head, data, room)
    }

    /// What seals, for who settles roles and for messages that came.
    pub fn seal(&mut self) -> Option<&mut ControlSeal> {
        self.0.as_deref_mut()
    }
}

impl std::fmt::Debug for Sealing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Sealing").field(&self.0.is_some()).finish()
    }
}
