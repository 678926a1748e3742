//! The card that a connection manager is of: under whose lock it works, and by which way its messages go.

use std::sync::{Arc, Weak};

use starverbs_cm::{Cm, CmPath, ListenAt};
use starverbs_core::{Av, MAD_LEN, Nanos};

use super::CmHost;
use crate::device::Device;
use crate::device::board::{Board, BoardCm};
use crate::device::soft::Soft;
use crate::device::soft::deferred_log::DeferredLog;
use crate::error::Result;
use crate::info::DeviceInfo;

/// Queue pair 1 of a card, as its connection manager has it.
pub(crate) trait MadPort {
    /// The oldest datagram that came, and between whom.
    fn receive(&mut self) -> Option<(CmPath, [u8; MAD_LEN])>;

    /// Sends a datagram. What is lost is sent again.
    fn send(&mut self, to: &Av, mad: &[u8; MAD_LEN]);

    /// What was sent leaves now.
    fn flush(&mut self);

    /// Has [`CmHost::run`] called then at the latest.
    fn wake_at(&mut self, at: Nanos);
}

/// A card with a connection manager. Clones are the same.
#[derive(Clone)]
pub(crate) enum CmCard {
    /// It is a part of the card, under its lock
    Soft(Arc<Soft>),
    /// It is this process's, on a board's queue pair 1
    Board(Arc<Board>, Arc<BoardCm>),
}

/// The same, which may be gone.
#[derive(Clone)]
pub(crate) enum WeakCmCard {
    Soft(Weak<Soft>),
    Board(Weak<Board>, Weak<BoardCm>),
}

impl WeakCmCard {
    pub(super) fn upgrade(&self) -> Option<CmCard> {
        Some(match self {
            WeakCmCard::Soft(soft) => CmCard::Soft(soft.upgrade()?),
            WeakCmCard::Board(board, cm) => CmCard::Board(board.upgrade()?, cm.upgrade()?),
        })
    }
}

impl CmCard {
    /// The connection manager of a device, which it has from now on.
    ///
    /// # Errors
    /// EOPNOTSUPP: it has no queue pair 1; ENOMEM.
    pub(super) fn of(device: &Device) -> Result<CmCard> {
        match device {
            Device::Soft(soft) => Ok(CmCard::Soft(Arc::clone(soft))),
            Device::Board(board) => Ok(CmCard::Board(Arc::clone(board), board.open_cm()?)),
            #[cfg(test)]
            Device::Failing(_) => Err(crate::error::VerbsError::Unsupported("connection management")),
        }
    }

    pub(super) fn is_ours(&self) -> bool {
        match self {
            CmCard::Soft(soft) => soft.is_ours(),
            CmCard::Board(board, _) => board.is_ours(),
        }
    }

    pub(super) fn info(&self) -> &DeviceInfo {
        match self {
            CmCard::Soft(soft) => &soft.info,
            CmCard::Board(board, _) => &board.info,
        }
    }

    /// Runs a call under the lock; what follows from it is delivered when the lock is released.
    pub(super) fn with<R>(
        &self,
        call: impl FnOnce(&mut CmHost, &mut dyn MadPort, &DeferredLog, Nanos) -> R,
    ) -> R {
        match self {
            CmCard::Soft(soft) => soft.with_cm(call),
            CmCard::Board(board, cm) => cm.with(board, call),
        }
    }

    /// A call on the connection manager, and what follows from it.
    pub(super) fn manage<R>(&self, call: impl FnOnce(&mut Cm, Nanos) -> R) -> R {
        self.with(|host, port, log, now| host.manage(port, log, now, call))
    }

    /// Holds a service among the processes of the host.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL, ENOMEM: as of [`Agent::bind`](super::Agent::bind).
    pub(super) fn claim_service(&self, at: ListenAt, shared: bool) -> Result<()> {
        match self {
            CmCard::Soft(soft) => {
                soft.with(|shard, _| shard.intake.rx.claim_service(at, shared))?;
                soft.thread.kick_if_armed();
                Ok(())
            }
            CmCard::Board(board, _) => board.claim_service(at, shared),
        }
    }

    pub(super) fn release_service(&self, at: ListenAt) {
        match self {
            CmCard::Soft(soft) => soft.with(|shard, _| shard.intake.rx.release_service(at)),
            CmCard::Board(board, _) => board.release_service(at),
        }
    }

    /// The process is about to end: peers are told.
    pub(super) fn retire(&self) {
        match self {
            CmCard::Soft(soft) => soft.retire(),
            CmCard::Board(..) => self.manage(Cm::release_all),
        }
    }
}
