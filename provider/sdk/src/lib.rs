//! A kernel as a WebAssembly module: [`export!`] makes one of what implements [`Kernel`], the same trait that
//! the card's own kernels implement, whose [`KernelRun`] has the same ports. `starverbs kernel build` makes
//! the module; docs/strom.md has the rules.
//!
//! ```
//! use starverbs_sdk::{Code, Input, Kernel, KernelRun, Poll, export};
//!
//! /// Answers with its parameters.
//! #[derive(Default)]
//! struct Echo;
//!
//! impl Kernel for Echo {
//!     fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
//!         if input == Input::Params { Ok(()) } else { Err(Code::BadParam) }
//!     }
//!
//!     fn step(&mut self, run: &mut KernelRun) -> Poll {
//!         let params = run.bytes().to_vec();
//!         Poll::Ready(if run.reply(&params) { Code::Ok } else { Code::Overflow })
//!     }
//! }
//!
//! export!(Echo);
//! ```
//!
//! Owns the module's side of the mailbox. It must not know who runs the module.

use std::cell::UnsafeCell;

pub use starverbs_core::strom::{Code, DmaCommand, Input, Kernel, KernelRun, Poll, RegionRange};
use starverbs_kernels::mailbox::{Mailbox, MailboxCommand, PENDING, command, input, reply};
use zerocopy::FromZeros;

/// A kernel and its mailbox.
struct Instance<K> {
    kernel: K,
    run: KernelRun,
    mailbox: Box<Mailbox>,
}

/// Where bytes lie in the module's memory.
fn address(bytes: &[u8]) -> u32 {
    bytes.as_ptr().expose_provenance() as u32
}

impl<K: Kernel + Default> Instance<K> {
    /// `None`: no memory.
    fn new() -> Option<Self> {
        let mailbox = Box::new(Mailbox::new_zeroed());
        Some(Instance { kernel: K::default(), run: KernelRun::new(0).ok()?, mailbox })
    }

    /// The request as the card has put it there.
    fn enter(&mut self) {
        let Mailbox { regs, qpn, bytes_len, read_len, bytes, read, .. } = &*self.mailbox;
        let bytes = bytes.get(..bytes_len.get() as usize).unwrap_or_default();
        let read = read.get(..read_len.get() as usize).unwrap_or_default();
        self.run.take_over(qpn.get(), regs.map(Into::into), bytes, read);
    }

    /// What the kernel did, for the card.
    fn leave(&mut self, outcome: Option<Code>) -> i32 {
        let Instance { run, mailbox, .. } = self;
        mailbox.regs = run.regs.map(Into::into);
        let mut count = 0;
        for (place, (queued, data)) in mailbox.queue.iter_mut().zip(run.queued()) {
            let (kind, range) = match queued {
                DmaCommand::Read(from) => (command::READ, from),
                DmaCommand::Write(to) => (command::WRITE, to),
                DmaCommand::Send(qpn, to) => (command::SEND | qpn << 8, to),
            };
            let (key, va, len) = (range.key.into(), range.va.into(), range.len.into());
            *place = MailboxCommand { kind: kind.into(), key, va, len, at: address(data).into() };
            count += 1;
        }
        mailbox.commands = count.into();
        if let Some(from) = run.answered_from() {
            mailbox.reply = reply::REGION.into();
            (mailbox.reply_key, mailbox.reply_va) = (from.key.into(), from.va.into());
            mailbox.reply_len = from.len.into();
        } else if !run.reply_bytes().is_empty() {
            mailbox.reply = reply::BYTES.into();
            (mailbox.reply_at, mailbox.reply_len) =
                (address(run.reply_bytes()).into(), (run.reply_bytes().len() as u32).into());
        }
        outcome.map_or(PENDING, |code| code as i32)
    }

    fn start(&mut self) -> i32 {
        self.enter();
        let word = self.mailbox.input.get();
        let begins = match word & input::DATA {
            0 => Input::Params,
            _ => Input::Data { first: word & input::FIRST != 0, last: word & input::LAST != 0 },
        };
        let ended = self.kernel.start(&mut self.run, begins).err();
        self.leave(ended)
    }

    fn step(&mut self) -> i32 {
        self.enter();
        let outcome = match self.kernel.step(&mut self.run) {
            Poll::Pending => None,
            Poll::Ready(code) => Some(code),
        };
        self.leave(outcome)
    }
}

/// The place of a module's kernel, which its first call makes. For [`export!`].
#[doc(hidden)]
pub struct Place<K>(UnsafeCell<Option<Instance<K>>>);

// SAFETY: a module has one thread, and what is exported does not call itself.
unsafe impl<K> Sync for Place<K> {}

impl<K: Kernel + Default> Place<K> {
    #[doc(hidden)]
    pub const fn new() -> Self {
        Place(UnsafeCell::new(None))
    }

    fn with<R>(&self, call: impl FnOnce(&mut Instance<K>) -> R) -> Option<R> {
        // SAFETY: one thread, and no call within a call: the reference is the only one.
        let instance = unsafe { &mut *self.0.get() };
        if instance.is_none() {
            *instance = Instance::new();
        }
        instance.as_mut().map(call)
    }

    #[doc(hidden)]
    pub fn mailbox(&self) -> u32 {
        self.with(|instance| std::ptr::from_ref(&*instance.mailbox).expose_provenance() as u32)
            .unwrap_or(u32::MAX)
    }

    #[doc(hidden)]
    pub fn start(&self) -> i32 {
        self.with(Instance::start).unwrap_or(Code::Overflow as i32)
    }

    #[doc(hidden)]
    pub fn step(&self) -> i32 {
        self.with(Instance::step).unwrap_or(Code::Overflow as i32)
    }
}

impl<K: Kernel + Default> Default for Place<K> {
    fn default() -> Self {
        Place::new()
    }
}

/// Makes a module of a kernel: once in a crate of the type `cdylib`. One kernel, made by `Default`, serves
/// all requests.
#[macro_export]
macro_rules! export {
    ($kernel:ty) => {
        static STARVERBS_KERNEL: $crate::Place<$kernel> = $crate::Place::new();

        /// Where the mailbox lies.
        #[unsafe(no_mangle)]
        pub extern "C" fn starverbs_mailbox_v1() -> u32 {
            STARVERBS_KERNEL.mailbox()
        }

        /// A request begins, or a stream goes on.
        #[unsafe(no_mangle)]
        pub extern "C" fn starverbs_start() -> i32 {
            STARVERBS_KERNEL.start()
        }

        /// Its commands were executed.
        #[unsafe(no_mangle)]
        pub extern "C" fn starverbs_step() -> i32 {
            STARVERBS_KERNEL.step()
        }
    };
}
