//! Frames one by one, out of the datagrams of a round: whose each is, and whether it came whole.
//!
//! What is this process's is given to the card; the rest is handed on, answered or counted.

use std::ops::Deref;

use starverbs_core::wire::icrc::{self, IcrcHeader, bytes_after_ip_id, ip_id_difference};
use starverbs_core::{Counters, FrameMeta, QPN_BLOCK_SHIFT, QPN_GSI, Qpn};

use super::mads::SPECIAL_BLOCK;
use super::{Cursor, FrameOrigin, MULTICAST_BLOCK, REQUESTS, Rx};
use crate::control::{self, CardMessage, RUN_HEADER, SENT, SteeringAnswer, StrayFrames, ToolRequest};
use crate::handover::PassedOn;
use crate::probe::{PROBE_OPCODE, PendingProbes, Probe, decode_check, is_own_host};
use crate::registry;

/// BTH and ICRC: no frame is shorter.
pub(super) const SHORTEST: usize = 16;
const ICRC: usize = 4;
/// Size of the frames in a datagram that is one frame.
const WHOLE: usize = usize::MAX >> 1;

/// Where the next frame lies.
struct NextFrame {
    meta: FrameMeta,
    origin: FrameOrigin,
    slot: usize,
    from: usize,
    to: usize,
}

impl<C: Deref<Target = Counters>> Rx<C> {
    /// The next frame received for this process, from its BTH to before its ICRC, which was right. What is
    /// not for this process, or not right, is handed on or dropped, and counted.
    #[inline]
    pub fn next_frame(&mut self) -> Option<(FrameMeta, &[u8])> {
        let found = self.find()?;
        let inbox = match found.origin {
            FrameOrigin::Wire => &self.wire_inbox,
            FrameOrigin::Block => &self.block_inbox,
        };
        Some((found.meta, &inbox.bytes(found.slot)[found.from..found.to]))
    }

    /// Whether frames may wait that are worth a look ahead: more than one, as what comes next is fetched when
    /// it is handled.
    #[inline]
    pub fn has_more(&self) -> bool {
        let in_datagram = |cursor: &Cursor| {
            let inbox = if cursor.origin == FrameOrigin::Wire { &self.wire_inbox } else { &self.block_inbox };
            cursor.segment < WHOLE && cursor.at + cursor.segment < inbox.bytes(cursor.slot).len()
        };
        self.wire_left.len() > 1 || self.cursor.as_ref().is_some_and(in_datagram)
    }

    /// Destination QPNs of frames that come next, as far as they lie in the datagram that is begun or begin
    /// one of the wire's: `most` frames, each QPN once in a row. Gives how many frames they are of.
    #[inline]
    pub fn look_ahead(&self, most: usize, mut see: impl FnMut(Qpn)) -> usize {
        let (mut frames, mut last) = (0, 0);
        let mut note = |frame: &[u8]| {
            frames += 1;
            if frame.len() >= SHORTEST && qpn(frame) != last {
                last = qpn(frame);
                see(last);
            }
        };
        let mut left = most;
        if let Some(cursor) = &self.cursor {
            let inbox = if cursor.origin == FrameOrigin::Wire { &self.wire_inbox } else { &self.block_inbox };
            let rest = inbox.bytes(cursor.slot).get(cursor.at..).unwrap_or_default();
            for frame in rest.chunks(cursor.segment.max(1)).take(most) {
                note(frame);
                left -= 1;
            }
        }
        self.wire_left.clone().take(left).for_each(|slot| note(self.wire_inbox.bytes(slot)));
        frames
    }

