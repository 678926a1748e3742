//! The table of exported symbols: which C name, at which version, is which Rust function.
//!
//! Owns the assembly that gives a symbol its version: a label that jumps to the Rust function and a `.symver`
//! that names the label. (`no_mangle` gives a name and no version.) It must not know what a function does.
//! `abi/libibverbs.map` lists the same names, tools/scripts/link.sh links by it, and tests/abi compares the
//! result with Debian's library.
//!
//! The functions behind several names (`private::not_offered` and its like) look at no argument, so that
//! jumping to them with any C argument list is sound under both calling conventions served here.

use crate::{
    ah, buf, compat, context, cq, device, events, kernel, memory, pd_mr, private, qp, query, rates, srq,
    stardv, strings, system,
};
use core::arch::global_asm;

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {function}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {function}"
    };
}

/// The directive that renames a label to a versioned symbol. Only a library may have those, a test program
/// may not.
#[cfg(not(test))]
macro_rules! versioned {
    ($($part:expr),*) => { concat!(".symver ", $($part,)* ", remove") };
}
#[cfg(test)]
macro_rules! versioned {
    ($($part:expr),*) => {
        ""
    };
}

/// One table at one version node or several: "@@" makes its names the default for new programs, "@" keeps
/// them for those that ask for that node.
macro_rules! exports {
    ($($at:literal, $version:literal);+; $($entry:ident => $function:path,)*) => {
        exports! { @each ($($at, $version);+) { $($entry => $function,)* } }
    };
    (@each ($($at:literal, $version:literal);+) $table:tt) => {
        $( exports! { @node $at, $version, $table } )+
    };
    (@node $at:literal, $version:literal, { $($name:ident => $function:path,)* }) => { $(
        global_asm!(
            concat!(".pushsection .text.", stringify!($name), ".", $version, ",\"ax\",@progbits"),
            ".p2align 4",
            concat!(".globl __sv_", stringify!($name), "_", $version),
            concat!(".type __sv_", stringify!($name), "_", $version, ",@function"),
            concat!("__sv_", stringify!($name), "_", $version, ":"),
            jump!(),
            concat!(
                ".size __sv_", stringify!($name), "_", $version,
                ", . - __sv_", stringify!($name), "_", $version
            ),
            versioned!("__sv_", stringify!($name), "_", $version, ", ", stringify!($name), $at, $version),
            ".popsection",
            function = sym $function,
        );
    )* };
}

/// One byte of data with a name at each node.
macro_rules! flag {
    ($($at:literal, $version:literal);+; $name:ident) => {
        global_asm!(
            concat!(".pushsection .bss.", stringify!($name), ",\"aw\",@nobits"),
            $(
                concat!(".globl __sv_", stringify!($name), "_", $version),
                concat!(".type __sv_", stringify!($name), "_", $version, ",@object"),
                concat!("__sv_", stringify!($name), "_", $version, ":"),
                concat!(".size __sv_", stringify!($name), "_", $version, ", 1"),
                versioned!("__sv_", stringify!($name), "_", $version, ", ", stringify!($name), $at, $version),
            )+
            ".zero 1",
            ".popsection",
        );
    };
}

/// The same at every private node. Each has every name that any of them ever had, so that a driver of any
/// release finds its own.
macro_rules! private {
    ($what:ident; $($rest:tt)*) => {
        $what! {
            "@@", "IBVERBS_PRIVATE_34";
            "@", "IBVERBS_PRIVATE_57";
            "@", "IBVERBS_PRIVATE_59";
            "@", "IBVERBS_PRIVATE_64";
            "@", "IBVERBS_PRIVATE_65";
            $($rest)*
        }
    };
}

exports! { "@@", "IBVERBS_1.0";
    ibv_copy_path_rec_from_kern => kernel::copy_path_rec_from_kern,
    ibv_copy_path_rec_to_kern => kernel::copy_path_rec_to_kern,
    ibv_copy_qp_attr_from_kern => kernel::copy_qp_attr_from_kern,
    ibv_create_comp_channel => compat::create_comp_channel,
    ibv_destroy_comp_channel => compat::destroy_comp_channel,
    ibv_get_sysfs_path => system::get_sysfs_path,
    ibv_rate_to_mult => rates::rate_to_mult,
    ibv_read_sysfs_file => system::read_sysfs_file,
    mult_to_ibv_rate => rates::mult_to_rate,
}

