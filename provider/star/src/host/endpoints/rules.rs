//! The rules of this process's memory at stateful cards: each card gets all rules of a protection domain
//! once, by any of its connections, and the end of a rule before memory is given back.
//!
//! Connections between the same two addresses and of the same domain are a group. One of them, its leader,
//! sends for all. When that one is gone, another becomes the leader, and sends again what had no answer. WQEs
//! of the whole group wait while a rule has none, as they may name it.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

use slab::Slab;
use starverbs_core::mr::KeyChange;
use starverbs_core::mr::MemoryRule;
use starverbs_core::room::{is_room_for, make_room_in};
use starverbs_core::{Gid, NicError, PdId};

use crate::control::{Control, Sum};
use crate::endpoint::{Changes, SlState};

use super::super::{EndpointHost, Turn};
use super::Endpoints;

/// What one more protection domain may take in a map of them, bytes: a map cannot be asked, so that the host
/// is.
const NODE: usize = 1024;

/// What the connections of a group have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GroupKey {
    /// Addresses of this end and of the other
    pub(super) ends: [Gid; 2],
    /// Boot ID of the other end's card
    pub(super) boot: u64,
    /// Protection domain
    pub(super) pd: PdId,
}

struct RuleGroup {
    key: GroupKey,
    members: Vec<u32>,
    /// Who sends for all
    leader: Option<u32>,
    /// Whether the other end answers: if it does not, programs do not wait for it
    reachable: bool,
    /// Rules that have no answer: the members' WQEs wait
    unacked: Arc<AtomicU32>,
    /// Keys that were removed, until the other end has answered
    revoked: Vec<u32>,
    /// Members beside the leader that have sent the end of a rule, and have no answer
    unrules_pending: u32,
}

/// All groups, and the sums of all rules.
#[derive(Default)]
pub(super) struct Rules {
    groups: Slab<RuleGroup>,
    /// Of each protection domain
    sums: BTreeMap<PdId, Sum>,
}

impl Rules {
    /// A rule that all are to know. `Exhausted`: no memory.
    pub(super) fn note(&mut self, rule: &MemoryRule) -> Result<(), NicError> {
        if !is_room_for(NODE) {
            return Err(NicError::Exhausted);
        }
        self.sums.entry(rule.pd).or_default().add(rule);
        Ok(())
    }

    fn forget(&mut self, rule: &MemoryRule) {
        if let Some(sum) = self.sums.get_mut(&rule.pd) {
            sum.remove(rule);
            if sum.rules == 0 {
                self.sums.remove(&rule.pd);
            }
        }
    }

    /// The group of a connection that is about to begin, which is no member yet; the sum of what the group
    /// has sent, if it has a leader; and the count of rules without an answer. `Exhausted`: no memory.
    pub(super) fn join(&mut self, key: GroupKey) -> Result<(usize, Option<Sum>, Arc<AtomicU32>), NicError> {
        let known = self.groups.iter().find(|(_, group)| group.key == key).map(|(at, _)| at);
        let at = match known {
            Some(at) => at,
            None => {
                make_room_in(&mut self.groups)?;
                let mut members = Vec::new();
                members.try_reserve(1).map_err(|_| NicError::Exhausted)?;
                let (unacked, revoked, unrules_pending) = (Arc::default(), Vec::new(), 0);
                let (leader, reachable) = (None, false);
                self.groups.insert(RuleGroup {
                    key,
                    members,
                    leader,
                    reachable,
                    unacked,
                    revoked,
                    unrules_pending,
                })
            }
        };
        let group = &mut self.groups[at];
        group.members.try_reserve(1).map_err(|_| NicError::Exhausted)?;
        let (sent, unacked) = (group.leader.is_some(), Arc::clone(&group.unacked));
        Ok((at, sent.then(|| self.sum(key.pd)), unacked))
    }

    /// The rules of a protection domain.
    pub(super) fn sum(&self, pd: PdId) -> Sum {
        self.sums.get(&pd).copied().unwrap_or_default()
    }

    /// It has begun.
    pub(super) fn add_member(&mut self, group: usize, member: u32) {
        if let Some(group) = self.groups.get_mut(group) {
            group.members.push(member);
            if group.leader.is_none() {
                (group.leader, group.reachable) = (Some(member), true);
            }
        }
    }

