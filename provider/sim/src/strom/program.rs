//! What programs do: register memory, post, and look at memory until it has changed, as the paper's do (4.2:
//! no interrupts; it has no completion queues, so that those of the core cost nothing here).

use starverbs_core::strom::{Code, Kernel, RECORD_LEN, ReplyHead, ReplyRecord, ReplyTarget, RpcAnswer};
use starverbs_core::{Access, SendOp, SendWqe, Sge};
use zerocopy::IntoBytes;

use super::pair::{Pair, PairStep};
use super::setup::INLINE;
use crate::Send;
use crate::rnic::Picos;
use crate::watch::Change;

/// Registered memory of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProgramRegion {
    /// First byte
    pub addr: u64,
    /// Length, bytes
    pub len: u32,
    /// Its key, for both sides
    pub key: u32,
}

impl ProgramRegion {
    /// `len` of its bytes from `from` on.
    pub fn part(&self, from: u32, len: u32) -> ProgramRegion {
        assert!(from + len <= self.len, "a part of a region lies in it");
        ProgramRegion { addr: self.addr + u64::from(from), len, key: self.key }
    }

    /// The address of its last byte.
    pub fn last(&self) -> u64 {
        self.addr + u64::from(self.len) - 1
    }

    fn sge(&self) -> Sge {
        Sge { addr: self.addr, len: self.len, lkey: self.key }
    }
}

impl Pair {
    /// Memory of a host that its peer may read and write; zeros.
    pub fn region(&mut self, at: usize, len: u32) -> ProgramRegion {
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let (addr, key) = self.ends[at].host.region(len.into(), rights);
        let region = ProgramRegion { addr, len, key };
        self.put(at, region, &vec![0; len as usize]);
        region
    }

    /// A host's program sets the first bytes of a region.
    pub fn put(&mut self, at: usize, region: ProgramRegion, bytes: &[u8]) {
        assert!(bytes.len() <= region.len as usize, "no byte behind the region");
        self.ends[at].host.env.memory.write(region.addr, bytes);
    }

    /// The bytes of a region.
    pub fn bytes(&self, at: usize, region: ProgramRegion) -> &[u8] {
        self.ends[at].host.env.memory.read(region.addr, region.len as usize)
    }

    /// Host 1 has a kernel that answers RPCs of this op-code.
    pub fn load(&mut self, op: u64, kernel: Box<dyn Kernel>) {
        let host = &mut self.ends[1].host;
        host.nic.load_kernel(host.pd, op, kernel).expect("the op-code is free");
    }

    /// Host 1's program changes memory before each read that a kernel waits for.
    pub(crate) fn before_read(&mut self, change: Change) {
        if let Some(watch) = &mut self.ends[1].host.env.watch {
            watch.before_read = Some(change);
        }
    }

    /// RDMA WRITE of a host's region to the first bytes of the peer's, posted at `time`.
    pub fn write(&mut self, at: usize, time: Picos, from: ProgramRegion, to: ProgramRegion) {
        self.request(at, time, SendOp::Write, from, to.addr, to.key);
    }

    /// RDMA READ of the peer's first bytes, as many as the host's region has.
    pub fn read(&mut self, at: usize, time: Picos, into: ProgramRegion, from: ProgramRegion) {
        self.request(at, time, SendOp::Read, into, from.addr, from.key);
    }

    /// RPC WRITE of a region of host 0: a kernel of host 1 gets the stream.
    pub fn stream(&mut self, time: Picos, op: u64, from: ProgramRegion) {
        self.request(0, time, SendOp::RpcWrite, from, op, 0);
    }

    fn request(
        &mut self,
        at: usize,
        time: Picos,
        op: SendOp,
        own: ProgramRegion,
        remote_addr: u64,
        rkey: u32,
    ) {
        let wqe = SendWqe { op, remote_addr, rkey, ..SendWqe::default() };
        self.command(at, time, Send { wqe, sges: vec![own.sge()], inline: None });
    }

    /// RPC of host 0 that wants no answer.
    pub fn tell(&mut self, time: Picos, op: u64, params: &[u8]) {
        self.call(time, op, params, &ReplyTarget::default());
    }

    /// RPC of host 0. Short parameters come with the command, long ones lie in memory.
    fn call(&mut self, time: Picos, op: u64, params: &[u8], reply: &ReplyTarget) {
        let all = [ReplyHead::new(reply).as_bytes(), params].concat();
        let wqe = SendWqe { op: SendOp::Rpc, remote_addr: op, ..SendWqe::default() };
        let send = if all.len() as u64 <= INLINE {
            Send { wqe, sges: Vec::new(), inline: Some(self.ends[0].keep(&all)) }
        } else {
            let region = self.region(0, all.len() as u32);
            self.put(0, region, &all);
            Send { wqe, sges: vec![region.sge()], inline: None }
        };
        self.command(0, time, send);
    }

    /// Goes on until a byte of a host's memory has changed; gives when its program knows.
    pub fn until(&mut self, at: usize, byte: u64) -> Picos {
        loop {
            let PairStep::Written(there, seg) = self.step().expect("it comes") else { continue };
            if there == at && (seg.addr..seg.addr + u64::from(seg.len)).contains(&byte) {
                return self.now() + self.params.poll;
            }
        }
    }

    /// RPC of host 0, whose answer ends where `answer` does; gives when it is known, its code, and its bytes.
    pub fn ask(
        &mut self,
        time: Picos,
        op: u64,
        params: &[u8],
        answer: ProgramRegion,
    ) -> (Picos, u32, Vec<u8>) {
        let record = answer.part(answer.len - RECORD_LEN as u32, RECORD_LEN as u32);
        self.put(0, record, &[0; RECORD_LEN]);
        let ProgramRegion { addr, len, key } = answer;
        self.call(time, op, params, &ReplyTarget { addr, rkey: key, len, ..ReplyTarget::default() });
        let known = self.until(0, answer.last());
        let all = self.bytes(0, answer);
        let RpcAnswer { length: len, code, .. } = ReplyRecord::decode(all).expect("an answer's record");
        let end = answer.len as usize - RECORD_LEN;
        let ok = code == Code::Ok as u32;
        let data = if ok { all[end - len as usize..end].to_vec() } else { Vec::new() };
        (known, code, data)
    }

    /// Goes on until as many requests of host 0 have completed.
    pub fn settle(&mut self, requests: u64) {
        while self.completed[0] < requests {
            self.step().expect("requests end");
        }
    }
}
