//! Headers of messages with tags, which are payload to the transport (rdma-core, `infiniband/tm_types.h`).

use zerocopy::byteorder::network_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Most bytes of a rendezvous request: it is one packet on any path.
pub const MAX_RENDEZVOUS: u32 = 256;
/// Bytes of a [`Tmh`].
pub const TMH_LEN: usize = size_of::<Tmh>();

/// What a message is. Values as `enum ibv_tmh_op`; 0 is a message without a tag.
const RENDEZVOUS: u8 = 1;
const FIN: u8 = 2;
const EAGER: u8 = 3;

/// Tag matching header, 16 bytes: `struct ibv_tmh`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Tmh {
    opcode: u8,
    reserved: [u8; 3],
    app_ctx: U32,
    tag: U64,
}

/// The two headers of a rendezvous, 32 bytes: `struct ibv_tmh` and `struct ibv_rvh`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Rendezvous {
    tmh: Tmh,
    va: U64,
    rkey: U32,
    len: U32,
}

/// What begins a message to an SRQ that matches tags.
#[derive(Clone, Copy, Debug)]
pub enum Tagged<'a> {
    /// The data, behind the header
    Eager(Tmh, &'a [u8]),
    /// Where the data is
    Rendezvous(Rendezvous),
    /// Nothing that could match
    Untagged,
}

impl Tagged<'_> {
    /// From the first packet of a message.
    pub fn parse(payload: &[u8]) -> Tagged<'_> {
        let Ok((tmh, data)) = Tmh::read_from_prefix(payload) else { return Tagged::Untagged };
        match tmh.opcode {
            EAGER => Tagged::Eager(tmh, data),
            RENDEZVOUS => Rendezvous::read_from_prefix(payload)
                .map_or(Tagged::Untagged, |(rendezvous, _)| Tagged::Rendezvous(rendezvous)),
            _ => Tagged::Untagged,
        }
    }
}

impl Tmh {
    /// The tag
    pub fn tag(&self) -> u64 {
        self.tag.get()
    }
    /// The sender's word for the program
    pub fn app_ctx(&self) -> u32 {
        self.app_ctx.get()
    }
}

impl Rendezvous {
    /// A rendezvous for `len` bytes at `va` under `rkey`, without its operation.
    pub fn new(tag: u64, app_ctx: u32, va: u64, rkey: u32, len: u32) -> Self {
        let tmh = Tmh { app_ctx: U32::new(app_ctx), tag: U64::new(tag), ..Tmh::default() };
        Rendezvous { tmh, va: U64::new(va), rkey: U32::new(rkey), len: U32::new(len) }
    }
    /// The tag matching header
    pub fn tmh(&self) -> &Tmh {
        &self.tmh
    }
    /// Where the data is, at the sender
    pub fn va(&self) -> u64 {
        self.va.get()
    }
    /// Key of it
    pub fn rkey(&self) -> u32 {
        self.rkey.get()
    }
    /// Length of the message, bytes
    pub fn len(&self) -> u32 {
        self.len.get()
    }
    /// Whether there is no data
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// The same headers as the word that the data is fetched.
    #[must_use]
    pub fn fin(self) -> Self {
        Rendezvous { tmh: Tmh { opcode: FIN, ..self.tmh }, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_distinguished() {
        let mut bytes = [0u8; 40];
        bytes[7] = 9;
        bytes[15] = 5;
        bytes[23] = 0x40;
        bytes[27] = 7;
        bytes[31] = 100;
        for (opcode, len) in [(0, 40), (2, 40), (3, 15), (1, 31), (4, 40)] {
            bytes[0] = opcode;
            assert!(matches!(Tagged::parse(&bytes[..len]), Tagged::Untagged), "{opcode}");
        }
        bytes[0] = EAGER;
        let Tagged::Eager(tmh, data) = Tagged::parse(&bytes) else { panic!("it is eager") };
        assert_eq!((tmh.tag(), tmh.app_ctx(), data.len()), (5, 9, 24));
        bytes[0] = RENDEZVOUS;
        let Tagged::Rendezvous(r) = Tagged::parse(&bytes) else { panic!("it is a rendezvous") };
        assert_eq!((r.tmh().tag(), r.va(), r.rkey(), r.len()), (5, 0x40, 7, 100));
        bytes[0] = FIN;
        assert_eq!(r.fin().as_bytes(), &bytes[..32]);
    }
}
