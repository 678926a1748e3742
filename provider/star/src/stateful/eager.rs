//! Data of SL that follows its WQE before this end has asked for it (docs/star.md, "Transfer of WQEs").
//!
//! The WQE says so. It begins as any does, but its packets count as under way without having left: the data
//! is their answer, and what is missing of it is lost, and asked for. If the WQE cannot begin when its data
//! comes, that is dropped, and asked for when it does.

use starverbs_core::{Psn, QpState, SendFlags};

use super::window::Of;
use super::{CardCtx, Stateful};
use crate::env::StarEnv;
use crate::wire::{StarHeader, StarPacket};

impl<E: StarEnv> Stateful<E> {
    /// ED. False: its WQE is not here, or nothing may come any more.
    pub(super) fn take_eager(&mut self, card: &mut CardCtx<'_, E>, packet: &StarPacket<'_>) -> bool {
        let StarHeader { psn: seq, addr, .. } = packet.header;
        if self.state != QpState::Rts || self.sends.get(seq).is_none() {
            return false;
        }
        let next = self.streams[Of::Remote as usize].next;
        while Psn::new(next) == seq && self.is_eager(next) && self.step(card, Of::Remote) {}
        let stream = &self.streams[Of::Remote as usize];
        if !seq.before(Psn::new(stream.next)) {
            self.ask_for(seq);
        }
        let first = self.send_sges(seq).first().map_or(0, |sge| sge.addr);
        if let Ok(offset) = u32::try_from(addr.wrapping_sub(first)) {
            self.place_eager(card, seq, offset, packet.data);
        }
        true
    }

    /// Data of WQE `seq`, behind so much of it, is the answer to the packets that wait for it: several, if
    /// this end's path MTU is the smaller one.
    fn place_eager(&mut self, card: &mut CardCtx<'_, E>, seq: Psn, mut offset: u32, mut data: &[u8]) {
        while !data.is_empty() {
            let stream = &self.streams[Of::Remote as usize];
            let ahead = seq.since(Psn::new(stream.una));
            let index = stream.una.wrapping_add(ahead as u32);
            if ahead < 0 || !stream.holds(index) {
                return;
            }
            let first = Psn::new(stream.get(index).number);
            let Some((psn, entry)) = self.window.awaits(first, index, offset) else { return };
            let Some((now, rest)) = data.split_at_checked(entry.len.into()) else { return };
            self.place_answer(card, psn, &entry, now);
            (offset, data) = (offset.saturating_add(entry.len.into()), rest);
        }
    }

    /// Whether WQE `index` of SL is the next to begin, or to go on, and its data follows it.
    fn is_eager(&self, index: u32) -> bool {
        let stream = &self.streams[Of::Remote as usize];
        let wqe = || self.sends.get(Psn::new(index)).is_some_and(|wqe| wqe.flags.contains(SendFlags::EAGER));
        stream.next == index && if stream.begun { stream.get(index).eager } else { wqe() }
    }

    /// Data of WQE `seq` was dropped: what is not under way is asked for as that of any.
    #[cold]
    fn ask_for(&mut self, seq: Psn) {
        self.sends.ask_for(seq);
        let stream = &mut self.streams[Of::Remote as usize];
        if stream.begun && Psn::new(stream.next) == seq {
            let next = stream.next;
            stream.op(next).eager = false;
        }
    }
}
