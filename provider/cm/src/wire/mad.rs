//! One management datagram, and its fields by place and width.

use super::fields::{self, Attribute};

/// Bytes of a management datagram.
pub const MAD_LEN: usize = 256;
/// Q_Key of queue pair 1 (IBTA 10.2.5).
pub const QKEY: u32 = 0x8001_0000;
/// Bytes of the common header.
const HEADER: usize = 24;
/// Position of a datagram's [`Attribute`], two bytes.
pub const ATTRIBUTE_AT: usize = 16;
/// Where a datagram has the ID that [`Destination::Id`] is, four bytes; 0 in what is for a service.
pub const REMOTE_ID_AT: usize = HEADER + 4;
/// The same, of a SIDR_REP.
pub const REQUEST_ID_AT: usize = HEADER;
/// Base version, class (communication management), class version, method (Send): IBTA 13.4.2, 12.6.1.
const HEAD: [u8; 4] = [1, 7, 2, 3];

/// A field of a message: bits are counted from the most significant one of the first byte behind the common
/// header.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    at: usize,
    bits: usize,
}

impl Field {
    /// `bits` (at most 64) from byte `byte` of the class's part on.
    pub const fn new(byte: usize, bits: usize) -> Field {
        Field::within(byte, 0, bits)
    }

    /// The same, from bit `bit` of that byte on.
    pub const fn within(byte: usize, bit: usize, bits: usize) -> Field {
        let at = (HEADER + byte) * 8 + bit;
        assert!(bits <= 64 && at + bits <= MAD_LEN * 8, "a field lies in the message");
        Field { at, bits }
    }
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mad([u8; MAD_LEN]);

impl Mad {
    /// An empty message.
    pub fn new(attribute: Attribute, transaction: u64) -> Mad {
        let mut mad = Mad([0; MAD_LEN]);
        mad.0[..4].copy_from_slice(&HEAD);
        mad.0[8..16].copy_from_slice(&transaction.to_be_bytes());
        mad.0[ATTRIBUTE_AT..ATTRIBUTE_AT + 2].copy_from_slice(&(attribute as u16).to_be_bytes());
        mad
    }

    /// Reads a datagram; `None`: it is none of this class and version, or of the wrong length.
    pub fn parse(bytes: &[u8]) -> Option<Mad> {
        let mad = Mad(*<&[u8; MAD_LEN]>::try_from(bytes).ok()?);
        (mad.0[..4] == HEAD).then_some(mad)
    }

    /// What to send.
    pub fn bytes(&self) -> &[u8; MAD_LEN] {
        &self.0
    }

    /// What it is; `None`: of no kind that is known.
    pub fn attribute(&self) -> Option<Attribute> {
        Attribute::from_code(u16::from_be_bytes([self.0[ATTRIBUTE_AT], self.0[ATTRIBUTE_AT + 1]]))
    }

    /// Transaction ID.
    pub fn transaction(&self) -> u64 {
        let mut id = [0; 8];
        id.copy_from_slice(&self.0[8..16]);
        u64::from_be_bytes(id)
    }

    /// Attribute modifier, in which REQ, REP and SIDR_REP carry ECE options.
    pub fn modifier(&self) -> u32 {
        u32::from_be_bytes([self.0[20], self.0[21], self.0[22], self.0[23]])
    }

    /// Sets the attribute modifier.
    pub fn set_modifier(&mut self, value: u32) {
        self.0[20..24].copy_from_slice(&value.to_be_bytes());
    }

    /// A field's value.
    pub fn get(&self, field: Field) -> u64 {
        let bit = |at: usize| u64::from(self.0[at / 8] >> (7 - at % 8) & 1);
        (field.at..field.at + field.bits).fold(0, |value, at| value << 1 | bit(at))
    }

    /// Sets a field to the low bits of `value`.
    pub fn set(&mut self, field: Field, value: u64) {
        for (place, at) in (field.at..field.at + field.bits).rev().enumerate() {
            let mask = 1 << (7 - at % 8);
            if value >> place & 1 == 1 { self.0[at / 8] |= mask } else { self.0[at / 8] &= !mask }
        }
    }

