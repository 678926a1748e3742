//! Commands of queue pairs, of which some may be ends of StaR connections.

use starverbs_core::command::decode_attr;
use starverbs_core::qp::{QpAttrMask, QpInit, RecvSource};
use starverbs_core::{QpType, Qpn, SendQueue, SrqId};
use starverbs_queues::board::*;
use starverbs_star::control::Preference;
use starverbs_star::message::SMALL_INLINE;

use crate::broken;
use crate::command_queue::{Await, Body, CommandOutcome};
use crate::commands::{DONE, MAX_SGE, answer, av, errno, has_room, limits, number};
use crate::context::{BoardContext, CellOwner};
use crate::dma::Errno;
use crate::function::{CommonCard, FIRST};
use crate::queues::{BoardRq, BoardSq, QuotaShare};

/// Receives of an SRQ that a stateless end holds at most.
const SHARED_RECVS: usize = 64;
/// Bytes that a stateless end costs for each WQE of its queues beside slots, about, and for each receive, and
/// for each SGE of one.
const WQE_BYTES: usize = 32;
const RECV_BYTES: usize = 16;
const SGE_BYTES: usize = 16;

/// A queue pair.
pub(crate) struct QpEntry {
    pub(crate) cell: u32,
    /// `None`: it was made without StaR
    star: Option<QpStar>,
}

/// One that may be an end of a StaR connection.
struct QpStar {
    preference: Preference,
    /// Its inline bytes fit any packet: else it is plain, whatever its program wants
    fits: bool,
    _share: QuotaShare,
}

impl QpStar {
    /// The preference that counts.
    fn preference(&self) -> Preference {
        if self.fits { self.preference } else { Preference::Off }
    }
}

/// EINVAL: no such preference; EOPNOTSUPP: StaR is not for such a queue pair.
fn preference_of(init: &CreateQp, qp_type: QpType) -> Result<Option<Preference>, Errno> {
    if init.flags & QP_STAR == 0 {
        return Ok(None);
    }
    if qp_type != QpType::Rc {
        return Err(libc::EOPNOTSUPP);
    }
    Preference::from_code(init.star).map(Some).ok_or(libc::EINVAL)
}

impl BoardContext {
    pub(crate) fn create_qp(&mut self, card: &mut CommonCard, init: &CreateQp) -> Result<Body, Errno> {
        has_room(card, self.objects.qps.len() + self.others.qps, limits(card).qps)?;
        let qp_type = match init.kind {
            2 => QpType::Rc,
            3 => QpType::Uc,
            4 => QpType::Ud,
            9 => QpType::XrcSend,
            10 => QpType::XrcRecv,
            _ => return Err(libc::EINVAL),
        };
        let memory = &card.env.memories[self.shared.number];
        memory.has_room_for_qp()?;
        let maps = &memory.maps;
        let preference = preference_of(init, qp_type)?;
        if preference.is_some() && (self.id() != FIRST || card.star.is_none()) {
            return Err(libc::EOPNOTSUPP);
        }
        let answers = self.answer_slots(card, init, qp_type)?;
        let sq = BoardSq::open(&init.queues, maps, &self.shared.kept, &self.shared.counters, answers.into())?;
        let rq = match qp_type {
            QpType::XrcRecv => RecvSource::Xrc(SrqId(NONE)),
            QpType::XrcSend => RecvSource::Own(BoardRq::none(&init.queues, maps, &self.shared.counters)?),
            _ if init.srq == NONE => {
                RecvSource::Own(BoardRq::open(&init.queues, maps, &self.shared.counters, MAX_SGE)?)
            }
            _ => {
                self.objects.srqs.get(&init.srq).ok_or(libc::EINVAL)?;
                RecvSource::Shared(SrqId(init.srq))
            }
        };
        let star = match preference {
            Some(preference) => Some(self.star_of(preference, &sq, &rq)?),
            None => None,
        };
        if star.is_some() {
            card.open_star()?;
        }
        let card_init = QpInit {
            qp_type,
            pd: self.own_pd(init.pd)?,
            sq: sq.clone(),
            rq,
            send_cq: self.own_cq(init.send_cq)?,
            recv_cq: self.own_cq(init.recv_cq)?,
            sq_sig_all: init.flags & QP_SIGNAL_ALL != 0,
            block_own_multicast: init.flags & QP_BLOCK_LOOPBACK != 0,
            cookie: self.cookie(),
        };
        let qpn = card.nic.create_qp(card_init).map_err(errno)?;
        let spoken = if answers > 0 { self.speak_strom(card, qpn, init) } else { Ok(()) };
        match spoken.and_then(|()| self.take_cell(CellOwner::Qp(qpn, sq))) {
            Ok(cell) => {
                self.objects.qps.insert(qpn, QpEntry { cell, star });
                card.env.memories[self.shared.number].join_qp(qpn);
                Ok(number(qpn, cell))
            }
            Err(error) => {
                let _ = card.nic.destroy_qp(&mut card.env, qpn);
                self.forget_answers(card, qpn);
                Err(error)
            }
        }
    }

