//! Queue pair 1 of a board, and the connection manager of this process on it.
//!
//! The board gives this process the upper bits of its communication IDs, and passes on to it the datagrams
//! that name them, or a service that it holds. All else of connection management is here.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use starverbs_cm::{CmPath, ListenAt, Scope};
use starverbs_core::command::{address, decode_address};
use starverbs_core::{Av, MAD_LEN, Nanos};
use starverbs_queues::board::{
    Mad, NumberReply, OP_CLAIM_SERVICE, OP_OPEN_MADS, OP_RECEIVE_MAD, OP_RELEASE_SERVICE, OP_SEND_MAD,
    Object, SCOPE_ALL, SCOPE_IPV4, SCOPE_IPV6, SCOPE_ONE, SERVICE_SHARED, Service,
};

use super::Board;
use super::link::BoardLink;
use super::memory::Piece;
use crate::clock;
use crate::cm::{CmHost, MadPort, WeakCmCard};
use crate::device::soft::deferred_log::DeferredLog;
use crate::error::Result;

/// The connection manager of this process on a board.
pub(crate) struct BoardCm {
    state: Mutex<MadsState>,
    /// When it has to run; `Nanos::MAX`: never
    due: AtomicU64,
}

struct MadsState {
    host: CmHost,
    port: BoardMads,
}

/// Queue pair 1 of the board.
struct BoardMads {
    link: Arc<BoardLink>,
    /// Where a datagram that is sent lies
    out: Piece,
    /// Where one that came is put
    back: Piece,
    due: Option<Nanos>,
}

impl BoardCm {
    /// Runs a call under the lock; what follows from it is delivered when the lock is released.
    pub(crate) fn with<R>(
        &self,
        board: &Board,
        call: impl FnOnce(&mut CmHost, &mut dyn MadPort, &DeferredLog, Nanos) -> R,
    ) -> R {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let MadsState { host, port } = &mut *state;
        let result = call(host, port, &board.deferred_log, clock::now());
        let due = port.due.take().unwrap_or(Nanos::MAX);
        let earlier = due < self.due.swap(due, Ordering::Relaxed);
        drop(state);
        if earlier {
            board.thread.kick_if_armed();
        }
        board.deferred_log.flush();
        result
    }

    /// When it has to run.
    pub(super) fn due(&self) -> Nanos {
        self.due.load(Ordering::Relaxed)
    }

    /// Datagrams came, or the time has.
    pub(super) fn run(&self, board: &Board) {
        self.with(board, |host, port, log, now| host.run(port, log, now));
    }
}

impl Board {
    /// The connection manager of this process, which there is from now on. EOPNOTSUPP, ENOMEM.
    pub(crate) fn open_cm(self: &Arc<Self>) -> Result<Arc<BoardCm>> {
        let mut opened = self.cm.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cm) = &*opened {
            return Ok(Arc::clone(cm));
        }
        let NumberReply { number: owner, .. } = self.link.ask(OP_OPEN_MADS, &Object::default())?;
        let piece = || self.link.heap.piece(MAD_LEN);
        let port = BoardMads { link: Arc::clone(&self.link), out: piece()?, back: piece()?, due: None };
        let (guid, addrs) = (self.info.attr.node_guid, self.info.addrs.clone());
        let cm = Arc::new_cyclic(|cm| {
            let card = WeakCmCard::Board(Arc::downgrade(self), cm.clone());
            let host = CmHost::new(guid, owner as u16, addrs, card);
            BoardCm { state: Mutex::new(MadsState { host, port }), due: AtomicU64::new(Nanos::MAX) }
        });
        *opened = Some(Arc::clone(&cm));
        drop(opened);
        /* it waits for interrupts from now on */
        self.thread.kick_if_armed();
        Ok(cm)
    }

    /// The connection manager, if it was ever asked for.
    pub(super) fn cm(&self) -> Option<Arc<BoardCm>> {
        self.cm.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn claim_service(&self, at: ListenAt, shared: bool) -> Result<()> {
        self.link.tell(OP_CLAIM_SERVICE, &service(at, shared))
    }

    pub(crate) fn release_service(&self, at: ListenAt) {
        /* a board that is gone holds none */
        let _ = self.link.tell(OP_RELEASE_SERVICE, &service(at, false));
    }
}

fn service(at: ListenAt, shared: bool) -> Service {
    let (scope, gid) = match at.scope {
        Scope::One(gid) => (SCOPE_ONE, gid.0),
        Scope::AnyV4 => (SCOPE_IPV4, [0; 16]),
        Scope::AnyV6 => (SCOPE_IPV6, [0; 16]),
        Scope::Any => (SCOPE_ALL, [0; 16]),
    };
    Service { id: at.service, gid, scope, flags: if shared { SERVICE_SHARED } else { 0 } }
}

impl MadPort for BoardMads {
    fn receive(&mut self) -> Option<(CmPath, [u8; MAD_LEN])> {
        let room = Mad { addr: self.back.address().ok()?, ..Mad::default() };
        let came: Mad = self.link.ask(OP_RECEIVE_MAD, &room).ok()?;
        let mut mad = [0; MAD_LEN];
        // SAFETY: the piece has as many bytes, and the board has written them.
        unsafe { mad.as_mut_ptr().copy_from(self.back.at.as_ptr(), MAD_LEN) };
        let Av { dgid, sgid, traffic_class, .. } = decode_address(&came.address);
        /* the two low bits are ECN */
        Some((CmPath { local: sgid, remote: dgid, traffic_class: traffic_class & !3, hop_limit: 0 }, mad))
    }

    fn send(&mut self, to: &Av, mad: &[u8; MAD_LEN]) {
        let Ok(addr) = self.out.address() else { return };
        // SAFETY: the piece has as many bytes, and the board reads them while it carries out a command alone.
        unsafe { self.out.at.as_ptr().copy_from(mad.as_ptr(), MAD_LEN) };
        /* as if it was lost */
        let _ = self.link.tell(OP_SEND_MAD, &Mad { addr, address: address(to), reserved: 0 });
    }

    fn flush(&mut self) {}

    fn wake_at(&mut self, at: Nanos) {
        self.due = Some(at);
    }
}
