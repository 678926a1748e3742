//! What a program asks of the device and its port: attributes, GIDs, P_Keys.
//!
//! Owns the translation of those answers into C structs. It must not know any object but the context.

use crate::context::ContextHandle;
use crate::edge;
use crate::handle::{errno, given, zeroed};
use crate::tags;
use core::ffi::{c_int, c_uint};
use core::mem::offset_of;
use starverbs_abi as abi;
use starverbs_verbs::{DeviceAttr, GidEntry, PortAttr};

/// `IBV_GID_TYPE_SYSFS_ROCE_V2` of the private interface.
const GID_TYPE_SYSFS_ROCE_V2: c_int = 1;

/// A count of the card as C's int.
fn int(count: u32) -> c_int {
    c_int::try_from(count).unwrap_or(c_int::MAX)
}

fn device_attr(from: &DeviceAttr) -> abi::ibv_device_attr {
    // SAFETY: an ibv_device_attr is numbers: zero is valid.
    let mut to: abi::ibv_device_attr = unsafe { zeroed() };
    for (to, from) in to.fw_ver[..63].iter_mut().zip(from.fw_ver.bytes()) {
        *to = from as core::ffi::c_char;
    }
    to.node_guid = from.node_guid.to_be();
    to.sys_image_guid = from.sys_image_guid.to_be();
    to.max_mr_size = from.max_mr_size;
    to.page_size_cap = from.page_size_cap;
    to.vendor_id = from.vendor_id;
    to.vendor_part_id = from.vendor_part_id;
    to.hw_ver = from.hw_ver;
    to.max_qp = int(from.max_qp);
    to.max_qp_wr = int(from.max_qp_wr);
    to.device_cap_flags = from.device_cap_flags as c_uint;
    to.max_sge = int(from.max_sge);
    to.max_sge_rd = int(from.max_sge_rd);
    to.max_cq = int(from.max_cq);
    to.max_cqe = int(from.max_cqe);
    to.max_mr = int(from.max_mr);
    to.max_pd = int(from.max_pd);
    to.max_qp_rd_atom = int(from.max_qp_rd_atom);
    to.max_res_rd_atom = int(from.max_res_rd_atom);
    to.max_qp_init_rd_atom = int(from.max_qp_init_rd_atom);
    to.atomic_cap = from.atomic_cap;
    to.max_mw = int(from.max_mw);
    to.max_mcast_grp = int(from.max_mcast_grp);
    to.max_mcast_qp_attach = int(from.max_mcast_qp_attach);
    to.max_total_mcast_qp_attach = int(from.max_total_mcast_qp_attach);
    to.max_ah = int(from.max_ah);
    to.max_srq = int(from.max_srq);
    to.max_srq_wr = int(from.max_srq_wr);
    to.max_srq_sge = int(from.max_srq_sge);
    to.max_pkeys = from.max_pkeys;
    to.local_ca_ack_delay = from.local_ca_ack_delay;
    to.phys_port_cnt = from.phys_port_cnt;
    to
}

/// ibv_query_device(3).
pub(crate) unsafe extern "C" fn query_device(
    context: *mut abi::ibv_context,
    attr: *mut abi::ibv_device_attr,
) -> c_int {
    edge::int(|| {
        let attr = given(attr)?;
        // SAFETY: the verb's terms.
        let context = unsafe { ContextHandle::obj(context)? };
        // SAFETY: the verb's terms.
        unsafe { attr.write(device_attr(context.device_attr())) };
        Ok(())
    })
}

/// Copies as much of `from` as a caller built with an older header has room for. What one built with a newer
/// header has more is zeroed: this device has nothing to say there.
///
/// # Safety
/// `to` has room for `room` bytes.
pub(crate) unsafe fn put_prefix<T>(from: &T, to: *mut T, room: usize) {
    let (to, known) = (to.cast::<u8>(), room.min(size_of::<T>()));
    // SAFETY: both sides hold at least that many bytes, and a fresh local does not overlap the caller's
    // struct.
    unsafe {
        core::ptr::copy_nonoverlapping((&raw const *from).cast::<u8>(), to, known);
        to.add(known).write_bytes(0, room - known);
    };
}

