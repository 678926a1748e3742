//! The program's side: calls that wait for their reply, for a bounded time.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use zerocopy::IntoBytes;

use crate::message::{
    Access, CAPABILITIES, DMA_READ, DMA_WRITE, DmaMap, DmaUnmap, ERROR, Head, IRQ_ACTION_TRIGGER,
    IRQ_DATA_EVENTFD, IRQ_DATA_NONE, KIND, MAJOR, MAX_ACCESS, MINOR, MessageOp, REPLY, Region, SetIrqs,
    Version, parse,
};
use crate::stream::{MessageStream, ReadResult, VfioMessage};

/// How long a reply may take: a board that is alive needs microseconds.
const PATIENCE: Duration = Duration::from_secs(5);
/// Messages that are no reply and are passed over while one is awaited.
const STRAY: u32 = 64;

/// A device at the other end of a socket.
#[derive(Debug)]
pub struct VfioClient {
    stream: MessageStream,
    patience: Duration,
    next: u16,
    /// A reply did not come, or not as it should: nothing that comes later is believed
    broken: bool,
}

/// A region of a device.
#[derive(Debug)]
pub struct RegionInfo {
    /// Bits of `REGION_*`
    pub flags: u32,
    /// Size in bytes
    pub size: u64,
    /// Where it begins in the file
    pub offset: u64,
    /// What to map, if it can be mapped
    pub file: Option<File>,
}

