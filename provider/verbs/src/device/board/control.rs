//! Commands to the board.

use std::sync::Arc;

use starverbs_core::mr::MrAttr;
use starverbs_core::qp::{QpAttr, QpAttrMask, RecvSource};
use starverbs_core::{Gid, QpState, Qpn, SrqId};
use starverbs_queues::board::{
    AddressHandle, CAP_STAR, CAP_STROM, CQ_IGNORE_OVERRUN, CreateCq, CreateQp, CreateSrq, CreateXrcSrq,
    DeviceReply, Group, ModifyQp, NONE, NumberReply, OP_ALLOC_MW, OP_ALLOC_NULL_MR, OP_ALLOC_PD,
    OP_ATTACH_GROUP, OP_CREATE_AH, OP_CREATE_CQ, OP_CREATE_QP, OP_CREATE_SRQ, OP_CREATE_XRC_SRQ,
    OP_DEALLOC_MW, OP_DEALLOC_PD, OP_DEREG_MR, OP_DESTROY_AH, OP_DESTROY_CQ, OP_DESTROY_QP, OP_DESTROY_SRQ,
    OP_DETACH_GROUP, OP_MODIFY_QP, OP_MODIFY_SRQ, OP_QUERY_DEVICE, OP_QUERY_MR, OP_QUERY_QP, OP_QUERY_SRQ,
    OP_REG_MR, OP_REREG_MR, OP_STAR_QUERY, OP_STAR_SET_ROLE, Object, QP_BLOCK_LOOPBACK, QP_RPC,
    QP_SIGNAL_ALL, QP_STAR, Queues, Region, SrqLimit, StarReply, StarRole, Window,
};
use starverbs_rings::WorkLayout;
use starverbs_settings::LogLevel;
use starverbs_star::control::Preference;

use super::cq::{BoardCq, BoardCqRing};
use super::files::FileUse;
use super::gone::Outstanding;
use super::link::BROKEN;
use super::memory::{PROGRAM_END, Piece};
use super::{Board, DeviceCq};
use crate::census::Census;
use crate::cq::CqShared;
use crate::device::command::{Command, CommandReply, Events, QpInit, SrqKind, StarCommand, Xrc, group};
use crate::error::{Result, VerbsError};
use crate::info::PortAttr;
use crate::log::{self, log};
use crate::memory;
use crate::qp::{QpInner, REPLIES};
use crate::share::FileBytes;
use crate::star::{Settled, StarInfo};
use starverbs_core::command::{address, attr, decode_attr, decode_region, region};

/// What this device does not take.
pub(super) const NOT_HERE: VerbsError = VerbsError::Unsupported("by a board");

/// The board's part of a queue.
fn half(cq: &CqShared) -> Result<&BoardCq> {
    cq.device_half.as_deref().ok_or(BROKEN)
}

fn in_group(qpn: Qpn, group: Gid) -> Group {
    Group { gid: group.0, qpn, reserved: 0 }
}

fn object(number: u32) -> Object {
    Object { number, reserved: 0 }
}

