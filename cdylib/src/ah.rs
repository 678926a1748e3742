//! Address handles, and the addresses of those who sent a datagram.
//!
//! Owns the handle and the reading of a received GRH. It must not know how a path is resolved.

use crate::context::ContextHandle;
use crate::edge::{self, Errno};
use crate::handle::{errno, given, zeroed};
use crate::l2;
use crate::pd_mr::PdHandle;
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_core::types::{AvId, Gid};
use starverbs_verbs::{Ah, AhAttr};

/// An address handle.
#[repr(C)]
pub(crate) struct AhHandle {
    ibv: abi::ibv_ah,
    obj: Ah,
}

impl AhHandle {
    /// The card's number of an address handle, or EINVAL for NULL.
    ///
    /// # Safety
    /// `ah` is NULL, or comes from `create_ah` and is alive.
    #[inline]
    pub(crate) unsafe fn id(ah: *mut abi::ibv_ah) -> Result<AvId, Errno> {
        // SAFETY: the caller's terms; the struct is the first field of its handle.
        given(ah).map(|a| unsafe { (*a.as_ptr().cast::<AhHandle>()).obj.id() })
    }
}

/// An address in the card's words.
pub(crate) fn ah_attr_in(from: &abi::ibv_ah_attr) -> AhAttr {
    AhAttr {
        // SAFETY: every member of the union is 16 plain bytes.
        dgid: Gid(unsafe { from.grh.dgid.raw }),
        sgid_index: from.grh.sgid_index,
        hop_limit: from.grh.hop_limit,
        traffic_class: from.grh.traffic_class,
        flow_label: from.grh.flow_label,
        sl: from.sl,
        is_global: from.is_global != 0,
        port: from.port_num,
        dlid: from.dlid,
        static_rate: from.static_rate,
        src_path_bits: from.src_path_bits,
    }
}

/// An address in C's words.
pub(crate) fn ah_attr_out(from: &AhAttr) -> abi::ibv_ah_attr {
    // SAFETY: an ibv_ah_attr is numbers: zero is valid.
    let mut to: abi::ibv_ah_attr = unsafe { zeroed() };
    to.grh.dgid = abi::ibv_gid { raw: from.dgid.0 };
    to.grh.sgid_index = from.sgid_index;
    to.grh.hop_limit = from.hop_limit;
    to.grh.traffic_class = from.traffic_class;
    to.grh.flow_label = from.flow_label;
    to.sl = from.sl;
    to.is_global = u8::from(from.is_global);
    to.port_num = from.port;
    to.dlid = from.dlid;
    to.static_rate = from.static_rate;
    to.src_path_bits = from.src_path_bits;
    to
}

/// ibv_create_ah(3).
pub(crate) unsafe extern "C" fn create_ah(
    pd: *mut abi::ibv_pd,
    attr: *mut abi::ibv_ah_attr,
) -> *mut abi::ibv_ah {
    edge::object(|| {
        // SAFETY: NULL or a struct of the caller's, on the verb's terms.
        let attr = unsafe { attr.as_ref() }.ok_or(libc::EINVAL)?;
        // SAFETY: the verb's terms.
        let obj = Ah::create(unsafe { PdHandle::obj(pd)? }, &ah_attr_in(attr)).map_err(errno)?;
        // SAFETY: `pd` is alive, as above.
        let context = unsafe { (*pd).context };
        let ibv = abi::ibv_ah { context, pd, handle: obj.id().0 };
        // SAFETY: the protection domain keeps its context alive.
        unsafe { ContextHandle::retain(context) };
        Ok(Box::into_raw(Box::new(AhHandle { ibv, obj })).cast())
    })
}

/// ibv_destroy_ah(3).
pub(crate) unsafe extern "C" fn destroy_ah(ah: *mut abi::ibv_ah) -> c_int {
    edge::int(|| {
        let handle = given(ah)?.as_ptr().cast::<AhHandle>();
        // SAFETY: the verb's terms; the struct is the first field of its handle.
        unsafe { &(*handle).obj }.destroy().map_err(errno)?;
        // SAFETY: the program gives the handle up, and it was made with Box::into_raw.
        let handle = unsafe { Box::from_raw(handle) };
        // SAFETY: the handle held a reference.
        unsafe { ContextHandle::release(handle.ibv.context) };
        Ok(())
    })
}

/// What the 40 bytes in front of a received datagram say.
#[derive(Debug, PartialEq, Eq)]
struct GrhFields {
    sender: Gid,
    receiver: Gid,
    traffic_class: u8,
    flow_label: u32,
}

/// Reads those bytes: an IPv6 header, or 20 unused bytes and an IPv4 header (annex A17.4.5.2).
fn read_grh(bytes: &[u8; 40]) -> GrhFields {
    let four = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    let sixteen = |at: usize| {
        let mut raw = [0; 16];
        raw.copy_from_slice(&bytes[at..at + 16]);
        Gid(raw)
    };
    if bytes[0] >> 4 == 6 || bytes[20] != 0x45 {
        let first = u32::from_be_bytes(four(0));
        let (traffic_class, flow_label) = ((first >> 20) as u8, first & abi::IB_GRH_FLOWLABEL_MASK);
        return GrhFields { sender: sixteen(8), receiver: sixteen(24), traffic_class, flow_label };
    }
    GrhFields {
        sender: Gid::from_ipv4(four(32)),
        receiver: Gid::from_ipv4(four(36)),
        traffic_class: bytes[21],
        flow_label: 0,
    }
}

