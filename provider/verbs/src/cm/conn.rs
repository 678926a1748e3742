//! A connection as a program holds it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use starverbs_cm::{Accept, Cm, CmError, SidrAnswer};
use starverbs_core::Nanos;

use super::card::CmCard;
use super::{Sink, ours};
use crate::error::{Result, VerbsError};

/// A connection, on its way, there, or ending; or a question for a datagram queue pair, or one that was asked
/// here. Clones are the same. The last one that is dropped ends it as well as can be without waiting: REJ if
/// a request is not answered or was not yet established by this side, DREQ if it was established, silence
/// afterwards.
#[derive(Clone)]
pub struct Conn(Arc<Inner>);

pub(super) struct Inner {
    card: CmCard,
    id: u32,
    sink: Mutex<Sink>,
}

impl Inner {
    pub(super) fn id(&self) -> u32 {
        self.id
    }

    /// Where events go now.
    pub(super) fn sink(&self) -> Sink {
        Arc::clone(&self.sink.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Conn {
    pub(super) fn new(card: CmCard, id: u32, sink: Sink) -> Conn {
        Conn(Arc::new(Inner { card, id, sink: Mutex::new(sink) }))
    }

    pub(super) fn weak(&self) -> Weak<Inner> {
        Arc::downgrade(&self.0)
    }

    /// One that this side begins.
    pub(super) fn begin(
        card: &CmCard,
        sink: Sink,
        call: impl FnOnce(&mut Cm, Nanos) -> std::result::Result<u32, CmError>,
    ) -> Result<Conn> {
        card.with(|host, port, log, now| {
            let id = host.manage(port, log, now, call)?;
            let conn = Conn::new(card.clone(), id, sink);
            host.holds(id, conn.weak());
            Ok(conn)
        })
    }

    /// A call on it.
    fn call(&self, call: impl FnOnce(&mut Cm, Nanos, u32) -> std::result::Result<(), CmError>) -> Result<()> {
        let Inner { card, id, .. } = &*self.0;
        ours(card)?;
        Ok(card.manage(|cm, now| call(cm, now, *id))?)
    }

    /// Its number, which no other connection of this process has while it lives: the local communication ID.
    pub fn id(&self) -> u32 {
        self.0.id
    }

    /// Where events go from now on; those not yet delivered go there too. May be called from a sink.
    pub fn set_sink(&self, sink: Sink) {
        let before = {
            let mut now = self.0.sink.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *now, sink)
        };
        /* what it holds may end here, so not under the lock */
        drop(before);
    }

    /// The program has taken the request: its listener's backlog counts it no more.
    pub fn taken(&self) {
        let _a_parents = self.call(|cm, _, id| {
            cm.taken(id);
            Ok(())
        });
    }

    /// `rdma_accept` of a connection's request: sends the REP; `Established` follows, or `Rejected`,
    /// `Unreachable`. The queue pair should be in RTS (or RTR) before.
    ///
    /// # Errors
    /// EINVAL: there is no request to answer, a number out of range, or private data too long.
    pub fn accept(&self, accept: &Accept) -> Result<()> {
        self.call(|cm, now, id| cm.accept(now, id, accept))
    }

    /// `rdma_reject`, of a request, or of a response that this side does not want: sends the REJ with this
    /// [`reason`](super::reason).
    ///
    /// # Errors
    /// EINVAL: there is nothing to reject, or private data too long.
    pub fn reject(&self, reason: u16, private_data: &[u8]) -> Result<()> {
        self.call(|cm, now, id| cm.reject(now, id, reason, private_data))
    }

    /// `rdma_establish`, and the end of `rdma_connect` where the queue pair is ours: sends the RTU.
    ///
    /// # Errors
    /// EINVAL: no response came.
    pub fn establish(&self) -> Result<()> {
        self.call(|cm, _, id| cm.establish(id))
    }

    /// `rdma_disconnect`: sends the DREQ. `Disconnected` follows, then `TimewaitExit`. After `Disconnected`
    /// it does nothing.
    ///
    /// # Errors
    /// EINVAL: there never was a connection.
    pub fn disconnect(&self) -> Result<()> {
        self.call(|cm, now, id| cm.disconnect(now, id))
    }

    /// `rdma_notify` with IBV_EVENT_COMM_EST: data came, so that the peer is ready although its RTU is not
    /// seen yet.
    ///
    /// # Errors
    /// EISCONN: it is established already; EINVAL: nothing was accepted.
    pub fn notify_comm_est(&self) -> Result<()> {
        self.call(|cm, _, id| cm.communication_established(id))
    }

    /// `rdma_accept` and `rdma_reject` of a datagram id's request: sends the SIDR_REP.
    ///
    /// # Errors
    /// EINVAL: it is no such request, is answered already, or private data too long.
    pub fn answer(&self, answer: &SidrAnswer) -> Result<()> {
        self.call(|cm, now, id| cm.answer(now, id, answer))
    }
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Conn({:#x})", self.0.id)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Inner { card, id, .. } = self;
        if card.is_ours() {
            card.with(|host, port, log, now| {
                host.forget(*id);
                host.manage(port, log, now, |cm, now| cm.release(now, *id));
            });
        }
    }
}

impl From<CmError> for VerbsError {
    fn from(error: CmError) -> Self {
        match error {
            CmError::State => VerbsError::Invalid("not in this state of the connection"),
            CmError::Invalid => VerbsError::Invalid("parameters of a connection"),
            CmError::Established => VerbsError::Os(libc::EISCONN),
            CmError::Full => VerbsError::NoMemory("as many connections as may be"),
            CmError::InUse => VerbsError::Os(libc::EADDRINUSE),
        }
    }
}
