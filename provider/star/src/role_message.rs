//! Role messages, with the incarnations of the ends that they are between.
//!
//! A queue pair that is reset and connected again has the number of before, and so has its peer; what they
//! said to each other before may come late. So each end has another number each time that it begins. An
//! answer names the one who asked, and a message of a round the peer with whom the roles were settled.

use super::control::Control;
use super::message::{WqeReader, Writer};

/// Marks such a message: both numbers and the message follow.
const ROLE: u8 = 24;

/// A role message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoleMessage {
    /// Incarnation of its sender. 0: its queue pair has none, as it is plain or not ready
    pub from: u32,
    /// Incarnation that it is for
    pub to: u32,
    /// The message itself
    pub message: Control,
}

impl RoleMessage {
    /// Whether it is for this incarnation: a question, or an answer to one of its own.
    pub fn is_for(&self, incarnation: u32) -> bool {
        matches!(self.message, Control::Offer { .. }) || self.to == incarnation
    }

    /// The answer to it of an end in incarnation `from`.
    #[must_use]
    pub fn answered(&self, from: u32, message: Control) -> Self {
        RoleMessage { from, to: self.from, message }
    }

    /// Writes it to `room`; gives its length. `None`: `room` is too small, which
    /// [`MAX_CONTROL`](super::control::MAX_CONTROL) never is.
    pub fn encode(&self, room: &mut [u8]) -> Option<usize> {
        let mut out = Writer::new(room);
        out.byte(ROLE)?;
        out.word(self.from)?;
        out.word(self.to)?;
        let len = out.len();
        Some(len + self.message.encode(room.get_mut(len..)?)?)
    }

    /// The message that these bytes are. `None`: they are none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = WqeReader(bytes);
        if from.byte()? != ROLE {
            return None;
        }
        let (sender, to) = (from.word()?, from.word()?);
        Some(RoleMessage { from: sender, to, message: Control::decode(from.0)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{MAX_CONTROL, Role};

    #[test]
    fn an_answer_is_for_who_asked() {
        let accept = Control::Accept { role: Role::Stateful, ports: [4793, 4794], boot: 7 };
        let asked = RoleMessage { from: 5, to: 0, message: accept };
        let answer = asked.answered(9, Control::Confirm { role: Role::Stateless });
        assert!(answer.is_for(5) && !answer.is_for(6) && answer.from == 9);
        let mut room = [0; MAX_CONTROL];
        let len = answer.encode(&mut room).expect("it fits");
        assert_eq!(RoleMessage::decode(&room[..len]), Some(answer));
        assert_eq!((RoleMessage::decode(&room[..len - 1]), Control::decode(&room[..len])), (None, None));
        room[0] = 17;
        assert_eq!(RoleMessage::decode(&room[..len]), None);
    }
}
