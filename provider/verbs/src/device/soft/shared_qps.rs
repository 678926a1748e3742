//! Shared QPs: receiving XRC QPs that are open more than once (ibv_open_qp(3)). Which handles get their
//! events, and what the processes of a shared domain request of each other.
//!
//! Such a QP is on the card of its *owner*, the process that made it. Another process of the domain
//! *attaches*: it sends the owner requests to query and modify the QP, and gets its events. The owner keeps
//! the QP while there is an attachment. The link between the two (see `starverbs_backend::links`) ends with
//! either of them. Owns those tables; it must not know the encoding of messages.

use std::sync::{Arc, Weak};

use starverbs_backend::links::{Incoming, MESSAGE};
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::relay::{LinkId, Relay};
use starverbs_core::shared_qp::{SharedQpMessage, SharedQpRequest};
use starverbs_core::{Nanos, NicError, PdId, Qpn};

use super::Soft;
use super::deferred_log::DeferredLog;
use super::env::{HostEnv, NicEnv};
use crate::clock;
use crate::error::{Result, VerbsError};
use crate::events::{FdQueue, VerbsEvent, kind};
use crate::qp::{Qp, QpInner};

/// How long a request waits for the owner's reply.
const REPLY_TIMEOUT: Nanos = 5_000_000_000;
/// A look at what taken, while it waits, milliseconds.
const POLL_MS: i32 = 1;
/// Messages from other processes in one turn.
const RELAYS: u32 = 128;
/// Attachments of other processes to QPs of this one, at most.
const MAX_ATTACHMENTS: usize = 4096;
/// The error of a QP whose owner is gone.
const GONE: i32 = libc::ENODEV;

/// Names an attachment to another process's QP; 0: this process owns the QP.
pub(crate) type AttachmentId = u32;

/// The tables of a card.
#[derive(Default)]
pub(crate) struct SharedQps {
    handles: Vec<Handle>,
    owned: Vec<OwnedQp>,
    attachments: Vec<Attachment>,
    remote: Vec<RemoteQp>,
    requests: Vec<PendingRequest>,
    /// References that ended, to be dropped when the card's lock is given back
    retired: Vec<Qp>,
    serial: u32,
    /// A message from another process; none before there is a shared domain
    room: Option<Box<[u8; MESSAGE]>>,
}

/// A handle of this process that gets a QP's events.
struct Handle {
    qpn: Qpn,
    attachment: AttachmentId,
    cookie: u64,
    events: Arc<FdQueue<VerbsEvent>>,
}

/// A QP of this process that others may open.
struct OwnedQp {
    domain: PdId,
    qpn: Qpn,
    qp: Weak<QpInner>,
}

/// Another process's attachment to a QP of this one.
struct Attachment {
    link: LinkId,
    qp: Qp,
}

/// A QP of another process that this one is attached to.
struct RemoteQp {
    attachment: AttachmentId,
    domain: PdId,
    link: LinkId,
    qpn: Qpn,
}

/// A request under way.
struct PendingRequest {
    serial: u32,
    link: LinkId,
    /// Attach: the QP, attached from the reply on
    attaches: Option<(PdId, Qpn)>,
    reply: Option<std::result::Result<QpAttr, i32>>,
}

/// Room for `more`. ENOMEM.
fn room<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    list.try_reserve(more).map_err(|_| VerbsError::NoMemory("QPs of an XRC domain"))
}

impl SharedQps {
    /// Adds a handle of the QP, which gets its events. ENOMEM.
    pub(crate) fn list(
        &mut self,
        qpn: Qpn,
        attachment: AttachmentId,
        cookie: u64,
        events: &Arc<FdQueue<VerbsEvent>>,
    ) -> Result<()> {
        room(&mut self.handles, 1)?;
        self.handles.push(Handle { qpn, attachment, cookie, events: Arc::clone(events) });
        Ok(())
    }

    /// A handle of the QP ends, with events that wait for it; no cookie: all of them do.
    pub(crate) fn unlist(&mut self, qpn: Qpn, attachment: AttachmentId, cookie: Option<u64>) {
        self.handles.retain(|handle| {
            let ends = (handle.qpn, handle.attachment) == (qpn, attachment)
                && cookie.is_none_or(|c| c == handle.cookie);
            if ends {
                let of = |event: &VerbsEvent| {
                    matches!(event, VerbsEvent::Qp { cookie, .. } if *cookie == handle.cookie)
                };
                handle.events.purge(of);
            }
            !ends
        });
    }

    /// Other processes of `domain` may open the QP. ENOMEM.
    pub(crate) fn offer(&mut self, domain: PdId, qpn: Qpn, qp: Weak<QpInner>) -> Result<()> {
        room(&mut self.owned, 1)?;
        self.owned.push(OwnedQp { domain, qpn, qp });
        Ok(())
    }

