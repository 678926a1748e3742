//! The initiator: commands from their issue to their completion.

use starverbs_core::Nanos;
use thiserror::Error;

use super::control::PortalId;
use super::outbox::{Inward, Letter, open};
use super::serve::{DataRequest, DataSource};
use super::slot::{CommandSlot, SlotState};
use super::{CardPath, OneRmaCard, OneRmaEnv, at_haste, of};
use crate::command::{COMPLETION_LEN, Completion, HASTES, OneRmaCommand};
use crate::fragments::Fragments;
use crate::region::Rights;
use crate::seal::{Seal, TAG_LEN};
use crate::types::{OneRmaOp, Status};
use crate::wire::{Hop, Iv, OneRmaHeader};

/// Why a slot does not take a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum IssueError {
    /// There is no such portal or slot
    #[error("no such slot")]
    NoSlot,
    /// Its command has not completed
    #[error("the slot's command has not completed")]
    Busy,
    /// No operation of this kind has this size
    #[error("no operation of this kind has this size")]
    Size,
    /// No command is in so much haste
    #[error("no command is in so much haste")]
    Haste,
    /// A local region is not the process's, does not reach so far, or does not allow it
    #[error("a local region does not allow this")]
    Local,
}

impl<S: Seal> OneRmaCard<S> {
    /// A process stores a command into one of its slots.
    pub fn issue(
        &mut self,
        now: Nanos,
        id: PortalId,
        slot: u16,
        command: &OneRmaCommand,
    ) -> Result<(), IssueError> {
        let portal = self.portal(id).filter(|portal| slot < portal.slots).ok_or(IssueError::NoSlot)?;
        let place = portal.first + slot;
        let OneRmaCard { slots, regions, out, .. } = self;
        let slot = slots.get_mut(usize::from(place)).ok_or(IssueError::NoSlot)?;
        if !matches!(slot.state, SlotState::Free | SlotState::Done) {
            return Err(IssueError::Busy);
        }
        if !command.op.takes(command.size) {
            return Err(IssueError::Size);
        }
        if command.haste >= HASTES {
            return Err(IssueError::Haste);
        }
        let need = if command.op == OneRmaOp::Read { Rights::LOCAL_WRITE } else { Rights::LOCAL_READ };
        let data = (command.local_offset, command.size);
        let records = (0, u32::from(portal.slots) * COMPLETION_LEN as u32);
        let allowed = regions.local(command.local, portal.pid, data, need).is_some()
            && regions.local(command.completions, portal.pid, records, Rights::LOCAL_WRITE).is_some();
        if !allowed {
            return Err(IssueError::Local);
        }
        if slot.key.as_ref().is_none_or(|(key, _)| *key != command.key) {
            slot.key = Some((command.key, out.seal.prepare(&command.key)));
        }
        slot.command = Some(*command);
        slot.state = SlotState::Queued;
        slot.here = Fragments::default();
        (slot.issued, slot.started) = (now, now);
        slot.deadline = now.saturating_add(self.config.dispatch_timeout);
        self.queued[of(command.class)].push(&mut self.slot_links, place);
        Ok(())
    }

