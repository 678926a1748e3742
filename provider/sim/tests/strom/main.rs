//! StRoM's cards on virtual time.

mod figures;
mod times;
