//! Receiving XRC QPs that are open more than once (ibv_open_qp(3)): which handles are told of their events,
//! and what the processes of a shared domain ask each other for.
//!
//! Such a QP is on the card of its *home*, the process that made it. Another process of the domain that opens
//! it is a *guest*: it asks the home to query and modify the QP, and is told of its events. Home keeps the QP
//! while any guest has it; the connection between the two (see `starverbs_backend::links`) tells each of the
//! other's end. Owns those tables; it must not know what the messages' bytes are.

use std::sync::{Arc, Weak};

use starverbs_backend::links::{Incoming, MESSAGE};
use starverbs_core::opening::{Opening, Wish};
use starverbs_core::qp::{QpAttr, QpAttrMask};
use starverbs_core::relay::{LinkId, Relay};
use starverbs_core::{Nanos, NicError, PdId, Qpn};

use super::Soft;
use super::deferred_log::DeferredLog;
use super::env::HostEnv;
use super::intake::CardAnd;
use crate::clock;
use crate::error::{Result, VerbsError};
use crate::events::{Event, FdQueue, kind};
use crate::qp::{Qp, QpInner};

/// How long a guest waits for the home's answer.
const PATIENCE: Nanos = 5_000_000_000;
/// A look at what came, while it waits, milliseconds.
const LOOK: i32 = 1;
/// Messages from other processes in one turn.
const RELAYS: u32 = 128;
/// References that others have to QPs of this process, at most.
const GUESTS: usize = 4096;
/// What is said of a QP whose home is gone.
const GONE: i32 = libc::ENODEV;

/// Names a guest's opening in its process; 0: the QP is at home there.
pub(crate) type Visit = u32;

/// The tables of a card.
#[derive(Default)]
pub(crate) struct Attached {
    handles: Vec<Handle>,
    home: Vec<Home>,
    guests: Vec<Guest>,
    visits: Vec<Visiting>,
    asked: Vec<Asked>,
    /// References that ended, to be dropped when the card's lock is given back
    retired: Vec<Qp>,
    serial: u32,
    /// A message from another process; none before there is a shared domain
    room: Option<Box<[u8; MESSAGE]>>,
}

/// Somebody of this process who is told of a QP's events.
struct Handle {
    qpn: Qpn,
    visit: Visit,
    cookie: u64,
    events: Arc<FdQueue<Event>>,
}

/// A QP of this process that others may open.
struct Home {
    domain: PdId,
    qpn: Qpn,
    qp: Weak<QpInner>,
}

/// Another process's reference.
struct Guest {
    link: LinkId,
    qp: Qp,
}

/// A QP of another process.
struct Visiting {
    visit: Visit,
    domain: PdId,
    link: LinkId,
    qpn: Qpn,
}

/// A request under way.
struct Asked {
    serial: u32,
    link: LinkId,
    /// An opening: it counts from the answer on
    opens: Option<(PdId, Qpn)>,
    answer: Option<std::result::Result<QpAttr, i32>>,
}

/// Room for `more`. ENOMEM.
fn room<T>(list: &mut Vec<T>, more: usize) -> Result<()> {
    list.try_reserve(more).map_err(|_| VerbsError::NoMemory("QPs of an XRC domain"))
}

impl Attached {
    /// A handle of the QP is told of its events. ENOMEM.
    pub(crate) fn list(
        &mut self,
        (qpn, visit): (Qpn, Visit),
        cookie: u64,
        events: &Arc<FdQueue<Event>>,
    ) -> Result<()> {
        room(&mut self.handles, 1)?;
        self.handles.push(Handle { qpn, visit, cookie, events: Arc::clone(events) });
        Ok(())
    }

    /// A handle of the QP ends, with events that wait for it; no cookie: all of them do.
    pub(crate) fn unlist(&mut self, qpn: Qpn, visit: Visit, cookie: Option<u64>) {
        self.handles.retain(|handle| {
            let ends =
                (handle.qpn, handle.visit) == (qpn, visit) && cookie.is_none_or(|c| c == handle.cookie);
            if ends {
                let of =
                    |event: &Event| matches!(event, Event::Qp { cookie, .. } if *cookie == handle.cookie);
                handle.events.purge(of);
            }
            !ends
        });
    }

