//! The vfio-user side of a function: one client at a time on its socket, whose messages are answered one by
//! one, without waiting. Another one's connection is ended.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::unistd::Uid;
use starverbs_queues::board::{BAR_CONTROL, BAR_DOORBELLS, BAR_MSIX, CONTROL_BYTES};
use starverbs_vfio::message::{
    Access, CAPABILITIES, DEVICE_RESET_PCI, DMA_UNMAP_ALL, DMA_WRITE, DeviceInfo, DmaMap, DmaUnmap, ERROR,
    Head, IRQ_ACTION_TRIGGER, IRQ_DATA_EVENTFD, IRQ_DATA_NONE, IRQ_EVENTFD, IRQ_MSIX, IrqInfo, KIND, MAJOR,
    MAX_ACCESS, MINOR, NO_REPLY, PCI_CONFIG, PCI_IRQS, PCI_REGIONS, REGION_CAPS, REGION_MMAP, REGION_READ,
    REGION_WRITE, REPLY, Region, SetIrqs, SparseMmap, Version, parse,
};
use starverbs_vfio::{MessageOp, MessageStream, ReadResult, VfioMessage};
use zerocopy::IntoBytes;

use crate::broken;
use crate::dma::{Errno, Maps};
use crate::doorbells::DOORBELL_BYTES;
use crate::function::{CommonCard, Function, VECTORS};
use crate::pci::{CONFIG_BYTES, MSIX_BYTES};
use crate::record::RecordLine;

/// Messages of one client in a turn at most: others have their turn then.
const MESSAGES: u32 = 64;

/// A socket, and who is there.
pub(crate) struct BoardServer {
    path: PathBuf,
    /// Device and inode of the socket there, by which it is known again
    file: Option<(u64, u64)>,
    listener: UnixListener,
    client: Option<MessageStream>,
    /// Who connected while the client was there
    next: Option<UnixStream>,
    greeted: bool,
}

impl BoardServer {
    /// Listens at `path`, where nothing may be but a socket that nobody listens at any more.
    ///
    /// # Errors
    /// What the system says; EADDRINUSE: somebody listens there.
    pub(crate) fn open(path: &Path) -> io::Result<BoardServer> {
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
                if !is_socket || std::os::unix::net::UnixStream::connect(path).is_ok() {
                    return Err(error);
                }
                fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            bound => bound?,
        };
        listener.set_nonblocking(true)?;
        let (path, file) = (path.to_owned(), file_at(path));
        Ok(BoardServer { path, file, listener, client: None, next: None, greeted: false })
    }

    /// What to wait for: a message, or a client.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.listener.as_fd()).chain(self.client.as_ref().map(AsFd::as_fd))
    }

    /// Answers what has come; says whether anything had.
    pub(crate) fn run(&mut self, function: &mut Function, card: &mut CommonCard) -> bool {
        /* before the look at the client: one that was gone when the next one connected is seen to be gone */
        self.next = self.next.take().or_else(|| Some(self.listener.accept().ok()?.0));
        if self.client.is_none() {
            let Some(socket) = self.next.take() else { return false };
            self.client = MessageStream::new(socket).ok();
            self.greeted = false;
        }
        for had in 0..MESSAGES {
            let Some(client) = &mut self.client else { return true };
            match client.receive() {
                ReadResult::Nothing => return self.next.take().is_some() || had > 0,
                ReadResult::Gone => self.part(function, card),
                ReadResult::Message(message) => {
                    if !self.answer(message, function, card) {
                        self.part(function, card);
                    }
                }
            }
        }
        true
    }

    /// The client is gone, or sent away.
    fn part(&mut self, function: &mut Function, card: &mut CommonCard) {
        self.client = None;
        card.tap.note(|| RecordLine::Gone { function: function.number() as u8 });
        function.disconnect(card);
    }

    /// Answers a message. False: who sends such is sent away.
    fn answer(&mut self, message: VfioMessage, function: &mut Function, card: &mut CommonCard) -> bool {
        let head = message.head;
        if head.flags & KIND == REPLY {
            return false;
        }
        let Some(client) = &self.client else { return false };
        let op = MessageOp::from_code(head.op).ok_or(libc::EOPNOTSUPP);
        let first = op == Ok(MessageOp::Version);
        if first == self.greeted && !broken::rule(39) {
            return false;
        }
        self.greeted = true;
        let same_user = client.peer_uid() == Some(Uid::effective().as_raw());
        let wants_file = op == Ok(MessageOp::RegionInfo);
        let result = op.and_then(|op| carry_out(op, message, same_user, function, card));
        if head.flags & NO_REPLY != 0 {
            return true;
        }
        match result {
            Ok((body, file)) => {
                let fds = [function.doorbells().file().as_fd()];
                let fds = if wants_file && file { &fds[..] } else { &[] };
                client.send(Head { flags: REPLY, error: 0, ..head }, &body, fds)
            }
            Err(errno) => client.send(Head { flags: REPLY | ERROR, error: errno as u32, ..head }, &[], &[]),
        }
    }
}

