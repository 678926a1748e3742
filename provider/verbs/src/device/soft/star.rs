//! StaR in a process: when its ports are opened, and the calls of programs that wait for peers.
//!
//! What its ports and the ends behind them do is the [backend's](starverbs_backend::star), what packets are
//! for the [core's](starverbs_star::host). It must not know what a queue pair is to a program.

pub(crate) mod port;

use starverbs_backend::Woken;
use starverbs_backend::star::{PATIENCE, Sealing};
use starverbs_core::{Nanos, Nic, PdId, Qpn};

use super::env::HostEnv;
use super::{Shard, Soft};
use crate::clock;
use crate::device::thread::pollfd;
use crate::error::Result;

/// Longest sleep between two looks, milliseconds.
const LOOK: i32 = 1;

/// What a process has of StaR beside its card.
pub(crate) type StarHost = starverbs_backend::star::StarHost<HostEnv>;

impl Soft {
    /// What [`Soft::open_star`] needs. Whoever has the card's lock does not wait for a file. `None`: the
    /// ports are open.
    pub(crate) fn prepare_star(&self) -> Result<Option<Sealing>> {
        if self.with(|shard, _| shard.star.is_open()) {
            Ok(None)
        } else {
            Ok(Some(Sealing::new(&self.settings)?))
        }
    }

    /// Opens the ports of StaR, unless they are open.
    pub(crate) fn open_star(&self, shard: &mut Shard, sealing: Sealing) -> Result<()> {
        let Shard { nic, env, star, .. } = shard;
        if star.open(&self.settings, sealing, (nic, env))? {
            self.thread.kick_if_armed();
        }
        Ok(())
    }

    /// Waits until no stateful card reaches for what a key opened that is closed, and all know the memory of
    /// a protection domain: StaR's part of [`Soft::await_revoked`].
    #[cold]
    pub(crate) fn await_memory(&self, closed: Option<u32>, opened: Option<PdId>) {
        self.await_answers(|star, _, _| star.is_revoked(closed) && star.is_known(opened));
    }

    /// A QP is to be destroyed: waits until its stateless peer has all completions that this card has for it,
    /// and knows what else is done.
    #[cold]
    pub(crate) fn await_taken(&self, qpn: Qpn) {
        self.with(|shard, now| shard.star.report((&mut shard.nic, &mut shard.env), qpn, now));
        self.await_answers(|_, nic, now| !StarHost::owes(nic, qpn, now));
    }

    /// Runs this card until its peers have answered, or are silent for too long.
    #[cold]
    fn await_answers(&self, answered: impl Fn(&StarHost, &Nic<HostEnv>, Nanos) -> bool) {
        let until = clock::now().saturating_add(PATIENCE);
        loop {
            let (done, mut fds) = self.with(|shard, now| {
                shard.star.run((&mut shard.nic, &mut shard.env), now, Some(Woken(&[])));
                shard.run_timers(now);
                let done = !shard.star.is_open() || answered(&shard.star, &shard.nic, now);
                (done, shard.star.fds().map(pollfd).collect::<Vec<_>>())
            });
            if done || clock::now() >= until {
                return;
            }
            // SAFETY: as many pollfds as are said, alive across the call.
            unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, LOOK) };
        }
    }
}