impl Board {
    pub(crate) fn control(&self, command: Command<'_>) -> Result<CommandReply> {
        let done = |()| CommandReply::Done;
        if self.is_closed() {
            return closed(command);
        }
        match command {
            Command::AllocContext { .. } => self.join().map(done),
            Command::FreeContext { events } => {
                self.leave(events);
                Ok(CommandReply::Done)
            }
            Command::QueryPort => self.query_port().map(CommandReply::Port),
            Command::QueryGid { index } => self.info.gid(index).map(CommandReply::Gid),
            Command::Census { events } => Ok(CommandReply::Census(self.census(events))),
            Command::AllocPd { events } => self.alloc_pd(events).map(CommandReply::Number),
            Command::DeallocPd { pd, ended } => {
                self.link.tell(OP_DEALLOC_PD, &object(pd.0))?;
                self.objects().pds.remove(&pd);
                ended();
                Ok(CommandReply::Done)
            }
            Command::RegMr { attr } => self.reg_mr(&attr).map(CommandReply::Number),
            Command::ReregMr { key, attr } => self.rereg_mr(key, &attr).map(done),
            Command::DeregMr { key } => {
                self.link.tell(OP_DEREG_MR, &object(key))?;
                self.files.set(&self.link, key, None);
                Ok(CommandReply::Done)
            }
            Command::QueryMr { key } => {
                Ok(CommandReply::Mr(decode_region(&self.link.ask::<Region>(OP_QUERY_MR, &object(key))?)))
            }
            /* a region is closed when the board says so: it copies in the same turn */
            Command::Quiesce => Ok(CommandReply::Done),
            Command::AllocMw { pd, kind } => {
                let window = Window { pd: pd.0, kind: kind as u32 };
                Ok(CommandReply::Number(self.link.ask::<NumberReply>(OP_ALLOC_MW, &window)?.number))
            }
            Command::DeallocMw { key } => self.link.tell(OP_DEALLOC_MW, &object(key)).map(done),
            Command::CreateAh { pd, av } => {
                let handle = AddressHandle { pd: pd.0, address: address(&av) };
                Ok(CommandReply::Number(self.link.ask::<NumberReply>(OP_CREATE_AH, &handle)?.number))
            }
            Command::DestroyAh { ah } => self.link.tell(OP_DESTROY_AH, &object(ah.0)).map(done),
            Command::CreateCq { cqe, ignore_overrun } => {
                self.create_cq(cqe, ignore_overrun).map(|cq| CommandReply::Cq(Some(cq)))
            }
            Command::ResizeCq { cq, room } => half(cq)?.resize(cq, room).map(done),
            Command::ModifyCq { cq, moderation } => {
                let half = half(cq)?;
                self.know_cq(half, cq);
                half.moderate(cq, moderation).map(done)
            }
            Command::DestroyCq { cq } => self.destroy_cq(&cq.device_half).map(done),
            Command::CreateSrq { pd, rq, cookie, kind: SrqKind::Basic { limit } } => {
                let srq = CreateSrq { queues: self.queues(&rq.layout())?, pd: pd.0, limit };
                let number = self.link.ask::<NumberReply>(OP_CREATE_SRQ, &srq)?.number;
                self.objects().srqs.insert(number, (pd, cookie));
                Ok(CommandReply::Srq { srq: SrqId(number), number })
            }
            Command::CreateSrq { pd, rq, cookie, kind: SrqKind::Xrc { domain, cq } } => {
                let (queues, cq) = (self.queues(&rq.layout())?, cq.shared());
                let half = half(cq)?;
                self.know_cq(half, cq);
                let (pd_of, domain, cq) = (pd.0, domain.0, half.number);
                let srq = CreateXrcSrq { queues, pd: pd_of, domain, cq, reserved: 0 };
                let number = self.link.ask::<NumberReply>(OP_CREATE_XRC_SRQ, &srq)?.number;
                self.objects().srqs.insert(number, (pd, cookie));
                Ok(CommandReply::Srq { srq: SrqId(number), number })
            }
            Command::ModifySrq { srq, rings, room: None, limit } => {
                let Some(limit) = limit else { return Ok(CommandReply::Done) };
                if limit > rings.lock().recv_slots() {
                    return Err(VerbsError::Invalid("limit above the size"));
                }
                self.link.tell(OP_MODIFY_SRQ, &SrqLimit { srq: srq.0, limit }).map(done)
            }
            Command::QuerySrq { srq } => {
                Ok(CommandReply::Number(self.link.ask::<SrqLimit>(OP_QUERY_SRQ, &object(srq.0))?.limit))
            }
            Command::DestroySrq { srq } => {
                self.link.tell(OP_DESTROY_SRQ, &object(srq.0))?;
                self.objects().srqs.remove(&srq.0);
                Ok(CommandReply::Done)
            }
            Command::CreateQp { init, role, rpc } => {
                self.create_qp(&init, role, rpc).map(CommandReply::Number)
            }
            Command::ModifyQp { qp, to, mask } => self.modify_qp(qp, to, mask).map(done),
            Command::QueryQp { qpn } => {
                let reply: ModifyQp = self.link.ask(OP_QUERY_QP, &object(qpn))?;
                Ok(CommandReply::Qp(decode_attr(&reply.attr, QpAttrMask::all()).ok_or(BROKEN)?))
            }
            Command::DestroyQp { qp, detach } => {
                self.tell_role_at_end(qp.qpn);
                self.destroy_qp(qp, detach).map(done)
            }
            Command::AttachMcast { qpn, group } => {
                self.link.tell(OP_ATTACH_GROUP, &in_group(qpn, group))?;
                self.objects().groups.insert((qpn, group));
                Ok(CommandReply::Done)
            }
            Command::DetachMcast { qpn, group } => self.leave_group(qpn, group).map(done),
            Command::Xrc(xrc) => self.control_xrc(xrc),
            Command::Star(star) => self.control_star(&star),
            Command::Kernel(command) => self.change_kernels(&command).map(done),
            _ => Err(NOT_HERE),
        }
    }

