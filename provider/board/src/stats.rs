//! Where the card's counters live.

use std::ops::Deref;
use std::rc::Rc;

use starverbs_core::Counters;

/// The counters: of this board alone, or of a page that others read.
#[derive(Clone, Debug)]
pub enum Stats {
    /// Nobody else sees them
    Own(Rc<Counters>),
    /// A statistics page
    Page(&'static Counters),
}

impl Default for Stats {
    fn default() -> Stats {
        Stats::Own(Rc::default())
    }
}

impl Deref for Stats {
    type Target = Counters;

    #[inline]
    fn deref(&self) -> &Counters {
        match self {
            Stats::Own(counters) => counters,
            Stats::Page(counters) => counters,
        }
    }
}
