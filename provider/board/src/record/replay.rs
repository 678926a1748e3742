//! A record played back: the same board, with the record for its clock, its clients, their memory and the
//! port. What it does is compared line by line.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use nix::sys::eventfd::{EfdFlags, EventFd};
use starverbs_backend::sealed;
use starverbs_queues::board::BAR_DOORBELLS;
use starverbs_vfio::message::{
    Access, DMA_READ, DMA_UNMAP_ALL, DMA_WRITE, DmaMap, DmaUnmap, Head, SetIrqs, parse,
};
use starverbs_vfio::{MessageOp, VfioMessage};
use thiserror::Error;
use zerocopy::IntoBytes;

use super::{HostRequest, RecordHeader, RecordLine, Tap};
use crate::server::answer;
use crate::stats::Stats;
use crate::wire::{WireRx, WireTx};
use crate::{Board, BoardError};

/// Descriptors of a message at most.
const MOST_FDS: u32 = 64;

/// Where a board does something else than a record says.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("line {line}: recorded: {recorded}; now: {seen}")]
pub struct Divergence {
    /// The number of the line
    pub line: usize,
    /// What it says
    pub recorded: String,
    /// What the board does
    pub seen: String,
}

/// Why a record is not played back to its end.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// A line of the head is none.
    #[error("line {0} is none of the head of a record")]
    Head(usize),
    /// There is no board.
    #[error(transparent)]
    Board(#[from] BoardError),
    /// The board does something else.
    #[error(transparent)]
    Diverged(#[from] Divergence),
}

/// What was played back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Played {
    /// Turns of the board
    pub turns: u64,
    /// Lines of the record
    pub lines: usize,
}

/// A record, and the board that it is played to.
pub struct Replay {
    board: Board,
    tap: Rc<Tap>,
    played: Played,
}

impl Replay {
    /// Reads the head of a record, and makes its board.
    ///
    /// # Errors
    /// It is none; there is no memory for the board.
    pub fn open(file: File) -> Result<Replay, ReplayError> {
        let mut from = super::open(file);
        let (header, lines) = RecordHeader::read(&mut *from).map_err(ReplayError::Head)?;
        let tap = Tap::replay(from, lines);
        let wire = (WireTx::Nowhere(header.addrs.clone()), WireRx::Record(Rc::clone(&tap), Vec::new()));
        let stats = Stats::default();
        let board = Board::assemble(&header, stats, wire, Rc::clone(&tap), 0)?;
        Ok(Replay { board, tap, played: Played::default() })
    }

    /// Plays it back.
    ///
    /// # Errors
    /// Where the board does something else.
    pub fn run(&mut self) -> Result<Played, ReplayError> {
        loop {
            if let Some(line) = self.tap.line() {
                self.played.lines = line;
            }
            let time = self.tap.next(|line| match line {
                RecordLine::Time(now) => Some(*now),
                _ => None,
            });
            match time {
                Some(now) => self.turn(now),
                None if self.tap.line().is_some() => {
                    self.tap.end("the end of what is done in this turn".to_owned());
                }
                None => {}
            }
            match (self.tap.ended(), time) {
                (Some(ended), _) => return Err(ended.into()),
                (None, None) => return Ok(self.played),
                (None, Some(_)) => self.played.turns += 1,
            }
        }
    }

    fn turn(&mut self, now: u64) {
        self.board.work(now);
        while self.tap.ended().is_none() && (self.claim() || self.message()) {
            self.board.more = true;
        }
        self.board.deliver();
    }

    /// The board gets one more block of QPNs, if that is next.
    fn claim(&mut self) -> bool {
        let block = self.tap.peek(|line| matches!(line, RecordLine::Host(HostRequest::Block, Ok(_))));
        if block {
            self.board.add_block(|| Err(libc::EIO));
        }
        block
    }

    /// Does what a client asked for, if that is next.
    fn message(&mut self) -> bool {
        let is_message = |line: &RecordLine| {
            matches!(
                line,
                RecordLine::Write { .. }
                    | RecordLine::Read { .. }
                    | RecordLine::Map { .. }
                    | RecordLine::Unmap { .. }
                    | RecordLine::Vectors { .. }
                    | RecordLine::Reset { .. }
                    | RecordLine::Gone { .. }
                    | RecordLine::Lost { .. }
            )
        };
        let Some(line) = self.tap.next(|line| is_message(line).then(|| line.clone())) else { return false };
        if self.perform(&line).is_none() {
            self.tap.end("what no board can be asked for".to_owned());
        }
        true
    }

