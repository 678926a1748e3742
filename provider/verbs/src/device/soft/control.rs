//! Commands to the card.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use starverbs_backend::links::{DomainName, Links};
use starverbs_core::Host;
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::relay::LinkError;
use starverbs_core::shared_qp::SharedQpRequest;
use starverbs_core::{NicError, PdId, QpState, Qpn, RecvQueue, Sge, SrqId, TakenWqe};
use starverbs_rings::{CardRq, SpinLock, WorkRings};
use starverbs_star::control::Preference;

use super::local::report_wire_only;
use super::{Shard, Soft};
use crate::census::Census;
use crate::cq::CqShared;
use crate::device::command::{Command, CommandReply, Events, QpInit, SrqKind, StarCommand, Xrc};
use crate::error::{Result, VerbsError};
use crate::info::{GidEntry, MAX_SGE, PortAttr};
use crate::moderation::Moderation;
use crate::qp::QpInner;

/// IBV_PORT_DOWN, and the physical state "Disabled" (IBTA 14.2.5.6).
const PORT_DOWN: u32 = 1;
const PHYS_DISABLED: u8 = 3;
/// QPNs that are free at least, if the host has more: one that was given back is not given out before the
/// others were, so that what is still under way to the old queue pair does not reach a new one.
const RESTING: usize = 64;

/// A count as a port has it: 16 bits, which stay at the last number (IBTA 14.2.5.6, P_KeyViolations).
fn violations(count: u64) -> u32 {
    count.min(u16::MAX.into()) as u32
}

impl Soft {
    pub(crate) fn control(&self, command: Command<'_>) -> Result<CommandReply> {
        let done = |()| CommandReply::Done;
        match command {
            Command::AllocContext { events } => self.join(events).map(done),
            Command::FreeContext { events } => {
                self.leave(events);
                Ok(CommandReply::Done)
            }
            Command::QueryPort => Ok(CommandReply::Port(self.query_port())),
            Command::QueryGid { index } => self.query_gid(index).map(CommandReply::Gid),
            Command::Census { events } => Ok(CommandReply::Census(self.census(events))),
            Command::AllocPd { events } => self.alloc_pd(events).map(|pd| CommandReply::Number(pd.0)),
            Command::DeallocPd { pd, ended } => {
                self.with(|shard, _| shard.dealloc_pd(pd).map(|()| ended())).map(done)
            }
            Command::RegMr { attr } => self.reg_mr(attr).map(CommandReply::Number),
            Command::ReregMr { key, attr } => self.rereg_mr(key, attr).map(done),
            Command::DeregMr { key } => self.end_key(|shard| shard.nic.dereg_mr(key)).map(done),
            Command::QueryMr { key } => self.query_mr(key).map(CommandReply::Mr),
            Command::ImportMr { key, attr, memory } => {
                self.import_mr(key, attr, memory).map(CommandReply::Mr)
            }
            Command::UnimportMr { key, addr } => self.unimport_mr(key, addr).map(done),
            Command::AddForeign { memory } => {
                self.with(|shard, _| shard.env.foreign.add(memory)).map(CommandReply::Address)
            }
            Command::RemoveForeign { addr } => {
                self.with(|shard, _| shard.env.foreign.remove(addr));
                Ok(CommandReply::Done)
            }
            Command::Quiesce => {
                self.await_revoked(None, None);
                Ok(CommandReply::Done)
            }
            Command::AllocMw { pd, kind } => {
                Ok(CommandReply::Number(self.with(|shard, _| shard.nic.alloc_mw(pd, kind))?))
            }
            Command::DeallocMw { key } => self.end_key(|shard| shard.nic.dealloc_mw(key)).map(done),
            Command::CreateAh { pd, av } => {
                Ok(CommandReply::Number(self.with(|shard, _| shard.nic.create_av(pd, av))?.0))
            }
            Command::DestroyAh { ah } => Ok(done(self.with(|shard, _| shard.nic.destroy_av(ah))?)),
            Command::CreateCq { .. } => self.create_cq().map(|()| CommandReply::Cq(None)),
            Command::ResizeCq { cq, room } => self.with(|_, _| cq.move_to(room)).map(done),
            Command::ModifyCq { cq, moderation } => self.modify_cq(cq, moderation).map(done),
            Command::DestroyCq { cq } => {
                self.destroy_cq(cq);
                Ok(CommandReply::Done)
            }
            Command::CreateSrq { pd, rq, cookie, kind } => self.create_srq(pd, rq, cookie, kind),
            Command::ModifySrq { srq, rings, room, limit } => {
                self.modify_srq(srq, rings, room, limit).map(done)
            }
            Command::QuerySrq { srq } => {
                Ok(CommandReply::Number(self.with(|shard, _| shard.nic.query_srq_limit(srq))?))
            }
            Command::DestroySrq { srq } => Ok(done(self.with(|shard, _| shard.nic.destroy_srq(srq))?)),
            Command::ChangeTags { srq, op } => {
                Ok(CommandReply::Number(self.with(|shard, _| shard.nic.change_tags(srq, &op))?))
            }
            Command::CreateQp { init, role, rpc } => {
                self.create_qp(init, role, rpc).map(CommandReply::Number)
            }
            Command::Kernel(command) => self.change_kernels(command).map(done),
            Command::ModifyQp { qp, to, mask } => self.modify_qp(qp, to, mask).map(done),
            Command::QueryQp { qpn } => Ok(CommandReply::Qp(self.with(|shard, _| shard.query_qp(qpn))?)),
            Command::DestroyQp { qp, detach } => self.destroy_qp(qp, detach).map(done),
            Command::AttachMcast { qpn, group } => {
                self.with(|shard, _| {
                    let Shard { nic, intake, .. } = shard;
                    nic.attach_multicast(qpn, group, || Ok::<_, VerbsError>(intake.rx.join_group(group)?))
                })?;
                Ok(CommandReply::Done)
            }
            Command::DetachMcast { qpn, group } => {
                self.with(|shard, _| {
                    let Shard { nic, intake, .. } = shard;
                    nic.detach_multicast(qpn, &group, || intake.rx.leave_group(group))
                })?;
                Ok(CommandReply::Done)
            }
            Command::Xrc(xrc) => self.control_xrc(xrc),
            Command::Star(star) => self.control_star(&star),
        }
    }

