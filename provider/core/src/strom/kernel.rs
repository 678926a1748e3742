//! What a kernel is, and what it works with (the paper's listing 1 and figure 4).
//!
//! The paper's ports, here: `qpnIn`, `paramIn` and `roceDataIn` are [`Input`] and [`KernelRun::bytes`];
//! `dmaCmdOut` and `dmaDataOut` the commands that a step queues, `dmaDataIn` is [`KernelRun::read_data`];
//! `roceMetaOut` and `roceDataOut` are [`KernelRun::reply`] and [`KernelRun::reply_from`].

use alloc::vec::Vec;

use super::MAX_REPLY;
use super::wire::Code;
use crate::error::NicError;
use crate::room::{Room, exact};
use crate::types::Qpn;

/// Commands that a step may queue.
pub const COMMANDS: usize = 64;
/// Bytes that they may write together.
const OUT: usize = 8192;
/// Bytes of a packet, and of what a command reads.
pub const PIECE: usize = 4096;
/// What a command counts for beside its bytes, where bytes are counted.
pub(crate) const COMMAND: u32 = 64;

/// Bytes of a memory region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegionRange {
    /// Its key
    pub key: u32,
    /// Length, bytes
    pub len: u32,
    /// First byte
    pub va: u64,
}

/// What a request brings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// RPC: the parameters behind its [`ReplyHead`](super::ReplyHead)
    Params,
    /// RPC WRITE: a packet's payload; where it stands in the message
    Data {
        /// It begins one
        first: bool,
        /// It ends one
        last: bool,
    },
}

/// How far a kernel is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Poll {
    /// Its commands are to be executed; then it is stepped again
    Pending,
    /// It is done, once its commands are executed
    Ready(Code),
}

/// Code on the card. One kernel serves all queue pairs of its protection domain; what belongs to one request
/// stands in its [`KernelRun`], as steps of several take turns. A kernel must not panic.
pub trait Kernel: Send {
    /// A request begins, or a stream goes on: looks at it, and may queue commands.
    ///
    /// # Errors
    /// The code with which it ends at once.
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code>;
    /// Goes on, its commands executed. Must return soon: the card does nothing else meanwhile.
    fn step(&mut self, run: &mut KernelRun) -> Poll;
    /// What it is, in a word, for people.
    fn name(&self) -> &'static str {
        "kernel"
    }
}

/// Memory, as far as a kernel's requests open it.
pub trait KernelMemory {
    /// Copies as many bytes as `to` has. False: the key does not open them, or there is no memory now.
    #[must_use]
    fn read(&mut self, from: RegionRange, to: &mut [u8]) -> bool;
    /// Writes `data`. False: as of `read`.
    #[must_use]
    fn write(&mut self, to: RegionRange, data: &[u8]) -> bool;
    /// Has a queue pair send `data`, 4096 bytes at most, as a WRITE to a region of its peer's.
    fn send(&mut self, qpn: Qpn, to: RegionRange, data: &[u8]) -> KernelSend {
        let _ = (qpn, to, data);
        KernelSend::Denied
    }
}

/// What became of a [`KernelMemory::send`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KernelSend {
    /// It is in the send queue
    Posted,
    /// There is no room now
    Full,
    /// The kernel has no such queue pair
    Denied,
}

/// A DMA command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DmaCommand {
    /// Its bytes are there at the next step
    Read(RegionRange),
    /// Bytes of the run's output, in the order in which they were queued
    Write(RegionRange),
    /// As `Write`, to a region of a queue pair's peer
    Send(Qpn, RegionRange),
}

/// What an answer is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum ReplyBody {
    /// Nothing but its record
    #[default]
    Empty,
    /// So many bytes of the run
    Bytes(u32),
    /// Bytes of a region, which leave as they are then
    Region(RegionRange),
}

/// A request at a kernel. Made with its queue pair; no step allocates.
#[derive(Debug, Default)]
pub struct KernelRun {
    /// Registers, the kernel's own: 0 at the start of a message, and kept between the packets of one
    pub regs: [u64; 8],
    pub(crate) qpn: Qpn,
    pub(crate) answer: ReplyBody,
    bytes: Vec<u8>,
    read: Vec<u8>,
    out: Vec<u8>,
    commands: Vec<DmaCommand>,
    /// Commands that were executed, and bytes of `out` that were theirs
    executed: (usize, usize),
    /// How the kernel has ended, whose commands are not all executed
    pub(crate) ended: Option<Code>,
    reply: Vec<u8>,
}

