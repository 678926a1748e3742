//! Lines of a record: docs/board-record.md has the format.

use std::fmt::{self, Write};

use starverbs_core::{Gid, Nanos};

use crate::dma::Errno;

/// What happened, in one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum RecordLine {
    /// A turn begins, ns
    Time(Nanos),
    /// A cell was found changed
    Bell { function: u8, context: u16, cell: u32, value: u64 },
    /// A frame came
    FrameIn(FrameRecord),
    /// A frame was sent
    FrameOut(FrameRecord),
    /// A region was written
    Write { function: u8, region: u32, offset: u64, bytes: Vec<u8> },
    /// A region was read
    Read { function: u8, region: u32, offset: u64, bytes: Vec<u8> },
    /// Memory was mapped. `here`: in a memory file, else in another process
    Map { function: u8, address: u64, size: u64, writable: bool, here: bool },
    /// Memory was unmapped
    Unmap { function: u8, address: u64, size: u64 },
    /// Vectors were given descriptors, or not
    Vectors { function: u8, flags: u32, index: u32, start: u32, count: u32, given: u32 },
    /// The function was reset
    Reset { function: u8 },
    /// The client is gone
    Gone { function: u8 },
    /// Memory of the client lacks pages, or does not any more
    Lost { function: u8, lost: bool },
    /// What the line before asked for was refused
    Refused(Errno),
    /// Memory was read. No bytes: a miss
    DmaRead { function: u8, address: u64, len: usize, bytes: Option<Vec<u8>> },
    /// Memory was written, or that was a miss
    DmaWrite { function: u8, address: u64, bytes: Vec<u8>, done: bool },
    /// A word was changed. None: a miss
    DmaAtomic { function: u8, address: u64, words: Option<(u64, u64)> },
    /// A vector was signalled
    Interrupt { function: u8, vector: u32 },
    /// What the board's host answered
    Host(HostRequest, Result<u32, Errno>),
}

/// A frame, from the BTH to before the ICRC.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct FrameRecord {
    pub(crate) src: Gid,
    pub(crate) dst: Gid,
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    pub(crate) bytes: Vec<u8>,
}

/// What the board asks its host for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HostRequest {
    /// A block of QPNs or of communication IDs
    Block,
    /// A multicast group
    Group,
    /// A service ID
    Service,
}

const ASKED: [(HostRequest, &str); 3] =
    [(HostRequest::Block, "block"), (HostRequest::Group, "group"), (HostRequest::Service, "service")];

/// Bytes as hexadecimal digits; of none `-`.
struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_char('-');
        }
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Display for FrameRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FrameRecord { src, dst, traffic_class, hop_limit, bytes } = self;
        write!(f, "{} {} {traffic_class} {hop_limit} {}", Hex(&src.0), Hex(&dst.0), Hex(bytes))
    }
}

impl fmt::Display for RecordLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecordLine::Time(now) => write!(f, "time {now}"),
            RecordLine::Bell { function, context, cell, value } => {
                write!(f, "bell {function} {context} {cell} {value:x}")
            }
            RecordLine::FrameIn(frame) => write!(f, "frame-in {frame}"),
            RecordLine::FrameOut(frame) => write!(f, "frame-out {frame}"),
            RecordLine::Write { function, region, offset, bytes } => {
                write!(f, "write {function} {region} {offset:x} {}", Hex(bytes))
            }
            RecordLine::Read { function, region, offset, bytes } => {
                write!(f, "read {function} {region} {offset:x} {}", Hex(bytes))
            }
            RecordLine::Map { function, address, size, writable, here } => {
                let rights = if *writable { "rw" } else { "r" };
                let place = if *here { "file" } else { "process" };
                write!(f, "map {function} {address:x} {size:x} {rights} {place}")
            }
            RecordLine::Unmap { function, address, size } => {
                write!(f, "unmap {function} {address:x} {size:x}")
            }
            RecordLine::Vectors { function, flags, index, start, count, given } => {
                write!(f, "vectors {function} {flags} {index} {start} {count} {given}")
            }
            RecordLine::Reset { function } => write!(f, "reset {function}"),
            RecordLine::Gone { function } => write!(f, "gone {function}"),
            RecordLine::Lost { function, lost } => write!(f, "lost {function} {}", u8::from(*lost)),
            RecordLine::Refused(errno) => write!(f, "refused {errno}"),
            RecordLine::DmaRead { function, address, len, bytes } => {
                write!(f, "dma-read {function} {address:x} {len} ")?;
                match bytes {
                    Some(bytes) => Hex(bytes).fmt(f),
                    None => f.write_str("miss"),
                }
            }
            RecordLine::DmaWrite { function, address, bytes, done } => {
                let miss = if *done { "" } else { " miss" };
                write!(f, "dma-write {function} {address:x} {}{miss}", Hex(bytes))
            }
            RecordLine::DmaAtomic { function, address, words } => {
                write!(f, "dma-atomic {function} {address:x} ")?;
                match words {
                    Some((old, new)) => write!(f, "{old:x} {new:x}"),
                    None => f.write_str("miss"),
                }
            }
            RecordLine::Interrupt { function, vector } => write!(f, "interrupt {function} {vector}"),
            RecordLine::Host(asked, result) => {
                let name = ASKED.iter().find(|(of, _)| of == asked).map_or("", |(_, name)| name);
                match result {
                    Ok(number) => write!(f, "host {name} {number}"),
                    Err(errno) => write!(f, "host {name} refused {errno}"),
                }
            }
        }
    }
}

