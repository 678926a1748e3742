//! A function's command queue: commands are carried out in order, and answered.
//!
//! Some wait for peers of StaR. Those behind one wait with it, and those of other functions do not. A command
//! that waits has had its effect on the board, but for a queue pair that is to be destroyed, whose peer gets
//! its last completions first. Owns the order, what is waited for, and for how long at most.

use std::mem::size_of;
use std::sync::atomic::Ordering;

use starverbs_backend::star::PATIENCE;
use starverbs_core::{Nanos, PdId, Qpn};
use starverbs_queues::board::{
    BODY_BYTES, COMMAND_BYTES, COUNTER_COMMANDS, COUNTER_COMMANDS_REFUSED, COUNTER_MALFORMED, CommandHead,
};

use crate::broken;
use crate::dma::{Errno, QueueRoom};
use crate::function::{CommonCard, Function};

/// A body, or an answer.
pub(crate) type Body = [u8; BODY_BYTES];

/// What a command waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Await {
    /// No stateful peer reaches for what `closed` opened, and all know the memory of the domain `opened`
    Memory { closed: Option<u32>, opened: Option<PdId> },
    /// The stateless peer of a queue pair has taken its completions; then it is destroyed
    Taken(Qpn),
}

impl Await {
    /// Whether there is nothing to wait for.
    pub(crate) fn is_settled(&self, card: &CommonCard) -> bool {
        match *self {
            Await::Memory { closed, opened } => card.is_memory_settled(closed, opened),
            Await::Taken(qpn) => !card.owes(qpn),
        }
    }
}

/// What became of a command: it is done, or is to wait before it is.
pub(crate) struct CommandOutcome {
    pub(crate) reply: Body,
    pub(crate) wait: Option<Await>,
}

impl From<Body> for CommandOutcome {
    fn from(reply: Body) -> CommandOutcome {
        CommandOutcome { reply, wait: None }
    }
}

/// The command that waits.
struct WaitingCommand {
    context: u16,
    what: Await,
    reply: Body,
    until: Nanos,
}

/// What is under way in a queue.
#[derive(Default)]
pub(crate) struct CommandProgress {
    /// Commands so far, and those that are carried out
    tail: u32,
    pub(crate) head: u32,
    /// The one at `head` waits
    waiting: Option<WaitingCommand>,
}

impl Function {
    /// Takes the commands up to `tail`: no more than the queue holds.
    pub(crate) fn take_commands(&mut self, card: &mut CommonCard, tail: u32) {
        if self.commands.is_some() && !self.config.masters() && !broken::rule(46) {
            self.set_error(libc::EACCES);
            return;
        }
        if self.commands.is_none() {
            self.set_error(libc::ENXIO);
            return;
        }
        if tail.wrapping_sub(self.progress.head) > 1 << self.commands_log() {
            self.set_error(if broken::rule(11) { 0 } else { libc::EINVAL });
            self.counters().inc(COUNTER_MALFORMED);
            return;
        }
        self.progress.tail = tail;
        self.run_commands(card);
    }

    /// Goes on with a command that waited, if it need not any more, and with those behind it. Says whether it
    /// has.
    pub(crate) fn resume_commands(&mut self, card: &mut CommonCard) -> bool {
        let over = |wait: &mut WaitingCommand| card.now >= wait.until || wait.what.is_settled(card);
        if !self.config.masters() {
            return false;
        }
        let Some(waited) = self.progress.waiting.take_if(over) else { return false };
        let Some(queue) = self.commands.take() else { return false };
        let status = match waited.what {
            Await::Memory { .. } => Ok(waited.reply),
            Await::Taken(qpn) => self
                .context(waited.context)
                .ok_or(libc::ENXIO)
                .and_then(|context| context.end_qp(card, qpn).map(|()| waited.reply)),
        };
        self.answer(&queue, status);
        self.commands = Some(queue);
        self.run_commands(card);
        true
    }

    /// Carries out commands until one waits.
    fn run_commands(&mut self, card: &mut CommonCard) {
        let Some(queue) = self.commands.take() else { return };
        while self.progress.waiting.is_none() && self.progress.head != self.progress.tail {
            self.carry_out(card, &queue);
        }
        self.commands = Some(queue);
    }

    /// Where the command at the head is.
    fn command_at(&self) -> usize {
        (self.progress.head & ((1 << self.commands_log()) - 1)) as usize * COMMAND_BYTES
    }

    /// Carries out the command at the head, and answers it unless it waits.
    fn carry_out(&mut self, card: &mut CommonCard, queue: &QueueRoom) {
        let at = self.command_at();
        let mut head = [0; size_of::<CommandHead>()];
        let mut body: Body = [0; BODY_BYTES];
        queue.read(at, &mut head);
        queue.read(at + head.len(), &mut body);
        let [op, context] = [0, 2].map(|field| u16::from_le_bytes([head[field], head[field + 1]]));
        match self.command(card, context, op, &body) {
            Ok(CommandOutcome { reply, wait: Some(what) }) => {
                let until = card.now.saturating_add(PATIENCE);
                self.progress.waiting = Some(WaitingCommand { context, what, reply, until });
            }
            Ok(CommandOutcome { reply, wait: None }) => self.answer(queue, Ok(reply)),
            Err(errno) => self.answer(queue, Err(errno)),
        }
    }

    /// Stores the answer of the command at the head, its status last.
    fn answer(&mut self, queue: &QueueRoom, done: Result<Body, Errno>) {
        let at = self.command_at();
        let status_at = at + std::mem::offset_of!(CommandHead, status);
        let status = match done {
            Err(libc::EOPNOTSUPP) if broken::rule(8) => 0,
            Ok(reply) => {
                if broken::rule(10) {
                    queue.store_half(status_at, 0, Ordering::Release);
                    broken::linger();
                }
                queue.write(at + size_of::<CommandHead>(), &reply);
                self.counters().inc(COUNTER_COMMANDS);
                0
            }
            Err(errno) => {
                self.counters().inc(COUNTER_COMMANDS_REFUSED);
                errno as u32
            }
        };
        /* release: the answer before its status */
        queue.store_half(status_at, status, Ordering::Release);
        self.progress.head = self.progress.head.wrapping_add(1);
    }
}