exports! { "@@", "IBVERBS_1.1";
    ibv_ack_async_event => events::ack_async_event,
    ibv_ack_cq_events => events::ack_cq_events,
    ibv_alloc_pd => pd_mr::alloc_pd,
    ibv_attach_mcast => qp::attach_mcast,
    ibv_close_device => context::close_device,
    ibv_copy_ah_attr_from_kern => kernel::copy_ah_attr_from_kern,
    ibv_create_ah => ah::create_ah,
    ibv_create_ah_from_wc => ah::create_ah_from_wc,
    ibv_create_cq => cq::create_cq,
    ibv_create_qp => qp::create_qp,
    ibv_create_srq => srq::create_srq,
    ibv_dealloc_pd => pd_mr::dealloc_pd,
    ibv_dereg_mr => pd_mr::dereg_mr,
    ibv_destroy_ah => ah::destroy_ah,
    ibv_destroy_cq => cq::destroy_cq,
    ibv_destroy_qp => qp::destroy_qp,
    ibv_destroy_srq => srq::destroy_srq,
    ibv_detach_mcast => qp::detach_mcast,
    ibv_dofork_range => system::fork_range,
    ibv_dontfork_range => system::fork_range,
    ibv_event_type_str => strings::event_type_str,
    ibv_fork_init => system::fork_init,
    ibv_free_device_list => device::free_device_list,
    ibv_get_async_event => events::get_async_event,
    ibv_get_cq_event => events::get_cq_event,
    ibv_get_device_guid => device::get_device_guid,
    ibv_get_device_list => device::get_device_list,
    ibv_get_device_name => device::get_device_name,
    ibv_init_ah_from_wc => ah::init_ah_from_wc,
    ibv_modify_qp => qp::modify_qp,
    ibv_modify_srq => srq::modify_srq,
    ibv_node_type_str => strings::node_type_str,
    ibv_open_device => context::open_device,
    ibv_port_state_str => strings::port_state_str,
    ibv_query_device => query::query_device,
    ibv_query_gid => query::query_gid,
    ibv_query_pkey => query::query_pkey,
    ibv_query_port => query::query_port_compat,
    ibv_query_qp => qp::query_qp,
    ibv_query_srq => srq::query_srq,
    ibv_rate_to_mbps => rates::rate_to_mbps,
    ibv_reg_mr => pd_mr::reg_mr,
    ibv_rereg_mr => memory::rereg_mr,
    ibv_resize_cq => cq::resize_cq,
    ibv_resolve_eth_l2_from_gid => ah::resolve_eth_l2_from_gid,
    ibv_wc_status_str => strings::wc_status_str,
    mbps_to_ibv_rate => rates::mbps_to_rate,
}

exports! { "@@", "IBVERBS_1.5";
    ibv_get_pkey_index => query::get_pkey_index,
}

exports! { "@@", "IBVERBS_1.6";
    ibv_qp_to_qp_ex => qp::qp_to_qp_ex,
}

exports! { "@@", "IBVERBS_1.7";
    ibv_reg_mr_iova => pd_mr::reg_mr_iova,
}

exports! { "@@", "IBVERBS_1.8";
    ibv_reg_mr_iova2 => pd_mr::reg_mr_iova2,
}

exports! { "@@", "IBVERBS_1.9";
    ibv_get_device_index => device::get_device_index,
}

exports! { "@@", "IBVERBS_1.10";
    ibv_import_device => context::import_device,
    ibv_import_mr => memory::import_mr,
    ibv_import_pd => memory::import_pd,
    ibv_query_ece => qp::query_ece,
    ibv_set_ece => qp::set_ece,
    ibv_unimport_mr => memory::unimport_mr,
    ibv_unimport_pd => memory::unimport_pd,
}

