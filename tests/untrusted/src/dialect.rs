//! Packets of RPCs and RPC WRITEs (op-codes 0x18 to 0x1c of StRoM's dialect) from a peer that breaks the
//! rules, to a card on which all kernels are loaded; and RPCs of a hostile stateless end to the kernels of
//! a stateful one, with such packets beside.
//!
//! Host 1 has the card. What the peer may not reach stays as it was, each kernel ends, the card becomes idle,
//! and answers the RPC of a peer that keeps the rules.

use starverbs_core::mr::MrAttr;
use starverbs_core::qp::RecvSource;
use starverbs_core::strom::{
    ReplyFlags, ReplyHead, ReplyMemory, ReplyRecord, ReplyTarget, RpcHandler, SLOT_BYTES, TARGET_LEN,
};
use starverbs_core::wire::{Bth, PKEY_DEFAULT};
use starverbs_core::{
    Access, FrameMeta, Mtu, NicConfig, Psn, QpState, QpType, Qpn, SendFlags, SendOp, SendWqe, Sge,
};
use starverbs_kernels::Builtin;
use starverbs_sim::{Faults, Net, QpAt, Recv, Send, Setup, SimCq, SimHost, SimRq, SimSq, StarCard};
use starverbs_star::control::Preference;
use starverbs_star::form::Form;
use zerocopy::IntoBytes;

use crate::bytes::Bytes;

/// Steps of one input; more is not looked at.
const MOST: usize = 200;
/// How far things go on of themselves after the input.
const STEPS: usize = 300_000;
/// What untouched memory holds in the simulator.
const UNTOUCHED: u8 = 0xa5;
/// Bytes of a page that peers may reach, and of memory that they may not.
const PAGE: u64 = 4096;
const GUARD: u64 = 512;
/// Slots for answers.
const SLOTS: u8 = 2;
/// RPC op-codes: the kernels', the program's, and one that nobody has.
const OPS: u64 = 7;
const PROGRAM: u64 = 6;

struct End {
    qpn: Qpn,
    sq: SimSq,
    rq: SimRq,
    cq: SimCq,
}

struct World {
    net: Net,
    ends: [End; 2],
    /// What the peer may reach, of each host: address, key
    pages: [(u64, u32); 2],
    /// What it may not reach, though it knows keys of it
    guarded: Vec<(u64, u32)>,
    star: bool,
}

fn all_rights() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
}

fn end(host: &mut SimHost) -> End {
    let (sq, rq, cq) = (SimSq::new(16), SimRq::new(8, 1), SimCq::new(1 << 14));
    let qpn = host.qp(QpType::Rc, &sq, RecvSource::Own(rq.clone()), [&cq, &cq], false);
    let (addr, lkey) = host.region(u64::from(SLOTS) * SLOT_BYTES as u64, Access::LOCAL_WRITE);
    host.nic.speak_strom(qpn, ReplyMemory { addr, lkey, slots: SLOTS }).expect("an RC queue pair in RESET");
    End { qpn, sq, rq, cq }
}

/// Memory that no peer may touch, with keys.
fn guard(host: &mut SimHost) -> Vec<(u64, u32)> {
    let local = host.region(GUARD, Access::LOCAL_WRITE);
    let foreign = host.nic.alloc_pd().expect("a PD");
    let addr = host.env.memory.alloc(GUARD);
    let (pd, length) = (foreign, GUARD);
    let attr = MrAttr { pd, addr, length, iova: addr, access: all_rights(), ..MrAttr::default() };
    let key = host.nic.reg_mr(attr).expect("a good registration");
    vec![local, (addr, key)]
}

impl World {
    fn new(star: bool, limited: bool) -> World {
        let mut net = Net::new(2, NicConfig::default(), Faults::default(), 7);
        if star {
            for at in 0..2 {
                let form = Form::default();
                net.open_star(at, StarCard { threshold: 100, key: None, boot: 70 + at as u64, form });
            }
        }
        let host = &mut net.hosts[1];
        let guarded = guard(host);
        for code in 1..=5 {
            let kernel = Builtin::from_code(code).expect("there are five").make();
            host.nic.load_kernel(host.pd, code.into(), kernel).expect("the op-code is free");
        }
        host.nic.load_kernel(host.pd, PROGRAM, RpcHandler::Program).expect("the op-code is free");
        let pages = [0, 1].map(|at| {
            let page = net.hosts[at].region(PAGE, all_rights());
            net.hosts[at].env.memory.write(page.0, &[0; PAGE as usize]);
            page
        });
        let ends = [0, 1].map(|at| end(&mut net.hosts[at]));
        let mut world = World { net, ends, pages, guarded, star };
        if star {
            let wants = [Preference::Stateless, Preference::Stateful];
            for (at, want) in wants.into_iter().enumerate() {
                world.net.hosts[at].preference(world.ends[at].qpn, want);
            }
        }
        let access = if limited { Access::LOCAL_WRITE } else { all_rights() };
        /* nobody waits for ever for a receive of the other's */
        let (timeout, retry_cnt, rnr_retry) = (8, 1, 3);
        let setup = Setup { mtu: Mtu::M256, timeout, retry_cnt, rnr_retry, access, ..Setup::default() };
        world.connect(&setup);
        if star {
            world.net.run_for(100_000_000);
        }
        world
    }