    fn control_xrc(&self, xrc: Xrc<'_>) -> Result<CommandReply> {
        match xrc {
            Xrc::Share { domain, name } => self.share_domain(domain, name)?,
            Xrc::Unshare { domain } => self.with(|shard, _| {
                shard.shared_qps.end(&mut shard.env, domain);
                shard.shared_qps.hand_over(&self.deferred_log);
            }),
            Xrc::Offer { domain, qpn, qp } => {
                self.with(|shard, _| shard.shared_qps.offer(domain, qpn, qp))?
            }
            Xrc::Open { domain, block, qpn } => {
                let link = self.with(|shard, _| shard.env.link(domain, block));
                let link = link.map_err(|error| match error {
                    LinkError::Busy => VerbsError::Again,
                    LinkError::Gone => VerbsError::Os(libc::ENODEV),
                })?;
                return self.attach_qp(link, domain, qpn).map(CommandReply::Number);
            }
            Xrc::Query { attachment } => {
                return self.ask_owner(attachment, SharedQpRequest::Query).map(CommandReply::Qp);
            }
            Xrc::Modify { attachment, to, mask } => {
                self.ask_owner(attachment, SharedQpRequest::Modify(to, mask))?;
            }
            Xrc::List { qpn, attachment, cookie, events } => {
                self.with(|shard, _| shard.shared_qps.list(qpn, attachment, cookie, events))?;
            }
            Xrc::Unlist { qpn, attachment, cookie } => {
                self.with(|shard, _| shard.shared_qps.unlist(qpn, attachment, Some(cookie)));
            }
        }
        Ok(CommandReply::Done)
    }

    fn control_star(&self, star: &StarCommand) -> Result<CommandReply> {
        match *star {
            StarCommand::SetRole { qpn, role } => {
                let asked = self.with(|shard, now| match shard.qp_state(qpn) {
                    Some(QpState::Reset | QpState::Init) => Ok(true),
                    Some(QpState::Rtr | QpState::Rts) => {
                        let Shard { nic, env, local, star, .. } = shard;
                        Ok(local.change_preference(nic.counters(), qpn, role)
                            || star.change_preference((nic, env), qpn, role, now))
                    }
                    _ => Err(VerbsError::Invalid("state of the queue pair")),
                })?;
                if asked {
                    Ok(CommandReply::Done)
                } else {
                    Err(VerbsError::Unsupported("StaR with this peer, or on this queue pair"))
                }
            }
            StarCommand::Query { qpn, role } => {
                Ok(CommandReply::Star(self.with(|shard, _| shard.star.info(&shard.nic, qpn, role))))
            }
        }
    }

