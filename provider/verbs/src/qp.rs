//! Queue pairs.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use starverbs_core::coalesce::are_small;
use starverbs_core::nic::PathId;
use starverbs_core::qp::{self as card_qp, QpAttrMask, RecvSource};
use starverbs_core::tags::MAX_TAG_SGE;
use starverbs_core::{Av, Gid, NicError, PdId, QpState, QpType, Qpn, SrqId};
use starverbs_rings::{ProgramMemory, RecvSize, SendProducer, SendSize, WorkRings};
use starverbs_star::control::Preference;

use crate::ah::AhAttr;
use crate::context::Context;
use crate::cq::{Cq, CqShared};
use crate::device::command::{StarCommand, Xrc};
use crate::device::soft::shared_qps::AttachmentId;
use crate::device::{Command, Device};
use crate::error::{Result, VerbsError};
use crate::events::VerbsEvent;
use crate::info::{MAX_INLINE, MAX_SGE};
use crate::log::log;
use crate::pd::Pd;
use crate::post::{PostLines, RecvPoster, SendPoster};
use crate::srq::Srq;
use crate::star::{Settled, StarInfo, preference_of};
use crate::wr::SendBatch;

/// What a QP is to be: `struct ibv_qp_init_attr`.
#[derive(Clone, Copy)]
pub struct QpInit<'a> {
    /// Transport service
    pub qp_type: QpType,
    /// Completions of sends
    pub send_cq: &'a Cq,
    /// Completions of receives
    pub recv_cq: &'a Cq,
    /// Receives come from here; the QP has no receive queue of its own then
    pub srq: Option<&'a Srq>,
    /// WQEs of the send queue, at least
    pub max_send_wr: u32,
    /// WQEs of the receive queue, at least
    pub max_recv_wr: u32,
    /// SGEs of a send, at least
    pub max_send_sge: u32,
    /// SGEs of a receive, at least
    pub max_recv_sge: u32,
    /// Inline bytes of a send, at least
    pub max_inline: u32,
    /// Every send makes a completion
    pub sq_sig_all: bool,
    /// IBV_QP_CREATE_BLOCK_SELF_MCAST_LB: what it sends to a multicast group does not come back to it
    pub block_own_multicast: bool,
    /// Which end keeps the connection (StaR); `None`: what the setting says
    pub star: Option<Preference>,
    /// It speaks StRoM's dialect, where its peer does: RPCs, and no FLUSH
    pub rpc: bool,
    /// Names the QP in events
    pub cookie: u64,
}

/// What was granted: at least what was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCaps {
    /// WQEs of the send queue
    pub max_send_wr: u32,
    /// WQEs of the receive queue
    pub max_recv_wr: u32,
    /// SGEs of a send
    pub max_send_sge: u32,
    /// SGEs of a receive
    pub max_recv_sge: u32,
    /// Inline bytes of a send
    pub max_inline: u32,
}

/// `struct ibv_qp_attr`, with an address as programs give it.
pub type QpAttr = card_qp::QpAttr<AhAttr>;

/// A queue pair. Clones are the same QP.
#[derive(Clone)]
pub struct Qp(Arc<QpInner>, PostLines);

/// The preference of a queue pair that was made without StaR, and has none later.
const NO_PREFERENCE: u8 = 0x1f;
/// The part that is the preference.
const PREFERENCE: u8 = 0x1f;
/// Beside it: RPCs may be posted, as it is settled what it is of StaR.
const ADMITS_RPC: u8 = 0x20;
/// Beside it: the queue pair is destroyed.
const GONE: u8 = 0x40;
/// Beside the preference: it speaks StRoM's dialect.
const RPC: u8 = 0x80;
/// Answers of kernels that a queue pair of the dialect may have under way; each takes a place of its send
/// queue.
pub(crate) const REPLIES: u32 = 16;
/// SGEs of such an answer.
const REPLY_SGES: u32 = 2;

/// What clones of a [`Qp`] share. First what posting looks at, which lies in one line of most.
#[repr(C)]
pub(crate) struct QpInner {
    pub(crate) rings: WorkRings,
    pub(crate) pd: Pd,
    pub(crate) qpn: Qpn,
    pub(crate) qp_type: QpType,
    /// State that the program last put it in. The card may have moved on to SQE or ERR, where posting is
    /// allowed as in RTS.
    state: AtomicU8,
    /// Where its packets go, once small posts were found to wait: [`PathId::number`] of one of the first; 0:
    /// it is not known
    path: AtomicU8,
    /// Which end is to keep the connection: a [`Preference`], or [`NO_PREFERENCE`]; with [`RPC`], what is
    /// admitted of them, and [`GONE`]
    preference: AtomicU8,
    send_cq: Cq,
    recv_cq: Cq,
    /// Keeps it alive while the QP takes from it.
    _srq: Option<Srq>,
    cookie: u64,
}

