//! Names to addresses by way of an id: rdma_resolve_addrinfo(3), rdma_query_addrinfo(3).
//!
//! Owns the order of those calls. What a name means is `info`'s. The name is looked up within the call, as in
//! librdmacm, and an event has the result; there is no subnet administrator (RAI_SA) to ask.

use super::event;
use super::id::IdHandle;
use super::info::{self, Failed};
use super::sink::What;
use crate::edge::{self, Errno};
use crate::handle::given;
use core::ffi::{c_char, c_int};
use starverbs_abi::{self as abi, newer};

/// What becomes of an id's request for addresses.
pub(super) enum Lookup {
    /// There is none, or its result was taken
    None,
    /// A thread is at it
    UnderWay,
    /// The program may take the result
    Done(LookupResult),
}

/// A result that nobody took yet.
pub(super) struct LookupResult(*mut abi::rdma_addrinfo);

impl LookupResult {
    fn into_raw(self) -> *mut abi::rdma_addrinfo {
        core::mem::ManuallyDrop::new(self).0
    }
}

impl Drop for LookupResult {
    fn drop(&mut self) {
        // SAFETY: a result of `info::look_up`, which nobody else has.
        unsafe { info::freeaddrinfo(self.0) };
    }
}

/// Whether the program wants the subnet administrator asked.
///
/// # Errors
/// EOPNOTSUPP: beside a name, or instead of asking by name.
fn wants_sa(flags: u32, node: *const c_char) -> Result<bool, Errno> {
    let sa = flags & newer::RAI_SA != 0;
    if sa && (flags & newer::RAI_DNS != 0 || !node.is_null()) { Err(libc::EOPNOTSUPP) } else { Ok(sa) }
}

/// What the event says of a name that was not resolved; `Err`: the hints are wrong, and there is none.
fn status(failed: Failed) -> Result<Errno, Errno> {
    match failed {
        Failed::Errno(error) => Err(error),
        Failed::Eai(libc::EAI_BADFLAGS | libc::EAI_FAMILY | libc::EAI_SOCKTYPE) => Err(libc::EINVAL),
        Failed::Eai(libc::EAI_MEMORY) => Err(libc::ENOMEM),
        Failed::Eai(libc::EAI_AGAIN) => Ok(libc::EAGAIN),
        // The name, or the service, is not known.
        Failed::Eai(_) => Ok(libc::ENOENT),
    }
}

/// Looks the name up; gives the event of the result.
///
/// # Safety
/// On the terms of rdma_getaddrinfo(3).
unsafe fn look_up(
    id: &IdHandle,
    node: *const c_char,
    service: *const c_char,
    hints: *const abi::rdma_addrinfo,
) -> Result<What, Errno> {
    {
        let lookup = &mut id.state().lookup;
        if !matches!(lookup, Lookup::None) {
            return Err(libc::EBUSY);
        }
        *lookup = Lookup::UnderWay;
    }
    // The name service may take its time: not with the id's state held, which events need.
    // SAFETY: the caller's terms.
    let result = unsafe { info::look_up(node, service, hints) };
    let (lookup, event) = match result.map_err(status) {
        Ok(found) => {
            (Lookup::Done(LookupResult(found)), Ok(What::Plain(newer::RDMA_CM_EVENT_ADDRINFO_RESOLVED, 0)))
        }
        Err(Ok(error)) => (Lookup::None, Ok(What::Plain(newer::RDMA_CM_EVENT_ADDRINFO_ERROR, -error))),
        Err(Err(error)) => (Lookup::None, Err(error)),
    };
    id.state().lookup = lookup;
    event
}

/// rdma_resolve_addrinfo(3).
pub(crate) unsafe extern "C" fn resolve_addrinfo(
    id: *mut abi::rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const abi::rdma_addrinfo,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        unsafe {
            let handle = IdHandle::of(id)?;
            handle.shared.ours()?;
            if wants_sa(hints.as_ref().map_or(0, |hints| hints.ai_flags as u32), node)? {
                given(service.cast_mut())?;
                handle.device()?;
                return Err(libc::EOPNOTSUPP);
            }
            let event = look_up(handle, node, service, hints)?;
            handle.shared.write(event).inspect_err(|_| handle.state().lookup = Lookup::None)?;
            event::complete(handle)
        }
    })
}

/// rdma_query_addrinfo(3): ENOENT where there is nothing to take.
pub(crate) unsafe extern "C" fn query_addrinfo(
    id: *mut abi::rdma_cm_id,
    to: *mut *mut abi::rdma_addrinfo,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let (handle, to) = unsafe { (IdHandle::of(id)?, given(to)?) };
        let lookup = &mut handle.state().lookup;
        match core::mem::replace(lookup, Lookup::None) {
            // SAFETY: the call's terms.
            Lookup::Done(found) => unsafe { to.write(found.into_raw()) },
            other => {
                *lookup = other;
                return Err(libc::ENOENT);
            }
        }
        Ok(())
    })
}
