//! The connection manager on a card: its messages go through queue pair 1, its timer is the card's, and
//! its events reach their sinks when the card's lock is released.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};

use starverbs_backend::HostAddr;
use starverbs_cm::{Cause, Cm, CmConfig, CmError, ConnEvent, ConnNews, ListenAt, ListenerId, OutboundMad};
use starverbs_core::{Av, Gid, Mtu, Nanos};

use super::Sink;
use super::address::{index_of, with_interface};
use super::card::{MadPort, WeakCmCard};
use super::conn::{Conn, Inner};
use super::event::{CmEvent, CmEventKind, TIMED_OUT};
use crate::device::soft::deferred_log::DeferredLog;
use crate::process::seed;

/// The connection manager of a card, and the sinks of its events.
pub(crate) struct CmHost {
    cm: Cm,
    /// The card that it is of
    card: WeakCmCard,
    addrs: Vec<HostAddr>,
    conns: HashMap<u32, Weak<Inner>>,
    listeners: HashMap<ListenerId, Sink>,
    /// A message was sent since the last [`CmHost::take_sent`]
    sent: bool,
}

impl CmHost {
    pub(crate) fn new(guid: u64, owner: u16, addrs: Vec<HostAddr>, card: WeakCmCard) -> CmHost {
        let config = CmConfig { guid, owner, seed: seed()[0] };
        let (mut cm, of) = (Cm::new(config), card.clone());
        cm.limit_mtu(Box::new(move |to| of.upgrade().map_or(Mtu::M4096, |card| card.info().path_mtu(to))));
        CmHost { cm, card, addrs, conns: HashMap::new(), listeners: HashMap::new(), sent: false }
    }

    /// Whether a message was sent since the last call.
    pub(crate) fn take_sent(&mut self) -> bool {
        std::mem::take(&mut self.sent)
    }

    pub(super) fn listen(&mut self, at: ListenAt, backlog: u32, sink: Sink) -> Result<ListenerId, CmError> {
        let id = self.cm.listen(at, backlog)?;
        self.listeners.insert(id, sink);
        Ok(id)
    }

    /// Gives the listener's sink, to be dropped when the card's lock is released.
    pub(super) fn unlisten(&mut self, id: ListenerId) -> Option<Sink> {
        self.cm.unlisten(id);
        self.listeners.remove(&id)
    }

    /// The program holds a connection no more.
    pub(super) fn forget(&mut self, id: u32) {
        self.conns.remove(&id);
    }

    /// The program holds a connection.
    pub(super) fn holds(&mut self, id: u32, conn: Weak<Inner>) {
        self.conns.insert(id, conn);
    }

    fn ip(&self, gid: Gid) -> Option<u8> {
        index_of(&self.addrs, gid)
    }

    /// Translates an event. A request that nobody listens for any more is refused, as its `Conn` is dropped:
    /// that happens in the queue's own time, as it needs the card's lock.
    fn event(&mut self, id: u32, event: ConnEvent) -> Option<Delivery> {
        let kind = match event {
            ConnEvent::Request { listener, mut request } => {
                self.name_interfaces(&mut request.local, &mut request.remote);
                let conn = self.new_conn(id, listener)?;
                return Some(Delivery { conn: conn.weak(), kind: CmEventKind::Request(conn, request) });
            }
            ConnEvent::Resolving { listener, mut resolving } => {
                self.name_interfaces(&mut resolving.local, &mut resolving.remote);
                let conn = self.new_conn(id, listener)?;
                return Some(Delivery { conn: conn.weak(), kind: CmEventKind::Resolving(conn, resolving) });
            }
            ConnEvent::Response(response) => CmEventKind::Response(response),
            ConnEvent::Established => CmEventKind::Established,
            ConnEvent::Resolved(resolved) => CmEventKind::Resolved(resolved),
            ConnEvent::Rejected { reason, private_data } => CmEventKind::Rejected { reason, private_data },
            ConnEvent::Unreachable(Cause::TimedOut) => CmEventKind::Unreachable { status: TIMED_OUT },
            ConnEvent::Unreachable(Cause::Status(status)) => {
                CmEventKind::Unreachable { status: status.into() }
            }
            ConnEvent::Disconnected { timed_out } => {
                CmEventKind::Disconnected { status: if timed_out { TIMED_OUT } else { 0 } }
            }
            ConnEvent::TimewaitExit => CmEventKind::TimewaitExit,
        };
        Some(Delivery { conn: self.conns.get(&id)?.clone(), kind })
    }