impl Qp {
    /// `ibv_create_qp`: makes a queue pair, in RESET.
    ///
    /// # Errors
    /// EINVAL: beyond the device's limits, or an SRQ for a transport other than RC and UD; EOPNOTSUPP: a role
    /// of StaR for one that can have none; ENOMEM; EIO in a forked child.
    pub fn create(pd: &Pd, init: &QpInit<'_>) -> Result<Qp> {
        let device = pd.context().device()?;
        check_caps(init, device.info().attr.max_qp_wr)?;
        check_tags(pd, init)?;
        let setting =
            if device.takes_star() { preference_of(device.settings().star) } else { Preference::Off };
        let preference = preference(init, setting)?;
        let rings = rings(init, device.queue_memory(pd)).ok_or(VerbsError::NoMemory("queue pair"))?;
        // SAFETY: the one card half of this queue, used under the card's lock, between released and posted.
        let sq = unsafe { rings.card_sq() };
        let rq = match init.srq {
            Some(srq) => RecvSource::Shared(srq.id()),
            None if init.qp_type == QpType::XrcRecv => RecvSource::Xrc(SrqId(u32::MAX)),
            // SAFETY: the one card half of this queue, used under the card's lock.
            None => RecvSource::Own(unsafe { rings.card_rq() }),
        };
        let card_init = card_qp::QpInit {
            qp_type: init.qp_type,
            pd: pd.id(),
            sq,
            rq,
            send_cq: init.send_cq.card_half(),
            recv_cq: init.recv_cq.card_half(),
            sq_sig_all: init.sq_sig_all,
            block_own_multicast: init.block_own_multicast,
            cookie: init.cookie,
        };
        let command = Command::CreateQp { init: card_init, role: preference, rpc: init.rpc };
        let qpn = device.control(command)?.number()?;
        log!(Debug, "queue pair {qpn:#x}: created, {:?}", init.qp_type);
        Ok(Qp::handle(pd, init, qpn, preference, rings))
    }

    /// One of another process of the XRC domain that `pd` stands for. What the card here keeps of it is this
    /// handle.
    pub(crate) fn attached(pd: &Pd, cq: &Cq, qpn: Qpn, attachment: AttachmentId) -> Result<Qp> {
        let init = QpInit { cookie: u64::from(attachment), ..xrc_recv(cq) };
        let rings = rings(&init, pd.memory()).ok_or(VerbsError::NoMemory("queue pair"))?;
        Ok(Qp::handle(pd, &init, qpn, Preference::Off, rings))
    }

    /// The handle of a QP that is in RESET, which uses its CQs and SRQ from now on.
    fn handle(pd: &Pd, init: &QpInit<'_>, qpn: Qpn, preference: Preference, rings: WorkRings) -> Qp {
        for cq in [init.send_cq, init.recv_cq] {
            cq.0.users.fetch_add(1, Ordering::AcqRel);
        }
        Qp::of(Arc::new(QpInner {
            qpn,
            qp_type: init.qp_type,
            state: AtomicU8::new(QpState::Reset as u8),
            path: AtomicU8::new(0),
            preference: AtomicU8::new(
                match preference {
                    Preference::Off => NO_PREFERENCE,
                    preference => preference as u8,
                } | if init.rpc { RPC } else { 0 },
            ),
            pd: pd.clone(),
            rings,
            send_cq: init.send_cq.clone(),
            recv_cq: init.recv_cq.clone(),
            _srq: init.srq.cloned(),
            cookie: init.cookie,
        }))
    }

    fn of(inner: Arc<QpInner>) -> Qp {
        let lines = PostLines::new(&inner.rings);
        Qp(inner, lines)
    }

    /// The protection domain that it was made in; for a receiving XRC QP what stands for its XRC domain.
    pub(crate) fn domain(&self) -> PdId {
        self.0.pd.id()
    }

    /// Whether it is another process's, and attached here.
    pub(crate) fn is_attached(&self) -> bool {
        self.0.attachment() != 0 && self.0.preference.load(Ordering::Acquire) & GONE == 0
    }