impl AsFd for VfioClient {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn other(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl VfioClient {
    /// Connects, and agrees on the version.
    ///
    /// # Errors
    /// What connect(2) says; a device of another version; EPIPE: it ends the connection, as a device does
    /// that has a client.
    pub fn connect(path: &Path) -> io::Result<VfioClient> {
        VfioClient::connect_within(path, PATIENCE)
    }

    /// The same; each reply, from this one on, may take `patience`.
    ///
    /// # Errors
    /// As of [`VfioClient::connect`].
    pub fn connect_within(path: &Path, patience: Duration) -> io::Result<VfioClient> {
        let stream = MessageStream::new(UnixStream::connect(path)?)?;
        let mut client = VfioClient { stream, patience, next: 0, broken: false };
        let version = Version { major: MAJOR, minor: MINOR };
        let body = [version.as_bytes(), CAPABILITIES.as_bytes(), &[0]].concat();
        let reply = client.call(MessageOp::Version, &body, &[])?;
        match parse::<Version>(&reply.body) {
            Some((Version { major: MAJOR, .. }, _)) => Ok(client),
            _ => Err(other("another version of vfio-user")),
        }
    }

    /// The user id of the device's process.
    pub fn peer_uid(&self) -> Option<u32> {
        self.stream.peer_uid()
    }

    /// Sends a request and waits for its reply.
    fn call(&mut self, op: MessageOp, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<VfioMessage> {
        if self.broken {
            return Err(Errno::EPIPE.into());
        }
        self.broken = true;
        let reply = self.exchange(op, body, fds);
        if self.broken {
            self.hang_up();
        }
        reply
    }

    fn exchange(&mut self, op: MessageOp, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<VfioMessage> {
        self.next = self.next.wrapping_add(1);
        let head = Head { id: self.next, op: op as u16, ..Head::default() };
        if !self.stream.send(head, body, fds) {
            return Err(Errno::EPIPE.into());
        }
        let reply = self.reply(self.next)?;
        if reply.head.op != op as u16 {
            return Err(other("a reply to another request"));
        }
        self.broken = false;
        if reply.head.flags & ERROR != 0 {
            return Err(io::Error::from_raw_os_error(reply.head.error as i32));
        }
        Ok(reply)
    }

    /// Ends the connection to a device that does not do what it has to. Who looks at the socket sees POLLHUP,
    /// as if the device had ended it; the device, should it wake up, ends all that was made.
    pub fn hang_up(&mut self) {
        self.broken = true;
        self.stream.shut();
    }

    fn reply(&mut self, id: u16) -> io::Result<VfioMessage> {
        let begun = Instant::now();
        for _ in 0..STRAY {
            match self.stream.receive() {
                ReadResult::Message(message)
                    if message.head.flags & KIND == REPLY && message.head.id == id =>
                {
                    return Ok(message);
                }
                ReadResult::Message(_) => {}
                ReadResult::Gone => return Err(Errno::EPIPE.into()),
                /* what comes byte by byte has no more time than what comes at once */
                ReadResult::Nothing => self.wait(self.patience.saturating_sub(begun.elapsed()))?,
            }
        }
        Err(other("messages that nobody asked for"))
    }

    fn wait(&self, left: Duration) -> io::Result<()> {
        let mut fds = [PollFd::new(self.stream.as_fd(), PollFlags::POLLIN)];
        let left = u16::try_from(left.as_millis()).unwrap_or(u16::MAX);
        match poll(&mut fds, PollTimeout::from(left)) {
            Ok(0) => Err(Errno::ETIMEDOUT.into()),
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Asks what a region is.
    ///
    /// # Errors
    /// What the device says; EPIPE when it is gone, ETIMEDOUT when it is silent: so for all calls.
    pub fn region(&mut self, index: u32) -> io::Result<RegionInfo> {
        let ask = Region { argsz: size_of::<Region>() as u32, index, ..Region::default() };
        let mut reply = self.call(MessageOp::RegionInfo, ask.as_bytes(), &[])?;
        let (region, _) = parse::<Region>(&reply.body).ok_or_else(|| other("a short reply"))?;
        let file = reply.fds.pop().map(File::from);
        Ok(RegionInfo { flags: region.flags, size: region.size, offset: region.offset, file })
    }

    /// Gives the device memory: `size` bytes of `file` from `offset` on, by which it knows them as `address`.
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn dma_map(&mut self, file: BorrowedFd<'_>, offset: u64, address: u64, size: u64) -> io::Result<()> {
        self.map(&[file], DMA_READ | DMA_WRITE, offset, address, size)
    }

    /// The same, of memory that the device may not write.
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn dma_map_read_only(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        address: u64,
        size: u64,
    ) -> io::Result<()> {
        self.map(&[file], DMA_READ, offset, address, size)
    }

    /// The same without a file, of which the device reaches nothing. `flags`: [`DMA_READ`], [`DMA_WRITE`].
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn dma_map_without_file(&mut self, address: u64, size: u64, flags: u32) -> io::Result<()> {
        self.map(&[], flags, 0, address, size)
    }

    fn map(
        &mut self,
        files: &[BorrowedFd<'_>],
        flags: u32,
        offset: u64,
        address: u64,
        size: u64,
    ) -> io::Result<()> {
        let map = DmaMap { argsz: size_of::<DmaMap>() as u32, flags, offset, address, size };
        self.call(MessageOp::DmaMap, map.as_bytes(), files).map(drop)
    }

    /// Takes memory back.
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn dma_unmap(&mut self, address: u64, size: u64) -> io::Result<()> {
        let unmap = DmaUnmap { argsz: size_of::<DmaUnmap>() as u32, flags: 0, address, size };
        self.call(MessageOp::DmaUnmap, unmap.as_bytes(), &[]).map(drop)
    }

    /// Has the device signal `eventfds` for its interrupts of kind `index`, from vector 0 on.
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn set_irqs(&mut self, index: u32, eventfds: &[OwnedFd]) -> io::Result<()> {
        self.set_irqs_at(index, 0, eventfds)
    }

    /// The same from vector `start` on.
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn set_irqs_at(&mut self, index: u32, start: u32, eventfds: &[OwnedFd]) -> io::Result<()> {
        let fds: Vec<_> = eventfds.iter().map(AsFd::as_fd).collect();
        self.irqs(IRQ_DATA_EVENTFD, index, start, fds.len() as u32, &fds)
    }

    /// Has the device signal nothing for `count` vectors from `start` on; `count` 0: for all.
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn clear_irqs(&mut self, index: u32, start: u32, count: u32) -> io::Result<()> {
        let data = if count == 0 { IRQ_DATA_NONE } else { IRQ_DATA_EVENTFD };
        self.irqs(data, index, start, count, &[])
    }

    /// Has the device signal a vector as if it had something to say.
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn trigger(&mut self, index: u32, vector: u32) -> io::Result<()> {
        self.irqs(IRQ_DATA_NONE, index, vector, 1, &[])
    }

    fn irqs(
        &mut self,
        data: u32,
        index: u32,
        start: u32,
        count: u32,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let (argsz, flags) = (size_of::<SetIrqs>() as u32, data | IRQ_ACTION_TRIGGER);
        let set = SetIrqs { argsz, flags, index, start, count };
        self.call(MessageOp::SetIrqs, set.as_bytes(), fds).map(drop)
    }

    /// Resets the device.
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn reset(&mut self) -> io::Result<()> {
        self.call(MessageOp::DeviceReset, &[], &[]).map(drop)
    }

    /// Reads a region.
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn read(&mut self, region: u32, offset: u64, to: &mut [u8]) -> io::Result<()> {
        let access = Access { offset, region, count: to.len().min(MAX_ACCESS) as u32 };
        let reply = self.call(MessageOp::RegionRead, access.as_bytes(), &[])?;
        match parse::<Access>(&reply.body) {
            Some((_, bytes)) if bytes.len() == to.len() => to.copy_from_slice(bytes),
            _ => return Err(other("a short reply")),
        }
        Ok(())
    }

    /// Writes a region.
    ///
    /// # Errors
    /// As of [`VfioClient::region`].
    pub fn write(&mut self, region: u32, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let access = Access { offset, region, count: bytes.len() as u32 };
        self.call(MessageOp::RegionWrite, &[access.as_bytes(), bytes].concat(), &[]).map(drop)
    }
}