exports! { "@@", "IBVERBS_1.11";
    _ibv_query_gid_ex => query::query_gid_ex,
    _ibv_query_gid_table => query::query_gid_table,
}

exports! { "@@", "IBVERBS_1.12";
    ibv_reg_dmabuf_mr => memory::reg_dmabuf_mr,
}

exports! { "@@", "IBVERBS_1.13";
    ibv_import_dm => memory::import_dm,
    ibv_is_fork_initialized => system::is_fork_initialized,
    ibv_unimport_dm => memory::unimport_dm,
}

exports! { "@@", "IBVERBS_1.14";
    ibv_query_qp_data_in_order => qp::query_qp_data_in_order,
}

exports! { "@@", "IBVERBS_1.15";
    ibv_alloc_dmah => private::no_object,
    ibv_dealloc_dmah => private::not_offered,
    ibv_reg_mr_ex => buf::reg_mr_ex,
}

exports! { "@@", "IBVERBS_1.16";
    ibv_dm_export_dmabuf_fd => private::minus_one,
    ibv_query_port_speed => query::query_port_speed,
}

exports! { "@@", "IBVERBS_1.17";
    ibv_alloc_buf => buf::alloc_buf,
    ibv_free_buf => buf::free_buf,
    ibv_reg_buf_mr => buf::reg_buf_mr,
}

exports! { "@@", "IBVERBS_1.18";
    _ibv_query_comp_cntr_caps => private::not_offered,
    ibv_create_comp_cntr => private::no_object,
    ibv_destroy_comp_cntr => private::not_offered,
    ibv_export_buf_dmabuf_fd => buf::export_buf_dmabuf_fd,
    ibv_inc_comp_cntr => private::not_offered,
    ibv_inc_err_comp_cntr => private::not_offered,
    ibv_qp_attach_comp_cntr => private::not_offered,
    ibv_read_comp_cntr => private::not_offered,
    ibv_read_err_comp_cntr => private::not_offered,
    ibv_set_comp_cntr => private::not_offered,
    ibv_set_err_comp_cntr => private::not_offered,
}

/* Direct verbs: include/infiniband/stardv.h. */
exports! { "@@", "STARDV_1.0";
    _stardv_list_counters => stardv::list_counters,
    _stardv_onerma_poll => stardv::onerma::poll,
    stardv_onerma_close => stardv::onerma::close,
    stardv_onerma_create_region => stardv::onerma::create_region,
    stardv_onerma_derive_key => stardv::onerma::derive_key,
    stardv_onerma_derive_peer_key => stardv::onerma::derive_peer_key,
    stardv_onerma_destroy_region => stardv::onerma::destroy_region,
    stardv_onerma_open => stardv::onerma::open,
    stardv_onerma_post => stardv::onerma::post,
    stardv_onerma_query_counters => stardv::onerma::query_counters,
    stardv_onerma_set_key => stardv::onerma::set_key,
    stardv_create_qp => stardv::qp::create_qp,
    stardv_call_kernel => stardv::rpc::call_kernel,
    stardv_load_kernel => stardv::rpc::load_kernel,
    stardv_load_module => stardv::rpc::load_module,
    stardv_post_rpc => stardv::rpc::post_rpc,
    stardv_post_rpc_write => stardv::rpc::post_rpc_write,
    stardv_unload_kernel => stardv::rpc::unload_kernel,
    stardv_wr_rpc => stardv::rpc::wr_rpc,
    stardv_wr_rpc_write => stardv::rpc::wr_rpc_write,
    stardv_is_supported => stardv::is_supported,
    stardv_query_counters => stardv::query_counters,
    stardv_modify_qp => stardv::qp::modify_qp,
    stardv_query_qp => stardv::qp::query_qp,
}

