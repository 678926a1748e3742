//! The active side: rdma_connect(3), rdma_establish(3), rdma_notify(3), and the end of a connection,
//! rdma_disconnect(3).
//!
//! Owns what a program's connection parameters mean. It must not know the messages that carry them.

use super::attr;
use super::event;
use super::id::{IdHandle, IdStage, IdState};
use super::qp;
use super::sink::sink;
use crate::edge::{self, Errno};
use crate::handle::errno;
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_verbs::MAX_RD_ATOM;
use starverbs_verbs::cm::{Connect, Ece, PortSpace, QpSide, Resolve, Service};

/// Retries that a program without an opinion gets: as many as there are.
const MOST_RETRIES: u8 = 7;

/// A program's connection parameters, in Rust's words: `struct rdma_conn_param`.
pub(super) struct ConnectParams {
    /// `None`: as much as there is
    responder_resources: Option<u8>,
    initiator_depth: Option<u8>,
    pub(super) flow_control: bool,
    retry_count: u8,
    pub(super) rnr_retry_count: u8,
    /// A queue pair that is not the id's
    qp: Option<(u32, bool)>,
    pub(super) private_data: Vec<u8>,
}

/// Bytes of private data that a program passes.
///
/// # Safety
/// `data` is NULL or names `length` bytes.
pub(super) unsafe fn private(data: *const core::ffi::c_void, length: u8) -> Result<Vec<u8>, Errno> {
    if length == 0 {
        return Ok(Vec::new());
    }
    if data.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's terms.
    Ok(unsafe { core::slice::from_raw_parts(data.cast::<u8>(), length.into()) }.to_vec())
}

impl ConnectParams {
    /// Reads them; for NULL, those of a program without an opinion.
    ///
    /// # Errors
    /// EINVAL: more READs and atomics than the device has, or private data that is none.
    ///
    /// # Safety
    /// `from` is NULL or a struct of the program's.
    pub(super) unsafe fn read(
        from: *const abi::rdma_conn_param,
        space: PortSpace,
    ) -> Result<ConnectParams, Errno> {
        // SAFETY: the caller's terms.
        let Some(from) = (unsafe { from.as_ref() }) else {
            return Ok(ConnectParams {
                responder_resources: None,
                initiator_depth: None,
                flow_control: false,
                retry_count: MOST_RETRIES,
                rnr_retry_count: MOST_RETRIES,
                qp: None,
                private_data: Vec::new(),
            });
        };
        let depth = |wanted: u8| match u32::from(wanted) {
            abi::RDMA_MAX_RESP_RES => Ok(None),
            more if more > MAX_RD_ATOM && space == PortSpace::Tcp => Err(libc::EINVAL),
            fits => Ok(Some(fits.min(MAX_RD_ATOM) as u8)),
        };
        Ok(ConnectParams {
            responder_resources: depth(from.responder_resources)?,
            initiator_depth: depth(from.initiator_depth)?,
            flow_control: from.flow_control != 0,
            retry_count: from.retry_count.min(MOST_RETRIES),
            rnr_retry_count: from.rnr_retry_count.min(MOST_RETRIES),
            qp: Some((from.qp_num, from.srq != 0)),
            // SAFETY: the caller's terms.
            private_data: unsafe { private(from.private_data, from.private_data_len)? },
        })
    }

    /// READs and atomics that this side answers, and has under way, where the peer has so many.
    pub(super) fn depths(&self, answered: u32, under_way: u32) -> (u8, u8) {
        let most = |limit: u32| limit.min(MAX_RD_ATOM) as u8;
        (self.responder_resources.unwrap_or(most(answered)), self.initiator_depth.unwrap_or(most(under_way)))
    }

    /// The queue pair to connect: the id's, or the one that the program names.
    ///
    /// # Errors
    /// EINVAL: there is neither.
    pub(super) fn qp_side(&self, id: &IdHandle, state: &IdState) -> Result<QpSide, Errno> {
        // SAFETY: NULL or the id's queue pair, which is alive.
        let own = unsafe { id.qp().as_ref() }.map(|qp| (qp.qp_num, !qp.srq.is_null()));
        let (qpn, srq) = own.or(self.qp).ok_or(libc::EINVAL)?;
        Ok(QpSide { qpn, psn: state.psn, srq })
    }
}