    pub(super) fn query_port(&self) -> Result<PortAttr> {
        let reply: DeviceReply = self.link.ask(OP_QUERY_DEVICE, &Object::default())?;
        Ok(PortAttr { state: u32::from(reply.port_state), ..self.info.port })
    }

    fn alloc_pd(&self, events: &Events) -> Result<u32> {
        let number = self.link.ask::<NumberReply>(OP_ALLOC_PD, &Object::default())?.number;
        self.objects().pds.insert(starverbs_core::PdId(number), Arc::clone(events));
        Ok(number)
    }

    fn reg_mr(&self, attr: &MrAttr) -> Result<u32> {
        if memory::is_null(attr.addr) {
            return Ok(self.link.ask::<NumberReply>(OP_ALLOC_NULL_MR, &object(attr.pd.0))?.number);
        }
        let (region, file) = self.region(0, attr)?;
        match self.link.ask::<NumberReply>(OP_REG_MR, &region) {
            Ok(NumberReply { number: key, .. }) => {
                self.files.set(&self.link, key, file);
                Ok(key)
            }
            Err(error) => {
                self.files.give_up(&self.link, file);
                Err(error)
            }
        }
    }

    fn rereg_mr(&self, key: u32, attr: &MrAttr) -> Result<()> {
        let (region, file) = self.region(key, attr)?;
        match self.link.tell(OP_REREG_MR, &region) {
            Ok(()) => {
                self.files.set(&self.link, key, file);
                Ok(())
            }
            Err(error) => {
                self.files.give_up(&self.link, file);
                Err(error)
            }
        }
    }

    /// A region as the board is to reach it: in a memory file, or by the program's own addresses. Those are
    /// on-demand regions by themselves: the kernel looks for a page when the board reads or writes it.
    /// EOPNOTSUPP: another process's memory, and addresses that the board does not reach.
    fn region(&self, key: u32, attr: &MrAttr) -> Result<(Region, Option<FileUse>)> {
        let on_demand = memory::is_on_demand(attr.addr) && self.link.is_on_demand();
        let addr = if on_demand { memory::plain(attr.addr) } else { attr.addr };
        let room = PROGRAM_END.checked_sub(addr).ok_or(NOT_HERE)?;
        if attr.length > room && !on_demand {
            return Err(NOT_HERE);
        }
        /* of all that there ever is: nothing lies above */
        let attr = &MrAttr { addr, length: attr.length.min(room), ..*attr };
        let bytes = FileBytes::read(attr.backing);
        let file = bytes.and_then(|bytes| self.files.join(&self.link, bytes, attr.length));
        let addr = file.as_ref().map_or(attr.addr, |file| file.address);
        Ok((region(key, &MrAttr { addr, ..*attr }), file))
    }