    fn connect(&mut self, setup: &Setup) {
        let [a, b] = [0, 1].map(|host| QpAt { host, qpn: self.ends[host].qpn });
        self.net.connect(QpType::Rc, a, b, setup);
    }

    /// An address and a key for whom the input chooses.
    fn target(&self, bytes: &mut Bytes<'_>) -> (u64, u32) {
        let (which, off) = (bytes.byte(), u64::from(bytes.half()));
        let (addr, key) = match which % 8 {
            0..=3 => self.pages[1],
            4 => self.pages[0],
            5 => self.guarded[0],
            6 => self.guarded[1],
            _ => (u64::from(bytes.word()) << 20, bytes.word()),
        };
        (addr.wrapping_add((off % PAGE) & !7), key)
    }

    /// Parameters or payload: a head that is near a good one, and numbers, addresses and keys behind it.
    fn data(&self, head: bool, bytes: &mut Bytes<'_>) -> Vec<u8> {
        let how = bytes.byte();
        let mut data = vec![];
        if head {
            let (addr, rkey) = if how & 1 == 0 { self.pages[0] } else { self.target(bytes) };
            let len = [0, 16, 64, 1024, u32::from(bytes.byte())][usize::from(how >> 1) % 5];
            let flags = ReplyFlags::from_bits_truncate(u32::from(how >> 5));
            data.extend_from_slice(
                ReplyHead::new(&ReplyTarget { addr, rkey, len, imm: 7, flags }).as_bytes(),
            );
        }
        for _ in 0..bytes.byte() % 12 {
            match bytes.byte() % 6 {
                0 => data.extend_from_slice(&self.target(bytes).0.to_le_bytes()),
                1 => data.extend_from_slice(&self.target(bytes).1.to_le_bytes()),
                2 => data.extend_from_slice(&u32::from(bytes.byte() % 12).to_le_bytes()),
                3 => data.extend_from_slice(&u64::from(bytes.half()).to_le_bytes()),
                4 => data.resize(data.len() + usize::from(bytes.byte()), how),
                _ => {
                    let len = usize::from(bytes.byte());
                    data.extend_from_slice(bytes.take(len));
                }
            }
        }
        if how & 0x80 != 0 {
            data.truncate(usize::from(bytes.half()) % (TARGET_LEN + 600));
        }
        data
    }

    /// A packet of the dialect, or near it, from the peer's address.
    fn packet(&mut self, bytes: &mut Bytes<'_>) {
        let (opcode, how) = (bytes.byte(), bytes.half());
        let opcode = if how & 15 == 15 { opcode } else { 0x18 + opcode % 5 };
        let host = &self.net.hosts[1];
        let expected = host.nic.query_qp(self.ends[1].qpn).map_or(Psn::default(), |attr| attr.rq_psn);
        let step = if how & 0x30 == 0x30 { u32::from(bytes.byte()) } else { 0 };
        let psn = expected.plus(step);
        let data = if how & 0x40 == 0 { self.data(opcode == 0x18, bytes) } else { vec![3; 256] };
        let pad = (data.len().wrapping_neg() & 3) as u8;
        let bth =
            Bth::new(opcode, self.ends[1].qpn, psn, how & 0x80 != 0, how & 0x100 != 0, pad, PKEY_DEFAULT);
        let mut frame = bth.as_bytes().to_vec();
        if !matches!(opcode, 0x1a | 0x1b) {
            let len = match how >> 9 & 3 {
                0 | 1 => data.len() as u32,
                2 => u32::from(bytes.half()),
                _ => bytes.word(),
            };
            let op = u64::from(bytes.byte()) % (OPS + 1);
            frame.extend(op.to_be_bytes());
            frame.extend([0; 4]);
            frame.extend(len.to_be_bytes());
        }
        frame.extend(data);
        frame.resize(frame.len() + usize::from(pad), 0);
        if how & 0x8000 != 0 {
            frame.truncate(usize::from(bytes.half()));
        }
        let meta = FrameMeta {
            src: self.net.hosts[0].gid,
            dst: self.net.hosts[1].gid,
            hop_limit: 64,
            traffic_class: 0,
        };
        let now = self.net.now();
        let host = &mut self.net.hosts[1];
        host.nic.handle_frame(&mut host.env, now, &meta, &frame);
    }