private! { exports;
    __ioctl_final_num_attrs => private::no_attributes,
    __verbs_log => private::nothing,
    _verbs_init_and_alloc_context => private::no_object,
    execute_ioctl => private::not_offered,
    ibv_cmd_advise_mr => private::not_offered,
    ibv_cmd_alloc_dm => private::not_offered,
    ibv_cmd_alloc_dmah => private::not_offered,
    ibv_cmd_alloc_mw => private::not_offered,
    ibv_cmd_alloc_pd => private::not_offered,
    ibv_cmd_attach_mcast => private::not_offered,
    ibv_cmd_close_xrcd => private::not_offered,
    ibv_cmd_create_ah => private::not_offered,
    ibv_cmd_create_comp_cntr => private::not_offered,
    ibv_cmd_create_counters => private::not_offered,
    ibv_cmd_create_cq => private::not_offered,
    ibv_cmd_create_cq_ex => private::not_offered,
    ibv_cmd_create_cq_ex2 => private::not_offered,
    ibv_cmd_create_flow => private::not_offered,
    ibv_cmd_create_flow_action_esp => private::not_offered,
    ibv_cmd_create_qp => private::not_offered,
    ibv_cmd_create_qp_ex => private::not_offered,
    ibv_cmd_create_qp_ex2 => private::not_offered,
    ibv_cmd_create_rwq_ind_table => private::not_offered,
    ibv_cmd_create_srq => private::not_offered,
    ibv_cmd_create_srq_ex => private::not_offered,
    ibv_cmd_create_wq => private::not_offered,
    ibv_cmd_dealloc_mw => private::not_offered,
    ibv_cmd_dealloc_pd => private::not_offered,
    ibv_cmd_dereg_mr => private::not_offered,
    ibv_cmd_destroy_ah => private::not_offered,
    ibv_cmd_destroy_comp_cntr => private::not_offered,
    ibv_cmd_destroy_counters => private::not_offered,
    ibv_cmd_destroy_cq => private::not_offered,
    ibv_cmd_destroy_flow => private::not_offered,
    ibv_cmd_destroy_flow_action => private::not_offered,
    ibv_cmd_destroy_qp => private::not_offered,
    ibv_cmd_destroy_rwq_ind_table => private::not_offered,
    ibv_cmd_destroy_srq => private::not_offered,
    ibv_cmd_destroy_wq => private::not_offered,
    ibv_cmd_detach_mcast => private::not_offered,
    ibv_cmd_export_dmabuf_fd => private::minus_one,
    ibv_cmd_free_dm => private::not_offered,
    ibv_cmd_free_dmah => private::not_offered,
    ibv_cmd_get_context => private::not_offered,
    ibv_cmd_inc_comp_cntr => private::not_offered,
    ibv_cmd_inc_err_comp_cntr => private::not_offered,
    ibv_cmd_modify_cq => private::not_offered,
    ibv_cmd_modify_flow_action_esp => private::not_offered,
    ibv_cmd_modify_qp => private::not_offered,
    ibv_cmd_modify_qp_ex => private::not_offered,
    ibv_cmd_modify_srq => private::not_offered,
    ibv_cmd_modify_wq => private::not_offered,
    ibv_cmd_open_qp => private::not_offered,
    ibv_cmd_open_xrcd => private::not_offered,
    ibv_cmd_poll_cq => private::minus_one,
    ibv_cmd_post_recv => private::not_offered,
    ibv_cmd_post_send => private::not_offered,
    ibv_cmd_post_srq_recv => private::not_offered,
    ibv_cmd_qp_attach_comp_cntr => private::not_offered,
    ibv_cmd_query_comp_cntr_caps => private::not_offered,
    ibv_cmd_query_context => private::not_offered,
    ibv_cmd_query_device_any => private::not_offered,
    ibv_cmd_query_mr => private::not_offered,
    ibv_cmd_query_port => private::not_offered,
    ibv_cmd_query_port_speed => private::not_offered,
    ibv_cmd_query_qp => private::not_offered,
    ibv_cmd_query_srq => private::not_offered,
    ibv_cmd_read_comp_cntr => private::not_offered,
    ibv_cmd_read_counters => private::not_offered,
    ibv_cmd_read_err_comp_cntr => private::not_offered,
    ibv_cmd_reg_dm_mr => private::not_offered,
    ibv_cmd_reg_dmabuf_mr => private::not_offered,
    ibv_cmd_reg_mr => private::not_offered,
    ibv_cmd_reg_mr_ex => private::not_offered,
    ibv_cmd_req_notify_cq => private::not_offered,
    ibv_cmd_rereg_mr => private::not_offered,
    ibv_cmd_resize_cq => private::not_offered,
    ibv_cmd_set_comp_cntr => private::not_offered,
    ibv_cmd_set_err_comp_cntr => private::not_offered,
    ibv_dmabuf_heap_alloc => private::no_object,
    ibv_dmabuf_heap_cc_shared_init => private::no_object,
    ibv_dmabuf_heap_destroy => private::nothing,
    ibv_dmabuf_heap_free => private::nothing,
    ibv_query_gid_type => query::query_gid_type,
    ibv_read_ibdev_sysfs_file => private::minus_one,
    ibv_wr_opcode_str => strings::wr_opcode_str,
    verbs_init_cq => private::nothing,
    verbs_open_device => private::no_object,
    verbs_set_ops => private::nothing,
    verbs_uninit_context => private::nothing,
}

