//! Events as programs see them: getting them, what that brings about, acknowledging them
//! (rdma_get_cm_event(3)).
//!
//! Owns the event's handle. It must not know how connections are asked for.

use super::attr;
use super::channel::{ChannelHandle, Queue};
use super::device;
use super::id::{IdHandle, IdStage, IdState, PathAttr, PeerParams};
use super::multicast::{self, Joined};
use super::qp;
use super::sink::{IdShared, What};
use crate::edge::{self, Errno};
use crate::handle::{errno, given, zeroed};
use core::ffi::{CStr, c_char, c_int};
use starverbs_abi::{self as abi, newer};
use starverbs_verbs::cm::{
    CmEventKind, Conn, ConnectResponse, Request, Resolved, Resolving, Service, reason,
};
use std::sync::Arc;

/// An event that the program has.
#[repr(C)]
struct EventHandle {
    ibv: abi::rdma_cm_event,
    /// What `private_data` points to
    private: Vec<u8>,
    /// Whom the acknowledgement is for
    owner: Arc<IdShared>,
}

/// An event in the making.
struct News {
    id: *mut abi::rdma_cm_id,
    listen_id: *mut abi::rdma_cm_id,
    event: abi::rdma_cm_event_type,
    status: c_int,
    param: abi::rdma_cm_event__bindgen_ty_1,
    private: Vec<u8>,
}

impl News {
    fn new(id: *mut abi::rdma_cm_id, event: abi::rdma_cm_event_type, status: c_int) -> News {
        // SAFETY: numbers and pointers: zero is valid.
        let param = unsafe { zeroed() };
        News { id, listen_id: core::ptr::null_mut(), event, status, param, private: Vec::new() }
    }

    fn with_private(mut self, private: Vec<u8>) -> News {
        self.private = private;
        self
    }

    fn conn(mut self, conn: abi::rdma_conn_param) -> News {
        self.param.conn = conn;
        self
    }

    fn arg(mut self, arg: u64) -> News {
        let mut param = newer::rdma_cm_event_param { older: self.param };
        param.arg = arg;
        // SAFETY: each of the union's members is numbers and pointers, which are written.
        self.param = unsafe { param.older };
        self
    }

    fn ud(mut self, ud: abi::rdma_ud_param) -> News {
        self.param.ud = ud;
        self
    }

    /// Its handle.
    fn publish(self, owner: Arc<IdShared>) -> *mut abi::rdma_cm_event {
        let News { id, listen_id, event, status, param, private } = self;
        let ibv = abi::rdma_cm_event { id, listen_id, event, status, param };
        let handle = Box::leak(Box::new(EventHandle { ibv, private, owner }));
        if !handle.private.is_empty() {
            // Both kinds of parameters begin with them.
            handle.ibv.param.conn.private_data = handle.private.as_ptr().cast();
            handle.ibv.param.conn.private_data_len = u8::try_from(handle.private.len()).unwrap_or(u8::MAX);
        }
        (handle as *mut EventHandle).cast()
    }
}

fn no_param() -> abi::rdma_conn_param {
    // SAFETY: numbers and a pointer: zero is valid.
    unsafe { zeroed() }
}

/// A request's numbers.
fn asked(from: &Request) -> abi::rdma_conn_param {
    abi::rdma_conn_param {
        responder_resources: from.responder_resources,
        initiator_depth: from.initiator_depth,
        flow_control: from.flow_control.into(),
        retry_count: from.retry_count,
        rnr_retry_count: from.rnr_retry_count,
        srq: from.qp.srq.into(),
        qp_num: from.qp.qpn,
        ..no_param()
    }
}

/// A response's numbers.
fn answered(from: &ConnectResponse) -> abi::rdma_conn_param {
    abi::rdma_conn_param {
        responder_resources: from.responder_resources,
        initiator_depth: from.initiator_depth,
        flow_control: from.flow_control.into(),
        rnr_retry_count: from.rnr_retry_count,
        srq: from.qp.srq.into(),
        qp_num: from.qp.qpn,
        ..no_param()
    }
}

