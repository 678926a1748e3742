//! The syntax of single values. Parsers answer an error as a short sentence; the caller adds key and allowed
//! syntax.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Which way queue pairs take to those of processes of their own host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkMode {
    /// The shortest that both sides can use.
    Auto,
    /// The same, and a queue pair that has to use the wire says so.
    Local,
    /// UDP sockets, as between hosts.
    Udp,
}

/// Which card a process has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceChoice {
    /// One in software.
    Soft,
    /// A function of a board, by the socket at which it speaks vfio-user.
    Board(PathBuf),
}

/// How a program tells a board of what it posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoardDoorbell {
    /// By the queue's cell, a store into a mapped page.
    Cell,
    /// By a message of csRNA's form.
    Message,
}

/// Which processes of the host may execute WRITE and READ on this one's memory by themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkTrust {
    /// No process may.
    None,
    /// Those of equal credentials.
    User,
    /// The same, and what is long is copied by calls that name a process by its number.
    Trace,
}

/// What of a program's own memory is made shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// Nothing of it.
    Off,
    /// What it allocates in large pieces.
    Malloc,
}

/// How much the library writes to standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Logs nothing.
    Off,
    /// Why calls are refused, beyond their errno.
    Error,
    /// Queues that fail, too.
    Warn,
    /// The card opened and closed, too.
    Info,
    /// The states of queue pairs, too.
    Debug,
}

/// A network: an address, and how many bits of it all its addresses have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// One of its addresses
    pub addr: IpAddr,
    /// Bits: at most 32, or 128 of an IPv6 address
    pub bits: u8,
}

/// Networks as `10.0.0.0/8`, separated by commas; `None`: any.
pub(crate) fn networks(text: &str) -> Result<Option<Vec<Network>>, String> {
    if text == "any" {
        return Ok(None);
    }
    let network = |text: &str| {
        let (addr, bits) = text.trim().split_once('/')?;
        let (addr, bits): (IpAddr, u8) = (addr.parse().ok()?, bits.parse().ok()?);
        (bits <= if addr.is_ipv4() { 32 } else { 128 }).then_some(Network { addr, bits })
    };
    let named = |text: &str| network(text).ok_or_else(|| format!("{text:?} is no network"));
    text.split(',').map(named).collect::<Result<_, _>>().map(Some)
}

/// As [`networks`] reads them.
pub(crate) fn spell_networks(networks: &[Network]) -> String {
    let network = |network: &Network| format!("{}/{}", network.addr, network.bits);
    networks.iter().map(network).collect::<Vec<_>>().join(",")
}

/// A card: `soft`, or `board:` and a path.
pub(crate) fn device(text: &str) -> Result<DeviceChoice, String> {
    match text.strip_prefix("board:") {
        Some("") => Err("no path of a socket".to_owned()),
        Some(path) => Ok(DeviceChoice::Board(Path::new(path).to_owned())),
        None if text == "soft" => Ok(DeviceChoice::Soft),
        None => Err("no such device".to_owned()),
    }
}

/// As [`device`] reads it.
pub(crate) fn spell_device(device: &DeviceChoice) -> String {
    match device {
        DeviceChoice::Soft => "soft".to_owned(),
        DeviceChoice::Board(path) => format!("board:{}", path.display()),
    }
}

pub(crate) const BOARD_DOORBELLS: [(&str, BoardDoorbell); 2] =
    [("cell", BoardDoorbell::Cell), ("message", BoardDoorbell::Message)];
pub(crate) const LINKS: [(&str, LinkMode); 3] =
    [("auto", LinkMode::Auto), ("local", LinkMode::Local), ("udp", LinkMode::Udp)];
pub(crate) const TRUSTS: [(&str, LinkTrust); 3] =
    [("none", LinkTrust::None), ("user", LinkTrust::User), ("trace", LinkTrust::Trace)];
pub(crate) const SHARES: [(&str, Share); 2] = [("off", Share::Off), ("malloc", Share::Malloc)];
pub(crate) const REPEAT: [(&str, bool); 2] = [("auto", true), ("off", false)];
pub(crate) const LEVELS: [(&str, LogLevel); 5] = [
    ("off", LogLevel::Off),
    ("error", LogLevel::Error),
    ("warn", LogLevel::Warn),
    ("info", LogLevel::Info),
    ("debug", LogLevel::Debug),
];
const SWITCH: [(&str, bool); 2] = [("on", true), ("off", false)];

/// One of a fixed set of words.
pub(crate) fn word<T: Copy>(words: &[(&str, T)], given: &str) -> Result<T, String> {
    let found = words.iter().find(|(word, _)| *word == given);
    found.map(|(_, value)| *value).ok_or_else(|| "no such value".to_owned())
}

