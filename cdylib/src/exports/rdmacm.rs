//! The names of librdmacm, which is the same file as libibverbs.

use crate::rdmacm;
use core::arch::global_asm;

exports! { "@@", "RDMACM_1.0";
    raccept => rdmacm::not_offered,
    rbind => rdmacm::not_offered,
    rclose => rdmacm::not_offered,
    rconnect => rdmacm::not_offered,
    rdma_accept => rdmacm::accept,
    rdma_ack_cm_event => rdmacm::ack_cm_event,
    rdma_bind_addr => rdmacm::bind_addr,
    rdma_connect => rdmacm::connect,
    rdma_create_ep => rdmacm::create_ep,
    rdma_create_event_channel => rdmacm::create_event_channel,
    rdma_create_id => rdmacm::create_id,
    rdma_create_qp => rdmacm::create_qp,
    rdma_create_qp_ex => rdmacm::create_qp_ex,
    rdma_create_srq => rdmacm::create_srq,
    rdma_create_srq_ex => rdmacm::create_srq_ex,
    rdma_destroy_ep => rdmacm::destroy_ep,
    rdma_destroy_event_channel => rdmacm::destroy_event_channel,
    rdma_destroy_id => rdmacm::destroy_id,
    rdma_destroy_qp => rdmacm::destroy_qp,
    rdma_destroy_srq => rdmacm::destroy_srq,
    rdma_disconnect => rdmacm::disconnect,
    rdma_event_str => rdmacm::event_str,
    rdma_free_devices => rdmacm::free_devices,
    rdma_freeaddrinfo => rdmacm::freeaddrinfo,
    rdma_get_cm_event => rdmacm::get_cm_event,
    rdma_get_devices => rdmacm::get_devices,
    rdma_get_dst_port => rdmacm::get_dst_port,
    rdma_get_request => rdmacm::get_request,
    rdma_get_src_port => rdmacm::get_src_port,
    rdma_getaddrinfo => rdmacm::getaddrinfo,
    rdma_join_multicast => rdmacm::join_multicast,
    rdma_leave_multicast => rdmacm::leave_multicast,
    rdma_listen => rdmacm::listen,
    rdma_migrate_id => rdmacm::migrate_id,
    rdma_notify => rdmacm::notify,
    rdma_reject => rdmacm::reject,
    rdma_resolve_addr => rdmacm::resolve_addr,
    rdma_resolve_route => rdmacm::resolve_route,
    rdma_set_option => rdmacm::set_option,
    rfcntl => rdmacm::not_offered,
    rgetpeername => rdmacm::not_offered,
    rgetsockname => rdmacm::not_offered,
    rgetsockopt => rdmacm::not_offered,
    riomap => rdmacm::not_offered,
    riounmap => rdmacm::not_offered,
    riowrite => rdmacm::not_offered,
    rlisten => rdmacm::not_offered,
    rpoll => rdmacm::not_offered,
    rread => rdmacm::not_offered,
    rreadv => rdmacm::not_offered,
    rrecv => rdmacm::not_offered,
    rrecvfrom => rdmacm::not_offered,
    rrecvmsg => rdmacm::not_offered,
    rselect => rdmacm::not_offered,
    rsend => rdmacm::not_offered,
    rsendmsg => rdmacm::not_offered,
    rsendto => rdmacm::not_offered,
    rsetsockopt => rdmacm::not_offered,
    rshutdown => rdmacm::not_offered,
    rsocket => rdmacm::not_offered,
    rwrite => rdmacm::not_offered,
    rwritev => rdmacm::not_offered,
}

exports! { "@@", "RDMACM_1.1";
    rdma_join_multicast_ex => rdmacm::join_multicast_ex,
}

exports! { "@@", "RDMACM_1.2";
    rdma_establish => rdmacm::establish,
    rdma_init_qp_attr => rdmacm::init_qp_attr,
}

exports! { "@@", "RDMACM_1.3";
    rdma_get_remote_ece => rdmacm::get_remote_ece,
    rdma_reject_ece => rdmacm::reject_ece,
    rdma_set_local_ece => rdmacm::set_local_ece,
}

exports! { "@@", "RDMACM_1.4";
    rdma_query_addrinfo => rdmacm::query_addrinfo,
    rdma_resolve_addrinfo => rdmacm::resolve_addrinfo,
    rdma_write_cm_event => rdmacm::write_cm_event,
}

exports! { "@@", "RDMACM_1.5";
    repoll_create => rdmacm::not_offered,
    repoll_ctl => rdmacm::not_offered,
    repoll_wait => rdmacm::not_offered,
}

/// As [`super::keep`], for this table, which may lie in an object of its own.
#[inline(never)]
pub(super) fn keep() {}
