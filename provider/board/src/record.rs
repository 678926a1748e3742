//! The record of a board: what crosses its edges, one line each, in the order in which it happened.
//!
//! Each place where the board touches the world passes a tap, which is off, writes what happens, or plays a
//! record back: then what comes in is the record's, and what goes out is compared with it. The board in
//! between is the same: it has no other clock, memory, port and chance than these. docs/board-record.md has
//! the format.
//!
//! Owns the taps. It must not know what the board does.

mod header;
mod line;
mod replay;

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::rc::Rc;

use starverbs_core::{Av, FrameMeta, Nanos};

pub(crate) use header::RecordHeader;
pub(crate) use line::{FrameRecord, HostRequest, RecordLine};
pub use replay::{Divergence, Played, Replay, ReplayError};

use crate::dma::Errno;

/// Bytes of a line that are looked at: none is longer.
const MOST: u64 = 1 << 20;

/// What a board's taps do.
pub(crate) struct Tap(Option<RefCell<Mode>>);

enum Mode {
    Record(Recorder),
    Replay(RecordReader),
}

/// A record that is written.
struct Recorder {
    to: BufWriter<File>,
    /// When the turn began, as long as nothing was written in it
    turn: Option<Nanos>,
    error: Option<io::Error>,
}

impl Recorder {
    fn note(&mut self, line: &RecordLine) {
        if let Some(now) = self.turn.take() {
            self.line(&RecordLine::Time(now));
        }
        self.line(line);
    }

    fn line(&mut self, line: &RecordLine) {
        if self.error.is_none() {
            self.error = writeln!(self.to, "{line}").err();
        }
    }
}

/// A record that is played back.
struct RecordReader {
    from: Box<dyn BufRead>,
    next: Option<RecordLine>,
    /// Number of the line that is next
    number: usize,
    /// Why it cannot go on
    ended: Option<Divergence>,
}

impl RecordReader {
    fn advance(&mut self) {
        self.next = None;
        let mut text = String::new();
        while self.ended.is_none() {
            text.clear();
            self.number += 1;
            let got = (&mut self.from).take(MOST).read_line(&mut text);
            match got {
                Ok(0) => return,
                Ok(_) if is_comment(&text) => continue,
                _ => {}
            }
            self.next = got.ok().and_then(|_| RecordLine::parse(&text));
            if self.next.is_none() {
                self.end("a line of a record".to_owned(), text.trim_end().to_owned());
            }
            return;
        }
    }

    fn end(&mut self, seen: String, recorded: String) {
        let line = self.number;
        self.ended.get_or_insert(Divergence { line, recorded, seen });
        self.next = None;
    }

    /// The next line, if `wanted` has it that it is what is due; it ends if not.
    fn take<T>(
        &mut self,
        due: impl FnOnce() -> String,
        wanted: impl FnOnce(&RecordLine) -> Option<T>,
    ) -> Option<T> {
        let found = self.next.as_ref().and_then(wanted);
        match found {
            Some(found) => {
                self.advance();
                Some(found)
            }
            None => {
                let recorded = self.next.as_ref().map_or_else(|| "its end".to_owned(), RecordLine::to_string);
                self.end(due(), recorded);
                None
            }
        }
    }
}

/// Empty lines and those that begin with `#` say nothing.
fn is_comment(text: &str) -> bool {
    let text = text.trim_start();
    text.is_empty() || text.starts_with('#')
}

impl Tap {
    /// One that does nothing.
    pub(crate) fn off() -> Rc<Tap> {
        Rc::new(Tap(None))
    }

    /// One that writes a record.
    ///
    /// # Errors
    /// The head cannot be written.
    pub(crate) fn record(to: File, header: &RecordHeader) -> io::Result<Rc<Tap>> {
        let mut to = BufWriter::new(to);
        write!(to, "{header}")?;
        Ok(Rc::new(Tap(Some(RefCell::new(Mode::Record(Recorder { to, turn: None, error: None }))))))
    }

    /// One that plays a record back, whose head has `number` lines and was read.
    fn replay(from: Box<dyn BufRead>, number: usize) -> Rc<Tap> {
        let mut reader = RecordReader { from, next: None, number, ended: None };
        reader.advance();
        Rc::new(Tap(Some(RefCell::new(Mode::Replay(reader)))))
    }

