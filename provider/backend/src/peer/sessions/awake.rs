//! Which consumer polls which sessions: each has a list of those that it looks at, and takes their messages
//! in turns. One that sleeps sends a wake-up byte for what comes, listed or not.

use std::collections::VecDeque;

use super::Sessions;
use crate::peer::{Consumer, SessionId};

/// Polls in a row that find nothing, after which a session must send a wake-up byte.
const IDLE: u32 = 4096;
/// Messages of one session in a row, while others wait.
const IN_A_ROW: u32 = 32;

/// The sessions that a consumer's polls look at.
#[derive(Default)]
pub(super) struct Awake {
    pub(super) list: VecDeque<SessionId>,
    /// Messages that the first of them has given in a row
    given: u32,
}

/// What a consumer finds.
pub(in crate::peer) enum AwakeConsumer {
    /// A message: in which lane, and its length
    Message(SessionId, usize, usize),
    /// All that came before the session's end has been taken
    Drained(SessionId),
}

impl Sessions {
    /// All consumers look at a session until it has been idle for a while.
    pub(in crate::peer) fn wake(&mut self, id: SessionId) {
        let Sessions { sessions, awake, uses_links, .. } = self;
        let Some(session) = sessions.get_mut(usize::from(id.slot)).and_then(Option::as_mut) else { return };
        if session.id != id {
            return;
        }
        for consumer in Consumer::ALL {
            let place = &mut session.places[consumer as usize];
            place.idle = 0;
            if place.done || (consumer == Consumer::Links && !*uses_links) {
                continue;
            }
            let listed = std::mem::replace(&mut place.listed, true);
            session.wake(consumer);
            if !listed {
                awake[consumer as usize].list.push_back(id);
            }
        }
    }

    /// Sessions that a consumer looks at.
    pub(in crate::peer) fn awake(&self, consumer: Consumer) -> usize {
        self.awake[consumer as usize].list.len()
    }

    /// What a consumer finds next. `polled`: it looks again soon, and sessions need not wake it meanwhile.
    pub(in crate::peer) fn find(&mut self, consumer: Consumer, polled: bool) -> Option<AwakeConsumer> {
        let of = consumer as usize;
        let mut left = self.awake[of].list.len();
        while left > 0 {
            if self.awake[of].given >= IN_A_ROW {
                self.rotate(consumer);
            }
            let id = *self.awake[of].list.front()?;
            let Some(session) = self.get(id) else {
                self.awake[of].list.pop_front();
                left -= 1;
                continue;
            };
            let idle = session.places[of].idle;
            if polled {
                session.wake(consumer);
            }
            match session.peek(consumer) {
                Ok(Some((lane, len))) => {
                    session.places[of].idle = 0;
                    session.wake(consumer);
                    self.awake[of].given += 1;
                    return Some(AwakeConsumer::Message(id, lane, len));
                }
                Ok(None) if session.socket.is_none() => {
                    self.unlist(id, consumer);
                    self.done(id, consumer);
                    return Some(AwakeConsumer::Drained(id));
                }
                Ok(None) if idle >= IDLE && session.sleep(consumer) == Ok(true) => {
                    self.unlist(id, consumer);
                    left -= 1;
                }
                Ok(None) => {
                    if !polled {
                        /* what has come meanwhile is there at the next look */
                        let _comes = session.sleep(consumer);
                    }
                    session.places[of].idle += 1;
                    self.rotate(consumer);
                    left -= 1;
                }
                /* it has ended then, and is found so */
                Err(_) => self.break_off(id),
            }
        }
        None
    }

    /// The next session's turn has come.
    fn rotate(&mut self, consumer: Consumer) {
        let awake = &mut self.awake[consumer as usize];
        awake.given = 0;
        awake.list.rotate_left(usize::from(!awake.list.is_empty()));
    }

    /// A consumer does not look at a session any more.
    pub(in crate::peer) fn unlist(&mut self, id: SessionId, consumer: Consumer) {
        self.awake[consumer as usize].list.retain(|listed| *listed != id);
        self.awake[consumer as usize].given = 0;
        if let Some(session) = self.get(id) {
            session.places[consumer as usize].listed = false;
        }
    }

    /// Whoever polled is about to sleep: sessions send wake-up bytes from now on. Where one has something
    /// already, the epoll descriptor is readable at once.
    pub(in crate::peer) fn prepare_to_sleep(&mut self) {
        let mut busy = false;
        let Sessions { sessions, awake, .. } = self;
        for consumer in Consumer::ALL {
            for id in &awake[consumer as usize].list {
                let found = sessions.get_mut(usize::from(id.slot)).and_then(Option::as_mut);
                if let Some(session) = found.filter(|session| session.id == *id) {
                    busy |= session.sleep(consumer) != Ok(true) || session.socket.is_none();
                }
            }
        }
        if busy {
            let _rings = nix::unistd::write(&self.alarm, &1u64.to_ne_bytes());
        }
    }

    /// Copies the bytes of the message that was found in a lane, and is done with it. Gives how many they
    /// are.
    pub(in crate::peer) fn take(&mut self, id: SessionId, lane: usize, parts: &mut [&mut [u8]]) -> usize {
        let Some(session) = self.get(id) else { return 0 };
        let Some(here) = session.lane(lane) else { return 0 };
        let mut at = 0;
        for part in parts {
            at += here.inward.copy(at, part);
        }
        if here.inward.pop() {
            session.send_wake_byte();
        }
        at
    }

    /// A consumer has all that came before the end.
    pub(in crate::peer) fn done(&mut self, id: SessionId, consumer: Consumer) {
        let Some(session) = self.get(id) else { return };
        session.places[consumer as usize].done = true;
        if session.places.iter().all(|place| place.done) {
            self.sessions[usize::from(id.slot)] = None;
        }
    }
}
