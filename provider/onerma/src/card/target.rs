//! The target: requests of others, and what they write here.

use starverbs_core::Nanos;

use super::outbox::{Inward, Letter, Outbox, open};
use super::ready::Purpose;
use super::serve::{DataRequest, DataSource};
use super::{CardPath, OneRmaCard, OneRmaEnv, at_haste, of};
use crate::command::HASTES;
use crate::fragments::Fragments;
use crate::region::{RegionId, Rights};
use crate::seal::{Initiator, RegionKey, Seal, TAG_LEN};
use crate::types::{Class, Handle, MAX_OP, OneRmaOp, Status};
use crate::wire::{Hop, Iv};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TransferState {
    Unused,
    /// For the window
    Waiting,
    /// For data
    Asked,
}

/// A WRITE or REKEY of another host, from its request to its last byte.
pub(super) struct InboundTransfer<K> {
    state: TransferState,
    generation: u32,
    pub(super) deadline: Nanos,
    path: CardPath,
    /// The initiator's slot
    from: Handle,
    op: OneRmaOp,
    class: Class,
    /// How often this card's timeout is halved for it, to be no longer than the initiator's
    haste: u8,
    region: RegionId,
    /// Of the region's key when the request came
    version: u32,
    offset: u64,
    size: u32,
    here: Fragments,
    request: Iv,
    ask: Iv,
    key: Option<K>,
}

impl<K> InboundTransfer<K> {
    pub(super) fn new() -> Self {
        InboundTransfer {
            state: TransferState::Unused,
            generation: 0,
            deadline: 0,
            path: CardPath::default(),
            from: Handle::default(),
            op: OneRmaOp::Write,
            class: Class::High,
            haste: 0,
            region: RegionId::default(),
            version: 0,
            offset: 0,
            size: 0,
            here: Fragments::default(),
            request: Iv::default(),
            ask: Iv::default(),
            key: None,
        }
    }

    /// Says something to the initiator about the packet `answers`.
    fn letter<'a>(&'a self, key: &'a K, hop: Hop, answers: Iv) -> Letter<'a, K> {
        let InboundTransfer { path, op, class, .. } = self;
        Letter { path, op: *op, class: *class, hop, answers, by_target: true, key, data: None }
    }
}

/// What remains of a request when it was authenticated.
struct Admitted<K> {
    from: Handle,
    region: RegionId,
    version: u32,
    offset: u64,
    size: u32,
    timeout: u32,
    request: Iv,
    key: K,
}