    /// Gives link-local addresses of both ends the interface on which they are such.
    fn name_interfaces(&self, local: &mut SocketAddr, remote: &mut SocketAddr) {
        let here = local.ip();
        for end in [local, remote] {
            *end = with_interface(&self.addrs, here, *end);
        }
    }

    /// The handle of an incoming connection, with its listener's sink.
    fn new_conn(&mut self, id: u32, listener: ListenerId) -> Option<Conn> {
        let sink = self.listeners.get(&listener).cloned();
        let (card, sink) = (self.card.upgrade()?, sink.unwrap_or_else(|| Arc::new(drop)));
        let conn = Conn::new(card, id, sink);
        self.conns.insert(id, conn.weak());
        Some(conn)
    }
}

impl CmHost {
    /// A call, and what follows from it.
    pub(crate) fn manage<R>(
        &mut self,
        port: &mut dyn MadPort,
        log: &DeferredLog,
        now: Nanos,
        call: impl FnOnce(&mut Cm, Nanos) -> R,
    ) -> R {
        let result = call(&mut self.cm, now);
        self.settle(port, log);
        result
    }

    /// Datagrams came to queue pair 1, or the time has come.
    pub(crate) fn run(&mut self, port: &mut dyn MadPort, log: &DeferredLog, now: Nanos) {
        while let Some((path, mad)) = port.receive() {
            self.cm.handle_mad(now, path, &mad);
        }
        self.cm.handle_timeout(now);
        self.settle(port, log);
    }

    /// Sends its messages, queues its events, sets its timer.
    fn settle(&mut self, port: &mut dyn MadPort, log: &DeferredLog) {
        while let Some(OutboundMad { path, mad }) = self.cm.poll_send() {
            let Some(sgid_index) = self.ip(path.local) else { continue };
            let to = Av {
                dgid: path.remote,
                sgid: path.local,
                sgid_index,
                hop_limit: path.hop_limit,
                traffic_class: path.traffic_class,
                ..Av::default()
            };
            port.send(&to, mad.bytes());
            self.sent = true;
        }
        port.flush();
        while let Some(ConnNews { id, event }) = self.cm.poll_event() {
            if let Some(delivery) = self.event(id, event) {
                log.deliver_later(delivery);
            }
        }
        if let Some(at) = self.cm.next_deadline() {
            port.wake_at(at);
        }
    }
}

/// An event, and its connection.
pub(crate) struct Delivery {
    conn: Weak<Inner>,
    kind: CmEventKind,
}

/// Events to deliver when the card's lock is released.
#[derive(Default)]
pub(crate) struct Deliveries {
    queue: Mutex<VecDeque<Delivery>>,
    /// Held while events are delivered: one at a time, in order
    delivering: Mutex<()>,
}

impl Deliveries {
    pub(crate) fn push(&self, delivery: Delivery) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(delivery);
    }

    fn pop(&self) -> Option<Delivery> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    fn is_empty(&self) -> bool {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Delivers all, unless another thread does, which then delivers these, too. None of the card's locks is
    /// held.
    pub(crate) fn notify(&self) {
        while !self.is_empty() {
            let delivering = match self.delivering.try_lock() {
                Err(TryLockError::WouldBlock) => return,
                /* a sink panicked: the next event is another's */
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Ok(delivering) => delivering,
            };
            while let Some(Delivery { conn, kind }) = self.pop() {
                if let Some(conn) = conn.upgrade() {
                    let id = conn.id();
                    conn.sink()(CmEvent { conn: id, kind });
                }
            }
            drop(delivering);
        }
    }
}