    /// Raises an event of a QP of this process. False: the QP is in none of these tables.
    pub(crate) fn notify(
        &self,
        qpn: Qpn,
        kind: u32,
        send: impl FnMut(LinkId, SharedQpMessage) -> bool,
    ) -> bool {
        let here = self.notify_handles(qpn, 0, kind);
        self.notify_attached(qpn, kind, send) || here
    }

    fn notify_handles(&self, qpn: Qpn, attachment: AttachmentId, kind: u32) -> bool {
        let of = self.handles.iter().filter(|handle| (handle.qpn, handle.attachment) == (qpn, attachment));
        of.map(|handle| handle.events.push(VerbsEvent::Qp { kind, cookie: handle.cookie })).count() > 0
    }

    /// Notifies the processes that are attached to the QP. False: there are none.
    fn notify_attached(
        &self,
        qpn: Qpn,
        kind: u32,
        mut send: impl FnMut(LinkId, SharedQpMessage) -> bool,
    ) -> bool {
        let of = self.attachments.iter().filter(|attachment| attachment.qp.number() == qpn);
        of.map(|attachment| send(attachment.link, SharedQpMessage::Event { qpn, kind })).count() > 0
    }

    /// A QP of this process ends; attached processes are notified.
    pub(crate) fn ends(&mut self, env: &mut HostEnv, qpn: Qpn) {
        self.unlist(qpn, 0, None);
        self.owned.retain(|owned| owned.qpn != qpn);
        self.notify_attached(qpn, kind::QP_FATAL, |link, message| env.send_shared_qp(link, &message));
    }

    /// This process is not attached to the other's QP any more.
    pub(crate) fn detach(&mut self, env: &mut HostEnv, qpn: Qpn, attachment: AttachmentId) {
        self.unlist(qpn, attachment, None);
        if let Some(at) = self.remote.iter().position(|v| v.attachment == attachment) {
            env.send_shared_qp(self.remote.swap_remove(at).link, &SharedQpMessage::Detach { qpn });
        }
    }

    /// The link is gone, and so are QPs whose owner was there.
    pub(crate) fn unlink(&mut self, link: LinkId) {
        for remote in self.remote.iter().filter(|remote| remote.link == link) {
            self.notify_handles(remote.qpn, remote.attachment, kind::QP_FATAL);
        }
        self.remote.retain(|remote| remote.link != link);
        for request in self.requests.iter_mut().filter(|request| request.link == link) {
            request.reply.get_or_insert(Err(GONE));
        }
        self.retire(|attachment| attachment.link == link);
    }

    /// An XRC domain ends here, and its connections: other processes do not reach it any more.
    pub(crate) fn end(&mut self, env: &mut HostEnv, domain: PdId) {
        if let Some(links) = &mut env.links {
            links.end(domain.0);
        }
        self.remote.retain(|remote| remote.domain != domain);
        self.owned.retain(|owned| owned.domain != domain);
        self.retire(|attachment| attachment.qp.domain() == domain);
    }

    /// `retired` has room for all attachments.
    fn retire(&mut self, ends: impl FnMut(&mut Attachment) -> bool) {
        self.retired.extend(self.attachments.extract_if(.., ends).map(|attachment| attachment.qp));
    }

    /// There is a shared domain: messages come from now on.
    pub(super) fn make_room(&mut self) {
        self.room.get_or_insert_with(|| Box::new([0; MESSAGE]));
    }

    /// Takes messages from other processes of this one's XRC domains, as long as the port has room for what
    /// they bring; says how many.
    #[inline]
    pub(super) fn run(&mut self, card: NicEnv<'_>, now: Nanos, log: &DeferredLog) -> u32 {
        let Some(mut room) = self.room.take() else { return 0 };
        let taken = self.take_messages(card, now, &mut room);
        self.room = Some(room);
        self.hand_over(log);
        taken
    }

    #[cold]
    fn take_messages(&mut self, (nic, env): NicEnv<'_>, now: Nanos, room: &mut [u8; MESSAGE]) -> u32 {
        let mut taken = 0;
        while taken < RELAYS && env.tx.can_send() {
            match env.links.as_mut().and_then(|links| links.next(room)) {
                None => break,
                Some(Incoming::Ended(link)) => {
                    nic.handle_unlink(env, now, link);
                    self.unlink(link);
                }
                Some(Incoming::Message(link, domain, len)) => {
                    let (bytes, domain) = (room.get(..len).unwrap_or_default(), PdId(domain));
                    if let Some(message) = Relay::decode(bytes) {
                        nic.handle_relay(env, now, link, domain, &message);
                    } else if let Some(message) = SharedQpMessage::decode(bytes) {
                        self.handle((&mut *nic, &mut *env), now, link, domain, &message);
                    }
                }
            }
            taken += 1;
        }
        taken
    }

