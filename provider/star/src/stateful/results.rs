//! What SL's atomics gave, on its way to SL's memory.
//!
//! Each is done here when it begins, and its result kept. SL's card cannot distinguish a late result from a
//! newer one; so to one place of SL's memory one packet at a time is under way. Programs that let all go to
//! one buffer do not wait for each of them: what a buffer holds that several requests under way write is
//! undefined until all are done, and then it is the last's. So one packet with the newest result does for all
//! that waited.

use starverbs_core::{Access, Psn};

use super::packets::refused;
use super::stream::RESULT;
use super::window::{InFlight, Kind, Of};
use super::{CardCtx, Ended, Stateful};
use crate::env::StarEnv;

impl<E: StarEnv> Stateful<E> {
    /// Where in SL's memory the result of its WQE `seq` goes, if that is one place.
    pub(super) fn result_place(&self, card: &CardCtx<'_, E>, seq: Psn) -> Option<u64> {
        let [sge] = self.send_sges(seq) else { return None };
        let found = card.registry.find(self.conn, sge.lkey, sge.addr, sge.len, Access::LOCAL_WRITE);
        found.map(|found| found.addr)
    }

    /// Sends the first result that waits, now that nothing before it goes to its place. False: there is none,
    /// or it may not go yet.
    pub(super) fn send_result(&mut self, card: &mut CardCtx<'_, E>) -> bool {
        let stream = &self.streams[Of::Remote as usize];
        let Some(index) = stream.owed().filter(|_| self.ended == Ended::Not) else { return false };
        let op = *stream.get(index);
        if !self.has_room(card.now) {
            return false;
        }
        let Some((addr, _, rule)) = self.target(card, Of::Remote, index, &op, 0) else {
            self.stream(Of::Remote).carry(index);
            self.abandon(card, Of::Remote, index, refused(Of::Remote, &op));
            return true;
        };
        let (of, kind, len) = (Of::Remote, Kind::Put, RESULT as u16);
        let fresh = InFlight { of, kind, last: true, len, wqe: index, addr, rule, ..InFlight::default() };
        if !self.is_admitted(card, fresh.cost()) {
            return false;
        }
        self.stream(Of::Remote).carry(index);
        self.launch(card, &fresh, &op);
        true
    }
}
