//! What a person may set: `STARVERBS_*` variables and a TOML file with the same keys.
//!
//! Owns the names, the meaning and the syntax of every setting, in one table ([`KEYS`]) from which values are
//! parsed, shown and documented. It must not know what the settings do: it opens no socket and writes no
//! file.

mod error;
mod fault;
mod onerma;
mod qpc;
mod source;
mod star;
mod table;
mod value;

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use error::{SettingOrigin, SettingsError};
pub use fault::FaultSpec;
pub use onerma::OneRmaWindow;
pub use qpc::{QpcPolicy, QpcSpec};
pub use star::{StarKey, StarPreference, StarWire};
pub use table::{KEYS, Key, markdown};
pub use value::{BoardDoorbell, DeviceChoice, LinkMode, LinkTrust, LogLevel, Network, Share};

/// Every setting, typed. A field that is `None` means `auto`: the card chooses.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The file that values were read from (`STARVERBS_CONFIG`, or the first that exists of the two default
    /// places).
    pub config: Option<PathBuf>,
    /// The card that the process has.
    pub device: DeviceChoice,
    /// How a board at a socket hears of what is posted
    pub board_doorbell: BoardDoorbell,
    /// What is done to frames on their way out, to test programs on a bad network.
    pub fault: FaultSpec,
    /// Capture file of every frame sent and received; `%p` stands for the process id, see
    /// [`Settings::pcap_path`].
    pub pcap: Option<PathBuf>,
    /// Upper bound for the port's `active_mtu`, in bytes of payload: 256, 512, 1024, 2048 or 4096.
    pub mtu: Option<u16>,
    /// Addresses to offer as GIDs, in this order.
    pub addrs: Option<Vec<IpAddr>>,
    /// UDP port of the wire, for sending and receiving. Real cards and rdma_rxe answer on 4791 only.
    pub port: u16,
    /// Which way frames take between processes of one host.
    pub link: LinkMode,
    /// Whose processes of this host reach this one's memory by themselves.
    pub link_trust: LinkTrust,
    /// What of the program's memory is made shared memory.
    pub share: Share,
    /// Receive buffer asked of each socket, in bytes.
    pub rcvbuf: usize,
    /// Send buffer asked of each socket, in bytes.
    pub sndbuf: usize,
    /// Whether frames of one message may be given to the kernel as one segmented send.
    pub gso: bool,
    /// Whether the kernel may hand over several received frames joined.
    pub gro: bool,
    /// Whether a thread of the library serves peers while the program is outside the library.
    pub progress_thread: bool,
    /// What the library writes to standard error.
    pub log: LogLevel,
    /// Bytes that a QP may have on the wire without an acknowledgement.
    pub window: Option<u32>,
    /// The round trip below which that grows and beyond which it shrinks; losses move it, if there is none.
    pub delay_target: Option<Duration>,
    /// Bytes that queues and tables of the process may take.
    pub memory: Option<u64>,
    /// Whether work requests posted in a row may be sent together.
    pub defer: bool,
    /// Selective repeat between cards that offer it (`STARVERBS_REPEAT`)
    pub repeat: bool,
    /// ACKs give how many receives are posted (`STARVERBS_CREDITS`)
    pub credits: bool,
    /// Whether contexts of frames to come are fetched into the CPU's caches.
    pub qpc_prefetch: bool,
    /// QP contexts are few, and one that is not at hand costs time; none: there is room for all
    pub qpc_cache: Option<QpcSpec>,
    /// Default role of ends of RC connections (StaR)
    pub star: StarPreference,
    /// Connections whose state this card keeps, before it wants peers to keep more of them (StaR, `auto`)
    pub star_threshold: u32,
    /// Which packets StaR sends.
    pub star_wire: StarWire,
    /// Networks within which StaR is used; none: any
    pub star_partition: Option<Vec<Network>>,
    /// Under which StaR's control messages are sealed; none: they are plain
    pub star_key: Option<StarKey>,
    /// Constants of 1RMA's congestion control; none: the card's
    pub onerma_window: Option<OneRmaWindow>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            config: None,
            device: DeviceChoice::Soft,
            board_doorbell: BoardDoorbell::Cell,
            fault: FaultSpec::default(),
            pcap: None,
            mtu: None,
            addrs: None,
            port: 4791,
            link: LinkMode::Auto,
            link_trust: LinkTrust::User,
            share: Share::Off,
            rcvbuf: 4 << 20,
            sndbuf: 4 << 20,
            gso: true,
            gro: true,
            progress_thread: true,
            log: LogLevel::Off,
            window: None,
            delay_target: None,
            memory: None,
            defer: true,
            repeat: true,
            credits: false,
            qpc_prefetch: true,
            qpc_cache: None,
            star: StarPreference::Off,
            star_threshold: 120,
            star_wire: StarWire::Packed,
            star_partition: None,
            star_key: None,
            onerma_window: None,
        }
    }
}

impl Settings {
    /// Reads the settings of this process: its environment over a TOML file over the defaults.
    ///
    /// # Errors
    /// The first unknown key, bad value or unreadable file found; the message names it and has what is
    /// allowed.
    pub fn load() -> Result<Settings, SettingsError> {
        Settings::load_for(std::env::vars_os())
    }

    /// [`Settings::load`] for a process that would have the environment `env`.
    ///
    /// # Errors
    /// As [`Settings::load`].
    pub fn load_for(env: impl Iterator<Item = (OsString, OsString)>) -> Result<Settings, SettingsError> {
        source::load(env, source::read_file)
    }

    /// Reads settings from `env` (variables that do not begin with `STARVERBS_` are passed over) over the
    /// text of a TOML file. Opens no file: a `STARVERBS_CONFIG` in `env` is noted, not read.
    ///
    /// # Errors
    /// As [`Settings::load`].
    pub fn from_sources(
        env: impl Iterator<Item = (String, String)>,
        toml: Option<&str>,
    ) -> Result<Settings, SettingsError> {
        source::merge(
            env,
            toml.map(|text| (PathBuf::from("TOML"), source::Text { toml: text.to_owned(), open: false })),
        )
    }

    /// The capture file with `%p` replaced by `pid`.
    pub fn pcap_path(&self, pid: u32) -> Option<PathBuf> {
        let template = self.pcap.as_ref()?.to_str()?;
        Some(PathBuf::from(template.replace("%p", &pid.to_string())))
    }
}

#[cfg(test)]
mod tests;
