//! What stateful cards are told of this process's memory: all rules of a protection domain once to each card,
//! whoever of its connections says them, and the end of a rule before memory is given back.
//!
//! Connections between the same two addresses and of the same domain are a group. One of them is its teller;
//! when that one is gone another says again what had no answer. WQEs of the whole group wait while a rule has
//! none, as they may name it.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering};

use slab::Slab;
use starverbs_core::mr::Change;
use starverbs_core::mr::Rule;
use starverbs_core::room::{is_room_for, make_room_in};
use starverbs_core::{Gid, NicError, PdId};

use crate::control::{Control, Sum};
use crate::library::{Changes, SlState};

use super::super::{Host, Turn};
use super::Library;

/// What one more protection domain may take in a map of them, bytes: a map cannot be asked, so that the host
/// is.
const NODE: usize = 1024;

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
    /// Whether the other end answers: if it does not, nobody waits for what it is told
    heard: bool,
    /// Rules that have no answer: the members' WQEs wait
    untold: Arc<AtomicU32>,
    /// Keys taken away, until the other end has answered
    revoked: Vec<u32>,
    /// Members beside the teller who say so as well
    taking_back: u32,
}

/// What was said, and by whom.
#[derive(Default)]
pub(super) struct Rules {
    groups: Slab<Group>,
    /// Of each protection domain
    sums: BTreeMap<PdId, Sum>,
}

impl Rules {
    /// A rule that all are to know. `Exhausted`: no memory.
    pub(super) fn note(&mut self, rule: &Rule) -> Result<(), NicError> {
        if !is_room_for(NODE) {
            return Err(NicError::Exhausted);
        }
        self.sums.entry(rule.pd).or_default().add(rule);
        Ok(())
    }

    fn forget(&mut self, rule: &Rule) {
        if let Some(sum) = self.sums.get_mut(&rule.pd) {
            sum.remove(rule);
            if sum.rules == 0 {
                self.sums.remove(&rule.pd);
            }
        }
    }

    /// A connection that is about to begin joins its group, without being in it yet: gives the group, and
    /// what the other end's card has been told, if there is somebody who told it. `Exhausted`: no memory.
    pub(super) fn join(&mut self, key: GroupKey) -> Result<(usize, Option<Sum>, Arc<AtomicU32>), NicError> {
        let known = self.groups.iter().find(|(_, group)| group.key == key).map(|(at, _)| at);
        let at = match known {
            Some(at) => at,
            None => {
                make_room_in(&mut self.groups)?;
                let mut members = Vec::new();
                members.try_reserve(1).map_err(|_| NicError::Exhausted)?;
                let (untold, revoked, taking_back) = (Arc::default(), Vec::new(), 0);
                let (teller, heard) = (None, false);
                self.groups.insert(Group { key, members, teller, heard, untold, revoked, taking_back })
            }
        };
        let group = &mut self.groups[at];
        group.members.try_reserve(1).map_err(|_| NicError::Exhausted)?;
        let (told, untold) = (group.teller.is_some(), Arc::clone(&group.untold));
        Ok((at, told.then(|| self.sum(key.pd)), untold))
    }

    /// The rules of a protection domain.
    pub(super) fn sum(&self, pd: PdId) -> Sum {
        self.sums.get(&pd).copied().unwrap_or_default()
    }