impl KernelRun {
    /// Room for one request. `Exhausted`: no memory.
    pub fn new(qpn: Qpn) -> Result<Self, NicError> {
        let mut run = KernelRun { qpn, ..KernelRun::default() };
        exact(&mut run.bytes, PIECE)?;
        exact(&mut run.read, PIECE)?;
        exact(&mut run.out, OUT)?;
        exact(&mut run.commands, COMMANDS)?;
        exact(&mut run.reply, MAX_REPLY)?;
        Ok(run)
    }

    /// The queue pair that the request came to.
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// The parameters, or a packet's payload.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// `N` bytes of them from `at` on. `None`: there are fewer.
    pub fn param<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.bytes.get(at..)?.first_chunk().copied()
    }

    /// A number of four bytes among them.
    pub fn param_u32(&self, at: usize) -> Option<u32> {
        self.param(at).map(u32::from_le_bytes)
    }

    /// A number of eight bytes among them.
    pub fn param_u64(&self, at: usize) -> Option<u64> {
        self.param(at).map(u64::from_le_bytes)
    }

    /// What the last read brought.
    pub fn read_data(&self) -> &[u8] {
        &self.read
    }

    /// Queues a read of 4096 bytes at most. False: too long, or there is no room; return [`Poll::Pending`]
    /// and try again.
    #[must_use]
    pub fn read(&mut self, from: RegionRange) -> bool {
        from.len as usize <= PIECE && self.queue(DmaCommand::Read(from))
    }

    /// Queues a write of `data` to the first bytes of `to`. False: as of `read`.
    #[must_use]
    pub fn write(&mut self, key: u32, va: u64, data: &[u8]) -> bool {
        let to = RegionRange { key, va, len: data.len() as u32 };
        queue_out(&mut self.out, &mut self.commands, DmaCommand::Write(to), data)
    }

    /// Queues a WRITE of `data`, 4096 bytes at most, by a queue pair of the kernel's protection domain to a
    /// region of its peer's, behind what was posted there. Of a kernel that its own program has called
    /// alone; others end with ACCESS. False: as of `read`.
    #[must_use]
    pub fn send(&mut self, qpn: Qpn, key: u32, va: u64, data: &[u8]) -> bool {
        let to = RegionRange { key, va, len: data.len() as u32 };
        data.len() <= MAX_REPLY
            && queue_out(&mut self.out, &mut self.commands, DmaCommand::Send(qpn, to), data)
    }

    /// As `write`, of the packet's own bytes in `range`, which must lie in there.
    #[must_use]
    pub fn write_bytes(&mut self, key: u32, va: u64, range: core::ops::Range<usize>) -> bool {
        let KernelRun { bytes, out, commands, .. } = self;
        let Some(data) = bytes.get(range) else { return false };
        let to = RegionRange { key, va, len: data.len() as u32 };
        queue_out(out, commands, DmaCommand::Write(to), data)
    }

    fn queue(&mut self, command: DmaCommand) -> bool {
        let room = self.commands.len() < COMMANDS;
        if room {
            self.commands.push_in_room(command);
        }
        room
    }

    /// Adds to the answer. False: it is longer than [`MAX_REPLY`].
    #[must_use]
    pub fn reply(&mut self, data: &[u8]) -> bool {
        let fits = self.reply.len() + data.len() <= MAX_REPLY;
        if fits {
            self.reply.extend_from_slice(data);
            self.answer = ReplyBody::Bytes(self.reply.len() as u32);
        }
        fits
    }

    /// What the last read brought is the answer.
    pub fn reply_read(&mut self) {
        self.reply.clear();
        self.reply.extend_from_slice(&self.read);
        self.answer = ReplyBody::Bytes(self.reply.len() as u32);
    }

    /// The answer is bytes of a region, as they are when they leave.
    pub fn reply_from(&mut self, from: RegionRange) {
        self.answer = ReplyBody::Region(from);
    }

    /// For who runs kernels: a packet's bytes, 4096 at most, of which nothing is queued or answered yet.
    /// `begins`: a message does.
    pub fn load(&mut self, bytes: &[u8], begins: bool) {
        self.clear();
        self.bytes.extend_from_slice(bytes.get(..PIECE).unwrap_or(bytes));
        if begins {
            self.regs = [0; 8];
        }
    }

    /// Makes a place of so many bytes, [`PIECE`] at most, for a message that comes in pieces.
    pub(crate) fn make_place(&mut self, length: usize) {
        self.read.clear();
        self.read.resize(length.min(PIECE), 0);
    }

    /// The place that was made.
    pub(crate) fn place(&mut self) -> &mut [u8] {
        &mut self.read
    }

    /// What has come to the place, to be given back.
    pub(crate) fn take_place(&mut self) -> Vec<u8> {
        core::mem::take(&mut self.read)
    }

    /// The memory of the place is the run's again.
    pub(crate) fn give_back(&mut self, mut place: Vec<u8>) {
        place.clear();
        self.read = place;
    }

    /// For who runs kernels elsewhere than the card: a request as it stands there, of which nothing is queued
    /// or answered here.
    pub fn take_over(&mut self, qpn: Qpn, regs: [u64; 8], bytes: &[u8], read: &[u8]) {
        self.load(bytes, true);
        (self.qpn, self.regs) = (qpn, regs);
        self.read.extend_from_slice(read.get(..PIECE).unwrap_or(read));
    }

    /// For who runs kernels: executes what a step queued, in order; gives what it cost. Where a queue pair
    /// has no room for what is sent, the rest stays queued ([`KernelRun::is_drained`]). ACCESS: a command was
    /// denied, and those behind it were not executed.
    pub fn execute(&mut self, memory: &mut impl KernelMemory) -> Result<u32, Code> {
        let (mut at, mut out) = self.executed;
        let mut cost = 0;
        while let Some(command) = self.commands.get(at) {
            let done = match *command {
                DmaCommand::Read(from) => {
                    cost += COMMAND + from.len;
                    self.read.clear();
                    self.read.resize((from.len as usize).min(PIECE), 0);
                    memory.read(from, &mut self.read)
                }
                DmaCommand::Write(to) => {
                    cost += COMMAND + to.len;
                    let data = self.out.get(out..).and_then(|out| out.get(..to.len as usize));
                    out += to.len as usize;
                    data.is_some_and(|data| memory.write(to, data))
                }
                DmaCommand::Send(qpn, to) => {
                    let data = self.out.get(out..).and_then(|out| out.get(..to.len as usize));
                    match data.map_or(KernelSend::Denied, |data| memory.send(qpn, to, data)) {
                        KernelSend::Full => {
                            self.executed = (at, out);
                            return Ok(cost);
                        }
                        sent => {
                            cost += COMMAND + to.len;
                            out += to.len as usize;
                            sent == KernelSend::Posted
                        }
                    }
                }
            };
            if !done {
                return Err(Code::Access);
            }
            at += 1;
        }
        self.drained();
        Ok(cost)
    }

    /// Whether nothing that was queued is left.
    pub fn is_drained(&self) -> bool {
        self.commands.is_empty()
    }

    /// For who runs kernels elsewhere: what a step queued, in order; of a write its bytes, too.
    pub fn queued(&self) -> impl Iterator<Item = (DmaCommand, &[u8])> {
        let mut out = self.out.as_slice();
        self.commands.iter().map(move |command| {
            let mut data = &[][..];
            if let DmaCommand::Write(to) | DmaCommand::Send(_, to) = command {
                (data, out) = out.split_at_checked(to.len as usize).unwrap_or_default();
            }
            (*command, data)
        })
    }

    /// Forgets what the last packet left.
    fn clear(&mut self) {
        self.bytes.clear();
        self.read.clear();
        self.reply.clear();
        self.drained();
        self.ended = None;
        self.answer = ReplyBody::Empty;
    }

    fn drained(&mut self) {
        self.commands.clear();
        self.out.clear();
        self.executed = (0, 0);
    }

    /// For who runs kernels: the region that the answer is in, if it is in one.
    pub fn answered_from(&self) -> Option<RegionRange> {
        if let ReplyBody::Region(from) = self.answer { Some(from) } else { None }
    }

    /// What the kernel put together.
    pub fn reply_bytes(&self) -> &[u8] {
        &self.reply
    }
}

