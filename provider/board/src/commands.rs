//! Commands: what a client asks of the card, decoded and checked.

use std::collections::BTreeSet;

use starverbs_core::command::{address, attr, decode_address, region};
use starverbs_core::mr::{Backing, MrAttr, WindowType};
use starverbs_core::{
    Access, Av, AvId, CardLimits, Gid, MAD_LEN, MAX_GROUP_QPS, NicError, PdId, Qpn, ReceivedMad, SrqId,
};
use starverbs_queues::board::*;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::broken;
use crate::command_queue::{Await, Body, CommandOutcome};
use crate::context::{BoardContext, CellOwner, SrqEntry};
use crate::cq::{BoardCq, MAX_CQ_LOG};
use crate::dma::{ADDRESS_BITS, Errno};
use crate::env::{HostAddress, NULL, NULL_BYTES, client_address, host_address};
use crate::function::{CommonCard, FIRST, Function};
use crate::queues::{BoardRq, MAX_LOG};
use crate::record::HostRequest;
use crate::tables::Table;

/// SGEs of a WQE at most.
pub(crate) const MAX_SGE: usize = 32;
/// Inline bytes of a WQE at most.
const MAX_INLINE: u32 = 4096;
/// Completion queues at most: each needs a cell.
const MAX_CQ: u32 = 4096;
/// Multicast groups at most.
pub(crate) const MAX_GROUPS: u32 = 16;
/// IBV_PORT_ACTIVE
const PORT_ACTIVE: u8 = 4;

pub(crate) fn errno(error: NicError) -> Errno {
    error.errno()
}

fn read<T: FromBytes + KnownLayout + Immutable>(body: &Body) -> Result<T, Errno> {
    T::read_from_prefix(body).map(|(value, _)| value).map_err(|_| libc::EINVAL)
}

pub(crate) fn answer<T: IntoBytes + Immutable>(value: &T) -> Body {
    let mut body = [0; BODY_BYTES];
    let bytes = value.as_bytes();
    body[..bytes.len()].copy_from_slice(bytes);
    body
}

pub(crate) fn number(number: u32, cell: u32) -> Body {
    answer(&NumberReply { number, cell })
}

pub(crate) const DONE: Body = [0; BODY_BYTES];

/// What keys opened has changed: done once stateful peers reach for nothing that `closed` opened, and know
/// the memory of `opened`.
fn settled(card: &CommonCard, closed: Option<u32>, opened: Option<PdId>, reply: Body) -> CommandOutcome {
    let wait = Await::Memory { closed, opened };
    CommandOutcome { reply, wait: (!wait.is_settled(card)).then_some(wait) }
}

impl Function {
    /// ENXIO: there is no such context; EPERM: it is not the one that may.
    pub(crate) fn command(
        &mut self,
        card: &mut CommonCard,
        id: u16,
        op: u16,
        body: &Body,
    ) -> Result<CommandOutcome, Errno> {
        let context = self.context(id).ok_or(libc::ENXIO)?;
        match op {
            OP_OPEN_CONTEXT | OP_CLOSE_CONTEXT if id != FIRST && !broken::rule(47) => Err(libc::EPERM),
            OP_OPEN_CONTEXT => Ok(number(self.open_context(card, &read(body)?)?.into(), CELL_EVENTS).into()),
            OP_CLOSE_CONTEXT => {
                self.close_context(card, read::<Object>(body)?.number)?;
                Ok(DONE.into())
            }
            _ => context.command(card, op, body),
        }
    }
}

impl BoardContext {
    fn command(&mut self, card: &mut CommonCard, op: u16, body: &Body) -> Result<CommandOutcome, Errno> {
        match op {
            OP_ALLOC_NULL_MR => {
                let pd = self.own_pd(read::<Object>(body)?.number)?;
                let access = Access::LOCAL_WRITE;
                self.reg_mr(card, MrAttr { pd, addr: NULL, length: NULL_BYTES, access, ..MrAttr::default() })
            }
            OP_REG_MR | OP_REREG_MR | OP_DEREG_MR | OP_QUERY_MR => self.region(card, op, body),
            OP_DEALLOC_MW => self.dealloc_window(card, read::<Object>(body)?.number),
            OP_DESTROY_QP => self.destroy_qp(card, read::<Object>(body)?.number),
            _ => self.command_at_once(card, op, body).map(CommandOutcome::from),
        }
    }

