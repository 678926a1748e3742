//! Headers of an outgoing packet, put together on the stack.

use zerocopy::{Immutable, IntoBytes};

use super::headers::{Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Feth, Reth, SackEth, Syndrome};
use super::tags::Rendezvous;
use crate::types::{Psn, QPN_MASK, Qpn};

/// Room for the longest headers (BTH and AtomicETH are 40 bytes).
const ROOM: usize = 64;
/// Byte of the BTH whose lowest bit is [`Bth::repeats`].
const REPEATS: usize = 8;

/// BTH and extension headers, in the order in which the methods were called.
#[derive(Clone, Copy, Debug)]
pub struct HeaderBuf {
    bytes: [u8; ROOM],
    len: usize,
}

impl HeaderBuf {
    /// Begins with a BTH. `pad` is what the payload lacks to a multiple of four, 0 to 3.
    #[inline]
    pub fn bth(opcode: u8, qpn: Qpn, psn: Psn, ack_req: bool, solicited: bool, pad: u8, pkey: u16) -> Self {
        let mut buf = HeaderBuf { bytes: [0; ROOM], len: 0 };
        buf.push(&Bth::new(opcode, qpn, psn, ack_req, solicited, pad, pkey));
        buf
    }
    /// Advertises (1) or not (0) that the sender repeats selectively: [`Bth::repeats`].
    #[inline]
    #[must_use]
    pub fn repeats(mut self, advertised: u8) -> Self {
        self.bytes[REPEATS] |= advertised & 1;
        self
    }
    /// Adds what the responder keeps.
    #[inline]
    #[must_use]
    pub fn sack(mut self, kept: &SackEth) -> Self {
        self.push(kept);
        self
    }
    /// Adds an XRCETH: the number of an SRQ, 24 bits.
    #[inline]
    #[must_use]
    pub fn xrceth(mut self, srq: u32) -> Self {
        self.push(&(srq & QPN_MASK).to_be_bytes());
        self
    }
    /// Adds a RETH.
    #[inline]
    #[must_use]
    pub fn reth(mut self, va: u64, rkey: u32, dma_len: u32) -> Self {
        self.push(&Reth::new(va, rkey, dma_len));
        self
    }
    /// Adds a FETH, given as its word: [`Feth::word`].
    #[inline]
    #[must_use]
    pub fn feth(mut self, word: u32) -> Self {
        self.push(&Feth::new(word));
        self
    }
    /// Adds immediate data, given in network order.
    #[inline]
    #[must_use]
    pub fn imm(mut self, imm: u32) -> Self {
        self.push(&imm.to_ne_bytes());
        self
    }
    /// Adds an IETH.
    #[inline]
    #[must_use]
    pub fn ieth(mut self, rkey: u32) -> Self {
        self.push(&rkey.to_be_bytes());
        self
    }
    /// Adds an AETH.
    #[inline]
    #[must_use]
    pub fn aeth(mut self, syndrome: Syndrome, msn: u32) -> Self {
        self.push(&Aeth::new(syndrome, msn));
        self
    }
    /// Adds an AtomicETH.
    #[inline]
    #[must_use]
    pub fn atomic_eth(mut self, va: u64, rkey: u32, swap_add: u64, compare: u64) -> Self {
        self.push(&AtomicEth::new(va, rkey, swap_add, compare));
        self
    }
    /// Adds an AtomicAckETH.
    #[inline]
    #[must_use]
    pub fn atomic_ack(mut self, original: u64) -> Self {
        self.push(&AtomicAckEth::new(original));
        self
    }
    /// Adds the headers of a rendezvous, which are payload to the transport.
    #[inline]
    #[must_use]
    pub fn tags(mut self, rendezvous: &Rendezvous) -> Self {
        self.push(rendezvous);
        self
    }
    /// Adds a DETH.
    #[inline]
    #[must_use]
    pub fn deth(mut self, qkey: u32, src_qp: Qpn) -> Self {
        self.push(&Deth::new(qkey, src_qp));
        self
    }
    /// Adds any header in place: where that depends on something, what the methods above return would be
    /// copied.
    #[inline]
    pub fn append<H: IntoBytes + Immutable>(&mut self, header: &H) {
        self.push(header);
    }
    /// Adds the 16 reserved bytes of a CNP.
    #[inline]
    #[must_use]
    pub fn reserved(mut self) -> Self {
        self.push(&[0u8; 16]);
        self
    }

    /// The headers.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&self.bytes)
    }

    /// No legal chain of headers outgrows the room; an illegal one is cut, never a panic.
    #[inline]
    fn push<H: IntoBytes + Immutable>(&mut self, header: &H) {
        let src = header.as_bytes();
        if let Some(dst) = self.bytes.get_mut(self.len..self.len + src.len()) {
            dst.copy_from_slice(src);
            self.len += src.len();
        }
    }
}

impl core::ops::Deref for HeaderBuf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        self.as_bytes()
    }
}