    /// Nobody has begun who joined it: if there are no others, it is no more.
    pub(super) fn forget_empty(&mut self, group: usize) {
        if self.groups.get(group).is_some_and(|group| group.members.is_empty()) {
            self.groups.remove(group);
        }
    }

    /// Numbers of the groups of a domain, of which some may end meanwhile.
    fn of_domain(&self, pd: PdId, from: usize) -> Option<usize> {
        (from..self.groups.capacity()).find(|at| self.groups.get(*at).is_some_and(|group| group.key.pd == pd))
    }
}

impl<E: EndpointHost> Endpoints<E> {
    /// Follows the table of memory: stateful cards get what was opened and closed. Gives the last key that
    /// was closed, if one of them may still know it.
    pub fn follow_memory(&mut self, turn: &mut Turn<'_, E>) -> Option<u32> {
        while let Some(at) = self.reopened.iter().position(|rule| self.is_revoked(rule.key)) {
            let rule = self.reopened.swap_remove(at);
            self.add_rule(turn, &rule);
        }
        let mut ended = None;
        while let Some(change) = turn.nic.memory().next_change() {
            match change {
                KeyChange::Opened(rule) if self.is_revoked(rule.key) => self.add_rule(turn, &rule),
                KeyChange::Opened(rule) => self.add_later(turn, rule),
                KeyChange::Closed(rule) => {
                    let later = self.reopened.iter().position(|reopened| reopened.key == rule.key);
                    match later {
                        Some(at) => _ = self.reopened.swap_remove(at),
                        None => self.remove_rule(turn, &rule),
                    }
                    ended = Some(rule.key);
                }
            }
        }
        ended.filter(|key| !self.is_revoked(*key))
    }

    /// A key was opened again whose previous rule stateful cards may still know: they get the new one once
    /// they have removed that.
    fn add_later(&mut self, turn: &mut Turn<'_, E>, rule: MemoryRule) {
        match self.reopened.try_reserve(1) {
            Ok(()) => self.reopened.push(rule),
            Err(_) => turn.nic.memory().hide(rule.key),
        }
    }

    /// Memory is registered, or a window bound. Without memory to keep that, it is none to stateful peers.
    fn add_rule(&mut self, turn: &mut Turn<'_, E>, rule: &MemoryRule) {
        if self.keep_rule(rule).is_err() {
            return turn.nic.memory().hide(rule.key);
        }
        let mut from = 0;
        while let Some(at) = self.rules.of_domain(rule.pd, from) {
            self.send_to_group(turn, at, Control::Rule(*rule));
            from = at + 1;
        }
    }

    /// The card lets packets reach it, and new connections send it.
    pub(super) fn keep_rule(&mut self, rule: &MemoryRule) -> Result<(), NicError> {
        self.bounds.add(rule.addr, rule.len, rule.access)?;
        self.rules.note(rule).inspect_err(|_| self.bounds.remove(rule.addr, rule.len, rule.access))
    }

    /// It no longer is. The card lets no packet reach it from now on; once
    /// [`is_revoked`](Endpoints::is_revoked), no stateful card sends one.
    fn remove_rule(&mut self, turn: &mut Turn<'_, E>, rule: &MemoryRule) {
        self.bounds.remove(rule.addr, rule.len, rule.access);
        self.answers.forget_ahead();
        self.rules.forget(rule);
        let mut from = 0;
        while let Some(at) = self.rules.of_domain(rule.pd, from) {
            from = at + 1;
            let group = &mut self.rules.groups[at];
            /* one that there is no memory for is not waited for */
            if group.leader.is_some() && group.revoked.try_reserve(1).is_ok() {
                group.revoked.push(rule.key);
            }
            self.send_to_group(turn, at, Control::Unrule { key: rule.key });
            self.send_unrule_beside(turn, at, rule.key);
        }
    }

