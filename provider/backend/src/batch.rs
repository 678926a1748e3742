//! The batch of frames that wait for one sendmmsg: headers and copies in an arena, host memory by reference.
//!
//! Owns the memory that the kernel reads from. It must not compute anything of a frame: [`crate::tx`] does.

mod outer;

use std::mem;
use std::ops::Range;
use std::os::fd::RawFd;

use starverbs_core::Gid;
use starverbs_core::wire::Crc;

use crate::program::ProgramBytes;
use crate::sockopt::errno;
use crate::sum;
use crate::zeroed::Zeroed;
use crate::{BackendError, HostAddr};
use outer::{CONTROL, Name, write_controls, write_name};

/// Largest frame with its ICRC: 4096 bytes of payload and every header there is, with room to spare.
pub(crate) const MAX_FRAME: usize = 4608;
/// Staging for headers, trailers and copied payload, bytes: what frames that are copied take of one flush.
pub const ARENA: usize = 192 << 10;
const IOVS: usize = 2048;
/// IOVs that one frame may need: header, pieces of payload, trailer.
const FRAME_IOVS: usize = 12;
/// UIO_MAXIOV: IOVs of one message.
const MESSAGE_IOVS: usize = 1024;
/// Messages at once.
pub(crate) const MESSAGES: usize = 64;
/// Bytes of the program's memory that are looked at at once: the largest path MTU's.
const SEEN: usize = 4096;
/// Blocks that are distinguished when a frame looks for its message.
const NEWEST: usize = 128;
/// UDP_MAX_SEGMENTS of the kernels that have the fewest.
const SEGMENTS: u16 = 64;
/// Bytes of one segmented send: an IP packet's length is 16 bits, with headers.
const SEGMENTED: usize = 65_000;
/// TTL or hop limit that a socket gives a frame that asks for none.
pub(crate) const HOPS: u8 = 64;

/// What frames of one message have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct FrameGroup {
    /// Index of the source address
    pub(crate) source: u8,
    /// Index of the socket among the sender's
    pub(crate) socket: u8,
    /// The socket has no address of its own: each message carries the source's
    pub(crate) anywhere: bool,
    /// Destination's UDP port
    pub(crate) port: u16,
    /// TOS or traffic class
    pub(crate) traffic_class: u8,
    /// TTL or hop limit
    pub(crate) hop_limit: u8,
    /// Destination QPN block: a receiving kernel steers by a message's first frame alone
    pub(crate) block: u32,
    /// GID of the destination
    pub(crate) dgid: Gid,
}

