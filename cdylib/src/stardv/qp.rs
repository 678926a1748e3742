//! StaR's direct verbs: stardv_create_qp(3), stardv_query_qp(3), and the flags for ibv_create_qp_ex(3).
//!
//! Owns the codes of stardv.h for what an end of a connection is to be and is. It must not know how ends
//! settle that.

use super::give;
use crate::edge::{self, Errno};
use crate::handle::{beginning, errno, given};
use crate::qp::{self, QpHandle};
use crate::qp_attr::create_flags;
use core::ffi::c_int;
use core::mem::offset_of;
use starverbs_abi as abi;
use starverbs_verbs::{Preference, StarInfo};

/// `enum stardv_qp_create_flags`. The kernel leaves bits 26 to 31 to the drivers.
const STATELESS: u32 = 1 << 26;
const STATEFUL: u32 = 1 << 27;
const OFF: u32 = 1 << 28;
/// RPCs: with StaR, if a role of that is named, too.
pub(crate) const RPC: u32 = 1 << 29;
/// Those of `IBV_QP_CREATE_*` that are of this card alone.
pub(crate) const CREATE_FLAGS: u32 = STATELESS | STATEFUL | OFF | RPC;

/// `STARDV_QP_STAR`.
const STAR: u64 = 1 << 0;

/// `struct stardv_qp_init_attr`: new fields at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StardvQpInitAttr {
    comp_mask: u64,
    star: u32,
    reserved: u32,
}

/// `struct stardv_qp_attr`: new groups at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StardvQpAttr {
    comp_mask: u64,
    star: OfStar,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct OfStar {
    preference: u32,
    role: u32,
    card_bytes: u64,
    host_bytes: u64,
}

/* As released: programs were built with these. */
const _: () = {
    assert!(size_of::<StardvQpInitAttr>() == 16);
    assert!(offset_of!(StardvQpAttr, star) == 8);
    assert!(size_of::<StardvQpAttr>() == 32);
};

/// What the flags of ibv_create_qp_ex(3) ask for. EINVAL: a role, and none.
pub(crate) fn flagged(init: &abi::ibv_qp_init_attr_ex) -> Result<Option<Preference>, Errno> {
    match create_flags(init) & CREATE_FLAGS & !RPC {
        0 => Ok(None),
        OFF => Ok(Some(Preference::Off)),
        STATELESS => Ok(Some(Preference::Stateless)),
        STATEFUL => Ok(Some(Preference::Stateful)),
        flags if flags & OFF == 0 => Ok(Some(Preference::Auto)),
        _ => Err(libc::EINVAL),
    }
}

/// `enum stardv_star`.
fn preference_in(code: u32) -> Result<Option<Preference>, Errno> {
    Ok(match code {
        0 => None,
        1 => Some(Preference::Off),
        2 => Some(Preference::Auto),
        3 => Some(Preference::Stateless),
        4 => Some(Preference::Stateful),
        _ => return Err(libc::EINVAL),
    })
}

fn preference_out(preference: Preference) -> u32 {
    match preference {
        Preference::Off => 1,
        Preference::Auto => 2,
        Preference::Stateless => 3,
        Preference::Stateful => 4,
    }
}

