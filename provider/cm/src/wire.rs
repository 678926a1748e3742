//! The messages: management datagrams of 256 bytes (IBTA 13.4.2), class communication management (12.6).
//!
//! [`Mad`] reads and writes fields as the specification's tables give them; [`fields`] are those tables;
//! [`message`] makes and reads whole messages; [`ip`] is annex A11; [`Destination`] finds for whom of a
//! host's processes a message is.

pub mod fields;
pub mod ip;
mod mad;
pub mod message;

pub use fields::Attribute;
pub use mad::{ATTRIBUTE_AT, Destination, Field, MAD_LEN, Mad, QKEY, REMOTE_ID_AT, REQUEST_ID_AT, sender_id};
