//! GET of a key-value store: one hash table entry, then the value (the paper's listings 2 to 4).
//!
//! The paper leaves misses and chaining out. Here an entry has three buckets and the index of the next
//! entry of its chain; a bucket with a null pointer is empty, whatever its key, and index 0 ends a chain.

use starverbs_core::strom::{Code, Input, Kernel, KernelRun, Poll, RegionRange};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Most entries that a request may look at.
pub const MOST_HOPS: u32 = 1024;
/// Bytes of an [`HashEntry`].
const ENTRY: u32 = 64;

/// A key and where its value lies.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Bucket {
    /// The key
    pub key: U64,
    /// First byte of the value; 0: the bucket is empty
    pub value: U64,
    /// Bytes of the value
    pub len: U32,
}

/// An entry of the hash table, 64 bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct HashEntry {
    /// Three keys
    pub buckets: [Bucket; 3],
    /// Index in the table of the next entry of the chain; 0: none
    pub next: U32,
}

/// Parameters, 32 bytes: what the paper's bus carries.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Params {
    /// First byte of the table
    pub table: U64,
    /// The key to look up
    pub key: U64,
    /// Index of the first entry to look at
    pub index: U32,
    /// Key of the region with the table
    pub table_key: U32,
    /// Key of the region with the values
    pub value_key: U32,
    /// Most entries to look at, up to [`MOST_HOPS`]
    pub hops: U32,
}

/// The kernel. NOT_FOUND: no bucket of the chain has the key; RETRIES: the chain is longer than `hops`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Get;

impl Get {
    /// Queues a read of entry `index`, if another hop is left.
    fn fetch(run: &mut KernelRun, index: u32) -> Result<(), Code> {
        let params = Params::read_from_bytes(run.bytes()).map_err(|_| Code::BadParam)?;
        if run.regs[0] >= u64::from(params.hops.get()) {
            return Err(Code::Retries);
        }
        run.regs[0] += 1;
        let va = params.table.get().wrapping_add(u64::from(index) * u64::from(ENTRY));
        let queued = run.read(RegionRange { key: params.table_key.get(), len: ENTRY, va });
        if queued { Ok(()) } else { Err(Code::Overflow) }
    }
}

impl Kernel for Get {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        let params = Params::read_from_bytes(run.bytes()).map_err(|_| Code::BadParam)?;
        if input != Input::Params || params.hops.get() > MOST_HOPS {
            return Err(Code::BadParam);
        }
        Get::fetch(run, params.index.get())
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        let (Ok(params), Ok(entry)) =
            (Params::read_from_bytes(run.bytes()), HashEntry::read_from_bytes(run.read_data()))
        else {
            return Poll::Ready(Code::BadParam);
        };
        let found = entry.buckets.iter().find(|bucket| bucket.value != 0 && bucket.key == params.key);
        if let Some(bucket) = found {
            let (va, len) = (bucket.value.get(), bucket.len.get());
            run.reply_from(RegionRange { key: params.value_key.get(), len, va });
            return Poll::Ready(Code::Ok);
        }
        match entry.next.get() {
            0 => Poll::Ready(Code::NotFound),
            next => Get::fetch(run, next).map_or_else(Poll::Ready, |()| Poll::Pending),
        }
    }

    fn name(&self) -> &'static str {
        "get"
    }
}
