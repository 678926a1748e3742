//! What waits for room in a lane. Bounded by its bytes: an end that makes work and takes no results costs no
//! more.

use std::collections::VecDeque;

/// Bytes of messages that wait, and of what they are kept by, at most: more than 10000 of the short ones.
const MOST: usize = 1 << 20;

/// Messages that wait, the oldest first.
#[derive(Default)]
pub(super) struct PendingMessages {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
}

fn cost(bytes: usize) -> usize {
    bytes + size_of::<Vec<u8>>()
}

impl PendingMessages {
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(super) fn front(&self) -> Option<&[u8]> {
        self.messages.front().map(Vec::as_slice)
    }

    /// Keeps a message. `None`: too many bytes wait, or there is no memory.
    pub(super) fn keep(&mut self, parts: &[&[u8]]) -> Option<()> {
        let len = parts.iter().map(|part| part.len()).sum();
        if self.bytes + cost(len) > MOST {
            return None;
        }
        let mut message = Vec::new();
        message.try_reserve_exact(len).ok()?;
        self.messages.try_reserve(1).ok()?;
        parts.iter().for_each(|part| message.extend_from_slice(part));
        self.messages.push_back(message);
        self.bytes += cost(len);
        Some(())
    }

    /// The oldest has gone.
    pub(super) fn pop_front(&mut self) {
        if let Some(message) = self.messages.pop_front() {
            self.bytes -= cost(message.len());
        }
    }
}
