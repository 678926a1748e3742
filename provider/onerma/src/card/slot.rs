//! Command slots (1RMA, section 4.3), each of which is one operation, again and again.

use starverbs_core::Nanos;

use crate::command::OneRmaCommand;
use crate::fragments::Fragments;
use crate::seal::DerivedKey;
use crate::types::{Handle, OneRmaOp};
use crate::wire::Iv;

/// What a slot is at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotState {
    /// It takes a command
    Free,
    /// Its command waits for the window
    Queued,
    /// Its request is under way
    InService,
    /// The target of its WRITE or REKEY has asked for the data
    RemoteReadSeen,
    /// Its command has completed; it takes another
    Done,
}

impl SlotState {
    pub(super) const fn is_in_service(self) -> bool {
        matches!(self, SlotState::InService | SlotState::RemoteReadSeen)
    }
}

/// A slot. Its derived key is kept, ready for use, until a command has another one.
pub(super) struct CommandSlot<K> {
    pub(super) state: SlotState,
    pub(super) generation: u32,
    /// Place of the portal that it belongs to
    pub(super) portal: Option<u16>,
    pub(super) command: Option<OneRmaCommand>,
    pub(super) key: Option<(DerivedKey, K)>,
    pub(super) issued: Nanos,
    /// When it entered service
    pub(super) started: Nanos,
    pub(super) deadline: Nanos,
    pub(super) here: Fragments,
    /// Of the request
    pub(super) request: Iv,
    /// Of the Ask
    pub(super) ask: Iv,
    /// The target's
    pub(super) transfer: Handle,
}

impl<K> CommandSlot<K> {
    pub(super) fn new() -> Self {
        CommandSlot {
            state: SlotState::Free,
            generation: 0,
            portal: None,
            command: None,
            key: None,
            issued: 0,
            started: 0,
            deadline: 0,
            here: Fragments::default(),
            request: Iv::default(),
            ask: Iv::default(),
            transfer: Handle::default(),
        }
    }

    /// The command and its key, if the slot is in service with this operation for the `generation`.
    pub(super) fn in_service(&self, generation: u32, op: OneRmaOp) -> Option<(&OneRmaCommand, &K)> {
        let (command, (_, key)) = (self.command.as_ref()?, self.key.as_ref()?);
        let here = self.state.is_in_service() && self.generation == generation && command.op == op;
        here.then_some((command, key))
    }

    /// The initialisation vector that the next answer answers.
    pub(super) fn answered(&self) -> Iv {
        if self.state == SlotState::RemoteReadSeen { self.ask } else { self.request }
    }

    pub(super) fn handle(&self, place: u16) -> Handle {
        Handle { index: u32::from(place), generation: self.generation }
    }
}
