//! Communication ids: create, destroy, migrate.
//!
//! Owns their handle and what the library keeps of an id beside the public struct. It must not know how
//! addresses are resolved or connections are made.

use super::address;
use super::channel::ChannelHandle;
use super::device::{self, IdDevice};
use super::event;
use super::lookup::Lookup;
use super::multicast::Group;
use super::sink::IdShared;
use crate::edge::{self, Errno};
use crate::handle::{given, zeroed};
use crate::reserve;
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use starverbs_abi as abi;
use starverbs_core::Psn;
use starverbs_verbs::cm::{Conn, Ece, Listener, PortSpace, QpSide, Reservation};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How far an id has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum IdStage {
    Idle,
    Bound,
    AddrResolved,
    RouteResolved,
    Listening,
    /// A request came, which is not answered
    Asked,
    /// It asked, or answered: whatever became of it, it cannot do so again
    Connected,
    /// The program got the event that the connection ended
    Ended,
}

/// What rdma_set_option(3) may change.
#[derive(Clone, Copy, Default)]
pub(super) struct IdOptions {
    /// IP type of service
    pub(super) tos: Option<u8>,
    pub(super) reuse_addr: bool,
    pub(super) v6_only: Option<bool>,
    /// Local ACK timeout, an exponent
    pub(super) ack_timeout: Option<u8>,
}

/// What the other side said of a connection.
#[derive(Clone, Copy)]
pub(super) struct PeerParams {
    pub(super) qp: QpSide,
    /// RNR retries to do
    pub(super) rnr_retry: u8,
    /// Transport retries to do
    pub(super) retry: u8,
    /// Local ACK timeout to use, an exponent
    pub(super) ack_timeout: u8,
}

/// The way to the other side.
#[derive(Clone, Copy)]
pub(super) struct PathAttr {
    pub(super) mtu: starverbs_core::Mtu,
    pub(super) traffic_class: u8,
    pub(super) hop_limit: u8,
}

/// The protection domain and attributes of the queue pairs of a listening endpoint's connections
/// (rdma_create_ep(3)).
#[derive(Clone, Copy)]
pub(super) struct EndpointAttr {
    pub(super) pd: *mut abi::ibv_pd,
    pub(super) init: abi::ibv_qp_init_attr,
}

/// What the library keeps of an id.
pub(super) struct IdState {
    pub(super) stage: IdStage,
    pub(super) space: PortSpace,
    pub(super) local: Option<SocketAddr>,
    pub(super) remote: Option<SocketAddr>,
    pub(super) hold: Option<Reservation>,
    pub(super) listener: Option<Listener>,
    pub(super) conn: Option<Conn>,
    /// Of the peer's first packet
    pub(super) psn: Psn,
    /// READs and atomics answered at a time
    pub(super) responder_resources: u8,
    /// READs and atomics under way at a time
    pub(super) initiator_depth: u8,
    /// Transport retries to do
    pub(super) retry: u8,
    pub(super) way: Option<PathAttr>,
    pub(super) peer: Option<PeerParams>,
    pub(super) options: IdOptions,
    pub(super) local_ece: Ece,
    pub(super) remote_ece: Ece,
    pub(super) groups: Vec<Group>,
    pub(super) endpoint: Option<EndpointAttr>,
    /// What rdma_getaddrinfo(3) wants in front of the private data
    pub(super) connect_data: Vec<u8>,
    /// Of rdma_resolve_addrinfo(3)
    pub(super) lookup: Lookup,
}

// SAFETY: an endpoint's pointers name objects that the program keeps, and that may be used from every thread;
// a lookup's result is its own.
unsafe impl Send for IdState {}

/// A communication id.
#[repr(C)]
pub(super) struct IdHandle {
    ibv: UnsafeCell<abi::rdma_cm_id>,
    pub(super) shared: Arc<IdShared>,
    state: Mutex<IdState>,
    /// Held while its queue pair is brought to a state, appears, or goes: events do so in one thread, calls
    /// in another. Taken before `state`
    qp_is: Mutex<()>,
    /// Its channel is its own: calls wait for what they begin
    sync: core::sync::atomic::AtomicBool,
}

impl IdHandle {
    /// The handle of an id, EINVAL for NULL.
    ///
    /// # Safety
    /// `id` is NULL, or comes from `make` and is alive.
    pub(super) unsafe fn of<'a>(id: *mut abi::rdma_cm_id) -> Result<&'a IdHandle, Errno> {
        // SAFETY: the caller's terms; the struct is the first field of its handle.
        given(id).map(|id| unsafe { &*id.as_ptr().cast::<IdHandle>() })
    }

