//! A port with what the tests need around it.
#![allow(dead_code, unreachable_pub)]

use std::time::{Duration, Instant};

use starverbs_backend::{HostAddr, Payload, RoceTx, Rx, host, open};
use starverbs_core::{Av, Counters, FrameMeta, Gid, Nanos, QPN_BLOCK_SHIFT, Seg};
use starverbs_settings::Settings;

pub use starverbs_free_port::free_port;

pub struct Node {
    pub tx: RoceTx<&'static Counters>,
    pub rx: Rx<&'static Counters>,
    pub counters: &'static Counters,
    pub addrs: Vec<HostAddr>,
    pub got: Vec<(FrameMeta, Vec<u8>)>,
    /// Payload is read until the flush.
    kept: Vec<Vec<u8>>,
    start: Instant,
}

impl Node {
    pub fn new(port: u16) -> Node {
        Node::with(&Settings { port, ..Settings::default() })
    }

    pub fn with(settings: &Settings) -> Node {
        let addrs = host::addresses(settings).expect("loopback");
        let counters: &'static Counters = Box::leak(Box::default());
        let (tx, rx) = open(settings, &addrs, counters).expect("a port");
        Node { tx, rx, counters, addrs, got: Vec::new(), kept: Vec::new(), start: Instant::now() }
    }

    /// A node of another user; `None` where none can be made.
    pub fn of_nobody(settings: &Settings) -> Option<Node> {
        const NOBODY: libc::uid_t = 65534;
        // SAFETY: geteuid cannot fail and takes nothing.
        if unsafe { libc::geteuid() } != 0 {
            eprintln!("skipped: only root can open a socket as another user");
            return None;
        }
        let settings = settings.clone();
        let opened = std::thread::spawn(move || {
            // SAFETY: setfsuid takes no pointers; it changes this thread's user alone, which sockets take
            // theirs from.
            unsafe { libc::setfsuid(NOBODY) };
            Node::with(&settings)
        });
        Some(opened.join().expect("a port"))
    }

    pub fn now(&self) -> Nanos {
        self.start.elapsed().as_nanos() as u64 + 1
    }

    pub fn block(&self) -> u32 {
        self.rx.blocks().next().expect("a first block")
    }

    /// The n-th QPN of the first block.
    pub fn qpn(&self, n: u32) -> u32 {
        (self.block() << QPN_BLOCK_SHIFT) + n
    }

    /// From `ip` to itself.
    pub fn av(&self, ip: &str) -> Av {
        let gid = gid(ip);
        let sgid_index = self.addrs.iter().position(|a| a.gid == gid).expect("a local address") as u8;
        Av { dgid: gid, sgid: gid, sgid_index, hop_limit: 64, ..Av::default() }
    }

    pub fn send(&mut self, to: &Av, qpn: u32, payload: &[u8]) {
        let (pad, kept) = (payload.len().wrapping_neg() as u8 & 3, payload.to_vec());
        self.tx.send_frame(to, &bth(qpn), payload_of(&[seg(&kept)]), pad, false);
        self.kept.push(kept);
    }

    pub fn flush(&mut self) {
        let now = self.now();
        self.tx.flush(now);
        self.kept.clear();
    }

    /// Takes what is there.
    pub fn take(&mut self) {
        self.rx.recv_all();
        while let Some((meta, frame)) = self.rx.next_frame() {
            self.got.push((meta, frame.to_vec()));
        }
    }

    /// Takes what is there, and does what is due.
    pub fn poll(&mut self) {
        self.take();
        let now = self.now();
        self.rx.maintenance(now);
        if let Some(owners) = self.rx.take_owners() {
            self.tx.set_owners(owners);
        }
    }
}

/// Polls all nodes until `done` or a generous limit is over; says whether it is done.
pub fn drive(nodes: &mut [&mut Node], mut done: impl FnMut(&[&mut Node]) -> bool) -> bool {
    let start = Instant::now();
    loop {
        for node in nodes.iter_mut() {
            node.poll();
        }
        if done(nodes) {
            return true;
        }
        if start.elapsed() > Duration::from_secs(60) {
            return false;
        }
    }
}

pub fn gid(ip: &str) -> Gid {
    host::gid_of(ip.parse().expect("an address"))
}

/// Of the tests' bytes, which they keep until they have flushed the port.
pub fn payload_of(segs: &[Seg]) -> Payload<'_> {
    // SAFETY: see above; nobody writes to them.
    unsafe { Payload::new(segs) }
}

pub fn seg(bytes: &[u8]) -> Seg {
    Seg { addr: bytes.as_ptr() as u64, len: bytes.len() as u32 }
}

/// A BTH to `qpn`, with an op-code of no consequence.
pub fn bth(qpn: u32) -> [u8; 12] {
    let [_, a, b, c] = qpn.to_be_bytes();
    [0x04, 0, 0xff, 0xff, 0, a, b, c, 0, 0, 0, 1]
}

/// The ICRC, bit by bit, of an IPv4 packet whose UDP payload is `frame` without its last four bytes: IBTA
/// annex A17.3.3 and volume 1, 7.8.1.
pub fn icrc_v4(src: [u8; 4], dst: [u8; 4], sport: u16, dport: u16, id: u16, body: &[u8]) -> [u8; 4] {
    let udp_len = body.len() as u16 + 12;
    let mut p = vec![0xff; 8];
    p.extend([0x45, 0xff]);
    p.extend((udp_len + 20).to_be_bytes());
    p.extend(id.to_be_bytes());
    p.extend([0x40, 0, 0xff, 17, 0xff, 0xff]);
    p.extend(src);
    p.extend(dst);
    udp_and_rest(p, sport, dport, udp_len, body)
}

/// [`icrc_v4`] for IPv6.
pub fn icrc_v6(src: [u8; 16], dst: [u8; 16], sport: u16, dport: u16, body: &[u8]) -> [u8; 4] {
    let udp_len = body.len() as u16 + 12;
    let mut p = vec![0xff; 8];
    p.extend([0x6f, 0xff, 0xff, 0xff]);
    p.extend(udp_len.to_be_bytes());
    p.extend([17, 0xff]);
    p.extend(src);
    p.extend(dst);
    udp_and_rest(p, sport, dport, udp_len, body)
}

fn udp_and_rest(mut p: Vec<u8>, sport: u16, dport: u16, udp_len: u16, body: &[u8]) -> [u8; 4] {
    p.extend(sport.to_be_bytes());
    p.extend(dport.to_be_bytes());
    p.extend(udp_len.to_be_bytes());
    p.extend([0xff, 0xff]);
    let at = p.len();
    p.extend(body);
    p[at + 4] = 0xff;
    let mut crc = u32::MAX;
    for byte in p {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    (!crc).to_le_bytes()
}

/// Bytes that differ from place to place.
pub fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 256 + salt) as u8).collect()
}
