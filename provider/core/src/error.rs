//! Why a control call on the card fails, and which errno the edge makes of it.

use thiserror::Error;

/// A control call failed. The numbers of [`NicError::errno`] are Linux's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum NicError {
    /// no such object on this card (stale or foreign handle)
    #[error("no such object on this card (stale or foreign handle)")]
    NotFound,
    /// an attribute is missing, out of range or not allowed in this transition
    #[error("an attribute is missing, out of range or not allowed in this transition")]
    Invalid,
    /// the object is in use by others
    #[error("the object is in use by others")]
    Busy,
    /// the card's limit for such objects is reached, or the host has no memory for one more
    #[error("the card's limit for such objects is reached, or there is no memory for one more")]
    Exhausted,
    /// the card does not offer this
    #[error("the card does not offer this")]
    Unsupported,
}

impl NicError {
    /// The errno that the verbs man pages promise.
    pub const fn errno(self) -> i32 {
        match self {
            NicError::NotFound | NicError::Invalid => 22,
            NicError::Busy => 16,
            NicError::Exhausted => 12,
            NicError::Unsupported => 95,
        }
    }
}
