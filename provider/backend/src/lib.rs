//! Where a card touches the world: UDP, the host's registry of QPN blocks, fault injection, capture.
//!
//! Owns the sockets and everything on the wire outside the BTH: addresses, IP and UDP headers, the ICRC. It
//! must not know verbs objects or the transport: of a frame it reads the op-code byte and the destination QPN
//! alone.
//!
//! [`open`] gives the two halves of a port, [`RoceTx`] and [`Rx`]. A card's owner then goes round:
//!
//! ```text
//! rx.recv(now);
//! while let Some((meta, frame)) = rx.next_frame() { nic.handle_frame(...) }
//! while tx.can_send() && nic wants to send        { tx.send_frame(...) }
//! tx.flush(now);
//! before sleeping: poll(2) on rx.fds() until min(tx.next_deadline(), rx.maintenance(now))
//! ```
//!
//! Sleepers should use `poll(2)` rather than epoll: an epoll entry costs each arriving frame, also while
//! nobody sleeps.

mod batch;
mod contexts;
mod control;
pub mod copy;
mod descriptor;
mod epoll;
mod error;
mod fault;
pub mod give_way;
mod handover;
pub mod host;
mod inbox;
mod kernel_list;
pub mod links;
mod listeners;
mod membership;
mod multicast_proxy;
pub mod onerma;
mod owners;
mod parent_only;
mod pcap;
mod peer;
mod probe;
mod program;
mod qp_list;
mod quiet;
mod registry;
pub mod sealed;
mod seed;
mod socket;
mod sockopt;
pub mod star;
mod steer;
mod sum;
mod tx;
mod udp_rx;
mod watch;
mod woken;
mod zeroed;

use std::ops::Deref;

pub use batch::ARENA;
pub use contexts::context_cache;
pub use control::{ToolRequest, ask};
pub use descriptor::{Listed, let_go};
pub use error::BackendError;
pub use host::HostAddr;
pub use kernel_list::kernel_list;
pub use membership::max_groups;
pub use owners::Owners;
pub use parent_only::{ParentOnly, forks, watch_forks};
pub use peer::channel::{Answering, Asking, DATA_OF_MANY};
pub use peer::direct::{MemoryFiles, OfferedMemory, ProcessFile};
pub use peer::doorbell::SharedDoorbell;
pub use peer::{ChannelNews, Peers, SessionId};
pub use program::Payload;
pub use qp_list::{QpCarrier, QpList};
pub use quiet::{without_signals, write_line};
pub use registry::{QpnBlock, socket_name};
pub use seed::seed;
use starverbs_core::Counters;
use starverbs_settings::Settings;
pub use tx::Tx;
pub use tx::roce::RoceTx;
pub use udp_rx::Rx;
pub use watch::InterfaceWatch;
pub use woken::Woken;

/// For the oracles of tests/untrusted.
#[cfg(feature = "fuzzing")]
pub mod fuzzing {
    use super::{control, inbox, peer, probe};

    /// Reads bytes as messages of a block's socket, as the wire's probes, and as control messages, are read.
    pub fn read_messages(bytes: &[u8]) {
        let _ = control::decode(bytes);
        let _ = control::decode_lease_reply(bytes);
        let _ = probe::Probe::decode(bytes);
        let _ = probe::decode_check(bytes);
        inbox::read_anything(bytes);
        let _ = peer::hello::decode(bytes);
        peer::read_ring(bytes);
    }

    /// Writes bytes into a channel's memory as a hostile peer may, while both ends use it.
    pub fn use_channel(bytes: &[u8]) {
        peer::read_channel(bytes);
    }
}

/// Most addresses a port may have: a GID index is a byte.
pub const MAX_ADDRS: usize = 256;

/// Opens the port: claims a first block of QPNs, binds the UDP port, joins the host's other processes.
///
/// `addrs` is the GID table (see [`host::addresses`]): a frame's `Av::sgid_index` indexes it. Takes at most
/// 20 ms, and that only when another process of this host is stopped. When the UDP port belongs to processes
/// of another user, those hand this port's frames on.
///
/// # Errors
/// See [`BackendError`]; sockets that were opened are closed again.
pub fn open<C>(
    settings: &Settings,
    addrs: &[HostAddr],
    counters: C,
) -> Result<(RoceTx<C>, Rx<C>), BackendError>
where
    C: Deref<Target = Counters> + Clone,
{
    let capture = pcap::Capture::open(settings);
    /* before sockets that the kernel gives a port: it may be this one */
    let rx = Rx::open(settings, addrs, counters.clone(), capture.clone())?;
    let tx = RoceTx::open(settings, addrs, counters, capture)?;
    Ok((tx, rx))
}