    /// The public struct.
    pub(super) fn public(&self) -> *mut abi::rdma_cm_id {
        self.ibv.get()
    }

    /// What the library keeps of it.
    pub(super) fn state(&self) -> MutexGuard<'_, IdState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps its queue pair, or that it has none, as it is.
    pub(super) fn hold_qp(&self) -> MutexGuard<'_, ()> {
        self.qp_is.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether calls wait for what they begin.
    pub(super) fn is_sync(&self) -> bool {
        self.sync.load(core::sync::atomic::Ordering::Relaxed)
    }

    /// The queue pair, or NULL.
    pub(super) fn qp(&self) -> *mut abi::ibv_qp {
        // SAFETY: a field of the public struct, which programs read only.
        unsafe { (*self.public()).qp }
    }

    /// Whether it is for datagrams.
    pub(super) fn is_ud(&self) -> bool {
        // SAFETY: as above.
        unsafe { (*self.public()).qp_type == abi::IBV_QPT_UD }
    }

    /// The device, once the id is bound to it.
    ///
    /// # Errors
    /// EINVAL: it is not; EIO in a forked child.
    pub(super) fn device(&self) -> Result<IdDevice, Errno> {
        self.shared.ours()?;
        // SAFETY: as above.
        if unsafe { (*self.public()).verbs }.is_null() { Err(libc::EINVAL) } else { device::open() }
    }

    /// Binds it to the device: there is one, with one port.
    pub(super) fn take_device(&self, device: &IdDevice) {
        // SAFETY: fields of the public struct, which the library alone writes.
        unsafe {
            let id = self.public();
            (*id).verbs = device.context;
            (*id).port_num = 1;
            if (*id).pd.is_null() {
                (*id).pd = device.pd;
            }
        }
    }

    /// Shows the addresses of `state` in the public struct.
    pub(super) fn show_addresses(&self, state: &IdState) {
        // SAFETY: as above; each union has room for a sockaddr_storage.
        unsafe {
            let addr = &raw mut (*self.public()).route.addr;
            if let Some(local) = state.local {
                (&raw mut (*addr).__bindgen_anon_1)
                    .cast::<libc::sockaddr_storage>()
                    .write(address::stored(local).0);
                (*addr).addr.ibaddr.sgid.raw = address::gid(local.ip()).0;
            }
            if let Some(remote) = state.remote {
                (&raw mut (*addr).__bindgen_anon_2)
                    .cast::<libc::sockaddr_storage>()
                    .write(address::stored(remote).0);
                (*addr).addr.ibaddr.dgid.raw = address::gid(remote.ip()).0;
            }
            (*addr).addr.ibaddr.pkey = starverbs_verbs::PKEY.to_be();
        }
    }

    /// A new id's handle. `channel` is alive, or NULL for one that waits.
    ///
    /// # Errors
    /// ENOMEM; no descriptor left; EIO: the channel is of a process that this one was forked from.
    ///
    /// # Safety
    /// As said of `channel`.
    pub(super) unsafe fn make(
        channel: *mut abi::rdma_event_channel,
        shared: Option<Arc<IdShared>>,
        context: *mut c_void,
        space: PortSpace,
        qp_type: abi::ibv_qp_type,
    ) -> Result<*mut abi::rdma_cm_id, Errno> {
        if !reserve::has_room() {
            return Err(libc::ENOMEM);
        }
        let sync = channel.is_null();
        let channel = if sync { ChannelHandle::make()? } else { channel };
        // SAFETY: alive, as the caller says, or just made.
        let queue = Arc::clone(unsafe { ChannelHandle::of(channel) }.ok_or(libc::EINVAL)?.queue()?);
        let shared = match shared {
            Some(shared) => {
                shared.migrate(&queue);
                shared
            }
            None => IdShared::new(queue),
        };
        // SAFETY: an rdma_cm_id is numbers, pointers and unions of numbers: zero is valid.
        let mut ibv: abi::rdma_cm_id = unsafe { zeroed() };
        (ibv.channel, ibv.context, ibv.ps, ibv.qp_type) = (channel, context, space as u32, qp_type);
        let handle = IdHandle {
            ibv: UnsafeCell::new(ibv),
            shared,
            state: Mutex::new(IdState::new(space)),
            qp_is: Mutex::new(()),
            sync: sync.into(),
        };
        let handle = Box::into_raw(Box::new(handle));
        // SAFETY: just made.
        unsafe { (*handle).shared.belongs_to(handle) };
        Ok(handle.cast())
    }
}