    /// Those that wait for nobody.
    fn command_at_once(&mut self, card: &mut CommonCard, op: u16, body: &Body) -> Result<Body, Errno> {
        match op {
            OP_QUERY_DEVICE => Ok(answer(&device(card))),
            OP_QUERY_GID => gid(card, read::<Object>(body)?.number).map(|reply| answer(&reply)),
            OP_ALLOC_PD => {
                has_room(card, self.objects.pds.len() + self.others.pds, limits(card).pds)?;
                let pd = card.nic.alloc_pd().map_err(errno)?.0;
                self.objects.pds.insert(pd);
                Ok(number(pd, 0))
            }
            OP_DEALLOC_PD => {
                let pd = self.own_pd(read::<Object>(body)?.number)?;
                card.nic.dealloc_pd(pd).map_err(errno)?;
                self.objects.pds.remove(&pd.0);
                Ok(DONE)
            }
            OP_ALLOC_MW => {
                has_room(card, self.objects.windows.len() + self.others.windows, limits(card).windows)?;
                let Window { pd, kind } = read(body)?;
                let kind = WindowType::from_code(kind).ok_or(libc::EINVAL)?;
                let key = card.nic.alloc_mw(self.own_pd(pd)?, kind).map_err(errno)?;
                self.objects.windows.insert(key);
                Ok(number(key, 0))
            }
            OP_CREATE_AH => {
                has_room(card, self.objects.ahs.len() + self.others.ahs, limits(card).avs)?;
                let AddressHandle { pd, address } = read(body)?;
                let av = av(&address, card)?;
                let ah = card.nic.create_av(self.own_pd(pd)?, av).map_err(errno)?.0;
                self.objects.ahs.insert(ah);
                Ok(number(ah, 0))
            }
            OP_DESTROY_AH => {
                let ah = read::<Object>(body)?.number;
                if !self.objects.ahs.remove(&ah) {
                    return Err(libc::EINVAL);
                }
                card.nic.destroy_av(AvId(ah)).map(|()| DONE).map_err(errno)
            }
            OP_CREATE_CQ => self.create_cq(card, &read(body)?),
            OP_RESIZE_CQ => {
                let to: ResizeCq = read(body)?;
                let cq = self.own_cq(to.cq)?;
                Ok(number(cq.resize(&to, &card.env.memories[self.shared.number].maps)?, 0))
            }
            OP_MODIFY_CQ => {
                let how: ModifyCq = read(body)?;
                self.own_cq(how.cq)?.moderate(&how);
                Ok(DONE)
            }
            OP_DESTROY_CQ => self.destroy_cq(read::<Object>(body)?.number),
            OP_CREATE_SRQ => self.create_srq(card, &read(body)?),
            OP_CREATE_XRC_SRQ => self.create_xrc_srq(card, &read(body)?),
            OP_MODIFY_SRQ | OP_QUERY_SRQ | OP_DESTROY_SRQ => self.srq(card, op, read(body)?),
            OP_CREATE_QP => self.create_qp(card, &read(body)?),
            OP_MODIFY_QP => self.modify_qp(card, &read(body)?),
            OP_QUERY_QP => {
                let qpn = self.own_qp(read::<Object>(body)?.number)?;
                let attr = attr(&card.query_qp(qpn).map_err(errno)?);
                Ok(answer(&ModifyQp { qpn, mask: 0, attr }))
            }
            OP_OPEN_MADS => card.open_mads(self.cookie()).map(|owner| number(owner, 0)),
            OP_SEND_MAD | OP_RECEIVE_MAD => self.mad(card, op, &read(body)?),
            OP_CLAIM_SERVICE => card.claim_service(self.cookie(), &read(body)?).map(|()| DONE),
            OP_RELEASE_SERVICE => card.release_service(self.cookie(), &read(body)?).map(|()| DONE),
            OP_ATTACH_GROUP | OP_DETACH_GROUP => self.group(card, op, &read(body)?),
            OP_LOAD_KERNEL => self.load_kernel(card, &read(body)?),
            OP_UNLOAD_KERNEL => self.unload_kernel(card, &read(body)?),
            OP_STAR_SET_ROLE | OP_STAR_QUERY if card.star.is_none() => Err(libc::EOPNOTSUPP),
            OP_STAR_SET_ROLE => self.set_role(card, &read(body)?),
            OP_STAR_QUERY => self.query_star(card, read::<Object>(body)?.number),
            _ => Err(libc::EOPNOTSUPP),
        }
    }