    /// ENOMEM: as a stateless end it would cost the board more than the function may have.
    fn star_of(
        &self,
        preference: Preference,
        sq: &BoardSq,
        rq: &RecvSource<BoardRq>,
    ) -> Result<QpStar, Errno> {
        let (recvs, sges) = match rq {
            RecvSource::Own(rq) => (rq.slots() as usize, rq.sges()),
            RecvSource::Shared(_) | RecvSource::Xrc(_) => (SHARED_RECVS, MAX_SGE),
        };
        let wqes = sq.slots() as usize + recvs;
        let share = self.shared.kept.take(wqes * WQE_BYTES + recvs * (RECV_BYTES + sges * SGE_BYTES))?;
        Ok(QpStar { preference, fits: sq.max_inline() <= SMALL_INLINE, _share: share })
    }

    pub(crate) fn modify_qp(&mut self, card: &mut CommonCard, modify: &ModifyQp) -> Result<Body, Errno> {
        let qpn = self.own_qp(modify.qpn)?;
        let mask = QpAttrMask::from_bits(modify.mask).ok_or(libc::EINVAL)?;
        let to = decode_attr(&modify.attr, mask).ok_or(libc::EINVAL)?;
        if mask.contains(QpAttrMask::AV) {
            av(&modify.attr.address, card)?;
        }
        card.modify_qp(qpn, &to, mask).map_err(errno)?;
        if mask.contains(QpAttrMask::STATE)
            && let Some(star) = self.star(qpn)
            && !broken::rule(61)
        {
            card.settle_roles(qpn, star.preference(), to.state);
        }
        Ok(DONE)
    }

    fn star(&self, qpn: Qpn) -> Option<&QpStar> {
        self.objects.qps.get(&qpn)?.star.as_ref()
    }

    /// Destroys a queue pair; if it is a stateful end, once its peer has its last completions.
    pub(crate) fn destroy_qp(&mut self, card: &mut CommonCard, qpn: Qpn) -> Result<CommandOutcome, Errno> {
        let qpn = self.own_qp(qpn)?;
        if self.objects.groups.iter().any(|(member, _)| *member == qpn) {
            return Err(libc::EBUSY);
        }
        if self.star(qpn).is_some() {
            card.report(qpn);
            let wait = Await::Taken(qpn);
            if !wait.is_settled(card) {
                return Ok(CommandOutcome { reply: DONE, wait: Some(wait) });
            }
        }
        self.end_qp(card, qpn).map(|()| DONE.into())
    }

    /// A queue pair ends.
    pub(crate) fn end_qp(&mut self, card: &mut CommonCard, qpn: Qpn) -> Result<(), Errno> {
        card.destroy_qp(qpn).map_err(errno)?;
        card.env.memories[self.shared.number].leave_qp(qpn);
        self.forget_answers(card, qpn);
        if let Some(QpEntry { cell, .. }) = self.objects.qps.remove(&qpn) {
            self.free_cell(cell);
        }
        Ok(())
    }

    /// The program of a queue pair has another preference from now on.
    pub(crate) fn set_role(&mut self, card: &mut CommonCard, to: &StarRole) -> Result<Body, Errno> {
        let qpn = self.own_qp(to.qpn)?;
        let code = u8::try_from(to.role).map_err(|_| libc::EINVAL)?;
        let preference = Preference::from_code(code).ok_or(libc::EINVAL)?;
        let star = self.objects.qps.get_mut(&qpn).and_then(|qp| qp.star.as_mut()).filter(|star| star.fits);
        let star = star.ok_or(libc::EOPNOTSUPP)?;
        if !broken::rule(62) {
            card.change_preference(qpn, preference)?;
        }
        star.preference = preference;
        Ok(DONE)
    }

    /// What has become of a queue pair.
    pub(crate) fn query_star(&self, card: &CommonCard, qpn: Qpn) -> Result<Body, Errno> {
        let qpn = self.own_qp(qpn)?;
        let preference = self.star(qpn).map(|star| star.preference);
        let info = card.star_info(qpn, preference)?;
        Ok(answer(&StarReply {
            preference: info.preference as u32,
            role: info.role as u32,
            card_bytes: info.card_bytes,
            host_bytes: info.host_bytes,
        }))
    }
}