/// The next event of a channel: its id's `listen` for a request.
///
/// # Errors
/// EAGAIN on a descriptor that does not block, EINTR.
pub(super) fn next(queue: &Queue) -> Result<*mut abi::rdma_cm_event, Errno> {
    loop {
        if queue.is_empty() {
            device::about_to_sleep();
        }
        let raw = queue.pop().map_err(errno)?;
        let Some(handle) = raw.id.deliver() else { continue };
        // SAFETY: an event that is not acknowledged keeps the handle alive.
        let news = unsafe { bring_about(handle.as_ref(), raw.what) };
        match news {
            Some(news) => return Ok(news.publish(raw.id)),
            None => raw.id.ack(),
        }
    }
}

/// Does to the id what an event brings about; `None`: there is nothing for the program.
fn bring_about(id: &IdHandle, what: What) -> Option<News> {
    match what {
        What::Plain(event, status) => Some(News::new(id.public(), event, status)),
        What::Joined(joined) => Some(group_joined(id, joined)),
        What::User(status, arg) => Some(News::new(id.public(), newer::RDMA_CM_EVENT_USER, status).arg(arg)),
        What::Cm(kind, child) => connection(id, kind, child),
    }
}

fn connection(id: &IdHandle, kind: CmEventKind, child: Option<Arc<IdShared>>) -> Option<News> {
    let plain = |event, status| News::new(id.public(), event, status);
    Some(match kind {
        CmEventKind::Request(conn, request) => return requested(id, conn, &request, child?),
        CmEventKind::Resolving(conn, request) => return asked_for(id, conn, &request, child?),
        CmEventKind::Response(response) => responded(id, &response),
        CmEventKind::Established => plain(abi::RDMA_CM_EVENT_ESTABLISHED, 0),
        CmEventKind::Resolved(answer) => resolved(id, &answer),
        CmEventKind::Rejected { reason, private_data } => {
            over(id);
            // SAFETY: the program destroys a queue pair that it has on an id by a call of this library only,
            // which waits.
            unsafe { qp::to_error(id) };
            plain(abi::RDMA_CM_EVENT_REJECTED, reason.into()).with_private(private_data)
        }
        CmEventKind::Unreachable { status } => {
            over(id);
            plain(abi::RDMA_CM_EVENT_UNREACHABLE, status)
        }
        CmEventKind::Disconnected { status } => {
            over(id);
            plain(abi::RDMA_CM_EVENT_DISCONNECTED, status)
        }
        CmEventKind::TimewaitExit => plain(abi::RDMA_CM_EVENT_TIMEWAIT_EXIT, 0),
    })
}

/// The id's connection has no more events. An id for datagrams may still join groups.
fn over(id: &IdHandle) {
    if !id.is_ud() {
        id.state().stage = IdStage::Ended;
    }
}

/// A new id for a request, on the listener's channel; `None` if it cannot be had, which rejects the request.
fn new_id(
    listener: &IdHandle,
    shared: Arc<IdShared>,
    qp_type: abi::ibv_qp_type,
    fill: impl FnOnce(&mut IdState),
) -> Option<*mut abi::rdma_cm_id> {
    let space = listener.state().space;
    // SAFETY: the listener is alive, and so is its channel.
    unsafe {
        let public = listener.public();
        let channel = if listener.is_sync() { core::ptr::null_mut() } else { (*public).channel };
        let device = device::open().ok()?;
        let id = IdHandle::make(channel, Some(shared), (*public).context, space, qp_type).ok()?;
        let handle = IdHandle::of(id).ok()?;
        handle.take_device(&device);
        let mut state = handle.state();
        fill(&mut state);
        state.stage = IdStage::Asked;
        handle.show_addresses(&state);
        super::resolve::show_path(handle, &state);
        Some(id)
    }
}

fn requested(listener: &IdHandle, conn: Conn, request: &Request, shared: Arc<IdShared>) -> Option<News> {
    let qp_type = match request.service {
        Service::Rc => abi::IBV_QPT_RC,
        Service::Uc => abi::IBV_QPT_UC,
        Service::Xrc => abi::IBV_QPT_XRC_RECV,
    };
    conn.taken();
    let id = new_id(listener, shared, qp_type, |state| {
        (state.local, state.remote) = (Some(request.local), Some(request.remote));
        state.conn = Some(conn);
        state.responder_resources = request.responder_resources;
        state.initiator_depth = request.initiator_depth;
        state.remote_ece = request.ece;
        state.peer = Some(PeerParams {
            qp: request.qp,
            rnr_retry: request.rnr_retry_count,
            retry: request.retry_count,
            ack_timeout: request.ack_timeout,
        });
        state.way = Some(PathAttr {
            mtu: request.path_mtu,
            traffic_class: request.traffic_class,
            hop_limit: request.hop_limit,
        });
    })?;
    let mut news = News::new(id, abi::RDMA_CM_EVENT_CONNECT_REQUEST, 0).conn(asked(request));
    news.listen_id = listener.public();
    Some(news.with_private(request.private_data.clone()))
}

