//! Commands about memory: what keys open, and the wait until nobody uses what they opened before.
//!
//! The card's table is what all go by: packets, stateful peers of StaR, who are told of its changes, and
//! processes of this host, who read it. A key that is closed is closed for all at once; then comes the wait
//! for those who had looked before.

use starverbs_core::mr::MrAttr;
use starverbs_core::{Nanos, Nic, NicError, PdId};

use super::env::HostEnv;
use super::{Shard, Soft};
use crate::error::{Result, VerbsError};
use crate::share::Foreign;

type NicResult<T> = std::result::Result<T, NicError>;

/// What a change does to keys.
#[derive(Clone, Copy)]
enum KeyEffect {
    /// It opens one, and closes none
    Opens,
    /// It closes one, or narrows what one opens
    Closes,
}

impl Soft {
    /// Registers memory.
    pub(super) fn reg_mr(&self, attr: MrAttr) -> Result<u32> {
        self.change_memory(Some(attr.pd), KeyEffect::Opens, |shard, now| {
            let Shard { nic, env, star, .. } = shard;
            let key = star.open_key((nic, env), now, |nic| nic.reg_mr(attr), Nic::dereg_mr);
            key.map(|key| (key, None))
        })
    }

    /// Changes what a key opens.
    pub(super) fn rereg_mr(&self, key: u32, attr: MrAttr) -> Result<()> {
        self.change_memory(Some(attr.pd), KeyEffect::Closes, |shard, now| {
            shard.nic.rereg_mr(key, attr)?;
            Ok(((), shard.star.follow_memory((&mut shard.nic, &mut shard.env), now)))
        })
    }

    pub(super) fn query_mr(&self, key: u32) -> Result<MrAttr> {
        let attr = self.with(|shard, _| shard.nic.query_mr(key));
        attr.ok_or(VerbsError::Card(NicError::NotFound))
    }

    /// Ends what a key opens by `end`.
    pub(super) fn end_key<T>(&self, end: impl FnOnce(&mut Shard) -> NicResult<T>) -> Result<T> {
        self.change_memory(None, KeyEffect::Closes, |shard, now| {
            let ended = end(shard)?;
            Ok((ended, shard.star.follow_memory((&mut shard.nic, &mut shard.env), now)))
        })
    }

    /// Opens another process's memory under the key that it has there.
    pub(super) fn import_mr(&self, key: u32, attr: MrAttr, memory: Foreign) -> Result<MrAttr> {
        let addr = self.with(|shard, _| shard.env.foreign.add(memory))?;
        let attr = MrAttr { addr, ..attr };
        let opened = self.change_memory(Some(attr.pd), KeyEffect::Opens, |shard, now| {
            let import = |nic: &mut Nic<HostEnv>| nic.import_mr(key, attr).map(|()| key);
            let Shard { nic, env, star, .. } = shard;
            star.open_key((nic, env), now, import, Nic::unimport_mr).map(|key| (key, None))
        });
        match opened {
            Ok(_) => Ok(attr),
            Err(error) => {
                self.with(|shard, _| shard.env.foreign.remove(addr));
                Err(error)
            }
        }
    }

    pub(super) fn unimport_mr(&self, key: u32, addr: u64) -> Result<()> {
        self.end_key(|shard| {
            let ended = shard.nic.unimport_mr(key);
            shard.env.foreign.remove(addr);
            ended
        })
    }

    /// The barrier behind all that is closed or withdrawn: waits until nobody uses it who looked before.
    /// `closed`, `opened`: what stateful peers of StaR have not acknowledged yet; they are asked by key, and
    /// only where there is such a key. Readers of this host are waited for always, by whatever they got in:
    /// a region, a window, names of a context, or a queue pair's gate. Those latter have no key of StaR, so
    /// that there is nothing to ask its peers for.
    pub(super) fn await_revoked(&self, closed: Option<u32>, opened: Option<PdId>) {
        if closed.is_some() || opened.is_some() {
            self.await_memory(closed, opened);
        }
        if let Some(published) = &self.published {
            published.await_readers();
        }
    }

    /// Changes the table of memory by `change`, which has its followers hear of it and gives the key that
    /// `StarHost::follow_memory` gave. When this returns, stateful cards use nothing of what was closed any
    /// more, and know what is open in `opened`: the program may tell theirs its key by another way than ours.
    fn change_memory<T>(
        &self,
        opened: Option<PdId>,
        kind: KeyEffect,
        change: impl FnOnce(&mut Shard, Nanos) -> NicResult<(T, Option<u32>)>,
    ) -> Result<T> {
        let (done, closed, told) = self.with(|shard, now| {
            let (done, closed) = change(shard, now)?;
            Ok::<_, NicError>((done, closed, shard.star.is_known(opened)))
        })?;
        let waits = closed.is_some() || !told;
        match kind {
            KeyEffect::Closes => self.await_revoked(closed, opened.filter(|_| waits)),
            /* only StaR's part: nothing was closed that a reader of this host could use */
            KeyEffect::Opens if waits => self.await_memory(closed, opened),
            KeyEffect::Opens => {}
        }
        Ok(done)
    }
}
