//! The passive side: rdma_listen(3), rdma_accept(3), rdma_reject(3).
//!
//! Owns the id's answers to requests. It must not know the messages that carry them.

use super::connect::{ConnectParams, private};
use super::event;
use super::id::{IdHandle, IdStage};
use super::qp;
use super::resolve;
use super::sink::sink;
use crate::edge::{self, Errno};
use crate::handle::errno;
use core::ffi::{c_int, c_void};
use starverbs_abi as abi;
use starverbs_verbs::cm::{Accept, SidrAnswer, reason, sidr};
use std::net::{Ipv4Addr, SocketAddr};

/// Requests that wait for an answer where a program does not say how many may: Linux' number.
const BACKLOG: u32 = 1024;

/// rdma_listen(3): an id that is not bound listens on any address, on a port that is picked.
pub(crate) unsafe extern "C" fn listen(id: *mut abi::rdma_cm_id, backlog: c_int) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let handle = unsafe { IdHandle::of(id)? };
        handle.shared.ours()?;
        let device = super::device::open()?;
        let mut state = handle.state();
        if state.stage == IdStage::Idle {
            resolve::bind(handle, &mut state, SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)))?;
        }
        if state.stage != IdStage::Bound {
            return Err(libc::EINVAL);
        }
        let backlog = u32::try_from(backlog).ok().filter(|n| (1..=BACKLOG).contains(n)).unwrap_or(BACKLOG);
        let hold = state.hold.as_ref().ok_or(libc::EINVAL)?;
        state.listener = Some(device.agent.listen(hold, backlog, sink(&handle.shared)).map_err(errno)?);
        state.stage = IdStage::Listening;
        Ok(())
    })
}

/// The id of a request that is not answered.
///
/// # Errors
/// EINVAL: it is none.
///
/// # Safety
/// On the call's terms.
unsafe fn asked<'a>(id: *mut abi::rdma_cm_id) -> Result<&'a IdHandle, Errno> {
    // SAFETY: the caller's terms.
    let handle = unsafe { IdHandle::of(id)? };
    if handle.state().stage == IdStage::Asked { Ok(handle) } else { Err(libc::EINVAL) }
}

/// Accepts a question for a datagram queue pair.
fn give_away(id: &IdHandle, params: ConnectParams) -> Result<(), Errno> {
    let mut state = id.state();
    let qpn = params.qp_side(id, &state)?.qpn;
    let answer = SidrAnswer {
        status: sidr::SUCCESS,
        qpn,
        qkey: abi::RDMA_UDP_QKEY,
        ece: state.local_ece,
        private_data: params.private_data,
    };
    state.conn()?.answer(&answer).map_err(errno)?;
    state.stage = IdStage::Connected;
    id.shared.set_open(true);
    Ok(())
}

/// Accepts a connection: the queue pair is ready before the peer gets the REP.
///
/// # Safety
/// The id's queue pair, if it has one, is alive.
unsafe fn take(id: &IdHandle, params: ConnectParams) -> Result<(), Errno> {
    let (conn, accept) = {
        let mut state = id.state();
        // No more than the peer offers, unless the program says so.
        let (answered, under_way) =
            params.depths(state.responder_resources.into(), state.initiator_depth.into());
        (state.responder_resources, state.initiator_depth) = (answered, under_way);
        let accept = Accept {
            qp: params.qp_side(id, &state)?,
            responder_resources: answered,
            initiator_depth: under_way,
            flow_control: params.flow_control,
            rnr_retry_count: params.rnr_retry_count,
            ece: state.local_ece,
            private_data: params.private_data,
        };
        (state.conn()?, accept)
    };
    if !id.qp().is_null() {
        // SAFETY: the caller's terms.
        unsafe { qp::to_rts(id)? };
    }
    // Its events may come before `accept` returns.
    let answered = |stage| {
        id.state().stage = stage;
        id.shared.set_open(stage == IdStage::Connected);
    };
    answered(IdStage::Connected);
    conn.accept(&accept).map_err(|error| {
        answered(IdStage::Asked);
        errno(error)
    })
}

/// rdma_accept(3).
pub(crate) unsafe extern "C" fn accept(id: *mut abi::rdma_cm_id, param: *mut abi::rdma_conn_param) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms. The parameters may be those of the event that the id shows: they are read
        // first.
        unsafe {
            let handle = asked(id)?;
            let params = ConnectParams::read(param, handle.state().space)?;
            if handle.is_ud() {
                give_away(handle, params)?;
                event::forget(handle);
                return Ok(());
            }
            take(handle, params)?;
            event::complete(handle)
        }
    })
}

/// Says no, for this reason.
///
/// # Safety
/// On the call's terms.
unsafe fn refuse(id: *mut abi::rdma_cm_id, data: *const c_void, length: u8, why: u16) -> Result<(), Errno> {
    // SAFETY: the caller's terms.
    unsafe {
        let handle = IdHandle::of(id)?;
        let private_data = private(data, length)?;
        let conn = handle.state().conn()?;
        if handle.is_ud() {
            let (status, qpn, qkey) = (sidr::REJECT, 0, 0);
            let ece = handle.state().local_ece;
            conn.answer(&SidrAnswer { status, qpn, qkey, ece, private_data }).map_err(errno)?;
        } else {
            conn.reject(why, &private_data).map_err(errno)?;
        }
        handle.state().stage = IdStage::Connected;
        handle.shared.set_open(true);
        event::forget(handle);
    }
    Ok(())
}

/// rdma_reject(3).
pub(crate) unsafe extern "C" fn reject(id: *mut abi::rdma_cm_id, data: *const c_void, length: u8) -> c_int {
    // SAFETY: the call's terms.
    edge::minus_one(|| unsafe { refuse(id, data, length, reason::CONSUMER) })
}

/// rdma_reject_ece: as rdma_reject(3), for the peer's enhanced connection options.
pub(crate) unsafe extern "C" fn reject_ece(
    id: *mut abi::rdma_cm_id,
    data: *const c_void,
    length: u8,
) -> c_int {
    // SAFETY: the call's terms.
    edge::minus_one(|| unsafe { refuse(id, data, length, reason::VENDOR_OPTION) })
}
