//! Addresses and routes: rdma_bind_addr(3), rdma_resolve_addr(3), rdma_resolve_route(3).
//!
//! The kernel's routing says which address is used towards another; the card must have it. Neighbours are the
//! kernel's affair, so that an address is resolved at once; the program gets an event all the same.
//! Owns the id's stages from idle to route resolved. It must not know connections.

use super::address;
use super::attr::PACKET_LIFE_TIME;
use super::device::{self, IdDevice};
use super::event;
use super::id::{IdHandle, IdStage, IdState, PathAttr};
use super::sink::What;
use crate::edge::{self, Errno};
use crate::handle::errno;
use crate::{query, rates};
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_core::types::Gid;
use starverbs_verbs::cm::{BindAddr, any_port};
use std::net::{IpAddr, SocketAddr, UdpSocket};

/// IBTA 15.2.5.16: "exactly", of what a path record says.
const EXACTLY: u8 = 2;

/// Whether the card has the address.
fn on_card(device: &IdDevice, ip: IpAddr) -> bool {
    let gid = address::gid(ip);
    device.card().is_ok_and(|card| card.gid_table().iter().any(|entry| entry.gid == gid))
}

/// Whether some interface of the host has it.
fn on_host(addr: SocketAddr) -> bool {
    let mut any_port = addr;
    any_port.set_port(0);
    UdpSocket::bind(any_port).is_ok()
}

/// Holds an address for the id and, unless it is a wildcard, binds the id to its device. A port at loopback
/// is held, and listened on, at all addresses.
///
/// # Errors
/// EADDRNOTAVAIL: not of this host; ENODEV: not of the card; EADDRINUSE.
pub(super) fn bind(id: &IdHandle, state: &mut IdState, addr: SocketAddr) -> Result<(), Errno> {
    let device = device::open()?;
    let wildcard = address::is_wildcard(addr.ip());
    if !wildcard && !on_card(&device, addr.ip()) {
        return Err(if on_host(addr) { libc::ENODEV } else { libc::EADDRNOTAVAIL });
    }
    let options = state.options;
    let wanted = BindAddr {
        local: if wildcard { address::any_like(addr, addr.port()) } else { addr },
        space: state.space,
        reuse: options.reuse_addr,
        v6_only: options.v6_only.unwrap_or(false),
    };
    let hold = device.agent.bind(wanted).map_err(errno)?;
    let mut local = addr;
    local.set_port(hold.local().port());
    state.local = Some(local);
    state.hold = Some(hold);
    state.stage = IdStage::Bound;
    id.show_addresses(state);
    if !wildcard {
        id.take_device(&device);
    }
    Ok(())
}

/// The address that is used towards `to`: its own, if it is the card's. `from` is what the id is bound to:
/// nothing, or loopback.
///
/// # Errors
/// The kernel's: ENETUNREACH, EHOSTUNREACH, EACCES; EINVAL from loopback to another host ...
fn source_towards(device: &IdDevice, from: Option<IpAddr>, to: SocketAddr) -> Result<IpAddr, Errno> {
    if on_card(device, to.ip()) {
        return Ok(to.ip());
    }
    let system = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    let from = from.map_or(address::any_like(to, 0), |ip| SocketAddr::new(ip, 0));
    let socket = UdpSocket::bind(from).map_err(system)?;
    // Connecting a datagram socket looks the route up, and sends nothing.
    let mut target = to;
    target.set_port(to.port().max(1));
    socket.connect(target).map_err(system)?;
    Ok(socket.local_addr().map_err(system)?.ip())
}

/// The card's address for this source: itself; for a target that is a wildcard and a card without loopback's
/// addresses, the first of its family.
fn of_card(device: &IdDevice, source: IpAddr, to: IpAddr) -> Option<IpAddr> {
    if on_card(device, source) {
        return Some(source);
    }
    let stands_in = |gid: Gid| match (gid.ipv4(), source) {
        (Some(v4), IpAddr::V4(_)) => Some(IpAddr::from(v4)),
        (None, IpAddr::V6(_)) => Some(IpAddr::from(gid.0)),
        _ => None,
    };
    let table = device.card().ok().filter(|_| address::is_wildcard(to))?.gid_table();
    table.iter().find_map(|entry| stands_in(entry.gid))
}

/// Begins rdma_resolve_addr: what the event will say, or the errno value of what cannot begin.
fn resolve(
    id: &IdHandle,
    state: &mut IdState,
    src: Option<SocketAddr>,
    dst: SocketAddr,
) -> Result<Result<(), Errno>, Errno> {
    let device = device::open()?;
    if let (IdStage::Idle, Some(src)) = (state.stage, src) {
        bind(id, state, src)?;
    }
    if !matches!(state.stage, IdStage::Idle | IdStage::Bound) {
        return Err(libc::EINVAL);
    }
    let bound = state.local.map(|local| local.ip()).filter(|ip| !ip.is_unspecified());
    if state.local.is_some_and(|local| local.is_ipv4() != dst.is_ipv4()) {
        return Err(libc::EINVAL);
    }
    let source = match bound {
        Some(ip) if !ip.is_loopback() => ip,
        from => source_towards(&device, from, dst)?,
    };
    let Some(source) = of_card(&device, source, dst.ip()) else { return Ok(Err(libc::ENODEV)) };
    match &mut state.local {
        Some(local) => local.set_ip(source),
        // Nobody asks for it there: the port need not be held, it is a number that the peer is shown.
        None => state.local = Some(SocketAddr::new(source, any_port())),
    }
    let mut dst = dst;
    if address::is_wildcard(dst.ip()) && !on_card(&device, dst.ip()) {
        dst.set_ip(source);
    }
    state.remote = Some(dst);
    state.stage = IdStage::AddrResolved;
    id.show_addresses(state);
    id.take_device(&device);
    Ok(Ok(()))
}

