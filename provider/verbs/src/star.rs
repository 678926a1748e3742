//! What a program may ask of its connections' StaR: what they were to be, what they are, what that costs.

pub use starverbs_backend::star::{Settled, StarInfo};
use starverbs_settings::StarPreference;
use starverbs_star::control::Preference;

/// The setting in the card's words.
pub(crate) fn preference_of(setting: StarPreference) -> Preference {
    match setting {
        StarPreference::Off => Preference::Off,
        StarPreference::Auto => Preference::Auto,
        StarPreference::Stateless => Preference::Stateless,
        StarPreference::Stateful => Preference::Stateful,
    }
}