impl Drop for BoardServer {
    fn drop(&mut self) {
        /* An end, not a connection that is reset, which QEMU 11.1.2 does not survive. */
        if let Some(client) = &mut self.client {
            client.finish();
            while matches!(client.receive(), ReadResult::Message(_)) {}
        }
        // Another board may have taken the path since; the inode is not used again while we listen.
        if self.file.is_some() && file_at(&self.path) == self.file {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Device and inode of what is at `path`, no link followed.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    let found = fs::symlink_metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// The body of an answer, and whether the doorbell page goes with it.
type Answer = (Vec<u8>, bool);

/// Does what a message asks for, and notes it.
pub(crate) fn carry_out(
    op: MessageOp,
    message: VfioMessage,
    same_user: bool,
    function: &mut Function,
    card: &mut CommonCard,
) -> Result<Answer, Errno> {
    let tap = Rc::clone(&card.tap);
    if !tap.is_on() {
        return answer(op, message, same_user, function, card);
    }
    let number = function.number();
    /* what has effects stands in front of them, what has none but an answer behind it */
    let before = begun(op, &message, number as u8);
    let body = if before.is_none() { message.body.clone() } else { Vec::new() };
    let is_noted = before.is_some();
    if let Some(line) = before {
        tap.note(|| line);
    }
    let done = answer(op, message, same_user, function, card);
    match &done {
        Err(errno) if is_noted => tap.note(|| RecordLine::Refused(*errno)),
        Ok((answer, _)) => {
            if let Some(line) = ended(op, &body, answer, number as u8, &card.env.memories[number].maps) {
                tap.note(|| line);
            }
        }
        Err(_) => {}
    }
    done
}

/// The line of a message that has effects.
fn begun(op: MessageOp, message: &VfioMessage, function: u8) -> Option<RecordLine> {
    match op {
        MessageOp::RegionWrite => {
            let (Access { offset, region, .. }, bytes) = parse(&message.body)?;
            Some(RecordLine::Write { function, region, offset, bytes: bytes.to_vec() })
        }
        MessageOp::SetIrqs => {
            let (SetIrqs { flags, index, start, count, .. }, _) = parse(&message.body)?;
            let given = message.fds.len() as u32;
            Some(RecordLine::Vectors { function, flags, index, start, count, given })
        }
        MessageOp::DeviceReset => Some(RecordLine::Reset { function }),
        _ => None,
    }
}

/// The line of a message that was answered.
fn ended(op: MessageOp, body: &[u8], answer: &[u8], function: u8, maps: &Maps) -> Option<RecordLine> {
    match op {
        MessageOp::RegionRead => {
            let (Access { offset, region, .. }, bytes) = parse(answer)?;
            Some(RecordLine::Read { function, region, offset, bytes: bytes.to_vec() })
        }
        MessageOp::DmaMap => {
            let (DmaMap { flags, address, size, .. }, _) = parse(body)?;
            let (writable, here) = (flags & DMA_WRITE != 0, maps.is_file(address));
            /* one that came without a descriptor is none */
            maps.has(address).then_some(RecordLine::Map { function, address, size, writable, here })
        }
        MessageOp::DmaUnmap => {
            let (DmaUnmap { flags, address, size, .. }, _) = parse(body)?;
            let all = flags & DMA_UNMAP_ALL != 0;
            let (address, size) = if all { (0, u64::MAX) } else { (address, size) };
            Some(RecordLine::Unmap { function, address, size })
        }
        _ => None,
    }
}

/// Does what a message asks for.
pub(crate) fn answer(
    op: MessageOp,
    mut message: VfioMessage,
    same_user: bool,
    function: &mut Function,
    card: &mut CommonCard,
) -> Result<Answer, Errno> {
    let body = &message.body[..];
    let plain = |body: &[u8]| Ok((body.to_vec(), false));
    match op {
        MessageOp::Version => {
            let (Version { major, .. }, _) = parse(body).ok_or(libc::EINVAL)?;
            if major != MAJOR {
                return Err(libc::EINVAL);
            }
            let version = Version { major: MAJOR, minor: MINOR };
            plain(&[version.as_bytes(), CAPABILITIES.as_bytes(), &[0]].concat())
        }
        MessageOp::DeviceInfo => {
            let argsz = size_of::<DeviceInfo>() as u32;
            let (regions, irqs) = (PCI_REGIONS, PCI_IRQS);
            plain(DeviceInfo { argsz, flags: DEVICE_RESET_PCI, regions, irqs }.as_bytes())
        }
        MessageOp::RegionInfo => {
            let (Region { index, argsz, .. }, _) = parse(body).ok_or(libc::EINVAL)?;
            region_info(index, argsz, function.maps_doorbells)
        }
        MessageOp::IrqInfo => {
            let (IrqInfo { index, .. }, _) = parse(body).ok_or(libc::EINVAL)?;
            if index >= PCI_IRQS {
                return Err(libc::EINVAL);
            }
            let count = if index == IRQ_MSIX { VECTORS } else { 0 };
            let argsz = size_of::<IrqInfo>() as u32;
            plain(IrqInfo { argsz, flags: IRQ_EVENTFD, index, count }.as_bytes())
        }
        MessageOp::SetIrqs => set_irqs(&mut message, function).map(|()| (Vec::new(), false)),
        MessageOp::DmaMap => {
            let (DmaMap { flags, offset, address, size, .. }, _) = parse(body).ok_or(libc::EINVAL)?;
            /* maps without a descriptor are of what a device need not reach: ROM, BARs */
            if let Some(fd) = message.fds.pop() {
                let maps = &mut card.env.memories[function.number()].maps;
                maps.add(address, size, flags & DMA_WRITE != 0, File::from(fd), offset, same_user)?;
            }
            plain(&[])
        }
        MessageOp::DmaUnmap => {
            let (unmap, _) = parse::<DmaUnmap>(body).ok_or(libc::EINVAL)?;
            let all = unmap.flags & DMA_UNMAP_ALL != 0;
            let (address, size) = if all { (0, u64::MAX) } else { (unmap.address, unmap.size) };
            card.env.memories[function.number()].maps.remove(address, size)?;
            plain(unmap.as_bytes())
        }
        MessageOp::RegionRead => {
            let (Access { offset, region, count }, _) = parse(body).ok_or(libc::EINVAL)?;
            let count = count as usize;
            if count > MAX_ACCESS {
                return Err(libc::EINVAL);
            }
            let mut bytes = vec![0; count];
            match region {
                BAR_CONTROL => function.read(offset, &mut bytes),
                BAR_DOORBELLS => function.doorbells().read(offset, &mut bytes),
                BAR_MSIX => function.msix.read(offset, &mut bytes),
                PCI_CONFIG if broken::rule(43) => bytes.fill(1),
                PCI_CONFIG => function.config.read(offset, &mut bytes),
                _ => return Err(libc::EINVAL),
            }
            let access = Access { offset, region, count: count as u32 };
            plain(&[access.as_bytes(), &bytes].concat())
        }
        MessageOp::RegionWrite => {
            let (access, bytes) = parse::<Access>(body).ok_or(libc::EINVAL)?;
            if bytes.len() != access.count as usize {
                return Err(libc::EINVAL);
            }
            match access.region {
                BAR_CONTROL => function.write(card, access.offset, bytes)?,
                BAR_DOORBELLS => function.write_doorbells(card, access.offset, bytes)?,
                BAR_MSIX => function.msix.write(access.offset, bytes),
                PCI_CONFIG => function.write_config(card, access.offset, bytes),
                _ => return Err(libc::EINVAL),
            }
            plain(access.as_bytes())
        }
        MessageOp::DeviceReset => {
            function.reset_function(card);
            plain(&[])
        }
    }
}

/// What a region is, and whether its file goes with that. A client that has room for no more than a region
/// (`argsz`) learns how much room it needs for what is behind it.
fn region_info(index: u32, argsz: u32, maps_doorbells: bool) -> Result<Answer, Errno> {
    let (flags, size) = match index {
        BAR_CONTROL => (REGION_READ | REGION_WRITE, u64::from(CONTROL_BYTES)),
        BAR_DOORBELLS => {
            let mapped = if maps_doorbells { REGION_MMAP | REGION_CAPS } else { 0 };
            (REGION_READ | REGION_WRITE | mapped, DOORBELL_BYTES as u64)
        }
        BAR_MSIX => (REGION_READ | REGION_WRITE, u64::from(MSIX_BYTES)),
        PCI_CONFIG => (REGION_READ | REGION_WRITE, CONFIG_BYTES),
        index if index < PCI_REGIONS => (0, 0),
        _ => return Err(libc::EINVAL),
    };
    let head = size_of::<Region>() as u32;
    let region = Region { argsz: head, flags, index, cap_offset: 0, size, offset: 0 };
    if flags & REGION_MMAP == 0 {
        return Ok((region.as_bytes().to_vec(), false));
    }
    let needed = head + size_of::<SparseMmap>() as u32;
    let region = Region { argsz: needed, cap_offset: head, ..region };
    if argsz < needed {
        return Ok((region.as_bytes().to_vec(), true));
    }
    Ok(([region.as_bytes(), SparseMmap::of(0, size).as_bytes()].concat(), true))
}

/// Vectors are signalled by the descriptors that came, one each; without any by none any more.
fn set_irqs(message: &mut VfioMessage, function: &mut Function) -> Result<(), Errno> {
    let (SetIrqs { flags, index, start, count, .. }, _) = parse(&message.body).ok_or(libc::EINVAL)?;
    let end = start.checked_add(count).filter(|end| *end <= VECTORS).ok_or(libc::EINVAL)?;
    if index != IRQ_MSIX || flags & IRQ_ACTION_TRIGGER == 0 {
        return Err(libc::EINVAL);
    }
    let vectors = start as usize..end as usize;
    if flags & IRQ_DATA_NONE != 0 {
        if count == 0 {
            function.irqs.iter_mut().for_each(|irq| *irq = None);
        }
        vectors.for_each(|vector| function.interrupt(vector as u32));
        return Ok(());
    }
    let fds = std::mem::take(&mut message.fds);
    if flags & IRQ_DATA_EVENTFD == 0 || !(fds.is_empty() || fds.len() == count as usize) {
        return Err(libc::EINVAL);
    }
    for fd in &fds {
        /* a write to it must not wait: whatever it is, it does not block from now on */
        let set = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK);
        nix::fcntl::fcntl(fd, set).map_err(|error| error as i32)?;
    }
    let mut fds = fds.into_iter();
    if broken::rule(44) && fds.len() == 0 {
        return Ok(());
    }
    function.irqs[vectors].iter_mut().for_each(|irq| *irq = fds.next());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A board that ends late takes away no socket but its own.
    #[test]
    fn a_path_that_another_has_taken_stays() {
        let path = std::env::temp_dir().join(format!("starverbs-server-{}", std::process::id()));
        let first = BoardServer::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let second = BoardServer::open(&path).unwrap();
        drop(first);
        assert!(path.exists(), "the second listens there");
        drop(second);
        assert!(!path.exists(), "its own goes");
    }
}
