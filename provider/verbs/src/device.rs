//! The device behind the objects that a program holds.
//!
//! A device answers commands ([`Device::control`]), takes doorbells for what was posted to rings in memory,
//! and puts completions into completion rings. Whatever else a device needs (sockets, timers, the progress of
//! a card in software) is behind this face. The objects must not look behind it.

pub(crate) mod activity;
pub(crate) mod board;
pub(crate) mod command;
pub(crate) mod idle;
mod poller;
mod posix_thread;
pub(crate) mod soft;
pub(crate) mod thread;
mod unread;

#[cfg(test)]
mod failing;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError, Weak};

use starverbs_core::{Nanos, SrqId};
use starverbs_rings::ProgramMemory;
use starverbs_settings::{DeviceChoice, Settings};

use crate::cq::CqShared;
use crate::error::{Result, VerbsError};
use crate::events::{FdQueue, VerbsEvent};
use crate::info::DeviceInfo;
use crate::pd::Pd;
use crate::process;
use crate::qp::QpInner;
use crate::share::Published;
use crate::stat::StatPage;
use activity::Activity;
use board::Board;
pub(crate) use board::DeviceCq;
use command::group;
pub(crate) use command::{AnsweredBy, Command, CommandReply, KernelCommand};
use soft::Soft;
use thread::{LooksAt, ProgressThread, ThreadWork, TurnResult};

/// A device that is open. Clones are the same.
#[derive(Clone)]
pub(crate) enum Device {
    /// The card in software
    Soft(Arc<Soft>),
    /// A board
    Board(Arc<Board>),
    /// Every request fails: for tests of the objects
    #[cfg(test)]
    Failing(Arc<failing::Failing>),
}