/// What a program asks for. EOPNOTSUPP: something that a later release has.
///
/// # Safety
/// `attr` is NULL, or names `inlen` bytes.
unsafe fn asked(attr: *const StardvQpInitAttr, inlen: u32) -> Result<Option<Preference>, Errno> {
    let (len, known) = (inlen as usize, size_of::<StardvQpInitAttr>());
    if attr.is_null() || len < offset_of!(StardvQpInitAttr, reserved) {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's terms.
    let (head, later) = unsafe {
        let rest = attr.cast::<u8>().wrapping_add(known);
        let later = if len > known { core::slice::from_raw_parts(rest, len - known) } else { &[] };
        (beginning(attr, len), later)
    };
    if head.comp_mask != 0 || head.reserved != 0 || later.iter().any(|byte| *byte != 0) {
        return Err(libc::EOPNOTSUPP);
    }
    preference_in(head.star)
}

/// stardv_create_qp(3).
pub(crate) unsafe extern "C" fn create_qp(
    context: *mut abi::ibv_context,
    init: *mut abi::ibv_qp_init_attr_ex,
    attr: *const StardvQpInitAttr,
    inlen: u32,
) -> *mut abi::ibv_qp {
    edge::object(|| {
        given(context)?;
        // SAFETY: the verb's terms.
        unsafe { qp::create_ex(context, init, asked(attr, inlen)?) }
    })
}

/// What a program wants of a queue pair from now on. EOPNOTSUPP: something that a later release has.
///
/// # Safety
/// `attr` is NULL, or names `inlen` bytes.
unsafe fn wanted(attr: *const StardvQpAttr, inlen: u32) -> Result<Option<Preference>, Errno> {
    const NEEDED: usize = offset_of!(StardvQpAttr, star) + offset_of!(OfStar, role);
    if attr.is_null() || (inlen as usize) < NEEDED {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller's terms.
    let attr = unsafe { beginning(attr, inlen as usize) };
    match attr.comp_mask {
        0 => Err(libc::EINVAL),
        STAR => preference_in(attr.star.preference),
        _ => Err(libc::EOPNOTSUPP),
    }
}

/// stardv_modify_qp(3).
pub(crate) unsafe extern "C" fn modify_qp(
    qp: *mut abi::ibv_qp,
    attr: *const StardvQpAttr,
    inlen: u32,
) -> c_int {
    edge::int(|| {
        // SAFETY: the verb's terms.
        let (qp, preference) = unsafe { (QpHandle::obj(qp)?, wanted(attr, inlen)?) };
        qp.change_preference(preference).map_err(errno)
    })
}

/// stardv_query_qp(3).
pub(crate) unsafe extern "C" fn query_qp(
    qp: *mut abi::ibv_qp,
    attr: *mut StardvQpAttr,
    outlen: u32,
) -> c_int {
    edge::int(|| {
        let room = outlen as usize;
        if attr.is_null() || room < offset_of!(StardvQpAttr, star) {
            return Err(libc::EINVAL);
        }
        // SAFETY: the verb's terms: `outlen` bytes, of which the mask is the first field.
        let wanted = unsafe { (&raw const (*attr).comp_mask).read() };
        // SAFETY: the verb's terms.
        let info = unsafe { QpHandle::obj(qp)? }.star().map_err(errno)?;
        let mut answer = StardvQpAttr::default();
        if wanted & STAR != 0 && room >= size_of::<StardvQpAttr>() {
            let StarInfo { preference, role, card_bytes, host_bytes } = info;
            let star =
                OfStar { preference: preference_out(preference), role: role as u32, card_bytes, host_bytes };
            answer = StardvQpAttr { comp_mask: STAR, star };
        }
        // SAFETY: as above: the program has `room` bytes.
        unsafe { give(&answer, attr, room) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::zeroed;

    #[test]
    fn flags_name_a_role_or_none() {
        // SAFETY: numbers and pointers: zero is valid.
        let mut init: abi::ibv_qp_init_attr_ex = unsafe { zeroed() };
        init.create_flags = STATELESS;
        assert_eq!(flagged(&init), Ok(None), "not said to be valid");
        init.comp_mask = abi::IBV_QP_INIT_ATTR_CREATE_FLAGS;
        for (flags, preference) in [
            (abi::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB, Ok(None)),
            (STATELESS | abi::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB, Ok(Some(Preference::Stateless))),
            (STATEFUL, Ok(Some(Preference::Stateful))),
            (STATELESS | STATEFUL, Ok(Some(Preference::Auto))),
            (OFF, Ok(Some(Preference::Off))),
            (OFF | STATEFUL, Err(libc::EINVAL)),
        ] {
            init.create_flags = flags;
            assert_eq!(flagged(&init), preference, "{flags:#x}");
        }
        let others = abi::IBV_QP_CREATE_BLOCK_SELF_MCAST_LB
            | abi::IBV_QP_CREATE_SCATTER_FCS
            | abi::IBV_QP_CREATE_CVLAN_STRIPPING
            | abi::IBV_QP_CREATE_SOURCE_QPN
            | abi::IBV_QP_CREATE_PCI_WRITE_END_PADDING;
        assert_eq!(others & CREATE_FLAGS, 0);
    }

    #[test]
    fn structs_of_other_releases_are_understood() {
        #[repr(C)]
        struct Newer(StardvQpInitAttr, u64);
        let ask = |attr: StardvQpInitAttr, later, len| {
            let newer = Newer(attr, later);
            // SAFETY: a local of 24 bytes, of which `len` are looked at.
            unsafe { asked((&raw const newer).cast(), len) }
        };
        let auto = StardvQpInitAttr { star: 2, ..StardvQpInitAttr::default() };
        assert_eq!(
            (ask(auto, 0, 12), ask(auto, 7, 16), ask(auto, 0, 24)),
            (Ok(Some(Preference::Auto)), Ok(Some(Preference::Auto)), Ok(Some(Preference::Auto)))
        );
        assert_eq!((ask(auto, 7, 24), ask(auto, 0, 11)), (Err(libc::EOPNOTSUPP), Err(libc::EINVAL)));
        assert_eq!(ask(StardvQpInitAttr { comp_mask: 1, ..auto }, 0, 16), Err(libc::EOPNOTSUPP));
        assert_eq!(ask(StardvQpInitAttr { reserved: 1, ..auto }, 0, 16), Err(libc::EOPNOTSUPP));
        assert_eq!(ask(StardvQpInitAttr { star: 5, ..auto }, 0, 16), Err(libc::EINVAL));
        let want = |attr: StardvQpAttr, len| {
            // SAFETY: a local, of which `len` bytes are looked at.
            unsafe { wanted(&raw const attr, len) }
        };
        let star = OfStar { preference: 3, role: 9, ..OfStar::default() };
        let stateless = StardvQpAttr { comp_mask: STAR, star };
        assert_eq!(
            (want(stateless, 32), want(stateless, 12)),
            (Ok(Some(Preference::Stateless)), Ok(Some(Preference::Stateless)))
        );
        assert_eq!(want(stateless, 11), Err(libc::EINVAL));
        assert_eq!(want(StardvQpAttr { comp_mask: 0, star }, 32), Err(libc::EINVAL));
        assert_eq!(want(StardvQpAttr { comp_mask: STAR | 2, star }, 32), Err(libc::EOPNOTSUPP));
        assert_eq!(
            want(StardvQpAttr { star: OfStar { preference: 5, ..star }, ..stateless }, 32),
            Err(libc::EINVAL)
        );
        for preference in [Preference::Off, Preference::Auto, Preference::Stateless, Preference::Stateful] {
            assert_eq!(preference_in(preference_out(preference)), Ok(Some(preference)));
        }
    }
}
