//! StRoM's commands: kernels of the board, and queue pairs that speak the dialect.
//!
//! Answers stand in memory of the client's, of which the board makes a region that no client knows. Owns
//! whose kernels are whose; it must not know what they do.

use starverbs_core::mr::MrAttr;
use starverbs_core::strom::{MAX_KERNELS, MAX_RUNNING, ReplyMemory, RpcHandler, SLOT_BYTES};
use starverbs_core::{Access, QpType, Qpn};
use starverbs_kernels::Builtin;
use starverbs_queues::BLOCK;
use starverbs_queues::board::*;

use crate::broken;
use crate::command_queue::Body;
use crate::commands::{DONE, errno, has_room, limits};
use crate::context::BoardContext;
use crate::dma::Errno;
use crate::env::{HostAddress, host_address};
use crate::function::CommonCard;
use crate::queues::QuotaShare;

/// What a queue pair of the dialect costs the board beside others, about.
const RPC_BYTES: usize = 32 << 10;

const _: () = assert!(ANSWER_BYTES as usize == SLOT_BYTES);
const _: () = assert!(
    KERNEL_GET == Builtin::Get as u32
        && KERNEL_TRAVERSE == Builtin::Traverse as u32
        && KERNEL_CONSISTENT == Builtin::Consistent as u32
        && KERNEL_SHUFFLE == Builtin::Shuffle as u32
        && KERNEL_HLL == Builtin::Hll as u32
);

/// What answers RPCs. EOPNOTSUPP: the board has no such kernel.
fn handler(kernel: u32) -> Result<RpcHandler, Errno> {
    match kernel {
        KERNEL_PROGRAM if broken::rule(68) => Ok(Builtin::Get.make().into()),
        KERNEL_PROGRAM => Ok(RpcHandler::Program),
        kernel => Ok(Builtin::from_code(kernel).ok_or(libc::EOPNOTSUPP)?.make().into()),
    }
}

impl BoardContext {
    pub(crate) fn load_kernel(&mut self, card: &mut CommonCard, init: &RpcKernel) -> Result<Body, Errno> {
        let RpcKernel { op, pd, kernel, flags, .. } = *init;
        let (domain, place) = (self.own_pd(pd)?, (pd, op));
        let handler = handler(kernel)?;
        if flags & !KERNEL_REPLACE != 0 {
            return Err(libc::EINVAL);
        }
        if !self.objects.kernels.contains_key(&place) {
            let held = self.objects.kernels.len() + self.others.kernels;
            has_room(card, held, MAX_KERNELS as u32)?;
        }
        let id = if flags & KERNEL_REPLACE != 0 {
            card.nic.replace_kernel(domain, op, handler).map(|(id, _)| id)
        } else {
            card.nic.load_kernel(domain, op, handler)
        };
        self.objects.kernels.insert(place, id.map_err(errno)?);
        Ok(DONE)
    }

    /// EINVAL: the op-code has none.
    pub(crate) fn unload_kernel(&mut self, card: &mut CommonCard, of: &RpcKernel) -> Result<Body, Errno> {
        let id = self.objects.kernels.remove(&(of.pd, of.op)).ok_or(libc::EINVAL)?;
        if broken::rule(67) {
            return Ok(DONE);
        }
        card.nic.unload_kernel(id).map(|_| DONE).map_err(errno)
    }

    /// How many answers a queue pair that is to be made has memory for; 0: it does not speak the dialect.
    /// EOPNOTSUPP: it cannot; EINVAL: there are none, or too many; EFAULT: memory that is not mapped here;
    /// ENOMEM: a function has as many such queue pairs as it may.
    pub(crate) fn answer_slots(
        &self,
        card: &CommonCard,
        init: &CreateQp,
        qp_type: QpType,
    ) -> Result<u8, Errno> {
        if init.flags & QP_RPC == 0 {
            return Ok(0);
        }
        if qp_type != QpType::Rc {
            return Err(libc::EOPNOTSUPP);
        }
        if !(1..=MAX_ANSWERS as u8).contains(&init.answer_slots) {
            return Err(libc::EINVAL);
        }
        has_room(card, self.objects.regions() + self.others.keys, limits(card).mrs)?;
        /* no more than kernels may run, so that those of one function leave room for others' */
        has_room(card, self.objects.answers.len() + self.others.answers, MAX_RUNNING)?;
        /* a kernel module that does not know of answers has zeroed this */
        if init.answers == 0 {
            return Err(libc::EFAULT);
        }
        let bytes = usize::from(init.answer_slots) * SLOT_BYTES;
        card.env.memories[self.shared.number].maps.room(init.answers, bytes, BLOCK)?;
        Ok(init.answer_slots)
    }

    /// Has a queue pair that was just made speak the dialect.
    pub(crate) fn speak_strom(
        &mut self,
        card: &mut CommonCard,
        qpn: Qpn,
        init: &CreateQp,
    ) -> Result<(), Errno> {
        let share = self.shared.kept.take(RPC_BYTES)?;
        let (iova, slots) = (init.answers, init.answer_slots);
        let attr = MrAttr {
            pd: self.own_pd(init.pd)?,
            addr: host_address(self.shared.number, HostAddress::Direct(iova)),
            length: u64::from(slots) * u64::from(ANSWER_BYTES),
            iova,
            access: Access::LOCAL_WRITE,
            ..MrAttr::default()
        };
        let key = card.nic.reg_mr(attr).map_err(errno)?;
        self.objects.answers.insert(qpn, AnswerRegion { key, _share: share });
        card.nic.speak_strom(qpn, ReplyMemory { addr: iova, lkey: key, slots }).map_err(errno)
    }

    /// A queue pair has ended: so do its answers.
    pub(crate) fn forget_answers(&mut self, card: &mut CommonCard, qpn: Qpn) {
        if let Some(region) = self.objects.answers.remove(&qpn) {
            region.end(card);
        }
    }
}

/// The region in which the answers of a queue pair stand.
pub(crate) struct AnswerRegion {
    key: u32,
    _share: QuotaShare,
}

impl AnswerRegion {
    /// No queue pair answers there any more.
    pub(crate) fn end(self, card: &mut CommonCard) {
        let _ = card.nic.dereg_mr(self.key);
    }
}