    /// Members beside the leader may be sending all rules again, as their peer asked. They send the end of
    /// the rule, too, so that the rule does not come after it. The key is revoked when all have an answer.
    fn send_unrule_beside(&mut self, turn: &mut Turn<'_, E>, group: usize, key: u32) {
        let Some(group) = self.rules.groups.get_mut(group) else { return };
        for at in group.members.iter().filter(|at| group.leader != Some(**at)) {
            if let Some(end) = self.ends.get_mut(*at as usize).filter(|end| end.qp.changes().given > 0) {
                end.qp.send_rule(turn.env, turn.now, Control::Unrule { key });
                group.unrules_pending += u32::from(!end.sends_unrule);
                end.sends_unrule = true;
                self.timers.arm(end.timer, turn.now + 1, *at);
            }
        }
    }

    /// Whether all stateful cards have removed the key's rule.
    pub fn is_revoked(&self, key: u32) -> bool {
        !self.rules.groups.iter().any(|(_, group)| group.reachable && group.revoked.contains(&key))
    }

    /// Whether those that are silent have removed it, too: one that answers again may name it until then.
    pub fn is_forgotten(&self, key: u32) -> bool {
        !self.rules.groups.iter().any(|(_, group)| group.revoked.contains(&key))
    }

    /// Whether all stateful cards that answer have the rules of a protection domain.
    pub fn is_known(&self, pd: PdId) -> bool {
        let waits = self.reopened.iter().any(|rule| rule.pd == pd);
        !waits && self.of_this(pd).all(|group| !group.reachable || group.unacked.load(Ordering::Relaxed) == 0)
    }

    /// Whether they have also removed the rules that are no more.
    pub(super) fn is_settled(&self, pd: PdId) -> bool {
        self.is_known(pd) && self.of_this(pd).all(|group| !group.reachable || group.revoked.is_empty())
    }

    fn of_this(&self, pd: PdId) -> impl Iterator<Item = &RuleGroup> {
        self.rules.groups.iter().map(|(_, group)| group).filter(move |group| group.key.pd == pd)
    }

    fn send_to_group(&mut self, turn: &mut Turn<'_, E>, group: usize, what: Control) {
        let leader = self.rules.groups.get(group).and_then(|group| group.leader);
        if let Some(leader) = leader
            && let Some(end) = self.ends.get_mut(leader as usize)
        {
            end.qp.send_rule(turn.env, turn.now, what);
            let given = end.qp.changes().given;
            if let Some(group) = self.rules.groups.get(group) {
                /* not taken for answered before the leader's turn is over */
                group.unacked.fetch_max(given, Ordering::Relaxed);
            }
            self.settle(turn, leader);
        }
    }

    /// After a call of a QP: what it has sent for its group, and whether it still can.
    pub(super) fn follow_leader(&mut self, turn: &mut Turn<'_, E>, at: u32) {
        let Some(end) = self.ends.get_mut(at as usize) else { return };
        let (group_at, changes, reachable) = (end.group, end.qp.changes(), end.qp.is_reachable());
        if end.sends_unrule && (changes.taken == 0 || !reachable) {
            end.sends_unrule = false;
            self.unrule_done(group_at);
        }
        let Some(end) = self.ends.get_mut(at as usize) else { return };
        let Some(group) = self.rules.groups.get_mut(group_at) else { return };
        match group.leader {
            /* the group had no leader, and SF answers this one */
            None if reachable => (group.leader, group.reachable) = (Some(at), true),
            Some(leader) if leader == at => group.reachable |= reachable,
            _ => {
                /* the leader sends all; what this one had to send might come late */
                if !reachable && changes != Changes::default() {
                    end.qp.retract_rules();
                }
                let back = reachable && !group.reachable && end.qp.state() == SlState::Ready;
                if back {
                    /* SF answers it before the leader: it sends by itself what its WQEs name */
                    self.elect_leader(turn, group_at);
                }
                return;
            }
        }
        if !reachable {
            self.elect_leader(turn, group_at);
            return;
        }
        let mut answered = changes.taken == 0 && group.unrules_pending == 0 && !group.revoked.is_empty();
        if answered {
            group.revoked.clear();
        }
        let before = group.unacked.swap(changes.given, Ordering::Relaxed);
        if before > 0 && changes.given == 0 {
            answered = true;
            self.wake_group(group_at);
        }
        if answered {
            self.are_revoked();
        }
    }

