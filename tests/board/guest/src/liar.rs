//! A board that lies to a guest's kernel: between QEMU and a real function of a board, it changes what the
//! board answers, once it is told to. When the board ends, it gives QEMU an end that QEMU survives.
//!
//! Answers of commands lie in the guest's memory, of which it keeps a mapping as the board does: what it
//! changes there is changed before the kernel's write of the queue's tail is answered.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use memmap2::{MmapOptions, MmapRaw};
use starverbs_core::rng::Rng;
use starverbs_queues::board::{
    BAR_CONTROL, COMMAND_BYTES, PENDING, REG_COMMANDS, REG_COMMANDS_TAIL, REG_ERROR, REG_MAGIC, REG_STATUS,
};
use starverbs_vfio::message::{Access, DmaMap, DmaUnmap, parse};
use starverbs_vfio::{MessageOp, MessageStream, ReadResult, VfioMessage};

/// Between two looks at the sockets.
const NAP: Duration = Duration::from_micros(50);
/// How long a client may take to read that the board is gone.
const LAST: Duration = Duration::from_secs(1);
/// Bytes of a command in front of its status, and with it.
const STATUS_AT: usize = 4;
const HEAD: usize = 8;

/// One connection, from the client to the board.
struct Liar {
    client: MessageStream,
    board: MessageStream,
    lies: Arc<AtomicBool>,
    rng: Rng,
    /// The guest's memory: address and mapping
    maps: Vec<(u64, MmapRaw)>,
    /// The kernel's command queue, which has one entry
    commands: u64,
    /// Its interrupts
    vectors: Vec<OwnedFd>,
    /// What the client waits for: the request's number, and its access
    asked: Option<(u16, Access)>,
}

/// Serves at `socket` the function at `board`, in a thread that ends with this process. It lies while `lies`.
pub(crate) fn start(socket: &Path, board: &Path, lies: Arc<AtomicBool>, seed: u64) -> io::Result<()> {
    let (listener, board) = (UnixListener::bind(socket)?, board.to_owned());
    std::thread::spawn(move || -> io::Result<()> {
        loop {
            let client = MessageStream::new(listener.accept()?.0)?;
            let board = MessageStream::new(UnixStream::connect(&board)?)?;
            let (lies, rng) = (Arc::clone(&lies), Rng::new([seed, 11]));
            let (maps, vectors) = (Vec::new(), Vec::new());
            Liar { client, board, lies, rng, maps, commands: 0, vectors, asked: None }.serve();
        }
    });
    Ok(())
}

impl Liar {
    /// Until one of them hangs up.
    fn serve(&mut self) {
        loop {
            let mut had = false;
            match self.client.receive() {
                ReadResult::Message(message) => {
                    had = true;
                    self.on_request(&message);
                    if !forward(&self.board, message) {
                        return self.end();
                    }
                }
                ReadResult::Nothing => {}
                ReadResult::Gone => return,
            }
            match self.board.receive() {
                ReadResult::Message(mut message) => {
                    had = true;
                    self.on_reply(&mut message);
                    if !forward(&self.client, message) {
                        return;
                    }
                }
                ReadResult::Nothing => {}
                ReadResult::Gone => return self.end(),
            }
            if !had {
                std::thread::sleep(NAP);
            }
        }
    }

    /// The board is gone. A socket that is closed with something unread is a reset connection to its client,
    /// which ends QEMU 11.1.2: it sets an error over that of the socket (hw/vfio-user/proxy.c, line 241). So
    /// the client reads an end, and the socket is closed after that.
    fn end(&mut self) {
        self.client.finish();
        let begun = Instant::now();
        while begun.elapsed() < LAST {
            match self.client.receive() {
                ReadResult::Message(_) => {}
                ReadResult::Nothing => std::thread::sleep(NAP),
                ReadResult::Gone => return,
            }
        }
    }