/// The address of a datagram's sender, on the terms of ibv_init_ah_from_wc(3).
unsafe fn from_wc(
    context: *mut abi::ibv_context,
    port: u8,
    wc: *mut abi::ibv_wc,
    grh: *mut abi::ibv_grh,
) -> Result<abi::ibv_ah_attr, Errno> {
    // SAFETY: the verb's terms.
    let (context, wc) = unsafe { (ContextHandle::obj(context)?, wc.as_ref().ok_or(libc::EINVAL)?) };
    // SAFETY: an ibv_ah_attr is numbers: zero is valid.
    let mut attr: abi::ibv_ah_attr = unsafe { zeroed() };
    attr.dlid = wc.slid;
    attr.sl = wc.sl;
    attr.src_path_bits = wc.dlid_path_bits;
    attr.port_num = port;
    if wc.wc_flags & abi::IBV_WC_GRH != 0 {
        // SAFETY: with that flag the verb's terms promise 40 bytes of header; they need not be aligned.
        let bytes = unsafe { given(grh)?.cast::<[u8; 40]>().read_unaligned() };
        let received = read_grh(&bytes);
        let table = context.gid_table();
        // A datagram to a multicast group or an address that has gone is answered from the first GID of its
        // kind.
        let alike = |gid: &Gid| gid.ipv4().is_some() == received.sender.ipv4().is_some();
        let ours = table.iter().find(|g| g.gid == received.receiver);
        let ours = ours.or_else(|| table.iter().find(|g| alike(&g.gid)));
        attr.is_global = 1;
        attr.grh.dgid = abi::ibv_gid { raw: received.sender.0 };
        attr.grh.sgid_index = ours.and_then(|g| u8::try_from(g.index).ok()).unwrap_or(0);
        attr.grh.flow_label = received.flow_label;
        attr.grh.traffic_class = received.traffic_class;
        attr.grh.hop_limit = u8::MAX;
    }
    Ok(attr)
}

/// ibv_init_ah_from_wc(3): 0, or -1 with errno.
pub(crate) unsafe extern "C" fn init_ah_from_wc(
    context: *mut abi::ibv_context,
    port: u8,
    wc: *mut abi::ibv_wc,
    grh: *mut abi::ibv_grh,
    attr: *mut abi::ibv_ah_attr,
) -> c_int {
    edge::minus_one(|| {
        let to = given(attr)?;
        // SAFETY: the verb's terms.
        unsafe { to.write(from_wc(context, port, wc, grh)?) };
        Ok(())
    })
}

/// ibv_create_ah_from_wc(3).
pub(crate) unsafe extern "C" fn create_ah_from_wc(
    pd: *mut abi::ibv_pd,
    wc: *mut abi::ibv_wc,
    grh: *mut abi::ibv_grh,
    port: u8,
) -> *mut abi::ibv_ah {
    let mut attr = None;
    let failed = edge::minus_one(|| {
        // SAFETY: the verb's terms.
        attr = Some(unsafe { from_wc((*given(pd)?.as_ptr()).context, port, wc, grh)? });
        Ok(())
    });
    match attr {
        // SAFETY: `attr` is a local, and the rest is on the verb's terms.
        Some(mut attr) if failed == 0 => unsafe { create_ah(pd, &mut attr) },
        _ => core::ptr::null_mut(),
    }
}

/// ibv_resolve_eth_l2_from_gid: the MAC address (and VLAN, 0xffff for none) behind an address.
pub(crate) unsafe extern "C" fn resolve_eth_l2_from_gid(
    context: *mut abi::ibv_context,
    attr: *mut abi::ibv_ah_attr,
    mac: *mut [u8; 6],
    vid: *mut u16,
) -> c_int {
    edge::minus_one(|| {
        let to = given(mac)?;
        // SAFETY: the verb's terms.
        let (context, attr) = unsafe { (ContextHandle::obj(context)?, attr.as_ref().ok_or(libc::EINVAL)?) };
        let attr = ah_attr_in(attr);
        let own = context.gid_table().iter().any(|g| g.gid == attr.dgid);
        // SAFETY: the verb's terms; a VLAN is asked for or not.
        unsafe {
            to.write(l2::mac_of(attr.dgid, own)?);
            if !vid.is_null() {
                vid.write(0xffff);
            }
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_received_header_tells_both_ends() {
        let mut v4 = [0u8; 40];
        v4[20] = 0x45;
        v4[21] = 0x20;
        v4[32..36].copy_from_slice(&[10, 0, 0, 1]);
        v4[36..40].copy_from_slice(&[10, 0, 0, 2]);
        let read = read_grh(&v4);
        assert_eq!(read.sender, Gid::from_ipv4([10, 0, 0, 1]));
        assert_eq!(read.receiver, Gid::from_ipv4([10, 0, 0, 2]));
        assert_eq!((read.traffic_class, read.flow_label), (0x20, 0));

        let mut v6 = [0u8; 40];
        v6[..4].copy_from_slice(&[0x6a, 0xb1, 0x23, 0x45]);
        v6[8] = 0xfe;
        v6[24] = 0xfd;
        let read = read_grh(&v6);
        assert_eq!((read.sender.0[0], read.receiver.0[0]), (0xfe, 0xfd));
        assert_eq!((read.traffic_class, read.flow_label), (0xab, 0x12345));
    }

    #[test]
    fn an_address_survives_both_translations() {
        let attr = AhAttr {
            dgid: Gid([7; 16]),
            sgid_index: 1,
            hop_limit: 64,
            traffic_class: 3,
            flow_label: 0xfffff,
            sl: 4,
            is_global: true,
            port: 1,
            dlid: 9,
            static_rate: 2,
            src_path_bits: 5,
        };
        let back = ah_attr_in(&ah_attr_out(&attr));
        assert_eq!(format!("{back:?}"), format!("{attr:?}"));
    }
}