    /// Whether it does anything.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.is_some()
    }

    fn reader<T>(&self, on: impl FnOnce(&mut RecordReader) -> T) -> Option<T> {
        match &mut *self.0.as_ref()?.borrow_mut() {
            Mode::Replay(reader) => Some(on(reader)),
            Mode::Record(_) => None,
        }
    }

    fn recorder<T>(&self, on: impl FnOnce(&mut Recorder) -> T) -> Option<T> {
        match &mut *self.0.as_ref()?.borrow_mut() {
            Mode::Record(recorder) => Some(on(recorder)),
            Mode::Replay(_) => None,
        }
    }

    /// Whether it plays a record back.
    pub(crate) fn is_replay(&self) -> bool {
        self.reader(|_| ()).is_some()
    }

    /// A turn begins; nothing is written of one in which nothing happens.
    pub(crate) fn begin_turn(&self, now: Nanos) {
        self.recorder(|recorder| recorder.turn = Some(now));
    }

    /// Something happens in this turn that is seen nowhere else.
    pub(crate) fn mark(&self) {
        self.recorder(|recorder| {
            if let Some(now) = recorder.turn.take() {
                recorder.line(&RecordLine::Time(now));
            }
        });
    }

    /// What the board did, or what was asked of it: is written, or compared.
    pub(crate) fn note(&self, line: impl FnOnce() -> RecordLine) {
        let Some(mode) = &self.0 else { return };
        let line = line();
        match &mut *mode.borrow_mut() {
            Mode::Record(recorder) => recorder.note(&line),
            Mode::Replay(reader) => {
                reader.take(|| line.to_string(), |next| (*next == line).then_some(()));
            }
        }
    }

    /// What the host answers.
    pub(crate) fn host(
        &self,
        asked: HostRequest,
        real: impl FnOnce() -> Result<u32, Errno>,
    ) -> Result<u32, Errno> {
        let due = || format!("host {asked:?}");
        let replayed = self.reader(|reader| {
            reader.take(due, |next| match next {
                RecordLine::Host(of, result) if *of == asked => Some(*result),
                _ => None,
            })
        });
        if let Some(replayed) = replayed {
            return replayed.unwrap_or(Err(libc::EIO));
        }
        let result = real();
        self.note(|| RecordLine::Host(asked, result));
        result
    }

    /// A frame that came.
    pub(crate) fn frame_in(&self, meta: &FrameMeta, frame: &[u8]) {
        self.recorder(|recorder| {
            let FrameMeta { src, dst, traffic_class, hop_limit } = *meta;
            let bytes = frame.to_vec();
            recorder.note(&RecordLine::FrameIn(FrameRecord { src, dst, traffic_class, hop_limit, bytes }));
        });
    }

    /// The frame that comes next.
    pub(crate) fn next_frame(&self) -> Option<FrameRecord> {
        self.next(|line| match line {
            RecordLine::FrameIn(frame) => Some(frame.clone()),
            _ => None,
        })
    }

    /// A frame that is sent.
    pub(crate) fn frame_out(&self, to: &Av, bytes: impl FnOnce() -> Vec<u8>) {
        let Av { dgid: dst, sgid: src, traffic_class, hop_limit, .. } = *to;
        self.note(|| {
            RecordLine::FrameOut(FrameRecord { src, dst, traffic_class, hop_limit, bytes: bytes() })
        });
    }

    /// The next line of a record that is played back, if `wanted` wants it.
    fn next<T>(&self, wanted: impl FnOnce(&RecordLine) -> Option<T>) -> Option<T> {
        self.reader(|reader| {
            let found = reader.next.as_ref().and_then(wanted)?;
            reader.advance();
            Some(found)
        })
        .flatten()
    }

    /// Whether `wanted` wants the next line of a record that is played back.
    fn peek(&self, wanted: impl FnOnce(&RecordLine) -> bool) -> bool {
        self.reader(|reader| reader.next.as_ref().is_some_and(wanted)).unwrap_or(false)
    }

    /// The board does something else than what the line before the next one says.
    fn end(&self, seen: String) {
        self.reader(|reader| {
            let recorded = reader.next.as_ref().map_or_else(|| "its end".to_owned(), RecordLine::to_string);
            reader.end(seen, recorded);
        });
    }

    /// Why a record cannot be played on.
    fn ended(&self) -> Option<Divergence> {
        self.reader(|reader| reader.ended.clone()).flatten()
    }

    /// The number of the next line, if there is one.
    fn line(&self) -> Option<usize> {
        self.reader(|reader| reader.next.as_ref().map(|_| reader.number)).flatten()
    }

    /// What was noted is in the file.
    pub(crate) fn flush(&self) {
        self.recorder(|recorder| {
            if recorder.error.is_none() {
                recorder.error = recorder.to.flush().err();
            }
        });
    }

    /// The same, at the end.
    ///
    /// # Errors
    /// It could not be written, now or before.
    pub(crate) fn finish(&self) -> io::Result<()> {
        self.flush();
        self.recorder(|recorder| recorder.error.take()).flatten().map_or(Ok(()), Err)
    }

    /// Whether the record could be written so far.
    pub(crate) fn is_sound(&self) -> bool {
        self.recorder(|recorder| recorder.error.is_none()).unwrap_or(true)
    }
}

/// The taps of a function's bus.
#[derive(Clone)]
pub(crate) struct BusTap {
    tap: Rc<Tap>,
    function: u8,
}

impl BusTap {
    pub(crate) fn new(tap: &Rc<Tap>, function: usize) -> BusTap {
        BusTap { tap: Rc::clone(tap), function: function as u8 }
    }

