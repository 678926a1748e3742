//! What the measurements share: a port on a thread, and the bare sockets to compare with.
#![allow(dead_code, unreachable_pub)]

use std::net::UdpSocket;
use std::os::fd::AsRawFd;
use std::slice;
use std::time::Duration;

use starverbs_backend::{Payload, RoceTx, Rx, host, open};
use starverbs_core::{Av, Counters, Gid, QPN_BLOCK_SHIFT, Seg};
use starverbs_free_port::free_port;
use starverbs_settings::Settings;

/// How much CPU time each measurement takes.
pub const RUN: Duration = Duration::from_millis(300);
pub const LOOPBACK: Gid = Gid::from_ipv4([127, 0, 0, 1]);

pub struct PortEnd {
    pub tx: RoceTx<&'static Counters>,
    pub rx: Rx<&'static Counters>,
    pub to: Av,
    pub counters: &'static Counters,
}

impl PortEnd {
    /// Two ends that know each other's blocks.
    pub fn pair() -> (PortEnd, PortEnd) {
        let port = free_port();
        let (mut a, mut b) = (PortEnd::open(port), PortEnd::open(port));
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_millis(100) {
            for end in [&mut a, &mut b] {
                end.take(|_| ());
                end.rx.maintenance(start.elapsed().as_nanos() as u64);
            }
        }
        (a, b)
    }

    pub fn open(port: u16) -> PortEnd {
        let settings = Settings { port, ..Settings::default() };
        let addrs = host::addresses(&settings).expect("loopback");
        let counters: &'static Counters = Box::leak(Box::default());
        let (tx, rx) = open(&settings, &addrs, counters).expect("a port");
        let sgid_index = addrs.iter().position(|a| a.gid == LOOPBACK).expect("127.0.0.1") as u8;
        let to = Av { dgid: LOOPBACK, sgid: LOOPBACK, sgid_index, hop_limit: 64, ..Av::default() };
        PortEnd { tx, rx, to, counters }
    }

    pub fn qpn(&self) -> u32 {
        self.rx.blocks().next().expect("a block") << QPN_BLOCK_SHIFT
    }

    pub fn send(&mut self, qpn: u32, payload: &[u8]) {
        let [_, a, b, c] = qpn.to_be_bytes();
        let header = [4, 0, 0xff, 0xff, 0, a, b, c, 0, 0, 0, 1];
        let seg = Seg { addr: payload.as_ptr() as u64, len: payload.len() as u32 };
        // SAFETY: the examples keep the bytes until they flush.
        let payload = unsafe { Payload::new(slice::from_ref(&seg)) };
        self.tx.send_frame(&self.to, &header, payload, 0, false);
    }

    /// Handles what is there; gives the payload's sizes in all and how many frames there were.
    pub fn take(&mut self, mut each: impl FnMut(&[u8])) -> usize {
        self.rx.recv();
        let mut frames = 0;
        while let Some((_, frame)) = self.rx.next_frame() {
            each(&frame[12..]);
            frames += 1;
        }
        frames
    }
}

/// A bare socket of the same kind: unconnected, joined receives, 4 MiB of buffer.
pub fn bare() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.set_nonblocking(true).expect("non-blocking");
    let set = |level, name, value: i32| {
        // SAFETY: the pointer and length describe `value`.
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, std::ptr::from_ref(&value).cast(), 4) };
    };
    set(libc::SOL_UDP, libc::UDP_GRO, 1);
    set(libc::SOL_SOCKET, libc::SO_RCVBUF, 4 << 20);
    set(libc::SOL_SOCKET, libc::SO_SNDBUF, 4 << 20);
    socket
}

/// Cuts what is sent on `socket` to pieces of `size`.
pub fn segment(socket: &UdpSocket, size: i32) {
    let value = std::ptr::from_ref(&size).cast();
    // SAFETY: the pointer and length describe `size`.
    unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, value, 4) };
}

/// Repeats `step` for [`RUN`]; gives CPU seconds for each. Both ends run on the one thread, so that neither
/// other programs nor two cores' distance count.
pub fn cost(mut step: impl FnMut() -> u64) -> f64 {
    let start = cpu_time();
    let mut count = 0;
    loop {
        for _ in 0..64 {
            count += step();
        }
        let spent = cpu_time() - start;
        if spent > RUN * if std::env::args().len() > 1 { 10 } else { 1 } {
            return spent.as_secs_f64() / count as f64;
        }
    }
}

fn cpu_time() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: clock_gettime writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