    /// Other processes of `domain` may open the QP. ENOMEM.
    pub(crate) fn offer(&mut self, domain: PdId, qpn: Qpn, qp: Weak<QpInner>) -> Result<()> {
        room(&mut self.home, 1)?;
        self.home.push(Home { domain, qpn, qp });
        Ok(())
    }

    /// A QP of this process has an event. False: it is none of those here.
    pub(crate) fn tell(&self, qpn: Qpn, kind: u32, say: impl FnMut(LinkId, Opening) -> bool) -> bool {
        let here = self.tell_handles((qpn, 0), kind);
        self.tell_guests(qpn, kind, say) || here
    }

    fn tell_handles(&self, of: (Qpn, Visit), kind: u32) -> bool {
        let of = self.handles.iter().filter(|handle| (handle.qpn, handle.visit) == of);
        of.map(|handle| handle.events.push(Event::Qp { kind, cookie: handle.cookie })).count() > 0
    }

    /// Tells the other processes that have the QP open. False: there are none.
    fn tell_guests(&self, qpn: Qpn, kind: u32, mut say: impl FnMut(LinkId, Opening) -> bool) -> bool {
        let of = self.guests.iter().filter(|guest| guest.qp.number() == qpn);
        of.map(|guest| say(guest.link, Opening::Told { qpn, kind })).count() > 0
    }

    /// A QP of this process ends; those that still have it open are told.
    pub(crate) fn ends(&mut self, env: &mut HostEnv, qpn: Qpn) {
        self.unlist(qpn, 0, None);
        self.home.retain(|home| home.qpn != qpn);
        self.tell_guests(qpn, kind::QP_FATAL, |link, message| env.say(link, &message));
    }

    /// This process does not have the other's QP open any more.
    pub(crate) fn leave(&mut self, env: &mut HostEnv, qpn: Qpn, visit: Visit) {
        self.unlist(qpn, visit, None);
        if let Some(at) = self.visits.iter().position(|v| v.visit == visit) {
            env.say(self.visits.swap_remove(at).link, &Opening::Close { qpn });
        }
    }

    /// The connection is gone: QPs whose home was there are, too.
    pub(crate) fn unlink(&mut self, link: LinkId) {
        for visiting in self.visits.iter().filter(|visiting| visiting.link == link) {
            self.tell_handles((visiting.qpn, visiting.visit), kind::QP_FATAL);
        }
        self.visits.retain(|visiting| visiting.link != link);
        for asked in self.asked.iter_mut().filter(|asked| asked.link == link) {
            asked.answer.get_or_insert(Err(GONE));
        }
        self.retire(|guest| guest.link == link);
    }

    /// An XRC domain ends here, and its connections.
    pub(crate) fn end(&mut self, domain: PdId) {
        self.visits.retain(|visiting| visiting.domain != domain);
        self.home.retain(|home| home.domain != domain);
        self.retire(|guest| guest.qp.domain() == domain);
    }

    /// There is room for as many as there are guests.
    fn retire(&mut self, ends: impl FnMut(&mut Guest) -> bool) {
        self.retired.extend(self.guests.extract_if(.., ends).map(|guest| guest.qp));
    }

    /// There is a shared domain: messages come from now on.
    pub(super) fn make_room(&mut self) {
        self.room.get_or_insert_with(|| Box::new([0; MESSAGE]));
    }

    /// Takes messages from other processes of this one's XRC domains, as long as the port has room for what
    /// they bring; says how many.
    #[inline]
    pub(super) fn run(&mut self, card: CardAnd<'_>, now: Nanos, notes: &DeferredLog) -> u32 {
        let Some(mut room) = self.room.take() else { return 0 };
        let came = self.take_messages(card, now, &mut room);
        self.room = Some(room);
        self.hand_over(notes);
        came
    }

