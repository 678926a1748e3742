//! The sending half as a card sees it: frames go out, perhaps hurt on the way.

use std::ops::Deref;

use starverbs_core::{Av, Counters, Gid, Nanos};
use starverbs_settings::Settings;

use crate::fault::{Fault, Frame};
use crate::program::Payload;
use crate::star::{self, StarRx, StarTx};
use crate::udp_tx::Tx;
use crate::{BackendError, Owners};

/// [`Tx`], with a [`Fault`] before it when the settings ask for one. Dropping it sends what the fault held back.
#[derive(Debug)]
pub struct TxStack<C: Deref<Target = Counters>> {
    /// The process that opened it; a forked child must not send for it
    process: u32,
    tx: Tx<C>,
    fault: Option<Box<Fault>>,
    counters: C,
}

impl<C: Deref<Target = Counters>> TxStack<C> {
    pub(crate) fn new(tx: Tx<C>, fault: Option<Box<Fault>>, counters: C) -> Self {
        TxStack { process: std::process::id(), tx, fault, counters }
    }

    /// Whether a frame of any size may be added before the next [`TxStack::flush`].
    #[inline]
    pub fn can_send(&self) -> bool {
        self.tx.can_send()
    }

    /// Adds a frame; see [`starverbs_core::Port::send_frame`]. Payload memory is read now and, unless `volatile`, again at the
    /// flush. A frame that cannot go (too long, address index or family wrong) is counted in `tx_errors` and lost.
    #[inline]
    pub fn send_frame(&mut self, to: &Av, header: &[u8], payload: Payload<'_>, pad: u8, volatile: bool) {
        match &mut self.fault {
            None => self.tx.send_frame(to, header, payload, pad, volatile),
            Some(fault) => fault.take(to, header, payload, pad, &self.counters),
        }
    }

    /// Sends what was added, and what waited until `now`.
    #[inline]
    pub fn flush(&mut self, now: Nanos) {
        if let Some(fault) = &mut self.fault {
            let tx = &mut self.tx;
            fault.release(now, |frame| push(tx, frame));
        }
        self.tx.flush();
    }

    /// Frames to this host's processes share segmented sends from now on as these say. Sends what was added before.
    pub fn set_owners(&mut self, owners: Owners) {
        self.tx.set_owners(owners);
    }

    /// When [`TxStack::flush`] has to be called although nothing new is sent: frames wait for their time.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.fault.as_ref()?.next_deadline()
    }

    /// Whether frames are sent from the address `gid`.
    pub fn has_address(&self, gid: &Gid) -> bool {
        self.tx.has_address(gid)
    }

    /// Whether `gid` is the port's address with that index.
    pub fn has_entry(&self, index: u8, gid: &Gid) -> bool {
        self.tx.has_entry(index, gid)
    }

    /// Opens the two UDP ports of StaR, and gives the halves that send and receive.
    ///
    /// # Errors
    /// See [`BackendError`]; sockets that were opened are closed again.
    pub fn open_star(&self, settings: &Settings) -> Result<(StarTx<C>, StarRx<C>), BackendError>
    where
        C: Clone,
    {
        star::open(settings, self.tx.addresses(), self.counters.clone(), self.tx.capture().cloned())
    }

    /// UDP source port of frames from the address with index `sgid_index`; 0 if it cannot send.
    pub fn source_port(&mut self, sgid_index: u8) -> u16 {
        self.tx.source_port(sgid_index)
    }
}

impl<C: Deref<Target = Counters>> Drop for TxStack<C> {
    /// A QP's last ACK may be among what is delayed: without it the peer's last message would fail.
    fn drop(&mut self) {
        let Some(fault) = &mut self.fault else { return };
        if self.process == std::process::id() {
            let tx = &mut self.tx;
            fault.release_all(|frame| push(tx, frame));
            tx.flush();
        }
    }
}

fn push<C: Deref<Target = Counters>>(tx: &mut Tx<C>, frame: &Frame) {
    let segs = [frame.segment()];
    // SAFETY: volatile, so that it is copied now: the frame is gone before the batch is flushed.
    let payload = unsafe { Payload::new(&segs) };
    tx.push(&frame.to, &frame.header, payload, frame.pad, true, frame.corrupt);
}
