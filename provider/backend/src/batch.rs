//! The batch of frames that wait for one sendmmsg: headers and copies in an arena, host memory by reference.
//!
//! Owns the memory that the kernel reads from. It must not compute anything of a frame: [`crate::Tx`] does.

use std::mem;
use std::os::fd::RawFd;

use starverbs_core::Gid;

use crate::host::is_link_local;
use crate::sockopt::errno;
use crate::zeroed::zeroed;
use crate::{BackendError, HostAddr};

/// Largest frame with its ICRC: 4096 bytes of payload and every header there is, with room to spare.
pub(crate) const MAX_FRAME: usize = 4608;
/// Staging for headers, trailers and copied payload.
const ARENA: usize = 192 << 10;
const IOVS: usize = 2048;
/// IOVs that one frame may need: header, pieces of payload, trailer.
const FRAME_IOVS: usize = 12;
/// UIO_MAXIOV: IOVs of one message.
const MESSAGE_IOVS: usize = 1024;
const MESSAGES: usize = 64;
/// Blocks that are told apart when a frame looks for its message.
const NEWEST: usize = 64;
/// UDP_MAX_SEGMENTS of the kernels that have the fewest.
const SEGMENTS: u16 = 64;
/// Bytes of one segmented send: an IP packet's length is 16 bits, with headers.
const SEGMENTED: usize = 65_000;
/// TTL or hop limit that a socket gives a frame that asks for none.
pub(crate) const HOPS: u8 = 64;
/// Three control messages with an integer each.
const CONTROL: usize = 96;

/// What frames of one message have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Group {
    /// Index of the source address
    pub(crate) source: u8,
    /// TOS or traffic class
    pub(crate) traffic_class: u8,
    /// TTL or hop limit
    pub(crate) hop_limit: u8,
    /// Destination QPN block: a receiving kernel steers by a message's first frame alone
    pub(crate) block: u32,
    /// Destination
    pub(crate) dgid: Gid,
}

/// A message under construction.
#[derive(Clone, Copy)]
struct Message {
    group: Group,
    frames: u16,
    /// Size of each frame but the last
    segment: u16,
    /// The last frame was shorter: no more may follow
    closed: bool,
    bytes: usize,
    /// Among the batch's, once it is sealed
    first_iov: usize,
    iovs: usize,
}

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL]);

/// Frames that wait.
pub(crate) struct Batch {
    arena: Box<[u8]>,
    used: usize,
    iovs: Vec<libc::iovec>,
    /// Of which message each IOV is
    owners: Vec<u8>,
    /// Room for the IOVs in the order of their messages
    sorted: Vec<libc::iovec>,
    messages: Vec<Message>,
    /// By the end of a QPN block's number: one more than the newest message of such blocks, 0 none
    newest: [u8; NEWEST],
    /// The message that the last frame joined
    current: usize,
    /// A frame joined another message than the last one
    mixed: bool,
    headers: Vec<libc::mmsghdr>,
    names: Vec<Name>,
    controls: Vec<Control>,
}

// SAFETY: the raw pointers in `iovs` and `headers` lead into memory that the batch owns (whose place on the heap does not
// change) and into host memory that any thread may read; they are followed under `&mut self` alone.
unsafe impl Send for Batch {}

impl Batch {
    /// Nothing yet. `NoMemory`
    pub(crate) fn new() -> Result<Self, BackendError> {
        // SAFETY: headers and addresses of zeroes are valid: integers and null pointers.
        let (header, name) = unsafe { (mem::zeroed(), mem::zeroed()) };
        Ok(Batch {
            arena: zeroed(ARENA)?,
            used: 0,
            iovs: Vec::with_capacity(IOVS),
            owners: Vec::with_capacity(IOVS),
            sorted: Vec::with_capacity(IOVS),
            messages: Vec::with_capacity(MESSAGES),
            newest: [0; NEWEST],
            current: 0,
            mixed: false,
            headers: vec![header; MESSAGES],
            names: vec![name; MESSAGES],
            controls: vec![Control([0; CONTROL]); MESSAGES],
        })
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Whether any frame fits.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.used + MAX_FRAME <= ARENA
            && self.iovs.len() + FRAME_IOVS <= IOVS
            && self.messages.len() < MESSAGES
    }