    /// Notes what it has to know to lie well.
    fn on_request(&mut self, message: &VfioMessage) {
        let body = &message.body[..];
        match MessageOp::from_code(message.head.op) {
            Some(MessageOp::DmaMap) => {
                let (Some((map, _)), Some(file)) = (parse::<DmaMap>(body), message.fds.first()) else {
                    return;
                };
                let len = usize::try_from(map.size).unwrap_or(usize::MAX);
                if let Ok(mapped) = MmapOptions::new().len(len).offset(map.offset).map_raw(file) {
                    self.maps.push((map.address, mapped));
                }
            }
            Some(MessageOp::DmaUnmap) => {
                if let Some((unmap, _)) = parse::<DmaUnmap>(body) {
                    let end = unmap.address.saturating_add(unmap.size);
                    self.maps.retain(|(address, _)| *address < unmap.address || *address >= end);
                }
            }
            Some(MessageOp::SetIrqs) => {
                self.vectors.extend(message.fds.iter().filter_map(|fd| fd.try_clone().ok()));
            }
            Some(MessageOp::RegionRead) => {
                self.asked = parse::<Access>(body).map(|(access, _)| (message.head.id, access));
            }
            Some(MessageOp::RegionWrite) => {
                let Some((access, bytes)) = parse::<Access>(body) else { return };
                self.asked = Some((message.head.id, access));
                if (access.region, access.offset) == (BAR_CONTROL, REG_COMMANDS.into()) {
                    self.commands = bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
                }
            }
            _ => {}
        }
    }

    fn on_reply(&mut self, message: &mut VfioMessage) {
        let Some((id, access)) = self.asked.take() else { return };
        if !self.lies.load(Ordering::Relaxed) || message.head.id != id || access.region != BAR_CONTROL {
            return;
        }
        let at = access.offset as u32;
        match MessageOp::from_code(message.head.op) {
            Some(MessageOp::RegionRead) => {
                /* not to be a board any more ends the talk: rarely. What it counted is anything */
                let odds = if [REG_MAGIC, REG_STATUS, REG_ERROR].contains(&at) { 500 } else { 2 };
                if self.rng.word().is_multiple_of(odds) {
                    let value = message.body.iter_mut().skip(size_of::<Access>());
                    value.for_each(|byte| *byte = self.rng.word() as u8);
                }
            }
            Some(MessageOp::RegionWrite) if at == REG_COMMANDS_TAIL => self.answer(),
            _ => {}
        }
        if self.rng.word().is_multiple_of(4) {
            let vector = self.rng.word() as usize % self.vectors.len().max(1);
            /* one that is full interrupts already */
            let _ = self.vectors.get(vector).map(|fd| nix::unistd::write(fd.as_fd(), &1u64.to_ne_bytes()));
        }
    }

    /// Changes the answer of the kernel's last command: what it says, or whether it was carried out.
    fn answer(&mut self) {
        let found = self.maps.iter().find_map(|(base, map)| {
            let at = usize::try_from(self.commands.checked_sub(*base)?).ok()?;
            (at + COMMAND_BYTES <= map.len()).then(|| map.as_mut_ptr().wrapping_add(at))
        });
        let Some(command) = found else { return };
        let write = |at: usize, bytes: &[u8]| {
            // SAFETY: inside a mapping that lives as long as this; the other side knows that it may change.
            unsafe { command.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        };
        /* most are true, so that something is made */
        match self.rng.word() % 24 {
            0 => write(STATUS_AT, &(self.rng.word() as u32 % 200).to_le_bytes()),
            1 => write(STATUS_AT, &0u32.to_le_bytes()),
            2 => write(STATUS_AT, &PENDING.wrapping_sub(self.rng.word() as u32).to_le_bytes()),
            /* numbers that may be another's */
            3 | 4 => {
                write(HEAD, &(self.rng.word() as u32 % 512).to_le_bytes());
                write(HEAD + 4, &(self.rng.word() as u32 % 8192).to_le_bytes());
            }
            5 => {
                let noise: Vec<u8> = (HEAD..COMMAND_BYTES).map(|_| self.rng.word() as u8).collect();
                write(HEAD, &noise);
            }
            _ => {}
        }
    }
}

/// Passes a message on as it came.
fn forward(to: &MessageStream, message: VfioMessage) -> bool {
    let fds: Vec<_> = message.fds.iter().map(AsFd::as_fd).collect();
    to.send(message.head, &message.body, &fds)
}
