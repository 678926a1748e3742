//! What the objects ask of a device, and what it answers: plain values and the objects' rings, so that a
//! device in another place can be asked the same through an ioctl(2).

use std::sync::{Arc, Weak};

use starverbs_backend::links::DomainName;
use starverbs_core::mr::{MrAttr, WindowType};
use starverbs_core::nic::TagOp;
use starverbs_core::qp::{self as card_qp, QpAttr, QpAttrMask};
use starverbs_core::strom::{Kernel, RpcHandler, RpcOutcome};
use starverbs_core::{Av, AvId, Gid, PdId, Qpn, SrqId};
use starverbs_kernels::Builtin;
use starverbs_rings::{CardRq, CardSq, CqRoom, SpinLock, WorkRings};
use starverbs_star::control::Preference;

use super::DeviceCq;
use crate::census::Census;
use crate::cq::{CardCq, CqShared};
use crate::error::{Result, VerbsError};
use crate::events::{FdQueue, VerbsEvent};
use crate::info::{GidEntry, PortAttr};
use crate::moderation::Moderation;
use crate::qp::QpInner;
use crate::share::Foreign;
use crate::star::StarInfo;

/// Where a context's events go.
pub(crate) type Events = Arc<FdQueue<VerbsEvent>>;
/// What a queue pair is made of: the device's halves of its queues.
pub(crate) type QpInit = card_qp::QpInit<CardSq, CardRq, CardCq>;

/// Groups of commands, a bit each: what a device says that it takes. Bit 4 is kept for 1RMA.
pub(crate) mod group {
    /// The objects of a verbs program
    pub(crate) const VERBS: u32 = 1;
    /// XRC domains that processes share
    pub(crate) const XRC: u32 = 1 << 1;
    /// Queue pairs of StaR
    pub(crate) const STAR: u32 = 1 << 2;
    /// StRoM: kernels, and queue pairs that speak its dialect
    pub(crate) const RPC: u32 = 1 << 3;
}

/// A command. Each answers `Done` unless it says more.
pub(crate) enum Command<'a> {
    /// One more context, whose objects report to `events`. ENODATA: the device's last one has left
    AllocContext {
        events: &'a Events,
    },
    /// A context ends, with the queue pairs that are left in it
    FreeContext {
        events: &'a Events,
    },
    /// The port: `Port`
    QueryPort,
    /// An entry of the GID table: `Gid`
    QueryGid {
        index: u32,
    },
    /// Queue pairs of a context by state: `Census`
    Census {
        events: &'a Events,
    },

    /// A protection domain whose objects report to `events`: its `Number`
    AllocPd {
        events: &'a Events,
    },
    /// `ended` is called before the next domain can get the number; it must not call the library
    DeallocPd {
        pd: PdId,
        ended: &'a mut dyn FnMut(),
    },

    /// A memory region: its key, a `Number`
    RegMr {
        attr: MrAttr,
    },
    /// Keeps its key. What the key opened is out of reach when this answers
    ReregMr {
        key: u32,
        attr: MrAttr,
    },
    /// Its memory is out of reach when this answers
    DeregMr {
        key: u32,
    },
    /// What a key opens: `Mr`
    QueryMr {
        key: u32,
    },
    /// A region of another process under the key that it has there: `Mr`, with the address by which the
    /// device knows the memory
    ImportMr {
        key: u32,
        attr: MrAttr,
        memory: Foreign,
    },
    /// `addr`: that address
    UnimportMr {
        key: u32,
        addr: u64,
    },
    /// Memory of another process, for regions: the `Address` by which the device knows it
    AddForeign {
        memory: Foreign,
    },
    RemoveForeign {
        addr: u64,
    },
    /// No other process uses memory that was withdrawn from it when this answers
    Quiesce,
    /// A memory window: its first key, a `Number`
    AllocMw {
        pd: PdId,
        kind: WindowType,
    },
    /// `key`: any that it ever had
    DeallocMw {
        key: u32,
    },
    /// An address handle: its `Number`
    CreateAh {
        pd: PdId,
        av: Av,
    },
    DestroyAh {
        ah: AvId,
    },

    /// One more completion queue, for at least `cqe` completions: `Cq`. `ignore_overrun`: a completion that
    /// finds it full is lost, and it goes on
    CreateCq {
        cqe: u32,
        ignore_overrun: bool,
    },
    /// Moves it to the other ring
    ResizeCq {
        cq: &'a CqShared,
        room: &'a mut CqRoom,
    },
    ModifyCq {
        cq: &'a Arc<CqShared>,
        moderation: Moderation,
    },
    DestroyCq {
        cq: &'a CqShared,
    },

    /// A shared receive queue: `Srq`
    CreateSrq {
        pd: PdId,
        rq: CardRq,
        cookie: u64,
        kind: SrqKind,
    },
    /// `None` stays as it is. What is posted moves from `rings` to `room`, which has the old rings then
    ModifySrq {
        srq: SrqId,
        rings: &'a SpinLock<WorkRings>,
        room: Option<&'a mut WorkRings>,
        limit: Option<u32>,
    },
    /// The limit that is armed, a `Number`
    QuerySrq {
        srq: SrqId,
    },
    DestroySrq {
        srq: SrqId,
    },
    /// A list operation of tag matching: the handle of what was added, a `Number`
    ChangeTags {
        srq: SrqId,
        op: TagOp,
    },

    /// A queue pair: its `Number`. `role`: unless `Off`, it may become an end of a StaR connection. `rpc`: it
    /// speaks StRoM's dialect
    CreateQp {
        init: QpInit,
        role: Preference,
        rpc: bool,
    },
    ModifyQp {
        qp: &'a QpInner,
        to: &'a QpAttr,
        mask: QpAttrMask,
    },
    /// Attributes: `Qp`
    QueryQp {
        qpn: Qpn,
    },
    /// Its completions that were not polled are gone. `detach`: it leaves its multicast groups, which else
    /// are in the way
    DestroyQp {
        qp: &'a QpInner,
        detach: bool,
    },
    AttachMcast {
        qpn: Qpn,
        group: Gid,
    },
    DetachMcast {
        qpn: Qpn,
        group: Gid,
    },

    /// XRC domains that processes share
    Xrc(Xrc<'a>),
    /// Queue pairs of StaR
    Star(StarCommand),
    /// StRoM's kernels
    Kernel(KernelCommand<'a>),
}

impl Command<'_> {
    /// Its group.
    pub(crate) fn group(&self) -> u32 {
        match self {
            Command::Xrc(_) => group::XRC,
            Command::Star(_) => group::STAR,
            Command::Kernel(_) | Command::CreateQp { rpc: true, .. } => group::RPC,
            _ => group::VERBS,
        }
    }
}