    fn create_cq(&self, cqe: u32, ignore_overrun: bool) -> Result<Arc<BoardCq>> {
        let ring = BoardCqRing::new(&self.link.heap, cqe)?;
        let (taken, entries, log) = ring.place()?;
        let flags = if ignore_overrun { CQ_IGNORE_OVERRUN } else { 0 };
        let init = CreateCq { entries, taken, log, flags };
        let NumberReply { number, cell } = self.link.ask(OP_CREATE_CQ, &init)?;
        Ok(Arc::new(BoardCq::new(number, cell, &self.link, ring)))
    }

    fn destroy_cq(&self, cq: &DeviceCq) -> Result<()> {
        let Some(cq) = cq else { return Ok(()) };
        self.objects().cqs.remove(&cq.number);
        self.link.tell(OP_DESTROY_CQ, &object(cq.number))
    }

    /// Where rings lie, as the board has it.
    fn queues(&self, layout: &WorkLayout) -> Result<Queues> {
        let at = |slots: &starverbs_rings::SlotLayout| {
            if slots.slots == 0 {
                Ok((0, 0, 0))
            } else {
                Ok::<_, VerbsError>((
                    self.link.heap.address(slots.at)?,
                    slots.stride,
                    slots.slots.ilog2() as u8,
                ))
            }
        };
        let (send, send_stride, send_log) = at(&layout.send)?;
        let (recv, recv_stride, recv_log) = at(&layout.recv)?;
        Ok(Queues {
            program: self.link.heap.address(layout.program)?,
            card: self.link.heap.address(layout.card)?,
            send,
            recv,
            send_stride,
            send_sge: layout.send.max_sge,
            recv_stride,
            recv_sge: layout.recv.max_sge,
            send_log,
            recv_log,
            reserved: [0; 6],
        })
    }

    /// EOPNOTSUPP: with StaR, of a board that takes none.
    fn create_qp(&self, init: &QpInit, role: Preference, rpc: bool) -> Result<Qpn> {
        let has_star = role != Preference::Off;
        if has_star && self.link.caps & CAP_STAR == 0 {
            return Err(NOT_HERE);
        }
        let number = |cq: &CqShared| cq.device_half.as_ref().map_or(NONE, |half| half.number);
        let (send_cq, recv_cq) = (init.send_cq.shared(), init.recv_cq.shared());
        for cq in [send_cq, recv_cq] {
            if let Some(half) = &cq.device_half {
                self.know_cq(half, cq);
            }
        }
        let srq = match &init.rq {
            RecvSource::Own(_) | RecvSource::Xrc(_) => NONE,
            RecvSource::Shared(srq) => srq.0,
        };
        let all = if init.sq_sig_all { QP_SIGNAL_ALL } else { 0 };
        let memory = if rpc { Some(self.answers()?) } else { None };
        let block = if init.block_own_multicast { QP_BLOCK_LOOPBACK } else { 0 };
        let create = CreateQp {
            queues: self.queues(&init.sq.layout())?,
            pd: init.pd.0,
            send_cq: number(send_cq),
            recv_cq: number(recv_cq),
            srq,
            kind: init.qp_type as u8,
            flags: all | block | if has_star { QP_STAR } else { 0 } | if rpc { QP_RPC } else { 0 },
            star: role as u8,
            answer_slots: if rpc { REPLIES as u8 } else { 0 },
            reserved: [0; 4],
            answers: memory.as_ref().map_or(Ok(0), Piece::address)?,
        };
        let NumberReply { number: qpn, cell } = self.link.ask(OP_CREATE_QP, &create)?;
        let mut objects = self.objects();
        objects.qps.insert(qpn, (init.pd, init.cookie));
        objects.answers.extend(memory.map(|memory| (qpn, memory)));
        drop(objects);
        if let Some(entry) = self.link.qps.make(qpn) {
            *entry.rung() = 0;
        }
        self.set_cell(qpn, cell);
        let mut outstanding = self.outstanding();
        let is_first = outstanding.is_empty();
        outstanding.insert(qpn, Outstanding::of(init));
        drop(outstanding);
        self.begin_qp(qpn);
        if is_first {
            /* from now on it asks the board */
            self.thread.kick_if_armed();
        }
        Ok(qpn)
    }

