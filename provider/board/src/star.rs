//! StaR of the board: one card's, for the queue pairs of all functions.
//!
//! The board serves its stateless ends itself: what a host's library does beside a card in hardware happens
//! in the board, which has slot memory of its own ([`slots`](super::slots)). Packets to a stateless end name
//! addresses, and no keys: those of one function's connection reach that function's memory alone.
//!
//! Owns when the ports are opened, and which calls go to a queue pair that has left the card. It must not
//! know the protocol.

use starverbs_backend::star::{OpenError, Sealing, StarCard, StarHost, StarInfo, StarPort, StarRx};
use starverbs_backend::{BackendError, Payload, Woken};
use starverbs_core::qp::{EventOwner, QpAttr, QpAttrMask};
use starverbs_core::{Dma, FrameMeta, Mtu, NicError, PdId, QpState, Qpn, Seg, SrqId};
use starverbs_settings::{Settings, SettingsError, StarKey};
use starverbs_star::bounds::MemRange;
use starverbs_star::control::Preference;
use starverbs_star::env::{QpPair, SlEvent, StarDest, StarEnv};
use starverbs_star::host::{EndpointHost, InboundMessage, MadeSlots, Note};
use starverbs_star::seal::ControlSeal;
use starverbs_star::wire::StarHead;

use crate::context::owner_of;
use crate::dma::Errno;
use crate::env::{BoardEnv, client_address, is_null};
use crate::function::CommonCard;
use crate::queues::{BoardRq, BoardSq};
use crate::slots::{BoardSlots, SlotPlace};
use crate::stats::Stats;
use crate::wire::WireTx;

/// StaR, of a board that takes it.
pub(crate) struct BoardStar {
    /// With its key, not with the key's file
    settings: Settings,
    host: StarHost<BoardEnv>,
}

impl BoardStar {
    /// With ports as the settings say, which are not open yet.
    ///
    /// # Errors
    /// There is no key where the settings say.
    pub(crate) fn new(settings: &Settings) -> Result<BoardStar, SettingsError> {
        let star_key = settings.star_key.as_ref().map(StarKey::load).transpose()?.map(StarKey::Given);
        let settings = Settings { star_key, ..settings.clone() };
        Ok(BoardStar { settings, host: StarHost::default() })
    }

    /// Its ports and ends.
    pub(crate) fn host(&self) -> &StarHost<BoardEnv> {
        &self.host
    }
}

impl StarCard for BoardEnv {
    fn star(&self) -> Option<&StarPort<Stats>> {
        self.star.as_deref()
    }

    fn star_mut(&mut self) -> Option<&mut StarPort<Stats>> {
        self.star.as_deref_mut()
    }

    fn open_star(&mut self, settings: &Settings, sealing: Sealing) -> Result<StarRx<Stats>, BackendError> {
        let WireTx::Udp(tx) = &self.tx else { return Err(BackendError::NoAddress) };
        let (tx, rx) = tx.open_star(settings)?;
        self.star = Some(Box::new(StarPort::new(tx, sealing)));
        Ok(rx)
    }
}

impl StarEnv for BoardEnv {
    fn negotiate(&mut self, meta: &FrameMeta, qps: QpPair, message: &[u8]) -> bool {
        let Some(star) = &mut self.star else { return false };
        star.on_message(meta, qps, message);
        true
    }

    fn send_star(&mut self, to: StarDest<'_>, head: &StarHead, data: &[u8], payload: &[Seg], _: bool) {
        self.take_bounced();
        if let Some(star) = &mut self.star {
            /* Commands send, too, and may end the memory that an earlier one has sent from: it is copied at
             * once. */
            // SAFETY: the segments lie in maps, in copies of WQEs or in `bounce`, which are there during this
            // call, and are not looked at after it.
            star.send(to, head, data, unsafe { Payload::new(payload) }, true);
        }
    }

    fn note_star_mtu(&mut self, mtu: Mtu) {
        if let Some(star) = &mut self.star {
            star.tx.note_mtu(mtu);
        }
    }

    fn can_send_star(&self) -> bool {
        self.star.as_ref().is_some_and(|star| star.tx.can_send())
    }

    fn star_load(&mut self, addr: u64) -> Option<[u8; 8]> {
        let mut bytes = [0; 8];
        self.dma_copy(addr, &mut bytes).then_some(bytes)
    }

    fn is_of_program(&self, slots: u64, addr: u64) -> bool {
        let of_slots = SlotPlace::of(slots).map(|place| place.function);
        /* null regions are nobody's */
        is_null(addr) || of_slots.is_some() && client_address(addr).map(|(function, _)| function) == of_slots
    }