/// A message under construction.
#[derive(Clone, Copy)]
struct OutboundMessage {
    group: FrameGroup,
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
struct CmsgRoom([u8; CONTROL]);

/// Frames that wait.
pub(crate) struct FrameBatch {
    arena: Zeroed,
    /// Copies of what of the program's memory is summed before the kernel reads it
    seen: Box<[u8; SEEN]>,
    used: usize,
    iovs: Vec<libc::iovec>,
    /// Of which message each IOV is
    owners: Vec<u8>,
    /// Room for the IOVs in the order of their messages
    sorted: Vec<libc::iovec>,
    messages: Vec<OutboundMessage>,
    /// By the end of a QPN block's number: one more than the newest message of such blocks, 0 none
    newest: [u8; NEWEST],
    /// The message that the last frame joined
    current: usize,
    /// A frame joined another message than the last one
    mixed: bool,
    headers: Vec<libc::mmsghdr>,
    names: Vec<Name>,
    controls: Vec<CmsgRoom>,
}

// SAFETY: the raw pointers in `iovs` and `headers` lead into memory that the batch owns (whose place on the
// heap does not change) and into host memory that any thread may read; they are followed under `&mut self`
// alone.
unsafe impl Send for FrameBatch {}

impl FrameBatch {
    /// Nothing yet. `NoMemory`
    pub(crate) fn new() -> Result<Self, BackendError> {
        // SAFETY: headers and addresses of zeroes are valid: integers and null pointers.
        let (header, name) = unsafe { (mem::zeroed(), mem::zeroed()) };
        Ok(FrameBatch {
            arena: Zeroed::new(ARENA)?,
            seen: Box::new([0; SEEN]),
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
            controls: vec![CmsgRoom([0; CONTROL]); MESSAGES],
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
    /// A process with many QPs has several blocks of them, and what is sent to them in turn would go one by
    /// one if a frame joined the last message alone. It never joins an older message of its group than the
    /// newest, so that frames to a QP stay in order.
    #[inline]
    pub(crate) fn place(&mut self, group: &FrameGroup, size: usize, join: bool) -> u16 {
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
        self.messages.push(OutboundMessage {
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

    /// Room for a whole frame of `len` bytes, which the caller fills.
    #[inline(always)]
    pub(crate) fn room(&mut self, len: usize) -> &mut [u8] {
        let (from, to) = (self.used, self.used + len);
        self.used = to;
        self.append(self.arena.at(from..to), len);
        self.arena.bytes_mut(from..to)
    }

    /// Copies bytes behind what the frame has so far; gives the copy.
    #[inline]
    pub(crate) fn copy(&mut self, bytes: &[u8]) -> &mut [u8] {
        let (from, to) = (self.used, self.used + bytes.len());
        self.used = to;
        if !bytes.is_empty() {
            self.append(self.arena.at(from..to), bytes.len());
        }
        let copy = self.arena.bytes_mut(from..to);
        copy.copy_from_slice(bytes);
        copy
    }

    /// Copies the program's bytes behind what the frame has so far; gives the copy.
    #[inline]
    pub(crate) fn copy_program(&mut self, bytes: ProgramBytes) -> &[u8] {
        let (from, to) = (self.used, self.used + bytes.len());
        self.used = to;
        bytes.copy_to(0, self.arena.bytes_mut(from..to));
        self.append(self.arena.at(from..to), bytes.len());
        self.arena.bytes(from..to)
    }

    /// Refers to the program's bytes behind what the frame has so far. `crc` goes on over what they are now.
    #[inline]
    pub(crate) fn gather(&mut self, bytes: ProgramBytes, crc: &mut Crc) {
        self.append(bytes.as_ptr().cast_mut(), bytes.len());
        if sum::update(crc, bytes) {
            return;
        }
        for from in (0..bytes.len()).step_by(SEEN) {
            let seen = &mut self.seen[..SEEN.min(bytes.len() - from)];
            bytes.copy_to(from, seen);
            crc.update(seen);
        }
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

    /// The bytes of the frame that was added last, `size` in all.
    #[cold]
    pub(crate) fn last_frame(&self, size: usize) -> Vec<u8> {
        let (mut frame, mut left) = (vec![0; size], size);
        for iov in self.iovs.iter().rev() {
            let len = left.min(iov.iov_len);
            left -= len;
            copy_piece(iov, iov.iov_len - len, &mut frame[left..left + len]);
            if left == 0 {
                break;
            }
        }
        frame
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
            let part = want.min(iov.iov_len - skip);
            copy_piece(iov, skip, &mut out[len..len + part]);
            (len, want, skip) = (len + part, want - part, 0);
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
    pub(crate) fn group(&self, at: usize) -> &FrameGroup {
        &self.messages[at].group
    }

    /// Where the run of messages of one socket ends that begins with message `at`.
    pub(crate) fn run_end(&self, at: usize) -> usize {
        let socket = self.messages[at].group.socket;
        self.messages[at..].iter().take_while(|m| m.group.socket == socket).count() + at
    }

    /// The next messages from `at` on, one after the other, that have no bit in `passed`.
    #[inline]
    pub(crate) fn next_left(&self, at: usize, passed: u64) -> Option<Range<usize>> {
        let at = at + passed.checked_shr(at as u32).unwrap_or(0).trailing_ones() as usize;
        let end = at + passed.checked_shr(at as u32).unwrap_or(0).trailing_zeros() as usize;
        (at < self.groups()).then(|| at..end.min(self.groups()))
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

    /// Puts the IOVs in the order of their messages, if they are not. No frame joins these from now on.
    pub(crate) fn put_in_order(&mut self) {
        if std::mem::take(&mut self.mixed) {
            self.sort();
        }
    }

    /// Where the bytes of message `at` lie, once all are in order: its first frame's size, and the pieces.
    pub(crate) fn pieces(&self, at: usize) -> (u16, &[libc::iovec]) {
        let message = &self.messages[at];
        (message.segment, &self.iovs[message.first_iov..message.first_iov + message.iovs])
    }

    /// Writes the headers of the messages for the system call.
    pub(crate) fn seal(&mut self, addrs: &[HostAddr]) {
        self.put_in_order();
        /* by iterators: an index would borrow a whole vector anew, and end the addresses in it that the
         * kernel has */
        let room = self.names.iter_mut().zip(&mut self.controls).zip(&mut self.headers);
        let iovs = self.iovs.as_mut_ptr();
        for (message, ((name, control), header)) in self.messages.iter().zip(room) {
            let group = &message.group;
            let from = &addrs[group.source as usize];
            let control_len = write_controls(&mut control.0, message, from);
            let name_len = write_name(name, group.dgid, from, group.port);
            let header = &mut header.msg_hdr;
            header.msg_name = std::ptr::from_mut(name).cast();
            header.msg_namelen = name_len as libc::socklen_t;
            header.msg_iov = iovs.wrapping_add(message.first_iov);
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
        // SAFETY: `seal` made each header describe names, controls and IOVs that the batch owns; the IOVs
        // describe the arena or host memory that lives until the flush, as the card promises. The kernel only
        // reads them.
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

    /// Sends one datagram of `from` to where message `at` goes, with its traffic class and hop limit, not
    /// segmented.
    #[cold]
    pub(crate) fn send_one(
        &mut self,
        fd: RawFd,
        at: usize,
        from: &HostAddr,
        bytes: &[u8],
    ) -> Result<(), i32> {
        let single = OutboundMessage { frames: 1, ..self.messages[at] };
        let mut control = CmsgRoom([0; CONTROL]);
        let control_len = write_controls(&mut control.0, &single, from);
        let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut header = self.headers[at].msg_hdr;
        (header.msg_iov, header.msg_iovlen) = (&mut iov, 1);
        (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), control_len as _);
        // SAFETY: as in `send`; the IOV describes `bytes`, and the control messages are this call's.
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

/// Copies bytes of a piece of the batch, from `skip` on, which must not reach beyond it.
#[cold]
fn copy_piece(piece: &libc::iovec, skip: usize, to: &mut [u8]) {
    debug_assert!(skip + to.len() <= piece.iov_len);
    // SAFETY: a piece is arena or host memory that is readable until the batch is cleared; the program may
    // write to the latter meanwhile, so there is no reference to it.
    unsafe {
        let from = piece.iov_base.cast::<u8>().add(skip);
        to.as_mut_ptr().copy_from_nonoverlapping(from, to.len());
    }
}

#[cfg(test)]
mod tests;
