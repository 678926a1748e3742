//! Multicast groups of an id: rdma_join_multicast(3), rdma_join_multicast_ex(3), rdma_leave_multicast(3).
//!
//! A group's GID is its IP address, and joining is what attaching a queue pair does: the host's IGMP or MLD
//! is the kernel's. Owns an id's groups. It must not know how a group's frames come in.

use super::address;
use super::attr;
use super::event;
use super::id::{IdHandle, IdStage, IdState};
use super::sink::What;
use crate::edge::{self, Errno};
use crate::qp;
use core::ffi::{c_int, c_void};
use starverbs_abi as abi;
use starverbs_core::types::Gid;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The queue pair number of every group (IBTA 10.5.1).
const MULTICAST_QPN: u32 = 0xff_ffff;

/// A group that an id has joined.
#[derive(Clone, Copy)]
pub(super) struct Group {
    ip: IpAddr,
    /// It only sends there
    send_only: bool,
    /// The id's queue pair receives from it
    attached: bool,
}

/// A join, on its way to the program.
pub(super) struct Joined {
    ip: IpAddr,
    /// The program's, for the event
    context: *mut c_void,
}

// SAFETY: the pointer is the program's, and not followed here.
unsafe impl Send for Joined {}

fn raw(gid: Gid) -> abi::ibv_gid {
    abi::ibv_gid { raw: gid.0 }
}

/// Attaches the id's queue pair to the group that was joined, as the program takes the event; the event's
/// status, and its parameters.
pub(super) fn joined(id: &IdHandle, joined: &Joined) -> (c_int, abi::rdma_ud_param) {
    let _held = id.hold_qp();
    let mut state = id.state();
    let gid = address::gid(joined.ip);
    let ud = abi::rdma_ud_param {
        private_data: joined.context.cast_const(),
        private_data_len: 0,
        ah_attr: attr::address_of(&state, gid),
        qp_num: MULTICAST_QPN,
        qkey: abi::RDMA_UDP_QKEY,
    };
    let Some(group) = state.groups.iter_mut().find(|group| group.ip == joined.ip) else {
        return (-libc::EADDRNOTAVAIL, ud);
    };
    if group.attached || group.send_only || id.qp().is_null() {
        return (0, ud);
    }
    // SAFETY: the id's queue pair is alive.
    let status = unsafe { qp::attach_mcast(id.qp(), &raw(gid), 0) };
    group.attached = status == 0;
    (-status, ud)
}

fn detach(id: &IdHandle, group: &mut Group) {
    if core::mem::take(&mut group.attached) && !id.qp().is_null() {
        // SAFETY: the id's queue pair is alive.
        unsafe { qp::detach_mcast(id.qp(), &raw(address::gid(group.ip)), 0) };
    }
}

/// Detaches the id's queue pair from its groups: it is about to go.
pub(super) fn detach_all(id: &IdHandle) {
    for group in &mut id.state().groups {
        detach(id, group);
    }
}

/// Leaves every group.
pub(super) fn leave_all(id: &IdHandle, state: &mut IdState) {
    for mut group in state.groups.drain(..) {
        detach(id, &mut group);
    }
}

/// Joins; the event comes at once.
///
/// # Safety
/// No other thread uses the id.
unsafe fn join(id: &IdHandle, addr: SocketAddr, send_only: bool, context: *mut c_void) -> Result<(), Errno> {
    {
        let mut state = id.state();
        id.device()?;
        let ip = addr.ip();
        let stages = [IdStage::Bound, IdStage::AddrResolved, IdStage::RouteResolved, IdStage::Connected];
        if !id.is_ud() || !stages.contains(&state.stage) || !ip.is_multicast() {
            return Err(libc::EINVAL);
        }
        if state.local.is_some_and(|local| local.is_ipv4() != ip.is_ipv4()) {
            return Err(libc::EINVAL);
        }
        if state.groups.iter().any(|group| group.ip == ip) {
            return Err(libc::EADDRINUSE);
        }
        state.groups.push(Group { ip, send_only, attached: false });
        id.shared.notify(What::Joined(Joined { ip, context }));
    }
    // SAFETY: the caller's terms.
    unsafe { event::complete(id) }
}

/// rdma_join_multicast(3).
pub(crate) unsafe extern "C" fn join_multicast(
    id: *mut abi::rdma_cm_id,
    addr: *mut libc::sockaddr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the call's terms.
    edge::minus_one(|| unsafe { join(IdHandle::of(id)?, address::read(addr)?, false, context) })
}

/// rdma_join_multicast_ex(3).
pub(crate) unsafe extern "C" fn join_multicast_ex(
    id: *mut abi::rdma_cm_id,
    attr: *mut abi::rdma_cm_join_mc_attr_ex,
    context: *mut c_void,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        unsafe {
            let (id, attr) = (IdHandle::of(id)?, attr.as_ref().ok_or(libc::EINVAL)?);
            let needed = abi::RDMA_CM_JOIN_MC_ATTR_ADDRESS | abi::RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
            if attr.comp_mask & !(abi::RDMA_CM_JOIN_MC_ATTR_RESERVED - 1) != 0 {
                return Err(libc::ENOTSUP);
            }
            if attr.comp_mask & needed != needed || attr.join_flags >= abi::RDMA_MC_JOIN_FLAG_RESERVED {
                return Err(libc::EINVAL);
            }
            let send_only = attr.join_flags == abi::RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER;
            join(id, address::read(attr.addr.cast())?, send_only, context)
        }
    })
}

/// rdma_leave_multicast(3): EADDRNOTAVAIL if the id is not in the group. An event that waits goes with it.
pub(crate) unsafe extern "C" fn leave_multicast(
    id: *mut abi::rdma_cm_id,
    addr: *mut libc::sockaddr,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let (handle, addr) = unsafe { (IdHandle::of(id)?, address::read(addr)?) };
        handle.shared.ours()?;
        let _held = handle.hold_qp();
        let mut state = handle.state();
        let at = state.groups.iter().position(|group| group.ip == addr.ip()).ok_or(libc::EADDRNOTAVAIL)?;
        let mut group = state.groups.swap_remove(at);
        detach(handle, &mut group);
        handle.shared.queue().purge(|raw| {
            let of_group = matches!(&raw.what, What::Joined(joined) if joined.ip == group.ip);
            of_group && Arc::ptr_eq(&raw.id, &handle.shared)
        });
        Ok(())
    })
}
