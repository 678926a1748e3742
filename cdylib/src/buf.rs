//! Memory verbs of libibverbs after Debian 12's: ibv_reg_mr_ex(3), which takes every kind of region, and
//! ibv_alloc_buf(3), buffers that the library allocates as suits the device. Any page suits this one.
//!
//! Owns the buffer's handle and the layout of `struct ibv_mr_init_attr`, which `starverbs-abi` does not have.
//! It must not know how a region is made.

use crate::edge::{self, Errno};
use crate::handle::given;
use crate::memory;
use crate::pd_mr;
use core::ffi::{c_int, c_uint, c_void};
use core::ptr::null_mut;
use memmap2::{MmapMut, MmapRaw};
use starverbs_abi as abi;

const MASK_IOVA: u64 = 1 << 0;
const MASK_ADDR: u64 = 1 << 1;
const MASK_FD: u64 = 1 << 2;
const MASK_FD_OFFSET: u64 = 1 << 3;
const MASK_BUF: u64 = 1 << 5;
/// What is offered. DMA handles (`1 << 4`) are hints for a PCIe bus, and there is none.
const MASKS: u64 = MASK_IOVA | MASK_ADDR | MASK_FD | MASK_FD_OFFSET | MASK_BUF;

/// `struct ibv_mr_init_attr`. Programs of its first release end it before `buf`: a field is read only if
/// `comp_mask` names it.
#[repr(C)]
pub(crate) struct MrInitAttr {
    length: usize,
    access: c_int,
    comp_mask: u64,
    iova: u64,
    addr: *mut c_void,
    fd: c_int,
    fd_offset: u64,
    dmah: *mut c_void,
    buf: *mut Buf,
}

/// A buffer: `struct ibv_buf`, which programs do not look into.
pub(crate) struct Buf {
    pd: *mut abi::ibv_pd,
    pages: MmapRaw,
}

impl Buf {
    /// Whether the bytes from `addr` on, `length` of them, are the buffer's.
    fn holds(&self, addr: *mut c_void, length: usize) -> bool {
        let offset = addr.addr().checked_sub(self.pages.as_ptr().addr());
        offset.and_then(|at| at.checked_add(length)).is_some_and(|end| end <= self.pages.len())
    }
}

/// ibv_alloc_buf(3): pages of zeroes.
pub(crate) unsafe extern "C" fn alloc_buf(
    pd: *mut abi::ibv_pd,
    size: usize,
    buf: *mut *mut Buf,
) -> *mut c_void {
    edge::object(|| {
        let (pd, to) = (given(pd)?.as_ptr(), given(buf)?);
        if size == 0 {
            return Err(libc::EINVAL);
        }
        let pages = MmapRaw::from(MmapMut::map_anon(size).map_err(|_| libc::ENOMEM)?);
        let addr = pages.as_mut_ptr().cast();
        // SAFETY: a place, on the verb's terms.
        unsafe { to.write(Box::into_raw(Box::new(Buf { pd, pages }))) };
        Ok(addr)
    })
}

/// ibv_free_buf(3)
pub(crate) unsafe extern "C" fn free_buf(buf: *mut Buf) {
    if !buf.is_null() {
        // SAFETY: made with Box::into_raw by `alloc_buf`; the program gives it and its pages up.
        drop(unsafe { Box::from_raw(buf) });
    }
}

/// ibv_export_buf_dmabuf_fd(3): -1, ENODATA: no buffer lies in a dma-buf.
pub(crate) unsafe extern "C" fn export_buf_dmabuf_fd(_buf: *mut Buf) -> c_int {
    edge::minus_one(|| Err(libc::ENODATA))
}