    /// Another handle of a receiving XRC QP, whose events go to `ctx`. ENOMEM.
    pub(crate) fn list(&self, ctx: &Context, cookie: u64) -> Result<()> {
        let (qpn, attachment) = (self.0.qpn, self.0.attachment());
        let list = Xrc::List { qpn, attachment, cookie, events: ctx.events() };
        ctx.device()?.control(Command::Xrc(list)).map(|_| ())
    }

    /// Its number.
    #[inline]
    pub fn number(&self) -> Qpn {
        self.0.qpn
    }

    /// What was granted.
    pub fn caps(&self) -> QpCaps {
        let rings = &self.0.rings;
        let own = if self.0.speaks_rpc() { REPLIES } else { 0 };
        QpCaps {
            max_send_wr: rings.send_slots() - own,
            max_recv_wr: rings.recv_slots(),
            max_send_sge: u32::from(rings.max_send_sge()),
            max_recv_sge: u32::from(rings.max_recv_sge()),
            max_inline: rings.max_inline(),
        }
    }

    /// Which end its program wants to keep the connection (StaR).
    pub fn preference(&self) -> Preference {
        self.0.preference()
    }

    /// What its program wants from now on, also while the connection runs: then both ends change when nothing
    /// is under way. `None`: what the settings say.
    ///
    /// # Errors
    /// EOPNOTSUPP: it was made without StaR, or packets carry it, and it has none with this peer, or takes
    /// from an SRQ; EINVAL: it is gone, or in ERR or SQD; EIO in a forked child.
    pub fn change_preference(&self, preference: Option<Preference>) -> Result<()> {
        let device = self.0.pd.context().device()?;
        let preference = preference.unwrap_or(preference_of(device.settings().star));
        if !self.0.has_preference() {
            return Err(VerbsError::Unsupported("StaR for a queue pair that was made without"));
        }
        device.control(Command::Star(StarCommand::SetRole { qpn: self.0.qpn, role: preference }))?;
        let change = |was| Some(preference as u8 | was & (RPC | GONE));
        _ = self.0.preference.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
        Ok(())
    }

    /// What has become of that, and what it costs.
    ///
    /// # Errors
    /// EIO in a forked child.
    pub fn star(&self) -> Result<StarInfo> {
        let device = self.0.pd.context().device()?;
        let role = self.0.has_preference().then(|| self.0.preference());
        device.control(Command::Star(StarCommand::Query { qpn: self.0.qpn, role }))?.star()
    }

    /// Its state now; RESET when it is gone.
    pub fn state(&self) -> QpState {
        let Ok(device) = self.0.pd.context().device() else { return QpState::Err };
        let gone = if self.0.attachment() == 0 { QpState::Reset } else { QpState::Err };
        self.query_by(device).map_or(gone, |attr| attr.state)
    }

    /// `ibv_modify_qp`: changes attributes, and the state.
    ///
    /// # Errors
    /// EINVAL: a transition, attribute or value that is not allowed; EIO in a forked child.
    pub fn modify(&self, attr: &QpAttr, mask: QpAttrMask) -> Result<()> {
        let ctx = self.0.pd.context();
        let device = ctx.device()?;
        let av = if mask.contains(QpAttrMask::AV) { attr.av.resolve(ctx)? } else { Av::default() };
        let to = attr.map_address(|_| av);
        if mask.contains(QpAttrMask::PATH_MTU) && to.path_mtu > device.info().path_mtu(&to.av.dgid) {
            return Err(VerbsError::Invalid("path MTU: more than the links carry"));
        }
        if self.0.attachment() != 0 {
            let modify = Xrc::Modify { attachment: self.0.attachment(), to, mask };
            return device.control(Command::Xrc(modify)).map(|_| ());
        }
        device.control(Command::ModifyQp { qp: &self.0, to: &to, mask })?;
        if mask.contains(QpAttrMask::STATE) {
            log!(Debug, "queue pair {:#x}: {:?}", self.0.qpn, attr.state);
            self.0.posting_as(attr.state);
            if attr.state == QpState::Reset {
                self.0.purge();
            }
        }
        Ok(())
    }

    /// `ibv_query_qp`: reads the attributes and the state.
    ///
    /// # Errors
    /// EINVAL when it is gone; EIO in a forked child.
    pub fn query(&self) -> Result<QpAttr> {
        let device = self.0.pd.context().device()?;
        Ok(self.query_by(device)?.map_address(|av| AhAttr::from_av(&av)))
    }

