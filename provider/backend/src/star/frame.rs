//! Small packets to one place that leave in one frame (docs/wire.md, "StaR"): answers, completions and short
//! messages of many connections to one card share checksum, CRC and datagram.

use std::ops::Deref;

use starverbs_core::{Av, Counters};
use starverbs_star::wire::{HEAD_LEN, HEADER_LEN, LENGTH_LEN, SEVERAL_ROOM, several_head};

use super::tx::StarFraming;
use crate::program::Payload;
use crate::tx::{Datagram, Tx};

/// Copies `N` bytes, which takes no call. False: they are another number.
#[inline(always)]
fn put<const N: usize>(from: &[u8], to: &mut [u8]) -> bool {
    let (Ok(from), Ok(to)) = (<&[u8; N]>::try_from(from), <&mut [u8; N]>::try_from(to)) else { return false };
    *to = *from;
    true
}

/// Packets that are collected.
pub(super) struct OpenFrame {
    to: Av,
    port: u16,
    /// Bytes of the header and of the packets so far
    used: usize,
    /// How many packets there are, when the first was added among those of all frames, and bytes before its
    /// data
    count: u32,
    begun: u32,
    head: usize,
    /// A full one has left, and what is collected now may be the last segment of its send
    joins: bool,
    /// Lanes of those that were collected and may still be overtaken, and of those that left by themselves:
    /// bits
    collected: u16,
    passed: u16,
    bytes: Box<[u8; SEVERAL_ROOM]>,
}

impl OpenFrame {
    /// To nowhere.
    pub(super) fn new() -> Self {
        OpenFrame {
            to: Av::default(),
            port: 0,
            used: 0,
            count: 0,
            begun: 0,
            head: 0,
            joins: false,
            collected: 0,
            passed: 0,
            bytes: Box::new([0; SEVERAL_ROOM]),
        }
    }

    /// Whether packets to this place belong here. Its hop limit is that of the first.
    #[inline]
    pub(super) fn goes_to(&self, to: &Av, port: u16) -> bool {
        self.reaches(to, port) && (self.to.sgid, self.to.traffic_class) == (to.sgid, to.traffic_class)
    }

    /// Whether it goes to the same card, whatever its class.
    #[inline]
    pub(super) fn reaches(&self, to: &Av, port: u16) -> bool {
        self.port == port && self.to.dgid == to.dgid
    }

    /// When its first packet was added. `None`: it has none.
    #[inline]
    pub(super) fn begun(&self) -> Option<u32> {
        (self.count > 0).then_some(self.begun)
    }

    /// Whether packets of one of these lanes may still be overtaken.
    #[inline]
    pub(super) fn has_any_of(&self, lanes: u16) -> bool {
        self.collected & lanes != 0
    }

    /// Whether nothing was sent to its place since [`OpenFrame::forget_lanes`].
    #[inline]
    pub(super) fn is_unused(&self) -> bool {
        self.collected | self.passed == 0
    }

    /// It has left, and another place's packets are collected here.
    pub(super) fn begin(&mut self, to: &Av, port: u16) {
        (self.to, self.port) = (*to, port);
        self.forget_lanes();
    }

    /// Nothing that left before can be overtaken any more.
    #[inline]
    pub(super) fn forget_lanes(&mut self) {
        (self.collected, self.passed, self.joins) = (0, 0, false);
    }

    /// Whether a packet of this lane, collected or not, could leave before one of its lane that was sent
    /// earlier.
    #[inline]
    pub(super) fn is_overtaken_by(&self, lane: u16, collected: bool) -> bool {
        let others = if collected { self.passed } else { self.collected };
        others & lane != 0
    }

    /// A packet of this lane leaves by itself.
    #[inline]
    pub(super) fn pass(&mut self, lane: u16) {
        self.passed |= lane;
    }

    /// Collects a packet of `size` bytes, the `now`th of all; what was collected leaves, if there is no room
    /// for it in `most` bytes. Frames that are full have one length, so that they leave as segments of one
    /// send.
    #[inline]
    pub(super) fn add<C: Deref<Target = Counters>>(
        &mut self,
        packet: &Datagram<'_>,
        size: usize,
        lane: u16,
        (most, now): (usize, u32),
        tx: &mut Tx<StarFraming, C>,
    ) {
        let Datagram { head, data, payload, .. } = *packet;
        let most = most.min(SEVERAL_ROOM);
        if self.count > 0 && self.used + LENGTH_LEN + size > most {
            /* the longest may have become shorter meanwhile */
            if let Some(rest) = self.bytes.get_mut(self.used..most) {
                rest.fill(0);
                self.used = most;
            }
            self.close(tx);
            self.joins = true;
        }
        self.collected |= lane;
        if self.count == 0 {
            (self.used, self.head, self.begun) = (HEADER_LEN, head.len(), now);
        }
        let end = self.used + LENGTH_LEN + size;
        let Some(mut rest) = self.bytes.get_mut(self.used..end) else { return };
        let mut next = |len: usize| rest.split_off_mut(..len).unwrap_or_default();
        put::<LENGTH_LEN>(&(size as u16).to_be_bytes(), next(LENGTH_LEN));
        let place = next(head.len());
        if !put::<HEADER_LEN>(head, place) && !put::<HEAD_LEN>(head, place) {
            place.copy_from_slice(head);
        }
        if !data.is_empty() {
            next(data.len()).copy_from_slice(data);
        }
        for bytes in payload.iter() {
            bytes.copy_to(0, next(bytes.len()));
        }
        (self.used, self.count) = (end, self.count + 1);
    }

    /// What was collected leaves: one packet by itself, more as a frame of several. Behind a full frame one
    /// packet is such a frame, too: a few bytes more, and no datagram of its own.
    #[inline(never)]
    pub(super) fn close<C: Deref<Target = Counters>>(&mut self, tx: &mut Tx<StarFraming, C>) {
        let first = HEADER_LEN + LENGTH_LEN;
        let (from, head) = match self.count {
            0 => return,
            1 if !self.joins => {
                let len = [self.bytes[HEADER_LEN], self.bytes[HEADER_LEN + 1]];
                self.used = first + usize::from(u16::from_be_bytes(len));
                (first, self.head)
            }
            _ => {
                let head = several_head((self.used - HEADER_LEN) as u16);
                self.bytes[..HEADER_LEN].copy_from_slice(&head);
                (0, HEADER_LEN)
            }
        };
        self.count = 0;
        let all = self.bytes.get(from..self.used).unwrap_or_default();
        let Some((head, data)) = all.split_at_checked(head) else { return };
        let (to, port) = (&self.to, self.port);
        let payload = Payload::EMPTY;
        tx.send_datagram(&Datagram { to, port, head, data, payload, pad: 0, volatile: false });
    }
}