    /// The card's last context has left: other processes see the end of its connections.
    pub(super) fn close(&mut self, env: &mut HostEnv, log: &DeferredLog) {
        self.retire(|_| true);
        self.remote.clear();
        for request in &mut self.requests {
            request.reply.get_or_insert(Err(GONE));
        }
        self.hand_over(log);
        (env.links, self.room) = (None, None);
    }

    /// Hands over what must not be dropped under the card's lock.
    pub(crate) fn hand_over(&mut self, log: &DeferredLog) {
        if !self.retired.is_empty() {
            log.drop_later(&mut self.retired);
        }
    }

    /// A message of another process.
    pub(crate) fn handle(
        &mut self,
        (nic, env): NicEnv<'_>,
        now: Nanos,
        link: LinkId,
        domain: PdId,
        message: &SharedQpMessage,
    ) {
        match *message {
            SharedQpMessage::Request { serial, qpn, request } => {
                let done = self.serve((nic, &mut *env), now, link, domain, qpn, &request);
                let errno = done.as_ref().err().map_or(0, |errno| *errno as u32);
                let attr = done.unwrap_or_default();
                env.send_shared_qp(link, &SharedQpMessage::Reply { serial, errno, attr });
            }
            SharedQpMessage::Detach { qpn } => {
                self.retire(|attachment| attachment.link == link && attachment.qp.number() == qpn)
            }
            SharedQpMessage::Reply { serial, errno, attr } => self.on_reply(link, serial, errno, attr),
            SharedQpMessage::Event {
                qpn,
                kind: kind @ (kind::QP_FATAL..=kind::SQ_DRAINED | kind::QP_LAST_WQE_REACHED),
            } => {
                let mut remote = self.remote.iter();
                if let Some(of) = remote.find(|remote| remote.link == link && remote.qpn == qpn) {
                    self.notify_handles(qpn, of.attachment, kind);
                }
            }
            SharedQpMessage::Event { .. } => {}
        }
    }

    fn on_reply(&mut self, link: LinkId, serial: u32, errno: u32, attr: QpAttr) {
        let of = |request: &&mut PendingRequest| {
            request.serial == serial && request.link == link && request.reply.is_none()
        };
        let Some(request) = self.requests.iter_mut().find(of) else { return };
        if errno == 0
            && let Some((domain, qpn)) = request.attaches
        {
            self.remote.push(RemoteQp { attachment: serial, domain, link, qpn });
        }
        request.reply = Some(if errno == 0 { Ok(attr) } else { Err(errno as i32) });
    }

    /// Executes a request of an attached process, or of one that attaches.
    fn serve(
        &mut self,
        (nic, env): NicEnv<'_>,
        now: Nanos,
        link: LinkId,
        domain: PdId,
        qpn: Qpn,
        request: &SharedQpRequest,
    ) -> std::result::Result<QpAttr, i32> {
        let attr = nic.query_qp(qpn).map_err(NicError::errno)?;
        let is_attached = self
            .attachments
            .iter()
            .any(|attachment| attachment.link == link && attachment.qp.number() == qpn);
        match request {
            SharedQpRequest::Attach if is_attached => {}
            SharedQpRequest::Attach => {
                let owned = self.owned.iter().find(|owned| owned.domain == domain && owned.qpn == qpn);
                let owned = owned.ok_or(libc::EINVAL)?;
                /* before there is a reference, which could be the last one to be dropped */
                let many = self.attachments.len();
                let rooms = (self.attachments.try_reserve(1), self.retired.try_reserve(many + 1));
                if many >= MAX_ATTACHMENTS || rooms.0.is_err() || rooms.1.is_err() {
                    return Err(libc::ENOMEM);
                }
                self.attachments.push(Attachment { link, qp: Qp::upgrade(&owned.qp).ok_or(libc::EINVAL)? });
            }
            _ if !is_attached => return Err(libc::EINVAL),
            SharedQpRequest::Query => {}
            SharedQpRequest::Modify(to, mask) => {
                /* the requester has looked it up, but may be of any kind */
                if mask.contains(QpAttrMask::AV) && !env.tx.has_entry(to.av.sgid_index, &to.av.sgid) {
                    return Err(libc::EINVAL);
                }
                nic.modify_qp(env, qpn, to, *mask, now).map_err(NicError::errno)?;
            }
        }
        Ok(attr)
    }

