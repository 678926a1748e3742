//! Multicast groups: which QPs are attached to which, and what comes to them (IBTA 10.5).
//!
//! A datagram to the multicast QPN is copied to each QP that is attached to the group it was sent to. Joining
//! a group on the wire is the host's: it is asked when a group gets its first QP, and notified when the last
//! is gone. The table is searched for multicast frames alone.

use alloc::vec::Vec;

use super::Nic;
use crate::env::Env;
use crate::error::NicError;
use crate::transport::Ctx;
use crate::types::{FrameMeta, Gid, Nanos, QpType, Qpn};
use crate::wire::{Packet, Transport};

/// Most QPs that a group may have (`max_mcast_qp_attach`).
pub const MAX_GROUP_QPS: usize = 256;

/// The groups with a QP in them, in the order of their GIDs.
#[derive(Default)]
pub(crate) struct Groups(Vec<Group>);

struct Group {
    gid: Gid,
    qps: Vec<Qpn>,
}

impl Groups {
    fn find(&self, gid: &Gid) -> Result<usize, usize> {
        self.0.binary_search_by(|group| group.gid.cmp(gid))
    }

    /// Whether `qpn` is attached to any group.
    pub(super) fn holds(&self, qpn: Qpn) -> bool {
        self.0.iter().any(|group| group.qps.contains(&qpn))
    }
}

impl<E: Env> Nic<E> {
    /// `ibv_attach_mcast`: what is sent to the multicast address `group` reaches `qpn` too. Attaching a
    /// second time changes nothing. `join` is called when the group is new to the card, and nothing is
    /// changed if it fails.
    ///
    /// # Errors
    /// `Invalid`: not a UD QP, or not a multicast address; `Exhausted`: the card has as many groups, or the
    /// group as many QPs, as it may; those of `join`.
    pub fn attach_multicast<X: From<NicError>>(
        &mut self,
        qpn: Qpn,
        group: Gid,
        join: impl FnOnce() -> Result<(), X>,
    ) -> Result<(), X> {
        let qp = self.qps.get(qpn).ok_or(NicError::NotFound)?;
        if qp.qp_type != QpType::Ud || !group.is_multicast() {
            return Err(NicError::Invalid.into());
        }
        let groups = &mut self.groups;
        match groups.find(&group) {
            Ok(at) => {
                let qps = &mut groups.0[at].qps;
                if !qps.contains(&qpn) {
                    if qps.len() >= MAX_GROUP_QPS {
                        return Err(NicError::Exhausted.into());
                    }
                    qps.push(qpn);
                }
            }
            Err(_) if groups.0.len() >= self.shared.cfg.max_groups as usize => {
                return Err(NicError::Exhausted.into());
            }
            Err(at) => {
                join()?;
                groups.0.insert(at, Group { gid: group, qps: Vec::from([qpn]) });
            }
        }
        Ok(())
    }

    /// `ibv_detach_mcast`. `leave` is called when `qpn` was the group's last QP.
    ///
    /// # Errors
    /// `Invalid`: it is not attached to `group`.
    pub fn detach_multicast(&mut self, qpn: Qpn, group: &Gid, leave: impl FnOnce()) -> Result<(), NicError> {
        let at = self.groups.find(group).map_err(|_| NicError::Invalid)?;
        let qps = &mut self.groups.0[at].qps;
        let place = qps.iter().position(|q| *q == qpn).ok_or(NicError::Invalid)?;
        qps.remove(place);
        if qps.is_empty() {
            self.groups.0.remove(at);
            leave();
        }
        Ok(())
    }

    /// Detaches a QP that is about to end from all groups; `leave` is called for those that have no QP now.
    pub fn detach_from_all(&mut self, qpn: Qpn, mut leave: impl FnMut(Gid)) {
        self.groups.0.retain_mut(|group| {
            group.qps.retain(|q| *q != qpn);
            if group.qps.is_empty() {
                leave(group.gid);
            }
            !group.qps.is_empty()
        });
    }

    /// A frame to the multicast QPN: a copy to each QP of its group. It is never answered, and never for a QP
    /// that it names itself, as its source does not know who there is.
    #[cold]
    pub(super) fn receive_multicast(
        &mut self,
        env: &mut E,
        now: Nanos,
        meta: &FrameMeta,
        packet: &Packet<'_>,
    ) {
        let Nic { qps, shared, groups, .. } = self;
        /* Only datagrams may go to a group (IBTA 9.6.1.4); nobody is a member of an address that is none. */
        let group = groups.find(&meta.dst).ok().filter(|_| packet.op().transport == Transport::Ud);
        let Some(group) = group.map(|at| &groups.0[at]) else {
            return shared.stats.drop_multicast.inc();
        };
        let from = packet.deth().map(|deth| deth.src_qp());
        for qpn in &group.qps {
            let Some(qp) = qps.get_mut(*qpn) else { continue };
            if qp.block_own && from == Some(qp.qpn) && env.is_own(&meta.src) {
                continue;
            }
            shared.stats.rx_multicast.inc();
            Ctx { qp, sh: shared, env, now }.receive(meta, packet);
        }
    }
}