    fn query_by(&self, device: &Device) -> Result<card_qp::QpAttr> {
        let query = match self.0.attachment() {
            0 => Command::QueryQp { qpn: self.0.qpn },
            attachment => Command::Xrc(Xrc::Query { attachment }),
        };
        device.control(query)?.qp()
    }

    /// `ibv_destroy_qp`. Its completions that were not polled are gone.
    ///
    /// # Errors
    /// EBUSY while it is attached to a multicast group; EINVAL when it is gone already; EIO in a forked
    /// child.
    pub fn destroy(&self) -> Result<()> {
        self.0.destroy(false)
    }

    /// `ibv_destroy_qp` of one that may be open more than once, by the handle that has this cookie: the last
    /// one destroys it.
    ///
    /// # Errors
    /// As [`Qp::destroy`].
    pub fn close(&self, cookie: u64) -> Result<()> {
        let (qpn, attachment) = (self.0.qpn, self.0.attachment());
        let unlist = Xrc::Unlist { qpn, attachment, cookie };
        self.0.pd.context().device()?.control(Command::Xrc(unlist))?;
        /* others have it: whichever of them is dropped last destroys it */
        if Arc::strong_count(&self.0) > 1 { Ok(()) } else { self.destroy() }
    }

    pub(crate) fn downgrade(&self) -> Weak<QpInner> {
        Arc::downgrade(&self.0)
    }

    /// Whether it is that QP.
    pub(crate) fn is(&self, weak: &Weak<QpInner>) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.0), weak.as_ptr())
    }

    pub(crate) fn upgrade(weak: &Weak<QpInner>) -> Option<Qp> {
        weak.upgrade().map(Qp::of)
    }

    /// Its transport, and end of it.
    #[inline]
    pub fn qp_type(&self) -> QpType {
        self.0.qp_type
    }

    /// Locks the send queue for posting.
    #[inline]
    pub fn post_send(&self) -> SendPoster<'_> {
        self.1.fetch();
        SendPoster::new(&self.0, &self.1)
    }

    /// Locks the send queue for work requests that are built in place: `ibv_wr_start`. `ops` are the
    /// operations that the QP was made for, of `send_ops_offered`.
    #[inline]
    pub fn start(&self, ops: u64) -> SendBatch<'_> {
        SendBatch::new(&self.0, ops)
    }

    /// Locks the receive queue for posting.
    #[inline]
    pub fn post_recv(&self) -> RecvPoster<'_> {
        RecvPoster::new(&self.0)
    }

    /// `ibv_attach_mcast`. A second time changes nothing.
    ///
    /// # Errors
    /// EINVAL: not a UD QP, not a multicast GID, or of an IP version of which the card has no address;
    /// ENOMEM: the card has as many groups, or the group as many QPs, as it may; EIO in a forked child.
    pub fn attach_mcast(&self, group: Gid) -> Result<()> {
        let device = self.0.pd.context().device()?;
        device.control(Command::AttachMcast { qpn: self.0.qpn, group }).map(|_| ())
    }

    /// `ibv_detach_mcast`: takes the queue pair out of a multicast group.
    ///
    /// # Errors
    /// EINVAL: it is not attached to the group; EIO in a forked child.
    pub fn detach_mcast(&self, group: Gid) -> Result<()> {
        let device = self.0.pd.context().device()?;
        device.control(Command::DetachMcast { qpn: self.0.qpn, group }).map(|_| ())
    }
}

impl QpInner {
    /// Sends are accepted in RTS, SQD, SQE and ERR.
    #[inline]
    pub(crate) fn may_send(&self) -> bool {
        self.state.load(Ordering::Relaxed) >= QpState::Rts as u8
    }

    /// Whether what this producer has pushed is small, as of [`Doorbell::Sends`](crate::device::Doorbell).
    #[inline]
    pub(crate) fn posts_small(&self, producer: &SendProducer<'_>) -> bool {
        let ready = self.state.load(Ordering::Relaxed) == QpState::Rts as u8;
        ready && self.qp_type.is_reliable() && are_small(producer.pushed(), || producer.last_length())
    }

    /// Where its packets go, as far as is known without the card's context of it.
    #[inline]
    pub(crate) fn path(&self) -> Option<PathId> {
        PathId::of_number(self.path.load(Ordering::Relaxed).into())
    }

