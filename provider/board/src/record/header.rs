//! What a board is made of: the head of a record, and all that decides what the board does beside what comes
//! in.

use std::fmt;
use std::io::BufRead;

use starverbs_backend::HostAddr;
use starverbs_core::qpc::Policy;
use starverbs_core::{ContextCache, Mtu, Nanos, NicConfig};
use starverbs_queues::board::VERSION;

use super::line::Words;
use crate::commands;

/// The first line.
const FIRST: &str = "starverbs-board-record 1";
/// The last line.
const LAST: &str = "run";
/// Functions, addresses and blocks at most.
const MOST: usize = 256;
/// QP contexts on chip at most.
const MOST_CONTEXTS: u32 = 1 << 20;
/// Lines of a head at most.
const MOST_LINES: usize = 4 * MOST;

/// What a board is made of.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct RecordHeader {
    /// Decides keys and QPNs
    pub(crate) seed: [u64; 2],
    pub(crate) guid: u64,
    pub(crate) functions: usize,
    pub(crate) mtu: Mtu,
    /// As of [`NicConfig`]
    pub(crate) window: u32,
    pub(crate) delay_target: Option<Nanos>,
    pub(crate) repeat: bool,
    pub(crate) credits: bool,
    pub(crate) contexts: Option<ContextCache>,
    /// The GID table
    pub(crate) addrs: Vec<HostAddr>,
    /// Blocks of QPNs
    pub(crate) blocks: Vec<u32>,
}

const POLICIES: [(Policy, &str); 3] = [
    (Policy::Fcfs, "fcfs"),
    (Policy::NonBlocking, "non-blocking"),
    (Policy::LatencyHiding, "latency-hiding"),
];

impl Default for RecordHeader {
    fn default() -> RecordHeader {
        let NicConfig { mtu, window, delay_target, repeat, credits, contexts, .. } = NicConfig::default();
        let (addrs, blocks) = (Vec::new(), Vec::new());
        RecordHeader {
            seed: [0; 2],
            guid: 0,
            functions: 0,
            mtu,
            window,
            delay_target,
            repeat,
            credits,
            contexts,
            addrs,
            blocks,
        }
    }
}

impl RecordHeader {
    /// The card.
    pub(crate) fn config(&self) -> NicConfig {
        let RecordHeader { mtu, window, delay_target, repeat, credits, contexts, .. } = *self;
        NicConfig {
            mtu,
            window,
            delay_target,
            repeat,
            credits,
            contexts,
            max_groups: commands::MAX_GROUPS,
            ..NicConfig::default()
        }
    }

    /// Reads a head; gives it, and how many lines it has. Or the number of the line that is wrong.
    pub(super) fn read(from: &mut dyn BufRead) -> Result<(RecordHeader, usize), usize> {
        let mut header = RecordHeader::default();
        for number in 1..MOST_LINES {
            let mut text = String::new();
            let got = std::io::Read::take(&mut *from, super::MOST).read_line(&mut text);
            if !got.is_ok_and(|got| got > 0) {
                return Err(number);
            }
            let text = text.trim();
            match (number, text) {
                (1, FIRST) => {}
                (1, _) => return Err(1),
                (_, LAST) if header.is_whole() => return Ok((header, number)),
                _ if super::is_comment(text) => {}
                _ => header.take(text).ok_or(number)?,
            }
        }
        Err(MOST_LINES)
    }

    fn is_whole(&self) -> bool {
        let few = |count: usize| (1..=MOST).contains(&count);
        few(self.functions) && few(self.addrs.len()) && few(self.blocks.len())
    }