/// The word that stands for `value`.
pub(crate) fn spell<T: PartialEq>(words: &[(&'static str, T)], value: &T) -> String {
    words.iter().find(|(_, v)| v == value).map_or_else(String::new, |(word, _)| (*word).to_owned())
}

pub(crate) fn switch(given: &str) -> Result<bool, String> {
    word(&SWITCH, given)
}

pub(crate) fn spell_switch(value: bool) -> String {
    spell(&SWITCH, &value)
}

/// `auto` is `None`; anything else goes to `parse`.
pub(crate) fn auto<T>(given: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
    if given == "auto" { Ok(None) } else { parse(given).map(Some) }
}

pub(crate) fn mtu(given: &str) -> Result<u16, String> {
    match given.parse() {
        Ok(mtu @ (256 | 512 | 1024 | 2048 | 4096)) => Ok(mtu),
        _ => Err("not an InfiniBand MTU".to_owned()),
    }
}

pub(crate) fn port(given: &str) -> Result<u16, String> {
    match given.parse() {
        Ok(port @ 1..) => Ok(port),
        _ => Err("not a UDP port".to_owned()),
    }
}

pub(crate) fn addresses(given: &str) -> Result<Vec<IpAddr>, String> {
    let parse = |text: &str| text.parse().map_err(|_| format!("{text:?} is no IP address"));
    let list: Vec<IpAddr> = given.split(',').map(|text| parse(text.trim())).collect::<Result<_, _>>()?;
    if let Some((_, twice)) = list.iter().enumerate().find(|(i, addr)| list[..*i].contains(addr)) {
        return Err(format!("{twice} is given twice"));
    }
    Ok(list)
}

/// A number of bytes with an optional K, M or G (powers of 1024).
pub(crate) fn bytes(given: &str) -> Result<u32, String> {
    let most = |n: u64| u32::try_from(n).ok().filter(|n| *n <= i32::MAX as u32);
    size(given)?.and_then(most).ok_or_else(|| "too large (below 2G)".to_owned())
}

/// As [`bytes`], but as much as a machine may have.
pub(crate) fn memory(given: &str) -> Result<u64, String> {
    size(given)?.filter(|n| *n < 1 << 48).ok_or_else(|| "too large (below 256T)".to_owned())
}

/// What both read; `None`: more than any number here.
fn size(given: &str) -> Result<Option<u64>, String> {
    let (digits, shift) = match given.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 10),
        None => match given.strip_suffix(['M', 'm']) {
            Some(digits) => (digits, 20),
            None => given.strip_suffix(['G', 'g']).map_or((given, 0), |digits| (digits, 30)),
        },
    };
    let number: u64 = digits.parse().map_err(|_| "not a number of bytes".to_owned())?;
    if number == 0 {
        return Err("must be more than nothing".to_owned());
    }
    Ok(number.checked_mul(1 << shift))
}

/// The shortest text that [`bytes`] reads back.
pub(crate) fn spell_bytes(value: u64) -> String {
    match value {
        v if v > 0 && v.is_multiple_of(1 << 20) => format!("{}M", v >> 20),
        v if v > 0 && v.is_multiple_of(1 << 10) => format!("{}K", v >> 10),
        v => v.to_string(),
    }
}

/// A share of all frames: `1%` or `0.01`.
pub(crate) fn probability(given: &str) -> Result<f64, String> {
    let (digits, scale) = given.strip_suffix('%').map_or((given, 1.0), |digits| (digits, 100.0));
    let share =
        digits.trim_end().parse::<f64>().map_err(|_| "not a share such as 1% or 0.01".to_owned())? / scale;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err("a share lies between 0 and 100%".to_owned()) }
}

/// A time with its unit: `50us`, `1.5ms`, `2s`, `100ns`; a bare `0`.
pub(crate) fn duration(given: &str) -> Result<Duration, String> {
    const UNITS: [(&str, f64); 4] = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
    const LONGEST: f64 = 60.0;
    if given == "0" {
        return Ok(Duration::ZERO);
    }
    let unit = UNITS.iter().find_map(|(unit, scale)| Some((given.strip_suffix(unit)?, scale)));
    let (digits, scale) = unit.ok_or_else(|| "a time needs a unit: ns, us, ms or s".to_owned())?;
    let seconds = digits.trim_end().parse::<f64>().map_err(|_| "not a time".to_owned())? * scale;
    if (0.0..=LONGEST).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("a time lies between 0 and 60s".to_owned())
    }
}

/// A time that is not 0, or `off`.
pub(crate) fn target(given: &str) -> Result<Option<Duration>, String> {
    match given {
        "off" => Ok(None),
        time => match duration(time)? {
            Duration::ZERO => Err("longer than 0".to_owned()),
            target => Ok(Some(target)),
        },
    }
}

/// A TOML value as the text that the environment would carry: booleans as `on` and `off`, lists joined with
/// commas.
pub(crate) fn from_toml(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Boolean(on) => spell_switch(*on),
        toml::Value::Array(items) => items.iter().map(from_toml).collect::<Vec<_>>().join(","),
        toml::Value::Table(table) => table
            .iter()
            .map(|(name, value)| format!("{name}={}", from_toml(value)))
            .collect::<Vec<_>>()
            .join(","),
        other => other.to_string(),
    }
}