    pub(crate) fn own_pd(&self, pd: u32) -> Result<PdId, Errno> {
        let own = self.objects.pds.contains(&pd) || broken::rule(14) || broken::rule(48);
        own.then_some(PdId(pd)).ok_or(libc::EINVAL)
    }

    pub(crate) fn own_qp(&self, qpn: u32) -> Result<u32, Errno> {
        if self.objects.qps.contains_key(&qpn) { Ok(qpn) } else { Err(libc::EINVAL) }
    }

    pub(crate) fn own_cq(&self, cq: u32) -> Result<BoardCq, Errno> {
        self.objects.cqs.get(&cq).map(|(_, cq)| cq.clone()).ok_or(libc::EINVAL)
    }

    fn region(&mut self, card: &mut CommonCard, op: u16, body: &Body) -> Result<CommandOutcome, Errno> {
        if op == OP_DEREG_MR || op == OP_QUERY_MR {
            let key = read::<Object>(body)?.number;
            if !self.objects.keys.contains(&key) {
                return Err(libc::EINVAL);
            }
            let attr = card.nic.query_mr(key).ok_or(libc::EINVAL)?;
            if op == OP_QUERY_MR {
                return Ok(answer(&region_of(card, key, &attr)).into());
            }
            let mut closed = None;
            if !broken::rule(12) {
                card.nic.dereg_mr(key).map_err(errno)?;
                closed = card.follow_memory();
                card.env.forget_table(Some(attr.addr));
            }
            self.objects.keys.remove(&key);
            return Ok(settled(card, closed, None, DONE));
        }
        let region: Region = read(body)?;
        let addr = self.host_address_of(card, &region)?;
        let done = self.register(card, op, &region, addr);
        if done.is_err() {
            card.env.forget_table(Some(addr));
        }
        done
    }

    /// The host address of a region's first byte: in its translation table's range, if it has a table.
    fn host_address_of(&self, card: &mut CommonCard, region: &Region) -> Result<u64, Errno> {
        let number = self.shared.number;
        if region.pieces == 0 {
            let end = region.addr.checked_add(region.length).ok_or(libc::EINVAL)?;
            let fits = end <= 1 << ADDRESS_BITS;
            return if fits {
                Ok(host_address(number, HostAddress::Direct(region.addr)))
            } else {
                Err(libc::EINVAL)
            };
        }
        let table = Table::of(region)?;
        let begin = card.env.memories[number].tables.add(table)?;
        Ok(host_address(number, HostAddress::Paged(begin + u64::from(region.offset))))
    }

    fn register(
        &mut self,
        card: &mut CommonCard,
        op: u16,
        region: &Region,
        addr: u64,
    ) -> Result<CommandOutcome, Errno> {
        let Region { key, pd, access, length, iova, .. } = *region;
        let access = Access::from_bits_truncate(access);
        let length = if broken::rule(24) { length + 64 } else { length };
        let access = if broken::rule(69) { access | Access::REMOTE_READ } else { access };
        let attr = MrAttr { pd: self.own_pd(pd)?, addr, length, iova, access, backing: Backing::default() };
        if op == OP_REG_MR {
            return self.reg_mr(card, attr);
        }
        if !self.objects.keys.contains(&key) {
            return Err(libc::EINVAL);
        }
        let before = card.nic.query_mr(key).map(|attr| attr.addr);
        card.nic.rereg_mr(key, attr).map_err(errno)?;
        let closed = card.follow_memory();
        card.env.forget_table(before);
        Ok(settled(card, closed, Some(attr.pd), DONE))
    }