    fn find(&mut self) -> Option<NextFrame> {
        loop {
            let Some(mut cursor) = self.cursor.take().or_else(|| self.next_datagram()) else {
                if self.wire_left.is_empty() && self.block_left.is_empty() {
                    if let Some(asked) = self.asked.take() {
                        self.answer_probes(asked);
                    }
                    return None;
                }
                continue;
            };
            let inbox = if cursor.origin == FrameOrigin::Wire { &self.wire_inbox } else { &self.block_inbox };
            let bytes = inbox.bytes(cursor.slot);
            let (from, to) = (cursor.at, (cursor.at + cursor.segment).min(bytes.len()));
            if from >= to {
                continue;
            }
            let frame = &bytes[from..to];
            if frame.len() < SHORTEST {
                self.counters.drop_malformed.inc();
                continue;
            }
            let block = qpn(frame) >> QPN_BLOCK_SHIFT;
            let ours = self.is_local(block) || self.takes_special(&cursor, block);
            if !ours {
                self.foreign(&mut cursor, block);
                self.cursor = Some(cursor);
                continue;
            }
            let good = self.check(&cursor, frame);
            let found = NextFrame {
                meta: cursor.meta,
                origin: cursor.origin,
                slot: cursor.slot,
                from,
                to: to - ICRC,
            };
            cursor.at = to;
            cursor.index = cursor.index.wrapping_add(1);
            cursor.nobodys = false;
            self.cursor = Some(cursor);
            if good {
                return Some(found);
            }
            self.bad(&cursor, from);
        }
    }

    /// Whether the frame at the cursor, for a block that this process does not own, is for it all the same.
    #[cold]
    fn takes_special(&self, cursor: &Cursor, block: u32) -> bool {
        match block {
            MULTICAST_BLOCK => self.takes_multicast(cursor),
            SPECIAL_BLOCK => self.takes_mad(cursor),
            _ => false,
        }
    }

    /// Deals with what lies at `from` of the cursor's datagram, for this process and without a good ICRC.
    #[cold]
    fn bad(&mut self, cursor: &Cursor, from: usize) {
        let by_wire = cursor.origin == FrameOrigin::Wire;
        let inbox = if by_wire { &self.wire_inbox } else { &self.block_inbox };
        let bytes = &inbox.bytes(cursor.slot)[from..cursor.at];
        match decode_check(bytes).filter(|_| is_own_host(&cursor.meta)) {
            Some(nonce) => self.steering.checked(nonce, by_wire),
            None => self.counters.drop_icrc.inc(),
        }
    }

    /// Whether the frame's ICRC is right, for the identification that segmented sends give or, IPv4, for any.
    #[inline]
    fn check(&self, cursor: &Cursor, frame: &[u8]) -> bool {
        let Some((body, icrc)) = frame.split_last_chunk::<ICRC>() else { return false };
        let mut outer = IcrcHeader {
            src: cursor.meta.src,
            dst: cursor.meta.dst,
            sport: cursor.sport,
            dport: self.settings.port,
            ip_id: cursor.index,
        };
        let Some(computed) = icrc::of_frame(&outer, body) else { return false };
        let error = u32::from_le_bytes(computed) ^ u32::from_le_bytes(*icrc);
        if error != 0 {
            let v4 = cursor.meta.dst.ipv4().is_some();
            match ip_id_difference(error, bytes_after_ip_id(body.len())).filter(|_| v4) {
                Some(difference) => outer.ip_id ^= difference,
                None => return false,
            }
        }
        if let Some(capture) = &self.capture {
            capture.frame(&outer, &cursor.meta, &[frame]);
        }
        true
    }

    /// Begins the next datagram. `None`: it held no frames, or there is none.
    fn next_datagram(&mut self) -> Option<Cursor> {
        if let Some(slot) = self.wire_left.next() {
            let outer = self.wire_inbox.outer(slot);
            if self.clients.any() && outer.meta.dst.is_multicast() {
                self.serve_clients(slot, &outer);
            }
            let segment = if outer.segment == 0 { WHOLE } else { outer.segment as usize };
            let origin = FrameOrigin::Wire;
            return Some(Cursor {
                origin,
                slot,
                at: 0,
                segment,
                index: 0,
                sport: outer.sport,
                meta: outer.meta,
                nobodys: false,
            });
        }
        let slot = self.block_left.next()?;
        match control::decode(self.block_inbox.bytes(slot))? {
            CardMessage::Frames(run) if run.meta.dst.is_multicast() && !self.is_from_proxy(&run) => {
                self.counters.drop_multicast.inc();
                None
            }
            CardMessage::Frames(run) => {
                let frames = self.block_inbox.bytes(slot).len() - RUN_HEADER;
                let sent = run.tag == SENT && !run.meta.dst.is_multicast();
                let counter = if sent { &self.counters.rx_local_frames } else { &self.counters.handed_in };
                counter.add(frames.div_ceil(run.segment as usize) as u64);
                Some(Cursor {
                    origin: FrameOrigin::Block,
                    slot,
                    at: RUN_HEADER,
                    segment: run.segment as usize,
                    index: run.first,
                    sport: run.sport,
                    meta: run.meta,
                    nobodys: false,
                })
            }
            CardMessage::Answer(answer) => {
                self.steering.answer(answer);
                None
            }
            CardMessage::LeaseRequest(request) => {
                let (from, from_len) = self.block_inbox.unix_sender(slot);
                self.grant_lease(request, &from, from_len);
                None
            }
            CardMessage::Request(text) => {
                if self.requests.len() < REQUESTS {
                    let (from, from_len) = self.block_inbox.unix_sender(slot);
                    let (who, text) = (self.block_inbox.unix_credentials(slot), text.to_vec());
                    self.requests.push_back(ToolRequest { from, from_len, who, text });
                }
                None
            }
        }
    }

