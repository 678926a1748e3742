//! The card, without any operating system in it
