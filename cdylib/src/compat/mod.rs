//! Version node IBVERBS_1.0: what programs built before 2007 bind to.
//!
//! Such a program holds structs of another layout and calls through another table of functions. Each object
//! of its is an [`Old`]: the public fields as libibverbs 1.0 had them, and behind them today's object, which
//! does the work. Today's object carries the address of the old one as the program's own context pointer, so
//! that events find their way back. Owns those structs and the functions of the node; it must not know what
//! an object does.
//!
//! Structs that are the same in both, or of which the old one is the beginning, are today's. An old program
//! may not use an object after it closed its device: the old table goes with the context.

mod data;
mod device;
mod events;
mod layout;
mod objects;

pub(crate) use device::{
    close_device, free_device_list, get_device_guid, get_device_list, get_device_name, open_device,
    query_device, query_gid, query_pkey, query_port,
};
pub(crate) use events::{
    ack_async_event, ack_cq_events, create_comp_channel, destroy_comp_channel, get_async_event, get_cq_event,
};
pub(crate) use objects::{
    alloc_pd, attach_mcast, create_ah, create_cq, create_qp, create_srq, dealloc_pd, dereg_mr, destroy_ah,
    destroy_cq, destroy_qp, destroy_srq, detach_mcast, modify_qp, modify_srq, query_qp, query_srq, reg_mr,
    resize_cq,
};

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;

/// An object of a program of 1.0: its public fields, and the object of today that does the work.
#[repr(C)]
pub(crate) struct Old<F, T> {
    public: F,
    real: *mut T,
}

impl<F, T> Old<F, T> {
    /// Wraps what `create` makes, if it does; `create` is told the wrapper's address, and `fill` copies what
    /// the public fields say of the new object.
    ///
    /// # Safety
    /// `create` returns NULL or an object that is alive.
    unsafe fn make(
        public: F,
        create: impl FnOnce(*mut c_void) -> *mut T,
        fill: impl FnOnce(&mut F, &T),
    ) -> *mut Self {
        let old = Box::into_raw(Box::new(Old { public, real: null_mut() }));
        let real = create(old.cast());
        // SAFETY: `old` was just made and is not shared yet; `real` is NULL or alive, as the caller vouches.
        unsafe {
            let Some(made) = real.as_ref() else {
                drop(Box::from_raw(old));
                return null_mut();
            };
            fill(&mut (*old).public, made);
            (*old).real = real;
        }
        old
    }

    /// Today's object; NULL for NULL, which today's functions refuse.
    ///
    /// # Safety
    /// `old` is NULL, or comes from `make` and is alive.
    #[inline]
    unsafe fn real(old: *mut Self) -> *mut T {
        // SAFETY: the caller's terms.
        if old.is_null() { null_mut() } else { unsafe { (*old).real } }
    }

    /// Ends today's object, and if that was possible its wrapper too.
    ///
    /// # Safety
    /// As in `real`, and the program gives the object up.
    unsafe fn end(old: *mut Self, destroy: unsafe extern "C" fn(*mut T) -> c_int) -> c_int {
        // SAFETY: the caller's terms.
        let failed = unsafe { destroy(Self::real(old)) };
        if failed == 0 {
            // SAFETY: made with Box::into_raw; NULL is refused above.
            drop(unsafe { Box::from_raw(old) });
        }
        failed
    }
}

/// Functions that hand their arguments on, with today's object in place of the old one.
macro_rules! forward {
    ($($(#[$doc:meta])* $name:ident($old:ty $(, $argument:ident: $kind:ty)*) => $real:path;)*) => { $(
        $(#[$doc])*
        pub(crate) unsafe extern "C" fn $name(
            object: *mut $old $(, $argument: $kind)*
        ) -> ::core::ffi::c_int {
            // SAFETY: the verb's terms.
            unsafe { $real(<$old>::real(object) $(, $argument)*) }
        }
    )* };
}
use forward;

/// Functions that end an object.
macro_rules! end {
    ($($(#[$doc:meta])* $name:ident($old:ty) => $real:path;)*) => { $(
        $(#[$doc])*
        pub(crate) unsafe extern "C" fn $name(object: *mut $old) -> ::core::ffi::c_int {
            // SAFETY: the verb's terms.
            unsafe { <$old>::end(object, $real) }
        }
    )* };
}
use end;
