//! What a program may ask of its connections' StaR: what they were to be, what they are, what that costs.

use starverbs_settings::StarPreference;
use starverbs_star::control::Preference;

/// What a queue pair has become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Settled {
    /// Nothing yet: it was not connected, or the peer has not answered
    #[default]
    Waiting = 0,
    /// Plain RoCEv2
    Plain = 1,
    /// StaR: this card keeps nothing of it
    Stateless = 2,
    /// StaR: this card keeps all of it
    Stateful = 3,
}

/// StaR of one queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StarInfo {
    /// What the program wants it to be
    pub preference: Preference,
    /// What it is
    pub role: Settled,
    /// What the card keeps of it now, bytes
    pub card_bytes: u64,
    /// What its host keeps of it because the card does not, bytes
    pub host_bytes: u64,
}

/// The setting in the card's words.
pub(crate) fn preference_of(setting: StarPreference) -> Preference {
    match setting {
        StarPreference::Off => Preference::Off,
        StarPreference::Auto => Preference::Auto,
        StarPreference::Stateless => Preference::Stateless,
        StarPreference::Stateful => Preference::Stateful,
    }
}