/// Bytes of a frame at most: a port takes none that is longer.
const MOST_FRAME: usize = 9216;
/// Bytes of one line at most: an access to a region, or a frame, with room to spare.
const MOST: usize = 1 << 20;

/// The words of a line.
pub(crate) struct Words<'a>(std::str::SplitAsciiWhitespace<'a>);

impl<'a> Words<'a> {
    pub(crate) fn of(text: &'a str) -> Words<'a> {
        Words(text.split_ascii_whitespace())
    }

    pub(crate) fn word(&mut self) -> Option<&'a str> {
        self.0.next()
    }

    pub(crate) fn number<T: std::str::FromStr>(&mut self) -> Option<T> {
        self.word()?.parse().ok()
    }

    pub(crate) fn hex(&mut self) -> Option<u64> {
        u64::from_str_radix(self.word()?, 16).ok()
    }

    fn bytes(&mut self) -> Option<Vec<u8>> {
        bytes(self.word()?)
    }

    pub(crate) fn gid(&mut self) -> Option<Gid> {
        self.bytes()?.try_into().ok().map(Gid)
    }

    fn frame(&mut self) -> Option<FrameRecord> {
        Some(FrameRecord {
            src: self.gid()?,
            dst: self.gid()?,
            traffic_class: self.number()?,
            hop_limit: self.number()?,
            bytes: self.bytes().filter(|bytes| bytes.len() <= MOST_FRAME)?,
        })
    }
}

fn bytes(digits: &str) -> Option<Vec<u8>> {
    if digits == "-" {
        return Some(Vec::new());
    }
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if !rest.is_empty() || pairs.len() > MOST {
        return None;
    }
    let digit = |digit: u8| char::from(digit).to_digit(16);
    pairs.iter().map(|[high, low]| Some((digit(*high)? << 4 | digit(*low)?) as u8)).collect()
}

impl RecordLine {
    /// `None`: it is no line of a record.
    pub(crate) fn parse(text: &str) -> Option<RecordLine> {
        let mut words = Words::of(text);
        let line = RecordLine::read(&mut words)?;
        words.word().is_none().then_some(line)
    }

    fn read(words: &mut Words<'_>) -> Option<RecordLine> {
        let kind = words.word()?;
        match kind {
            "time" => return words.number().map(RecordLine::Time),
            "frame-in" => return words.frame().map(RecordLine::FrameIn),
            "frame-out" => return words.frame().map(RecordLine::FrameOut),
            "refused" => return words.number().map(RecordLine::Refused),
            "host" => return RecordLine::read_host(words),
            _ => {}
        }
        let function = words.number()?;
        Some(match kind {
            "bell" => {
                let (context, cell) = (words.number()?, words.number()?);
                RecordLine::Bell { function, context, cell, value: words.hex()? }
            }
            "write" | "read" => {
                let (region, offset, bytes) = (words.number()?, words.hex()?, words.bytes()?);
                match kind {
                    "write" => RecordLine::Write { function, region, offset, bytes },
                    _ => RecordLine::Read { function, region, offset, bytes },
                }
            }
            "map" => {
                let (address, size) = (words.hex()?, words.hex()?);
                let writable = choice(words, "rw", "r")?;
                RecordLine::Map { function, address, size, writable, here: choice(words, "file", "process")? }
            }
            "unmap" => RecordLine::Unmap { function, address: words.hex()?, size: words.hex()? },
            "vectors" => {
                let (flags, index) = (words.number()?, words.number()?);
                let (start, count, given) = (words.number()?, words.number()?, words.number()?);
                RecordLine::Vectors { function, flags, index, start, count, given }
            }
            "reset" => RecordLine::Reset { function },
            "gone" => RecordLine::Gone { function },
            "lost" => RecordLine::Lost { function, lost: choice(words, "1", "0")? },
            "dma-read" => {
                let (address, len) = (words.hex()?, words.number()?);
                let bytes = match words.word()? {
                    "miss" => None,
                    digits => Some(bytes(digits).filter(|bytes| bytes.len() == len)?),
                };
                RecordLine::DmaRead { function, address, len, bytes }
            }
            "dma-write" => {
                let (address, bytes) = (words.hex()?, words.bytes()?);
                let done = match words.word() {
                    None => true,
                    Some("miss") => false,
                    Some(_) => return None,
                };
                RecordLine::DmaWrite { function, address, bytes, done }
            }
            "dma-atomic" => {
                let address = words.hex()?;
                let words = match words.word()? {
                    "miss" => None,
                    old => Some((u64::from_str_radix(old, 16).ok()?, words.hex()?)),
                };
                RecordLine::DmaAtomic { function, address, words }
            }
            "interrupt" => RecordLine::Interrupt { function, vector: words.number()? },
            _ => return None,
        })
    }