    fn may_keep(&self, queue: &BoardSq, bytes: usize) -> bool {
        queue.keep_for_peer(bytes)
    }

    fn star_event(&mut self, event: SlEvent) {
        if let Some(star) = &mut self.star {
            star.keep_event(event);
        }
    }
}

impl EndpointHost for BoardEnv {
    type Slots = BoardSlots;
    const SLOTS_APART: bool = true;

    fn make_slots(&mut self, bytes: u64, program: u64) -> Option<MadeSlots<BoardSlots>> {
        let (memory, addr) = self.make_area(bytes, usize::try_from(program).ok()?)?;
        Some(MadeSlots { memory, addr })
    }

    fn program_of(cookie: u64) -> u64 {
        let (function, _) = owner_of(cookie);
        function as u64
    }

    fn slots_of(queue: &BoardRq) -> u32 {
        queue.slots()
    }

    /* queue pairs whose inline bytes are too many for some packets are plain (`CommonCard::settle_roles`) */
    fn inline_memory(_: &BoardSq) -> Option<MemRange> {
        None
    }

    fn seal(&mut self) -> Option<&mut ControlSeal> {
        self.star.as_mut()?.seal()
    }

    fn next_event(&mut self) -> Option<SlEvent> {
        self.star.as_mut()?.next_event()
    }

    fn next_message(&mut self) -> Option<InboundMessage> {
        self.star.as_mut()?.next_message()
    }

    fn note(&mut self, qpn: Qpn, _: &Note) {
        self.settled.push(qpn);
    }
}

/// Queue pairs: one may be a stateless end, of which the card knows nothing.
impl CommonCard {
    /// Opens the ports of StaR, unless they are open. EOPNOTSUPP: this board takes none.
    pub(crate) fn open_star(&mut self) -> Result<(), Errno> {
        let CommonCard { nic, env, star, .. } = self;
        let star = star.as_mut().ok_or(libc::EOPNOTSUPP)?;
        if star.host.is_open() {
            return Ok(());
        }
        let sealing = Sealing::new(&star.settings).map_err(|_| libc::EIO)?;
        let opened = star.host.open(&star.settings, sealing, (nic, env));
        opened.map(drop).map_err(|error| match error {
            OpenError::Port(error) => error.errno(),
            OpenError::Card(error) => error.errno(),
        })
    }

    /// StaR's ports and ends, if they are open, and the card.
    fn star(&mut self) -> Option<(&mut StarHost<BoardEnv>, starverbs_backend::star::NicEnv<'_, BoardEnv>)> {
        let CommonCard { nic, env, star, .. } = self;
        let host = star.as_mut().map(|star| &mut star.host).filter(|host| host.is_open())?;
        Some((host, (nic, env)))
    }

    /// The same, to be looked at.
    pub(crate) fn star_host(&self) -> Option<&StarHost<BoardEnv>> {
        self.star.as_ref().map(|star| &star.host).filter(|host| host.is_open())
    }

    /// StaR's part of a turn; says how much there was to do. `woken`: all sockets are looked at.
    pub(crate) fn run_star(&mut self, woken: bool) -> u32 {
        let now = self.now;
        self.star().map_or(0, |(host, card)| host.run(card, now, woken.then_some(Woken(&[]))))
    }

    /// Its part of a round of sending. True: more is left.
    pub(crate) fn transmit_star(&mut self) -> bool {
        let now = self.now;
        self.star().is_some_and(|(host, card)| host.transmit(card, now, true))
    }

    /// The doorbell of a queue pair.
    pub(crate) fn ring(&mut self, qpn: Qpn) {
        let now = self.now;
        let rung = self.star().is_some_and(|(host, card)| host.ring(card, qpn, now));
        if !rung {
            self.nic.handle_doorbell(&mut self.env, qpn, now);
        }
    }

    /// The cell of a shared queue has changed: receives were posted, perhaps to one that was found empty.
    pub(crate) fn ring_srq(&mut self, srq: SrqId) {
        let now = self.now;
        /* a client may change its cell as often as it likes */
        if self.nic.srq_ring(srq).is_some_and(BoardRq::was_starved)
            && let Some((host, card)) = self.star()
        {
            host.ring_srq(card, srq, now);
        }
    }

    /// `ibv_modify_qp`
    pub(crate) fn modify_qp(&mut self, qpn: Qpn, to: &QpAttr, mask: QpAttrMask) -> Result<(), NicError> {
        let now = self.now;
        let done = self.star().and_then(|(host, card)| host.modify_qp(card, qpn, to, mask, now));
        done.unwrap_or_else(|| self.nic.modify_qp(&mut self.env, qpn, to, mask, now))
    }

