//! A board that lies: whatever it answers and writes, the program gets errors, or nonsense, and goes on.

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use starverbs_core::rng::Rng;
use starverbs_core::{Cqe, QpState, QpType};
use starverbs_queues::board::*;
use starverbs_queues::format::CardIndex;
use starverbs_settings::{DeviceChoice, Settings};
use starverbs_verbs::{Ah, CompChannel, Context, Cq, Pd, Qp, QpAttr, RecvWr, Srq, VerbsEvent, kind};
use starverbs_vfio::message::{
    Access, DmaMap, Head, REGION_MMAP, REPLY, Region as RegionInfo, Version, parse,
};
use starverbs_vfio::{MessageOp, MessageStream, ReadResult, VfioMessage};
use zerocopy::IntoBytes;

use crate::common::*;

const PAGE: usize = 64 << 10;
/// A card's index line: all of it is the board's.
const CARD_LINE: usize = std::mem::size_of::<CardIndex>();

/// The board.
struct Liar {
    stream: MessageStream,
    rng: Rng,
    page: File,
    /// Memory files of the client: DMA address, and the mapping
    maps: Vec<(u64, MmapRaw)>,
    commands: u64,
    head: u32,
    /// Where completion queues, index lines of cards and the event queue lie: address and bytes
    scribble: Vec<(u64, usize)>,
    /// Completion queues, and the phase of the round that it wrote last
    rounds: Vec<(u64, usize, u8)>,
    /// How many commands it answers
    patience: usize,
}

impl Liar {
    /// Serves one client, until it hangs up; takes `patience` commands.
    fn serve(listener: &UnixListener, seed: u64, patience: usize) {
        let (socket, _) = listener.accept().unwrap();
        let stream = MessageStream::new(socket).unwrap();
        let page = doorbell_page();
        let (rng, maps, scribble, rounds) = (Rng::new([seed, 7]), Vec::new(), Vec::new(), Vec::new());
        let mut liar = Liar { stream, rng, page, maps, commands: 0, head: 0, scribble, rounds, patience };
        loop {
            match liar.stream.receive() {
                ReadResult::Message(message) => liar.answer(message),
                ReadResult::Nothing => {
                    liar.scribble();
                    std::thread::yield_now();
                }
                ReadResult::Gone => return,
            }
        }
    }

    fn answer(&mut self, mut message: VfioMessage) {
        let Head { op, .. } = message.head;
        let body = &message.body[..];
        let mut reply = body.to_vec();
        let mut with_page = false;
        match MessageOp::from_code(op).unwrap() {
            MessageOp::Version => reply = Version { major: 0, minor: 0 }.as_bytes().to_vec(),
            MessageOp::RegionInfo => {
                let (info, _) = parse::<RegionInfo>(body).unwrap();
                reply = RegionInfo { flags: 3 | REGION_MMAP, size: PAGE as u64, ..info }.as_bytes().to_vec();
                with_page = true;
            }
            MessageOp::DmaMap => {
                let (map, _) = parse::<DmaMap>(body).unwrap();
                /* the program's own memory cannot be mapped, and is left alone */
                let file = File::from(message.fds.pop().unwrap());
                if let Ok(mapped) = MmapOptions::new().len(map.size as usize).map_raw(&file) {
                    self.maps.push((map.address, mapped));
                }
                reply.clear();
            }
            MessageOp::RegionRead => {
                let (access, _) = parse::<Access>(body).unwrap();
                let word = match access.offset as u32 {
                    REG_MAGIC => MAGIC,
                    REG_VERSION => VERSION,
                    REG_CAPS => u32::MAX,
                    REG_STATUS => STATUS_ENABLED,
                    _ => self.rng.word() as u32,
                };
                reply = [access.as_bytes(), &word.to_le_bytes()].concat();
            }
            MessageOp::RegionWrite => {
                let (access, bytes) = parse::<Access>(body).unwrap();
                self.write(access.offset as u32, bytes);
                reply = access.as_bytes().to_vec();
            }
            _ => {}
        }
        let fds = [std::os::fd::AsFd::as_fd(&self.page)];
        let head = Head { flags: REPLY, ..message.head };
        let _ = self.stream.send(head, &reply, if with_page { &fds } else { &[] });
    }