    fn read_host(words: &mut Words<'_>) -> Option<RecordLine> {
        let name = words.word()?;
        let (asked, _) = ASKED.iter().find(|(_, known)| *known == name)?;
        let result = match words.word()? {
            "refused" => Err(words.number()?),
            number => Ok(number.parse().ok()?),
        };
        Some(RecordLine::Host(*asked, result))
    }
}

fn choice(words: &mut Words<'_>, yes: &str, no: &str) -> Option<bool> {
    let word = words.word()?;
    if word == yes { Some(true) } else { (word == no).then_some(false) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written() {
        let frame = FrameRecord {
            src: Gid::from_ipv4([10, 0, 0, 1]),
            dst: Gid::from_ipv4([10, 0, 0, 2]),
            traffic_class: 2,
            hop_limit: 64,
            bytes: vec![4, 0, 255],
        };
        let (function, address) = (3, 0xffff_0000);
        let lines = [
            RecordLine::Time(u64::MAX),
            RecordLine::Bell { function, context: 255, cell: 8191, value: u64::MAX },
            RecordLine::FrameIn(frame.clone()),
            RecordLine::FrameOut(FrameRecord { bytes: Vec::new(), ..frame }),
            RecordLine::Write { function, region: 0, offset: 0x2c, bytes: vec![1, 0, 0, 0] },
            RecordLine::Read { function, region: 7, offset: 0, bytes: vec![0x34] },
            RecordLine::Map { function, address, size: 4096, writable: true, here: false },
            RecordLine::Map { function, address, size: 4096, writable: false, here: true },
            RecordLine::Unmap { function, address: 0, size: u64::MAX },
            RecordLine::Vectors { function, flags: 36, index: 2, start: 0, count: 2, given: 2 },
            RecordLine::Reset { function },
            RecordLine::Gone { function },
            RecordLine::Lost { function, lost: true },
            RecordLine::Refused(22),
            RecordLine::DmaRead { function, address, len: 2, bytes: Some(vec![1, 2]) },
            RecordLine::DmaRead { function, address, len: 2, bytes: None },
            RecordLine::DmaWrite { function, address, bytes: vec![9], done: true },
            RecordLine::DmaWrite { function, address, bytes: vec![9], done: false },
            RecordLine::DmaAtomic { function, address, words: Some((1, u64::MAX)) },
            RecordLine::DmaAtomic { function, address, words: None },
            RecordLine::Interrupt { function, vector: 31 },
            RecordLine::Host(HostRequest::Block, Ok(7)),
            RecordLine::Host(HostRequest::Service, Err(98)),
        ];
        for line in lines {
            let text = line.to_string();
            assert_eq!(RecordLine::parse(&text).as_ref(), Some(&line), "{text}");
            assert_eq!(RecordLine::parse(&format!("{text} more")), None, "{text}");
            let cut = text.rsplit_once(' ').map_or("", |(front, _)| front);
            assert_ne!(RecordLine::parse(cut), Some(line), "{cut}");
        }
    }

    #[test]
    fn what_is_no_line_is_none() {
        for text in [
            "",
            "tim 1",
            "time x",
            "bell 256 0 0 0",
            "write 0 0 0 1",
            "dma-read 0 0 3 0102",
            "host x 1",
            "lost 0 2",
        ] {
            assert_eq!(RecordLine::parse(text), None, "{text}");
        }
    }
}
