//! What stateful cards are told of this process's memory: all rules of a protection domain once to each card, whoever of its connections says
//! them, and the end of a rule before memory is given back.
//!
//! Connections between the same two addresses and of the same domain are a group. One of them is its teller; when that one is gone another
//! says again what had no answer. WQEs of the whole group wait while a rule has none, as they may name it.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::error::NicError;
use crate::mr::Change;
use crate::star::control::{Control, Rule, Sum};
use crate::types::{Gid, PdId};
use slab::Slab;

use super::super::{Host, Turn};
use super::Library;

/// Which connections share what they say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GroupKey {
    /// Addresses of this end and of the other
    pub(super) ends: [Gid; 2],
    /// Life of the other end's card
    pub(super) boot: u64,
    /// Protection domain
    pub(super) pd: PdId,
}

struct Group {
    key: GroupKey,
    members: Vec<u32>,
    /// Who says it
    teller: Option<u32>,
    /// Rules that have no answer: the members' WQEs wait
    untold: Arc<AtomicU32>,
    /// Keys taken away, until the other end has answered
    revoked: Vec<u32>,
}

/// What was said, and by whom.
#[derive(Default)]
pub(super) struct Rules {
    groups: Slab<Group>,
    /// Of each protection domain
    sums: BTreeMap<PdId, Sum>,
}

impl Rules {
    pub(super) fn note(&mut self, rule: &Rule) {
        self.sums.entry(rule.pd).or_default().add(rule);
    }

    fn forget(&mut self, rule: &Rule) {
        if let Some(sum) = self.sums.get_mut(&rule.pd) {
            sum.remove(rule);
            if sum.rules == 0 {
                self.sums.remove(&rule.pd);
            }
        }
    }

    /// A connection that is about to begin joins its group, without being in it yet: gives the group, and what the other end's card has been
    /// told, if there is somebody who told it. `Exhausted`: no memory.
    pub(super) fn join(&mut self, key: GroupKey) -> Result<(usize, Option<Sum>, Arc<AtomicU32>), NicError> {
        let known = self.groups.iter().find(|(_, group)| group.key == key).map(|(at, _)| at);
        let at = known.unwrap_or_else(|| {
            let (members, untold, revoked) = (Vec::new(), Arc::default(), Vec::new());
            self.groups.insert(Group { key, members, teller: None, untold, revoked })
        });
        let group = &mut self.groups[at];
        group.members.try_reserve(1).map_err(|_| NicError::Exhausted)?;
        let sum = group.teller.map(|_| self.sums.get(&key.pd).copied().unwrap_or_default());
        Ok((at, sum, Arc::clone(&group.untold)))
    }

    /// It has begun.
    pub(super) fn add_member(&mut self, group: usize, member: u32) {
        if let Some(group) = self.groups.get_mut(group) {
            group.members.push(member);
            group.teller.get_or_insert(member);
        }
    }

    fn of_domain(&self, pd: PdId) -> Vec<usize> {
        self.groups.iter().filter(|(_, group)| group.key.pd == pd).map(|(at, _)| at).collect()
    }
}

impl<E: Host> Library<E> {
    /// Memory is registered, or a window bound.
    pub fn add_rule(&mut self, turn: &mut Turn<'_, E>, rule: &Rule) {
        self.bounds.add(rule.addr, rule.len, rule.access);
        self.rules.note(rule);
        for at in self.rules.of_domain(rule.pd) {
            self.tell(turn, at, Control::Rule(*rule));
        }
    }

    /// It no longer is. The card lets no packet reach it from now on; [`is_revoked`](Library::is_revoked) says when no card tries any more.
    pub fn remove_rule(&mut self, turn: &mut Turn<'_, E>, rule: &Rule) {
        self.bounds.remove(rule.addr, rule.len, rule.access);
        self.rules.forget(rule);
        for at in self.rules.of_domain(rule.pd) {
            let group = &mut self.rules.groups[at];
            /* one that there is no memory for is not waited for */
            if group.teller.is_some() && group.revoked.try_reserve(1).is_ok() {
                group.revoked.push(rule.key);
            }
            self.tell(turn, at, Control::Unrule { key: rule.key });
        }
    }

    /// Whether all stateful cards have answered that they know the key no longer.
    pub fn is_revoked(&self, key: u32) -> bool {
        !self.rules.groups.iter().any(|(_, group)| group.revoked.contains(&key))
    }

    /// Whether all stateful cards have answered that they know the memory of a protection domain.
    pub fn is_told(&self, pd: PdId) -> bool {
        self.of_this(pd).all(|group| group.untold.load(Ordering::Relaxed) == 0)
    }

    /// Whether they have also answered that they know no longer what was taken away.
    pub(super) fn is_settled(&self, pd: PdId) -> bool {
        self.is_told(pd) && self.of_this(pd).all(|group| group.revoked.is_empty())
    }

