//! What travels between the processes of one host through the blocks' unix sockets, as bytes.
//!
//! Every message begins with four magic bytes and its kind. Owns that format; it must not send or receive,
//! but for [`ask`], the other side of [`ToolRequest`].

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use starverbs_core::{FrameMeta, Gid};

use crate::peer::socket::Credentials;
use crate::peer::trust;
use crate::registry::socket_name;

const MAGIC: [u8; 4] = *b"SVB1";
const FRAMES: u8 = 1;
const ANSWER: u8 = 2;
const REQUEST: u8 = 3;
const LEASE_REQUEST: u8 = 4;
const LEASE_REPLY: u8 = 5;

/// Magic, kind, traffic class, hop limit, tag.
const COMMON: usize = 8;
/// Length of what stands before the frames in a message of frames.
pub(crate) const RUN_HEADER: usize = COMMON + 16 + 16 + 8;

/// A run of frames that reached the wrong process: as received, with their ICRCs, not yet checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StrayFrames {
    /// What is known of the frames
    pub(crate) meta: FrameMeta,
    /// Sender's UDP port
    pub(crate) sport: u16,
    /// Bytes of each frame; the last may be shorter
    pub(crate) segment: u16,
    /// The first one's index in the send it came from, which is its IP ID
    pub(crate) first: u16,
    /// Of multicast that is forwarded to a proxy's client: that of its [`LeaseRequest`]; of others, [`SENT`]
    /// or 0
    pub(crate) tag: u8,
}

/// Tag of frames that no wire had before.
pub(crate) const SENT: u8 = 1;

/// A client's request to its multicast proxy: a lease of these groups, instead of those before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseRequest {
    /// Its block
    pub(crate) block: u16,
    /// Forwarded frames carry it
    pub(crate) tag: u8,
    /// The groups
    pub(crate) groups: Vec<Gid>,
}

/// An answer to steering probes, one for all that came together: a socket takes few messages unread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SteeringAnswer {
    /// Which round of probing
    pub(crate) nonce: u32,
    /// The lowest index in the group that a probe came for
    pub(crate) index: u32,
    /// How many probes came
    pub(crate) count: u32,
    /// Who answers
    pub(crate) token: u64,
    /// The blocks it owns
    pub(crate) blocks: Vec<u16>,
}

/// A message's kind, with where its body stands.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CardMessage<'a> {
    /// Frames, behind [`RUN_HEADER`] bytes
    Frames(StrayFrames),
    /// Answer to a probe
    Answer(SteeringAnswer),
    /// Question from a tool
    Request(&'a [u8]),
    /// A client's request for a lease
    LeaseRequest(LeaseRequest),
}

fn common(kind: u8, traffic_class: u8, hop_limit: u8, tag: u8) -> [u8; COMMON] {
    let [a, b, c, d] = MAGIC;
    [a, b, c, d, kind, traffic_class, hop_limit, tag]
}

/// The bytes before a run of frames.
pub(crate) fn encode_run(run: &StrayFrames) -> [u8; RUN_HEADER] {
    let mut out = [0; RUN_HEADER];
    out[..8].copy_from_slice(&common(FRAMES, run.meta.traffic_class, run.meta.hop_limit, run.tag));
    out[8..24].copy_from_slice(&run.meta.src.0);
    out[24..40].copy_from_slice(&run.meta.dst.0);
    out[40..42].copy_from_slice(&run.sport.to_be_bytes());
    out[42..44].copy_from_slice(&run.segment.to_be_bytes());
    out[44..46].copy_from_slice(&run.first.to_be_bytes());
    out
}

/// An answer's message.
pub(crate) fn encode_answer(answer: &SteeringAnswer) -> Vec<u8> {
    let mut out = common(ANSWER, 0, 0, 0).to_vec();
    out.extend(answer.nonce.to_be_bytes());
    out.extend(answer.index.to_be_bytes());
    out.extend(answer.count.to_be_bytes());
    out.extend(answer.token.to_be_bytes());
    out.extend(answer.blocks.iter().flat_map(|b| b.to_be_bytes()));
    out
}

/// The message of a request for a lease.
pub(crate) fn encode_lease_request(request: &LeaseRequest) -> Vec<u8> {
    let mut out = common(LEASE_REQUEST, 0, 0, request.tag).to_vec();
    out.extend(request.block.to_be_bytes());
    out.extend(request.groups.iter().flat_map(|group| group.0));
    out
}

fn decode_lease_request(tag: u8, rest: &[u8]) -> Option<LeaseRequest> {
    let (block, rest) = rest.split_first_chunk()?;
    let (groups, []) = rest.as_chunks() else { return None };
    let groups = groups.iter().map(|group| Gid(*group)).collect();
    Some(LeaseRequest { block: u16::from_be_bytes(*block), tag, groups })
}

/// The reply to a request with this tag.
pub(crate) fn encode_lease_reply(tag: u8, granted: bool) -> [u8; COMMON] {
    common(LEASE_REPLY, u8::from(granted), 0, tag)
}

/// Reads that reply: the request's tag, and whether it is granted.
pub(crate) fn decode_lease_reply(bytes: &[u8]) -> Option<(u8, bool)> {
    let head: &[u8; COMMON] = bytes.try_into().ok()?;
    (head[..4] == MAGIC && head[4] == LEASE_REPLY).then(|| (head[7], head[5] != 0))
}

