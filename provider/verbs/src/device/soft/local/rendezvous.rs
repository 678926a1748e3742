//! Rendezvous: SENDs whose data the receiver fetches from the sender's memory, where both have it mapped, in
//! one copy, straight into the posted buffer.
//!
//! A record names the bytes by the sender's own key. The receiver looks the key up in the sender's table of
//! regions, as a requester does for a WRITE (`direct.rs`), and copies them; that its place is given back says
//! that it has. A receiver that cannot answers so, and is sent copies from then on. Private memory is copied
//! through the channel, by both ends at once: the descriptor's system call, which copies twice by itself, is
//! slower.

use starverbs_core::SendFlags;
use starverbs_core::env::{SendQueue, SendRequest};
use starverbs_core::transport::slices;

use super::end::{Ctx, LocalEnd};
use super::record::{CHUNK, FETCHED, LocalRecord, answer, flag};
use super::responder::{DeliveryError, LocalInbound, LocalReply};

/// What is shorter is copied into the channel: there both ends copy at once.
const LONG: u32 = 2 * CHUNK;

impl LocalEnd {
    /// The next piece of a SEND, if the peer can fetch it: its record, without the flags of its place in the
    /// message.
    #[inline]
    pub(super) fn rendezvous(&self, ctx: &Ctx<'_>, wqe: &SendRequest, offset: u32) -> Option<LocalRecord> {
        let long = wqe.op.is_send() && wqe.length - offset >= LONG && !wqe.flags.contains(SendFlags::INLINE);
        /* a request of UC may be executed once its program has its memory back */
        let long = long && !self.of.unreliable;
        if long && self.direct.as_ref().is_some_and(|direct| direct.memory.fetches()) {
            return self.rendezvous_piece(ctx, wqe, offset);
        }
        None
    }

    fn rendezvous_piece(&self, ctx: &Ctx<'_>, wqe: &SendRequest, offset: u32) -> Option<LocalRecord> {
        let mut first = None;
        let len = (wqe.length - offset).min(FETCHED);
        slices(self.of.sq.sges(self.next), offset, len, |sge, skip, n| {
            first = Some((sge.addr.wrapping_add(u64::from(skip)), sge.lkey, n));
            None
        });
        let (addr, lkey, len) = first.filter(|(.., len)| *len >= LONG)?;
        ctx.mrs().resolve_local(lkey, self.of.pd, addr, len, false).ok()?;
        let in_a_file = ctx.mrs().query(lkey)?.backing.is_known();
        let mut record = LocalRecord { len, rkey: lkey, flags: flag::RENDEZVOUS, ..self.record(wqe) };
        record.set_addr(addr);
        in_a_file.then_some(record)
    }

    /// Fetches what a record names, to `offset` of the held receive WQE. `None`: it cannot.
    pub(super) fn fetch(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &LocalRecord,
        offset: u32,
    ) -> Option<Result<(), DeliveryError>> {
        let direct = self.direct.take()?;
        let place = |from: *const u8| {
            ctx.stats().rx_bytes.add(u64::from(record.len));
            self.place_pieces(ctx, record, from, offset)
        };
        let placed = direct.memory.with_mapped(record.rkey, record.addr(), record.len, place);
        self.direct = Some(direct);
        ctx.stats().local_fetched.add(u64::from(placed.is_some()));
        placed
    }

    /// The data cannot be fetched: it is to be sent as a copy, from its message's beginning on.
    #[cold]
    pub(super) fn want_a_copy(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) -> LocalReply {
        self.inbound = LocalInbound::Idle;
        ctx.env.channels.reply_with(record.answer(answer::COPY))
    }

    /// The peer cannot fetch the data.
    #[cold]
    pub(super) fn on_copy(&mut self, ctx: &mut Ctx<'_>, record: &LocalRecord) {
        if let Some(direct) = &self.direct {
            direct.memory.set_fetches(false);
        }
        let Some(index) = self.stop_at(ctx, record.seq) else { return };
        self.go_back(ctx, index, record.seq, 0);
        self.rnr_until = 0;
        self.ask(ctx);
    }
}

#[cfg(test)]
#[path = "rendezvous_tests.rs"]
mod tests;
