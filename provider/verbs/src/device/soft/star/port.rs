//! What StaR needs of the card's host: its ports, and memory of this process.

use std::sync::atomic::{AtomicU64, Ordering};

use starverbs_backend::star::{Sealing, StarCard, StarPort, StarRx};
use starverbs_backend::{BackendError, Payload};
use starverbs_core::{FrameMeta, Mtu, Qpn, Seg};
use starverbs_rings::{CardRq, CardSq, SendMemory};
use starverbs_settings::Settings;
use starverbs_star::bounds::MemRange;
use starverbs_star::control::Role;
use starverbs_star::env::{QpPair, SlEvent, StarDest, StarEnv};
use starverbs_star::host::{EndpointHost, InboundMessage, MadeSlots, Note};
use starverbs_star::message::SMALL_INLINE;
use starverbs_star::ring::CQE_SLOT;
use starverbs_star::seal::ControlSeal;
use starverbs_star::wire::StarHead;

use crate::device::soft::env::HostEnv;
use crate::log::log;
use crate::memory::{self, Marked};
use crate::stat::StatPage;

impl StarCard for HostEnv {
    #[inline]
    fn star(&self) -> Option<&StarPort<StatPage>> {
        self.star.as_deref()
    }

    #[inline]
    fn star_mut(&mut self) -> Option<&mut StarPort<StatPage>> {
        self.star.as_deref_mut()
    }

    fn open_star(&mut self, settings: &Settings, sealing: Sealing) -> Result<StarRx<StatPage>, BackendError> {
        let (tx, rx) = self.tx.open_star(settings)?;
        self.star = Some(Box::new(StarPort::new(tx, sealing)));
        Ok(rx)
    }
}

impl StarEnv for HostEnv {
    fn negotiate(&mut self, meta: &FrameMeta, qps: QpPair, message: &[u8]) -> bool {
        let Some(star) = &mut self.star else { return false };
        star.on_message(meta, qps, message);
        true
    }

    #[inline]
    fn send_star(&mut self, to: StarDest<'_>, head: &StarHead, data: &[u8], payload: &[Seg], volatile: bool) {
        let volatile = self.is_volatile(volatile);
        if let Some(star) = &mut self.star {
            // SAFETY: as in `Port::send_frame`; the peer's registry checked what this card did not.
            star.send(to, head, data, unsafe { Payload::new(payload) }, volatile);
        }
    }

    fn note_star_mtu(&mut self, mtu: Mtu) {
        if let Some(star) = &mut self.star {
            star.tx.note_mtu(mtu);
        }
    }

    #[inline]
    fn can_send_star(&self) -> bool {
        self.star.as_ref().is_some_and(|star| star.tx.can_send())
    }

    #[inline]
    fn star_load(&mut self, addr: u64) -> Option<[u8; 8]> {
        if memory::marked(addr) {
            let mut bytes = [0; 8];
            let there = memory::mark(addr) == Marked::Demand && memory::read(addr, &mut bytes);
            return there.then_some(bytes);
        }
        // SAFETY: as in `dma_store`: a token of this card names it, or its bounds let it through, so it is
        // aligned memory that the host or the program keeps.
        let cell = unsafe { AtomicU64::from_ptr(addr as *mut u64) };
        Some(cell.load(Ordering::Acquire).to_ne_bytes())
    }

    #[inline]
    fn star_event(&mut self, event: SlEvent) {
        if let Some(star) = &mut self.star {
            star.keep_event(event);
        }
    }
}

/// A slot of a stateless end, as a card fills it.
#[repr(align(32))]
pub(crate) struct CompletionSlot {
    _words: [AtomicU64; CQE_SLOT as usize / size_of::<u64>()],
}

impl EndpointHost for HostEnv {
    type Slots = Box<[CompletionSlot]>;

    fn make_slots(&mut self, bytes: u64, _: u64) -> Option<MadeSlots<Box<[CompletionSlot]>>> {
        const { assert!(size_of::<CompletionSlot>() as u64 == CQE_SLOT) };
        let count = bytes.div_ceil(CQE_SLOT) as usize;
        let mut slots = Vec::new();
        slots.try_reserve_exact(count).ok()?;
        slots.resize_with(count, || CompletionSlot { _words: Default::default() });
        let memory = slots.into_boxed_slice();
        let addr = memory.as_ptr() as u64;
        Some(MadeSlots { memory, addr })
    }

    fn slots_of(queue: &CardRq) -> u32 {
        queue.slots()
    }

    fn inline_memory(queue: &CardSq) -> Option<MemRange> {
        (queue.max_inline() as usize > SMALL_INLINE).then(|| {
            let SendMemory { addr, len } = queue.memory();
            MemRange { addr, len }
        })
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

    fn note(&mut self, qpn: Qpn, what: &Note) {
        match what {
            Note::Unsuited(refused) => {
                log!(Info, "queue pair {qpn:#x}: plain RoCEv2, as StaR is not for it ({refused})");
            }
            Note::Plain => log!(Debug, "queue pair {qpn:#x}: plain RoCEv2"),
            Note::Alone => log!(Debug, "queue pair {qpn:#x}: plain RoCEv2, as its peer does not begin"),
            Note::Stays => log!(Debug, "queue pair {qpn:#x}: stays what it was"),
            Note::Reverts => log!(Debug, "queue pair {qpn:#x}: plain RoCEv2 again while it runs"),
            Note::Leaves => log!(Debug, "queue pair {qpn:#x}: leaves plain RoCEv2 while it runs"),
            Note::Begun(Role::Stateless) => log!(Debug, "queue pair {qpn:#x}: stateless end"),
            Note::Begun(Role::Stateful) => log!(Debug, "queue pair {qpn:#x}: stateful end"),
            Note::Failed(error) => log!(Warn, "queue pair {qpn:#x}: {error}"),
        }
    }
}