    fn reg_mr(&mut self, card: &mut CommonCard, attr: MrAttr) -> Result<CommandOutcome, Errno> {
        has_room(card, self.objects.regions() + self.others.keys, limits(card).mrs)?;
        let key = card.open_key(|nic| nic.reg_mr(attr)).map_err(errno)?;
        self.objects.keys.insert(key);
        Ok(settled(card, None, Some(attr.pd), number(key, 0)))
    }

    /// `key`: any that the window ever had, whose slot its first key names.
    fn dealloc_window(&mut self, card: &mut CommonCard, key: u32) -> Result<CommandOutcome, Errno> {
        let slot = |key: u32| key >> starverbs_core::mr::KEY_BITS;
        let first = self.objects.windows.iter().find(|first| slot(**first) == slot(key)).copied();
        let first = first.ok_or(libc::EINVAL)?;
        card.nic.dealloc_mw(key).map_err(errno)?;
        self.objects.windows.remove(&first);
        let closed = card.follow_memory();
        Ok(settled(card, closed, None, DONE))
    }

    fn create_cq(&mut self, card: &mut CommonCard, init: &CreateCq) -> Result<Body, Errno> {
        if self.objects.cqs.len() + self.others.cqs >= MAX_CQ as usize {
            return Err(libc::ENOMEM);
        }
        let free = (0..MAX_CQ).find(|number| !self.objects.cqs.contains_key(number)).ok_or(libc::ENOMEM)?;
        let maps = &card.env.memories[self.shared.number].maps;
        let cq = BoardCq::open(free, init, maps, &self.due, &self.shared.counters)?;
        let cell = self.take_cell(CellOwner::Cq(cq.clone()))?;
        self.objects.cqs.insert(free, (cell, cq));
        Ok(number(free, cell))
    }

    fn destroy_cq(&mut self, cq: u32) -> Result<Body, Errno> {
        let (cell, held) = self.objects.cqs.get(&cq).ok_or(libc::EINVAL)?;
        if held.is_used() && !broken::rule(13) {
            return Err(libc::EBUSY);
        }
        let cell = *cell;
        self.objects.cqs.remove(&cq);
        self.free_cell(cell);
        Ok(DONE)
    }

    fn create_srq(&mut self, card: &mut CommonCard, init: &CreateSrq) -> Result<Body, Errno> {
        has_room(card, self.objects.srqs.len() + self.others.srqs, limits(card).srqs)?;
        let maps = &card.env.memories[self.shared.number].maps;
        let rq = BoardRq::open(&init.queues, maps, &self.shared.counters, MAX_SGE)?;
        let slots = rq.slots();
        if init.limit > slots {
            return Err(libc::EINVAL);
        }
        let pd = self.own_pd(init.pd)?;
        let srq = card.nic.create_srq(pd, rq, init.limit, self.cookie()).map_err(errno)?;
        self.list_srq(card, srq, slots)
    }

    fn create_xrc_srq(&mut self, card: &mut CommonCard, init: &CreateXrcSrq) -> Result<Body, Errno> {
        has_room(card, self.objects.srqs.len() + self.others.srqs, limits(card).srqs)?;
        let maps = &card.env.memories[self.shared.number].maps;
        let rq = BoardRq::open(&init.queues, maps, &self.shared.counters, MAX_SGE)?;
        let (slots, cq) = (rq.slots(), self.own_cq(init.cq)?);
        if broken::rule(54) {
            let srq = card.nic.create_srq(self.own_pd(init.pd)?, rq, 0, self.cookie());
            return self.list_srq(card, srq.map_err(errno)?, slots);
        }
        let (pd, domain) = (self.own_pd(init.pd)?, self.own_pd(init.domain)?);
        let srq = card.nic.create_xrc_srq(pd, domain, rq, cq, self.cookie()).map_err(errno)?;
        self.list_srq(card, srq, slots)
    }