    fn query_port(&self) -> PortAttr {
        let mut attr = self.info.port;
        attr.bad_pkey_cntr = violations(self.stats.drop_pkey.get());
        attr.qkey_viol_cntr = violations(self.stats.drop_qkey.get());
        if self.is_ours() && !self.links.active(&self.info.addrs) {
            (attr.state, attr.phys_state) = (PORT_DOWN, PHYS_DISABLED);
        }
        attr
    }

    /// Entries whose address the host has lost are empty. A forked child, whose parent may have had the lock,
    /// sees the table as it was at the opening.
    fn query_gid(&self, index: u32) -> Result<GidEntry> {
        let entry = self.info.gid(index)?;
        let there = !self.is_ours() || self.links.has(&self.info.addrs, index as usize);
        if there { Ok(entry) } else { Err(VerbsError::NoData) }
    }

    fn census(&self, events: &Events) -> Census {
        self.with(|shard, _| {
            let mut census = Census::default();
            for qpn in shard.qps_reporting_to(events) {
                let state = shard.qp_state(qpn);
                census.qps += 1;
                census.rts += u64::from(state == Some(QpState::Rts));
                census.err += u64::from(state == Some(QpState::Err));
            }
            census
        })
    }

    fn alloc_pd(&self, events: &Events) -> Result<PdId> {
        self.with(|shard, _| {
            let Shard { nic, domains, .. } = shard;
            domains.alloc(nic, events)
        })
    }

    fn create_cq(&self) -> Result<()> {
        if self.cqs.fetch_add(1, Ordering::Relaxed) >= self.info.attr.max_cq {
            self.cqs.fetch_sub(1, Ordering::Relaxed);
            return Err(VerbsError::NoMemory("completion queues"));
        }
        Ok(())
    }

    fn modify_cq(&self, cq: &Arc<CqShared>, moderation: Moderation) -> Result<()> {
        self.with(|_, _| cq.moderate(moderation, &self.moderator))
    }

    fn destroy_cq(&self, cq: &CqShared) {
        self.cqs.fetch_sub(1, Ordering::Relaxed);
        if cq.is_moderated() {
            /* under the card's lock: nobody raises its event any more, or keeps it for that */
            self.with(|_, _| cq.forget_timer());
        }
    }

    fn create_srq(&self, pd: PdId, rq: CardRq, cookie: u64, kind: SrqKind) -> Result<CommandReply> {
        self.with(|shard, _| {
            let srq = match kind {
                SrqKind::Basic { limit } => shard.nic.create_srq(pd, rq, limit, cookie)?,
                SrqKind::Xrc { domain, cq } => shard.nic.create_xrc_srq(pd, domain, rq, cq, cookie)?,
                SrqKind::Tagged { cq, tags } => shard.nic.create_tag_srq(pd, rq, cq, tags, cookie)?,
            };
            Ok(CommandReply::Srq { srq, number: shard.nic.srq_number(srq) })
        })
    }

    fn modify_srq(
        &self,
        srq: SrqId,
        rings: &SpinLock<WorkRings>,
        room: Option<&mut WorkRings>,
        limit: Option<u32>,
    ) -> Result<()> {
        self.with(|shard, now| {
            /* not for the turn that follows: posters spin */
            let mut posted = rings.lock();
            let limit = limit.map_or_else(|| shard.nic.query_srq_limit(srq), Ok)?;
            let slots = room.as_ref().map_or(posted.recv_slots(), |room| room.recv_slots());
            if limit > slots || posted.recv_waiting() > slots {
                return Err(VerbsError::Invalid("size below the limit, or below what is posted"));
            }
            if let Some(room) = room {
                // SAFETY: the one card half, used under the card's lock.
                let half = unsafe { room.card_rq() };
                let taken = shard.star.replace_srq_ring((&mut shard.nic, &mut shard.env), srq, half, now)?;
                move_posted(&taken, &mut posted, room)?;
            }
            Ok(shard.nic.modify_srq_limit(srq, limit)?)
        })
    }

    fn create_qp(&self, init: QpInit, role: Preference, rpc: bool) -> Result<Qpn> {
        let sealing = if role == Preference::Off { None } else { self.prepare_star()? };
        self.with(|shard, now| {
            self.make_room(shard)?;
            if let Some(sealing) = sealing {
                self.open_star(shard, sealing)?;
            }
            self.reserve_doorbells(shard.nic.qp_count() + 1)?;
            let qpn = shard.nic.create_qp(init)?;
            if rpc {
                shard.replies.speak_strom((&mut shard.nic, &mut shard.env), qpn, now)?;
            }
            Ok(qpn)
        })
    }