    /// Takes what a line says. `None`: it is none of a head.
    fn take(&mut self, text: &str) -> Option<()> {
        let words = &mut Words::of(text);
        match words.word()? {
            "contract" => (words.hex()? >> 16 == u64::from(VERSION >> 16)).then_some(())?,
            "seed" => self.seed = [words.hex()?, words.hex()?],
            "guid" => self.guid = words.hex()?,
            "functions" => self.functions = words.number()?,
            "mtu" => {
                let bytes: u32 = words.number()?;
                let all = [Mtu::M256, Mtu::M512, Mtu::M1024, Mtu::M2048, Mtu::M4096];
                self.mtu = all.into_iter().find(|mtu| mtu.bytes() == bytes)?;
            }
            "window" => self.window = words.number()?,
            "delay_target" => self.delay_target = Some(words.number()?),
            "repeat" => self.repeat = words.number::<u8>()? != 0,
            "credits" => self.credits = words.number::<u8>()? != 0,
            "contexts" => {
                let entries = words.number().filter(|entries| *entries <= MOST_CONTEXTS)?;
                let name = words.word()?;
                let (policy, _) = POLICIES.iter().find(|(_, known)| *known == name)?;
                let (miss, fetch) = (words.number()?, words.number()?);
                self.contexts = Some(ContextCache { entries, policy: *policy, miss, fetch });
            }
            "address" => self.addrs.push(HostAddr {
                gid: words.gid()?,
                ifindex: words.number()?,
                link_mtu: words.number()?,
                loopback: words.number::<u8>()? != 0,
                name: words.word()?.to_owned(),
            }),
            "block" => self.blocks.push(words.number().filter(|block| *block < 1 << 12)?),
            _ => return None,
        }
        words.word().is_none().then_some(())
    }
}

impl fmt::Display for RecordHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RecordHeader { seed, guid, functions, mtu, window, delay_target, .. } = self;
        let RecordHeader { repeat, credits, contexts, addrs, blocks, .. } = self;
        writeln!(f, "{FIRST}\ncontract {VERSION:x}\nseed {:x} {:x}\nguid {guid:x}", seed[0], seed[1])?;
        writeln!(f, "functions {functions}\nmtu {}\nwindow {window}", mtu.bytes())?;
        if let Some(target) = delay_target {
            writeln!(f, "delay_target {target}")?;
        }
        writeln!(f, "repeat {}\ncredits {}", u8::from(*repeat), u8::from(*credits))?;
        if let Some(ContextCache { entries, policy, miss, fetch }) = contexts {
            let name = POLICIES.iter().find(|(of, _)| of == policy).map_or("", |(_, name)| name);
            writeln!(f, "contexts {entries} {name} {miss} {fetch}")?;
        }
        for HostAddr { gid, ifindex, link_mtu, name, loopback } in addrs {
            let gid: String = gid.0.iter().map(|byte| format!("{byte:02x}")).collect();
            writeln!(f, "address {gid} {ifindex} {link_mtu} {} {name}", u8::from(*loopback))?;
        }
        blocks.iter().try_for_each(|block| writeln!(f, "block {block}"))?;
        writeln!(f, "{LAST}")
    }
}

#[cfg(test)]
mod tests {
    use starverbs_core::Gid;

    use super::*;

    fn header() -> RecordHeader {
        let contexts = Some(ContextCache { entries: 3, policy: Policy::NonBlocking, miss: 500, fetch: 1 });
        let addr = HostAddr {
            gid: Gid::from_ipv4([127, 0, 0, 1]),
            ifindex: 1,
            link_mtu: 65536,
            name: "lo".to_owned(),
            loopback: true,
        };
        let (addrs, blocks) = (vec![addr], vec![17, 18]);
        RecordHeader {
            seed: [1, u64::MAX],
            guid: 9,
            functions: 2,
            delay_target: Some(50_000),
            contexts,
            addrs,
            blocks,
            ..RecordHeader::default()
        }
    }

    #[test]
    fn a_head_is_read_as_it_was_written() {
        let text = header().to_string();
        let (read, lines) = RecordHeader::read(&mut text.as_bytes()).unwrap();
        assert_eq!((read, lines), (header(), text.lines().count()));
    }

    #[test]
    fn what_is_no_head_is_refused_by_its_line() {
        let text = header().to_string();
        let with = |from: &str, to: &str| RecordHeader::read(&mut text.replace(from, to).as_bytes()).err();
        assert_eq!(with("starverbs-board-record 1", "starverbs-board-record 2"), Some(1));
        assert_eq!(with("contract 1", "contract 2"), Some(2));
        assert_eq!(with("functions 2", "functions 0"), Some(text.lines().count()), "no function");
        assert_eq!(with("mtu 4096", "mtu 4097"), Some(6));
        assert_eq!(with("block 17", "block 4096"), Some(13));
        assert_eq!(with("run\n", ""), Some(text.lines().count()));
    }
}