    #[cold]
    fn take_messages(&mut self, (nic, env): CardAnd<'_>, now: Nanos, room: &mut [u8; MESSAGE]) -> u32 {
        let mut came = 0;
        while came < RELAYS && env.tx.can_send() {
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
                    } else if let Some(message) = Opening::decode(bytes) {
                        self.handle((&mut *nic, &mut *env), now, (link, domain), &message);
                    }
                }
            }
            came += 1;
        }
        came
    }

    /// The card's last context has left: other processes see the end of its connections.
    pub(super) fn close(&mut self, env: &mut HostEnv, notes: &DeferredLog) {
        self.retire(|_| true);
        self.visits.clear();
        for asked in &mut self.asked {
            asked.answer.get_or_insert(Err(GONE));
        }
        self.hand_over(notes);
        (env.links, self.room) = (None, None);
    }

    /// Hands over what must not be dropped under the card's lock.
    pub(crate) fn hand_over(&mut self, notes: &DeferredLog) {
        if !self.retired.is_empty() {
            notes.drop_later(&mut self.retired);
        }
    }

    /// What another process says.
    pub(crate) fn handle(
        &mut self,
        (nic, env): CardAnd<'_>,
        now: Nanos,
        (link, domain): (LinkId, PdId),
        message: &Opening,
    ) {
        match *message {
            Opening::Ask { serial, qpn, wish } => {
                let done = self.serve((nic, &mut *env), now, (link, domain), qpn, &wish);
                let errno = done.as_ref().err().map_or(0, |errno| *errno as u32);
                let attr = done.unwrap_or_default();
                env.say(link, &Opening::Answer { serial, errno, attr });
            }
            Opening::Close { qpn } => self.retire(|guest| guest.link == link && guest.qp.number() == qpn),
            Opening::Answer { serial, errno, attr } => self.answered(link, serial, errno, attr),
            Opening::Told {
                qpn,
                kind: kind @ (kind::QP_FATAL..=kind::SQ_DRAINED | kind::QP_LAST_WQE_REACHED),
            } => {
                let mut visits = self.visits.iter();
                if let Some(of) = visits.find(|visiting| visiting.link == link && visiting.qpn == qpn) {
                    self.tell_handles((qpn, of.visit), kind);
                }
            }
            Opening::Told { .. } => {}
        }
    }

    fn answered(&mut self, link: LinkId, serial: u32, errno: u32, attr: QpAttr) {
        let of = |asked: &&mut Asked| asked.serial == serial && asked.link == link && asked.answer.is_none();
        let Some(asked) = self.asked.iter_mut().find(of) else { return };
        if errno == 0
            && let Some((domain, qpn)) = asked.opens
        {
            self.visits.push(Visiting { visit: serial, domain, link, qpn });
        }
        asked.answer = Some(if errno == 0 { Ok(attr) } else { Err(errno as i32) });
    }

    /// Does what a guest, or one that wants to be, asks for.
    fn serve(
        &mut self,
        (nic, env): CardAnd<'_>,
        now: Nanos,
        (link, domain): (LinkId, PdId),
        qpn: Qpn,
        wish: &Wish,
    ) -> std::result::Result<QpAttr, i32> {
        let attr = nic.query_qp(qpn).map_err(NicError::errno)?;
        let is_guest = self.guests.iter().any(|guest| guest.link == link && guest.qp.number() == qpn);
        match wish {
            Wish::Open if is_guest => {}
            Wish::Open => {
                let home = self.home.iter().find(|home| home.domain == domain && home.qpn == qpn);
                let home = home.ok_or(libc::EINVAL)?;
                /* before there is a reference, which could be the last one to be dropped */
                let many = self.guests.len();
                let rooms = (self.guests.try_reserve(1), self.retired.try_reserve(many + 1));
                if many >= GUESTS || rooms.0.is_err() || rooms.1.is_err() {
                    return Err(libc::ENOMEM);
                }
                self.guests.push(Guest { link, qp: Qp::upgrade(&home.qp).ok_or(libc::EINVAL)? });
            }
            _ if !is_guest => return Err(libc::EINVAL),
            Wish::Query => {}
            Wish::Modify(to, mask) => {
                /* as this card's port has it: the guest has looked it up, but may be of any kind */
                if mask.contains(QpAttrMask::AV) && !env.tx.has_entry(to.av.sgid_index, &to.av.sgid) {
                    return Err(libc::EINVAL);
                }
                nic.modify_qp(env, qpn, to, *mask, now).map_err(NicError::errno)?;
            }
        }
        Ok(attr)
    }

    /// Sends a request; gives its name.
    fn ask(
        &mut self,
        env: &mut HostEnv,
        link: LinkId,
        (domain, qpn): (PdId, Qpn),
        wish: Wish,
    ) -> Result<u32> {
        room(&mut self.asked, 1)?;
        let attached = self.asked.iter().filter(|asked| asked.opens.is_some()).count();
        room(&mut self.visits, attached + 1)?;
        self.serial = self.serial.wrapping_add(1).max(1);
        let serial = self.serial;
        let opens = (wish == Wish::Open).then_some((domain, qpn));
        if !env.say(link, &Opening::Ask { serial, qpn, wish }) {
            return Err(VerbsError::Os(GONE));
        }
        self.asked.push(Asked { serial, link, opens, answer: None });
        Ok(serial)
    }

    /// The answer to a request, if it is there, or nobody will wait for it any longer.
    fn take_answer(&mut self, serial: u32, last: bool) -> Option<Result<QpAttr>> {
        let at = self.asked.iter().position(|asked| asked.serial == serial)?;
        if self.asked[at].answer.is_none() && !last {
            return None;
        }
        let answer = self.asked.swap_remove(at).answer;
        Some(answer.map_or(Err(VerbsError::Again), |answer| answer.map_err(VerbsError::Os)))
    }
}