    /// Whether it does anything.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.tap.is_on()
    }

    /// Memory is read, by `real` if it is not the record's; says whether it is there.
    #[inline]
    pub(crate) fn read(&self, address: u64, to: &mut [u8], real: impl FnOnce(&mut [u8]) -> bool) -> bool {
        if self.tap.is_on() { self.read_noted(address, to, real) } else { real(to) }
    }

    #[cold]
    fn read_noted(&self, address: u64, to: &mut [u8], real: impl FnOnce(&mut [u8]) -> bool) -> bool {
        let (function, len) = (self.function, to.len());
        let due = || format!("dma-read {function} {address:x} {len}");
        let replayed = self.tap.reader(|reader| {
            reader.take(due, |next| match next {
                RecordLine::DmaRead { function: of, address: at, len: as_many, bytes }
                    if (*of, *at, *as_many) == (function, address, len) =>
                {
                    Some(bytes.clone())
                }
                _ => None,
            })
        });
        if let Some(replayed) = replayed {
            let bytes = replayed.flatten();
            if let Some(bytes) = &bytes {
                to.copy_from_slice(bytes);
            }
            return bytes.is_some();
        }
        let there = real(to);
        self.tap.note(|| {
            let bytes = there.then(|| to.to_vec());
            RecordLine::DmaRead { function, address, len, bytes }
        });
        there
    }

    /// Memory is written; says whether it is there.
    #[inline]
    pub(crate) fn write(&self, address: u64, bytes: &[u8], real: impl FnOnce() -> bool) -> bool {
        if self.tap.is_on() { self.write_noted(address, bytes, real) } else { real() }
    }

    #[cold]
    fn write_noted(&self, address: u64, bytes: &[u8], real: impl FnOnce() -> bool) -> bool {
        let function = self.function;
        let line = |done| RecordLine::DmaWrite { function, address, bytes: bytes.to_vec(), done };
        let replayed = self.tap.reader(|reader| {
            reader.take(
                || line(true).to_string(),
                |next| match next {
                    RecordLine::DmaWrite { done, .. } if *next == line(*done) => Some(*done),
                    _ => None,
                },
            )
        });
        if let Some(replayed) = replayed {
            return replayed.unwrap_or(false);
        }
        let done = real();
        self.tap.note(|| line(done));
        done
    }

    /// A word is changed; gives what was there.
    #[inline]
    pub(crate) fn change(
        &self,
        address: u64,
        change: &impl Fn(u64) -> u64,
        real: impl FnOnce() -> Option<u64>,
    ) -> Option<u64> {
        if self.tap.is_on() { self.change_noted(address, change, real) } else { real() }
    }

    #[cold]
    fn change_noted(
        &self,
        address: u64,
        change: &impl Fn(u64) -> u64,
        real: impl FnOnce() -> Option<u64>,
    ) -> Option<u64> {
        let function = self.function;
        let line = |old: Option<u64>| {
            let words = old.map(|old| (old, change(old)));
            RecordLine::DmaAtomic { function, address, words }
        };
        let replayed = self.tap.reader(|reader| {
            reader.take(
                || format!("dma-atomic {function} {address:x}"),
                |next| match next {
                    RecordLine::DmaAtomic { words, .. } => {
                        let old = words.map(|(old, _)| old);
                        (*next == line(old)).then_some(old)
                    }
                    _ => None,
                },
            )
        });
        if let Some(replayed) = replayed {
            return replayed.flatten();
        }
        let old = real();
        self.tap.note(|| line(old));
        old
    }

    /// What a doorbell cell has, in which `seen` was.
    #[inline]
    pub(crate) fn bell(&self, context: u16, cell: usize, seen: u64, real: impl FnOnce() -> u64) -> u64 {
        if self.tap.is_on() { self.bell_noted(context, cell, seen, real) } else { real() }
    }

    #[cold]
    fn bell_noted(&self, context: u16, at: usize, seen: u64, real: impl FnOnce() -> u64) -> u64 {
        let (function, cell) = (self.function, at as u32);
        let rung = |line: &RecordLine| match line {
            RecordLine::Bell { value, .. } => {
                (*line == RecordLine::Bell { function, context, cell, value: *value }).then_some(*value)
            }
            _ => None,
        };
        if self.tap.is_replay() {
            return self.tap.next(rung).unwrap_or(seen);
        }
        let value = real();
        if value != seen {
            self.tap.note(|| RecordLine::Bell { function, context, cell, value });
        }
        value
    }

    /// A vector is signalled.
    pub(crate) fn interrupt(&self, vector: u32) {
        let function = self.function;
        self.tap.note(|| RecordLine::Interrupt { function, vector });
    }

    /// Memory of the client lacks pages, or does not any more.
    pub(crate) fn lost(&self, lost: bool) {
        let function = self.function;
        self.tap.note(|| RecordLine::Lost { function, lost });
    }
}

/// Lines of a file, up to its end or one that is too long.
fn open(file: File) -> Box<dyn BufRead> {
    Box::new(BufReader::new(file))
}