/// What the way to the other side is like.
fn way(device: &IdDevice, state: &IdState) -> Result<PathAttr, Errno> {
    let remote = state.remote.ok_or(libc::EINVAL)?;
    let mtu = device.card()?.path_mtu(address::gid(remote.ip()));
    Ok(PathAttr { mtu, traffic_class: state.options.tos.unwrap_or(0), hop_limit: 0 })
}

/// Shows the way in the public struct, as a path record.
pub(super) fn show_path(id: &IdHandle, state: &IdState) {
    let (Some(local), Some(remote), Some(way)) = (state.local, state.remote, state.way) else { return };
    let mut speed = 0;
    // SAFETY: the id is bound; numbers and unions of numbers may be zero; the record goes with the id,
    // through free.
    unsafe {
        let public = id.public();
        query::query_port_speed((*public).verbs, 1, &mut speed);
        if (*public).route.path_rec.is_null() {
            (*public).route.path_rec = libc::calloc(1, size_of::<abi::ibv_sa_path_rec>()).cast();
        }
        let Some(record) = (*public).route.path_rec.as_mut() else { return };
        record.sgid.raw = address::gid(local.ip()).0;
        record.dgid.raw = address::gid(remote.ip()).0;
        record.hop_limit = way.hop_limit;
        record.traffic_class = way.traffic_class;
        record.reversible = 1;
        record.numb_path = 1;
        record.pkey = starverbs_verbs::PKEY.to_be();
        (record.mtu_selector, record.mtu) = (EXACTLY, way.mtu as u8);
        let rate = rates::mbps_to_rate(c_int::try_from(speed * 100).unwrap_or(c_int::MAX));
        (record.rate_selector, record.rate) = (EXACTLY, rate as u8);
        (record.packet_life_time_selector, record.packet_life_time) = (EXACTLY, PACKET_LIFE_TIME);
        (*public).route.num_paths = 1;
    }
}

/// Ends rdma_resolve_route, by this way, and queues its event.
pub(super) fn take_way(id: &IdHandle, state: &mut IdState, way: PathAttr) {
    state.way = Some(way);
    state.stage = IdStage::RouteResolved;
    show_path(id, state);
    id.shared.notify(What::Plain(abi::RDMA_CM_EVENT_ROUTE_RESOLVED, 0));
}

/// rdma_bind_addr(3).
pub(crate) unsafe extern "C" fn bind_addr(id: *mut abi::rdma_cm_id, addr: *mut libc::sockaddr) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let (handle, addr) = unsafe { (IdHandle::of(id)?, address::read(addr)?) };
        handle.shared.ours()?;
        let mut state = handle.state();
        if state.stage != IdStage::Idle {
            return Err(libc::EINVAL);
        }
        bind(handle, &mut state, addr)
    })
}

/// rdma_resolve_addr(3).
pub(crate) unsafe extern "C" fn resolve_addr(
    id: *mut abi::rdma_cm_id,
    src: *mut libc::sockaddr,
    dst: *mut libc::sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        unsafe {
            let handle = IdHandle::of(id)?;
            handle.shared.ours()?;
            let src = if src.is_null() { None } else { Some(address::read(src)?) };
            let dst = address::read(dst)?;
            let event = match resolve(handle, &mut handle.state(), src, dst)? {
                Ok(()) => What::Plain(abi::RDMA_CM_EVENT_ADDR_RESOLVED, 0),
                Err(error) => What::Plain(abi::RDMA_CM_EVENT_ADDR_ERROR, -error),
            };
            handle.shared.notify(event);
            event::complete(handle)
        }
    })
}

/// rdma_resolve_route(3).
pub(crate) unsafe extern "C" fn resolve_route(id: *mut abi::rdma_cm_id, _timeout_ms: c_int) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let handle = unsafe { IdHandle::of(id)? };
        {
            let mut state = handle.state();
            if state.stage != IdStage::AddrResolved {
                return Err(libc::EINVAL);
            }
            let way = way(&handle.device()?, &state)?;
            take_way(handle, &mut state, way);
        }
        // SAFETY: the call's terms.
        unsafe { event::complete(handle) }
    })
}

fn port(id: *mut abi::rdma_cm_id, which: impl FnOnce(&IdState) -> Option<SocketAddr>) -> u16 {
    edge::value(0, || {
        // SAFETY: the call's terms.
        let Ok(handle) = (unsafe { IdHandle::of(id) }) else { return 0 };
        which(&handle.state()).map_or(0, |addr| addr.port().to_be())
    })
}

/// rdma_get_src_port(3): network byte order, 0 before the id is bound.
pub(crate) unsafe extern "C" fn get_src_port(id: *mut abi::rdma_cm_id) -> u16 {
    port(id, |state| state.local)
}

/// rdma_get_dst_port(3): network byte order, 0 before the address is resolved.
pub(crate) unsafe extern "C" fn get_dst_port(id: *mut abi::rdma_cm_id) -> u16 {
    port(id, |state| state.remote)
}