    /// Deals with the frames at the cursor that are for `block`, not of this process, and moves the cursor
    /// behind them.
    #[cold]
    fn foreign(&mut self, cursor: &mut Cursor, block: u32) {
        let inbox = if cursor.origin == FrameOrigin::Wire { &self.wire_inbox } else { &self.block_inbox };
        let bytes = inbox.bytes(cursor.slot);
        let (from, first) = (cursor.at, cursor.index);
        if bytes.get(from..).is_some_and(|rest| rest.len() >= SHORTEST && qpn(rest) == QPN_GSI) {
            return self.pass_mad(cursor);
        }
        let mut frames = 0;
        while let Some(rest) = bytes.get(cursor.at..).filter(|rest| rest.len() >= SHORTEST)
            && qpn(rest) >> QPN_BLOCK_SHIFT == block
        {
            cursor.at += cursor.segment.min(rest.len());
            cursor.index = cursor.index.wrapping_add(1);
            frames += 1;
        }
        if cursor.meta.dst.is_multicast() {
            // Every member of the group got it: a frame handed on would reach its QP once for each.
            return self.counters.drop_multicast.add(frames);
        }
        let run = &bytes[from..cursor.at];
        if run.first() == Some(&PROBE_OPCODE)
            && let Some(probe) = Probe::decode(run)
        {
            let valid = is_own_host(&cursor.meta) && probe.reply_block <= registry::LAST_BLOCK;
            if valid && let Some(before) = PendingProbes::add(&mut self.asked, probe) {
                self.answer_probes(before);
            }
            return;
        }
        if cursor.origin == FrameOrigin::Block {
            // Handed to the wrong one; it must not go round.
            return self.counters.drop_no_owner.add(frames);
        }
        let segment = cursor.segment.min(run.len()) as u16;
        let head = control::encode_run(&StrayFrames {
            meta: cursor.meta,
            sport: cursor.sport,
            segment,
            first,
            tag: 0,
        });
        match self.peers.pass(block, &head, run) {
            PassedOn::Yes => {
                self.counters.handed_on.add(frames);
                // Steering looks at a datagram's first frame; the others' place says nothing about it.
                if from == 0 {
                    self.steering.saw_wrong();
                }
            }
            PassedOn::NoOwner => self.counters.drop_no_owner.add(frames),
            PassedOn::Full => self.counters.drop_handover.add(frames),
        }
    }

    fn answer_probes(&mut self, asked: PendingProbes) {
        let Probe { nonce, index, reply_block } = asked.probe;
        let blocks = self.blocks().map(|b| b as u16).collect();
        let answer = SteeringAnswer { nonce, index, count: asked.count, token: self.token, blocks };
        if self.is_local(reply_block) {
            self.steering.answer(answer);
        } else {
            self.steering.was_asked();
            self.peers.pass_datagram(reply_block, &control::encode_answer(&answer));
        }
    }
}

/// Destination QPN of a frame (IBTA 9.2: BTH bytes 5 to 7).
#[inline]
pub(super) fn qpn(frame: &[u8]) -> Qpn {
    u32::from_be_bytes([0, frame[5], frame[6], frame[7]])
}
