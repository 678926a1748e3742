//! NETLINK_RDMA: what a kernel answers to programs that ask it for RDMA devices and links, as rdma(8) does.
//!
//! The messages are those of include/uapi/rdma/rdma_netlink.h of the Linux kernel, its client RDMA_NL_NLDEV.
//! Made of bytes and facts alone: no operating system here. Requests come from the program and may hold
//! anything: what is cut short or names no message is passed over or refused as the kernel does
//! (`netlink_rcv_skb`, `nlmsg_parse_deprecated`). Owns the format; it must not know sockets.

use crate::sysfs_view::{Facts, interface};

/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;
/// Bytes of `struct nlattr`, without its value.
const ATTRIBUTE: usize = 4;
/// Types below are control messages, which ask for nothing: NLMSG_MIN_TYPE.
const FIRST_REQUEST: u16 = 16;
const REQUEST: u16 = libc::NLM_F_REQUEST as u16;
const ACK: u16 = libc::NLM_F_ACK as u16;
const DUMP: u16 = libc::NLM_F_DUMP as u16;
const MULTI: u16 = libc::NLM_F_MULTI as u16;
const CAPPED: u16 = libc::NLM_F_CAPPED as u16;
/// The client RDMA_NL_NLDEV, where a message's type has it.
const NLDEV: u16 = 5 << 10;
/// RDMA_NLDEV_CMD_GET: a device
const GET: u16 = NLDEV | 1;
/// RDMA_NLDEV_CMD_PORT_GET: a port
const PORT_GET: u16 = NLDEV | 5;
/// RDMA_NLDEV_CMD_SYS_GET: what is the same for all devices
const SYS_GET: u16 = NLDEV | 6;

/// Attributes: RDMA_NLDEV_ATTR_*.
mod attr {
    pub(super) const DEV_INDEX: u16 = 1;
    pub(super) const DEV_NAME: u16 = 2;
    pub(super) const PORT_INDEX: u16 = 3;
    pub(super) const CAP_FLAGS: u16 = 4;
    pub(super) const FW_VERSION: u16 = 5;
    pub(super) const NODE_GUID: u16 = 6;
    pub(super) const SYS_IMAGE_GUID: u16 = 7;
    pub(super) const PORT_STATE: u16 = 12;
    pub(super) const PORT_PHYS_STATE: u16 = 13;
    pub(super) const NODE_TYPE: u16 = 14;
    pub(super) const NDEV_INDEX: u16 = 50;
    pub(super) const NDEV_NAME: u16 = 51;
    pub(super) const SYS_NETNS_MODE: u16 = 66;
    pub(super) const PROTOCOL: u16 = 67;
    pub(super) const SYS_COPY_ON_FORK: u16 = 93;
}

/// Index of our device: a kernel's first.
const DEVICE: u32 = 0;
/// Its one port.
const PORT: u32 = 1;
/// RDMA_NODE_IB_CA
const CHANNEL_ADAPTER: u8 = 1;

/// Answers all requests of one send to the program whose netlink port is `to`; gives each message to `send`,
/// and stops where that fails. Without facts there is no device.
///
/// # Errors
/// That of `send`.
pub(crate) fn answer<E>(
    requests: &[u8],
    to: u32,
    facts: Option<&Facts>,
    mut send: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut rest = requests;
    while let Some((request, after)) = NetlinkRequest::first(rest) {
        rest = after;
        let mut reply = |kind, flags| NetlinkMessage::new(kind, flags, request.sequence, to);
        let asks = request.flags & REQUEST != 0 && request.kind >= FIRST_REQUEST;
        let found = if asks { found(&request, facts, &mut reply) } else { Ok(None) };
        let dumped = asks && request.is_dump() && !matches!(found, Err(libc::EOPNOTSUPP));
        if let Ok(Some(message)) = &found {
            send(message.bytes())?;
        }
        let error = found.err().unwrap_or(0);
        if dumped {
            send(reply(libc::NLMSG_DONE as u16, MULTI).number(-error).bytes())?;
        } else if request.flags & ACK != 0 || error != 0 {
            let ack = reply(libc::NLMSG_ERROR as u16, CAPPED).number(-error).raw(request.header);
            send(ack.bytes())?;
        }
    }
    Ok(())
}

/// The message that says what was asked for; None where a dump finds nothing.
fn found(
    request: &NetlinkRequest<'_>,
    facts: Option<&Facts>,
    reply: &mut impl FnMut(u16, u16) -> NetlinkMessage,
) -> Result<Option<NetlinkMessage>, i32> {
    let dump = request.is_dump();
    let message = reply(request.kind, if dump { MULTI } else { 0 });
    match request.kind {
        GET if dump => Ok(facts.map(|facts| message.device(facts))),
        GET => {
            let device = request.number(attr::DEV_INDEX)?;
            let facts = facts.filter(|_| device == DEVICE).ok_or(libc::EINVAL)?;
            Ok(Some(message.device(facts)))
        }
        PORT_GET => {
            let missing = if dump { libc::ENODEV } else { libc::EINVAL };
            let device = request.number(attr::DEV_INDEX)?;
            let facts = facts.filter(|_| device == DEVICE).ok_or(missing)?;
            if !dump && request.number(attr::PORT_INDEX)? != PORT {
                return Err(libc::EINVAL);
            }
            Ok(Some(message.port(facts)))
        }
        // Each network namespace has its own card, and a fork's child needs no copies made for it.
        SYS_GET if !dump => {
            Ok(Some(message.put(attr::SYS_NETNS_MODE, &[0]).put(attr::SYS_COPY_ON_FORK, &[1])))
        }
        _ => Err(libc::EOPNOTSUPP),
    }
}