    /// Finds the message that a frame of `size` bytes joins, or begins one. Gives the frame's index in it.
    ///
    /// A process with many QPs has several blocks of them, and what is sent to them in turn would go one by one if a frame
    /// joined the last message alone. It never joins an older message of its group than the newest, so that frames to a
    /// QP stay in order.
    #[inline]
    pub(crate) fn place(&mut self, group: &Group, size: usize, join: bool) -> u16 {
        let newest = &mut self.newest[group.block as usize % NEWEST];
        let (at, count) = (usize::from(*newest), self.messages.len());
        if let Some(last) = at.checked_sub(1).and_then(|at| self.messages.get_mut(at))
            && join
            && !last.closed
            && last.group == *group
            && size <= last.segment as usize
            && last.frames < SEGMENTS
            && last.bytes + size <= SEGMENTED
            && last.iovs + FRAME_IOVS <= MESSAGE_IOVS
        {
            last.closed = size < last.segment as usize;
            last.frames += 1;
            last.bytes += size;
            self.current = at - 1;
            self.mixed |= at != count;
            return last.frames - 1;
        }
        self.current = count;
        *newest = count as u8 + 1;
        self.messages.push(Message {
            group: *group,
            frames: 1,
            segment: size as u16,
            closed: false,
            bytes: size,
            first_iov: self.iovs.len(),
            iovs: 0,
        });
        0
    }

    /// Begins a frame with its header. Gives its place in the arena, for [`Batch::flip`].
    #[inline]
    pub(crate) fn begin(&mut self, header: &[u8]) -> usize {
        let start = self.used;
        self.copy(header);
        start
    }

    /// Copies bytes behind what the frame has so far; gives the copy.
    #[inline]
    pub(crate) fn copy(&mut self, bytes: &[u8]) -> &[u8] {
        let (from, to) = (self.used, self.used + bytes.len());
        self.used = to;
        let copy = &mut self.arena[from..to];
        copy.copy_from_slice(bytes);
        let base = copy.as_mut_ptr();
        if !bytes.is_empty() {
            self.append(base, bytes.len());
        }
        &self.arena[from..to]
    }

