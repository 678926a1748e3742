//! Two queue pairs that speak StRoM's dialect: host 0 asks, kernels of host 1 answer.

use std::sync::{Arc, Mutex};

use starverbs_core::qp::RecvSource;
use starverbs_core::strom::{
    Code, Input, Kernel, KernelRun, MAX_REPLY, Poll, RECORD_LEN, RegionRange, ReplyFlags, ReplyHead,
    ReplyMemory, ReplyRecord, ReplyTarget, RpcAnswer, SLOT_BYTES,
};
use starverbs_core::{Access, NicConfig, QpType, Qpn, SendFlags, SendOp, SendWqe, Sge, WcStatus};
use starverbs_sim::{Faults, Net, QpAt, Recv, Send, Setup, SimCq, SimHost, SimRq, SimSq, StarCard};
use starverbs_star::control::Preference;
use starverbs_star::form::Form;
use zerocopy::IntoBytes;

use crate::common::all_rights;

/// Slots for answers.
pub(crate) const SLOTS: u8 = 4;

/// A connection whose ends speak the dialect, where `speak` says so.
pub(crate) struct RpcPair {
    pub(crate) net: Net,
    pub(crate) qpn: [Qpn; 2],
    pub(crate) sq: [SimSq; 2],
    pub(crate) rq: [SimRq; 2],
    pub(crate) cq: [SimCq; 2],
    /// Where host 0 puts parameters, and host 1 has what kernels look at: address, key
    pub(crate) page: [(u64, u32); 2],
    params: u64,
}

/// Bytes of a page.
pub(crate) const PAGE: u64 = 1 << 16;

/// Has a queue pair in RESET speak the dialect.
pub(crate) fn speak(host: &mut SimHost, qpn: Qpn) {
    let (addr, lkey) = host.region(u64::from(SLOTS) * SLOT_BYTES as u64, Access::LOCAL_WRITE);
    host.nic.speak_strom(qpn, ReplyMemory { addr, lkey, slots: SLOTS }).expect("an RC queue pair in RESET");
}

impl RpcPair {
    pub(crate) fn new(faults: Faults, cfgs: [NicConfig; 2], setup: &Setup, seed: u64) -> Self {
        RpcPair::between(faults, cfgs, setup, seed, [true; 2])
    }

    pub(crate) fn quiet() -> Self {
        RpcPair::new(Faults::default(), [NicConfig::default(); 2], &Setup::default(), 1)
    }

    pub(crate) fn between(
        faults: Faults,
        cfgs: [NicConfig; 2],
        setup: &Setup,
        seed: u64,
        speaks: [bool; 2],
    ) -> Self {
        RpcPair::make(faults, cfgs, setup, seed, (speaks, None))
    }

    /// One of StaR, where each host's end is to be that.
    pub(crate) fn star(faults: Faults, setup: &Setup, seed: u64, ends: [Preference; 2]) -> Self {
        RpcPair::star_between(faults, setup, seed, (ends, [true; 2]))
    }

    pub(crate) fn star_between(
        faults: Faults,
        setup: &Setup,
        seed: u64,
        (ends, speaks): ([Preference; 2], [bool; 2]),
    ) -> Self {
        RpcPair::make(faults, [NicConfig::default(); 2], setup, seed, (speaks, Some(ends)))
    }