/// Something was posted.
#[derive(Clone, Copy)]
pub(crate) enum Doorbell<'a> {
    /// To a queue pair's send queue. `small`: a few messages, the last of them small, to one that can send
    /// and is reliable
    Sends { qp: &'a QpInner, small: bool },
    /// To its receive queue, which had run dry
    Receives(&'a QpInner),
    /// To a shared receive queue, which had run dry
    Srq(SrqId),
}

/// The device of this process, while a context is open.
static OF_PROCESS: Mutex<Option<WeakDevice>> = Mutex::new(None);

/// A device that may be gone.
enum WeakDevice {
    Soft(Weak<Soft>),
    Board(Weak<Board>),
}

impl WeakDevice {
    /// `None`: it is gone, or another process's.
    fn upgrade(&self) -> Option<Device> {
        match self {
            WeakDevice::Soft(soft) => soft.upgrade().filter(|soft| soft.is_ours()).map(Device::Soft),
            WeakDevice::Board(board) => board.upgrade().filter(|board| board.is_ours()).map(Device::Board),
        }
    }
}

/// The same call of every device.
macro_rules! dispatch {
    ($on:expr, $device:ident => $call:expr) => {
        match $on {
            Device::Soft($device) => $call,
            Device::Board($device) => $call,
            #[cfg(test)]
            Device::Failing($device) => $call,
        }
    };
}

impl Device {
    /// A context that reports to `events` joins the device of this process, which is opened with the
    /// process's settings if there is none.
    pub(crate) fn of_process(events: &Arc<FdQueue<VerbsEvent>>) -> Result<Device> {
        let mut slot = OF_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = slot.as_ref().and_then(WeakDevice::upgrade) {
            match device.control(Command::AllocContext { events }) {
                Ok(_) => return Ok(device),
                /* its last context has just left */
                Err(VerbsError::NoData) => {}
                Err(error) => return Err(error),
            }
        }
        let settings = Settings::load()?;
        let stats = process::page(settings.port)?;
        let device = Device::open(settings, stats, events)?;
        *slot = device.downgrade();
        Ok(device)
    }

    fn downgrade(&self) -> Option<WeakDevice> {
        match self {
            Device::Soft(soft) => Some(WeakDevice::Soft(Arc::downgrade(soft))),
            Device::Board(board) => Some(WeakDevice::Board(Arc::downgrade(board))),
            #[cfg(test)]
            Device::Failing(_) => None,
        }
    }

    /// A device of its own with these settings, and a first context of it.
    pub(crate) fn open(
        settings: Settings,
        stats: StatPage,
        events: &Arc<FdQueue<VerbsEvent>>,
    ) -> Result<Device> {
        Ok(match settings.device.clone() {
            DeviceChoice::Soft => Device::Soft(Soft::open(settings, stats, events)?),
            DeviceChoice::Board(socket) => Device::Board(Board::open(&socket, settings, stats)?),
        })
    }

    /// Creates, changes, asks about or ends something.
    ///
    /// # Errors
    /// What the man page of the call promises. Nothing has changed then. EOPNOTSUPP: the device does not take
    /// such commands.
    pub(crate) fn control(&self, command: Command<'_>) -> Result<CommandReply> {
        if self.groups() & command.group() == 0 {
            return Err(VerbsError::Unsupported("by this device"));
        }
        dispatch!(self, device => device.control(command))
    }

    /// Groups of commands that it takes.
    fn groups(&self) -> u32 {
        match self {
            Device::Soft(_) => group::VERBS | group::XRC | group::STAR | group::RPC,
            Device::Board(board) => board.groups(),
            #[cfg(test)]
            Device::Failing(_) => group::VERBS,
        }
    }

    /// Whether queue pairs may be ends of StaR connections.
    pub(crate) fn takes_star(&self) -> bool {
        self.groups() & group::STAR != 0
    }

    /// Something was posted: the device works on it now, or soon. Never waits.
    #[inline(always)]
    pub(crate) fn doorbell(&self, doorbell: Doorbell<'_>) {
        dispatch!(self, device => device.doorbell(doorbell));
    }

    /// A poll of `cq` found nothing: the device works until `cq` holds `wanted` completions or nothing is
    /// left to do. Says whether it worked.
    #[inline]
    pub(crate) fn progress(&self, cq: &CqShared, wanted: usize) -> bool {
        match self {
            Device::Soft(soft) => soft.progress(cq, wanted),
            _ => self.progress_other(cq, wanted),
        }
    }

    /// The same out of line: a poll of the card is short.
    #[inline(never)]
    fn progress_other(&self, cq: &CqShared, wanted: usize) -> bool {
        dispatch!(self, device => device.progress(cq, wanted))
    }

    /// The program is about to sleep, or asked to be woken: from now on the device works by itself.
    #[inline]
    pub(crate) fn arm(&self) {
        dispatch!(self, device => device.arm());
    }

    /// The program asked for an event of `cq`, which has a channel or none: from now on the device works by
    /// itself.
    #[inline]
    pub(crate) fn await_event(&self, cq: &Arc<CqShared>, solicited: bool) {
        match self {
            Device::Board(board) => board.await_event(cq, solicited),
            /* its next calls run the device */
            _ if self.activity().unread.put_off() => {}
            _ => self.arm(),
        }
    }

    /// Where rings of objects made in `pd` lie: in the program's own memory, if it has such and the device
    /// reaches it.
    pub(crate) fn queue_memory(&self, pd: &Pd) -> ProgramMemory {
        match self {
            Device::Board(board) => Some(board.queue_memory()),
            _ => pd.memory(),
        }
    }

    /// What it says of itself.
    #[inline]
    pub(crate) fn info(&self) -> &DeviceInfo {
        dispatch!(self, device => &device.info)
    }

    /// Its counters.
    pub(crate) fn stats(&self) -> &StatPage {
        dispatch!(self, device => &device.stats)
    }

    /// What it was opened with.
    pub(crate) fn settings(&self) -> &Settings {
        dispatch!(self, device => &device.settings)
    }

    /// What other processes of the host may see of its memory, if they may see any.
    pub(crate) fn published(&self) -> Option<&Published> {
        match self {
            Device::Soft(soft) => soft.published.as_ref(),
            Device::Board(_) => None,
            #[cfg(test)]
            Device::Failing(_) => None,
        }
    }

    /// Which device it is, among those of this process.
    pub(crate) fn id(&self) -> usize {
        dispatch!(self, device => Arc::as_ptr(device) as usize)
    }

    /// Adds a failure to the deferred log: an event's kind, and the object's number.
    pub(crate) fn log_later(&self, kind: u32, number: u32) {
        dispatch!(self, device => device.deferred_log.add(kind, number));
    }
}

impl ThreadWork for Device {
    fn thread(&self) -> &ProgressThread {
        dispatch!(self, device => &device.thread)
    }

    #[inline]
    fn activity(&self) -> &Activity {
        dispatch!(self, device => &device.activity)
    }

    fn wait_fds(&self, fds: &mut Vec<libc::pollfd>, armed: bool) -> Option<Nanos> {
        dispatch!(self, device => device.wait_fds(fds, armed))
    }

    fn turn(&self, woken: &[libc::pollfd]) -> TurnResult {
        dispatch!(self, device => device.turn(woken))
    }

    fn look(&self, at: LooksAt) -> bool {
        match self {
            Device::Soft(soft) => soft.look(at),
            _ => false,
        }
    }
}