    /// Claims another block of QPNs when few are left.
    fn make_room(&self, shard: &mut Shard) -> Result<()> {
        if shard.nic.free_qpns() < RESTING {
            match shard.intake.rx.claim_block() {
                Ok(block) => shard.nic.add_block(block as u16)?,
                Err(_) if shard.nic.free_qpns() > 0 => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            self.thread.kick_if_armed();
        }
        Ok(())
    }

    fn modify_qp(&self, qp: &QpInner, to: &QpAttr, mask: QpAttrMask) -> Result<()> {
        let (direct, wire_only) = self.with(|shard, now| {
            let mut wire_only = None;
            if mask.contains(QpAttrMask::STATE) && to.state == QpState::Sqd {
                let Shard { nic, env, local, .. } = shard;
                if local.wait_no_more((nic, env), qp.qpn, now) {
                    shard.transmit(now);
                }
            }
            shard.modify_qp(qp.qpn, to, mask, now)?;
            if mask.contains(QpAttrMask::STATE) {
                let Shard { nic, env, local, star, .. } = shard;
                let preference = qp.has_preference().then(|| qp.preference());
                if preference.is_some() {
                    star.move_qp((nic, env), qp.qpn, to.state, now);
                }
                local.move_qp((nic, env), qp.qpn, to.state, preference, now);
                if to.state == QpState::Rtr {
                    wire_only = local.wire_only(nic, qp.qpn);
                }
            }
            if mask.contains(QpAttrMask::ACCESS_FLAGS) {
                shard.local.change_access((&mut shard.nic, &mut shard.env), qp.qpn);
            }
            Ok::<_, VerbsError>((shard.env.channels.gates.is_some(), wire_only))
        })?;
        if let Some(setting) = wire_only {
            report_wire_only(setting);
        }
        let stops = mask.contains(QpAttrMask::STATE) && matches!(to.state, QpState::Err | QpState::Reset);
        if direct && (stops || mask.contains(QpAttrMask::ACCESS_FLAGS)) {
            /* the peer's copies that are under way */
            self.await_revoked(None, None);
        }
        Ok(())
    }

    fn destroy_qp(&self, qp: &QpInner, detach: bool) -> Result<()> {
        if qp.has_preference() {
            self.await_taken(qp.qpn);
        }
        let direct = self.with(|shard, now| {
            if qp.attachment() != 0 {
                shard.shared_qps.detach(&mut shard.env, qp.qpn, qp.attachment());
                return Ok::<_, VerbsError>(false);
            }
            let ended = if detach { shard.end_qp(qp.qpn, now) } else { shard.destroy_qp(qp.qpn, now) };
            if ended != Err(NicError::Busy) {
                /* with the lock held: the next QP may have this number, and completions of its own */
                qp.purge();
            }
            ended?;
            Ok(shard.env.channels.gates.is_some())
        })?;
        if direct {
            self.await_revoked(None, None);
        }
        Ok(())
    }

    fn share_domain(&self, domain: PdId, name: &DomainName) -> Result<()> {
        self.with(|shard, _| {
            let block = shard.intake.rx.blocks().next().ok_or(VerbsError::NoMemory("QPN block"))?;
            let links = match &mut shard.env.links {
                Some(links) => links,
                none => none.insert(Box::new(Links::new(shard.intake.rx.peers()))),
            };
            shard.shared_qps.make_room();
            shard.nic.share_domain(domain, block as u16)?;
            links.listen(domain.0, name, block)?;
            Ok::<_, VerbsError>(())
        })?;
        self.thread.kick_if_armed();
        Ok(())
    }
}

/// Moves what is posted to `room`, which takes the old rings. `taken`: the old ring's card half.
fn move_posted(taken: &CardRq, posted: &mut WorkRings, room: &mut WorkRings) -> Result<()> {
    let mut sges = [Sge::default(); MAX_SGE as usize];
    let mut producer = room.recv_producer_mut();
    while let Some(TakenWqe { wr_id, num_sge }) = taken.take(&mut sges) {
        producer.push(wr_id, &sges[..num_sge])?;
    }
    drop(producer);
    std::mem::swap(room, posted);
    Ok(())
}