impl<S: Seal> OneRmaCard<S> {
    /// A request. Nothing is kept of one that cannot be authenticated, is not allowed, or is too much.
    pub(super) fn on_request<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        now: Nanos,
        path: &CardPath,
        packet: Inward<'_>,
    ) {
        let Inward { head, bytes, at } = packet;
        let Hop::Request { from, pid, region: id, offset, size, timeout } = head.hop else { return };
        let (op, class, request) = (head.prefix.op, head.prefix.class, head.prefix.iv);
        let OneRmaCard { regions, ready, out: Outbox { seal, .. }, .. } = self;
        let authentic = regions.get(id).and_then(|(region, version)| {
            let initiator = Initiator { addr: path.remote, pid };
            let purpose = Purpose { region: id, version, initiator, op };
            let derived = || seal.prepare(&seal.derive(&region.key, &initiator, op));
            let known = ready.get(&purpose).cloned();
            let is_new = known.is_none();
            let key = known.unwrap_or_else(derived);
            open(seal, &key, (bytes, at), (request, Iv::default(), &path.local))?;
            if is_new {
                /* nothing that is not authentic takes another one's place */
                ready.keep(purpose, key.clone());
            }
            Some((region, version, key))
        });
        let Some((region, version, key)) = authentic else {
            return self.deny(env, path, (op, class), from, request);
        };
        let need = match op {
            OneRmaOp::Read => Rights::REMOTE_READ,
            OneRmaOp::Write => Rights::REMOTE_WRITE,
            OneRmaOp::Rekey => Rights::REMOTE_REKEY,
        };
        let reached = op == OneRmaOp::Rekey || region.host_address(offset, size).is_some();
        let allowed = region.rights.contains(need) && reached;
        let admitted = Admitted { from, region: id, version, offset, size, timeout, request, key };
        let refused = if !allowed {
            self.counts.access_failures += 1;
            Some((Status::RemoteAccess, admitted.key))
        } else {
            self.take(now, path, (op, class), admitted).map(|key| (Status::Nack, key))
        };
        if let Some((status, key)) = refused {
            self.counts.nacks += u64::from(status == Status::Nack);
            let hop = Hop::Fail { to: from, status };
            let letter =
                Letter { path, op, class, hop, answers: request, by_target: true, key: &key, data: None };
            /* without a counter left the initiator times out */
            _ = self.out.send(env, &letter);
        }
    }

    /// Queues what was admitted; gives the key back if there is too much to do.
    fn take(
        &mut self,
        now: Nanos,
        path: &CardPath,
        (op, class): (OneRmaOp, Class),
        admitted: Admitted<S::Key>,
    ) -> Option<S::Key> {
        let Admitted { from, region, version, offset, size, timeout, request, key } = admitted;
        let threshold = self.config.nack_threshold;
        if !self.inbound.admits(size, threshold) {
            return Some(key);
        }
        if op == OneRmaOp::Read {
            let source = DataSource::Region { id: region, version, offset, key, answers: request };
            let job = DataRequest { path: *path, to: from, op, class, size, done: 0, source };
            return self.inbound.push(job, threshold).and_then(DataRequest::into_key);
        }
        /* a shorter time than any of this card's: its own would end after the initiator's */
        let ends_before = |haste: &u8| self.config.timeout >> haste <= timeout.into();
        let Some(haste) = (0..HASTES).find(ends_before) else { return Some(key) };
        let Some(place) = self.unused.first() else { return Some(key) };
        let Some(transfer) = self.transfers.get_mut(usize::from(place)) else { return Some(key) };
        *transfer = InboundTransfer {
            state: TransferState::Waiting,
            generation: transfer.generation,
            deadline: now.saturating_add(self.config.dispatch_timeout),
            path: *path,
            from,
            op,
            class,
            haste,
            region,
            version,
            offset,
            size,
            here: Fragments::default(),
            request,
            ask: Iv::default(),
            key: Some(key),
        };
        self.unused.remove(&mut self.transfer_links, place);
        self.waiting[of(class)].push(&mut self.transfer_links, place);
        self.inbound.bytes += size;
        None
    }

    /// A request could not be authenticated: a wrong key, no such region, or its key was changed.
    pub(super) fn deny<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        path: &CardPath,
        (op, class): (OneRmaOp, Class),
        to: Handle,
        answers: Iv,
    ) {
        self.counts.auth_failures += 1;
        let hop = Hop::Fail { to, status: Status::RemoteAuthenticationFailure };
        /* without a counter left the initiator times out */
        _ = self.out.send_reserved(env, (path, op, class), hop, answers);
    }

    /// The window has room: the data of a transfer is asked for.
    pub(super) fn ask<E: OneRmaEnv>(&mut self, env: &mut E, now: Nanos, place: u16) {
        let Some(transfer) = self.transfers.get_mut(usize::from(place)) else { return };
        if now >= transfer.deadline {
            return self.drop_waiting(env, place);
        }
        let size = transfer.size;
        if !self.window.admit(size) {
            return;
        }
        let from = Handle { index: u32::from(place), generation: transfer.generation };
        let hop = Hop::Ask { to: transfer.from, from, size };
        let Some(key) = &transfer.key else { return };
        let sent = self.out.send(env, &transfer.letter(key, hop, transfer.request));
        self.inbound.bytes = self.inbound.bytes.saturating_sub(size);
        self.waiting[of(transfer.class)].remove(&mut self.transfer_links, place);
        at_haste(&mut self.asked, transfer.haste).push(&mut self.transfer_links, place);
        transfer.state = TransferState::Asked;
        transfer.deadline = now.saturating_add(self.config.timeout >> transfer.haste);
        match sent {
            Ok(iv) => transfer.ask = iv,
            Err(_) => self.release(place),
        }
    }

    /// Data of a WRITE or REKEY. The deadline is looked at before each packet's bytes are copied.
    pub(super) fn on_write_data<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        now: Nanos,
        path: &CardPath,
        packet: Inward<'_>,
    ) {
        let Inward { head, bytes, at } = packet;
        let Hop::Data { to, offset } = head.hop else { return };
        let Some(place) = self.asked_of(path, to, head.prefix.op).filter(|place| {
            self.transfers.get(usize::from(*place)).is_some_and(|transfer| now < transfer.deadline)
        }) else {
            self.counts.late += 1;
            return;
        };
        let len = (bytes.len() - at).saturating_sub(TAG_LEN) as u32;
        let OneRmaCard { transfers, out, counts, .. } = self;
        let Some(transfer) = transfers.get(usize::from(place)) else { return };
        let Some(key) = &transfer.key else { return };
        if !transfer.here.is_new(offset, len, transfer.size) {
            counts.copies += 1;
            return;
        }
        let ivs = (head.prefix.iv, transfer.ask, &path.local);
        let Some(data) = open(&out.seal, key, (bytes, at), ivs) else {
            counts.forged += 1;
            return;
        };
        let landed = self.land(env, place, offset, data);
        self.on_landed(env, place, offset, len, landed);
    }

    /// Puts data where it belongs.
    fn land<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        place: u16,
        offset: u32,
        data: &[u8],
    ) -> Result<(), Status> {
        let transfer = self.transfers.get(usize::from(place)).ok_or(Status::RemoteAccess)?;
        let region = match self.regions.get(transfer.region) {
            Some((region, version)) if version == transfer.version => region,
            _ => return Err(Status::RemoteAuthenticationFailure),
        };
        if transfer.op == OneRmaOp::Rekey {
            let key = data.try_into().map_err(|_| Status::RemoteAccess)?;
            let changed = self.regions.rekey(transfer.region, RegionKey(key));
            self.counts.rekeys += u64::from(changed);
            return if changed { Ok(()) } else { Err(Status::RemoteAccess) };
        }
        let to = transfer.offset.checked_add(offset.into());
        let addr = to.and_then(|to| region.host_address(to, data.len().min(MAX_OP as usize) as u32));
        let written = addr.is_some_and(|addr| env.dma_write(addr, data));
        if written { Ok(()) } else { Err(Status::RemoteAccess) }
    }

    /// A packet's data is where it belongs, or cannot be: the initiator hears of the end.
    fn on_landed<E: OneRmaEnv>(
        &mut self,
        env: &mut E,
        place: u16,
        offset: u32,
        len: u32,
        landed: Result<(), Status>,
    ) {
        let OneRmaCard { transfers, out, .. } = self;
        let Some(transfer) = transfers.get_mut(usize::from(place)) else { return };
        let hop = match landed {
            Ok(()) if !transfer.here.take(offset, len, transfer.size) => return,
            Ok(()) => Hop::Done { to: transfer.from },
            Err(Status::RemoteAuthenticationFailure) => {
                let InboundTransfer { path, op, class, from, ask, .. } = *transfer;
                self.release(place);
                return self.deny(env, &path, (op, class), from, ask);
            }
            Err(status) => Hop::Fail { to: transfer.from, status },
        };
        env.dma_fence();
        if let Some(key) = &transfer.key {
            /* without a counter left the initiator times out */
            _ = out.send(env, &transfer.letter(key, hop, transfer.ask));
        }
        self.release(place);
    }

    /// The initiator says that its data will not come.
    pub(super) fn on_given_up(&mut self, path: &CardPath, packet: Inward<'_>) {
        let Inward { head, bytes, at } = packet;
        let Hop::Fail { to, .. } = head.hop else { return };
        let Some(place) = self.asked_of(path, to, head.prefix.op) else {
            self.counts.late += 1;
            return;
        };
        let Some(transfer) = self.transfers.get(usize::from(place)) else { return };
        let Some(key) = &transfer.key else { return };
        let ivs = (head.prefix.iv, transfer.ask, &path.local);
        if open(&self.out.seal, key, (bytes, at), ivs).is_some() {
            self.release(place);
        } else {
            self.counts.forged += 1;
        }
    }

    /// The place of a transfer whose data was asked for.
    fn asked_of(&self, path: &CardPath, to: Handle, op: OneRmaOp) -> Option<u16> {
        let place = u16::try_from(to.index).ok()?;
        let transfer = self.transfers.get(usize::from(place))?;
        let same = transfer.generation == to.generation && transfer.op == op && transfer.path == *path;
        (same && transfer.state == TransferState::Asked).then_some(place)
    }

    /// A transfer ends; what still comes for it is late.
    fn release(&mut self, place: u16) {
        let Some(transfer) = self.transfers.get_mut(usize::from(place)) else { return };
        match transfer.state {
            TransferState::Unused => return,
            TransferState::Waiting => {
                self.waiting[of(transfer.class)].remove(&mut self.transfer_links, place);
                self.inbound.bytes = self.inbound.bytes.saturating_sub(transfer.size);
            }
            TransferState::Asked => {
                at_haste(&mut self.asked, transfer.haste).remove(&mut self.transfer_links, place);
                self.window.refund(transfer.size);
            }
        }
        (transfer.state, transfer.key) = (TransferState::Unused, None);
        transfer.generation = transfer.generation.wrapping_add(1);
        self.unused.push(&mut self.transfer_links, place);
    }

    /// The window had no room for a transfer in time.
    fn drop_waiting<E: OneRmaEnv>(&mut self, env: &mut E, place: u16) {
        let OneRmaCard { transfers, out, counts, .. } = self;
        let Some(transfer) = transfers.get(usize::from(place)) else { return };
        counts.nacks += 1;
        if let Some(key) = &transfer.key {
            let hop = Hop::Fail { to: transfer.from, status: Status::Nack };
            /* without a counter left the initiator times out */
            _ = out.send(env, &transfer.letter(key, hop, transfer.request));
        }
        self.release(place);
    }

    pub(super) fn expire_transfers<E: OneRmaEnv>(&mut self, env: &mut E, now: Nanos) {
        let due = |transfers: &[InboundTransfer<S::Key>], place: u16| {
            transfers.get(usize::from(place)).is_some_and(|transfer| now >= transfer.deadline)
        };
        for class in 0..self.waiting.len() {
            while let Some(place) = self.waiting[class].first().filter(|place| due(&self.transfers, *place)) {
                self.drop_waiting(env, place);
            }
        }
        for haste in 0..self.asked.len() {
            while let Some(place) = self.asked[haste].first().filter(|place| due(&self.transfers, *place)) {
                self.counts.transfer_timeouts += 1;
                self.release(place);
            }
        }
    }
}