    /// Sends a request; gives its serial.
    fn ask(
        &mut self,
        env: &mut HostEnv,
        link: LinkId,
        domain: PdId,
        qpn: Qpn,
        request: SharedQpRequest,
    ) -> Result<u32> {
        room(&mut self.requests, 1)?;
        let attaching = self.requests.iter().filter(|request| request.attaches.is_some()).count();
        room(&mut self.remote, attaching + 1)?;
        self.serial = self.serial.wrapping_add(1).max(1);
        let serial = self.serial;
        let attaches = (request == SharedQpRequest::Attach).then_some((domain, qpn));
        if !env.send_shared_qp(link, &SharedQpMessage::Request { serial, qpn, request }) {
            return Err(VerbsError::Os(GONE));
        }
        self.requests.push(PendingRequest { serial, link, attaches, reply: None });
        Ok(serial)
    }

    /// The reply to a request, if it is there; `last`: nobody will wait for it any longer.
    fn take_reply(&mut self, serial: u32, last: bool) -> Option<Result<QpAttr>> {
        let at = self.requests.iter().position(|request| request.serial == serial)?;
        if self.requests[at].reply.is_none() && !last {
            return None;
        }
        let reply = self.requests.swap_remove(at).reply;
        Some(reply.map_or(Err(VerbsError::Again), |reply| reply.map_err(VerbsError::Os)))
    }
}

impl Soft {
    /// Attaches to the QP of the process at the other end of `link`.
    ///
    /// # Errors
    /// EINVAL: it has no such QP in the domain; ENOMEM; ENODEV: it is gone; `Again`: it does not answer.
    pub(crate) fn attach_qp(&self, link: LinkId, domain: PdId, qpn: Qpn) -> Result<AttachmentId> {
        let serial = self.send_request(link, domain, qpn, SharedQpRequest::Attach)?;
        let reply = self.await_reply(serial);
        if matches!(reply, Err(VerbsError::Again)) {
            /* a later reply is ignored, and the owner does not keep the QP for it */
            self.with(|shard, _| shard.env.send_shared_qp(link, &SharedQpMessage::Detach { qpn }));
        }
        reply.map(|_| serial)
    }

    /// Sends the owner of an attached QP a request.
    ///
    /// # Errors
    /// ENODEV: it is gone; `Again`: it does not answer; or the owner's error.
    pub(crate) fn ask_owner(&self, attachment: AttachmentId, request: SharedQpRequest) -> Result<QpAttr> {
        let owner = self.with(|shard, _| {
            let of = shard.shared_qps.remote.iter().find(|remote| remote.attachment == attachment);
            of.map(|of| (of.link, of.domain, of.qpn))
        });
        let (link, domain, qpn) = owner.ok_or(VerbsError::Os(GONE))?;
        let serial = self.send_request(link, domain, qpn, request)?;
        self.await_reply(serial)
    }

    fn send_request(&self, link: LinkId, domain: PdId, qpn: Qpn, request: SharedQpRequest) -> Result<u32> {
        self.with(|shard, _| shard.shared_qps.ask(&mut shard.env, link, domain, qpn, request))
    }

    /// Runs the card's links until the reply is there: the other process may send requests meanwhile.
    fn await_reply(&self, serial: u32) -> Result<QpAttr> {
        let until = clock::now().saturating_add(REPLY_TIMEOUT);
        loop {
            let last = clock::now() >= until;
            let (answer, fd) = self.with(|shard, now| {
                shard.run_links(now, &self.deferred_log);
                let fd = shard.env.links.as_ref().map_or(-1, |links| links.fd());
                (shard.shared_qps.take_reply(serial, last), fd)
            });
            if let Some(answer) = answer {
                return answer;
            }
            if last {
                return Err(VerbsError::Again);
            }
            let mut wait = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd, alive across the call.
            unsafe { libc::poll(&mut wait, 1, POLL_MS) };
        }
    }
}

/// The card of `qp` gets a message on `link` of the QP's domain, as if such a process had sent it; `None`:
/// that process is gone. Gives whether it was a message.
#[cfg(feature = "fuzzing")]
pub fn inject_message(ctx: &crate::Context, qp: &Qp, link: u32, message: Option<&[u8]>) -> bool {
    let Ok(crate::device::Device::Soft(soft)) = ctx.device() else { return false };
    let (link, domain) = (LinkId(link), qp.domain());
    soft.with(|shard, now| {
        let super::Shard { nic, env, shared_qps, .. } = shard;
        let known = match message {
            None => {
                shared_qps.unlink(link);
                true
            }
            Some(bytes) => SharedQpMessage::decode(bytes)
                .map(|message| shared_qps.handle((nic, env), now, link, domain, &message))
                .is_some(),
        };
        shared_qps.hand_over(&soft.deferred_log);
        known
    })
}
