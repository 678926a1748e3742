//! Messages: a head of 16 bytes, and a body of fixed structs, which stand in the byte order of the host.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the protocol: 0.0.
pub const MAJOR: u16 = 0;
/// Version of the protocol: 0.0.
pub const MINOR: u16 = 0;
/// Bytes of a head.
pub const HEAD_BYTES: usize = size_of::<Head>();
/// Bytes of a message at most, head included.
pub const MAX_BYTES: usize = 8192;
/// Descriptors of a message at most.
pub const MAX_FDS: usize = 8;
/// Bytes of one access to a region at most.
pub const MAX_ACCESS: usize = 4096;
/// What each side says of itself behind the version.
pub const CAPABILITIES: &str =
    "{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":4096,\"max_dma_maps\":512}}";

/// Regions of a PCI device: six BARs, ROM, configuration space, VGA.
pub const PCI_REGIONS: u32 = 9;
/// Configuration space among them.
pub const PCI_CONFIG: u32 = 7;
/// Kinds of interrupts of a PCI device: INTx, MSI, MSI-X, error, request.
pub const PCI_IRQS: u32 = 5;
/// MSI-X among them.
pub const IRQ_MSIX: u32 = 2;

/// `Head::flags`: a reply.
pub const REPLY: u32 = 1;
/// `Head::flags`: the kind of a message.
pub const KIND: u32 = 0xf;
/// `Head::flags`: no reply is wanted.
pub const NO_REPLY: u32 = 1 << 4;
/// `Head::flags`: a reply of an error, whose errno is in the head.
pub const ERROR: u32 = 1 << 5;

/// `DmaMap::flags`: the device may read.
pub const DMA_READ: u32 = 1;
/// `DmaMap::flags`: the device may write.
pub const DMA_WRITE: u32 = 2;
/// `DmaUnmap::flags`: all maps, wherever they are.
pub const DMA_UNMAP_ALL: u32 = 2;
/// `RegionInfo::flags`: it can be read, written, mapped.
pub const REGION_READ: u32 = 1;
/// See [`REGION_READ`].
pub const REGION_WRITE: u32 = 2;
/// See [`REGION_READ`].
pub const REGION_MMAP: u32 = 4;
/// `RegionInfo::flags`: capabilities stand behind it, such as [`SparseMmap`].
pub const REGION_CAPS: u32 = 8;
/// `DeviceInfo::flags`: it can be reset, and is a PCI device.
pub const DEVICE_RESET_PCI: u32 = 3;
/// `IrqInfo::flags`: it signals eventfds.
pub const IRQ_EVENTFD: u32 = 1;
/// `SetIrqs::flags`: no data.
pub const IRQ_DATA_NONE: u32 = 1;
/// `SetIrqs::flags`: the data are descriptors.
pub const IRQ_DATA_EVENTFD: u32 = 4;
/// `SetIrqs::flags`: what to signal.
pub const IRQ_ACTION_TRIGGER: u32 = 32;

/// What a message asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum MessageOp {
    /// Which version
    Version = 1,
    /// Memory that the device may use
    DmaMap = 2,
    /// Memory that it may no longer use
    DmaUnmap = 3,
    /// How many regions and interrupts
    DeviceInfo = 4,
    /// What a region is
    RegionInfo = 5,
    /// What an interrupt is
    IrqInfo = 7,
    /// What to signal
    SetIrqs = 8,
    /// Reads a region
    RegionRead = 9,
    /// Writes it
    RegionWrite = 10,
    /// The device forgets everything
    DeviceReset = 13,
}

impl MessageOp {
    /// From the number on the wire.
    pub fn from_code(code: u16) -> Option<MessageOp> {
        const ALL: [MessageOp; 10] = [
            MessageOp::Version,
            MessageOp::DmaMap,
            MessageOp::DmaUnmap,
            MessageOp::DeviceInfo,
            MessageOp::RegionInfo,
            MessageOp::IrqInfo,
            MessageOp::SetIrqs,
            MessageOp::RegionRead,
            MessageOp::RegionWrite,
            MessageOp::DeviceReset,
        ];
        ALL.into_iter().find(|op| *op as u16 == code)
    }
}

