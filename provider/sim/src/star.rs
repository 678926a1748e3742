//! A host's StaR ports: two UDP ports, and the queue through which SL's card tells its library.

use starverbs_core::star::env::{SlEvent, StarEnv};
use starverbs_core::star::seal::{Ends, MAX_SEALED, Seal};
use starverbs_core::star::wire::{Crc, Head, PORT_STATEFUL, PORT_STATELESS, Side, fill_checksum};
use starverbs_core::wire::IcrcHeader;
use starverbs_core::{Av, Env, Gid, Qpn, Seg};

use crate::host::SimEnv;
use crate::memory::READ;

/// A frame that waits for the port's flush.
struct Queued {
    from: Side,
    to: Av,
    port: u16,
    /// Header and data, and what was copied at once
    bytes: Vec<u8>,
    payload: Vec<Seg>,
}

/// A frame as it is on the wire, behind its UDP header.
#[derive(Clone, Debug)]
pub struct StarFrame {
    /// Addresses and ports that it travels between
    pub path: IcrcHeader,
    /// From the StaR header to its CRC
    pub bytes: Vec<u8>,
}

/// What a host has of StaR.
pub struct StarPort {
    /// UDP ports of the stateless and the stateful half
    pub ports: [u16; 2],
    /// What the card tells the library
    pub events: Vec<SlEvent>,
    /// Messages by which peers settle roles, and the QP that each is for; `None`: nobody here listens
    pub heard: Option<Vec<(Qpn, Vec<u8>)>>,
    /// Under which control messages leave and come, if under one
    pub seal: Option<Seal>,
    out: Vec<Queued>,
}

impl Default for StarPort {
    fn default() -> Self {
        StarPort {
            ports: [PORT_STATELESS, PORT_STATEFUL],
            events: Vec::new(),
            heard: None,
            seal: None,
            out: Vec::new(),
        }
    }
}

impl StarPort {
    /// Frames that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.out.len()
    }
}

impl SimEnv {
    /// Takes the StaR frames out of the port; payloads are read now, as a socket would.
    pub fn flush_star(&mut self) -> Vec<StarFrame> {
        let SimEnv { memory, star, gid, .. } = self;
        let StarPort { ports, out, .. } = star;
        let finish = |q: Queued| {
            let mut bytes = q.bytes;
            for s in q.payload {
                memory.check(s.addr, s.len as usize, READ);
                bytes.extend_from_slice(memory.read(s.addr, s.len as usize));
            }
            let path = path(*gid, ports[q.from as usize], q.to.dgid, q.port);
            fill_checksum(&path, &mut bytes);
            let mut crc = Crc::new();
            crc.update(&bytes);
            bytes.extend(crc.finish());
            StarFrame { path, bytes }
        };
        out.drain(..).map(finish).collect()
    }
}

fn path(src: Gid, sport: u16, dst: Gid, dport: u16) -> IcrcHeader {
    IcrcHeader { src, dst, sport, dport, ip_id: 0 }
}

impl StarEnv for SimEnv {
    fn send_star(
        &mut self,
        from: Side,
        to: (&Av, u16),
        head: &Head,
        data: &[u8],
        payload: &[Seg],
        volatile: bool,
    ) {
        let (src, dst) = (&self.gid, &to.0.dgid);
        let mut room = [0; MAX_SEALED];
        let sealed = self.star.seal.as_mut();
        let sealed = sealed.and_then(|seal| seal.seal_packet(Ends { src, dst }, head, data, &mut room));
        let mut bytes = match sealed {
            Some((head, len)) => [head.bytes(), &room[..len]].concat(),
            None => [head.bytes(), data].concat(),
        };
        let mut payload = payload.to_vec();
        if volatile {
            for s in payload.drain(..) {
                bytes.extend_from_slice(self.memory.read(s.addr, s.len as usize));
            }
        }
        let (to, port) = (*to.0, to.1);
        self.star.out.push(Queued { from, to, port, bytes, payload });
    }

    fn can_send_star(&self) -> bool {
        self.can_send()
    }

    fn star_load(&mut self, addr: u64) -> Option<[u8; 8]> {
        if self.absent(addr) {
            return None;
        }
        self.memory.check(addr, 8, READ);
        Some(self.memory.word(addr).to_ne_bytes())
    }

    fn star_event(&mut self, event: SlEvent) {
        self.star.events.push(event);
    }
}