/// What a shared receive queue is for.
pub(crate) enum SrqKind {
    /// An event when fewer than `limit` receives are left; 0: none
    Basic { limit: u32 },
    /// Receives of an XRC domain, which complete in `cq`
    Xrc { domain: PdId, cq: CardCq },
    /// Matches up to `tags` tags; everything completes in `cq`
    Tagged { cq: CardCq, tags: u32 },
}

/// Of an XRC domain that the processes of a host share.
pub(crate) enum Xrc<'a> {
    /// Other processes reach the domain under that name
    Share {
        domain: PdId,
        name: &'a DomainName,
    },
    /// They no longer do
    Unshare {
        domain: PdId,
    },
    /// Other processes of the domain may open the receiving queue pair
    Offer {
        domain: PdId,
        qpn: Qpn,
        qp: Weak<QpInner>,
    },
    /// Opens the queue pair of the process that has QPN block `block`: the attachment, a `Number`
    Open {
        domain: PdId,
        block: u16,
        qpn: Qpn,
    },
    /// Asks the owner of an attached queue pair: `Qp`
    Query {
        attachment: u32,
    },
    /// The same, and changes it
    Modify {
        attachment: u32,
        to: QpAttr,
        mask: QpAttrMask,
    },
    /// A handle of a queue pair gets its events. `attachment` 0: the queue pair is this process's
    List {
        qpn: Qpn,
        attachment: u32,
        cookie: u64,
        events: &'a Events,
    },
    Unlist {
        qpn: Qpn,
        attachment: u32,
        cookie: u64,
    },
}

/// StaR (docs/star.md).
pub(crate) enum StarCommand {
    /// Which end is to keep the connection from now on. EOPNOTSUPP: its peer has no StaR
    SetRole { qpn: Qpn, role: Preference },
    /// What has become of it: `Star`
    Query { qpn: Qpn, role: Option<Preference> },
}

/// StRoM (docs/strom.md).
pub(crate) enum KernelCommand<'a> {
    /// Answers RPCs of an op-code on queue pairs of a protection domain, instead of another one if it may
    /// `replace` it. EBUSY: another does
    Load { pd: PdId, op: u64, by: AnsweredBy, replace: bool },
    /// No longer
    Unload { pd: PdId, op: u64 },
    /// Answers a request of the program's own; says how it ended
    Call { pd: PdId, op: u64, params: &'a [u8], answer: &'a mut [u8], ended: &'a mut RpcOutcome },
}

/// What is to answer RPCs.
pub(crate) enum AnsweredBy {
    /// A kernel of the card's
    Builtin(Builtin),
    /// One of the program's
    Module(Box<dyn Kernel>),
    /// The program
    Program,
}

impl From<AnsweredBy> for RpcHandler {
    fn from(by: AnsweredBy) -> RpcHandler {
        match by {
            AnsweredBy::Builtin(kernel) => kernel.make().into(),
            AnsweredBy::Module(kernel) => kernel.into(),
            AnsweredBy::Program => RpcHandler::Program,
        }
    }
}

/// An answer.
pub(crate) enum CommandReply {
    Done,
    Number(u32),
    Address(u64),
    Port(PortAttr),
    Gid(GidEntry),
    Mr(MrAttr),
    Srq {
        srq: SrqId,
        /// By which requests name it
        number: u32,
    },
    Qp(QpAttr),
    Census(Census),
    Star(StarInfo),
    Cq(DeviceCq),
}

/// A device that answers something else is broken.
const BROKEN: VerbsError = VerbsError::Os(libc::EIO);

/// Of each kind of answer: what it carries.
macro_rules! carries {
    ($($name:ident: $kind:ident($type:ty)),+ $(,)?) => {
        impl CommandReply {
            $(
                /// EIO: it is another answer.
                pub(crate) fn $name(self) -> Result<$type> {
                    if let CommandReply::$kind(value) = self { Ok(value) } else { Err(BROKEN) }
                }
            )+
        }
    };
}

carries! {
    number: Number(u32),
    address: Address(u64),
    port: Port(PortAttr),
    gid: Gid(GidEntry),
    mr: Mr(MrAttr),
    qp: Qp(QpAttr),
    census: Census(Census),
    star: Star(StarInfo),
    cq: Cq(DeviceCq),
}

impl CommandReply {
    /// EIO: it is another answer.
    pub(crate) fn srq(self) -> Result<(SrqId, u32)> {
        if let CommandReply::Srq { srq, number } = self { Ok((srq, number)) } else { Err(BROKEN) }
    }
}