macro_rules! plain {
    ($($(#[doc = $about:literal])+ $name:ident {
        $($(#[doc = $doc:literal])+ $field:ident: $type:ty,)+
    })+) => {
        $($(#[doc = $about])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub struct $name { $($(#[doc = $doc])+ pub $field: $type,)+ })+
    };
}

plain! {
    /// The head of a message
    Head {
        /// Names it to who sent it
        id: u16,
        /// Which message it is, an [`MessageOp`]
        op: u16,
        /// Bytes of the message, this head included
        size: u32,
        /// See [`REPLY`]
        flags: u32,
        /// Errno of a reply
        error: u32,
    }
    /// [`MessageOp::Version`]; [`CAPABILITIES`] and a 0 stand behind it
    Version {
        /// Major version, [`MAJOR`]
        major: u16,
        /// Minor version, [`MINOR`]
        minor: u16,
    }
    /// Body of [`MessageOp::DmaMap`]
    DmaMap {
        /// Bytes of this
        argsz: u32,
        /// See [`DMA_READ`]
        flags: u32,
        /// Where it begins in the file of the descriptor
        offset: u64,
        /// By which the device knows it
        address: u64,
        /// Size in bytes
        size: u64,
    }
    /// Body of [`MessageOp::DmaUnmap`]
    DmaUnmap {
        /// Bytes of this
        argsz: u32,
        /// 0, or [`DMA_UNMAP_ALL`]
        flags: u32,
        /// By which the device knew it
        address: u64,
        /// Size in bytes
        size: u64,
    }
    /// Body of [`MessageOp::DeviceInfo`]
    DeviceInfo {
        /// Bytes of this
        argsz: u32,
        /// Bits: [`DEVICE_RESET_PCI`]
        flags: u32,
        /// Count of regions
        regions: u32,
        /// Kinds of interrupts
        irqs: u32,
    }
    /// Body of [`MessageOp::RegionInfo`]
    Region {
        /// Bytes of this
        argsz: u32,
        /// See [`REGION_READ`]
        flags: u32,
        /// Which region
        index: u32,
        /// 0: no capabilities
        cap_offset: u32,
        /// Bytes of the region
        size: u64,
        /// Where it begins in the file of the descriptor
        offset: u64,
    }
    /// A capability of a [`Region`]: what of it can be mapped, in one piece
    SparseMmap {
        /// Which capability: 1, mappable areas
        id: u16,
        /// Version of the capability: 1
        version: u16,
        /// Where the next capability stands; 0: there is none
        next: u32,
        /// Pieces: 1
        areas: u32,
        /// Reserved: 0
        reserved: u32,
        /// Where in the region it begins
        offset: u64,
        /// Size in bytes
        size: u64,
    }
    /// Body of [`MessageOp::IrqInfo`]
    IrqInfo {
        /// Bytes of this
        argsz: u32,
        /// Bits: [`IRQ_EVENTFD`]
        flags: u32,
        /// Which kind of interrupt
        index: u32,
        /// Count of vectors
        count: u32,
    }
    /// Body of [`MessageOp::SetIrqs`]
    SetIrqs {
        /// Bytes of this
        argsz: u32,
        /// See [`IRQ_DATA_NONE`]
        flags: u32,
        /// Which kind of interrupt
        index: u32,
        /// First vector
        start: u32,
        /// Count of vectors
        count: u32,
    }
    /// [`MessageOp::RegionRead`] and [`MessageOp::RegionWrite`]; the bytes stand behind it
    Access {
        /// Where in the region
        offset: u64,
        /// Which region
        region: u32,
        /// Count of bytes
        count: u32,
    }
}

impl SparseMmap {
    /// One piece, and no other capability.
    pub fn of(offset: u64, size: u64) -> SparseMmap {
        SparseMmap { id: 1, version: 1, next: 0, areas: 1, reserved: 0, offset, size }
    }
}

/// The struct that a body begins with, and what stands behind it. `None`: it is shorter.
pub fn parse<T: FromBytes + KnownLayout + Immutable>(body: &[u8]) -> Option<(T, &[u8])> {
    T::read_from_prefix(body).ok()
}