    /// The card's context says where they go.
    #[inline]
    pub(crate) fn note_path(&self, path: Option<PathId>) {
        let number = path.and_then(|path| path.number().try_into().ok());
        self.path.store(number.unwrap_or(0), Ordering::Relaxed);
    }

    /// Stores the state, as far as posting goes: the send queue is the card's where tags are matched.
    fn posting_as(&self, state: QpState) {
        let mine = self._srq.as_ref().is_some_and(Srq::is_tagged);
        let state = if mine && state >= QpState::Rts { QpState::Rtr } else { state };
        if state < QpState::Rtr {
            /* it may be settled anew */
            self.preference.fetch_and(!ADMITS_RPC, Ordering::Relaxed);
            self.path.store(0, Ordering::Relaxed);
        }
        self.state.store(state as u8, Ordering::Release);
    }

    /// Receives are accepted everywhere but in RESET.
    #[inline]
    pub(crate) fn may_receive(&self) -> bool {
        self.state.load(Ordering::Relaxed) != QpState::Reset as u8
    }

    /// By which it is known if it is another process's; else 0.
    pub(crate) fn attachment(&self) -> AttachmentId {
        if self.qp_type == QpType::XrcRecv { self.cookie as AttachmentId } else { 0 }
    }

    /// Whether it was made with a preference, and so is known to StaR.
    pub(crate) fn has_preference(&self) -> bool {
        self.preference.load(Ordering::Relaxed) & PREFERENCE != NO_PREFERENCE
    }

    /// Whether it speaks StRoM's dialect.
    #[inline]
    pub(crate) fn speaks_rpc(&self) -> bool {
        self.preference.load(Ordering::Relaxed) & RPC != 0
    }

    /// Whether an RPC may be posted, as far as it is settled what it is of StaR: to a stateful end alone. One
    /// of the dialect is settled once, so the card is asked until it is.
    #[inline]
    pub(crate) fn admit_rpc(&self) -> Result<()> {
        let known = self.preference.load(Ordering::Relaxed);
        if known & PREFERENCE == NO_PREFERENCE || known & ADMITS_RPC != 0 {
            Ok(())
        } else {
            self.ask_for_rpc()
        }
    }

    #[cold]
    fn ask_for_rpc(&self) -> Result<()> {
        let query = StarCommand::Query { qpn: self.qpn, role: Some(self.preference()) };
        let role = self.pd.context().device()?.control(Command::Star(query))?.star()?.role;
        let admitted = match role {
            Settled::Stateful => return Err(VerbsError::Unsupported("RPCs of a stateful end of StaR")),
            Settled::Stateless | Settled::Plain => ADMITS_RPC,
            Settled::Waiting => 0,
        };
        self.preference.fetch_or(admitted, Ordering::Relaxed);
        Ok(())
    }

    /// Which end its program wants to keep the connection.
    pub(crate) fn preference(&self) -> Preference {
        Preference::from_code(self.preference.load(Ordering::Relaxed) & PREFERENCE).unwrap_or(Preference::Off)
    }

    /// Where it completes.
    pub(crate) fn cqs(&self) -> [&CqShared; 2] {
        [&self.send_cq.0, &self.recv_cq.0]
    }

    pub(crate) fn purge(&self) {
        self.send_cq.purge(self.qpn);
        self.recv_cq.purge(self.qpn);
    }

    /// `detach`: whether its multicast groups are in the way.
    fn destroy(&self, detach: bool) -> Result<()> {
        let ctx = self.pd.context();
        let device = ctx.device()?;
        if self.preference.fetch_or(GONE, Ordering::AcqRel) & GONE != 0 {
            return Err(VerbsError::Invalid("queue pair is gone"));
        }
        let ended = device.control(Command::DestroyQp { qp: self, detach });
        if matches!(ended, Err(VerbsError::Card(NicError::Busy))) {
            self.preference.fetch_and(!GONE, Ordering::Release);
            return Err(VerbsError::Busy("a multicast group"));
        }
        log!(Debug, "queue pair {:#x}: destroyed", self.qpn);
        if self.qp_type != QpType::XrcRecv {
            ctx.purge_events(
                |event| matches!(event, VerbsEvent::Qp { cookie, .. } if *cookie == self.cookie),
            );
        }
        for cq in [&self.send_cq, &self.recv_cq] {
            cq.0.users.fetch_sub(1, Ordering::AcqRel);
        }
        ended.map(|_| ())
    }
}

impl Drop for QpInner {
    fn drop(&mut self) {
        let _ = self.destroy(true);
    }
}

