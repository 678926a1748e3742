//! Runs others' programs on the card and tabulates what ran
