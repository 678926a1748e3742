//! ibv_poll_cq: completions into the caller's array, written once and where they belong.
//!
//! Owns the translation of a completion. It must not allocate or lock.

use crate::cq::CqHandle;
use crate::edge;
use core::ffi::c_int;
use starverbs_abi as abi;
use starverbs_core::types::{Cqe, WcFlags};

/// `vendor_err`. Where a tag was matched, it lies here and in `src_qp`.
#[inline]
pub(crate) fn vendor_err(from: &Cqe) -> u32 {
    if from.flags.contains(WcFlags::TM_MATCH) { 0 } else { from.vendor_err }
}

/// `src_qp`
#[inline]
pub(crate) fn src_qp(from: &Cqe) -> u32 {
    if from.flags.contains(WcFlags::TM_MATCH) { 0 } else { from.src_qp }
}

/// A completion in C's words.
#[inline]
fn wc(from: &Cqe) -> abi::ibv_wc {
    abi::ibv_wc {
        wr_id: from.wr_id,
        status: from.status as abi::ibv_wc_status,
        opcode: from.opcode as abi::ibv_wc_opcode,
        vendor_err: vendor_err(from),
        byte_len: from.byte_len,
        __bindgen_anon_1: abi::ibv_wc__bindgen_ty_1 { imm_data: from.imm },
        qp_num: from.qpn,
        src_qp: src_qp(from),
        wc_flags: u32::from(from.flags.bits()),
        pkey_index: 0,
        slid: 0,
        sl: from.sl,
        dlid_path_bits: 0,
    }
}

/// ibv_poll_cq(3), through the context's table: the number of completions, or a negative number.
pub(crate) unsafe extern "C" fn poll_cq(
    cq: *mut abi::ibv_cq,
    entries: c_int,
    out: *mut abi::ibv_wc,
) -> c_int {
    let polled = || {
        let Ok(max) = usize::try_from(entries) else { return -libc::EINVAL };
        if max > 0 && out.is_null() {
            return -libc::EINVAL;
        }
        // SAFETY: the verb's terms.
        let Ok(obj) = (unsafe { CqHandle::obj(cq) }) else { return -libc::EINVAL };
        let mut to = out;
        let polled = obj.poll_with(max, |cqe| {
            // SAFETY: the caller's array has room for `max` entries, and the card passes at most `max`
            // completions.
            unsafe {
                to.write(wc(cqe));
                to = to.add(1);
            }
        });
        // The count fits: it is at most `entries`.
        polled.map_or_else(|e| -e.errno(), |n| n as c_int)
    };
    edge::kept(|| edge::value(-libc::EFAULT, polled))
}

#[cfg(test)]
mod tests {
    use super::*;
    use starverbs_core::types::{WcOpcode, WcStatus};

    #[test]
    fn every_field_of_a_completion_arrives() {
        let c = wc(&Cqe {
            wr_id: 1 << 40,
            byte_len: 4096,
            imm: 0x0102_0304,
            qpn: 0x11,
            src_qp: 0x22,
            vendor_err: 3,
            status: WcStatus::RetryExcErr,
            opcode: WcOpcode::RecvRdmaWithImm,
            flags: WcFlags::WITH_IMM | WcFlags::GRH,
            sl: 5,
        });
        // SAFETY: both members of the union are plain numbers.
        let imm = unsafe { c.__bindgen_anon_1.imm_data };
        assert_eq!((c.wr_id, c.byte_len, imm, c.qp_num, c.src_qp), (1 << 40, 4096, 0x0102_0304, 0x11, 0x22));
        assert_eq!((c.vendor_err, c.status, c.sl), (3, abi::IBV_WC_RETRY_EXC_ERR, 5));
        assert_eq!(c.opcode, abi::IBV_WC_RECV_RDMA_WITH_IMM);
        assert_eq!(c.wc_flags, abi::IBV_WC_WITH_IMM | abi::IBV_WC_GRH);
    }

    #[test]
    fn the_card_counts_as_verbs_h_does() {
        assert_eq!(WcStatus::GeneralErr as u32, abi::IBV_WC_GENERAL_ERR);
        assert_eq!(WcStatus::WrFlushErr as u32, abi::IBV_WC_WR_FLUSH_ERR);
        assert_eq!(WcStatus::RnrRetryExcErr as u32, abi::IBV_WC_RNR_RETRY_EXC_ERR);
        assert_eq!(WcStatus::RemInvRdReqErr as u32, abi::IBV_WC_REM_INV_RD_REQ_ERR);
        assert_eq!(WcOpcode::FetchAdd as u32, abi::IBV_WC_FETCH_ADD);
        assert_eq!(WcOpcode::AtomicWrite as u32, abi::IBV_WC_ATOMIC_WRITE);
        assert_eq!(WcOpcode::Flush as u32, abi::newer::IBV_WC_FLUSH);
        assert_eq!(WcOpcode::Recv as u32, abi::IBV_WC_RECV);
        assert_eq!(WcOpcode::TmNoTag as u32, abi::IBV_WC_TM_NO_TAG);
        assert_eq!(WcStatus::TmRndvIncomplete as u32, abi::IBV_WC_TM_RNDV_INCOMPLETE);
        assert_eq!(u32::from(WcFlags::TM_DATA_VALID.bits()), abi::IBV_WC_TM_DATA_VALID);
        assert_eq!(u32::from(WcFlags::WITH_INV.bits()), abi::IBV_WC_WITH_INV);
    }
}