    /// A slot's command enters service. The window has room for any.
    pub(super) fn start<E: OneRmaEnv>(&mut self, env: &mut E, now: Nanos, place: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(place)) else { return };
        if now >= slot.deadline {
            return self.complete(env, now, place, Status::DispatchTimeout);
        }
        let pid = slot.portal.and_then(|at| self.portals.get(usize::from(at))).map_or(0, |one| one.pid);
        let (Some(command), Some((_, key))) = (&slot.command, &slot.key) else { return };
        let OneRmaCommand { op, class, haste, size, region, offset, .. } = *command;
        if !self.window.admit(size) {
            return;
        }
        let path = CardPath::of(self.addr, command);
        let timeout = self.config.timeout >> haste;
        /* a card waits no longer than 32 bits say */
        let hop =
            Hop::Request { from: slot.handle(place), pid, region, offset, size, timeout: timeout as u32 };
        let answers = Iv::default();
        let letter = Letter { path: &path, op, class, hop, answers, by_target: false, key, data: None };
        let sent = self.out.send(env, &letter);
        self.queued[of(class)].remove(&mut self.slot_links, place);
        at_haste(&mut self.service, haste).push(&mut self.slot_links, place);
        (slot.state, slot.started) = (SlotState::InService, now);
        slot.deadline = now.saturating_add(timeout);
        match sent {
            Ok(iv) => slot.request = iv,
            Err(_) => self.complete(env, now, place, Status::Exhausted),
        }
    }

    /// The place of the slot that a packet is for; counts those that are for none.
    fn addressed(
        &mut self,
        now: Nanos,
        path: &CardPath,
        head: &OneRmaHeader,
        states: &[SlotState],
    ) -> Option<u16> {
        let (Hop::Ask { to, .. } | Hop::Data { to, .. } | Hop::Done { to } | Hop::Fail { to, .. }) = head.hop
        else {
            return None;
        };
        let place = u16::try_from(to.index).unwrap_or(u16::MAX);
        let found = self.slots.get(usize::from(place)).is_some_and(|slot| {
            let of_it = slot.in_service(to.generation, head.prefix.op);
            let from_its_target =
                of_it.is_some_and(|(command, _)| CardPath::of(path.local, command) == *path);
            from_its_target && states.contains(&slot.state) && now < slot.deadline
        });
        self.counts.late += u64::from(!found);
        found.then_some(place)
    }

    /// Decrypts a packet for a slot, under its key or the reserved one; counts what is forged.
    fn open_for<'p>(
        &mut self,
        place: u16,
        head: &OneRmaHeader,
        (packet, at): (&'p mut [u8], usize),
        reserved: bool,
    ) -> Option<&'p mut [u8]> {
        let slot = self.slots.get(usize::from(place))?;
        let (command, (_, own)) = (slot.command.as_ref()?, slot.key.as_ref()?);
        let key = if reserved { &self.out.reserved } else { own };
        let ivs = (head.prefix.iv, slot.answered(), &command.remote);
        let opened = open(&self.out.seal, key, (packet, at), ivs);
        self.counts.forged += u64::from(opened.is_none());
        opened
    }

    /// Data of a READ: bytes count, not their order.
    pub(super) fn on_read_data<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        now: Nanos,
        path: &CardPath,
        packet: Inward<'_>,
    ) {
        let Inward { head, bytes, at } = packet;
        let Hop::Data { offset, .. } = head.hop else { return };
        let Some(place) = self.addressed(now, path, &head, &[SlotState::InService]) else { return };
        let Some(slot) = self.slots.get(usize::from(place)) else { return };
        let (Some(command), here) = (slot.command, slot.here) else { return };
        let len = (bytes.len() - at).saturating_sub(TAG_LEN) as u32;
        if !here.is_new(offset, len, command.size) {
            self.counts.copies += 1;
            return;
        }
        let Some(data) = self.open_for(place, &head, (bytes, at), false) else { return };
        let range = (command.local_offset.saturating_add(offset.into()), len);
        let addr = self.regions.local(command.local, self.pid_of(place), range, Rights::LOCAL_WRITE);
        if !addr.is_some_and(|addr| env.dma_write(addr, data)) {
            return self.complete(env, now, place, Status::LocalAccess);
        }
        let Some(slot) = self.slots.get_mut(usize::from(place)) else { return };
        if slot.here.take(offset, len, command.size) {
            self.complete(env, now, place, Status::Ok);
        }
    }

    /// The target of a WRITE or REKEY wants its data. The slot's time begins anew: the target's ends before
    /// it, so that nothing lands there after the command has timed out (1RMA, section 5.1).
    pub(super) fn on_ask<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        now: Nanos,
        path: &CardPath,
        packet: Inward<'_>,
    ) {
        let Inward { head, bytes, at } = packet;
        let Hop::Ask { from, size, .. } = head.hop else { return };
        let Some(place) = self.addressed(now, path, &head, &[SlotState::InService]) else { return };
        if self.open_for(place, &head, (bytes, at), false).is_none() {
            return;
        }
        let Some(slot) = self.slots.get_mut(usize::from(place)) else { return };
        let Some(OneRmaCommand { op, class, haste, size: wanted, .. }) = slot.command else { return };
        if size != wanted {
            self.counts.malformed += 1;
            return;
        }
        (slot.state, slot.ask, slot.transfer) = (SlotState::RemoteReadSeen, head.prefix.iv, from);
        slot.deadline = now.saturating_add(self.config.timeout >> haste);
        let to = slot.handle(place);
        let service = at_haste(&mut self.service, haste);
        service.remove(&mut self.slot_links, place);
        service.push(&mut self.slot_links, place);
        let job =
            DataRequest { path: *path, to: from, op, class, size, done: 0, source: DataSource::Slot(to) };
        if self.inbound.push(job, self.config.nack_threshold).is_some() {
            self.counts.nacks += 1;
            self.give_up(env, place, Status::Nack);
            self.complete(env, now, place, Status::Nack);
        }
    }

    /// Tells the target of a WRITE or REKEY that its data will not come.
    pub(super) fn give_up<E: OneRmaEnv>(&mut self, env: &mut E, place: u16, status: Status) {
        let Some(slot) = self.slots.get(usize::from(place)) else { return };
        let (Some(command), Some((_, key))) = (&slot.command, &slot.key) else { return };
        let path = CardPath::of(self.addr, command);
        let OneRmaCommand { op, class, .. } = *command;
        let (hop, answers) = (Hop::Fail { to: slot.transfer, status }, slot.ask);
        let letter = Letter { path: &path, op, class, hop, answers, by_target: false, key, data: None };
        /* without a counter left the target's transfer times out */
        _ = self.out.send(env, &letter);
    }

    /// A WRITE or REKEY is done.
    pub(super) fn on_done<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        now: Nanos,
        path: &CardPath,
        packet: Inward<'_>,
    ) {
        let Inward { head, bytes, at } = packet;
        let Some(place) = self.addressed(now, path, &head, &[SlotState::RemoteReadSeen]) else { return };
        if self.open_for(place, &head, (bytes, at), false).is_some() {
            self.complete(env, now, place, Status::Ok);
        }
    }

    /// The target refuses. That the request could not be authenticated is said under a key that everybody
    /// knows; all else is not.
    pub(super) fn on_fail<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        now: Nanos,
        path: &CardPath,
        packet: Inward<'_>,
    ) {
        let Inward { head, bytes, at } = packet;
        let Hop::Fail { status, .. } = head.hop else { return };
        let reserved = match status {
            Status::RemoteAuthenticationFailure => true,
            Status::Nack | Status::RemoteAccess => false,
            _ => {
                self.counts.malformed += 1;
                return;
            }
        };
        let states = [SlotState::InService, SlotState::RemoteReadSeen];
        let Some(place) = self.addressed(now, path, &head, &states) else { return };
        if self.open_for(place, &head, (bytes, at), reserved).is_some() {
            self.complete(env, now, place, status);
        }
    }

    pub(super) fn expire_slots<E: OneRmaEnv>(&mut self, env: &mut E, now: Nanos) {
        let due = |slots: &[CommandSlot<S::Key>], place: u16| {
            slots.get(usize::from(place)).is_some_and(|slot| now >= slot.deadline)
        };
        for class in 0..self.queued.len() {
            while let Some(place) = self.queued[class].first().filter(|place| due(&self.slots, *place)) {
                self.complete(env, now, place, Status::DispatchTimeout);
            }
        }
        for haste in 0..self.service.len() {
            while let Some(place) = self.service[haste].first().filter(|place| due(&self.slots, *place)) {
                self.complete(env, now, place, Status::Timeout);
            }
        }
    }

    fn pid_of(&self, place: u16) -> u32 {
        let portal = self.slots.get(usize::from(place)).and_then(|slot| slot.portal);
        portal.and_then(|at| self.portals.get(usize::from(at))).map_or(0, |portal| portal.pid)
    }

    /// The slot is in no list, its window is given back, and what still comes for its command is late.
    pub(super) fn leave_service(&mut self, place: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(place)) else { return };
        let Some(OneRmaCommand { class, haste, size, .. }) = slot.command else { return };
        if slot.state == SlotState::Queued {
            self.queued[of(class)].remove(&mut self.slot_links, place);
        } else if slot.state.is_in_service() {
            at_haste(&mut self.service, haste).remove(&mut self.slot_links, place);
            self.window.refund(size);
        } else {
            return;
        }
        slot.state = SlotState::Done;
        slot.generation = slot.generation.wrapping_add(1);
    }

    /// A slot's command ends: its completion is written.
    pub(super) fn complete<E: OneRmaEnv>(&mut self, env: &mut E, now: Nanos, place: u16, status: Status) {
        self.leave_service(place);
        let Some(slot) = self.slots.get_mut(usize::from(place)) else { return };
        let (Some(command), Some(at)) = (slot.command.take(), slot.portal) else { return };
        let Some(portal) = self.portals.get_mut(usize::from(at)) else { return };
        let short = |delay: Nanos| u32::try_from(delay).unwrap_or(u32::MAX);
        /* what never entered service has waited until now */
        let started = if status == Status::DispatchTimeout { now } else { slot.started };
        let record = (portal.sequence % u32::from(portal.slots.max(1))) * COMPLETION_LEN as u32;
        portal.sequence = portal.sequence.wrapping_add(1);
        let completion = Completion {
            slot: place - portal.first,
            status,
            op: command.op,
            bytes: if status == Status::Ok { command.size } else { 0 },
            issue_delay: short(started.saturating_sub(slot.issued)),
            total_delay: short(now.saturating_sub(slot.issued)),
            sequence: portal.sequence,
        };
        self.counts.completed += 1;
        self.counts.refused += u64::from(status == Status::Nack);
        self.counts.timeouts += u64::from(matches!(status, Status::Timeout | Status::DispatchTimeout));
        let range = (u64::from(record), COMPLETION_LEN as u32);
        let addr = self.regions.local(command.completions, portal.pid, range, Rights::LOCAL_WRITE);
        let (first, last) = completion.encode();
        let written = addr.is_some_and(|addr| env.dma_write(addr, &first) && env.dma_store(addr + 24, last));
        self.counts.lost_completions += u64::from(!written);
        env.completed(PortalId(at));
    }
}