/// Reads a message; `None` if it is none of ours.
pub(crate) fn decode(bytes: &[u8]) -> Option<CardMessage<'_>> {
    let (head, rest) = bytes.split_first_chunk::<COMMON>()?;
    if head[..4] != MAGIC {
        return None;
    }
    match head[4] {
        FRAMES => decode_run(head, rest).map(CardMessage::Frames),
        ANSWER => decode_answer(rest).map(CardMessage::Answer),
        REQUEST => Some(CardMessage::Request(rest)),
        LEASE_REQUEST => decode_lease_request(head[7], rest).map(CardMessage::LeaseRequest),
        _ => None,
    }
}

fn decode_run(head: &[u8; COMMON], rest: &[u8]) -> Option<StrayFrames> {
    let (src, rest) = rest.split_first_chunk()?;
    let (dst, rest) = rest.split_first_chunk()?;
    let (numbers, _) = rest.split_first_chunk::<8>()?;
    let number = |at: usize| u16::from_be_bytes([numbers[at], numbers[at + 1]]);
    let meta = FrameMeta { src: Gid(*src), dst: Gid(*dst), traffic_class: head[5], hop_limit: head[6] };
    let run = StrayFrames { meta, sport: number(0), segment: number(2), first: number(4), tag: head[7] };
    (run.segment > 0).then_some(run)
}

fn decode_answer(rest: &[u8]) -> Option<SteeringAnswer> {
    let (nonce, rest) = rest.split_first_chunk()?;
    let (index, rest) = rest.split_first_chunk()?;
    let (count, rest) = rest.split_first_chunk()?;
    let (token, rest) = rest.split_first_chunk()?;
    Some(SteeringAnswer {
        nonce: u32::from_be_bytes(*nonce),
        index: u32::from_be_bytes(*index),
        count: u32::from_be_bytes(*count),
        token: u64::from_be_bytes(*token),
        blocks: rest.chunks_exact(2).map(|b| u16::from_be_bytes([b[0], b[1]])).collect(),
    })
}

/// What another program of this host (`starverbs stat`) asked of this process; see [`ask`].
#[derive(Clone)]
pub struct ToolRequest {
    pub(crate) from: libc::sockaddr_un,
    pub(crate) from_len: libc::socklen_t,
    pub(crate) who: Option<Credentials>,
    /// What it asks
    pub text: Vec<u8>,
}

impl ToolRequest {
    /// Whether who asks may have this process's card changed: root, or a process of the same user, groups and
    /// capabilities, where this one keeps no secrets from its user.
    pub fn may_change(&self) -> bool {
        self.who.as_ref().is_some_and(|who| who.uid == 0 || trust::trusts(who))
    }
}

impl std::fmt::Debug for ToolRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ToolRequest")
            .field("text", &String::from_utf8_lossy(&self.text))
            .finish_non_exhaustive()
    }
}

/// Asks the process that owns `block` of the wire on UDP `port`, and waits for its answer for `limit`.
///
/// # Errors
/// `ConnectionRefused`: nobody owns the block. `WouldBlock`: no answer in time (the process may be stopped,
/// or be without progress thread and not in the library).
pub fn ask(port: u16, block: u32, text: &[u8], limit: Duration) -> io::Result<Vec<u8>> {
    let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(format!(
        "starverbs/ask/{}/{:x}",
        std::process::id(),
        crate::sockopt::random()
    ))?)?;
    socket.set_read_timeout(Some(limit))?;
    socket.set_write_timeout(Some(limit))?;
    let mut message = common(REQUEST, 0, 0, 0).to_vec();
    message.extend(text);
    socket.send_to_addr(&message, &SocketAddr::from_abstract_name(socket_name(port, block))?)?;
    let mut answer = vec![0; 1 << 20];
    let len = socket.recv(&mut answer)?;
    answer.truncate(len);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were() {
        let meta = FrameMeta { src: Gid([1; 16]), dst: Gid([2; 16]), traffic_class: 3, hop_limit: 4 };
        let run = StrayFrames { meta, sport: 5, segment: 6, first: 7, tag: 8 };
        assert_eq!(decode(&encode_run(&run)), Some(CardMessage::Frames(run)));
        let answer = SteeringAnswer { nonce: 1, index: 2, count: 5, token: 3, blocks: vec![4, 4094] };
        assert_eq!(decode(&encode_answer(&answer)), Some(CardMessage::Answer(answer)));
        let request = LeaseRequest { block: 9, tag: 2, groups: vec![Gid([3; 16]), Gid([4; 16])] };
        let bytes = encode_lease_request(&request);
        assert_eq!(decode(&bytes[..bytes.len() - 1]), None, "half a group");
        assert_eq!(decode(&bytes), Some(CardMessage::LeaseRequest(request)));
        assert_eq!(decode_lease_reply(&encode_lease_reply(2, true)), Some((2, true)));
        assert_eq!(decode_lease_reply(&bytes), None);
    }

    #[test]
    fn foreign_and_short_messages_are_nothing() {
        let meta = FrameMeta::default();
        let good = encode_run(&StrayFrames { meta, sport: 5, segment: 6, first: 7, tag: 0 });
        for len in 0..RUN_HEADER {
            assert_eq!(decode(&good[..len]), None, "{len} bytes");
        }
        assert_eq!(
            decode(&encode_run(&StrayFrames { meta, sport: 5, segment: 0, first: 7, tag: 0 })),
            None,
            "no segment size"
        );
        let mut foreign = good;
        foreign[0] ^= 1;
        assert_eq!(decode(&foreign), None);
        let mut unknown = good;
        unknown[4] = 99;
        assert_eq!(decode(&unknown), None);
    }
}