/// The transport of a queue pair.
fn service(qp_type: abi::ibv_qp_type) -> Result<Service, Errno> {
    match qp_type {
        abi::IBV_QPT_RC => Ok(Service::Rc),
        abi::IBV_QPT_UC => Ok(Service::Uc),
        abi::IBV_QPT_XRC_SEND | abi::IBV_QPT_XRC_RECV => Ok(Service::Xrc),
        _ => Err(libc::EINVAL),
    }
}

/// Asks the peer.
fn ask(id: &IdHandle, params: &ConnectParams) -> Result<(), Errno> {
    let device = id.device()?;
    let mut state = id.state();
    if state.stage != IdStage::RouteResolved {
        return Err(libc::EINVAL);
    }
    let (local, remote) = (state.local.ok_or(libc::EINVAL)?, state.remote.ok_or(libc::EINVAL)?);
    let way = state.way.ok_or(libc::EINVAL)?;
    let traffic_class = attr::traffic_class(&state);
    let private_data = [state.connect_data.as_slice(), &params.private_data].concat();
    let sink = sink(&id.shared);
    let asked = if id.is_ud() {
        let (space, hop_limit) = (state.space, way.hop_limit);
        let question = Resolve { local, remote, space, traffic_class, hop_limit, private_data };
        device.agent.resolve(&question, sink)
    } else {
        // SAFETY: a field of the public struct.
        let service = service(unsafe { (*id.public()).qp_type })?;
        let (responder_resources, initiator_depth) = params.depths(MAX_RD_ATOM, MAX_RD_ATOM);
        let qp = params.qp_side(id, &state)?;
        (state.responder_resources, state.initiator_depth) = (responder_resources, initiator_depth);
        state.retry = params.retry_count;
        let ack_delay = device.card()?.device_attr().local_ca_ack_delay;
        let ack_timeout = state.options.ack_timeout.unwrap_or_else(|| attr::ack_timeout(ack_delay));
        let request = Connect {
            local,
            remote,
            space: state.space,
            service,
            qp,
            responder_resources,
            initiator_depth,
            flow_control: params.flow_control,
            retry_count: params.retry_count,
            rnr_retry_count: params.rnr_retry_count,
            path_mtu: way.mtu,
            ack_timeout,
            traffic_class,
            hop_limit: way.hop_limit,
            ece: state.local_ece,
            private_data,
        };
        device.agent.connect(&request, sink)
    };
    state.conn = Some(asked.map_err(errno)?);
    state.stage = IdStage::Connected;
    Ok(())
}

/// rdma_connect(3).
pub(crate) unsafe extern "C" fn connect(id: *mut abi::rdma_cm_id, param: *mut abi::rdma_conn_param) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        unsafe {
            let handle = IdHandle::of(id)?;
            let params = ConnectParams::read(param, handle.state().space)?;
            ask(handle, &params)?;
            event::complete(handle)
        }
    })
}

/// rdma_establish(3): for a queue pair that is not the id's.
pub(crate) unsafe extern "C" fn establish(id: *mut abi::rdma_cm_id) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let handle = unsafe { IdHandle::of(id)? };
        if !handle.qp().is_null() {
            return Err(libc::EINVAL);
        }
        let conn = handle.state().conn()?;
        conn.establish().map_err(errno)
    })
}

/// rdma_notify(3).
pub(crate) unsafe extern "C" fn notify(id: *mut abi::rdma_cm_id, event: abi::ibv_event_type) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let handle = unsafe { IdHandle::of(id)? };
        let conn = handle.state().conn()?;
        if event != abi::IBV_EVENT_COMM_EST || handle.is_ud() {
            return Err(libc::EINVAL);
        }
        conn.notify_comm_est().map_err(errno)
    })
}

/// rdma_disconnect(3): the queue pair goes to ERR, which flushes what is posted.
pub(crate) unsafe extern "C" fn disconnect(id: *mut abi::rdma_cm_id) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        unsafe {
            let handle = IdHandle::of(id)?;
            let (conn, stage) = {
                let state = handle.state();
                (state.conn()?, state.stage)
            };
            if handle.is_ud() || !matches!(stage, IdStage::Connected | IdStage::Ended) {
                return Err(libc::EINVAL);
            }
            qp::to_error(handle);
            conn.disconnect().map_err(errno)?;
            // A connection that has ended has no more events.
            if stage == IdStage::Ended { Ok(()) } else { event::complete(handle) }
        }
    })
}

/// ECE as C has it.
pub(super) fn ece_in(from: &abi::ibv_ece) -> Ece {
    Ece { vendor_id: from.vendor_id, options: from.options }
}
