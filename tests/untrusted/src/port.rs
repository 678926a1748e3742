//! Datagrams and unix messages into the receiving half of a port, with real sockets on loopback: what comes
//! out of it is for this process and has a right ICRC, whatever goes in.

use std::cell::RefCell;
use std::net::UdpSocket;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::rc::Rc;

use starverbs_backend::{Rx, host, open, socket_name};
use starverbs_core::wire::{IcrcHeader, icrc};
use starverbs_core::{Counters, Gid, QPN_BLOCK_SHIFT, QPN_GSI};
use starverbs_free_port::free_port;
use starverbs_settings::Settings;

use crate::bytes::Bytes;

/// Datagrams of one input.
const MOST: usize = 16;
/// Times that the port is looked at for what was sent to it.
const LOOKS: usize = 64;
const LOOPBACK: Gid = Gid::from_ipv4([127, 0, 0, 1]);
/// Bytes of a unix message before its frames.
const RUN_HEADER: usize = 48;

struct Port {
    rx: Rx<Rc<Counters>>,
    counters: Rc<Counters>,
    wire: UdpSocket,
    unix: UnixDatagram,
    number: u16,
    block: u32,
}

thread_local! {
    static PORT: RefCell<Port> = RefCell::new(Port::new());
}

/// Checks one input: datagrams, each with a byte that says how it travels and whether its ICRC is put right.
pub fn check(input: &[u8]) {
    PORT.with_borrow_mut(|port| {
        let mut bytes = Bytes(input);
        for _ in 0..MOST {
            let Some(how) = bytes.next() else { break };
            port.datagram(how, &mut bytes);
        }
    });
}

impl Port {
    fn new() -> Port {
        let number = free_port();
        let addrs = Some(vec!["127.0.0.1".parse().expect("an address")]);
        let settings = Settings { port: number, addrs, ..Settings::default() };
        let addrs = host::addresses(&settings).expect("loopback");
        let counters = Rc::new(Counters::default());
        let (_, rx) = open(&settings, &addrs, Rc::clone(&counters)).expect("the port opens");
        let block = rx.blocks().next().expect("a block");
        let wire = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let unix = UnixDatagram::unbound().expect("a socket");
        Port { rx, counters, wire, unix, number, block }
    }

    fn datagram(&mut self, how: u8, bytes: &mut Bytes<'_>) {
        let len = usize::from(bytes.half()) % 9000;
        let mut data = bytes.take(len).to_vec();
        if how & 1 == 0 {
            let mine = if how & 2 == 0 { &mut data[..] } else { &mut [] };
            self.claim(mine);
            if how & 4 == 0 {
                let sport = self.wire.local_addr().expect("it is bound").port();
                seal(&mut data, LOOPBACK, LOOPBACK, sport, self.number);
            }
            self.wire.send_to(&data, ("127.0.0.1", self.number)).expect("loopback takes it");
        } else {
            let mut message = b"SVB1".to_vec();
            message.push(if how & 8 == 0 { 1 } else { how >> 4 });
            message.append(&mut data);
            if how & 2 == 0 && message.len() > RUN_HEADER {
                let frames = &mut message[RUN_HEADER..];
                self.claim(frames);
            }
            if how & 4 == 0 {
                self.seal_run(&mut message);
            }
            let to = SocketAddr::from_abstract_name(socket_name(self.number, self.block)).expect("a name");
            /* one that says nothing to the block is nobody's */
            let _ = self.unix.send_to_addr(&message, &to);
        }
        self.receive();
    }

    /// A frame gets a QPN of this process.
    fn claim(&self, frame: &mut [u8]) {
        if let Some(qpn) = frame.get_mut(5..7) {
            let own = (self.block << QPN_BLOCK_SHIFT >> 8) as u16;
            qpn.copy_from_slice(&((own & 0xfff0) | u16::from(qpn[1] & 15)).to_be_bytes());
        }
    }

    /// The first frame of a run gets the ICRC that its header makes it need.
    fn seal_run(&self, message: &mut [u8]) {
        if message.len() <= RUN_HEADER {
            return;
        }
        let (head, frames) = message.split_at_mut(RUN_HEADER);
        let gid = |at: usize| Gid(std::array::from_fn(|i| head[at + i]));
        let number = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let (src, dst, sport, segment) = (gid(8), gid(24), number(40), usize::from(number(42)));
        let first = segment.min(frames.len());
        seal(&mut frames[..first], src, dst, sport, self.number);
    }

    /// Takes all that comes out.
    fn receive(&mut self) {
        let counters = &self.counters;
        let before: u64 = counters.values().iter().sum();
        for _ in 0..LOOKS {
            if self.rx.recv_all() == 0 && counters.values().iter().sum::<u64>() > before + 2 {
                break;
            }
            while let Some((meta, frame)) = self.rx.next_frame() {
                let multicast = meta.dst.is_multicast();
                assert!(frame.len() >= 12, "shorter than a BTH");
                let qpn = u32::from_be_bytes([0, frame[5], frame[6], frame[7]]);
                let here = multicast || qpn == QPN_GSI || qpn >> QPN_BLOCK_SHIFT == self.block;
                assert!(here, "for somebody else");
            }
            while let Some(request) = self.rx.take_request() {
                self.rx.answer(&request, b"no");
            }
        }
        let _ = self.rx.maintenance(0);
    }
}

/// Puts a frame's last four bytes right.
fn seal(frame: &mut [u8], src: Gid, dst: Gid, sport: u16, dport: u16) {
    let Some((body, icrc)) = frame.split_last_chunk_mut::<4>() else { return };
    if let Some(right) = icrc::of_frame(&IcrcHeader { src, dst, sport, dport, ip_id: 0 }, body) {
        *icrc = right;
    }
}