/// A QP that receives for an XRC domain, which has no queues of its own, and handles instead of a cookie:
/// `cq` stands for what it has none of.
pub(crate) fn xrc_recv(cq: &Cq) -> QpInit<'_> {
    QpInit {
        qp_type: QpType::XrcRecv,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        max_send_wr: 0,
        max_recv_wr: 0,
        max_send_sge: 0,
        max_recv_sge: 0,
        max_inline: 0,
        sq_sig_all: false,
        block_own_multicast: false,
        star: None,
        rpc: false,
        cookie: 0,
    }
}

/// `most`: WQEs of a queue.
fn check_caps(init: &QpInit<'_>, most: u32) -> Result<()> {
    /* ibv_create_qp(3) rules UC out; but cards and Linux' rdma_rxe have it, and programs use it (perftest) */
    if init.srq.is_some() && !matches!(init.qp_type, QpType::Rc | QpType::Uc | QpType::Ud) {
        return Err(VerbsError::Invalid("a shared receive queue for a transport that takes none"));
    }
    let wqes = init.max_send_wr.max(if init.srq.is_some() { 0 } else { init.max_recv_wr });
    let sges = init.max_send_sge.max(if init.srq.is_some() { 0 } else { init.max_recv_sge });
    if wqes > most || sges > MAX_SGE || init.max_inline > MAX_INLINE {
        return Err(VerbsError::Invalid("queue pair capabilities"));
    }
    Ok(())
}

/// An SRQ that matches tags serves RC, and its buffers are of the QP's protection domain.
fn check_tags(pd: &Pd, init: &QpInit<'_>) -> Result<()> {
    let Some(srq) = init.srq.filter(|srq| srq.is_tagged()) else { return Ok(()) };
    if init.qp_type != QpType::Rc || srq.pd().id() != pd.id() {
        return Err(VerbsError::Invalid("transport or protection domain of a tag matching queue"));
    }
    Ok(())
}

/// Which end is to keep the connection. StaR is for RC; and of a QP whose send queue is the card's, which
/// matches tags, the library cannot have the other half.
fn preference(init: &QpInit<'_>, setting: Preference) -> Result<Preference> {
    let can = init.qp_type == QpType::Rc && !init.srq.is_some_and(Srq::is_tagged);
    if init.rpc && !can {
        return Err(VerbsError::Unsupported("RPCs for other than RC, and where tags are matched"));
    }
    match init.star {
        /* with RPCs it is asked for, and not set */
        None if init.rpc => Ok(Preference::Off),
        Some(Preference::Off) => Ok(Preference::Off),
        Some(_) if !can => Err(VerbsError::Unsupported("StaR for other than RC, and where tags are matched")),
        asked if can => Ok(asked.unwrap_or(setting)),
        _ => Ok(Preference::Off),
    }
}

/// Requests of the card's own under way on a QP whose SRQ matches tags.
const OWN_SENDS: SendSize = SendSize { max_wr: 32, max_sge: MAX_TAG_SGE as u16, max_inline: 0 };

/// The rings of a QP; no receive queue for one that takes from SRQs, or never receives.
fn rings(init: &QpInit<'_>, memory: ProgramMemory) -> Option<WorkRings> {
    let send = SendSize {
        max_wr: init.max_send_wr.max(1) + if init.rpc { REPLIES } else { 0 },
        max_sge: init.max_send_sge.max(if init.rpc { REPLY_SGES } else { 1 }) as u16,
        max_inline: init.max_inline,
    };
    let send = if init.srq.is_some_and(Srq::is_tagged) { OWN_SENDS } else { send };
    let recv = RecvSize { max_wr: init.max_recv_wr.max(1), max_sge: init.max_recv_sge.max(1) as u16 };
    let own = init.srq.is_none() && !init.qp_type.is_xrc();
    WorkRings::new(Some(send), own.then_some(recv), memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an idle QP costs beside its rings (docs/decisions/0005-memory-of-an-idle-qp.md): who adds a field
    /// here pays for it with every connection of every program.
    #[test]
    fn an_idle_qp_stays_small() {
        let counts = 2 * size_of::<usize>();
        assert!(counts + size_of::<QpInner>() <= 72, "{}", size_of::<QpInner>());
        let card = starverbs_core::Nic::<crate::device::soft::env::HostEnv>::QP_BYTES;
        /* seven cache lines */
        assert!(card <= 448, "{card}");
    }
}