    fn write(&mut self, register: u32, bytes: &[u8]) {
        let word = bytes.iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        match register {
            REG_COMMANDS => self.commands = word,
            REG_EVENTS => self.scribble.push((word, 4096)),
            REG_COMMANDS_TAIL => {
                while self.head != word as u32 {
                    self.head = self.head.wrapping_add(1);
                    self.command();
                }
            }
            _ => {}
        }
    }

    /// Notes where the client's queues lie, and answers what it likes, or nothing.
    fn command(&mut self) {
        if self.patience == 0 {
            return;
        }
        self.patience -= 1;
        let mut command = [0; COMMAND_BYTES];
        self.copy(self.commands, &mut command, false);
        let (op, body) = (u16::from_le_bytes([command[0], command[1]]), &command[8..]);
        match op {
            OP_CREATE_CQ => {
                let (cq, _) = parse::<CreateCq>(body).unwrap();
                self.scribble.push((cq.entries, size_of::<Cqe>() << cq.log));
                self.rounds.push((cq.entries, size_of::<Cqe>() << cq.log, 0));
            }
            OP_CREATE_QP => {
                let (qp, _) = parse::<CreateQp>(body).unwrap();
                self.scribble.push((qp.queues.card, CARD_LINE));
            }
            OP_CREATE_SRQ => {
                let (srq, _) = parse::<CreateSrq>(body).unwrap();
                self.scribble.push((srq.queues.card, CARD_LINE));
            }
            _ => {}
        }
        let mut noise = self.noise(BODY_BYTES);
        if op == OP_QUERY_DEVICE {
            /* not so many that the device is never opened */
            let gids = std::mem::offset_of!(DeviceReply, gids);
            noise[gids..gids + 4].copy_from_slice(&3u32.to_le_bytes());
        }
        let status = match self.rng.word() % 32 {
            0 => self.rng.word() as u32 & !1,
            1 => 95,
            _ => 0,
        };
        let mut answer = [&status.to_le_bytes()[..], &noise].concat();
        /* small numbers are taken for what they are meant to be more often */
        if op != OP_QUERY_DEVICE && self.rng.word().is_multiple_of(2) {
            answer[4..8].copy_from_slice(&(self.rng.word() as u32 % 8192).to_le_bytes());
            answer[8..12].copy_from_slice(&(self.rng.word() as u32 % 8).to_le_bytes());
        }
        self.copy(self.commands + 4, &mut answer, true);
    }

    fn noise(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.rng.word() as u8).collect()
    }

    /// Writes noise where the board may write; sometimes a whole round of completions, of work that nobody
    /// has posted, in the order in which the program looks for them.
    fn scribble(&mut self) {
        for at in 0..self.rounds.len() {
            if !self.rng.word().is_multiple_of(8) {
                continue;
            }
            let (address, len, before) = self.rounds[at];
            let (mut round, phase) = (self.noise(len), before ^ CQE_PHASE);
            let last = std::mem::offset_of!(Cqe, sl);
            round
                .chunks_exact_mut(size_of::<Cqe>())
                .for_each(|cqe| cqe[last] = cqe[last] & !CQE_PHASE | phase);
            self.copy(address, &mut round, true);
            self.rounds[at].2 = phase;
        }
        for at in 0..self.scribble.len() {
            let (address, len) = self.scribble[at];
            let from = self.rng.word() as usize % len;
            let mut noise = self.noise((len - from).min(64));
            /* an index that is off by a few, of which noise has none */
            if self.rng.word().is_multiple_of(2) {
                let mut few = (self.rng.word() as u32 % 32).to_le_bytes();
                self.copy(address + (from & !3) as u64, &mut few, true);
            } else {
                self.copy(address + from as u64, &mut noise, true);
            }
        }
    }

    fn copy(&self, address: u64, bytes: &mut [u8], write: bool) {
        let found = self.maps.iter().find_map(|(base, map)| {
            let at = usize::try_from(address.checked_sub(*base)?).ok()?;
            (at + bytes.len() <= map.len()).then(|| map.as_mut_ptr().wrapping_add(at))
        });
        let at = found.expect("an address that was mapped");
        // SAFETY: inside a mapping that lives as long as this; the other side knows that it may change.
        unsafe {
            if write {
                at.copy_from(bytes.as_ptr(), bytes.len());
            } else {
                bytes.as_mut_ptr().copy_from(at, bytes.len());
            }
        }
    }
}

