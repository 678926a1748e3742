//! Where the fields of each message stand: the tables of IBTA 12.6 and 12.11. Bytes are counted behind the
//! common header.

use super::mad::Field;

/// What a message is: its attribute ID (IBTA 12.6.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Attribute {
    /// Request for communication
    Req = 0x10,
    /// Message receipt acknowledgement
    Mra = 0x11,
    /// Reject
    Rej = 0x12,
    /// Reply to a request
    Rep = 0x13,
    /// Ready to use
    Rtu = 0x14,
    /// Request for release
    Dreq = 0x15,
    /// Reply to a request for release
    Drep = 0x16,
    /// Service ID resolution request
    SidrReq = 0x17,
    /// Service ID resolution response
    SidrRep = 0x18,
    /// Load alternate path
    Lap = 0x19,
    /// Alternate path response
    Apr = 0x1a,
}

impl Attribute {
    /// From its code.
    pub fn from_code(code: u16) -> Option<Self> {
        use Attribute::{Apr, Drep, Dreq, Lap, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq};
        [Req, Mra, Rej, Rep, Rtu, Dreq, Drep, SidrReq, SidrRep, Lap, Apr]
            .into_iter()
            .find(|a| *a as u16 == code)
    }
}

/// Sender's communication ID, of all but SIDR.
pub const LOCAL_ID: Field = Field::new(0, 32);
/// Receiver's communication ID, of all but REQ and SIDR.
pub const REMOTE_ID: Field = Field::new(4, 32);

#[allow(missing_docs)]
pub mod req {
    use super::Field;
    pub const SERVICE_ID: Field = Field::new(8, 64);
    pub const LOCAL_CA_GUID: Field = Field::new(16, 64);
    /// ECE's vendor, in what the specification reserves
    pub const VENDOR_ID: Field = Field::new(24, 24);
    pub const LOCAL_QPN: Field = Field::new(32, 24);
    pub const RESPONDER_RESOURCES: Field = Field::new(35, 8);
    pub const INITIATOR_DEPTH: Field = Field::new(39, 8);
    pub const REMOTE_RESPONSE_TIMEOUT: Field = Field::new(43, 5);
    pub const SERVICE_TYPE: Field = Field::within(43, 5, 2);
    pub const FLOW_CONTROL: Field = Field::within(43, 7, 1);
    pub const STARTING_PSN: Field = Field::new(44, 24);
    pub const LOCAL_RESPONSE_TIMEOUT: Field = Field::new(47, 5);
    pub const RETRY_COUNT: Field = Field::within(47, 5, 3);
    pub const PKEY: Field = Field::new(48, 16);
    pub const PATH_MTU: Field = Field::new(50, 4);
    pub const RNR_RETRY_COUNT: Field = Field::within(50, 5, 3);
    pub const MAX_CM_RETRIES: Field = Field::new(51, 4);
    pub const SRQ: Field = Field::within(51, 4, 1);
    /// Annex A14
    pub const EXTENDED_TYPE: Field = Field::within(51, 5, 3);
    pub const LOCAL_LID: Field = Field::new(52, 16);
    pub const REMOTE_LID: Field = Field::new(54, 16);
    /// Bytes
    pub const LOCAL_GID: usize = 56;
    /// Bytes
    pub const REMOTE_GID: usize = 72;
    pub const FLOW_LABEL: Field = Field::new(88, 20);
    pub const PACKET_RATE: Field = Field::within(91, 2, 6);
    pub const TRAFFIC_CLASS: Field = Field::new(92, 8);
    pub const HOP_LIMIT: Field = Field::new(93, 8);
    pub const SL: Field = Field::new(94, 4);
    pub const SUBNET_LOCAL: Field = Field::within(94, 4, 1);
    pub const ACK_TIMEOUT: Field = Field::new(95, 5);
    /// Bytes
    pub const PRIVATE_DATA: usize = 140;
}

#[allow(missing_docs)]
pub mod mra {
    use super::Field;
    pub const MESSAGE: Field = Field::new(8, 2);
    pub const SERVICE_TIMEOUT: Field = Field::new(9, 5);
}

#[allow(missing_docs)]
pub mod rej {
    use super::Field;
    pub const MESSAGE: Field = Field::new(8, 2);
    pub const INFO_LENGTH: Field = Field::new(9, 7);
    pub const REASON: Field = Field::new(10, 16);
    /// The first eight bytes of the additional information: with reason 4 the sender's CA GUID
    pub const INFO: Field = Field::new(12, 64);
    /// Bytes
    pub const PRIVATE_DATA: usize = 84;
}

#[allow(missing_docs)]
pub mod rep {
    use super::Field;
    pub const LOCAL_QPN: Field = Field::new(12, 24);
    /// ECE's vendor, a byte at a time, in what the specification reserves
    pub const VENDOR_ID: [Field; 3] = [Field::new(15, 8), Field::new(19, 8), Field::new(23, 8)];
    pub const STARTING_PSN: Field = Field::new(20, 24);
    pub const RESPONDER_RESOURCES: Field = Field::new(24, 8);
    pub const INITIATOR_DEPTH: Field = Field::new(25, 8);
    pub const TARGET_ACK_DELAY: Field = Field::new(26, 5);
    pub const FAILOVER: Field = Field::within(26, 5, 2);
    pub const FLOW_CONTROL: Field = Field::within(26, 7, 1);
    pub const RNR_RETRY_COUNT: Field = Field::new(27, 3);
    pub const SRQ: Field = Field::within(27, 3, 1);
    pub const LOCAL_CA_GUID: Field = Field::new(28, 64);
    /// Bytes
    pub const PRIVATE_DATA: usize = 36;
}

#[allow(missing_docs)]
pub mod dreq {
    use super::Field;
    pub const REMOTE_QPN: Field = Field::new(8, 24);
}

#[allow(missing_docs)]
pub mod apr {
    use super::Field;
    pub const STATUS: Field = Field::new(9, 8);
}

#[allow(missing_docs)]
pub mod sidr_req {
    use super::Field;
    pub const REQUEST_ID: Field = Field::new(0, 32);
    pub const PKEY: Field = Field::new(4, 16);
    pub const SERVICE_ID: Field = Field::new(8, 64);
    /// Bytes
    pub const PRIVATE_DATA: usize = 16;
}

#[allow(missing_docs)]
pub mod sidr_rep {
    use super::Field;
    pub const REQUEST_ID: Field = Field::new(0, 32);
    pub const STATUS: Field = Field::new(4, 8);
    /// ECE's vendor, in two parts, in what the specification reserves
    pub const VENDOR_HIGH: Field = Field::new(6, 16);
    pub const QPN: Field = Field::new(8, 24);
    pub const VENDOR_LOW: Field = Field::new(11, 8);
    pub const SERVICE_ID: Field = Field::new(12, 64);
    pub const QKEY: Field = Field::new(20, 32);
    /// Bytes
    pub const PRIVATE_DATA: usize = 96;
}