    /// Refers to bytes behind what the frame has so far.
    #[inline]
    pub(crate) fn gather<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        self.append(bytes.as_ptr().cast_mut(), bytes.len());
        bytes
    }

    #[inline]
    fn append(&mut self, base: *mut u8, len: usize) {
        let owner = self.current as u8;
        let Some(message) = self.messages.get_mut(self.current) else { return };
        if self.owners.last() == Some(&owner)
            && let Some(last) = self.iovs.last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base
        {
            last.iov_len += len;
            return;
        }
        self.iovs.push(libc::iovec { iov_base: base.cast(), iov_len: len });
        self.owners.push(owner);
        message.iovs += 1;
    }

    /// Turns over a bit, chosen by `draw`, of the frame of `size` bytes that began at `start`: not in BTH byte 4, which
    /// the ICRC does not cover. The frame must have been copied.
    #[cold]
    pub(crate) fn flip(&mut self, start: usize, size: usize, draw: u64) {
        if self.used - start != size {
            return;
        }
        let bit = (draw % (size as u64 * 8 - 8)) as usize;
        let bit = if bit < 32 { bit } else { bit + 8 };
        self.arena[start + bit / 8] ^= 1 << (bit % 8);
    }

    /// The bytes of the frame that was added last, `size` in all.
    #[cold]
    pub(crate) fn last_frame(&self, size: usize) -> Vec<u8> {
        let (mut pieces, mut left) = (Vec::new(), size);
        for iov in self.iovs.iter().rev() {
            // SAFETY: an IOV describes arena or host memory that is readable until the batch is cleared.
            let bytes = unsafe { std::slice::from_raw_parts(iov.iov_base.cast::<u8>(), iov.iov_len) };
            let part = &bytes[bytes.len() - left.min(bytes.len())..];
            left -= part.len();
            pieces.push(part);
            if left == 0 {
                break;
            }
        }
        pieces.reverse();
        pieces.concat()
    }

    /// Copies frame `index` of message `at` to `out`; gives its length.
    #[cold]
    pub(crate) fn read_frame(&self, at: usize, index: u16, out: &mut [u8]) -> usize {
        let message = &self.messages[at];
        let mut skip = index as usize * message.segment as usize;
        let mut want = (message.bytes - skip).min(message.segment as usize).min(out.len());
        let mut len = 0;
        for iov in &self.iovs[message.first_iov..message.first_iov + message.iovs] {
            if skip >= iov.iov_len {
                skip -= iov.iov_len;
                continue;
            }
            // SAFETY: an IOV describes arena or host memory that is readable until the batch is cleared.
            let bytes = unsafe { std::slice::from_raw_parts(iov.iov_base.cast::<u8>(), iov.iov_len) };
            let part = &bytes[skip..(skip + want).min(bytes.len())];
            out[len..len + part.len()].copy_from_slice(part);
            (len, want, skip) = (len + part.len(), want - part.len(), 0);
            if want == 0 {
                break;
            }
        }
        len
    }

    /// Messages waiting.
    pub(crate) fn groups(&self) -> usize {
        self.messages.len()
    }

    /// What the frames of message `at` have in common.
    pub(crate) fn group(&self, at: usize) -> &Group {
        &self.messages[at].group
    }

    /// Frames of message `at`.
    pub(crate) fn frames(&self, at: usize) -> u16 {
        self.messages[at].frames
    }

    /// Puts the IOVs in the order of their messages.
    #[cold]
    fn sort(&mut self) {
        let (mut next, mut at) = ([0; MESSAGES], 0);
        for (message, next) in self.messages.iter_mut().zip(&mut next) {
            (message.first_iov, *next) = (at, at);
            at += message.iovs;
        }
        self.sorted.clear();
        self.sorted.extend_from_slice(&self.iovs);
        for (iov, owner) in self.iovs.iter().zip(&self.owners) {
            let next = &mut next[usize::from(*owner)];
            self.sorted[*next] = *iov;
            *next += 1;
        }
        mem::swap(&mut self.iovs, &mut self.sorted);
    }

    /// Writes the headers of the messages for the system call. No frame joins them from now on.
    pub(crate) fn seal(&mut self, addrs: &[HostAddr], port: u16) {
        if self.mixed {
            self.sort();
        }
        for (at, message) in self.messages.iter().enumerate() {
            let group = &message.group;
            let control = &mut self.controls[at];
            let control_len = write_controls(&mut control.0, message);
            let name = &mut self.names[at];
            let name_len = write_name(name, group.dgid, &addrs[group.source as usize], port);
            let header = &mut self.headers[at].msg_hdr;
            header.msg_name = std::ptr::from_mut(name).cast();
            header.msg_namelen = name_len as libc::socklen_t;
            header.msg_iov = self.iovs[message.first_iov..].as_mut_ptr();
            header.msg_iovlen = message.iovs as _;
            header.msg_control =
                if control_len == 0 { std::ptr::null_mut() } else { control.0.as_mut_ptr().cast() };
            header.msg_controllen = control_len as _;
        }
    }

    /// Sends the messages `at..end`, sealed before; gives how many the kernel took, or the first one's errno.
    pub(crate) fn send(&mut self, fd: RawFd, at: usize, end: usize) -> Result<usize, i32> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let headers = &mut self.headers[at..end];
        // SAFETY: `seal` made each header describe names, controls and IOVs that the batch owns; the IOVs describe the arena
        // or host memory that lives until the flush, as the card promises. The kernel only reads them.
        let sent = unsafe {
            match headers {
                [one] if one.msg_hdr.msg_iovlen == 1 && one.msg_hdr.msg_controllen == 0 => {
                    // The kernel has less to copy than for a msghdr.
                    let (m, iov) = (&one.msg_hdr, &*one.msg_hdr.msg_iov);
                    let (name, len) = (m.msg_name.cast_const().cast(), m.msg_namelen);
                    libc::sendto(fd, iov.iov_base, iov.iov_len, flags, name, len).min(1) as i32
                }
                [one] => libc::sendmsg(fd, &one.msg_hdr, flags).min(1) as i32,
                _ => libc::sendmmsg(fd, headers.as_mut_ptr(), headers.len() as u32, flags as _),
            }
        };
        match usize::try_from(sent) {
            Ok(sent) => Ok(sent.max(1)),
            Err(_) => Err(errno()),
        }
    }

    /// Sends one datagram to where message `at` goes, with its traffic class and hop limit, not segmented.
    #[cold]
    pub(crate) fn send_one(&mut self, fd: RawFd, at: usize, bytes: &[u8]) -> Result<(), i32> {
        let single = Message { frames: 1, ..self.messages[at] };
        let control_len = write_controls(&mut self.controls[at].0, &single);
        let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut header = self.headers[at].msg_hdr;
        (header.msg_iov, header.msg_iovlen, header.msg_controllen) = (&mut iov, 1, control_len as _);
        // SAFETY: as in `send`; the IOV describes `bytes`.
        let sent = unsafe { libc::sendmsg(fd, &header, libc::MSG_NOSIGNAL) };
        if sent < 0 { Err(errno()) } else { Ok(()) }
    }

    /// Forgets all frames.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.used = 0;
        self.iovs.clear();
        self.owners.clear();
        self.messages.clear();
        self.newest = [0; NEWEST];
        self.mixed = false;
    }
}