/// ibv_query_device_ex(3), through the context's table.
pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut abi::ibv_context,
    input: *const abi::ibv_query_device_ex_input,
    attr: *mut abi::ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    edge::int(|| {
        let to = given(attr)?.as_ptr();
        // SAFETY: the input is NULL or a struct, on the verb's terms.
        if !input.is_null() && unsafe { (*input).comp_mask } != 0 {
            return Err(libc::EINVAL);
        }
        if attr_size < offset_of!(abi::ibv_device_attr_ex, odp_caps) {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms.
        let from = unsafe { ContextHandle::obj(context)? }.device_attr();
        // SAFETY: an ibv_device_attr_ex is numbers: zero is valid.
        let mut full: abi::ibv_device_attr_ex = unsafe { zeroed() };
        full.orig_attr = device_attr(from);
        full.completion_timestamp_mask = from.timestamp_mask;
        full.hca_core_clock = from.hca_core_clock_khz;
        full.device_cap_flags_ex = from.device_cap_flags;
        full.phys_port_cnt_ex = u32::from(from.phys_port_cnt);
        if from.tags {
            full.tm_caps = tags::caps();
        }
        full.max_dm_size = from.max_dm_size;
        full.odp_caps.general_caps = from.odp.general;
        full.odp_caps.per_transport_caps = abi::ibv_odp_caps__bindgen_ty_1 {
            rc_odp_caps: from.odp.rc,
            uc_odp_caps: from.odp.uc,
            ud_odp_caps: from.odp.ud,
        };
        full.xrc_odp_caps = from.odp.xrc;
        full.cq_mod_caps = abi::ibv_cq_moderation_caps { max_cq_count: u16::MAX, max_cq_period: u16::MAX };
        // SAFETY: `attr_size` is the size of the caller's struct.
        unsafe { put_prefix(&full, to, attr_size) };
        Ok(())
    })
}

/// ibv_query_rt_values_ex(3), through the context's table. As on other cards the clock is one number, in its
/// own unit, and lies in `tv_nsec`.
pub(crate) unsafe extern "C" fn query_rt_values(
    context: *mut abi::ibv_context,
    values: *mut abi::ibv_values_ex,
) -> c_int {
    edge::int(|| {
        given(context)?;
        // SAFETY: NULL or a struct of the caller's, on the verb's terms.
        let values = unsafe { values.as_mut() }.ok_or(libc::EINVAL)?;
        if values.comp_mask & !(abi::IBV_VALUES_MASK_RESERVED - 1) != 0 {
            return Err(libc::EINVAL);
        }
        if values.comp_mask & abi::IBV_VALUES_MASK_RAW_CLOCK != 0 {
            values.raw_clock.tv_sec = 0;
            values.raw_clock.tv_nsec = starverbs_verbs::raw_clock() as i64;
        }
        Ok(())
    })
}

fn port_attr(from: &PortAttr) -> abi::ibv_port_attr {
    // SAFETY: an ibv_port_attr is numbers: zero is valid.
    let mut to: abi::ibv_port_attr = unsafe { zeroed() };
    to.state = from.state;
    to.max_mtu = from.max_mtu as u32;
    to.active_mtu = from.active_mtu as u32;
    to.gid_tbl_len = int(from.gid_tbl_len);
    to.port_cap_flags = from.port_cap_flags;
    to.max_msg_sz = from.max_msg_sz;
    to.bad_pkey_cntr = from.bad_pkey_cntr;
    to.qkey_viol_cntr = from.qkey_viol_cntr;
    to.pkey_tbl_len = from.pkey_tbl_len;
    to.lid = from.lid;
    to.sm_lid = from.sm_lid;
    to.lmc = from.lmc;
    to.max_vl_num = from.max_vl_num;
    to.sm_sl = from.sm_sl;
    to.subnet_timeout = from.subnet_timeout;
    to.init_type_reply = from.init_type_reply;
    to.active_width = from.active_width;
    to.active_speed = from.active_speed;
    to.phys_state = from.phys_state;
    to.link_layer = from.link_layer;
    to.flags = from.flags;
    to.port_cap_flags2 = from.port_cap_flags2;
    to
}