    /// A queue pair of this preference has been moved to a state: its role is settled from RTR on.
    pub(crate) fn settle_roles(&mut self, qpn: Qpn, preference: Preference, state: QpState) {
        let now = self.now;
        let Some((host, (nic, env))) = self.star() else { return };
        host.move_qp((&mut *nic, &mut *env), qpn, state, now);
        if state == QpState::Rtr {
            host.settle_roles((nic, env), qpn, preference, now);
        }
    }

    /// The program of a queue pair has another preference. EOPNOTSUPP: its peer has no StaR, or it takes from
    /// an SRQ; EINVAL: it is in no state for that.
    pub(crate) fn change_preference(&mut self, qpn: Qpn, preference: Preference) -> Result<(), Errno> {
        let now = self.now;
        match self.query_qp(qpn).map_err(|error| error.errno())?.state {
            QpState::Reset | QpState::Init => Ok(()),
            QpState::Rtr | QpState::Rts => {
                let asked = self
                    .star()
                    .is_some_and(|(host, card)| host.change_preference(card, qpn, preference, now));
                if asked { Ok(()) } else { Err(libc::EOPNOTSUPP) }
            }
            QpState::Sqd | QpState::Sqe | QpState::Err => Err(libc::EINVAL),
        }
    }

    /// `ibv_query_qp`
    pub(crate) fn query_qp(&self, qpn: Qpn) -> Result<QpAttr, NicError> {
        let stateless = self.star_host().and_then(|host| host.query_qp(qpn));
        stateless.map_or_else(|| self.nic.query_qp(qpn), Ok)
    }

    /// What has become of a queue pair that was made with this preference. EOPNOTSUPP: this board takes no
    /// StaR.
    pub(crate) fn star_info(&self, qpn: Qpn, preference: Option<Preference>) -> Result<StarInfo, Errno> {
        let star = self.star.as_ref().ok_or(libc::EOPNOTSUPP)?;
        Ok(star.host.info(&self.nic, qpn, preference))
    }

    /// The stateless peer of a queue pair that is to be destroyed is told what is done.
    pub(crate) fn report(&mut self, qpn: Qpn) {
        let now = self.now;
        if let Some((host, card)) = self.star() {
            host.report(card, qpn, now);
        }
    }

    /// Whether that peer has not answered.
    pub(crate) fn owes(&self, qpn: Qpn) -> bool {
        self.star_host().is_some() && StarHost::owes(&self.nic, qpn, self.now)
    }

    /// All these queue pairs are about to be destroyed.
    pub(crate) fn prepare_to_end(&mut self, qpns: impl Iterator<Item = Qpn>) {
        if let Some((host, _)) = self.star() {
            host.prepare_to_end(qpns);
        }
    }

    /// `ibv_destroy_qp`
    pub(crate) fn destroy_qp(&mut self, qpn: Qpn) -> Result<(), NicError> {
        let now = self.now;
        if let Some((host, card)) = self.star() {
            host.forget(qpn);
            if host.destroy_qp(card, qpn, now) {
                return Ok(());
            }
        }
        self.nic.destroy_qp(&mut self.env, qpn)
    }

    /// Whose a queue pair is.
    pub(crate) fn qp_owner(&self, qpn: Qpn) -> Option<EventOwner> {
        self.nic.qp_owner(qpn).or_else(|| self.star_host()?.owner(qpn))
    }

    /// Registers what a key opens by `open`, which `undo` undoes; stateful peers hear of it.
    pub(crate) fn open_key(
        &mut self,
        open: impl FnOnce(&mut starverbs_core::Nic<BoardEnv>) -> Result<u32, NicError>,
    ) -> Result<u32, NicError> {
        let now = self.now;
        match self.star() {
            Some((host, card)) => host.open_key(card, now, open, |nic, key| nic.dereg_mr(key)),
            None => open(&mut self.nic),
        }
    }

    /// Keys were opened or closed: stateful peers hear of it. A key: some may still use what it opened.
    pub(crate) fn follow_memory(&mut self) -> Option<u32> {
        let now = self.now;
        self.star().and_then(|(host, card)| host.follow_memory(card, now))
    }

    /// Whether no stateful peer reaches for what `closed` opened, and all know the memory of `opened`.
    pub(crate) fn is_memory_settled(&self, closed: Option<u32>, opened: Option<PdId>) -> bool {
        self.star_host().is_none_or(|host| host.is_revoked(closed) && host.is_known(opened))
    }
}