    /// A 32-bit field, or one of fewer bits.
    pub fn get32(&self, field: Field) -> u32 {
        self.get(field) as u32
    }

    /// A field of at most eight bits.
    pub fn get8(&self, field: Field) -> u8 {
        self.get(field) as u8
    }

    /// `N` bytes from byte `byte` of the class's part on.
    pub fn array<const N: usize>(&self, byte: usize) -> [u8; N] {
        let mut out = [0; N];
        if let Some(from) = self.0.get(HEADER + byte..HEADER + byte + N) {
            out.copy_from_slice(from);
        }
        out
    }

    /// All bytes from byte `byte` of the class's part on: private data ends each message but REJ's and such
    /// with more room.
    pub fn tail(&self, byte: usize) -> &[u8] {
        self.0.get(HEADER + byte..).unwrap_or(&[])
    }

    /// Puts bytes at byte `byte` of the class's part; what does not fit is cut.
    pub fn put(&mut self, byte: usize, bytes: &[u8]) {
        for (to, from) in self.0.iter_mut().skip(HEADER + byte).zip(bytes) {
            *to = *from;
        }
    }
}

/// The communication (or request) ID that the sender of a message gives as its own: 0 in a REJ of who had
/// none yet, and in a SIDR_REP, which gives its peer's. `None`: it is no message of a connection manager.
pub fn sender_id(bytes: &[u8]) -> Option<u32> {
    let mad = Mad::parse(bytes)?;
    Some(match mad.attribute()? {
        Attribute::SidrReq => mad.get32(fields::sidr_req::REQUEST_ID),
        Attribute::SidrRep => 0,
        _ => mad.get32(fields::LOCAL_ID),
    })
}

/// For whom of a host's processes a message is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Destination {
    /// Whoever gave out this communication (or request) ID
    Id(u32),
    /// Whoever listens for this service ID
    Service(u64),
}

impl Destination {
    /// Reads it from a datagram; `None`: it is for nobody in particular.
    pub fn of(bytes: &[u8]) -> Option<Destination> {
        let mad = Mad::parse(bytes)?;
        match mad.attribute()? {
            Attribute::Req => Some(Destination::Service(mad.get(fields::req::SERVICE_ID))),
            Attribute::SidrReq => Some(Destination::Service(mad.get(fields::sidr_req::SERVICE_ID))),
            Attribute::SidrRep => Some(Destination::Id(mad.get32(fields::sidr_rep::REQUEST_ID))),
            _ => Some(Destination::Id(mad.get32(fields::REMOTE_ID))).filter(|id| *id != Destination::Id(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_tables_have_them() {
        let mut mad = Mad::new(Attribute::Req, 7);
        mad.set(Field::within(43, 5, 2), 0b11);
        assert_eq!(mad.bytes()[HEADER + 43], 0b0000_0110);
        mad.set(Field::new(43, 5), 0b10101);
        assert_eq!(mad.bytes()[HEADER + 43], 0b1010_1110);
        mad.set(Field::new(32, 24), 0x1234_5678);
        assert_eq!(mad.bytes()[HEADER + 32..HEADER + 36], [0x34, 0x56, 0x78, 0]);
        assert_eq!((mad.get(Field::new(32, 24)), mad.get8(Field::new(43, 5))), (0x34_5678, 0b10101));
        mad.set(Field::within(43, 5, 2), 0);
        assert_eq!(mad.bytes()[HEADER + 43], 0b1010_1000);
        mad.set(Field::new(8, 64), u64::MAX - 1);
        assert_eq!(mad.get(Field::new(8, 64)), u64::MAX - 1);
    }

    #[test]
    fn only_messages_of_the_class_are_read() {
        let mad = Mad::new(Attribute::Rtu, 1);
        assert_eq!(Mad::parse(mad.bytes()), Some(mad.clone()));
        assert_eq!(Mad::parse(&mad.bytes()[..255]), None);
        for at in 0..4 {
            let mut other = *mad.bytes();
            other[at] ^= 0x10;
            assert_eq!(Mad::parse(&other), None, "byte {at}");
        }
    }
}