/// ibv_query_port(3), through the context's table.
pub(crate) unsafe extern "C" fn query_port(
    context: *mut abi::ibv_context,
    port: u8,
    attr: *mut abi::ibv_port_attr,
    attr_size: usize,
) -> c_int {
    edge::int(|| {
        let to = given(attr)?.as_ptr();
        // SAFETY: the verb's terms.
        let from = unsafe { ContextHandle::obj(context)? }.query_port(port).map_err(errno)?;
        // SAFETY: `attr_size` is the size of the caller's struct.
        unsafe { put_prefix(&port_attr(&from), to, attr_size) };
        Ok(())
    })
}

/// ibv_query_port(3) as a symbol: for programs built when the struct ended before `port_cap_flags2`.
pub(crate) unsafe extern "C" fn query_port_compat(
    context: *mut abi::ibv_context,
    port: u8,
    attr: *mut abi::ibv_port_attr,
) -> c_int {
    // SAFETY: the verb's terms; the old struct has room for every field before that one.
    unsafe { query_port(context, port, attr, offset_of!(abi::ibv_port_attr, port_cap_flags2)) }
}

/// Lanes of `active_width` (IBTA PortInfo.LinkWidthActive), `None` for a code without meaning.
fn lanes(width: u8) -> Option<u64> {
    [(1, 1), (2, 4), (4, 8), (8, 12), (16, 2)].into_iter().find(|w| w.0 == width).map(|w| w.1)
}

/// Speed of a lane in 100 Mb/s by `active_speed` (PortInfo.LinkSpeedActive and its extensions), `None` as
/// above.
fn lane_speed(speed: u8) -> Option<u64> {
    let codes = [(1, 25), (2, 50), (4, 100), (8, 100), (16, 140), (32, 250), (64, 500), (128, 1000)];
    codes.into_iter().find(|s| s.0 == speed).map(|s| s.1)
}

/// ibv_query_port_speed(3): units of 100 Mb/s.
pub(crate) unsafe extern "C" fn query_port_speed(
    context: *mut abi::ibv_context,
    port: u32,
    speed: *mut u64,
) -> c_int {
    edge::int(|| {
        let to = given(speed)?;
        let port = u8::try_from(port).map_err(|_| libc::EINVAL)?;
        // SAFETY: the verb's terms.
        let from = unsafe { ContextHandle::obj(context)? }.query_port(port).map_err(errno)?;
        let lanes = lanes(from.active_width).ok_or(libc::EOPNOTSUPP)?;
        let speed = lane_speed(from.active_speed).ok_or(libc::EOPNOTSUPP)?;
        // SAFETY: the verb's terms.
        unsafe { to.write(lanes * speed) };
        Ok(())
    })
}

/// One GID of a port. ENODATA is an empty place in the table.
unsafe fn gid(context: *mut abi::ibv_context, port: u32, index: u32) -> Result<GidEntry, edge::Errno> {
    let port = u8::try_from(port).map_err(|_| libc::EINVAL)?;
    // SAFETY: the verb's terms.
    unsafe { ContextHandle::obj(context)? }.query_gid(port, index).map_err(errno)
}

/// ibv_query_gid(3): 0, or -1. An empty place gives the zero GID.
pub(crate) unsafe extern "C" fn query_gid(
    context: *mut abi::ibv_context,
    port: u8,
    index: c_int,
    to: *mut abi::ibv_gid,
) -> c_int {
    edge::minus_one(|| {
        let to = given(to)?;
        let index = u32::try_from(index).map_err(|_| libc::EINVAL)?;
        // SAFETY: the verb's terms.
        let raw = match unsafe { gid(context, u32::from(port), index) } {
            Ok(entry) => entry.gid.0,
            Err(libc::ENODATA) => [0; 16],
            Err(other) => return Err(other),
        };
        // SAFETY: the verb's terms.
        unsafe { to.write(abi::ibv_gid { raw }) };
        Ok(())
    })
}