impl IdState {
    fn new(space: PortSpace) -> IdState {
        IdState {
            stage: IdStage::Idle,
            space,
            local: None,
            remote: None,
            hold: None,
            listener: None,
            conn: None,
            psn: Psn::new(random()),
            responder_resources: 0,
            initiator_depth: 0,
            retry: 7,
            way: None,
            peer: None,
            options: IdOptions::default(),
            local_ece: Ece::default(),
            remote_ece: Ece::default(),
            groups: Vec::new(),
            endpoint: None,
            connect_data: Vec::new(),
            lookup: Lookup::None,
        }
    }

    /// The connection, EINVAL before there is one.
    pub(super) fn conn(&self) -> Result<Conn, Errno> {
        self.conn.clone().ok_or(libc::EINVAL)
    }
}

/// A random number. Where there is no randomness any will do.
fn random() -> u32 {
    let mut bytes = [0u8; 4];
    // SAFETY: four writable bytes.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    u32::from_ne_bytes(bytes)
}

/// A port space, EINVAL if it is none.
pub(super) fn port_space(ps: abi::rdma_port_space) -> Result<PortSpace, Errno> {
    match ps {
        abi::RDMA_PS_IPOIB => Ok(PortSpace::Ipoib),
        abi::RDMA_PS_TCP => Ok(PortSpace::Tcp),
        abi::RDMA_PS_UDP => Ok(PortSpace::Udp),
        abi::RDMA_PS_IB => Ok(PortSpace::Ib),
        _ => Err(libc::EINVAL),
    }
}

/// The queue pairs of a port space, unless something else is said.
fn usual_type(space: PortSpace) -> abi::ibv_qp_type {
    match space {
        PortSpace::Udp | PortSpace::Ipoib => abi::IBV_QPT_UD,
        PortSpace::Tcp | PortSpace::Ib => abi::IBV_QPT_RC,
    }
}

/// rdma_create_id(3).
pub(crate) unsafe extern "C" fn create_id(
    channel: *mut abi::rdma_event_channel,
    id: *mut *mut abi::rdma_cm_id,
    context: *mut c_void,
    ps: abi::rdma_port_space,
) -> c_int {
    edge::minus_one(|| {
        let (to, space) = (given(id)?, port_space(ps)?);
        // SAFETY: the call's terms.
        unsafe { to.write(IdHandle::make(channel, None, context, space, usual_type(space))?) };
        Ok(())
    })
}

/// rdma_destroy_id(3): ends what is under way, and waits until every event of it is acknowledged.
pub(crate) unsafe extern "C" fn destroy_id(id: *mut abi::rdma_cm_id) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let handle = unsafe { IdHandle::of(id)? };
        let gone = {
            let mut state = handle.state();
            super::multicast::leave_all(handle, &mut state);
            (state.listener.take(), state.conn.take(), state.hold.take())
        };
        drop(gone);
        // SAFETY: an event that a call of a waiting id left.
        unsafe { event::forget(handle) };
        handle.shared.end();
        // SAFETY: the program gives the id up, nothing refers to the handle any more, and the path record
        // came from calloc.
        unsafe {
            let handle = Box::from_raw(id.cast::<IdHandle>());
            libc::free((*handle.public()).route.path_rec.cast());
            if handle.is_sync() {
                ChannelHandle::free((*handle.public()).channel);
            }
        }
        Ok(())
    })
}

/// rdma_migrate_id(3).
pub(crate) unsafe extern "C" fn migrate_id(
    id: *mut abi::rdma_cm_id,
    channel: *mut abi::rdma_event_channel,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let handle = unsafe { IdHandle::of(id)? };
        handle.shared.ours()?;
        let sync = channel.is_null();
        if sync && handle.is_sync() {
            return Err(libc::EINVAL);
        }
        let channel = if sync { ChannelHandle::make()? } else { channel };
        // SAFETY: alive, on the call's terms, or just made; the old channel, if it is the id's own, has no
        // other user.
        unsafe {
            let to = ChannelHandle::of(channel).ok_or(libc::EINVAL)?;
            let queue = to.queue()?;
            event::forget(handle);
            handle.shared.migrate(queue);
            let old = core::mem::replace(&mut (*id).channel, channel);
            if handle.sync.swap(sync, core::sync::atomic::Ordering::Relaxed) {
                ChannelHandle::free(old);
            }
        }
        Ok(())
    })
}
