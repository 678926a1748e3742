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

impl Soft {
    /// Registers memory.
    pub(super) fn reg_mr(&self, attr: MrAttr) -> Result<u32> {
        self.change_memory(Some(attr.pd), |shard, now| {
            shard.open_key(now, |nic| nic.reg_mr(attr), Nic::dereg_mr).map(|key| (key, None))
        })
    }

    /// Changes what a key opens.
    pub(super) fn rereg_mr(&self, key: u32, attr: MrAttr) -> Result<()> {
        self.change_memory(Some(attr.pd), |shard, now| {
            shard.nic.rereg_mr(key, attr)?;
            Ok(((), shard.follow_memory(now)))
        })?;
        self.await_readers();
        Ok(())
    }

    pub(super) fn query_mr(&self, key: u32) -> Result<MrAttr> {
        let attr = self.with(|shard, _| shard.nic.query_mr(key));
        attr.ok_or(VerbsError::Card(NicError::NotFound))
    }

    /// Ends what a key opens by `end`.
    pub(super) fn end_key<T>(&self, end: impl FnOnce(&mut Shard) -> NicResult<T>) -> Result<T> {
        let ended = self.change_memory(None, |shard, now| {
            let ended = end(shard)?;
            Ok((ended, shard.follow_memory(now)))
        })?;
        self.await_readers();
        Ok(ended)
    }

    /// Opens another process's memory under the key that it has there.
    pub(super) fn import_mr(&self, key: u32, attr: MrAttr, memory: Foreign) -> Result<MrAttr> {
        let addr = self.with(|shard, _| shard.env.foreign.add(memory))?;
        let attr = MrAttr { addr, ..attr };
        let opened = self.change_memory(Some(attr.pd), |shard, now| {
            let import = |nic: &mut Nic<HostEnv>| nic.import_mr(key, attr).map(|()| key);
            shard.open_key(now, import, Nic::unimport_mr).map(|key| (key, None))
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

    /// Waits until no other process of the host uses what was closed or withdrawn before.
    pub(super) fn await_readers(&self) {
        if let Some(published) = &self.published {
            published.await_readers();
        }
    }

    /// Changes the table of memory by `change`, which has its followers hear of it and gives the key that
    /// [`Shard::follow_memory`] gave. When this returns, stateful cards use nothing of what was closed any
    /// more, and know what is open in `opened`: the program may tell theirs its key by another way than ours.
    fn change_memory<T>(
        &self,
        opened: Option<PdId>,
        change: impl FnOnce(&mut Shard, Nanos) -> NicResult<(T, Option<u32>)>,
    ) -> Result<T> {
        let (done, closed, told) = self.with(|shard, now| {
            let (done, closed) = change(shard, now)?;
            Ok::<_, NicError>((done, closed, shard.is_known(opened)))
        })?;
        if closed.is_some() || !told {
            self.await_memory(closed, opened);
        }
        Ok(done)
    }
}

impl Shard {
    /// Opens a key; whoever follows the table hears of it. `Exhausted`: there is no memory for that; it is
    /// closed again, by `undo`.
    fn open_key(
        &mut self,
        now: Nanos,
        open: impl FnOnce(&mut Nic<HostEnv>) -> NicResult<u32>,
        undo: impl FnOnce(&mut Nic<HostEnv>, u32) -> NicResult<()>,
    ) -> NicResult<u32> {
        let key = open(&mut self.nic)?;
        self.follow_memory(now);
        if self.has_star() && self.nic.memory().rule(key).is_none() {
            /* nobody heard of the key, so nobody need hear that it is closed */
            undo(&mut self.nic, key)?;
            return Err(NicError::Exhausted);
        }
        Ok(key)
    }
}
