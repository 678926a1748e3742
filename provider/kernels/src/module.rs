//! A kernel that is a module of its own: whatever runs it, the card's side of the [`Mailbox`].
//!
//! What a module leaves is checked here, and what it names of its own memory; what it names of the host's the
//! card checks, as of every kernel. One that breaks the rules is never called again.

use core::ops::Range;

use starverbs_core::strom::{Code, Input, Kernel, KernelRun, Poll, RegionRange};
use zerocopy::FromBytes;

use crate::mailbox::{Mailbox, MailboxCommand, PENDING, command, input, reply};

/// Which of its functions is called.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Method {
    /// A request begins, or a stream goes on
    Start,
    /// Its commands were executed
    Step,
}

/// A module that runs somewhere.
pub trait Module: Send {
    /// Its memory, as it is now.
    fn memory(&mut self) -> &mut [u8];
    /// Calls it. `None`: it broke.
    fn call(&mut self, method: Method) -> Option<i32>;
}

/// A kernel made of a module.
#[derive(Debug)]
pub struct ModuleKernel<M> {
    module: M,
    /// Where its mailbox lies
    mailbox: Range<usize>,
    broken: bool,
}

impl<M: Module> ModuleKernel<M> {
    /// With the mailbox there. `None`: it has no memory there.
    pub fn new(mut module: M, mailbox: u32) -> Option<Self> {
        let mailbox = mailbox as usize..(mailbox as usize).checked_add(size_of::<Mailbox>())?;
        module.memory().get(mailbox.clone())?;
        Some(ModuleKernel { module, mailbox, broken: false })
    }

    /// One call. `None`: the module broke, or the rules.
    fn call(&mut self, run: &mut KernelRun, method: Method, input: u32) -> Option<i32> {
        self.fill(run, input)?;
        let result = self.module.call(method)?;
        self.take(run)?;
        Some(result)
    }

    /// Fills the mailbox in.
    fn fill(&mut self, run: &KernelRun, input: u32) -> Option<()> {
        let memory = self.module.memory().get_mut(self.mailbox.clone())?;
        let mailbox = Mailbox::mut_from_bytes(memory).ok()?;
        mailbox.regs = run.regs.map(Into::into);
        (mailbox.qpn, mailbox.input) = (run.qpn().into(), input.into());
        mailbox.bytes_len = put(&mut mailbox.bytes, run.bytes())?.into();
        mailbox.read_len = put(&mut mailbox.read, run.read_data())?.into();
        (mailbox.commands, mailbox.reply) = (0.into(), reply::NONE.into());
        Some(())
    }

    /// Takes what the module left.
    fn take(&mut self, run: &mut KernelRun) -> Option<()> {
        let memory = &*self.module.memory();
        let mailbox = Mailbox::ref_from_bytes(memory.get(self.mailbox.clone())?).ok()?;
        run.regs = mailbox.regs.map(Into::into);
        let commands = mailbox.queue.get(..mailbox.commands.get() as usize)?;
        commands.iter().all(|command| queue(run, memory, command)).then_some(())?;
        let (at, len) = (mailbox.reply_at.get(), mailbox.reply_len.get());
        match mailbox.reply.get() {
            reply::NONE => {}
            reply::BYTES => run.reply(slice(memory, at, len)?).then_some(())?,
            reply::REGION => {
                run.reply_from(RegionRange { key: mailbox.reply_key.get(), len, va: mailbox.reply_va.get() })
            }
            _ => return None,
        }
        Some(())
    }

    fn break_off(&mut self) -> Code {
        self.broken = true;
        Code::Fault
    }

    /// Whether it broke: it answers FAULT from then on.
    pub fn is_broken(&self) -> bool {
        self.broken
    }
}

/// Copies to the front of `to`; says how much.
fn put(to: &mut [u8], from: &[u8]) -> Option<u32> {
    to.get_mut(..from.len())?.copy_from_slice(from);
    Some(from.len() as u32)
}

/// Bytes of a module's memory.
fn slice(memory: &[u8], at: u32, len: u32) -> Option<&[u8]> {
    memory.get(at as usize..)?.get(..len as usize)
}

/// Queues a command. False: there is no such, or no room.
fn queue(run: &mut KernelRun, memory: &[u8], queued: &MailboxCommand) -> bool {
    let (key, va, len) = (queued.key.get(), queued.va.get(), queued.len.get());
    let data = || slice(memory, queued.at.get(), len);
    match (queued.kind.get() & 0xff, queued.kind.get() >> 8) {
        (command::READ, 0) => run.read(RegionRange { key, len, va }),
        (command::WRITE, 0) => data().is_some_and(|data| run.write(key, va, data)),
        (command::SEND, qpn) => data().is_some_and(|data| run.send(qpn, key, va, data)),
        _ => false,
    }
}

impl<M: Module> Kernel for ModuleKernel<M> {
    fn start(&mut self, run: &mut KernelRun, begins: Input) -> Result<(), Code> {
        if self.broken {
            return Err(Code::Fault);
        }
        let word = match begins {
            Input::Params => input::PARAMS,
            Input::Data { first, last } => {
                input::DATA | if first { input::FIRST } else { 0 } | if last { input::LAST } else { 0 }
            }
        };
        match self.call(run, Method::Start, word) {
            Some(PENDING) => Ok(()),
            Some(code) => Err(Code::from_number(code).unwrap_or_else(|| self.break_off())),
            None => Err(self.break_off()),
        }
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        if self.broken {
            return Poll::Ready(Code::Fault);
        }
        match self.call(run, Method::Step, 0) {
            Some(PENDING) => Poll::Pending,
            Some(code) => Poll::Ready(Code::from_number(code).unwrap_or_else(|| self.break_off())),
            None => Poll::Ready(self.break_off()),
        }
    }

    fn name(&self) -> &'static str {
        "module"
    }
}
