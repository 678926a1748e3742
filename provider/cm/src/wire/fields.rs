//! Positions of the fields of each message: the tables of IBTA 12.6 and 12.11. Bytes are counted behind the
//! common header.

use super::mad::Field;

/// Kind of message: its attribute ID (IBTA 12.6.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Attribute {
    /// Request for communication
    Req = 0x10,
    /// Message receipt acknowledgement
    Mra = 0x11,
    /// Rejection of a request or reply
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

/// REQ: request for communication (IBTA 12.6.5).
pub mod req {
    use super::Field;

    /// Service ID
    pub const SERVICE_ID: Field = Field::new(8, 64);
    /// GUID of the sender's channel adapter
    pub const LOCAL_CA_GUID: Field = Field::new(16, 64);
    /// ECE's vendor, in what the specification reserves
    pub const VENDOR_ID: Field = Field::new(24, 24);
    /// The sender's queue pair
    pub const LOCAL_QPN: Field = Field::new(32, 24);
    /// READs and atomics that the sender answers at a time
    pub const RESPONDER_RESOURCES: Field = Field::new(35, 8);
    /// READs and atomics that the sender would have under way
    pub const INITIATOR_DEPTH: Field = Field::new(39, 8);
    /// How long the receiver may take for a CM reply, an exponent
    pub const REMOTE_RESPONSE_TIMEOUT: Field = Field::new(43, 5);
    /// Transport of the queue pair
    pub const SERVICE_TYPE: Field = Field::within(43, 5, 2);
    /// End-to-end flow control
    pub const FLOW_CONTROL: Field = Field::within(43, 7, 1);
    /// PSN with which the receiver begins
    pub const STARTING_PSN: Field = Field::new(44, 24);
    /// How long the sender may take for a CM reply, an exponent
    pub const LOCAL_RESPONSE_TIMEOUT: Field = Field::new(47, 5);
    /// Transport retries of the receiver
    pub const RETRY_COUNT: Field = Field::within(47, 5, 3);
    /// Partition key
    pub const PKEY: Field = Field::new(48, 16);
    /// Proposed path MTU, a code
    pub const PATH_MTU: Field = Field::new(50, 4);
    /// RNR retries of the receiver
    pub const RNR_RETRY_COUNT: Field = Field::within(50, 5, 3);
    /// CM messages are repeated at most so often
    pub const MAX_CM_RETRIES: Field = Field::new(51, 4);
    /// The sender's queue pair has a shared receive queue
    pub const SRQ: Field = Field::within(51, 4, 1);
    /// Extended transport type (annex A14)
    pub const EXTENDED_TYPE: Field = Field::within(51, 5, 3);
    /// The sender's LID
    pub const LOCAL_LID: Field = Field::new(52, 16);
    /// The receiver's LID
    pub const REMOTE_LID: Field = Field::new(54, 16);
    /// The sender's GID: first byte
    pub const LOCAL_GID: usize = 56;
    /// The receiver's GID: first byte
    pub const REMOTE_GID: usize = 72;
    /// GRH flow label
    pub const FLOW_LABEL: Field = Field::new(88, 20);
    /// Static rate of the path
    pub const PACKET_RATE: Field = Field::within(91, 2, 6);
    /// GRH traffic class
    pub const TRAFFIC_CLASS: Field = Field::new(92, 8);
    /// GRH hop limit
    pub const HOP_LIMIT: Field = Field::new(93, 8);
    /// Service level
    pub const SL: Field = Field::new(94, 4);
    /// The path stays in the subnet
    pub const SUBNET_LOCAL: Field = Field::within(94, 4, 1);
    /// Local ACK timeout of the receiver, an exponent
    pub const ACK_TIMEOUT: Field = Field::new(95, 5);
    /// Private data: first byte
    pub const PRIVATE_DATA: usize = 140;
}

/// MRA: message receipt acknowledgement (IBTA 12.6.6).
pub mod mra {
    use super::Field;

    /// Which message is answered
    pub const MESSAGE: Field = Field::new(8, 2);
    /// How long the sender needs before its reply, an exponent
    pub const SERVICE_TIMEOUT: Field = Field::new(9, 5);
}