fn gid_entry(from: &GidEntry) -> abi::ibv_gid_entry {
    abi::ibv_gid_entry {
        gid: abi::ibv_gid { raw: from.gid.0 },
        gid_index: from.index,
        port_num: 1,
        gid_type: abi::IBV_GID_TYPE_ROCE_V2,
        ndev_ifindex: from.ifindex,
    }
}

/// ibv_query_gid_ex(3).
pub(crate) unsafe extern "C" fn query_gid_ex(
    context: *mut abi::ibv_context,
    port: u32,
    index: u32,
    entry: *mut abi::ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    edge::int(|| {
        let to = given(entry)?.as_ptr();
        if flags != 0 || entry_size < size_of::<abi::ibv_gid_entry>() {
            return Err(if flags != 0 { libc::EOPNOTSUPP } else { libc::EINVAL });
        }
        // SAFETY: the verb's terms.
        let from = unsafe { gid(context, port, index)? };
        // SAFETY: `entry_size` is the size of the caller's struct.
        unsafe { put_prefix(&gid_entry(&from), to, entry_size) };
        Ok(())
    })
}

/// ibv_query_gid_table(3): the number of entries, or the errno value negated.
pub(crate) unsafe extern "C" fn query_gid_table(
    context: *mut abi::ibv_context,
    entries: *mut abi::ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let mut count = 0;
    let failed = edge::int(|| {
        let to = given(entries)?.as_ptr().cast::<u8>();
        if flags != 0 || entry_size < size_of::<abi::ibv_gid_entry>() {
            return Err(if flags != 0 { libc::EOPNOTSUPP } else { libc::EINVAL });
        }
        // SAFETY: the verb's terms.
        let table = unsafe { ContextHandle::obj(context)? }.gid_table();
        if table.len() > max_entries {
            return Err(libc::EINVAL);
        }
        for (i, from) in table.iter().enumerate() {
            // SAFETY: the caller's array has `max_entries` structs of `entry_size` bytes.
            unsafe { put_prefix(&gid_entry(from), to.add(i * entry_size).cast(), entry_size) };
        }
        count = table.len() as isize;
        Ok(())
    });
    if failed == 0 { count } else { -(failed as isize) }
}

/// ibv_query_gid_type of the private interface: how sysfs would call the GID's type.
pub(crate) unsafe extern "C" fn query_gid_type(
    context: *mut abi::ibv_context,
    port: u8,
    index: c_uint,
    kind: *mut c_int,
) -> c_int {
    edge::minus_one(|| {
        let kind = given(kind)?;
        // SAFETY: the verb's terms.
        let value = match unsafe { gid(context, u32::from(port), index) } {
            Ok(_) => GID_TYPE_SYSFS_ROCE_V2,
            Err(libc::ENODATA) => 0,
            Err(other) => return Err(other),
        };
        // SAFETY: the verb's terms.
        unsafe { kind.write(value) };
        Ok(())
    })
}

/// ibv_query_pkey(3): the P_Key in network byte order.
pub(crate) unsafe extern "C" fn query_pkey(
    context: *mut abi::ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    edge::minus_one(|| {
        let to = given(pkey)?;
        let index = u32::try_from(index).map_err(|_| libc::EINVAL)?;
        // SAFETY: the verb's terms.
        let value = unsafe { ContextHandle::obj(context)? }.query_pkey(port, index).map_err(errno)?;
        // SAFETY: the verb's terms.
        unsafe { to.write(value.to_be()) };
        Ok(())
    })
}

/// ibv_get_pkey_index(3): the index of a P_Key given in network byte order, or -1.
pub(crate) unsafe extern "C" fn get_pkey_index(context: *mut abi::ibv_context, port: u8, pkey: u16) -> c_int {
    let mut found = -1;
    edge::minus_one(|| {
        // SAFETY: the verb's terms.
        let context = unsafe { ContextHandle::obj(context)? };
        let len = context.query_port(port).map_err(errno)?.pkey_tbl_len;
        let wanted = u16::from_be(pkey);
        let index = (0..u32::from(len)).find(|&i| context.query_pkey(port, i).is_ok_and(|p| p == wanted));
        found = index.map(int).ok_or(libc::EINVAL)?;
        Ok(())
    });
    found
}