    /// The peer posts an RPC, an RPC WRITE or another request with such data.
    fn post(&mut self, bytes: &mut Bytes<'_>) {
        let (how, op) = (bytes.byte(), u64::from(bytes.byte()) % (OPS + 1));
        let kind = match how & 7 {
            0..=4 => SendOp::Rpc,
            5 => SendOp::RpcWrite,
            6 => SendOp::Write,
            _ => SendOp::Send,
        };
        let data = self.data(kind == SendOp::Rpc, bytes);
        let host = &mut self.net.hosts[0];
        let (addr, lkey) = host.region(data.len().max(1) as u64, Access::LOCAL_WRITE);
        host.env.memory.write(addr, &data);
        let (remote_addr, rkey) = if kind.is_rpc() { (op, 0) } else { self.target(bytes) };
        let wqe = SendWqe { op: kind, remote_addr, rkey, flags: SendFlags::SIGNALED, ..SendWqe::default() };
        let half = data.len() as u32 / 2;
        let sges = match how & 0x10 {
            0 => vec![Sge { addr, len: data.len() as u32, lkey }],
            _ => vec![
                Sge { addr, len: half, lkey },
                Sge { addr: addr + u64::from(half), len: data.len() as u32 - half, lkey },
            ],
        };
        let end = &self.ends[0];
        if end.sq.post(Send { wqe, sges, inline: None }).is_ok() {
            self.net.doorbell(0, end.qpn);
        }
    }

    /// What must hold at any time.
    fn look(&self) {
        let host = &self.net.hosts[1];
        assert!(host.env.memory.gaps_intact(), "nothing was written beside registered memory");
        for (addr, _) in &self.guarded {
            let there = host.env.memory.read(*addr, GUARD as usize);
            assert!(there.iter().all(|byte| *byte == UNTOUCHED), "memory was written that no peer may write");
        }
        assert!(host.nic.kernels_running() <= 1, "one queue pair has one request at a kernel");
    }

    fn run(&mut self) {
        for _ in 0..STEPS {
            self.net.transmit();
            if !self.net.is_busy() || !self.net.step() {
                return;
            }
        }
        panic!("the card does not become idle");
    }

    /// A peer that keeps the rules has its answer.
    fn works(&mut self) {
        for at in 0..2 {
            let now = self.net.now();
            self.net.hosts[at].to_state(self.ends[at].qpn, QpState::Err, now).expect("from every state");
        }
        self.run();
        assert_eq!(self.net.hosts[1].nic.kernels_running(), 0, "kernels work for nobody");
        self.ends = [0, 1].map(|at| end(&mut self.net.hosts[at]));
        self.connect(&Setup::default());
        let (addr, rkey) = self.pages[0];
        self.net.hosts[0].env.memory.write(addr, &[0; 64]);
        let head = ReplyHead::new(&ReplyTarget { addr, rkey, len: 64, ..ReplyTarget::default() });
        let host = &mut self.net.hosts[0];
        let (from, lkey) = host.region(TARGET_LEN as u64, Access::LOCAL_WRITE);
        host.env.memory.write(from, head.as_bytes());
        let wqe = SendWqe { op: SendOp::Rpc, remote_addr: 1, ..SendWqe::default() };
        let sges = vec![Sge { addr: from, len: TARGET_LEN as u32, lkey }];
        self.ends[0].sq.post(Send { wqe, sges, inline: None }).expect("there is room");
        self.net.doorbell(0, self.ends[0].qpn);
        self.run();
        let answer = ReplyRecord::decode(self.net.hosts[0].env.memory.read(addr, 64));
        /* GET without parameters */
        assert_eq!(answer.map(|answer| answer.code), Some(2), "a good RPC has its answer");
    }
}

/// Checks one input.
pub fn check(input: &[u8]) {
    let mut bytes = Bytes(input);
    let first = bytes.byte();
    let mut world = World::new(first & 1 != 0, first & 6 == 6);
    for _ in 0..MOST {
        let Some(what) = bytes.next() else { break };
        match what % 8 {
            0..=3 if !world.star || what & 8 != 0 => world.packet(&mut bytes),
            0..=4 => world.post(&mut bytes),
            5 => {
                let (addr, lkey) = world.pages[1];
                let recv = Recv { wr_id: 1, sges: vec![Sge { addr, len: 300, lkey }] };
                _ = world.ends[1].rq.post(recv);
                _ = world.ends[0].rq.post(Recv { wr_id: 2, sges: vec![] });
            }
            6 => {
                let steps = bytes.byte();
                (0..steps).for_each(|_| _ = world.net.step());
            }
            _ => {
                /* a kernel goes, whatever it is in the middle of, and another comes */
                let code = u32::from(bytes.byte()) % 5 + 1;
                let kernel = Builtin::from_code(code).expect("there are five").make();
                let host = &mut world.net.hosts[1];
                host.nic.replace_kernel(host.pd, code.into(), kernel).expect("it is loaded");
            }
        }
        world.look();
        while world.ends.iter().any(|end| end.cq.poll().is_some()) {}
    }
    world.run();
    world.look();
    world.works();
}
