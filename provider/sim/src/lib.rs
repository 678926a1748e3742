//! Cards on a virtual wire and virtual time
