//! Names to addresses: rdma_getaddrinfo(3).
//!
//! Owns the results that it gives. The system's getaddrinfo does the work; there are no routes to be looked
//! up ahead. It must not know any id.

use crate::edge::{self, Errno};
use crate::handle::{given, zeroed};
use core::ffi::{c_char, c_int};
use core::ptr::null_mut;
use starverbs_abi::{self as abi, newer};

const FLAGS: u32 =
    abi::RAI_PASSIVE | abi::RAI_NUMERICHOST | abi::RAI_NOROUTE | abi::RAI_FAMILY | newer::RAI_DNS;

/// Why a name was not resolved: an errno value, or a code of getaddrinfo(3).
pub(super) enum Failed {
    Errno(Errno),
    Eai(c_int),
}

/// A copy that free(3) ends.
///
/// # Safety
/// `from` names `length` bytes.
unsafe fn copy<T>(from: *const T, length: usize) -> Result<*mut T, Failed> {
    // SAFETY: the caller's terms; the copy has room for as much.
    unsafe {
        let to = libc::calloc(1, length.max(1));
        if to.is_null() {
            return Err(Failed::Eai(libc::EAI_MEMORY));
        }
        libc::memcpy(to, from.cast(), length);
        Ok(to.cast())
    }
}

/// A copy of a string, NULL for NULL.
///
/// # Safety
/// `from` is NULL or a string.
unsafe fn copy_text(from: *const c_char) -> *mut c_char {
    // SAFETY: the caller's terms.
    if from.is_null() { null_mut() } else { unsafe { libc::strdup(from) } }
}

/// Transport and port space, each by the other where one is not said.
fn kind(qp_type: c_int, space: c_int) -> Result<(c_int, c_int), Failed> {
    let (rc, ud) = (abi::IBV_QPT_RC as c_int, abi::IBV_QPT_UD as c_int);
    let (tcp, udp) = (abi::RDMA_PS_TCP as c_int, abi::RDMA_PS_UDP as c_int);
    let ipoib = abi::RDMA_PS_IPOIB as c_int;
    match (qp_type, space) {
        (0, 0) => Ok((rc, tcp)),
        (0, space) if space == udp || space == ipoib => Ok((ud, space)),
        (0, space) => Ok((rc, space)),
        (kind, 0) => Ok((kind, if kind == ud { udp } else { tcp })),
        (kind, space) if kind == ud && space == tcp || kind != ud && (space == udp || space == ipoib) => {
            Err(Failed::Eai(libc::EAI_SOCKTYPE))
        }
        both => Ok(both),
    }
}

/// The system's answer for a name.
struct AddrInfo(*mut libc::addrinfo);

impl AddrInfo {
    /// # Safety
    /// `node` and `service` are NULL or strings.
    unsafe fn look_up(
        node: *const c_char,
        service: *const c_char,
        flags: u32,
        family: c_int,
        qp_type: c_int,
    ) -> Result<AddrInfo, Failed> {
        // SAFETY: numbers and pointers: zero is valid.
        let mut hints: libc::addrinfo = unsafe { zeroed() };
        hints.ai_flags = if flags & abi::RAI_PASSIVE != 0 { libc::AI_PASSIVE } else { 0 };
        if flags & abi::RAI_NUMERICHOST != 0 {
            hints.ai_flags |= libc::AI_NUMERICHOST;
        }
        hints.ai_family = if flags & abi::RAI_FAMILY != 0 { family } else { libc::AF_UNSPEC };
        hints.ai_socktype =
            if qp_type == abi::IBV_QPT_UD as c_int { libc::SOCK_DGRAM } else { libc::SOCK_STREAM };
        let mut found = null_mut();
        // SAFETY: the caller's terms.
        match unsafe { libc::getaddrinfo(node, service, &hints, &mut found) } {
            0 => Ok(AddrInfo(found)),
            error => Err(Failed::Eai(error)),
        }
    }
}

impl Drop for AddrInfo {
    fn drop(&mut self) {
        // SAFETY: it came from getaddrinfo.
        unsafe { libc::freeaddrinfo(self.0) };
    }
}