/// Queues a command with its data, if there is room for both.
fn queue_out(out: &mut Vec<u8>, commands: &mut Vec<DmaCommand>, command: DmaCommand, data: &[u8]) -> bool {
    let fits = out.len() + data.len() <= OUT && commands.len() < COMMANDS;
    if fits {
        out.extend_from_slice(data);
        commands.push_in_room(command);
    }
    fits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_room_is_refused_and_nothing_is_lost() {
        let mut run = KernelRun::new(1).unwrap();
        assert!(!run.read(RegionRange { len: 4097, ..RegionRange::default() }));
        assert!(run.write(1, 0, &[7; OUT]) && !run.write(1, 0, &[8]));
        assert_eq!((run.commands.len(), run.out.len()), (1, OUT));
        run.drained();
        assert!((0..COMMANDS).all(|at| run.write(1, at as u64, &[1])) && !run.write(1, 0, &[1]));
        assert!(!run.read(RegionRange::default()));
        assert!(run.reply(&[0; MAX_REPLY]) && !run.reply(&[0]));
        run.load(&[1, 0, 0, 0, 2], true);
        assert_eq!((run.commands.len(), run.param_u32(0), run.param_u32(2)), (0, Some(1), None));
        assert_eq!(run.answer, ReplyBody::Empty);
    }
}
