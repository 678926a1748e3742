//! Commands and completions as they lie in memory: a slot of 64 bytes, a record of 32. Little-endian.

use starverbs_core::Gid;
use thiserror::Error;

use crate::region::RegionId;
use crate::seal::{DerivedKey, KEY_LEN};
use crate::types::{Class, OneRmaOp, Status};

/// Bytes of a command: what a program stores into a slot.
pub const COMMAND_LEN: usize = 64;
/// How often a command may have the card's timeout halved, and 1.
pub const HASTES: u8 = 10;
/// Bytes of a completion.
pub const COMPLETION_LEN: usize = 32;

/// One operation, whole: the card keeps nothing about a destination (1RMA, section 4.4).
///
/// In memory: op 8, class 1 and haste 7, size 16, remote region 32, remote offset 64, remote address 128,
/// local region 32, completion region 32, local offset 64, K_d 128.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OneRmaCommand {
    /// What is asked for
    pub op: OneRmaOp,
    /// Its class
    pub class: Class,
    /// How often the card's timeout is halved for it: less than [`HASTES`]
    pub haste: u8,
    /// Bytes: 1 to 4096; 16 of a REKEY
    pub size: u32,
    /// The target's address
    pub remote: Gid,
    /// The region there
    pub region: RegionId,
    /// Where in it
    pub offset: u64,
    /// The region here that data comes from or goes to
    pub local: RegionId,
    /// Where in it
    pub local_offset: u64,
    /// The region here that gets the completion
    pub completions: RegionId,
    /// The key for this target region, this process and this operation
    pub key: DerivedKey,
}

/// Why 64 bytes are no command.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum CommandError {
    /// An operation or haste that is not known
    #[error("unknown operation or haste")]
    Unknown,
    /// An operation of this kind does not have this size
    #[error("no operation of this kind has this size")]
    Size,
}

impl OneRmaCommand {
    /// As it lies in a slot.
    pub fn encode(&self) -> [u8; COMMAND_LEN] {
        let mut bytes = [0; COMMAND_LEN];
        bytes[0] = self.op as u8;
        bytes[1] = self.class as u8 | self.haste << 1;
        bytes[2..4].copy_from_slice(&(self.size as u16).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.region.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.remote.0);
        bytes[32..36].copy_from_slice(&self.local.0.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.completions.0.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.local_offset.to_le_bytes());
        bytes[48..].copy_from_slice(&self.key.0);
        bytes
    }

    /// What a slot holds. The program may have written anything.
    pub fn decode(bytes: &[u8; COMMAND_LEN]) -> Result<OneRmaCommand, CommandError> {
        let op = OneRmaOp::from_code(bytes[0]).ok_or(CommandError::Unknown)?;
        let class = Class::from_code(bytes[1] & 1).ok_or(CommandError::Unknown)?;
        let haste = bytes[1] >> 1;
        if haste >= HASTES {
            return Err(CommandError::Unknown);
        }
        let size = u32::from(u16::from_le_bytes(part(bytes, 2)));
        if !op.takes(size) {
            return Err(CommandError::Size);
        }
        Ok(OneRmaCommand {
            op,
            class,
            haste,
            size,
            remote: Gid(part(bytes, 16)),
            region: RegionId(u32::from_le_bytes(part(bytes, 4))),
            offset: u64::from_le_bytes(part(bytes, 8)),
            local: RegionId(u32::from_le_bytes(part(bytes, 32))),
            local_offset: u64::from_le_bytes(part(bytes, 40)),
            completions: RegionId(u32::from_le_bytes(part(bytes, 36))),
            key: DerivedKey(part::<KEY_LEN>(bytes, 48)),
        })
    }
}

/// `N` bytes at a place that lies in the slot or record.
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.iter_mut().zip(bytes.iter().skip(at)).for_each(|(to, from)| *to = *from);
    part
}

/// How a command ended (1RMA, section 4.5).
///
/// In memory: issue delay 32, total delay 32, bytes 32, 32 and 64 of zeros, then 64 that are written last and
/// at once: sequence 32, slot 16, status 8, op 8.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// Which slot's command, counted in its portal
    pub slot: u16,
    /// How it ended
    pub status: Status,
    /// What it was
    pub op: OneRmaOp,
    /// Bytes that it moved
    pub bytes: u32,
    /// From its issue until it entered service, ns; until it failed, if it did not. At most 2^32 - 1
    pub issue_delay: u32,
    /// From its issue until its end, ns. At most 2^32 - 1
    pub total_delay: u32,
    /// Completions of the portal before this one, and 1, modulo 2^32: a record is new if its number is next
    pub sequence: u32,
}

impl Completion {
    /// As it lies in memory: what is written first, and the eight bytes that follow it.
    pub fn encode(&self) -> ([u8; 24], [u8; 8]) {
        let (mut first, mut last) = ([0; 24], [0; 8]);
        first[..4].copy_from_slice(&self.issue_delay.to_le_bytes());
        first[4..8].copy_from_slice(&self.total_delay.to_le_bytes());
        first[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        last[..4].copy_from_slice(&self.sequence.to_le_bytes());
        last[4..6].copy_from_slice(&self.slot.to_le_bytes());
        (last[6], last[7]) = (self.status as u8, self.op as u8);
        (first, last)
    }

    /// What a record holds. `None`: nothing that a card has written.
    pub fn decode(bytes: &[u8; COMPLETION_LEN]) -> Option<Completion> {
        Some(Completion {
            slot: u16::from_le_bytes(part(bytes, 28)),
            status: Status::from_code(bytes[30])?,
            op: OneRmaOp::from_code(bytes[31])?,
            bytes: u32::from_le_bytes(part(bytes, 8)),
            issue_delay: u32::from_le_bytes(part(bytes, 0)),
            total_delay: u32::from_le_bytes(part(bytes, 4)),
            sequence: u32::from_le_bytes(part(bytes, 24)),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_slot_is_a_command_that_reads_back_or_an_error(
            bytes in any::<[[u8; 32]; 2]>(), op in 0..5u8, second in 0..24u8, size in 0..4200u16,
        ) {
            let mut slot = [0; COMMAND_LEN];
            slot[..32].copy_from_slice(&bytes[0]);
            slot[32..].copy_from_slice(&bytes[1]);
            (slot[0], slot[1]) = (op, second);
            slot[2..4].copy_from_slice(&size.to_le_bytes());
            match OneRmaCommand::decode(&slot) {
                Ok(command) => prop_assert_eq!(command.encode(), slot),
                Err(CommandError::Unknown) => prop_assert!(!(1..=3).contains(&op) || second >> 1 >= HASTES),
                Err(CommandError::Size) => {
                    prop_assert!(size == 0 || size > 4096 || (op == 3 && size != 16));
                }
            }
        }

        #[test]
        fn a_record_reads_back(
            (slot, sequence, bytes) in any::<(u16, u32, u32)>(), delays in any::<(u32, u32)>(),
            status in 0..8u8, op in 1..4u8,
        ) {
            let (status, op) = (Status::from_code(status).unwrap(), OneRmaOp::from_code(op).unwrap());
            let (issue_delay, total_delay) = delays;
            let whole = Completion { slot, status, op, bytes, issue_delay, total_delay, sequence };
            let (first, last) = whole.encode();
            let mut record = [0; COMPLETION_LEN];
            record[..24].copy_from_slice(&first);
            record[24..].copy_from_slice(&last);
            prop_assert_eq!(Completion::decode(&record), Some(whole));
        }
    }

    #[test]
    fn zeros_are_no_record() {
        assert_eq!(Completion::decode(&[0; COMPLETION_LEN]), None);
    }
}
