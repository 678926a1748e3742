//! Headers of an outgoing packet, put together on the stack.

use zerocopy::{Immutable, IntoBytes};

use super::headers::{Aeth, AtomicAckEth, AtomicEth, Bth, Deth, PKEY_DEFAULT, Reth, Syndrome};
use crate::types::{Psn, Qpn};

/// Room for the longest headers (BTH and AtomicETH are 40 bytes).
const ROOM: usize = 64;

/// BTH and extension headers, in the order in which the methods were called.
#[derive(Clone, Copy, Debug)]
pub struct HeaderBuf {
    bytes: [u8; ROOM],
    len: usize,
}

impl HeaderBuf {
    /// Nothing yet.
    #[inline]
    pub const fn new() -> Self {
        HeaderBuf { bytes: [0; ROOM], len: 0 }
    }
    /// Begins with a BTH with the default P_Key. `pad` is what the payload lacks to a multiple of
    /// four, 0 to 3.
    #[inline]
    pub fn bth(&mut self, opcode: u8, qpn: Qpn, psn: Psn, ack_req: bool, solicited: bool, pad: u8) {
        self.push(&Bth::new(opcode, qpn, psn, ack_req, solicited, pad, PKEY_DEFAULT));
    }
    /// Adds a RETH.
    #[inline]
    pub fn reth(&mut self, va: u64, rkey: u32, dma_len: u32) {
        self.push(&Reth::new(va, rkey, dma_len));
    }
    /// Adds immediate data, given in network order.
    #[inline]
    pub fn imm(&mut self, imm: u32) {
        self.push(&imm.to_ne_bytes());
    }
    /// Adds an IETH.
    #[inline]
    pub fn ieth(&mut self, rkey: u32) {
        self.push(&rkey.to_be_bytes());
    }
    /// Adds an AETH.
    #[inline]
    pub fn aeth(&mut self, syndrome: Syndrome, msn: u32) {
        self.push(&Aeth::new(syndrome, msn));
    }
    /// Adds an AtomicETH.
    #[inline]
    pub fn atomic_eth(&mut self, va: u64, rkey: u32, swap_add: u64, compare: u64) {
        self.push(&AtomicEth::new(va, rkey, swap_add, compare));
    }
    /// Adds an AtomicAckETH.
    #[inline]
    pub fn atomic_ack(&mut self, original: u64) {
        self.push(&AtomicAckEth::new(original));
    }
    /// Adds a DETH.
    #[inline]
    pub fn deth(&mut self, qkey: u32, src_qp: Qpn) {
        self.push(&Deth::new(qkey, src_qp));
    }
    /// Adds the 16 reserved bytes of a CNP.
    #[inline]
    pub fn reserved(&mut self) {
        self.push(&[0u8; 16]);
    }

    /// The headers.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
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

impl Default for HeaderBuf {
    fn default() -> Self {
        HeaderBuf::new()
    }
}

impl core::ops::Deref for HeaderBuf {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        self.as_slice()
    }
}