/// A doorbell page.
fn doorbell_page() -> File {
    starverbs_backend::sealed::file(c"liar", PAGE).unwrap()
}

/// What a program does, whatever comes of it; how many completions there were.
fn use_it(settings: &Settings) -> starverbs_verbs::Result<usize> {
    let ctx = Context::open_with(settings.clone())?;
    let _ = (ctx.query_port(1), ctx.query_gid(1, 0), ctx.gid_table());
    let pd = Pd::alloc(&ctx)?;
    let channel = CompChannel::create(&ctx)?;
    let cq = Cq::create(&ctx, 16, Some(&channel), 1)?;
    let mr = reg(&pd, memory(4096), all_access());
    let srq = Srq::create(&pd, 8, 1, 0, 1);
    let _ = srq.as_ref().map(|srq| srq.post(&RecvWr { wr_id: 1, sges: &[] }).is_ok());
    let node = Node { ctx, pd, channel, cq, buf: memory(64), mr: mr? };
    let qp = Qp::create(&node.pd, &node.init(QpType::Rc, None))?;
    let _ = (qp.query(), Ah::create(&node.pd, &Default::default()).map(|ah| ah.destroy()));
    for state in [QpState::Init, QpState::Rtr, QpState::Rts, QpState::Err] {
        let mask = starverbs_core::qp::QpAttrMask::STATE;
        let _ = qp.modify(&QpAttr { state, ..QpAttr::default() }, mask);
    }
    let mut completions = 0;
    for turn in 0..200 {
        /* the board has a moment to lie in */
        if turn % 10 == 0 {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
        let _ = post(&qp, &send(1, &[node.sge(0, 8)]));
        let _ = node.post_recv(&qp, 1, 0, 8);
        let _ = node.cq.req_notify(false);
        completions += node.cq.poll(&mut [Cqe::default(); 8]).unwrap_or(0);
    }
    let _ = (qp.state(), qp.destroy(), srq.map(|srq| srq.destroy()), node.mr.dereg());
    Ok(completions)
}

/// Has a liar serve at a socket while `act` uses it.
fn beside<T>(serve: impl FnOnce(&UnixListener) + Send, act: impl FnOnce(&Settings) -> T) -> T {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("starverbs-liar-{}-{count}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let done = std::thread::scope(|scope| {
        let liar = scope.spawn(|| serve(&listener));
        let device = DeviceChoice::Board(path.clone());
        let done = act(&Settings { device, ..settings() });
        liar.join().unwrap();
        done
    });
    std::fs::remove_file(&path).unwrap();
    done
}

#[test]
fn a_board_that_lies_harms_no_program() {
    const SEEDS: u64 = 200;
    let serve = |listener: &UnixListener| (0..SEEDS).for_each(|seed| Liar::serve(listener, seed, usize::MAX));
    let whole: Vec<usize> = beside(serve, |settings| (0..SEEDS).flat_map(|_| use_it(settings)).collect());
    assert!(whole.len() > SEEDS as usize / 10, "{} have got so far as to use it", whole.len());
    assert!(whole.iter().any(|completions| *completions > 16), "more than the queue holds: {whole:?}");
}

/// One that takes commands, writes nonsense everywhere, and at some time answers none any more.
#[test]
fn a_board_that_takes_no_command_is_gone() {
    /* what it says of itself, three addresses, a domain */
    const PATIENCE: usize = 5;
    /* some of what it answers before are errors */
    const SEEDS: u64 = 20;
    let is_silent = |settings: &Settings| {
        let Ok(ctx) = Context::open_with(settings.clone()) else { return false };
        let Ok(_pd) = Pd::alloc(&ctx) else { return false };
        assert_eq!(Pd::alloc(&ctx).err().unwrap().errno(), libc::ETIMEDOUT);
        let gone = loop {
            let event = ctx.get_async_event().unwrap();
            if matches!(event, VerbsEvent::Device { .. }) {
                break event;
            }
        };
        assert_eq!(gone, VerbsEvent::Device { kind: kind::DEVICE_FATAL });
        /* and the next one does not wait for it */
        [libc::EIO, libc::EPIPE].contains(&Pd::alloc(&ctx).err().unwrap().errno())
    };
    let tried = |seed| beside(|listener| Liar::serve(listener, seed, PATIENCE), is_silent);
    assert!((0..SEEDS).any(tried), "it was never opened");
}
