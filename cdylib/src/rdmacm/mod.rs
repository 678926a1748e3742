//! The C ABI of librdmacm: communication ids, their events, their queue pairs (rdma_cm(7)).
//!
//! An id is a handle as others are: `rdma_cm_id` first, the library's part behind it. Connections are those
//! of `starverbs_verbs::cm`, which reports them through sinks; a sink only queues. What an event brings
//! about (a new id, a queue pair's next state) is done by the thread that takes it from its channel, as
//! programs expect of librdmacm: before rdma_get_cm_event returns, nothing of an id has changed. Must not
//! know the CM's messages.
//!
//! Safety, for all of it: a call takes its pointers on the terms of its man page; "the call's terms" in
//! `SAFETY` comments. An id comes from a call of this library and is used until rdma_destroy_id returns 0, by
//! one thread at a time but for the events of its channel.

mod address;
mod attr;
mod channel;
mod connect;
mod device;
mod ep;
mod event;
mod id;
mod info;
mod lookup;
mod multicast;
mod option;
mod qp;
mod resolve;
mod serve;
mod sink;
mod socket;

pub(crate) use channel::{create_event_channel, destroy_event_channel};
pub(crate) use connect::{connect, disconnect, establish, notify};
pub(crate) use device::{free_devices, get_devices};
pub(crate) use ep::{create_ep, destroy_ep, get_request};
pub(crate) use event::{ack_cm_event, event_str, get_cm_event, write_cm_event};
pub(crate) use id::{create_id, destroy_id, migrate_id};
pub(crate) use info::{freeaddrinfo, getaddrinfo};
pub(crate) use lookup::{query_addrinfo, resolve_addrinfo};
pub(crate) use multicast::{join_multicast, join_multicast_ex, leave_multicast};
pub(crate) use option::{get_remote_ece, set_local_ece, set_option};
pub(crate) use qp::{
    create_qp, create_qp_ex, create_srq, create_srq_ex, destroy_qp, destroy_srq, init_qp_attr,
};
pub(crate) use resolve::{bind_addr, get_dst_port, get_src_port, resolve_addr, resolve_route};
pub(crate) use serve::{accept, listen, reject, reject_ece};
pub(crate) use socket::not_offered;