/// ibv_reg_buf_mr(3)
pub(crate) unsafe extern "C" fn reg_buf_mr(
    pd: *mut abi::ibv_pd,
    buf: *mut Buf,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut abi::ibv_mr {
    let (comp_mask, dmah) = (MASK_BUF | MASK_ADDR, null_mut());
    let mut attr = MrInitAttr { length, access, comp_mask, iova: 0, addr, fd: -1, fd_offset: 0, dmah, buf };
    // SAFETY: the verb's terms, and a struct of this frame.
    unsafe { reg_mr_ex(pd, &mut attr) }
}

/// ibv_reg_mr_ex(3)
pub(crate) unsafe extern "C" fn reg_mr_ex(pd: *mut abi::ibv_pd, attr: *mut MrInitAttr) -> *mut abi::ibv_mr {
    // SAFETY: the verb's terms, which are those of the verbs that it calls.
    edge::object(|| unsafe {
        Ok(match region(pd, given(attr)?.as_ptr())? {
            RegisterAttr::Memory { addr, length, iova, access } => {
                pd_mr::reg_mr_iova2(pd, addr, length, iova, access as c_uint)
            }
            RegisterAttr::File { fd, offset, length, iova, access } => {
                memory::reg_dmabuf_mr(pd, offset, length, iova, fd, access)
            }
        })
    })
}

/// What a call of ibv_reg_mr_ex(3) registers.
enum RegisterAttr {
    Memory { addr: *mut c_void, length: usize, iova: u64, access: c_int },
    File { fd: c_int, offset: u64, length: usize, iova: u64, access: c_int },
}

/// Reads the attributes that the mask names.
///
/// # Safety
/// `attr` reaches as far as the fields that its mask names; its buffer, if it names one, is alive.
unsafe fn region(pd: *mut abi::ibv_pd, attr: *mut MrInitAttr) -> Result<RegisterAttr, Errno> {
    // SAFETY: the caller's terms. No reference is made to the whole struct, which may be shorter.
    unsafe {
        let (length, access, mask) = ((*attr).length, (*attr).access, (*attr).comp_mask);
        if mask & !MASKS != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let (file, named) = (mask & (MASK_FD | MASK_FD_OFFSET), mask & (MASK_ADDR | MASK_IOVA));
        if file == MASK_FD | MASK_FD_OFFSET && named == MASK_IOVA && mask & MASK_BUF == 0 {
            let (fd, offset, iova) = ((*attr).fd, (*attr).fd_offset, (*attr).iova);
            return Ok(RegisterAttr::File { fd, offset, length, iova, access });
        }
        if file != 0 || named & MASK_ADDR == 0 {
            return Err(libc::EINVAL);
        }
        let addr = (*attr).addr;
        if mask & MASK_BUF != 0 {
            let buf = (*attr).buf.as_ref().ok_or(libc::EINVAL)?;
            if buf.pd != pd || !buf.holds(addr, length) {
                return Err(libc::EINVAL);
            }
        }
        let iova = if named & MASK_IOVA != 0 { (*attr).iova } else { addr as u64 };
        Ok(RegisterAttr::Memory { addr, length, iova, access })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    /// As a C compiler lays out the struct of rdma-core 65's verbs.h, on 64 bits.
    #[test]
    fn the_attributes_lie_where_c_has_them() {
        assert_eq!((offset_of!(MrInitAttr, access), offset_of!(MrInitAttr, comp_mask)), (8, 16));
        assert_eq!((offset_of!(MrInitAttr, iova), offset_of!(MrInitAttr, addr)), (24, 32));
        assert_eq!((offset_of!(MrInitAttr, fd), offset_of!(MrInitAttr, fd_offset)), (40, 48));
        assert_eq!((offset_of!(MrInitAttr, dmah), offset_of!(MrInitAttr, buf)), (56, 64));
    }

    #[test]
    fn a_buffer_holds_what_lies_in_it() {
        let pages = MmapRaw::from(MmapMut::map_anon(4096).unwrap());
        let start = pages.as_mut_ptr();
        let at = |offset: isize| start.wrapping_offset(offset).cast();
        let buf = Buf { pd: null_mut(), pages };
        assert!(buf.holds(at(0), 4096) && buf.holds(at(4095), 1));
        assert!(!buf.holds(at(-1), 1) && !buf.holds(at(4095), 2) && !buf.holds(at(1000), usize::MAX));
    }
}