    fn make(
        faults: Faults,
        cfgs: [NicConfig; 2],
        setup: &Setup,
        seed: u64,
        (speaks, star): ([bool; 2], Option<[Preference; 2]>),
    ) -> Self {
        let mut net = Net::new(2, cfgs[0], faults, seed);
        net.replace_card(1, cfgs[1]);
        for at in star.iter().flat_map(|_| 0..2) {
            let form = if seed.is_multiple_of(4) { Form::Paper } else { Form::Packed };
            net.open_star(at, StarCard { threshold: 100, key: None, boot: 70 + at as u64, form });
        }
        let (sq, rq) = ([(); 2].map(|()| SimSq::new(64)), [(); 2].map(|()| SimRq::new(64, 2)));
        let cq = [(); 2].map(|()| SimCq::new(4096));
        let (mut qpn, mut page) = ([0; 2], [(0, 0); 2]);
        for at in 0..2 {
            let host = &mut net.hosts[at];
            let own = RecvSource::Own(rq[at].clone());
            qpn[at] = host.qp(QpType::Rc, &sq[at], own, [&cq[at], &cq[at]], false);
            page[at] = host.region(PAGE, all_rights());
            host.env.memory.write(page[at].0, &[0; PAGE as usize]);
            if speaks[at] {
                speak(host, qpn[at]);
            }
            if let Some(ends) = star {
                host.preference(qpn[at], ends[at]);
            }
        }
        net.connect(QpType::Rc, QpAt { host: 0, qpn: qpn[0] }, QpAt { host: 1, qpn: qpn[1] }, setup);
        RpcPair { net, qpn, sq, rq, cq, page, params: 0 }
    }

    pub(crate) fn load(&mut self, op: u64, kernel: impl Kernel + 'static) -> starverbs_core::strom::KernelId {
        let host = &mut self.net.hosts[1];
        host.nic.load_kernel(host.pd, op, Box::new(kernel)).expect("the op-code is free")
    }

    /// Bytes of host 0's that leave as they are now.
    pub(crate) fn bytes(&mut self, data: &[u8]) -> Sge {
        let host = &mut self.net.hosts[0];
        let (addr, lkey) = host.region(data.len().max(1) as u64, Access::LOCAL_WRITE);
        host.env.memory.write(addr, data);
        Sge { addr, len: data.len() as u32, lkey }
    }

    pub(crate) fn try_post(&mut self, wqe: SendWqe, sges: Vec<Sge>) -> bool {
        let wqe = SendWqe { flags: SendFlags::SIGNALED | wqe.flags, ..wqe };
        let posted = self.sq[0].post(Send { wqe, sges, inline: None }).is_ok();
        if posted {
            self.net.doorbell(0, self.qpn[0]);
        }
        posted
    }

    /// Posts an RPC whose answer goes to a new region of `room` bytes; gives that.
    pub(crate) fn call(&mut self, wr_id: u64, op: u64, params: &[u8], room: u32, imm: bool) -> (u64, u32) {
        let flags = if imm { ReplyFlags::IMM } else { ReplyFlags::empty() };
        self.call_with(wr_id, op, params, room, flags)
    }

    /// The same with these flags.
    pub(crate) fn call_with(
        &mut self,
        wr_id: u64,
        op: u64,
        params: &[u8],
        room: u32,
        flags: ReplyFlags,
    ) -> (u64, u32) {
        let (addr, rkey) = self.net.hosts[0].region(u64::from(room.max(1)), all_rights());
        self.net.hosts[0].env.memory.write(addr, &vec![0; room as usize]);
        let reply = ReplyTarget { addr, rkey, len: room, imm: wr_id as u32, flags };
        let sge = self.bytes(&[ReplyHead::new(&reply).as_bytes(), params].concat());
        self.params += 1;
        let wqe = SendWqe { wr_id, op: SendOp::Rpc, remote_addr: op, ..SendWqe::default() };
        assert!(self.try_post(wqe, vec![sge]), "there is room");
        (addr, room)
    }

    /// RPC op-code, code and bytes of an answer, if it came.
    pub(crate) fn answer(&self, (addr, room): (u64, u32)) -> Option<(u32, u32, u32, Vec<u8>)> {
        let region = self.net.hosts[0].env.memory.read(addr, room as usize);
        let RpcAnswer { op, length, code } = ReplyRecord::decode(region)?;
        let end = room as usize - RECORD_LEN;
        let data = if code == 0 { region[end - length as usize..end].to_vec() } else { vec![] };
        Some((op, code, length, data))
    }

