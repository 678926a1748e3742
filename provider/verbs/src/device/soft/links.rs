//! The port's state and the GID table's entries as the host's interfaces come and go
//! (ibv_get_async_event(3)).
//!
//! The table is that of the card's opening: an entry whose address the host has lost is empty, until the
//! address comes back. The port is active while an interface behind a real address of the card is up and has
//! a carrier; a card with addresses of loopback alone goes by those. Owns what is known of that, and who
//! gets the events; it must not send or receive frames.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use starverbs_backend::host::{self, Standing};
use starverbs_backend::{HostAddr, InterfaceWatch};

use crate::events::{FdQueue, VerbsEvent, kind};
use crate::log::log;

/// The one port.
const PORT: u8 = 1;

/// What is known of the card's interfaces.
pub(super) struct InterfaceTable {
    /// `None`: the host reports no changes
    watch: Option<InterfaceWatch>,
    known: Mutex<LinkStates>,
}

struct LinkStates {
    standing: Vec<Standing>,
    active: bool,
    /// A change that could not be looked at yet
    stale: bool,
    /// The queues of the card's contexts
    subscribers: Vec<Weak<FdQueue<VerbsEvent>>>,
}

impl InterfaceTable {
    /// Of a card that opens with these addresses.
    pub(super) fn new(addrs: &[HostAddr]) -> InterfaceTable {
        let watch = InterfaceWatch::open().ok();
        let all = vec![Standing { present: true, running: true }; addrs.len()];
        let links = InterfaceTable {
            watch,
            known: Mutex::new(LinkStates {
                standing: all,
                active: true,
                stale: true,
                subscribers: Vec::new(),
            }),
        };
        /* no subscriber yet: an interface that is up without a carrier is no event */
        links.refresh(addrs);
        links
    }

    fn known(&self) -> MutexGuard<'_, LinkStates> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What to wait for with `poll(2)`: then comes [`InterfaceTable::refresh`].
    pub(super) fn fd(&self) -> Option<RawFd> {
        self.watch.as_ref().map(InterfaceWatch::fd)
    }

    /// Sends the port's events to a context. False: no memory.
    pub(super) fn subscribe(&self, events: &Arc<FdQueue<VerbsEvent>>) -> bool {
        let mut known = self.known();
        known.subscribers.retain(|queue| queue.strong_count() > 0);
        let room = known.subscribers.try_reserve(1).is_ok();
        if room {
            known.subscribers.push(Arc::downgrade(events));
        }
        room
    }

    /// Whether the port is active.
    pub(super) fn active(&self, addrs: &[HostAddr]) -> bool {
        self.refresh(addrs);
        self.known().active
    }

    /// Whether the host has the address of a table's entry.
    pub(super) fn has(&self, addrs: &[HostAddr], index: usize) -> bool {
        self.refresh(addrs);
        self.known().standing.get(index).is_some_and(|standing| standing.present)
    }

    /// Looks at the interfaces if they may have changed, and notifies the contexts of changes.
    pub(super) fn refresh(&self, addrs: &[HostAddr]) {
        let Some(watch) = &self.watch else { return };
        let mut known = self.known();
        known.stale |= watch.take_news();
        if known.stale
            && let Ok(standing) = host::standing(addrs)
        {
            known.stale = false;
            known.change(addrs, standing);
        }
    }
}

impl LinkStates {
    fn change(&mut self, addrs: &[HostAddr], standing: Vec<Standing>) {
        let before = std::mem::replace(&mut self.standing, standing);
        let moved = before.iter().zip(&self.standing).any(|(old, new)| old.present != new.present);
        let active = is_active(addrs, &self.standing);
        if moved {
            log!(Info, "the GID table has changed");
            self.raise(kind::GID_CHANGE);
        }
        if active != self.active {
            self.active = active;
            log!(Warn, "the port is {}", if active { "active" } else { "down" });
            self.raise(if active { kind::PORT_ACTIVE } else { kind::PORT_ERR });
        }
    }

    fn raise(&self, kind: u32) {
        for queue in self.subscribers.iter().filter_map(Weak::upgrade) {
            queue.push(VerbsEvent::Port { kind, port: PORT });
        }
    }
}

fn is_active(addrs: &[HostAddr], standing: &[Standing]) -> bool {
    let only_loopback = addrs.iter().all(|addr| addr.loopback);
    let counts = |addr: &HostAddr| only_loopback || !addr.loopback;
    addrs.iter().zip(standing).any(|(addr, now)| counts(addr) && now.present && now.running)
}

#[cfg(test)]
mod tests {
    use super::*;
    use starverbs_core::Gid;

    #[test]
    fn the_port_goes_by_real_interfaces_if_there_are_any() {
        let addr = |loopback| HostAddr {
            gid: Gid::default(),
            ifindex: 1,
            link_mtu: 1500,
            name: "x0".to_owned(),
            loopback,
        };
        let (up, down) =
            (Standing { present: true, running: true }, Standing { present: true, running: false });
        let gone = Standing::default();
        assert!(is_active(&[addr(true)], &[up]) && !is_active(&[addr(true)], &[gone]));
        let both = [addr(false), addr(true)];
        assert!(
            is_active(&both, &[up, up]) && !is_active(&both, &[down, up]) && !is_active(&both, &[gone, up])
        );
        assert!(is_active(&[addr(false), addr(false)], &[gone, up]));
    }

    #[test]
    fn contexts_get_each_change_once() {
        let lo =
            HostAddr { gid: Gid::default(), ifindex: 1, link_mtu: 1, name: "lo".to_owned(), loopback: true };
        let links = InterfaceTable {
            watch: None,
            known: Mutex::new(LinkStates {
                standing: vec![Standing { present: true, running: true }],
                active: true,
                stale: false,
                subscribers: Vec::new(),
            }),
        };
        let queue = Arc::new(FdQueue::new().unwrap());
        assert!(links.subscribe(&queue));
        let kinds = |standing| {
            links.known().change(std::slice::from_ref(&lo), vec![standing]);
            let mut kinds = Vec::new();
            while !queue.is_empty() {
                let Ok(VerbsEvent::Port { kind, port: 1 }) = queue.pop() else { panic!("not of the port") };
                kinds.push(kind);
            }
            kinds
        };
        let (up, gone) = (Standing { present: true, running: true }, Standing::default());
        assert_eq!(kinds(up), []);
        assert_eq!(kinds(gone), [kind::GID_CHANGE, kind::PORT_ERR]);
        assert_eq!(kinds(gone), []);
        assert_eq!(kinds(Standing { present: true, running: false }), [kind::GID_CHANGE]);
        assert_eq!(kinds(up), [kind::PORT_ACTIVE]);
    }
}
