//! Kernels that write down what they are started with. The journal reads and writes its domain's memory, in
//! as many steps as it is told to, and answers with what it read. A watched kernel is one of every card's.

use std::sync::{Arc, Mutex};

use starverbs_core::Qpn;
use starverbs_core::strom::{Code, Input, Kernel, KernelRun, Poll, RegionRange};
use starverbs_kernels::crc64::crc64;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::JOURNAL;

/// Its parameters; behind them stands what it writes.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct Task {
    /// Number of the request
    pub(crate) seq: U64,
    /// First byte that it reads
    pub(crate) from: U64,
    /// First byte that it writes
    pub(crate) to: U64,
    /// Key of both
    pub(crate) rkey: U32,
    /// Bytes that it reads
    pub(crate) len: U32,
    /// Bytes that a command reads or writes at most, 1 to 4096
    pub(crate) piece: U32,
    /// Steps that do nothing, between reading and writing
    pub(crate) idle: U32,
    /// Bytes of the answer behind the first 16
    pub(crate) more: U32,
}

/// Bytes of a [`Task`].
pub(crate) const TASK_LEN: usize = size_of::<Task>();

impl Task {
    fn of(run: &KernelRun) -> Result<(Task, usize), Code> {
        let (task, data) = Task::read_from_prefix(run.bytes()).map_err(|_| Code::BadParam)?;
        Ok((task, data.len()))
    }
}

/// Something that happened to a kernel, by the number of the queue pair.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Note {
    /// An RPC began, with these parameters
    Began { qpn: Qpn, op: u64, params: Vec<u8> },
    /// The RPC that began last at the journal is done; the CRC of what it read
    Ended(Qpn, u64),
    /// A packet of an RPC WRITE
    Piece { qpn: Qpn, op: u64, first: bool, last: bool, data: Vec<u8> },
    /// A watched kernel is done with the RPC or the packet that it began last for the queue pair
    Done { qpn: Qpn, op: u64, code: Code },
}

/// What the kernels of a host wrote down, in order.
pub(crate) type Notes = Arc<Mutex<Vec<Note>>>;

/// The kernel.
pub(crate) struct Journal(pub(crate) Notes);

/* registers */
const STREAM: usize = 0;
const IDLE: usize = 1;
const ASKED: usize = 2;
const READ: usize = 3;
const CRC: usize = 4;
const WRITTEN: usize = 5;

/// What an answer has behind its first 16 bytes.
pub(crate) fn filling(seq: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (seq.wrapping_mul(0x9e37_79b9) >> 3 ^ at.wrapping_mul(29)) as u8).collect()
}

/// Steps that a packet of a stream takes: some take many.
fn steps_of(data: &[u8]) -> u64 {
    match data.first() {
        Some(0..8) => 600,
        Some(8..64) => 2,
        _ => 0,
    }
}

fn write_down(notes: &Notes, note: Note) {
    notes.lock().expect("no thread panics").push(note);
}

/// What begins a note of a request.
fn beginning(run: &KernelRun, op: u64, input: Input) -> Note {
    let (qpn, data) = (run.qpn(), run.bytes().to_vec());
    match input {
        Input::Params => Note::Began { qpn, op, params: data },
        Input::Data { first, last } => Note::Piece { qpn, op, first, last, data },
    }
}

/// A kernel that does what `kernel` does, and writes down what that was started with and when it was done.
pub(crate) struct Watched {
    pub(crate) op: u64,
    pub(crate) kernel: Box<dyn Kernel>,
    pub(crate) notes: Notes,
}

impl Kernel for Watched {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        write_down(&self.notes, beginning(run, self.op, input));
        let begun = self.kernel.start(run, input);
        begun.inspect_err(|code| {
            write_down(&self.notes, Note::Done { qpn: run.qpn(), op: self.op, code: *code });
        })
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        let poll = self.kernel.step(run);
        if let Poll::Ready(code) = poll {
            write_down(&self.notes, Note::Done { qpn: run.qpn(), op: self.op, code });
        }
        poll
    }
}

impl Journal {
    /// The next command, or the answer. Whether there is more to do.
    fn go_on(&self, run: &mut KernelRun) -> Result<bool, Code> {
        let (task, data) = Task::of(run)?;
        let (rkey, piece) = (task.rkey.get(), u64::from(task.piece.get()));
        let asked = std::mem::take(&mut run.regs[ASKED]);
        if asked > 0 {
            run.regs[CRC] = crc64(run.regs[CRC], run.read_data());
            run.regs[READ] += asked;
        }
        let (read, left) = (run.regs[READ], u64::from(task.len.get()) - run.regs[READ]);
        if left > 0 {
            let (va, len) = (task.from.get().wrapping_add(read), left.min(piece));
            run.regs[ASKED] = len;
            let queued = run.read(RegionRange { key: rkey, len: len as u32, va });
            return if queued { Ok(true) } else { Err(Code::BadParam) };
        }
        if run.regs[IDLE] > 0 {
            run.regs[IDLE] -= 1;
            return Ok(true);
        }
        let written = run.regs[WRITTEN] as usize;
        if written < data {
            let end = data.min(written + piece as usize);
            let va = task.to.get().wrapping_add(written as u64);
            run.regs[WRITTEN] = end as u64;
            let queued = run.write_bytes(rkey, va, TASK_LEN + written..TASK_LEN + end);
            return if queued { Ok(true) } else { Err(Code::BadParam) };
        }
        write_down(&self.0, Note::Ended(run.qpn(), run.regs[CRC]));
        let head = [task.seq.get().to_le_bytes(), run.regs[CRC].to_le_bytes()].concat();
        let more = filling(task.seq.get(), task.more.get() as usize);
        if run.reply(&head) && run.reply(&more) { Ok(false) } else { Err(Code::Overflow) }
    }
}

impl Kernel for Journal {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        write_down(&self.0, beginning(run, JOURNAL, input));
        match input {
            Input::Params => run.regs[IDLE] = Task::of(run)?.0.idle.get().into(),
            Input::Data { .. } => (run.regs[STREAM], run.regs[IDLE]) = (1, steps_of(run.bytes())),
        }
        Ok(())
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        if run.regs[STREAM] == 0 {
            return match self.go_on(run) {
                Ok(true) => Poll::Pending,
                Ok(false) => Poll::Ready(Code::Ok),
                Err(code) => Poll::Ready(code),
            };
        }
        if run.regs[IDLE] == 0 {
            return Poll::Ready(Code::Ok);
        }
        run.regs[IDLE] -= 1;
        Poll::Pending
    }
}