    fn modify_qp(&self, qp: &QpInner, to: &QpAttr, mask: QpAttrMask) -> Result<()> {
        let modify = ModifyQp { qpn: qp.qpn, mask: mask.bits(), attr: attr(to) };
        self.link.tell(OP_MODIFY_QP, &modify)?;
        if mask.contains(QpAttrMask::STATE) && to.state == QpState::Reset {
            self.purge(qp);
            self.begin_qp(qp.qpn);
        }
        Ok(())
    }

    /// A queue pair's queues are empty.
    fn begin_qp(&self, qpn: Qpn) {
        if let (Some(posted), Some(entry)) = (self.outstanding().get_mut(&qpn), self.link.qps.make(qpn)) {
            posted.begin(entry);
        }
    }

    /// What the board has written of a queue pair and nobody took: nobody will.
    fn purge(&self, qp: &QpInner) {
        for cq in qp.cqs() {
            if let Some(half) = &cq.device_half {
                half.purge(qp.qpn);
            }
        }
        qp.purge();
    }

    fn destroy_qp(&self, qp: &QpInner, detach: bool) -> Result<()> {
        if !detach && self.groups_of(qp.qpn).next().is_some() {
            return Err(VerbsError::Busy("multicast groups"));
        }
        let ended = self.end_qp(qp.qpn);
        self.purge(qp);
        ended
    }

    /// Ends a queue pair on the board, whatever it is attached to.
    pub(super) fn end_qp(&self, qpn: Qpn) -> Result<()> {
        for group in self.groups_of(qpn) {
            let _ = self.leave_group(qpn, group);
        }
        self.set_cell(qpn, 0);
        let mut objects = self.objects();
        objects.qps.remove(&qpn);
        objects.handles.remove(&qpn);
        /* another one may have the number as soon as the board has ended this */
        let answers = objects.answers.remove(&qpn);
        drop(objects);
        self.outstanding().remove(&qpn);
        let ended = self.link.tell(OP_DESTROY_QP, &object(qpn));
        if let (Err(_), Some(answers)) = (&ended, answers) {
            /* the board may write there still */
            self.objects().answers.insert(qpn, answers);
        }
        ended
    }

    /// The multicast groups that a queue pair is in.
    fn groups_of(&self, qpn: Qpn) -> impl Iterator<Item = Gid> + use<> {
        let mine: Vec<_> =
            self.objects().groups.range((qpn, Gid([0; 16]))..=(qpn, Gid([0xff; 16]))).copied().collect();
        mine.into_iter().map(|(_, group)| group)
    }

    fn leave_group(&self, qpn: Qpn, group: Gid) -> Result<()> {
        self.link.tell(OP_DETACH_GROUP, &in_group(qpn, group))?;
        self.objects().groups.remove(&(qpn, group));
        Ok(())
    }

    /// XRC domains are this process's own here, also those on a file: nothing is shared, and nothing found.
    fn control_xrc(&self, xrc: Xrc<'_>) -> Result<CommandReply> {
        match xrc {
            Xrc::Share { .. } | Xrc::Unshare { .. } | Xrc::Offer { .. } => Ok(CommandReply::Done),
            Xrc::Open { .. } => Err(VerbsError::Os(libc::EINVAL)),
            Xrc::List { qpn, attachment: 0, cookie, events } => {
                self.objects().handles.entry(qpn).or_default().push((cookie, Arc::clone(events)));
                Ok(CommandReply::Done)
            }
            Xrc::Unlist { qpn, attachment: 0, cookie } => {
                let mut objects = self.objects();
                if let Some(handles) = objects.handles.get_mut(&qpn)
                    && let Some(at) = handles.iter().position(|(listed, _)| *listed == cookie)
                {
                    handles.swap_remove(at);
                }
                Ok(CommandReply::Done)
            }
            _ => Err(NOT_HERE),
        }
    }