    /// Nobody waits for these stateful cards to remove rules any more. What came to this card meanwhile by
    /// one of those, before its turn, is not done.
    fn are_revoked(&mut self) {
        self.answers.forget_ahead();
        self.wake_window_ops();
    }

    /// A member that sent the end of rules beside the leader has its answer, or is unreachable.
    fn unrule_done(&mut self, group: usize) {
        let Some(group) = self.rules.groups.get_mut(group) else { return };
        group.unrules_pending -= 1;
        let leader = group.leader.and_then(|at| self.ends.get(at as usize));
        let known = leader.is_some_and(|end| end.qp.changes().taken == 0);
        if known && group.unrules_pending == 0 && !group.revoked.is_empty() {
            group.revoked.clear();
            self.are_revoked();
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

    /// Has the window operations looked at that wait for answers.
    fn wake_window_ops(&mut self) {
        while let Some(at) = self.waiting_ops.pop() {
            if let Some(end) = self.ends.get_mut(at as usize).filter(|end| !end.queued) {
                end.queued = true;
                self.ready.push_back(at);
            }
        }
    }

    /// A member of a group ends. True: the others send what it had to send.
    pub(super) fn leave_group(
        &mut self,
        turn: &mut Turn<'_, E>,
        group_at: usize,
        at: u32,
        sends_unrule: bool,
    ) -> bool {
        if sends_unrule {
            self.unrule_done(group_at);
        }
        let Some(group) = self.rules.groups.get_mut(group_at) else { return false };
        group.members.retain(|member| *member != at);
        if group.members.is_empty() {
            self.rules.forget_empty(group_at);
            return false;
        }
        group.leader != Some(at) || self.elect_leader(turn, group_at)
    }

    /// The leader is gone or unreachable: another sends what may have no answer. That is one that SF answers;
    /// else one that SF may answer again, for which nobody waits. Gives whether SF answers the new one.
    fn elect_leader(&mut self, turn: &mut Turn<'_, E>, group_at: usize) -> bool {
        let Some(group) = self.rules.groups.get(group_at) else { return false };
        let before = group.leader;
        let stays = |at: &u32| self.ends.get(*at as usize).is_some_and(|end| !end.ending);
        let members = || group.members.iter().copied().filter(stays);
        let reachable = members().find(|member| self.is_ready(*member));
        let reachable = reachable.or_else(|| members().find(|member| self.is_reachable(*member)));
        let silent =
            || before.into_iter().filter(stays).chain(members()).find(|member| self.is_silent(*member));
        let next = reachable.or_else(silent);
        if let Some(end) = before.filter(|_| before != next).and_then(|at| self.ends.get_mut(at as usize)) {
            end.qp.retract_rules();
        }
        let group = &mut self.rules.groups[group_at];
        /* kept until the next leader has its rules to send: no WQE is to leave between */
        let unacked = group.unacked.load(Ordering::Relaxed) > 0;
        let behind = unacked || !group.reachable;
        let was_reachable = core::mem::replace(&mut group.reachable, reachable.is_some());
        group.leader = next;
        if let Some(end) = next.filter(|_| before != next).and_then(|at| self.ends.get_mut(at as usize)) {
            for key in &group.revoked {
                end.qp.send_rule(turn.env, turn.now, Control::Unrule { key: *key });
            }
            if behind {
                let pd = group.key.pd;
                let rules = turn.nic.memory().rules().filter(|rule| rule.pd == pd);
                end.qp.send_rules(turn.env, turn.now, rules);
            }
        }
        match reachable {
            Some(next) => {
                self.settle(turn, next);
            }
            None => {
                /* programs do not wait for a silent peer; WQEs do, as long as it may answer again */
                if next.is_none() {
                    group.unacked.store(0, Ordering::Relaxed);
                    group.revoked.clear();
                }
                /* once: those that wait for other groups would be looked at again and again */
                if was_reachable {
                    self.are_revoked();
                }
            }
        }
        if reachable.is_some() || unacked && next.is_none() {
            self.wake_group(group_at);
        }
        reachable.is_some()
    }
}