    /// `None`: the board has no such function, or the line says what cannot be.
    fn perform(&mut self, line: &RecordLine) -> Option<()> {
        match *line {
            RecordLine::Write { function, region, offset, ref bytes } => {
                let access = Access { offset, region, count: bytes.len() as u32 };
                let body = [access.as_bytes(), bytes].concat();
                self.ask(function, MessageOp::RegionWrite, body, Vec::new(), true)
            }
            RecordLine::Read { function, region, offset, ref bytes } => {
                let access = Access { offset, region, count: bytes.len() as u32 };
                let body = access.as_bytes().to_vec();
                let seen = self.answer(function, MessageOp::RegionRead, body, Vec::new())?;
                let (_, seen) = parse::<Access>(seen.as_ref().ok()?)?;
                /* cells are memory, in which clients write what they like */
                if region != BAR_DOORBELLS && seen != bytes {
                    let seen = RecordLine::Read { function, region, offset, bytes: seen.to_vec() };
                    self.tap.end(seen.to_string());
                }
                Some(())
            }
            RecordLine::Map { function, address, size, writable, here } => {
                let flags = DMA_READ | if writable { DMA_WRITE } else { 0 };
                let map = DmaMap { argsz: 0, flags, offset: 0, address, size };
                let fds = vec![if here { memory(size)? } else { process()? }];
                self.ask(function, MessageOp::DmaMap, map.as_bytes().to_vec(), fds, false)
            }
            RecordLine::Unmap { function, address, size } => {
                let flags = if size == u64::MAX { DMA_UNMAP_ALL } else { 0 };
                let unmap = DmaUnmap { argsz: 0, flags, address, size };
                self.ask(function, MessageOp::DmaUnmap, unmap.as_bytes().to_vec(), Vec::new(), false)
            }
            RecordLine::Vectors { function, flags, index, start, count, given } => {
                let irqs = SetIrqs { argsz: 0, flags, index, start, count };
                let fds = (0..given.min(MOST_FDS)).map(|_| eventfd()).collect::<Option<_>>()?;
                self.ask(function, MessageOp::SetIrqs, irqs.as_bytes().to_vec(), fds, true)
            }
            RecordLine::Reset { function } => {
                self.ask(function, MessageOp::DeviceReset, Vec::new(), Vec::new(), true)
            }
            RecordLine::Gone { function } => {
                let Board { card, functions, .. } = &mut self.board;
                functions.get_mut(usize::from(function))?.disconnect(card);
                Some(())
            }
            RecordLine::Lost { function, lost } => {
                self.board.functions.get_mut(usize::from(function))?.set_lost(lost);
                Some(())
            }
            _ => None,
        }
    }

    fn answer(
        &mut self,
        function: u8,
        op: MessageOp,
        body: Vec<u8>,
        fds: Vec<OwnedFd>,
    ) -> Option<Result<Vec<u8>, i32>> {
        let Board { card, functions, .. } = &mut self.board;
        let function = functions.get_mut(usize::from(function))?;
        let message = VfioMessage { head: Head::default(), body, fds };
        Some(answer(op, message, true, function, card).map(|(body, _)| body))
    }

    /// `may_fail`: it may have been refused, which is in the record then; else it was not.
    fn ask(
        &mut self,
        function: u8,
        op: MessageOp,
        body: Vec<u8>,
        fds: Vec<OwnedFd>,
        may_fail: bool,
    ) -> Option<()> {
        match self.answer(function, op, body, fds)? {
            Err(errno) if may_fail => self.tap.note(|| RecordLine::Refused(errno)),
            Err(errno) => self.tap.end(RecordLine::Refused(errno).to_string()),
            Ok(_) => {}
        }
        Some(())
    }
}

/// Memory that nothing is read from: what is there stands in the record.
fn memory(size: u64) -> Option<OwnedFd> {
    sealed::file(c"starverbs-replay", usize::try_from(size).ok()?).ok().map(OwnedFd::from)
}

/// A file like another process's memory, which is not read either.
fn process() -> Option<OwnedFd> {
    File::open("/proc/self/stat").ok().map(OwnedFd::from)
}

fn eventfd() -> Option<OwnedFd> {
    EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK).ok().map(OwnedFd::from)
}