/// REJ: reject (IBTA 12.6.7).
pub mod rej {
    use super::Field;

    /// Which message is answered
    pub const MESSAGE: Field = Field::new(8, 2);
    /// Bytes of additional information
    pub const INFO_LENGTH: Field = Field::new(9, 7);
    /// Why: see [`crate::reason`]
    pub const REASON: Field = Field::new(10, 16);
    /// The first eight bytes of the additional information: with reason 4 the sender's CA GUID
    pub const INFO: Field = Field::new(12, 64);
    /// Private data: first byte
    pub const PRIVATE_DATA: usize = 84;
}

/// REP: reply to a request for communication (IBTA 12.6.8).
pub mod rep {
    use super::Field;

    /// The sender's queue pair
    pub const LOCAL_QPN: Field = Field::new(12, 24);
    /// ECE's vendor, a byte at a time, in what the specification reserves
    pub const VENDOR_ID: [Field; 3] = [Field::new(15, 8), Field::new(19, 8), Field::new(23, 8)];
    /// PSN with which the receiver begins
    pub const STARTING_PSN: Field = Field::new(20, 24);
    /// READs and atomics that the sender answers at a time
    pub const RESPONDER_RESOURCES: Field = Field::new(24, 8);
    /// READs and atomics that the sender would have under way
    pub const INITIATOR_DEPTH: Field = Field::new(25, 8);
    /// How long the sender takes for an ACK, an exponent
    pub const TARGET_ACK_DELAY: Field = Field::new(26, 5);
    /// Answer to the alternate path
    pub const FAILOVER: Field = Field::within(26, 5, 2);
    /// End-to-end flow control
    pub const FLOW_CONTROL: Field = Field::within(26, 7, 1);
    /// RNR retries of the receiver
    pub const RNR_RETRY_COUNT: Field = Field::new(27, 3);
    /// The sender's queue pair has a shared receive queue
    pub const SRQ: Field = Field::within(27, 3, 1);
    /// GUID of the sender's channel adapter
    pub const LOCAL_CA_GUID: Field = Field::new(28, 64);
    /// Private data: first byte
    pub const PRIVATE_DATA: usize = 36;
}

/// DREQ: request for release (IBTA 12.6.10).
pub mod dreq {
    use super::Field;

    /// The receiver's queue pair
    pub const REMOTE_QPN: Field = Field::new(8, 24);
}

/// APR: alternate path response (IBTA 12.8.2).
pub mod apr {
    use super::Field;

    /// Status of the answer (IBTA 12.8.2.1)
    pub const STATUS: Field = Field::new(9, 8);
}

/// SIDR_REQ: service ID resolution request (IBTA 12.11.1).
pub mod sidr_req {
    use super::Field;

    /// Names the request
    pub const REQUEST_ID: Field = Field::new(0, 32);
    /// Partition key
    pub const PKEY: Field = Field::new(4, 16);
    /// Service ID
    pub const SERVICE_ID: Field = Field::new(8, 64);
    /// Private data: first byte
    pub const PRIVATE_DATA: usize = 16;
}

/// SIDR_REP: service ID resolution response (IBTA 12.11.2).
pub mod sidr_rep {
    use super::Field;

    /// Names the request
    pub const REQUEST_ID: Field = Field::new(0, 32);
    /// See [`crate::sidr`]
    pub const STATUS: Field = Field::new(4, 8);
    /// ECE's vendor, upper part, in what the specification reserves
    pub const VENDOR_HIGH: Field = Field::new(6, 16);
    /// The queue pair asked for
    pub const QPN: Field = Field::new(8, 24);
    /// ECE's vendor, lower part, in what the specification reserves
    pub const VENDOR_LOW: Field = Field::new(11, 8);
    /// Service ID
    pub const SERVICE_ID: Field = Field::new(12, 64);
    /// Its Q_Key
    pub const QKEY: Field = Field::new(20, 32);
    /// Private data: first byte
    pub const PRIVATE_DATA: usize = 96;
}
