//! What tools ask of this process (`starverbs stat`, `starverbs kernel`): read, carried out, answered.
//!
//! Anybody of the host may see queue pairs and kernels; who may change them, the backend says. Owns the
//! requests' words; it must not know how they came.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use starverbs_backend::{ToolRequest, kernel_list};
use starverbs_core::PdId;

use super::super::command::{AnsweredBy, KernelCommand};
use super::super::posix_thread::Thread;
use super::{Shard, Soft};
use crate::error::VerbsError;
use crate::modules;

/// Stack of a thread that has a module compiled: as much as a program's own threads have.
const STACK: usize = 8 << 20;
/// Most bytes of a module.
const MODULE: u64 = 1 << 20;

/// Whether a change is under way; there is one at a time.
#[derive(Default)]
pub(super) struct ToolChange(AtomicBool);

/// A change that is under way, until this is dropped.
struct UnderWay(Arc<Soft>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.change.0.store(false, Ordering::Release);
    }
}

/// What changes.
#[derive(Debug, PartialEq, Eq)]
enum KernelChange {
    /// The kernel in this file answers from now on
    Load(PathBuf),
    /// Nothing does
    Unload,
}

/// A change of what answers an RPC op-code.
#[derive(Debug, PartialEq, Eq)]
struct Change {
    /// `None`: the one that there is
    pd: Option<PdId>,
    op: u64,
    what: KernelChange,
}

impl Change {
    /// Reads `load PID PD OP FILE` and `unload PID PD OP`; a PD of `-` is none. `None`: it is neither. The
    /// process is named as it may have another's numbers: `Err`, if it is not this one.
    fn parse(text: &[u8]) -> Option<Result<Change, &'static str>> {
        let mut words = text.splitn(5, |byte| *byte == b' ');
        let verb = words.next()?;
        let mut word = || words.next().and_then(|word| str::from_utf8(word).ok());
        let pid: u32 = word()?.parse().ok()?;
        let pd = word()?;
        let pd = if pd == "-" { None } else { Some(PdId(pd.parse().ok()?)) };
        let op = word()?.parse().ok()?;
        let what = match (verb, words.next()) {
            (b"load", Some(file)) => KernelChange::Load(Path::new(OsStr::from_bytes(file)).to_owned()),
            (b"unload", None) => KernelChange::Unload,
            _ => return None,
        };
        let ours = pid == std::process::id();
        Some(if ours { Ok(Change { pd, op, what }) } else { Err("another process has its numbers") })
    }
}

impl Soft {
    /// Answers what tools have asked, or begins what takes longer.
    #[cold]
    pub(super) fn serve_tool(&self, shard: &mut Shard, request: ToolRequest) {
        let said = match &*request.text {
            b"kernels" => kernel_list(shard.nic.kernels()),
            text => match Change::parse(text) {
                None => shard.describe_qps().text().to_owned(),
                Some(Err(why)) => failed(why),
                Some(Ok(_)) if !request.may_change() => failed("not a process of equal rights, nor root's"),
                Some(Ok(change)) => match self.begin_change(change, &request) {
                    Ok(()) => return,
                    Err(why) => failed(why),
                },
            },
        };
        shard.intake.rx.answer(&request, said.as_bytes());
    }