// Drivers set it when the kernel may take their device away. Nobody reads it here: there is no kernel device.
private! { flag; verbs_allow_disassociate_destroy }

exports! { "@@", "IBVERBS_PRIVATE_34"; verbs_register_driver_34 => private::register_driver, }
exports! { "@@", "IBVERBS_PRIVATE_57"; verbs_register_driver_57 => private::register_driver, }
exports! { "@@", "IBVERBS_PRIVATE_59"; verbs_register_driver_59 => private::register_driver, }
exports! { "@@", "IBVERBS_PRIVATE_64"; verbs_register_driver_64 => private::register_driver, }
exports! { "@@", "IBVERBS_PRIVATE_65"; verbs_register_driver_65 => private::register_driver, }

exports! { "@", "IBVERBS_1.0";
    ibv_ack_async_event => compat::ack_async_event,
    ibv_ack_cq_events => compat::ack_cq_events,
    ibv_alloc_pd => compat::alloc_pd,
    ibv_attach_mcast => compat::attach_mcast,
    ibv_close_device => compat::close_device,
    ibv_create_ah => compat::create_ah,
    ibv_create_cq => compat::create_cq,
    ibv_create_qp => compat::create_qp,
    ibv_create_srq => compat::create_srq,
    ibv_dealloc_pd => compat::dealloc_pd,
    ibv_dereg_mr => compat::dereg_mr,
    ibv_destroy_ah => compat::destroy_ah,
    ibv_destroy_cq => compat::destroy_cq,
    ibv_destroy_qp => compat::destroy_qp,
    ibv_destroy_srq => compat::destroy_srq,
    ibv_detach_mcast => compat::detach_mcast,
    ibv_free_device_list => compat::free_device_list,
    ibv_get_async_event => compat::get_async_event,
    ibv_get_cq_event => compat::get_cq_event,
    ibv_get_device_guid => compat::get_device_guid,
    ibv_get_device_list => compat::get_device_list,
    ibv_get_device_name => compat::get_device_name,
    ibv_modify_qp => compat::modify_qp,
    ibv_modify_srq => compat::modify_srq,
    ibv_open_device => compat::open_device,
    ibv_query_device => compat::query_device,
    ibv_query_gid => compat::query_gid,
    ibv_query_pkey => compat::query_pkey,
    ibv_query_port => compat::query_port,
    ibv_query_qp => compat::query_qp,
    ibv_query_srq => compat::query_srq,
    ibv_reg_mr => compat::reg_mr,
    ibv_resize_cq => compat::resize_cq,
}

exports! { "@", "IBVERBS_1.1";
    ibv_register_driver => private::nothing,
}

mod rdmacm;

/// Does nothing. A library that carries this crate as an rlib (`cdylib/rlib`) refers to it, so that the
/// linker takes the symbols too.
#[inline(never)]
pub fn keep() {
    rdmacm::keep();
}