/// A request of the program's.
struct NetlinkRequest<'a> {
    header: &'a [u8],
    kind: u16,
    flags: u16,
    sequence: u32,
    attributes: &'a [u8],
}

impl<'a> NetlinkRequest<'a> {
    /// The first of several, and what follows it; None if there is no whole one.
    fn first(bytes: &'a [u8]) -> Option<(NetlinkRequest<'a>, &'a [u8])> {
        let header = bytes.get(..HEADER)?;
        let length = u32_at(header, 0)? as usize;
        let request = NetlinkRequest {
            header,
            kind: u16_at(header, 4)?,
            flags: u16_at(header, 6)?,
            sequence: u32_at(header, 8)?,
            attributes: bytes.get(HEADER..length)?,
        };
        Some((request, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
    }

    fn is_dump(&self) -> bool {
        self.flags & DUMP == DUMP
    }

    /// The value of an attribute, the last of its type.
    fn number(&self, of: u16) -> Result<u32, i32> {
        /// NLA_TYPE_MASK: the two bits above say how a value is laid out
        const TYPE: u16 = 0x3fff;
        let mut found = Err(libc::EINVAL);
        let mut rest = self.attributes;
        while let (Some(length), Some(kind)) = (u16_at(rest, 0), u16_at(rest, 2)) {
            let Some(value) = rest.get(ATTRIBUTE..usize::from(length)) else { break };
            if kind & TYPE == of {
                found = Ok(u32_at(value, 0).ok_or(libc::ERANGE)?);
            }
            rest = rest.get(usize::from(length).next_multiple_of(4)..).unwrap_or_default();
        }
        found
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// A message to the program.
struct NetlinkMessage(Vec<u8>);

impl NetlinkMessage {
    fn new(kind: u16, flags: u16, sequence: u32, to: u32) -> NetlinkMessage {
        let mut message = NetlinkMessage(vec![0; 4]);
        message.0.extend(kind.to_ne_bytes());
        message.0.extend(flags.to_ne_bytes());
        message.0.extend(sequence.to_ne_bytes());
        message.0.extend(to.to_ne_bytes());
        message
    }

    /// Adds bytes that are no attribute. All that a message holds is far shorter than a page.
    fn raw(mut self, bytes: &[u8]) -> NetlinkMessage {
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        let length = self.0.len() as u32;
        if let Some(field) = self.0.first_chunk_mut() {
            *field = length.to_ne_bytes();
        }
        self
    }

    fn number(self, number: i32) -> NetlinkMessage {
        self.raw(&number.to_ne_bytes())
    }

    /// Adds an attribute.
    fn put(self, kind: u16, value: &[u8]) -> NetlinkMessage {
        let length = (ATTRIBUTE + value.len()) as u16;
        self.raw(&[length.to_ne_bytes(), kind.to_ne_bytes()].concat()).raw(value)
    }

    fn text(self, kind: u16, text: &str) -> NetlinkMessage {
        self.put(kind, &[text.as_bytes(), b"\0"].concat())
    }

    fn handle(self, facts: &Facts) -> NetlinkMessage {
        self.put(attr::DEV_INDEX, &DEVICE.to_ne_bytes()).text(attr::DEV_NAME, &facts.name)
    }

    fn device(self, facts: &Facts) -> NetlinkMessage {
        let of = &facts.device.attr;
        self.handle(facts)
            .put(attr::PORT_INDEX, &PORT.to_ne_bytes())
            .put(attr::CAP_FLAGS, &of.device_cap_flags.to_ne_bytes())
            .text(attr::FW_VERSION, of.fw_ver)
            .put(attr::NODE_GUID, &of.node_guid.to_ne_bytes())
            .put(attr::SYS_IMAGE_GUID, &of.sys_image_guid.to_ne_bytes())
            .put(attr::NODE_TYPE, &[CHANNEL_ADAPTER])
            .text(attr::PROTOCOL, "roce")
    }

    /// What a RoCE port has: no LIDs. Of the interfaces behind its addresses the first is named.
    fn port(self, facts: &Facts) -> NetlinkMessage {
        let port = &facts.device.port;
        let message = self
            .handle(facts)
            .put(attr::PORT_INDEX, &PORT.to_ne_bytes())
            .put(attr::PORT_STATE, &[port.state as u8])
            .put(attr::PORT_PHYS_STATE, &[port.phys_state]);
        match facts.device.gids.first() {
            Some(gid) => message
                .put(attr::NDEV_INDEX, &gid.ifindex.to_ne_bytes())
                .text(attr::NDEV_NAME, interface(gid)),
            None => message,
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
#[path = "nldev_tests.rs"]
mod tests;
