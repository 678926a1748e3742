//! A board that is gone: its process has ended, it does not answer, or the kernel says that the device was
//! taken away.
//!
//! Who only posts and polls, or sleeps, asks a board nothing, and a board that is silent looks like one that
//! has nothing to say. So it is asked from time to time, by a command that changes nothing.
//!
//! Each context gets IBV_EVENT_DEVICE_FATAL, and all that queue pairs have posted, and post from then on,
//! completes with IBV_WC_WR_FLUSH_ERR, as if they were in ERR: nobody else will complete it. A program that
//! waits for a completion is woken by that. Commands fail.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

use starverbs_core::{Cqe, Nanos, Qpn, RecvQueue, SendFlags, SendQueue, TakenWqe, WcOpcode, WcStatus};
use starverbs_rings::{CardRq, CardSq};

use super::Board;
use super::qps::{BoardQpEntry, BoardQps};
use crate::cq::CqShared;
use crate::device::command::{Events, QpInit};
use crate::events::{VerbsEvent, kind};
use crate::log::log;

/// What a queue pair has posted, which this process is to complete when the board is gone.
pub(super) struct Outstanding {
    sq: CardSq,
    /// `None`: receives are a shared queue's, which stay there
    rq: Option<CardRq>,
    /// All of its sends are signaled
    sig_all: bool,
    /// The send that it began with
    first: u32,
    send_cq: Weak<CqShared>,
    recv_cq: Weak<CqShared>,
    /// Sends and receives that are complete. Not what the board's index line says from then on: a board that
    /// was silent may write there
    ended: Option<[u32; 2]>,
}

impl Outstanding {
    pub(super) fn of(init: &QpInit) -> Outstanding {
        Outstanding {
            sq: init.sq.clone(),
            rq: match &init.rq {
                starverbs_core::qp::RecvSource::Own(rq) => Some(rq.clone()),
                _ => None,
            },
            sig_all: init.sq_sig_all,
            first: 0,
            send_cq: Arc::downgrade(init.send_cq.shared()),
            recv_cq: Arc::downgrade(init.recv_cq.shared()),
            ended: None,
        }
    }

    /// The queues are empty.
    pub(super) fn begin(&mut self, entry: &BoardQpEntry) {
        self.first = self.sq.released();
        entry.begin(self.rq.as_ref().map_or(0, CardRq::taken));
    }

    /// How many sends and receives have completed. The board says of one that it has it before it writes its
    /// completion, and may have gone in between: at once for a send, for as long as a message comes for a
    /// receive.
    fn completed(&self, entry: Option<&BoardQpEntry>) -> [u32; 2] {
        let (released, taken) = (self.sq.released(), self.rq.as_ref().map_or(0, CardRq::taken));
        let Some(entry) = entry else { return [released, taken] };
        let last = released.wrapping_sub(1);
        /* what lies in its slot is still it */
        let is_there = released != self.first && self.sq.posted().wrapping_sub(last) <= self.sq.slots();
        let is_lost = is_there && {
            let wqe = self.sq.wqe(last);
            (self.sig_all || wqe.flags.contains(SendFlags::SIGNALED)) && !entry.has_sent(wqe.wr_id)
        };
        [if is_lost { last } else { released }, entry.received_of(taken)]
    }

    /// Completes all of it.
    fn flush(&mut self, qpn: Qpn, qps: &BoardQps) {
        let failed =
            |wr_id, opcode| Cqe { wr_id, opcode, qpn, status: WcStatus::WrFlushErr, ..Cqe::default() };
        let complete = |cq: &Weak<CqShared>, cqe: Cqe| {
            let cq = cq.upgrade();
            if let Some((cq, half)) = cq.as_ref().and_then(|cq| Some((cq, cq.device_half.as_ref()?))) {
                half.complete(cq, &cqe);
            }
        };
        let [released, taken] = self.ended.unwrap_or_else(|| self.completed(qps.get(qpn)));
        /* the board's index is no more than what it wrote last: of a queue's slots at most */
        let posted = self.sq.posted();
        let waiting = posted.wrapping_sub(released).min(self.sq.slots());
        for index in (1..=waiting).rev().map(|left| posted.wrapping_sub(left)) {
            let wr_id = self.sq.wqe(index).wr_id;
            self.sq.release(index.wrapping_add(1));
            complete(&self.send_cq, failed(wr_id, WcOpcode::Send));
        }
        self.sq.release(posted);
        self.ended = Some([posted, taken]);
        let Some(rq) = &self.rq else { return };
        rq.go_to(taken);
        for _ in 0..rq.len().min(rq.slots()) {
            let Some(TakenWqe { wr_id, .. }) = rq.take(&mut []) else { break };
            self.ended = Some([posted, rq.taken()]);
            complete(&self.recv_cq, failed(wr_id, WcOpcode::Recv));
        }
        /* so that the next one rings */
        rq.note_starved();
    }
}

impl Board {
    /// Sees to it that a board that is gone is known to be.
    pub(super) fn look_for_its_end(&self) {
        if !self.is_gone.load(Ordering::Relaxed) && self.link.is_gone() {
            self.on_gone();
        }
    }

    /// Asks the board something if it has said nothing for as long as `limit`: it answers, or is gone.
    #[inline]
    pub(super) fn ask_if_quiet(&self, now: Nanos, limit: Nanos) {
        let heard = self.heard.load(Ordering::Relaxed);
        if now.saturating_sub(heard) >= limit {
            self.ask_whether_it_is_there(heard, now);
        }
    }

    #[cold]
    fn ask_whether_it_is_there(&self, heard: Nanos, now: Nanos) {
        /* one at a time */
        let mine = self.heard.compare_exchange(heard, now, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if mine && !self.is_gone.load(Ordering::Relaxed) && !self.outstanding().is_empty() {
            let _ = self.query_port();
            self.look_for_its_end();
        }
    }

    #[cold]
    fn on_gone(&self) {
        if self.is_gone.swap(true, Ordering::SeqCst) {
            return;
        }
        log!(Error, "the board is gone");
        let qpns: Vec<Qpn> = self.objects().qps.keys().copied().collect();
        /* from now on a doorbell finds no cell, and comes to `flush` */
        qpns.into_iter().for_each(|qpn| self.set_cell(qpn, 0));
        fence(Ordering::SeqCst);
        let cqs: Vec<_> = self.objects().cqs.values().filter_map(Weak::upgrade).collect();
        cqs.iter().filter_map(|cq| cq.device_half.as_ref()).for_each(|half| half.end());
        self.flush_all();
        let objects = self.objects();
        let mut notified: Vec<&Events> = Vec::new();
        for events in objects.pds.values() {
            if !notified.iter().any(|known| Arc::ptr_eq(known, events)) {
                events.push(VerbsEvent::Device { kind: kind::DEVICE_FATAL });
                notified.push(events);
            }
        }
    }

    /// Completes what was posted, of a board that is gone.
    #[cold]
    pub(super) fn flush_all(&self) {
        if self.is_gone.load(Ordering::SeqCst) {
            self.outstanding().iter_mut().for_each(|(qpn, posted)| posted.flush(*qpn, &self.link.qps));
        }
    }

    /// The same of one queue pair, which has no doorbell cell.
    #[cold]
    pub(super) fn flush(&self, qpn: Qpn) {
        if self.is_gone.load(Ordering::SeqCst)
            && let Some(posted) = self.outstanding().get_mut(&qpn)
        {
            posted.flush(qpn, &self.link.qps);
        }
    }
}