/// Resolves into `to`, which freeaddrinfo ends whatever becomes of this.
///
/// # Safety
/// On the terms of rdma_getaddrinfo(3); `to` is alive and zero.
unsafe fn resolve(
    node: *const c_char,
    service: *const c_char,
    hints: &abi::rdma_addrinfo,
    to: &mut abi::rdma_addrinfo,
) -> Result<(), Failed> {
    let flags = hints.ai_flags as u32;
    if flags & newer::RAI_SA != 0 {
        return Err(Failed::Errno(libc::EOPNOTSUPP));
    }
    if flags & !FLAGS != 0 {
        return Err(Failed::Eai(libc::EAI_BADFLAGS));
    }
    if flags & abi::RAI_FAMILY != 0 && !matches!(hints.ai_family, libc::AF_INET | libc::AF_INET6) {
        return Err(Failed::Eai(libc::EAI_FAMILY));
    }
    (to.ai_qp_type, to.ai_port_space) = kind(hints.ai_qp_type, hints.ai_port_space)?;
    to.ai_flags = hints.ai_flags;
    let passive = flags & abi::RAI_PASSIVE != 0;
    // SAFETY: the caller's terms; lengths and addresses of the hints go together.
    unsafe {
        if !node.is_null() || !service.is_null() {
            let found = AddrInfo::look_up(node, service, flags, hints.ai_family, to.ai_qp_type)?;
            let first = &*found.0;
            let (addr, name): (*const abi::sockaddr, _) = (first.ai_addr.cast(), first.ai_canonname);
            to.ai_family = first.ai_family;
            if passive {
                (to.ai_src_addr, to.ai_src_len) = (copy(addr, first.ai_addrlen as usize)?, first.ai_addrlen);
                to.ai_src_canonname = copy_text(name);
            } else {
                (to.ai_dst_addr, to.ai_dst_len) = (copy(addr, first.ai_addrlen as usize)?, first.ai_addrlen);
                to.ai_dst_canonname = copy_text(name);
            }
        }
        if to.ai_src_addr.is_null() && hints.ai_src_len > 0 && !hints.ai_src_addr.is_null() {
            to.ai_src_addr = copy(hints.ai_src_addr, hints.ai_src_len as usize)?;
            to.ai_src_len = hints.ai_src_len;
            to.ai_family = c_int::from((*to.ai_src_addr).sa_family);
        }
        if to.ai_dst_addr.is_null() && !passive && hints.ai_dst_len > 0 && !hints.ai_dst_addr.is_null() {
            to.ai_dst_addr = copy(hints.ai_dst_addr, hints.ai_dst_len as usize)?;
            to.ai_dst_len = hints.ai_dst_len;
            to.ai_family = c_int::from((*to.ai_dst_addr).sa_family);
        }
    }
    Ok(())
}

/// What a name means, for freeaddrinfo to end.
///
/// # Safety
/// On the terms of rdma_getaddrinfo(3).
pub(super) unsafe fn look_up(
    node: *const c_char,
    service: *const c_char,
    hints: *const abi::rdma_addrinfo,
) -> Result<*mut abi::rdma_addrinfo, Failed> {
    if node.is_null() && service.is_null() && hints.is_null() {
        return Err(Failed::Errno(libc::EINVAL));
    }
    // SAFETY: the caller's terms; numbers and pointers may be zero.
    unsafe {
        let none = zeroed();
        let made: *mut abi::rdma_addrinfo = copy(&none, size_of::<abi::rdma_addrinfo>())?;
        match resolve(node, service, hints.as_ref().unwrap_or(&none), &mut *made) {
            Ok(()) => Ok(made),
            Err(error) => {
                freeaddrinfo(made);
                Err(error)
            }
        }
    }
}

/// rdma_getaddrinfo(3): 0, -1 with errno, or a code of getaddrinfo(3).
pub(crate) unsafe extern "C" fn getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const abi::rdma_addrinfo,
    res: *mut *mut abi::rdma_addrinfo,
) -> c_int {
    let failed = |error| {
        edge::set_errno(error);
        -1
    };
    let body = || {
        let to = given(res).map_err(Failed::Errno)?;
        // SAFETY: the call's terms.
        unsafe { to.write(look_up(node, service, hints)?) };
        Ok(())
    };
    match edge::value(Err(Failed::Errno(libc::EFAULT)), body) {
        Ok(()) => 0,
        Err(Failed::Errno(error)) => failed(error),
        Err(Failed::Eai(code)) => code,
    }
}

/// rdma_freeaddrinfo.
pub(crate) unsafe extern "C" fn freeaddrinfo(res: *mut abi::rdma_addrinfo) {
    let mut at = res;
    while !at.is_null() {
        // SAFETY: a result of `getaddrinfo`, which the program gives up: every part of it came from malloc.
        unsafe {
            let one = at.read();
            for part in [
                one.ai_src_addr.cast(),
                one.ai_dst_addr.cast(),
                one.ai_src_canonname.cast(),
                one.ai_dst_canonname.cast(),
                one.ai_route,
                one.ai_connect,
                at.cast(),
            ] {
                libc::free(part);
            }
            at = one.ai_next;
        }
    }
}