    fn of_this(&self, pd: PdId) -> impl Iterator<Item = &Group> {
        self.rules.groups.iter().map(|(_, group)| group).filter(move |group| group.key.pd == pd)
    }

    /// Windows were bound, or are bound no longer; gives the key of the last of the latter.
    pub(super) fn follow_windows(&mut self, turn: &mut Turn<'_, E>) -> Option<u32> {
        let mut ended = None;
        for change in turn.nic.memory().take_changes() {
            match change {
                Change::Bound(rule) => self.add_rule(turn, &rule),
                Change::Unbound(rule) => {
                    self.remove_rule(turn, &rule);
                    ended = Some(rule.key);
                }
            }
        }
        ended
    }

    fn tell(&mut self, turn: &mut Turn<'_, E>, group: usize, what: Control) {
        let teller = self.rules.groups.get(group).and_then(|group| group.teller);
        if let Some(teller) = teller
            && let Some(end) = self.ends.get_mut(teller as usize)
        {
            end.qp.tell(turn.env, turn.now, what);
            let given = end.qp.changes().given;
            if let Some(group) = self.rules.groups.get(group) {
                /* nobody takes it for answered before the teller's turn is over */
                group.untold.fetch_max(given, Ordering::Relaxed);
            }
            self.settle(turn, teller);
        }
    }

    /// After a call of a QP: what it has said for its group, and whether it still can.
    pub(super) fn follow_teller(&mut self, turn: &mut Turn<'_, E>, at: u32) {
        let Some(end) = self.ends.get(at as usize) else { return };
        let group_at = end.group;
        let changes = end.qp.changes();
        let heard = end.qp.is_heard();
        let Some(group) = self.rules.groups.get_mut(group_at) else { return };
        match group.teller {
            /* there was nobody to tell anything, and SF's first answer has come */
            None if heard => group.teller = Some(at),
            Some(teller) if teller == at => {}
            _ => return,
        }
        if !heard {
            return self.find_teller(turn, group_at);
        }
        let mut answered = changes.taken == 0 && !group.revoked.is_empty();
        if answered {
            group.revoked.clear();
        }
        let before = group.untold.swap(changes.given, Ordering::Relaxed);
        if before > 0 && changes.given == 0 {
            answered = true;
            self.wake_group(group_at);
        }
        if answered {
            self.wake_patient();
        }
    }

    fn wake_group(&mut self, group: usize) {
        let Some(group) = self.rules.groups.get(group) else { return };
        for at in &group.members {
            if let Some(end) = self.ends.get_mut(*at as usize).filter(|end| !end.queued) {
                end.queued = true;
                self.ready.push_back(*at);
            }
        }
    }

    /// Those go on whose change of a window was to be known first.
    fn wake_patient(&mut self) {
        for at in core::mem::take(&mut self.patient) {
            if let Some(end) = self.ends.get_mut(at as usize).filter(|end| !end.queued) {
                end.queued = true;
                self.ready.push_back(at);
            }
        }
    }

    /// A member of a group ends.
    pub(super) fn leave_group(&mut self, turn: &mut Turn<'_, E>, group_at: usize, at: u32) {
        let Some(group) = self.rules.groups.get_mut(group_at) else { return };
        group.members.retain(|member| *member != at);
        if group.teller == Some(at) {
            self.find_teller(turn, group_at);
        }
        if self.rules.groups.get(group_at).is_some_and(|group| group.members.is_empty()) {
            self.rules.groups.remove(group_at);
        }
    }

    /// The teller is gone, or nobody hears it: another says what may have had no answer, one of those that SF answers if there is one.
    fn find_teller(&mut self, turn: &mut Turn<'_, E>, group_at: usize) {
        let Some(group) = self.rules.groups.get(group_at) else { return };
        let members = || group.members.iter().copied();
        let next = members().find(|member| self.is_ready(*member));
        let next = next.or_else(|| members().find(|member| self.is_heard(*member)));
        if let Some(end) = group.teller.and_then(|before| self.ends.get_mut(before as usize)) {
            end.qp.untell();
        }
        let group = &mut self.rules.groups[group_at];
        group.teller = next;
        let untold = group.untold.swap(0, Ordering::Relaxed);
        let Some(end) = next.and_then(|next| self.ends.get_mut(next as usize)) else {
            group.revoked.clear();
            self.wake_patient();
            return self.wake_group(group_at);
        };
        for key in &group.revoked {
            end.qp.tell(turn.env, turn.now, Control::Unrule { key: *key });
        }
        if untold > 0 {
            let pd = group.key.pd;
            let rules = turn.nic.memory().rules().filter(|rule| rule.pd == pd);
            end.qp.tell_all(turn.env, turn.now, rules);
        }
        if let Some(next) = next {
            self.settle(turn, next);
        }
        self.wake_group(group_at);
    }
}