    /// Groups of commands that it takes.
    pub(crate) fn groups(&self) -> u32 {
        let star = if self.link.caps & CAP_STAR == 0 { 0 } else { group::STAR };
        let rpc = if self.link.caps & CAP_STROM == 0 { 0 } else { group::RPC };
        group::VERBS | group::XRC | star | rpc
    }

    /// StaR of a queue pair. EOPNOTSUPP: the peer has none.
    fn control_star(&self, star: &StarCommand) -> Result<CommandReply> {
        match *star {
            StarCommand::SetRole { qpn, role } => {
                self.link.tell(OP_STAR_SET_ROLE, &StarRole { qpn, role: role as u32 })?;
                Ok(CommandReply::Done)
            }
            StarCommand::Query { qpn, .. } => {
                let reply: StarReply = self.link.ask(OP_STAR_QUERY, &object(qpn))?;
                let preference = u8::try_from(reply.preference).ok().and_then(Preference::from_code);
                Ok(CommandReply::Star(StarInfo {
                    preference: preference.ok_or(BROKEN)?,
                    role: Settled::from_code(reply.role).ok_or(BROKEN)?,
                    card_bytes: reply.card_bytes,
                    host_bytes: reply.host_bytes,
                }))
            }
        }
    }

    /// For people: what a queue pair has become.
    pub(super) fn tell_role(&self, qpn: Qpn) {
        if !log::is_enabled(LogLevel::Debug) {
            return;
        }
        let query = StarCommand::Query { qpn, role: None };
        /* it may have ended meanwhile */
        let Ok(CommandReply::Star(info)) = self.control_star(&query) else { return };
        match info.role {
            Settled::Waiting => {}
            Settled::Plain => log!(Debug, "queue pair {qpn:#x}: plain RoCEv2"),
            Settled::Stateless => log!(Debug, "queue pair {qpn:#x}: stateless end"),
            Settled::Stateful => log!(Debug, "queue pair {qpn:#x}: stateful end"),
        }
    }

    /// Queue pairs of a context.
    pub(super) fn qps_reporting_to(&self, events: &Events) -> Vec<Qpn> {
        let objects = self.objects();
        let reports = |pd| objects.pds.get(pd).is_some_and(|queue| Arc::ptr_eq(queue, events));
        objects.qps.iter().filter(|(_, (pd, _))| reports(pd)).map(|(qpn, _)| *qpn).collect()
    }

    fn census(&self, events: &Events) -> Census {
        let mut census = Census::default();
        for qpn in self.qps_reporting_to(events) {
            let attr = self.link.ask::<ModifyQp>(OP_QUERY_QP, &object(qpn));
            let state = attr.ok().and_then(|reply| QpState::from_code(reply.attr.state.into()));
            census.qps += 1;
            census.rts += u64::from(state == Some(QpState::Rts));
            census.err += u64::from(state == Some(QpState::Err));
        }
        census
    }
}

/// What a board answers whose last context has left: all that was made has ended. ENODATA: it takes no
/// contexts; EIO: nor anything else.
fn closed(command: Command<'_>) -> Result<CommandReply> {
    match command {
        Command::DeallocPd { ended, .. } => {
            ended();
            Ok(CommandReply::Done)
        }
        Command::DeregMr { .. }
        | Command::DeallocMw { .. }
        | Command::DestroyAh { .. }
        | Command::DestroyCq { .. }
        | Command::DestroySrq { .. }
        | Command::DestroyQp { .. }
        | Command::Quiesce => Ok(CommandReply::Done),
        Command::AllocContext { .. } => Err(VerbsError::NoData),
        _ => Err(VerbsError::Os(libc::EIO)),
    }
}
