//! A consistent read (the paper's 6.3): an object whose last eight bytes are the CRC64 of those before. The
//! kernel reads it until that is so, and answers with it; how often it tries is ours.

use starverbs_core::strom::{Code, Input, Kernel, KernelRun, Poll, RegionRange};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::crc64::crc64;

/// Most times that a request may have an object read.
pub const MOST_TRIES: u32 = 1024;

/// Parameters, 24 bytes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Params {
    /// First byte of the object
    pub object: U64,
    /// Key of its region
    pub rkey: U32,
    /// Its bytes, CRC included: 8 to 4096
    pub len: U32,
    /// Times that it is read at most, up to [`MOST_TRIES`]
    pub tries: U32,
    /// Reserved: 0
    pub reserved: U32,
}

/// The kernel. RETRIES: it was never consistent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Consistent;

/// Whether an object's last eight bytes are the CRC of those before.
pub fn is_consistent(object: &[u8]) -> bool {
    object.split_last_chunk().is_some_and(|(data, crc)| crc64(0, data) == u64::from_le_bytes(*crc))
}

impl Consistent {
    fn fetch(run: &mut KernelRun, params: &Params) -> Result<(), Code> {
        if run.regs[0] >= u64::from(params.tries.get()) {
            return Err(Code::Retries);
        }
        run.regs[0] += 1;
        let (key, len, va) = (params.rkey.get(), params.len.get(), params.object.get());
        if run.read(RegionRange { key, len, va }) { Ok(()) } else { Err(Code::BadParam) }
    }
}

impl Kernel for Consistent {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        let params = Params::read_from_bytes(run.bytes()).map_err(|_| Code::BadParam)?;
        if input != Input::Params || params.len.get() < 8 || params.tries.get() > MOST_TRIES {
            return Err(Code::BadParam);
        }
        Consistent::fetch(run, &params)
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        if is_consistent(run.read_data()) {
            run.reply_read();
            return Poll::Ready(Code::Ok);
        }
        let params = Params::read_from_bytes(run.bytes()).map_err(|_| Code::BadParam);
        let again = params.and_then(|params| Consistent::fetch(run, &params));
        again.map_or_else(Poll::Ready, |()| Poll::Pending)
    }

    fn name(&self) -> &'static str {
        "consistent"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::TestHost;

    #[test]
    fn an_object_is_read_until_its_crc_is_right() {
        let mut host = TestHost::new(0, 8192);
        for len in [8u32, 9, 64, 4096] {
            let data: Vec<u8> = (0..len - 8).map(|n| n as u8).collect();
            let object = [&data[..], &crc64(0, &data).to_le_bytes()].concat();
            let params = Params {
                object: 64.into(),
                rkey: TestHost::KEY.into(),
                len: len.into(),
                tries: 3.into(),
                ..Params::default()
            };
            host.put(64, &object);
            assert_eq!(host.call(&mut Consistent, params.as_bytes()), (Code::Ok, object.clone()));
            /* torn at the first two reads, whole at the third */
            let mut torn = object.clone();
            torn[0] ^= 1;
            let mut reads = 0;
            host.before_read = Some(Box::new(move |memory| {
                reads += 1;
                let now = if reads < 3 { &torn } else { &object };
                memory[64..64 + now.len()].copy_from_slice(now);
            }));
            assert_eq!(host.call(&mut Consistent, params.as_bytes()).0, Code::Ok);
            let once = Params { tries: 2.into(), ..params };
            host.before_read = Some(Box::new(|memory| memory[64] ^= 1));
            let outcome = host.call(&mut Consistent, once.as_bytes()).0;
            assert!(matches!(outcome, Code::Retries | Code::Ok));
            host.before_read = Some(Box::new(|memory| memory[64] = memory[64].wrapping_add(1) | 1));
            host.put(64, &[0xff; 64]);
            assert_eq!(host.call(&mut Consistent, once.as_bytes()), (Code::Retries, vec![]));
            host.before_read = None;
        }
        let params =
            Params { rkey: TestHost::KEY.into(), len: 8.into(), tries: 1.into(), ..Params::default() };
        for bad in [7u32, 4097] {
            let bad = Params { len: bad.into(), ..params };
            assert_eq!(host.call(&mut Consistent, bad.as_bytes()).0, Code::BadParam);
        }
        assert_eq!(host.call(&mut Consistent, &params.as_bytes()[1..]).0, Code::BadParam);
    }
}
