//! Datagrams that processes of one host send to the port they share, to find out how it is steered.
//!
//! A probe asks whoever has an index in the group, a check is steered by its QPN as all frames are. Owns
//! their bytes; it must not know what is made of the answers: [`crate::steer`] does. Neither has an ICRC.

use starverbs_core::{FrameMeta, Gid, QPN_BLOCK_SHIFT};

/// Op-code of a probe: of those that IBTA 9.2.1 leaves to manufacturers (0xc0 to 0xff).
pub(crate) const PROBE_OPCODE: u8 = 0xfe;
const PROBE_MAGIC: [u8; 8] = *b"svprobe1";
const PROBE_LEN: usize = 28;
/// Op-code of a check, which is steered by its QPN as all frames are.
const CHECK_OPCODE: u8 = 0xfd;
const CHECK_MAGIC: [u8; 8] = *b"svcheck1";
const CHECK_LEN: usize = 20;

/// What a probe asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Probe {
    pub(crate) index: u32,
    pub(crate) nonce: u32,
    pub(crate) reply_block: u32,
}

impl Probe {
    pub(crate) fn encode(self) -> [u8; PROBE_LEN] {
        let mut out = [0; PROBE_LEN];
        out[0] = PROBE_OPCODE;
        out[8..12].copy_from_slice(&self.index.to_be_bytes());
        out[12..16].copy_from_slice(&self.nonce.to_be_bytes());
        out[16..20].copy_from_slice(&self.reply_block.to_be_bytes());
        out[20..28].copy_from_slice(&PROBE_MAGIC);
        out
    }

    /// Reads a probe; `None` if the datagram is none.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Probe> {
        let bytes: &[u8; PROBE_LEN] = bytes.try_into().ok()?;
        let number = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        (bytes[0] == PROBE_OPCODE && bytes[20..28] == PROBE_MAGIC).then(|| Probe {
            index: number(8),
            nonce: number(12),
            reply_block: number(16),
        })
    }
}

/// A check, which comes back if `block` is steered to who sends it.
pub(crate) fn encode_check(block: u32, nonce: u32) -> [u8; CHECK_LEN] {
    let mut out = [0; CHECK_LEN];
    out[4..8].copy_from_slice(&(block << QPN_BLOCK_SHIFT).to_be_bytes());
    out[0] = CHECK_OPCODE;
    out[8..12].copy_from_slice(&nonce.to_be_bytes());
    out[12..20].copy_from_slice(&CHECK_MAGIC);
    out
}

/// The number of a check; `None` if the datagram is none.
pub(crate) fn decode_check(bytes: &[u8]) -> Option<u32> {
    let bytes: &[u8; CHECK_LEN] = bytes.try_into().ok()?;
    let is_one = bytes[0] == CHECK_OPCODE && bytes[12..20] == CHECK_MAGIC;
    is_one.then(|| u32::from_be_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]))
}

/// Probes that came to this process and wait for their common answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingProbes {
    /// The probe with the lowest index
    pub(crate) probe: Probe,
    /// How many there were
    pub(crate) count: u32,
}

impl PendingProbes {
    /// Adds a probe to those that wait; gives those that can wait no longer, as they are of another round.
    pub(crate) fn add(waiting: &mut Option<PendingProbes>, probe: Probe) -> Option<PendingProbes> {
        match waiting {
            Some(asked)
                if (asked.probe.nonce, asked.probe.reply_block) == (probe.nonce, probe.reply_block) =>
            {
                asked.probe.index = asked.probe.index.min(probe.index);
                asked.count += 1;
                None
            }
            _ => waiting.replace(PendingProbes { probe, count: 1 }),
        }
    }
}

/// Whether both ends are loopback, so that nobody else can have sent it.
pub(crate) fn is_own_host(meta: &FrameMeta) -> bool {
    const LOOPBACK: Gid = Gid::from_ipv4([127, 0, 0, 1]);
    meta.src == LOOPBACK && meta.dst == LOOPBACK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_come_back_as_they_were() {
        let probe = Probe { index: 3, nonce: 4, reply_block: 5 };
        assert_eq!(Probe::decode(&probe.encode()), Some(probe));
        assert_eq!(Probe::decode(&probe.encode()[1..]), None);
        let mut foreign = probe.encode();
        foreign[27] ^= 1;
        assert_eq!(Probe::decode(&foreign), None);
    }

    #[test]
    fn probes_of_a_round_are_answered_together() {
        let probe = |index, nonce| Probe { index, nonce, reply_block: 5 };
        let mut waiting = None;
        assert!(PendingProbes::add(&mut waiting, probe(3, 1)).is_none());
        assert!(PendingProbes::add(&mut waiting, probe(2, 1)).is_none());
        let full = PendingProbes::add(&mut waiting, probe(0, 2)).expect("another round");
        assert_eq!((full.probe, full.count), (probe(2, 1), 2));
        assert_eq!(waiting.map(|w| w.count), Some(1));
    }

    #[test]
    fn checks_come_back_as_they_were() {
        let check = encode_check(7, 4);
        assert_eq!(decode_check(&check), Some(4));
        assert_eq!(u32::from_be_bytes([0, check[5], check[6], check[7]]) >> QPN_BLOCK_SHIFT, 7);
        assert_eq!(decode_check(&check[1..]), None);
        let mut foreign = check;
        foreign[19] ^= 1;
        assert_eq!(decode_check(&foreign), None);
    }
}