    /// Has a thread do it, and answer: to compile a module takes milliseconds, in which the card works on.
    fn begin_change(&self, change: Change, request: &ToolRequest) -> Result<(), &'static str> {
        let card = self.own.upgrade().ok_or("its card is closing")?;
        if self.change.0.swap(true, Ordering::Acquire) {
            return Err("another kernel is being loaded there");
        }
        let (under_way, request) = (UnderWay(card), request.clone());
        let work = move || {
            let card = Arc::clone(&under_way.0);
            let command = card.prepare(change);
            /* the answer leaves before the lock is given back: who sees the change may end the process */
            let old = card.with(|shard, _| {
                let changed = command.and_then(|command| {
                    shard.change_kernels(command).map_err(|error| VerbsError::from(error).to_string())
                });
                drop(under_way);
                let (said, old) =
                    changed.map_or_else(|why| (failed(why), None), |old| ("ok\n".to_owned(), old));
                shard.intake.rx.answer(&request, said.as_bytes());
                old
            });
            drop(old);
        };
        let begun = Thread::start(c"starverbs-tool", STACK, Box::new(work)).map(Thread::detach);
        begun.map_err(|_| "it has no memory, or no thread")
    }

    /// Finds the domain that is meant, and makes a kernel of the module.
    fn prepare(&self, Change { pd, op, what }: Change) -> Result<KernelCommand<'static>, String> {
        let pd = self.with(|shard, _| domain(shard, pd))?;
        Ok(match what {
            KernelChange::Load(file) => {
                let module = read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
                let by = AnsweredBy::Module(modules::make(&module, op).map_err(|(_, why)| why)?);
                KernelCommand::Load { pd, op, by, replace: true }
            }
            KernelChange::Unload => KernelCommand::Unload { pd, op },
        })
    }
}

fn read(file: &Path) -> std::io::Result<Vec<u8>> {
    /* who opens a FIFO waits for its writer otherwise */
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(file)?;
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("no file"));
    }
    let mut module = Vec::new();
    let read = file.take(MODULE + 1).read_to_end(&mut module)?;
    if read as u64 > MODULE { Err(std::io::Error::other("longer than 1 MiB")) } else { Ok(module) }
}

fn failed(why: impl AsRef<str>) -> String {
    format!("error: {}\n", why.as_ref())
}

/// The domain that is meant: the one that has kernels, or queue pairs for them, if none is named.
fn domain(shard: &Shard, named: Option<PdId>) -> Result<PdId, String> {
    let kernels = shard.nic.kernels().iter().map(|loaded| loaded.pd);
    let speaking = shard.nic.qpns().filter(|qpn| shard.nic.speaks_strom(*qpn));
    let queue_pairs = speaking.filter_map(|qpn| shard.nic.qp_owner(qpn)).map(|owner| owner.pd);
    let all: BTreeSet<u32> = kernels.chain(queue_pairs).chain(named).map(|pd| pd.0).collect();
    match (named, all.first()) {
        (Some(pd), _) => Ok(pd),
        (None, Some(pd)) if all.len() == 1 => Ok(PdId(*pd)),
        (None, None) => Err("no queue pair there speaks StRoM; name a protection domain (--pd)".to_owned()),
        (None, Some(_)) => Err(format!("protection domains {all:?} have kernels there; name one (--pd)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changes_is_read_to_the_letter() {
        let parse =
            |text: &str| Change::parse(text.replace("PID", &std::process::id().to_string()).as_bytes());
        let load = |pd, op| Some(Ok(Change { pd, op, what: KernelChange::Load(PathBuf::from("/a b.wasm")) }));
        assert_eq!(parse("load PID - 7 /a b.wasm"), load(None, 7));
        assert_eq!(parse("load PID 3 18446744073709551615 /a b.wasm"), load(Some(PdId(3)), u64::MAX));
        assert_eq!(
            parse("unload PID 1 2"),
            Some(Ok(Change { pd: Some(PdId(1)), op: 2, what: KernelChange::Unload }))
        );
        assert!(parse("unload 0 1 2").is_some_and(|read| read.is_err()), "another process is meant");
        for text in
            ["", "qps", "load", "load PID - 7", "load PID x 7 /a", "load PID - 0x7 /a", "load - 7 /a b"]
        {
            assert_eq!(parse(text), None, "{text}");
        }
        for text in ["unload PID - 7 /a", "unload PID -", "unload"] {
            assert_eq!(parse(text), None, "{text}");
        }
        assert_eq!(Change::parse(b"load \xff - 7 /a"), None);
    }
}