    /// Gives a shared receive queue its cell, without which it ends.
    fn list_srq(&mut self, card: &mut CommonCard, srq: SrqId, slots: u32) -> Result<Body, Errno> {
        let cell = match self.take_cell(CellOwner::Srq(srq)) {
            Ok(cell) => cell,
            Err(error) => {
                let _ = card.nic.destroy_srq(srq);
                return Err(error);
            }
        };
        self.objects.srqs.insert(srq.0, SrqEntry { cell, slots });
        Ok(number(srq.0, cell))
    }

    fn srq(&mut self, card: &mut CommonCard, op: u16, to: SrqLimit) -> Result<Body, Errno> {
        let (srq, entry) = (SrqId(to.srq), self.objects.srqs.get(&to.srq).ok_or(libc::EINVAL)?);
        match op {
            OP_MODIFY_SRQ if to.limit > entry.slots => Err(libc::EINVAL),
            OP_MODIFY_SRQ => card.nic.modify_srq_limit(srq, to.limit).map(|()| DONE).map_err(errno),
            OP_QUERY_SRQ => {
                let limit = card.nic.query_srq_limit(srq).map_err(errno)?;
                Ok(answer(&SrqLimit { srq: srq.0, limit }))
            }
            _ => {
                let cell = entry.cell;
                card.nic.destroy_srq(srq).map_err(errno)?;
                self.objects.srqs.remove(&srq.0);
                self.free_cell(cell);
                Ok(DONE)
            }
        }
    }

    /// A management datagram is sent, or taken.
    fn mad(&mut self, card: &mut CommonCard, op: u16, mad: &Mad) -> Result<Body, Errno> {
        let maps = &card.env.memories[self.shared.number].maps;
        let mut bytes = [0; MAD_LEN];
        if op == OP_SEND_MAD {
            let to = av(&mad.address, card)?;
            if !maps.read(mad.addr, &mut bytes) {
                return Err(libc::EFAULT);
            }
            return card.send_mad(self.cookie(), &to, &bytes).map(|()| DONE);
        }
        /* before one is taken: it would be lost */
        if !maps.write(mad.addr, &bytes) {
            return Err(libc::EFAULT);
        }
        let ReceivedMad { meta, bytes } = card.take_mad(self.cookie()).ok_or(libc::ENODATA)?;
        if !card.env.memories[self.shared.number].maps.write(mad.addr, &bytes) {
            return Err(libc::EFAULT);
        }
        let (dgid, sgid, traffic_class) = (meta.src, meta.dst, meta.traffic_class);
        let address = address(&Av { dgid, sgid, traffic_class, ..Av::default() });
        Ok(answer(&Mad { addr: mad.addr, address, reserved: 0 }))
    }

    /// A queue pair joins a group, or leaves it.
    fn group(&mut self, card: &mut CommonCard, op: u16, group: &Group) -> Result<Body, Errno> {
        let (qpn, gid) = (self.own_qp(group.qpn)?, Gid(group.gid));
        if broken::rule(53) {
            return Ok(DONE);
        }
        if op == OP_DETACH_GROUP {
            self.leave_group(card, qpn, gid)?;
            return Ok(DONE);
        }
        let members = self.objects.groups.iter().filter(|(_, of)| *of == gid).count();
        if !self.objects.groups.contains(&(qpn, gid)) {
            has_room(card, members, MAX_GROUP_QPS as u32)?;
        }
        let groups: BTreeSet<Gid> = self.objects.groups.iter().map(|(_, gid)| *gid).collect();
        let room = if groups.contains(&gid) {
            Ok(())
        } else {
            has_room(card, groups.len() + self.others.groups, MAX_GROUPS)
        };
        let CommonCard { nic, rx, tap, .. } = card;
        let mut ask = || tap.host(HostRequest::Group, || rx.join_group(gid).map(|()| 0));
        let join = || room.and_then(|()| ask().map(drop)).map_err(GroupError);
        nic.attach_multicast(qpn, gid, join).map_err(|GroupError(errno)| errno)?;
        self.objects.groups.insert((qpn, gid));
        Ok(DONE)
    }