/// Room for a destination of either family.
#[derive(Clone, Copy)]
union Name {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

/// Writes the address to send to: `dgid`, on the interface of `from` where that matters. Gives its length.
fn write_name(out: &mut Name, dgid: Gid, from: &HostAddr, port: u16) -> usize {
    match dgid.ipv4() {
        Some(ip) => {
            out.v4 = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: port.to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(ip) },
                sin_zero: [0; 8],
            };
            mem::size_of::<libc::sockaddr_in>()
        }
        None => {
            let local = is_link_local(dgid) || dgid.0[0] == 0xff;
            out.v6 = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: port.to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: dgid.0 },
                sin6_scope_id: if local { from.ifindex } else { 0 },
            };
            mem::size_of::<libc::sockaddr_in6>()
        }
    }
}

/// Writes what the message needs beyond the defaults; gives the length, 0 for most.
fn write_controls(out: &mut [u8; CONTROL], message: &Message) -> usize {
    let group = &message.group;
    let v4 = group.dgid.ipv4().is_some();
    let mut len = 0;
    if message.frames > 1 {
        len = put_control(out, len, libc::SOL_UDP, libc::UDP_SEGMENT, &message.segment.to_ne_bytes());
    }
    if group.traffic_class != 0 {
        let (level, name) =
            if v4 { (libc::SOL_IP, libc::IP_TOS) } else { (libc::SOL_IPV6, libc::IPV6_TCLASS) };
        len = put_control(out, len, level, name, &i32::from(group.traffic_class).to_ne_bytes());
    }
    if group.hop_limit != HOPS {
        let (level, name) =
            if v4 { (libc::SOL_IP, libc::IP_TTL) } else { (libc::SOL_IPV6, libc::IPV6_HOPLIMIT) };
        len = put_control(out, len, level, name, &i32::from(group.hop_limit).to_ne_bytes());
    }
    len
}

/// Writes one `struct cmsghdr` and its data at `at`; gives where the next begins (both are 8-aligned).
fn put_control(out: &mut [u8; CONTROL], at: usize, level: i32, name: i32, data: &[u8]) -> usize {
    const HEAD: usize = mem::size_of::<libc::cmsghdr>();
    let out = &mut out[at..at + HEAD + 8];
    out.fill(0);
    out[..mem::size_of::<usize>()].copy_from_slice(&(HEAD + data.len()).to_ne_bytes());
    out[HEAD - 8..HEAD - 4].copy_from_slice(&level.to_ne_bytes());
    out[HEAD - 4..HEAD].copy_from_slice(&name.to_ne_bytes());
    out[HEAD..HEAD + data.len()].copy_from_slice(data);
    at + HEAD + 8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames to several blocks in turn: one message a block, each frame's bytes in the order in which they were added.
    #[test]
    fn frames_to_several_blocks_join_the_newest_message_of_theirs() {
        let mut batch = Batch::new().unwrap();
        let group = |block| Group { block, ..Group::default() };
        let mut add = |block: u32, bytes: &[u8]| {
            let index = batch.place(&group(block), bytes.len(), true);
            batch.begin(&bytes[..4]);
            batch.copy(&bytes[4..]);
            assert_eq!(batch.last_frame(bytes.len()), bytes);
            index
        };
        /* blocks 3 and 67 share a place in the list of the newest; a shorter frame ends a message */
        let placed = [
            (3, &b"frame-a1"[..]),
            (4, b"frame-b1"),
            (3, b"frame-a2"),
            (67, b"frame-c1"),
            (3, b"frame-a3"),
            (4, b"short"),
            (4, b"frame-b2"),
            (3, b"frame-a4"),
        ]
        .map(|(block, bytes)| add(block, bytes));
        assert_eq!(placed, [0, 0, 1, 0, 0, 1, 0, 1]);
        let name = "lo".to_owned();
        let from = HostAddr { gid: Gid::default(), ifindex: 0, link_mtu: 65536, name, loopback: true };
        batch.seal(&[from], 4791);
        let read = |at: usize, index| {
            let mut room = [0; 64];
            let len = batch.read_frame(at, index, &mut room);
            String::from_utf8(room[..len].to_vec()).unwrap()
        };
        let frames = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (4, 0)];
        let expected =
            ["frame-a1", "frame-a2", "frame-b1", "short", "frame-c1", "frame-a3", "frame-a4", "frame-b2"];
        assert_eq!(frames.map(|(at, index)| read(at, index)), expected);
    }
}
