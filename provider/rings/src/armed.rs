//! Whether a program waits for a completion queue's next completion (ibv_req_notify_cq(3)).
//!
//! The program arms, then looks into the ring once more, then sleeps; the card adds a completion, then looks
//! whether it must notify. A fence on either side between the two steps: the program sees the completion, or
//! the card that it is armed.

use crate::sync::{AtomicU8, Ordering, fence};

/// Nobody waits.
const UNARMED: u8 = 0;
/// The next solicited or failed completion is waited for.
const SOLICITED: u8 = 1;
/// Any completion is.
const ANY: u8 = 2;

/// What a program waits for.
pub struct Armed(AtomicU8);

impl Armed {
    /// A program that waits for nothing.
    #[allow(clippy::new_without_default, reason = "a ring's part, made with it")]
    pub fn new() -> Self {
        Armed(AtomicU8::new(UNARMED))
    }

    /// The program arms the queue for the next completion; it looks at the ring afterwards. Gives whether it
    /// waited for none until now.
    pub fn arm(&self, solicited_only: bool) -> bool {
        let news = if solicited_only {
            /* waiting for any completion covers this already */
            self.0.compare_exchange(UNARMED, SOLICITED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        } else {
            self.0.swap(ANY, Ordering::SeqCst) == UNARMED
        };
        fence(Ordering::SeqCst);
        news
    }

    /// The card has added a completion: whether the program waits for one of its kind.
    #[inline]
    pub fn wants(&self, solicited: bool) -> bool {
        fence(Ordering::SeqCst);
        let armed = self.0.load(Ordering::Relaxed);
        armed == ANY || (armed == SOLICITED && solicited)
    }

    /// Whether the program waited for anything, which it does no more: it is notified once for each time that
    /// it asked.
    #[inline]
    pub fn disarm(&self) -> bool {
        self.0.swap(UNARMED, Ordering::SeqCst) != UNARMED
    }
}