    /// EINVAL: it is not in that group.
    pub(crate) fn leave_group(&mut self, card: &mut CommonCard, qpn: Qpn, gid: Gid) -> Result<(), Errno> {
        let CommonCard { nic, rx, .. } = card;
        nic.detach_multicast(qpn, &gid, || rx.leave_group(gid)).map_err(errno)?;
        self.objects.groups.remove(&(qpn, gid));
        Ok(())
    }
}

/// Why a queue pair does not join a group.
struct GroupError(Errno);

impl From<NicError> for GroupError {
    fn from(error: NicError) -> GroupError {
        GroupError(errno(error))
    }
}

pub(crate) fn limits(card: &CommonCard) -> CardLimits {
    card.nic.config().limits
}

/// ENOMEM: a function has as many as it may.
pub(crate) fn has_room(card: &CommonCard, held: usize, limit: u32) -> Result<(), Errno> {
    if held < card.share(limit) as usize { Ok(()) } else { Err(libc::ENOMEM) }
}

fn device(card: &CommonCard) -> DeviceReply {
    let config = card.nic.config();
    let CardLimits { qps, pds, avs, srqs, mrs, windows } = config.limits;
    DeviceReply {
        guid: card.guid,
        max_qp: card.share(qps),
        max_qp_wr: 1 << MAX_LOG,
        max_sge: MAX_SGE as u32,
        max_inline: MAX_INLINE,
        max_cq: MAX_CQ,
        max_cqe: 1 << MAX_CQ_LOG,
        max_mr: card.share(mrs),
        max_mw: card.share(windows),
        max_pd: card.share(pds),
        max_ah: card.share(avs),
        max_srq: card.share(srqs),
        max_rd_atomic: u32::from(config.max_rd_atomic),
        gids: card.addrs.len() as u32,
        active_mtu: config.mtu as u8,
        port_state: PORT_ACTIVE,
        reserved: [0; 2],
        max_groups: card.share(MAX_GROUPS),
        max_group_qps: card.share(MAX_GROUP_QPS as u32),
    }
}

/// ENODATA: the table has no such entry.
fn gid(card: &CommonCard, index: u32) -> Result<GidReply, Errno> {
    let addr = card.addrs.get(index as usize).ok_or(libc::ENODATA)?;
    let mut name = [0; 16];
    name.iter_mut().zip(addr.name.bytes()).for_each(|(to, from)| *to = from);
    Ok(GidReply { gid: addr.gid.0, ifindex: addr.ifindex, link_mtu: addr.link_mtu, name })
}

fn region_of(card: &CommonCard, key: u32, attr: &MrAttr) -> Region {
    let plain = |addr| region(key, &MrAttr { addr, ..*attr });
    match client_address(attr.addr) {
        Some((function, HostAddress::Paged(at))) => {
            let table = card.env.memories.get(function).and_then(|memory| memory.tables.find(at));
            let Some((Table { addr, pieces, page_log, offset, .. }, _)) = table else { return plain(0) };
            Region { pieces: *pieces, page_log: *page_log, offset: *offset, ..plain(*addr) }
        }
        Some((_, HostAddress::Direct(addr))) => plain(addr),
        None => plain(0),
    }
}

/// A path, whose source is one of the port's addresses.
pub(crate) fn av(from: &Address, card: &CommonCard) -> Result<Av, Errno> {
    let source = card.addrs.get(usize::from(from.sgid_index)).ok_or(libc::EINVAL)?;
    if source.gid.0 != from.sgid || from.sl > 15 || from.flow_label >= 1 << 20 {
        return Err(libc::EINVAL);
    }
    Ok(decode_address(from))
}