    /// Calls, and gives code and bytes of the answer.
    pub(crate) fn ask(&mut self, op: u64, params: &[u8], room: u32) -> (u32, Vec<u8>) {
        let at = self.call(1, op, params, room, false);
        self.run();
        assert_eq!(self.polled(0), [(1, WcStatus::Success)]);
        let (said, code, _, data) = self.answer(at).expect("an answer");
        assert_eq!(said, op as u32);
        (code, data)
    }

    pub(crate) fn post_recv(&mut self, at: usize, wr_id: u64) {
        self.rq[at].post(Recv { wr_id, sges: vec![] }).expect("there is room");
    }

    /// Until no connection waits for anything: a card of StaR looks at its connections for ever.
    pub(crate) fn run(&mut self) {
        for _ in 0..2_000_000 {
            self.net.transmit();
            if !self.net.is_busy() || !self.net.step() {
                return;
            }
        }
        panic!("it does not end");
    }

    pub(crate) fn polled(&self, at: usize) -> Vec<(u64, WcStatus)> {
        std::iter::from_fn(|| self.cq[at].poll()).map(|(c, _)| (c.wr_id, c.status)).collect()
    }
}

/// What a [`Journal`] saw, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// Parameters, and the word that it read
    Call(Vec<u8>, u64),
    /// A whole stream
    Stream(Vec<u8>),
}

/// A kernel that writes down what it gets, reads the word of a page, takes as many steps as its first
/// parameter says, and answers with how many calls there were.
pub(crate) struct Journal {
    pub(crate) seen: Arc<Mutex<Vec<Seen>>>,
    pub(crate) word: RegionRange,
    pub(crate) stream: Vec<u8>,
    pub(crate) calls: u64,
}

impl Kernel for Journal {
    fn start(&mut self, run: &mut KernelRun, input: Input) -> Result<(), Code> {
        match input {
            Input::Params => {
                run.regs[0] = 1 + u64::from(run.param_u32(0).ok_or(Code::BadParam)?);
                self.calls += 1;
            }
            Input::Data { first, last } => {
                if first {
                    self.stream.clear();
                }
                self.stream.extend_from_slice(run.bytes());
                if last {
                    self.seen.lock().unwrap().push(Seen::Stream(self.stream.clone()));
                }
                run.regs[0] = 0;
            }
        }
        Ok(())
    }

    fn step(&mut self, run: &mut KernelRun) -> Poll {
        if run.regs[0] > 0 {
            run.regs[0] -= 1;
            return if run.read(self.word) { Poll::Pending } else { Poll::Ready(Code::Overflow) };
        }
        if let Ok(word) = run.read_data().try_into() {
            let seen = Seen::Call(run.bytes().to_vec(), u64::from_le_bytes(word));
            self.seen.lock().unwrap().push(seen);
            let calls = self.calls.to_le_bytes();
            return Poll::Ready(if run.reply(&calls) { Code::Ok } else { Code::Overflow });
        }
        Poll::Ready(Code::Ok)
    }
}

/// A kernel that never ends.
pub(crate) struct Endless;

impl Kernel for Endless {
    fn start(&mut self, _: &mut KernelRun, _: Input) -> Result<(), Code> {
        Ok(())
    }
    fn step(&mut self, _: &mut KernelRun) -> Poll {
        Poll::Pending
    }
}

/// A kernel that answers with its parameters, from the card's own memory.
pub(crate) struct Echo;

impl Kernel for Echo {
    fn start(&mut self, run: &mut KernelRun, _: Input) -> Result<(), Code> {
        if run.bytes().len() > MAX_REPLY { Err(Code::BadParam) } else { Ok(()) }
    }
    fn step(&mut self, run: &mut KernelRun) -> Poll {
        let bytes = run.bytes().to_vec();
        Poll::Ready(if run.reply(&bytes) { Code::Ok } else { Code::Overflow })
    }
}