    /// It has begun.
    pub(super) fn add_member(&mut self, group: usize, member: u32) {
        if let Some(group) = self.groups.get_mut(group) {
            group.members.push(member);
            if group.teller.is_none() {
                (group.teller, group.heard) = (Some(member), true);
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

impl<E: Host> Library<E> {
    /// Follows the table of memory: stateful cards hear of what was opened and closed. Gives the last key
    /// that was closed, while one of them may know it.
    pub fn follow_memory(&mut self, turn: &mut Turn<'_, E>) -> Option<u32> {
        while let Some(at) = self.reopened.iter().position(|rule| self.is_revoked(rule.key)) {
            let rule = self.reopened.swap_remove(at);
            self.add_rule(turn, &rule);
        }
        let mut ended = None;
        while let Some(change) = turn.nic.memory().next_change() {
            match change {
                Change::Opened(rule) if self.is_revoked(rule.key) => self.add_rule(turn, &rule),
                Change::Opened(rule) => self.add_later(turn, rule),
                Change::Closed(rule) => {
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

    /// A key was opened again of which stateful cards may still know what it opened before: they hear of it
    /// once they have forgotten that.
    fn add_later(&mut self, turn: &mut Turn<'_, E>, rule: Rule) {
        match self.reopened.try_reserve(1) {
            Ok(()) => self.reopened.push(rule),
            Err(_) => turn.nic.memory().hide(rule.key),
        }
    }

    /// Memory is registered, or a window bound. Without memory to keep that, it is none to stateful peers.
    fn add_rule(&mut self, turn: &mut Turn<'_, E>, rule: &Rule) {
        if self.keep_rule(rule).is_err() {
            return turn.nic.memory().hide(rule.key);
        }
        let mut from = 0;
        while let Some(at) = self.rules.of_domain(rule.pd, from) {
            self.tell(turn, at, Control::Rule(*rule));
            from = at + 1;
        }
    }

    /// The card lets packets reach it, and those who begin are told of it.
    pub(super) fn keep_rule(&mut self, rule: &Rule) -> Result<(), NicError> {
        self.bounds.add(rule.addr, rule.len, rule.access)?;
        self.rules.note(rule).inspect_err(|_| self.bounds.remove(rule.addr, rule.len, rule.access))
    }

    /// It no longer is. The card lets no packet reach it from now on; [`is_revoked`](Library::is_revoked)
    /// says when no card tries any more.
    fn remove_rule(&mut self, turn: &mut Turn<'_, E>, rule: &Rule) {
        self.bounds.remove(rule.addr, rule.len, rule.access);
        self.rules.forget(rule);
        let mut from = 0;
        while let Some(at) = self.rules.of_domain(rule.pd, from) {
            from = at + 1;
            let group = &mut self.rules.groups[at];
            /* one that there is no memory for is not waited for */
            if group.teller.is_some() && group.revoked.try_reserve(1).is_ok() {
                group.revoked.push(rule.key);
            }
            self.tell(turn, at, Control::Unrule { key: rule.key });
            self.take_back(turn, at, rule.key);
        }
    }

    /// Others than the teller may be saying all rules anew, at their peer's wish: none of them comes after
    /// its end, and the end is over when all of them have an answer.
    fn take_back(&mut self, turn: &mut Turn<'_, E>, group: usize, key: u32) {
        let Some(group) = self.rules.groups.get_mut(group) else { return };
        for at in group.members.iter().filter(|at| group.teller != Some(**at)) {
            if let Some(end) = self.ends.get_mut(*at as usize).filter(|end| end.qp.changes().given > 0) {
                end.qp.tell(turn.env, turn.now, Control::Unrule { key });
                group.taking_back += u32::from(!end.takes_back);
                end.takes_back = true;
                self.timers.arm(end.timer, turn.now + 1, *at);
            }
        }
    }

    /// Whether all stateful cards have answered that they know the key no longer.
    pub fn is_revoked(&self, key: u32) -> bool {
        !self.rules.groups.iter().any(|(_, group)| group.heard && group.revoked.contains(&key))
    }

    /// Whether all stateful cards that are there have answered that they know the memory of a protection
    /// domain.
    pub fn is_told(&self, pd: PdId) -> bool {
        let waits = self.reopened.iter().any(|rule| rule.pd == pd);
        !waits && self.of_this(pd).all(|group| !group.heard || group.untold.load(Ordering::Relaxed) == 0)
    }

    /// Whether they have also answered that they know no longer what was taken away.
    pub(super) fn is_settled(&self, pd: PdId) -> bool {
        self.is_told(pd) && self.of_this(pd).all(|group| !group.heard || group.revoked.is_empty())
    }

    fn of_this(&self, pd: PdId) -> impl Iterator<Item = &Group> {
        self.rules.groups.iter().map(|(_, group)| group).filter(move |group| group.key.pd == pd)
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
        let Some(end) = self.ends.get_mut(at as usize) else { return };
        let (group_at, changes, heard) = (end.group, end.qp.changes(), end.qp.is_heard());
        if end.takes_back && (changes.taken == 0 || !heard) {
            end.takes_back = false;
            self.took_back(group_at);
        }
        let Some(end) = self.ends.get_mut(at as usize) else { return };
        let Some(group) = self.rules.groups.get_mut(group_at) else { return };
        match group.teller {
            /* there was nobody to tell anything, and SF's first answer has come */
            None if heard => (group.teller, group.heard) = (Some(at), true),
            Some(teller) if teller == at => group.heard |= heard,
            _ => {
                /* all is being told by the teller; what this one had to say of it may come late */
                if !heard && changes != Changes::default() {
                    end.qp.untell();
                }
                let back = heard && !group.heard && end.qp.state() == SlState::Ready;
                if back {
                    /* the first that is heard again, before its teller: what its WQEs name is told by
                     * itself
                     */
                    self.find_teller(turn, group_at);
                }
                return;
            }
        }
        if !heard {
            self.find_teller(turn, group_at);
            return;
        }
        let mut answered = changes.taken == 0 && group.taking_back == 0 && !group.revoked.is_empty();
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

    /// A member that said the end of rules beside the teller has its answer, or cannot be heard.
    fn took_back(&mut self, group: usize) {
        let Some(group) = self.rules.groups.get_mut(group) else { return };
        group.taking_back -= 1;
        let teller = group.teller.and_then(|at| self.ends.get(at as usize));
        let told = teller.is_some_and(|end| end.qp.changes().taken == 0);
        if told && group.taking_back == 0 && !group.revoked.is_empty() {
            group.revoked.clear();
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
        while let Some(at) = self.patient.pop() {
            if let Some(end) = self.ends.get_mut(at as usize).filter(|end| !end.queued) {
                end.queued = true;
                self.ready.push_back(at);
            }
        }
    }

    /// A member of a group ends. True: what it has said for the others, they say.
    pub(super) fn leave_group(
        &mut self,
        turn: &mut Turn<'_, E>,
        group_at: usize,
        at: u32,
        takes_back: bool,
    ) -> bool {
        if takes_back {
            self.took_back(group_at);
        }
        let Some(group) = self.rules.groups.get_mut(group_at) else { return false };
        group.members.retain(|member| *member != at);
        if group.members.is_empty() {
            self.rules.forget_empty(group_at);
            return false;
        }
        group.teller != Some(at) || self.find_teller(turn, group_at)
    }

    /// The teller is gone, or nobody hears it: another says what may have had no answer, one of those that SF
    /// answers if there is one. Else one that is only silent goes on, lest anything is lost should its peer
    /// come back, and nobody waits for that. Gives whether SF hears it.
    fn find_teller(&mut self, turn: &mut Turn<'_, E>, group_at: usize) -> bool {
        let Some(group) = self.rules.groups.get(group_at) else { return false };
        let before = group.teller;
        let members = || group.members.iter().copied();
        let heard = members().find(|member| self.is_ready(*member));
        let heard = heard.or_else(|| members().find(|member| self.is_heard(*member)));
        let silent = || before.into_iter().chain(members()).find(|member| self.is_silent(*member));
        let next = heard.or_else(silent);
        if let Some(end) = before.filter(|_| before != next).and_then(|at| self.ends.get_mut(at as usize)) {
            end.qp.untell();
        }
        let group = &mut self.rules.groups[group_at];
        /* it stays so until the next teller has its rules to say: no WQE is to leave between */
        let untold = group.untold.load(Ordering::Relaxed) > 0;
        let behind = untold || !group.heard;
        let was_heard = core::mem::replace(&mut group.heard, heard.is_some());
        group.teller = next;
        if let Some(end) = next.filter(|_| before != next).and_then(|at| self.ends.get_mut(at as usize)) {
            for key in &group.revoked {
                end.qp.tell(turn.env, turn.now, Control::Unrule { key: *key });
            }
            if behind {
                let pd = group.key.pd;
                let rules = turn.nic.memory().rules().filter(|rule| rule.pd == pd);
                end.qp.tell_all(turn.env, turn.now, rules);
            }
        }
        match heard {
            Some(next) => {
                self.settle(turn, next);
            }
            None => {
                /* programs do not wait for what nobody hears; WQEs that may name it do, as long as somebody
                may be heard again who says it */
                if next.is_none() {
                    group.untold.store(0, Ordering::Relaxed);
                    group.revoked.clear();
                }
                /* once: who waits for other groups would have its turn again and again */
                if was_heard {
                    self.wake_patient();
                }
            }
        }
        if heard.is_some() || untold && next.is_none() {
            self.wake_group(group_at);
        }
        heard.is_some()
    }
}