fn asked_for(listener: &IdHandle, conn: Conn, request: &Resolving, shared: Arc<IdShared>) -> Option<News> {
    conn.taken();
    let id = new_id(listener, shared, abi::IBV_QPT_UD, |state| {
        (state.local, state.remote) = (Some(request.local), Some(request.remote));
        state.conn = Some(conn);
    })?;
    let mut news = News::new(id, abi::RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    news.listen_id = listener.public();
    Some(news.with_private(request.private_data.clone()))
}

/// The peer accepted: the queue pair goes to RTS and the peer gets an RTU, unless the program does both
/// itself.
fn responded(id: &IdHandle, response: &ConnectResponse) -> News {
    let conn = {
        let mut state = id.state();
        state.remote_ece = response.ece;
        state.peer = Some(PeerParams {
            qp: response.qp,
            rnr_retry: response.rnr_retry_count,
            retry: state.retry,
            ack_timeout: attr::ack_timeout(response.target_ack_delay),
        });
        // What the peer would initiate is what this side answers, and the other way round.
        state.responder_resources = response.responder_resources;
        state.initiator_depth = response.initiator_depth;
        state.conn.clone()
    };
    let news = |event, status| {
        News::new(id.public(), event, status)
            .conn(answered(response))
            .with_private(response.private_data.clone())
    };
    if !qp::is_there(id) {
        return news(abi::RDMA_CM_EVENT_CONNECT_RESPONSE, 0);
    }
    let established = || {
        // SAFETY: the program destroys a queue pair that it has on an id by a call of this library only,
        // which waits.
        unsafe { qp::to_rts(id)? };
        conn.as_ref().ok_or(libc::EINVAL)?.establish().map_err(errno)
    };
    match established() {
        Ok(()) => news(abi::RDMA_CM_EVENT_ESTABLISHED, 0),
        Err(error) => {
            // SAFETY: as above.
            unsafe { qp::to_error(id) };
            over(id);
            if let Some(conn) = conn {
                let _ = conn.reject(reason::CONSUMER, &[]);
            }
            news(abi::RDMA_CM_EVENT_CONNECT_ERROR, -error)
        }
    }
}

fn resolved(id: &IdHandle, answer: &Resolved) -> News {
    let state = &mut *id.state();
    state.remote_ece = answer.ece;
    let ud = abi::rdma_ud_param {
        private_data: core::ptr::null(),
        private_data_len: 0,
        ah_attr: attr::address(state),
        qp_num: answer.qpn,
        qkey: answer.qkey,
    };
    News::new(id.public(), abi::RDMA_CM_EVENT_ESTABLISHED, 0).ud(ud).with_private(answer.private_data.clone())
}

/// The join's context takes the place of private data.
fn group_joined(id: &IdHandle, joined: Joined) -> News {
    let (status, ud) = multicast::joined(id, &joined);
    let event =
        if status == 0 { abi::RDMA_CM_EVENT_MULTICAST_JOIN } else { abi::RDMA_CM_EVENT_MULTICAST_ERROR };
    News::new(id.public(), event, status).ud(ud)
}

/// rdma_get_cm_event(3); EIO in a forked child.
pub(crate) unsafe extern "C" fn get_cm_event(
    channel: *mut abi::rdma_event_channel,
    event: *mut *mut abi::rdma_cm_event,
) -> c_int {
    edge::minus_one(|| {
        let to = given(event)?;
        // SAFETY: the call's terms.
        let queue = Arc::clone(unsafe { ChannelHandle::of(channel) }.ok_or(libc::EINVAL)?.queue()?);
        let news = next(&queue)?;
        // SAFETY: the call's terms.
        unsafe { to.write(news) };
        Ok(())
    })
}

/// rdma_write_cm_event(3): EINVAL unless it is an event that only programs write.
pub(crate) unsafe extern "C" fn write_cm_event(
    id: *mut abi::rdma_cm_id,
    event: abi::rdma_cm_event_type,
    status: c_int,
    arg: u64,
) -> c_int {
    edge::minus_one(|| {
        // SAFETY: the call's terms.
        let handle = unsafe { IdHandle::of(id)? };
        if event != newer::RDMA_CM_EVENT_USER {
            return Err(libc::EINVAL);
        }
        handle.shared.write(What::User(status, arg))
    })
}

/// rdma_ack_cm_event(3).
pub(crate) unsafe extern "C" fn ack_cm_event(event: *mut abi::rdma_cm_event) -> c_int {
    edge::minus_one(|| {
        let handle = given(event)?.as_ptr().cast::<EventHandle>();
        // SAFETY: the program gives the event up, and it was made with Box; the public struct is its first
        // field.
        let handle = unsafe { Box::from_raw(handle) };
        handle.owner.ack();
        Ok(())
    })
}

/// Acknowledges the event that a waiting id shows, if any.
///
/// # Safety
/// No other thread uses the id.
pub(super) unsafe fn forget(id: &IdHandle) {
    // SAFETY: the caller's terms; the event came from `next`, and goes now.
    unsafe {
        let event = core::mem::replace(&mut (*id.public()).event, core::ptr::null_mut());
        if !event.is_null() {
            ack_cm_event(event);
        }
    }
}

/// Of a waiting id: waits for the event of what was begun, and shows it in the id.
///
/// # Errors
/// ECONNREFUSED: the peer said no; otherwise what the event's status says.
///
/// # Safety
/// No other thread uses the id.
pub(super) unsafe fn complete(id: &IdHandle) -> Result<(), Errno> {
    if !id.is_sync() {
        return Ok(());
    }
    // SAFETY: the caller's terms; the event is alive until it is acknowledged.
    unsafe {
        forget(id);
        id.shared.ours()?;
        let queue = id.shared.queue();
        let event = next(&queue)?;
        (*id.public()).event = event;
        match ((*event).event, (*event).status) {
            (_, 0) => Ok(()),
            (abi::RDMA_CM_EVENT_REJECTED, _) => Err(libc::ECONNREFUSED),
            (_, status) => Err(status.abs()),
        }
    }
}

/// rdma_event_str(3).
pub(crate) extern "C" fn event_str(event: abi::rdma_cm_event_type) -> *const c_char {
    const NAMES: [&CStr; 18] = [
        c"RDMA_CM_EVENT_ADDR_RESOLVED",
        c"RDMA_CM_EVENT_ADDR_ERROR",
        c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        c"RDMA_CM_EVENT_ROUTE_ERROR",
        c"RDMA_CM_EVENT_CONNECT_REQUEST",
        c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        c"RDMA_CM_EVENT_CONNECT_ERROR",
        c"RDMA_CM_EVENT_UNREACHABLE",
        c"RDMA_CM_EVENT_REJECTED",
        c"RDMA_CM_EVENT_ESTABLISHED",
        c"RDMA_CM_EVENT_DISCONNECTED",
        c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        c"RDMA_CM_EVENT_MULTICAST_JOIN",
        c"RDMA_CM_EVENT_MULTICAST_ERROR",
        c"RDMA_CM_EVENT_ADDR_CHANGE",
        c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
        c"RDMA_CM_EVENT_ADDRINFO_ERROR",
    ];
    NAMES.get(event as usize).map_or(c"UNKNOWN EVENT".as_ptr(), |name| name.as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_has_its_name() {
        let name = |event| {
            // SAFETY: a string that lives as long as the program.
            unsafe { CStr::from_ptr(event_str(event)) }
        };
        assert_eq!(name(abi::RDMA_CM_EVENT_ADDR_RESOLVED), c"RDMA_CM_EVENT_ADDR_RESOLVED");
        assert_eq!(name(abi::RDMA_CM_EVENT_ESTABLISHED), c"RDMA_CM_EVENT_ESTABLISHED");
        assert_eq!(name(abi::RDMA_CM_EVENT_TIMEWAIT_EXIT), c"RDMA_CM_EVENT_TIMEWAIT_EXIT");
        assert_eq!(name(newer::RDMA_CM_EVENT_ADDRINFO_ERROR), c"RDMA_CM_EVENT_ADDRINFO_ERROR");
        // Nor has librdmacm a name for what programs write.
        assert_eq!(name(newer::RDMA_CM_EVENT_USER), c"UNKNOWN EVENT");
    }
}
