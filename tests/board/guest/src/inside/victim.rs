//! A process that uses the board while another one attacks it: it finds out what reached it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use starverbs_queues::board::*;

use super::pair::{DATA_BYTES, Pair, queues_at};
use super::raw::{Map, Tested, expect};

/// What the victim has in its memory, and nobody else may see.
pub(crate) const SECRET: u64 = 0x5eed_00fa_071c_7132;
/// Words that it tells of itself.
const FACTS: usize = 10;
/// Where in its memory the secret is.
const SECRET_AT: usize = 0x2000;

/// What an attacker knows of the victim: more than it would find out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub pd: u32,
    pub key: u32,
    pub cq: u32,
    pub qpns: [u32; 2],
    pub srq: u32,
    pub ah: u32,
    pub mw: u32,
    /// Where the secret is in its memory
    pub addr: u64,
    pub cell: u32,
}

/// The victim, as its attacker sees it. Dropping it ends it.
pub(crate) struct Victim {
    pid: Pid,
    line: UnixStream,
    pub facts: Facts,
}

impl Victim {
    /// Starts one on the device at `path`. Of a process with one thread.
    pub(crate) fn start(path: &Path) -> Tested<Victim> {
        let (mut ours, theirs) = UnixStream::pair().map_err(|e| e.to_string())?;
        // SAFETY: this process has one thread.
        match unsafe { fork() }.map_err(|e| e.to_string())? {
            ForkResult::Child => {
                drop(ours);
                let end = be(path, theirs).map_or_else(
                    |reason| {
                        eprintln!("victim: {reason}");
                        1
                    },
                    |()| 0,
                );
                std::process::exit(end)
            }
            ForkResult::Parent { child } => {
                drop(theirs);
                let mut bytes = [0; 8 * FACTS];
                ours.read_exact(&mut bytes).map_err(|_| "the victim does not come up".to_owned())?;
                Ok(Victim { pid: child, line: ours, facts: decode(&bytes) })
            }
        }
    }

    /// Has it look at all that it has, and use it.
    pub(crate) fn is_unharmed(&mut self) -> Tested {
        let mut verdict = [0];
        let told = self.line.write_all(&[1]).and_then(|()| self.line.read_exact(&mut verdict));
        told.map_err(|_| "the victim has died".to_owned())?;
        expect("what the victim finds", verdict, [1])
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.line.shutdown(std::net::Shutdown::Both);
        let _ = waitpid(self.pid, None);
    }
}

fn decode(bytes: &[u8; 8 * FACTS]) -> Facts {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
    let half = |at: usize| word(at) as u32;
    Facts {
        pd: half(0),
        key: half(1),
        cq: half(2),
        qpns: [half(3), half(4)],
        srq: half(5),
        ah: half(6),
        mw: half(7),
        addr: word(8),
        cell: half(9),
    }
}

fn be(path: &Path, mut line: UnixStream) -> Tested {
    let mut pair = Pair::new(path)?;
    (SECRET_AT..DATA_BYTES).step_by(8).for_each(|at| pair.data.store(at, SECRET));
    /* queue memory that no queue uses has the secret, too */
    let more = pair.device.queue_memory(0x4000).map_err(|e| e.to_string())?;
    let memory = pair.device.map(more, 0x4000).map_err(|e| e.to_string())?;
    (0x3000..0x4000).step_by(8).for_each(|at| memory.store(at, SECRET));
    let queues = Queues { send: 0, send_stride: 0, send_sge: 0, ..queues_at(more) };
    let srq = CreateSrq { queues, pd: pair.pd, limit: 0 };
    let srq = pair.device.make(OP_CREATE_SRQ, &srq)?.number;
    let gid = pair.device.answer::<GidReply>(OP_QUERY_GID, &Object::default())?.gid;
    let address = Address { dgid: gid, sgid: gid, hop_limit: 1, ..Address::default() };
    let ah = pair.device.make(OP_CREATE_AH, &AddressHandle { pd: pair.pd, address })?.number;
    let mw = pair.device.make(OP_ALLOC_MW, &Window { pd: pair.pd, kind: 1 })?.number;
    pair.exchange(1)?;
    let words: [u64; FACTS] = [
        pair.pd.into(),
        pair.key.into(),
        pair.cq.into(),
        pair.qps[0].qpn.into(),
        pair.qps[1].qpn.into(),
        srq.into(),
        ah.into(),
        mw.into(),
        pair.data.address() + SECRET_AT as u64,
        pair.qps[0].cell.into(),
    ];
    let told = line.write_all(&words.map(u64::to_le_bytes).concat());
    told.map_err(|e| e.to_string())?;
    let mut number = 2;
    let mut byte = [0];
    while line.read_exact(&mut byte).is_ok() {
        let found = look(&mut pair, &memory, srq, number);
        if let Err(reason) = &found {
            eprintln!("victim: {reason}");
        }
        line.write_all(&[found.is_ok().into()]).map_err(|e| e.to_string())?;
        number += 1;
    }
    Ok(())
}

/// Whether all is as it was, and works.
fn look(pair: &mut Pair, memory: &Map, srq: u32, number: u64) -> Tested {
    for at in (SECRET_AT..DATA_BYTES).step_by(8) {
        expect("a word of the victim's memory", pair.data.load(at), SECRET)?;
    }
    for at in (0x3000..0x4000).step_by(8) {
        expect("a word of the victim's queue memory", memory.load(at), SECRET)?;
    }
    expect("the states of its queue pairs", [pair.state(0)?, pair.state(1)?], [3, 3])?;
    expect("its SRQ is there", pair.device.object(OP_QUERY_SRQ, srq)?, 0)?;
    expect("its region is there", pair.device.object(OP_QUERY_MR, pair.key)?, 0)?;
    pair.exchange(number)
}
