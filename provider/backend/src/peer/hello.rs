//! The hello that two processes exchange when their session begins, as bytes.
//!
//! A list of kinds names what the descriptors beside the message are, in their order; a kind that one does
//! not know is closed and passed over, so that later versions may hand over more. Owns that format; it must
//! not send or receive.

const MAGIC: [u8; 4] = *b"SVP1";
/// Magic, number of kinds, three zeroes.
const FIXED: usize = 8;
/// Kinds in one message.
const KINDS: usize = 8;
/// Longest message: that of a process which has all blocks.
pub(super) const LONGEST: usize = FIXED + KINDS + 2 * 4096;

/// Kind of a descriptor: the memory of the session's rings.
pub(super) const RINGS: u8 = 1;
/// Kind of a descriptor: the memory of a channel.
pub(super) const CHANNEL: u8 = 2;

/// Kind of a descriptor: the table of memory regions of the process that hands it over.
pub(super) const MRS: u8 = 3;
/// Kind of a descriptor: the slots of those who read that process's memory.
pub(super) const READERS: u8 = 4;
/// Kind of a descriptor: that process's memory (/proc/self/mem).
pub(super) const MEM: u8 = 5;
/// Kind of a descriptor: the gates of its queue pairs.
pub(super) const GATES: u8 = 6;
/// Kind of a descriptor: that process's directory (/proc/self).
pub(super) const PROCESS: u8 = 7;
/// Kind of a descriptor: the doorbell of that process.
pub(super) const DOORBELL: u8 = 8;

/// Who speaks, and what it hands over.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hello<'a> {
    /// What each descriptor is
    pub(super) kinds: &'a [u8],
    /// Blocks of QPNs that it claims: for the kernel to confirm
    pub(super) blocks: Vec<u16>,
}

impl Hello<'_> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend([self.kinds.len() as u8, 0, 0, 0]);
        out.extend(self.kinds);
        out.extend(self.blocks.iter().flat_map(|block| block.to_be_bytes()));
        out
    }
}

/// Reads a hello; `None` if it is none.
pub(crate) fn decode(bytes: &[u8]) -> Option<Hello<'_>> {
    let (head, rest) = bytes.split_first_chunk::<FIXED>()?;
    let [a, b, c, d, kinds, 0, 0, 0] = *head else { return None };
    if [a, b, c, d] != MAGIC || usize::from(kinds) > KINDS {
        return None;
    }
    let (kinds, blocks) = rest.split_at_checked(usize::from(kinds))?;
    let (blocks, []) = blocks.as_chunks() else { return None };
    Some(Hello { kinds, blocks: blocks.iter().map(|block| u16::from_be_bytes(*block)).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_comes_back_as_it_was_and_nothing_else_is_one() {
        let hello = Hello { kinds: &[RINGS, 77], blocks: vec![1, 4094] };
        let bytes = hello.encode();
        assert_eq!(decode(&bytes), Some(hello));
        assert_eq!(decode(&bytes[..bytes.len() - 1]), None, "half a block");
        assert!((0..FIXED + 2).all(|len| decode(&bytes[..len]).is_none()));
        for at in [0, 4, 5] {
            let mut other = bytes.clone();
            other[at] ^= 0x40;
            assert_eq!(decode(&other), None, "byte {at}");
        }
    }
}
