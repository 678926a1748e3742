//! RoCEv2 packets: what stands between the UDP header and the end of the ICRC.
//!
//! [`opcode`] is the table of op-codes that both [`Packet::parse`] and [`HeaderBuf`] work from;
//! [`headers`] are the headers as they lie in memory, [`tags`] those that some messages begin with; [`icrc`]
//! is the check over all of it, a [`crc`]. Everything here is pure: bytes in, numbers out. It must not know
//! queue pairs or protocol state.

pub mod builder;
pub mod crc;
pub mod headers;
pub mod icrc;
pub mod opcode;
pub mod packet;
pub mod tags;

pub use builder::HeaderBuf;
pub use crc::Crc;
pub use headers::{Aeth, AtomicAckEth, AtomicEth, Bth, Deth, NakCode, PKEY_DEFAULT, Reth, SackEth, Syndrome};
pub use icrc::{IcrcHeader, bytes_after_ip_id, explained_by_ip_id};
pub use opcode::{OpFlags, OpInfo, PacketKind, Transport, code, op_info, request_code, rpc_info};
pub use packet::{Packet, WireError};

#[cfg(test)]
mod tests;