impl Soft {
    /// Opens the QP of the process at the other end of `link`.
    ///
    /// # Errors
    /// EINVAL: it has no such QP in the domain; ENOMEM; ENODEV: it is gone; `Again`: it does not answer.
    pub(crate) fn visit(&self, link: LinkId, domain: PdId, qpn: Qpn) -> Result<Visit> {
        let serial = self.send_request(link, (domain, qpn), Wish::Open)?;
        let answer = self.await_answer(serial);
        if matches!(answer, Err(VerbsError::Again)) {
            /* what it says later is not heard; and it does not keep the QP for nobody */
            self.with(|shard, _| shard.env.say(link, &Opening::Close { qpn }));
        }
        answer.map(|_| serial)
    }

    /// Asks the home of an open QP.
    ///
    /// # Errors
    /// ENODEV: it is gone; `Again`: it does not answer; what else it says.
    pub(crate) fn ask_home(&self, visit: Visit, wish: Wish) -> Result<QpAttr> {
        let home = self.with(|shard, _| {
            let of = shard.attached.visits.iter().find(|visiting| visiting.visit == visit);
            of.map(|of| (of.link, (of.domain, of.qpn)))
        });
        let (link, of) = home.ok_or(VerbsError::Os(GONE))?;
        let serial = self.send_request(link, of, wish)?;
        self.await_answer(serial)
    }

    fn send_request(&self, link: LinkId, of: (PdId, Qpn), wish: Wish) -> Result<u32> {
        self.with(|shard, _| shard.attached.ask(&mut shard.env, link, of, wish))
    }

    /// Runs the card's connections until the answer is there: the other process may ask for something
    /// meanwhile.
    fn await_answer(&self, serial: u32) -> Result<QpAttr> {
        let until = clock::now().saturating_add(PATIENCE);
        loop {
            let last = clock::now() >= until;
            let (answer, fd) = self.with(|shard, now| {
                shard.run_links(now, &self.deferred_log);
                let fd = shard.env.links.as_ref().map_or(-1, |links| links.fd());
                (shard.attached.take_answer(serial, last), fd)
            });
            if let Some(answer) = answer {
                return answer;
            }
            if last {
                return Err(VerbsError::Again);
            }
            let mut wait = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd, alive across the call.
            unsafe { libc::poll(&mut wait, 1, LOOK) };
        }
    }
}

/// The card of `qp` hears a message from link `link` of the QP's domain, as if such a process had sent it;
/// `None`: that process is gone. Says whether it was a message.
#[cfg(feature = "fuzzing")]
pub fn hear(ctx: &crate::Context, qp: &Qp, link: u32, message: Option<&[u8]>) -> bool {
    let Ok(soft) = ctx.device().and_then(|device| device.soft()) else { return false };
    let (link, domain) = (LinkId(link), qp.domain());
    soft.with(|shard, now| {
        let super::Shard { nic, env, attached, .. } = shard;
        let known = match message {
            None => {
                attached.unlink(link);
                true
            }
            Some(bytes) => Opening::decode(bytes)
                .map(|message| attached.handle((nic, env), now, (link, domain), &message))
                .is_some(),
        };
        attached.hand_over(&soft.deferred_log);
        known
    })
}
